//! The input schema of a wrapped server's tool, and the check of arguments against it.
//!
//! The schema comes from a guest, so its cost is bounded before it is compiled: a reference may only
//! lead into the same schema, and the schema with every reference in place must have a limited number
//! of parts, which leaves out references to references that double with each step.
//!
//! References that form a circle (trees, filters of filters) have no end in place. [`Parts::unfolded`]
//! replaces such a schema by one that ends after some levels of arguments; what is deeper is for the
//! server alone to check.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ptr;

use jsonschema::{PatternOptions, Validator};
use rmcp::model::JsonObject;
use serde_json::{Map, Value, json};

use crate::text;

/// Most bytes of a schema as JSON.
const MAX_BYTES: usize = 64 * 1024;
/// Most levels of a schema, those that references add included.
const MAX_DEPTH: u32 = 48;
/// Most subschemas once every reference is in place.
const MAX_PARTS: u32 = 4096;
/// Most levels of arguments for which a schema with circles is unfolded.
const MAX_ROUNDS: u32 = 8;
/// Most bytes of the schema as JSON times those levels, if there is more than one.
const MAX_COPIES: usize = 2 * MAX_BYTES;
/// Most bytes of the arguments of a call as JSON.
const MAX_ARGUMENTS: usize = 4 << 20;
/// Most steps and bytes that one pattern may take.
const BACKTRACKS: usize = 100_000;
const PATTERN_BYTES: usize = 1 << 20;
/// Most characters of a complaint about arguments.
const MAX_COMPLAINT: usize = 500;

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
    /// Of a schema with circles, the copies for all levels are large: they are made for each call, so
    /// that a list of a thousand such tools is not kept as many times over.
    validator: Option<Validator>,
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
        let (validator, circles) = compile(&shown)?;
        Ok(Self { shown, validator: (!circles).then_some(validator) })
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
        let made;
        let validator = match &self.validator {
            Some(validator) => validator,
            None => {
                (made, _) = compile(&self.shown)?;
                &made
            }
        };
        validator.validate(arguments).map_err(|error| complaint(&error))
    }
}

/// The validator of a schema, and whether the schema has circles.
///
/// # Errors
/// A sentence that says why the schema cannot be used.
fn compile(shown: &JsonObject) -> Result<(Validator, bool), String> {
    let mut checked = shown.clone();
    // References are pointers into the schema itself, whatever it calls itself.
    checked.remove("$id");
    let checked = Value::Object(checked);
    let checked = Parts::new(&checked)?.without_circles()?;
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
    Ok((validator, matches!(checked, Cow::Owned(_))))
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

/// To what the schemas of a keyword apply.
#[derive(Clone, Copy, PartialEq)]
enum Applies {
    /// To the very value that the keyword's own schema applies to.
    Here,
    /// To what is inside of that value.
    Inside,
    /// To nothing, unless a reference leads there.
    Nowhere,
}

/// The schemas that a keyword's value consists of.
fn subschemas<'a>(keyword: &str, value: &'a Value) -> (Applies, Vec<&'a Value>) {
    let (applies, by_name) = match keyword {
        "allOf" | "anyOf" | "else" | "extends" | "if" | "not" | "oneOf" | "then" => {
            (Applies::Here, false)
        }
        "dependencies" | "dependentSchemas" => (Applies::Here, true),
        "additionalItems"
        | "additionalProperties"
        | "contains"
        | "contentSchema"
        | "items"
        | "prefixItems"
        | "propertyNames"
        | "unevaluatedItems"
        | "unevaluatedProperties" => (Applies::Inside, false),
        "patternProperties" | "properties" => (Applies::Inside, true),
        "$defs" | "definitions" => (Applies::Nowhere, true),
        _ => return (Applies::Nowhere, Vec::new()),
    };
    let schemas = match value {
        Value::Object(entries) if by_name => entries.values().collect(),
        _ if by_name => Vec::new(),
        Value::Array(items) => items.iter().collect(),
        value => vec![value],
    };
    (applies, schemas)
}

/// What a reference leads to: a place in the schema itself.
fn target<'a>(root: &'a Value, reference: &str) -> Result<&'a Value, String> {
    let pointer = reference.strip_prefix('#').filter(|p| p.is_empty() || p.starts_with('/'));
    let pointer = pointer.filter(|pointer| !pointer.contains('%'));
    let target = pointer.and_then(|pointer| root.pointer(pointer));
    target.ok_or_else(|| {
        format!("its reference {} does not lead into it", text::brief(reference, 80))
    })
}

fn too_large() -> String {
    format!("with its references in place it has more than {MAX_PARTS} parts or {MAX_DEPTH} levels")
}

/// Counts the parts of a schema without circles, each reference in place.
struct Count<'a> {
    root: &'a Value,
    left: u32,
}

impl<'a> Count<'a> {
    /// # Errors
    /// There are too many, or they are too deep.
    fn check(root: &'a Value) -> Result<(), String> {
        Count { root, left: MAX_PARTS }.count(root, MAX_DEPTH)
    }

    fn count(&mut self, schema: &'a Value, depth: u32) -> Result<(), String> {
        let depth = depth.checked_sub(1).ok_or_else(too_large)?;
        self.left = self.left.checked_sub(1).ok_or_else(too_large)?;
        for (key, value) in schema.as_object().into_iter().flatten() {
            if let ("$ref", Value::String(reference)) = (key.as_str(), value) {
                self.count(target(self.root, reference)?, depth)?;
            }
            let (applies, schemas) = subschemas(key, value);
            if applies != Applies::Nowhere {
                for schema in schemas {
                    self.count(schema, depth)?;
                }
            }
        }
        Ok(())
    }
}

/// A part of a schema, by its address.
type Part = *const Value;

/// The parts of a schema, each once, and how they lead to one another.
struct Parts<'a> {
    root: &'a Value,
    all: HashSet<Part>,
    /// From parts to those that apply to the same value, and to those that apply to what is inside.
    here: Vec<(Part, Part)>,
    inside: Vec<(Part, Part)>,
    references: Vec<Reference<'a>>,
    circles: Circles,
}

struct Reference<'a> {
    from: Part,
    to: &'a Value,
    /// Whether it stands below a keyword that applies to what is inside of a value.
    inside: bool,
}

#[derive(Default)]
struct Circles {
    /// The parts that lead into a circle.
    leading: HashSet<Part>,
    /// The parts with a reference within circles, and whether it takes a level of the arguments.
    references: HashMap<Part, bool>,
}

impl<'a> Parts<'a> {
    /// # Errors
    /// A keyword or reference that is not followed, or a circle that takes no level of the arguments:
    /// it would go on for ever with one value.
    fn new(root: &'a Value) -> Result<Self, String> {
        let mut parts = Self {
            root,
            all: HashSet::new(),
            here: Vec::new(),
            inside: Vec::new(),
            references: Vec::new(),
            circles: Circles::default(),
        };
        parts.walk(root, false)?;
        // Places that only references make a schema, such as OpenAPI's #/components/schemas/x.
        let mut next = 0;
        while let Some(reference) = parts.references.get(next) {
            parts.walk(reference.to, false)?;
            next += 1;
        }
        let references = || parts.references.iter().map(|r| (r.from, ptr::from_ref(r.to)));
        if !leading(parts.here.iter().copied().chain(references())).is_empty() {
            return Err("it refers to itself for one and the same value".to_owned());
        }
        let edges = || parts.here.iter().chain(&parts.inside).copied().chain(references());
        let leading_in = leading(edges());
        let coming_out = leading(edges().map(|(from, to)| (to, from)));
        let within = |part: &Part| leading_in.contains(part) && coming_out.contains(part);
        let circling = parts.references.iter();
        let circling = circling.filter(|r| within(&r.from) && within(&ptr::from_ref(r.to)));
        let references = circling.map(|r| (r.from, r.inside)).collect();
        parts.circles = Circles { leading: leading_in, references };
        Ok(parts)
    }

    fn walk(&mut self, schema: &'a Value, inside: bool) -> Result<(), String> {
        if !self.all.insert(schema) {
            return Ok(());
        }
        for (key, value) in schema.as_object().into_iter().flatten() {
            match (key.as_str(), value) {
                (key, Value::String(_) | Value::Bool(true)) if REFUSED.contains(&key) => {
                    return Err(format!("it uses {key}, which Casulo does not follow"));
                }
                ("$id", Value::String(_)) => {
                    return Err("it has an $id inside, which Casulo does not follow".to_owned());
                }
                ("$ref", Value::String(reference)) => {
                    let to = target(self.root, reference)?;
                    self.references.push(Reference { from: schema, to, inside });
                }
                _ => {}
            }
            let (applies, schemas) = subschemas(key, value);
            let edges = schemas.iter().map(|part| (ptr::from_ref(schema), ptr::from_ref(*part)));
            match applies {
                Applies::Here => self.here.extend(edges),
                Applies::Inside => self.inside.extend(edges),
                Applies::Nowhere => {}
            }
            for part in schemas {
                self.walk(part, inside || applies == Applies::Inside)?;
            }
        }
        Ok(())
    }

    /// The schema itself if it has no circles, else unfolded for as many levels as its size allows.
    ///
    /// # Errors
    /// It is too large, with circles even for one level.
    fn without_circles(&self) -> Result<Cow<'a, Value>, String> {
        if !self.circles.leading.contains(&ptr::from_ref(self.root)) {
            Count::check(self.root)?;
            return Ok(Cow::Borrowed(self.root));
        }
        let bytes = serde_json::to_vec(self.root).map_or(usize::MAX, |json| json.len());
        let most = MAX_COPIES.checked_div(bytes).and_then(|most| u32::try_from(most).ok());
        for rounds in (2..=most.unwrap_or(1).min(MAX_ROUNDS)).rev() {
            let unfolded = self.unfolded(rounds);
            if Count::check(&unfolded).is_ok() {
                return Ok(Cow::Owned(unfolded));
            }
        }
        let unfolded = self.unfolded(1);
        Count::check(&unfolded)?;
        Ok(Cow::Owned(unfolded))
    }

    /// A schema without circles that allows whatever this one does, and refuses what this one refuses
    /// in the first `rounds` levels of its circles.
    ///
    /// It is `rounds` copies of this one. A reference within circles that takes a level of the arguments
    /// leads from each copy to the next, and from the last to a schema that allows everything. So the
    /// size grows with `rounds` alone, and `$ref` keeps what stands beside it, which counts in some
    /// drafts and not in others.
    ///
    /// Where allowing more in a part would refuse more around it, the keyword around is loosened in every
    /// copy: when their schemas lead into a circle, `oneOf` becomes `anyOf`, and `not`, `if` with `then`
    /// and `else`, and the `maxContains` of `contains` are left out. `unevaluatedProperties` and
    /// `unevaluatedItems` need nothing of the kind, for what allows everything has everything evaluated.
    fn unfolded(&self, rounds: u32) -> Value {
        let mut copies = Map::new();
        // The older drafts know no schema `true` here.
        copies.insert("0".to_owned(), json!({"additionalProperties": {}, "items": {}}));
        for round in 1..=rounds {
            copies.insert(round.to_string(), self.copy(self.root, round, rounds));
        }
        let mut unfolded = Map::new();
        if let Some(draft) = self.root.get("$schema") {
            unfolded.insert("$schema".to_owned(), draft.clone());
        }
        unfolded.insert("$ref".to_owned(), format!("#/definitions/{rounds}").into());
        // A keyword of every draft's meta-schema.
        unfolded.insert("definitions".to_owned(), Value::Object(copies));
        Value::Object(unfolded)
    }

    /// A copy for arguments that have `round` of `rounds` levels left.
    fn copy(&self, value: &Value, round: u32, rounds: u32) -> Value {
        let entries = match value {
            Value::Object(entries) => entries,
            Value::Array(items) => {
                return items.iter().map(|item| self.copy(item, round, rounds)).collect();
            }
            value => return value.clone(),
        };
        let part = ptr::from_ref(value);
        if !self.all.contains(&part) {
            let copied = entries.iter();
            return copied
                .map(|(key, value)| (key.clone(), self.copy(value, round, rounds)))
                .collect();
        }
        let leading = |keyword: &str| {
            entries.get(keyword).is_some_and(|value| {
                let (_, schemas) = subschemas(keyword, value);
                schemas.into_iter().any(|s| self.circles.leading.contains(&ptr::from_ref(s)))
            })
        };
        let (mut copy, mut any) = (Map::new(), None);
        for (key, value) in entries {
            let copied = match (key.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    let round = match self.circles.references.get(&part) {
                        Some(true) => round.saturating_sub(1),
                        Some(false) => round,
                        None => rounds,
                    };
                    let place = if round == 0 { "" } else { reference.trim_start_matches('#') };
                    format!("#/definitions/{round}{place}").into()
                }
                ("oneOf", Value::Array(_)) if leading("oneOf") => {
                    any = Some(json!({"anyOf": self.copy(value, round, rounds)}));
                    continue;
                }
                // What it had evaluated still counts so.
                ("if", _) if leading("if") => json!({"$ref": "#/definitions/0"}),
                ("then" | "else", _) if leading("if") => continue,
                ("not", _) if leading("not") => continue,
                ("maxContains", _) if leading("contains") => continue,
                _ => self.copy(value, round, rounds),
            };
            copy.insert(key.clone(), copied);
        }
        if let Some(any) = any {
            // Beside an `anyOf` that may be there already.
            let all = copy.entry("allOf").or_insert_with(|| json!([]));
            if let Value::Array(all) = all {
                all.push(any);
            }
        }
        Value::Object(copy)
    }
}

/// The parts that lead into a circle of `edges`: those that are left when parts that lead nowhere are
/// taken away as long as there are any.
fn leading(edges: impl Iterator<Item = (Part, Part)>) -> HashSet<Part> {
    let mut ways: HashMap<Part, usize> = HashMap::new();
    let mut back: HashMap<Part, Vec<Part>> = HashMap::new();
    for (from, to) in edges {
        *ways.entry(from).or_default() += 1;
        ways.entry(to).or_default();
        back.entry(to).or_default().push(from);
    }
    let ends = ways.iter().filter(|(_, ways)| **ways == 0);
    let mut ends: Vec<Part> = ends.map(|(part, _)| *part).collect();
    while let Some(end) = ends.pop() {
        for from in back.remove(&end).unwrap_or_default() {
            if let Some(ways) = ways.get_mut(&from) {
                *ways = ways.saturating_sub(1);
                if *ways == 0 {
                    ends.push(from);
                }
            }
        }
    }
    ways.into_iter().filter(|(_, ways)| *ways > 0).map(|(part, _)| part).collect()
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
