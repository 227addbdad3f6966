//! The input schema of a wrapped server's tool, and the check of arguments against it.
//!
//! The schema comes from a guest, so its cost is bounded before it is compiled. A reference may only
//! lead into the same schema, and the schema with every reference in place must have a limited number
//! of parts: that leaves out circles, and references to references that double with each step.

use jsonschema::{PatternOptions, Validator};
use rmcp::model::JsonObject;
use serde_json::Value;

use crate::text;

/// Most bytes of a schema as JSON.
const MAX_BYTES: usize = 64 * 1024;
/// Most levels of a schema, those that references add included.
const MAX_DEPTH: u32 = 48;
/// Most subschemas once every reference is in place.
const MAX_PARTS: u32 = 4096;
/// Most bytes of the arguments of a call as JSON.
const MAX_ARGUMENTS: usize = 4 << 20;
/// Most steps and bytes that one pattern may take.
const BACKTRACKS: usize = 100_000;
const PATTERN_BYTES: usize = 1 << 20;
/// Most characters of a complaint about arguments.
const MAX_COMPLAINT: usize = 500;

/// Keywords whose value is a schema or an array of schemas.
const SCHEMAS: [&str; 17] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
];
/// Keywords whose value holds schemas by name.
const MAPS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// Keywords that name places or lead to other places than a pointer into the same schema does.
const REFUSED: [&str; 6] =
    ["$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "id"];
/// Keywords with text for people and models.
const PROSE: [&str; 5] = ["title", "description", "$comment", "examples", "default"];

/// A checked schema.
#[derive(Debug)]
pub(super) struct Schema {
    /// As clients see it.
    pub(super) shown: JsonObject,
    validator: Validator,
}

impl Schema {
    /// Takes a tool's `inputSchema`.
    ///
    /// # Errors
    /// A sentence that says why the schema cannot be used.
    pub(super) fn new(schema: &Value) -> Result<Self, String> {
        let shown = clean(schema)?;
        if shown.get("type").and_then(Value::as_str) != Some("object") {
            return Err("its type is not \"object\"".to_owned());
        }
        let mut checked = shown.clone();
        // References are pointers into the schema itself, whatever it calls itself.
        checked.remove("$id");
        let checked = Value::Object(checked);
        let mut parts = Parts { root: &checked, left: MAX_PARTS };
        parts.count(&checked, MAX_DEPTH)?;
        let validator = jsonschema::options()
            .offline()
            .with_pattern_options(
                PatternOptions::fancy_regex()
                    .backtrack_limit(BACKTRACKS)
                    .size_limit(PATTERN_BYTES)
                    .dfa_size_limit(PATTERN_BYTES),
            )
            .build(&checked)
            .map_err(|error| complaint(&error))?;
        Ok(Self { shown, validator })
    }

    /// Checks the arguments of a call.
    ///
    /// # Errors
    /// A sentence that names the place and what is wrong there.
    pub(super) fn check(&self, arguments: &Value) -> Result<(), String> {
        let bytes = serde_json::to_vec(arguments).map_or(usize::MAX, |json| json.len());
        if bytes > MAX_ARGUMENTS {
            return Err(format!("they have {bytes} bytes; at most {MAX_ARGUMENTS} are passed on"));
        }
        self.validator.validate(arguments).map_err(|error| complaint(&error))
    }
}

fn complaint(error: &jsonschema::ValidationError<'_>) -> String {
    let place = error.instance_path().to_string();
    let place = if place.is_empty() { String::new() } else { format!("{place}: ") };
    text::safe(&format!("{place}{error}").chars().take(MAX_COMPLAINT).collect::<String>())
}

/// A schema as clients may see it: an object of bounded size, without hidden characters in its prose.
///
/// # Errors
/// It is no object, too large, or has hidden characters where they mean something.
pub(super) fn clean(schema: &Value) -> Result<JsonObject, String> {
    let Value::Object(schema) = schema else { return Err("it is no object".to_owned()) };
    let bytes = serde_json::to_vec(schema).map_or(usize::MAX, |json| json.len());
    if bytes > MAX_BYTES {
        return Err(format!("it has {bytes} bytes; at most {MAX_BYTES} are taken"));
    }
    let mut schema = Value::Object(schema.clone());
    strip(&mut schema, false)?;
    match schema {
        Value::Object(schema) => Ok(schema),
        _ => Err("it is no object".to_owned()),
    }
}

/// Strips prose; `prose`: all texts of this value are.
fn strip(value: &mut Value, prose: bool) -> Result<(), String> {
    let hidden = |text: &str| text.chars().any(text::is_hidden);
    match value {
        Value::String(text) if prose => *text = text::stripped(text),
        Value::String(text) if hidden(text) => {
            return Err(format!("{} has hidden characters", text::brief(text, 80)));
        }
        Value::Array(items) => {
            for item in items {
                strip(item, prose)?;
            }
        }
        Value::Object(entries) => {
            for (key, value) in entries.iter_mut() {
                if hidden(key) {
                    let key = text::brief(key, 80);
                    return Err(format!("the name {key} has hidden characters"));
                }
                // A property may have such a name, and then has a schema.
                let named = PROSE.contains(&key.as_str()) && !value.is_object();
                strip(value, prose || named)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Counts the parts of a schema with each reference in place.
struct Parts<'a> {
    root: &'a Value,
    left: u32,
}

impl<'a> Parts<'a> {
    fn count(&mut self, schema: &'a Value, depth: u32) -> Result<(), String> {
        let too_large = || {
            format!(
                "with its references in place it has more than {MAX_PARTS} parts or {MAX_DEPTH} levels, \
                 or refers to itself"
            )
        };
        let depth = depth.checked_sub(1).ok_or_else(too_large)?;
        self.left = self.left.checked_sub(1).ok_or_else(too_large)?;
        let Value::Object(schema) = schema else { return Ok(()) };
        for (key, value) in schema {
            let key = key.as_str();
            match value {
                _ if REFUSED.contains(&key) && value.is_string() => {
                    return Err(format!("it uses {key}, which Casulo does not follow"));
                }
                Value::Bool(true) if REFUSED.contains(&key) => {
                    return Err(format!("it uses {key}, which Casulo does not follow"));
                }
                Value::String(_) if key == "$id" => {
                    return Err("it has an $id inside, which Casulo does not follow".to_owned());
                }
                Value::String(target) if key == "$ref" => {
                    let target = self.target(target)?;
                    self.count(target, depth)?;
                }
                Value::Array(items) if SCHEMAS.contains(&key) => {
                    for item in items {
                        self.count(item, depth)?;
                    }
                }
                value if SCHEMAS.contains(&key) => self.count(value, depth)?,
                Value::Object(entries) if MAPS.contains(&key) => {
                    for value in entries.values() {
                        self.count(value, depth)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn target(&self, reference: &str) -> Result<&'a Value, String> {
        let pointer = reference.strip_prefix('#').filter(|p| p.is_empty() || p.starts_with('/'));
        let pointer = pointer.filter(|pointer| !pointer.contains('%'));
        let target = pointer.and_then(|pointer| self.root.pointer(pointer));
        target.ok_or_else(|| {
            format!("its reference {} does not lead into it", text::brief(reference, 80))
        })
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
