//! Checks arguments against what their schema says beyond the type: bounds, lengths and patterns.
//!
//! Types, enumerations and unknown names are serde's affair; what is checked here is read from the very
//! schema that clients see, so that the two cannot differ.

use regex_lite::Regex;
use rmcp::model::JsonObject;
use serde_json::Value;

use crate::text;

/// The pattern of a text without NUL.
const NO_NUL: &str = r"^[^\x00]*$";

/// Checks `arguments`, an object, against the object schema `schema`.
///
/// # Errors
/// A sentence that names the argument and its limit.
pub(super) fn check(schema: &JsonObject, arguments: &Value) -> Result<(), String> {
    let (Some(properties), Some(arguments)) =
        (schema.get("properties").and_then(Value::as_object), arguments.as_object())
    else {
        return Ok(());
    };
    for (name, value) in arguments {
        let Some(schema) = properties.get(name) else {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            let name = text::brief(name, 80);
            return Err(format!("unknown argument {name}; there are {}", known.join(", ")));
        };
        one(name, schema, value)?;
    }
    Ok(())
}

fn one(name: &str, schema: &Value, value: &Value) -> Result<(), String> {
    let limit = |key: &str| schema.get(key).and_then(Value::as_u64);
    match value {
        Value::Number(number) => {
            let below = limit("minimum").filter(|least| number.as_u64().is_none_or(|n| n < *least));
            let above = limit("maximum").filter(|most| number.as_u64().is_none_or(|n| n > *most));
            if let Some(least) = below {
                return Err(format!("{name} is {number}; it must be at least {least}"));
            }
            if let Some(most) = above {
                return Err(format!("{name} is {number}; it must be at most {most}"));
            }
        }
        Value::String(text) => string(name, schema, text)?,
        Value::Array(items) => {
            let count = u64::try_from(items.len()).unwrap_or(u64::MAX);
            if let Some(least) = limit("minItems").filter(|least| count < *least) {
                return Err(format!("{name} has {count} entries; it must have at least {least}"));
            }
            if let Some(most) = limit("maxItems").filter(|most| count > *most) {
                return Err(format!("{name} has {count} entries; it can have at most {most}"));
            }
            for (place, item) in items.iter().enumerate() {
                if let Some(schema) = schema.get("items") {
                    one(&format!("{name}[{place}]"), schema, item)?;
                }
            }
        }
        Value::Object(entries) => {
            let count = u64::try_from(entries.len()).unwrap_or(u64::MAX);
            if let Some(most) = limit("maxProperties").filter(|most| count > *most) {
                return Err(format!("{name} has {count} entries; it can have at most {most}"));
            }
            for (key, value) in entries {
                if let Some(schema) = schema.get("propertyNames") {
                    string(&format!("the name {key:.80?} in {name}"), schema, key)?;
                }
                if let (Some(schema), Value::String(text)) =
                    (schema.get("additionalProperties"), value)
                {
                    string(&format!("{key} in {name}"), schema, text)?;
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn string(name: &str, schema: &Value, text: &str) -> Result<(), String> {
    let limit = |key: &str| schema.get(key).and_then(Value::as_u64);
    // Characters, as JSON Schema counts.
    let length = u64::try_from(text.chars().count()).unwrap_or(u64::MAX);
    if let Some(least) = limit("minLength").filter(|least| length < *least) {
        return Err(format!("{name} has {length} characters; it must have at least {least}"));
    }
    if let Some(most) = limit("maxLength").filter(|most| length > *most) {
        return Err(format!("{name} has {length} characters; it can have at most {most}"));
    }
    if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
        if pattern == NO_NUL {
            // A megabyte of source is looked at faster so.
            return match text.contains('\0') {
                true => Err(format!("{name} has a NUL character")),
                false => Ok(()),
            };
        }
        // Every pattern of the list compiles: a test goes through it.
        let matches = Regex::new(&whole(pattern)).is_ok_and(|regex| regex.is_match(text));
        if !matches {
            return Err(format!("{name} does not match {pattern}"));
        }
    }
    Ok(())
}

/// The pattern of JSON Schema (ECMA-262) in the syntax of the regex crate, where `$` is the very end
/// too, but `.` and classes are the same for what the list uses.
fn whole(pattern: &str) -> String {
    format!("(?s){pattern}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Name, list};
    use super::*;

    /// Arguments of every tool that are good and name every property.
    fn good(name: Name) -> Value {
        let sandbox = format!("sb_{}", "0a".repeat(16));
        let run = json!({
            "sandbox_id": sandbox, "timeout_seconds": 5, "cwd": "/a", "env": {"A": "b"},
            "stdin": "x", "max_output_bytes": 4096, "raw": true,
        });
        let with = |more: Value| {
            let mut all = run.clone();
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            all
        };
        match name {
            Name::RunCommand => with(json!({"command": "true"})),
            Name::ExecuteCode => with(json!({"language": "python", "code": "1"})),
            Name::ReadFile => json!({
                "sandbox_id": sandbox, "path": "a", "offset": 1, "limit": 2, "encoding": "base64",
                "max_output_bytes": 4096, "raw": false,
            }),
            Name::WriteFile => json!({
                "sandbox_id": sandbox, "path": "a", "content": "b", "encoding": "utf-8",
                "append": true, "mode": "755",
            }),
            Name::ListFiles => {
                json!({"sandbox_id": sandbox, "path": "a", "recursive": true, "limit": 3})
            }
            Name::StartProcess => json!({
                "sandbox_id": sandbox, "command": "true", "pty": true, "cwd": "/a", "env": {"A": "b"},
            }),
            Name::PollProcess => json!({
                "sandbox_id": sandbox, "process_id": "p1", "stdin": "x", "close_stdin": false,
                "wait_seconds": 1, "cursor": 4, "max_output_bytes": 4096, "raw": false,
            }),
            Name::StopProcess => {
                json!({"sandbox_id": sandbox, "process_id": "p1", "signal": "KILL"})
            }
            Name::CreateSandbox => json!({"name": "a"}),
            Name::DestroySandbox => json!({"sandbox_id": sandbox}),
        }
    }

    fn accepts(name: Name, arguments: &Value) -> bool {
        name.accepts(arguments.as_object().unwrap().clone()).is_ok()
    }

    /// Each tool, each property and its schema.
    fn properties() -> Vec<(Name, String, Value)> {
        let mut all = Vec::new();
        for (name, tool) in Name::ALL.into_iter().zip(list()) {
            let schema = Value::Object((*tool.input_schema).clone());
            for (property, schema) in schema["properties"].as_object().unwrap() {
                all.push((name, property.clone(), schema.clone()));
            }
        }
        all
    }

    fn with(name: Name, property: &str, value: Value) -> Value {
        let mut arguments = good(name);
        arguments[property] = value;
        arguments
    }

    #[test]
    fn every_number_is_taken_at_its_limits_and_refused_beyond() {
        let mut seen = 0;
        for (name, property, schema) in properties() {
            if schema["type"] != "integer" {
                continue;
            }
            seen += 1;
            let (least, most) = (schema["minimum"].as_u64().unwrap(), schema["maximum"].as_u64());
            let most = most.unwrap_or_else(|| panic!("{name:?} {property} has no maximum"));
            for (value, good) in [
                (json!(least), true),
                (json!(most), true),
                (json!(most + 1), false),
                (json!(-1), false),
                (json!(1.5), false),
                (json!("1"), false),
                (json!(null), false),
                (json!([1]), false),
            ] {
                let arguments = with(name, &property, value.clone());
                assert_eq!(accepts(name, &arguments), good, "{name:?} {property} {value}");
            }
            if least > 0 {
                assert!(!accepts(name, &with(name, &property, json!(least - 1))));
            }
        }
        assert!(seen > 10);
    }

    #[test]
    fn every_text_is_taken_at_its_limits_and_refused_beyond() {
        for (name, property, schema) in properties() {
            if schema["type"] != "string" || schema.get("enum").is_some() {
                continue;
            }
            let bounded = schema.get("maxLength").is_some() || schema.get("pattern").is_some();
            assert!(bounded, "{name:?} {property} has no bound");
            for wrong in [json!(1), json!(null), json!(["a"]), json!({"a": "b"}), json!(true)] {
                assert!(
                    !accepts(name, &with(name, &property, wrong.clone())),
                    "{property} {wrong}"
                );
            }
            if let Some(most) = schema["maxLength"].as_u64() {
                let most = usize::try_from(most).unwrap();
                let first = if property == "cwd" { "/" } else { "a" };
                let text = |length: usize| json!(format!("{first}{}", "a".repeat(length - 1)));
                // Base64 has a form of its own.
                assert!(accepts(name, &with(name, &property, text(most))), "{name:?} {property}");
                assert!(!accepts(name, &with(name, &property, text(most + 1))), "{property}");
            }
            if let Some(least) = schema["minLength"].as_u64() {
                assert_eq!(least, 1);
                assert!(!accepts(name, &with(name, &property, json!(""))), "{property}");
            }
            if let Some(pattern) = schema["pattern"].as_str() {
                Regex::new(&whole(pattern)).unwrap();
                assert!(!accepts(name, &with(name, &property, json!("a\0b"))), "{property}");
            }
        }
    }

    #[test]
    fn identifiers_and_environments_have_a_form() {
        let sandbox = "sb_0123456789abcdef0123456789abcdef";
        for (bad, property, name) in [
            ("", "sandbox_id", Name::ReadFile),
            ("sb_0", "sandbox_id", Name::ReadFile),
            ("../sb", "sandbox_id", Name::RunCommand),
            (&format!("{sandbox}\n"), "sandbox_id", Name::ReadFile),
            (&format!("x{sandbox}"), "sandbox_id", Name::DestroySandbox),
            ("p", "process_id", Name::PollProcess),
            ("p1\n", "process_id", Name::StopProcess),
            ("relative", "cwd", Name::RunCommand),
            ("a b", "name", Name::CreateSandbox),
            ("0888", "mode", Name::WriteFile),
            ("TERMINATE", "signal", Name::StopProcess),
            ("cobol", "language", Name::ExecuteCode),
        ] {
            assert!(!accepts(name, &with(name, property, json!(bad))), "{property} {bad:?}");
        }
        assert!(accepts(Name::RunCommand, &with(Name::RunCommand, "sandbox_id", json!(""))));
        let env = |value| accepts(Name::RunCommand, &with(Name::RunCommand, "env", value));
        assert!(env(json!({"A_1": "", "_": "é"})));
        for bad in [
            json!({"A=B": "c"}),
            json!({"": "c"}),
            json!({"1A": "c"}),
            json!({"A": "\0"}),
            json!({"A": 1}),
            json!({"A": null}),
            json!([]),
            json!({"A": "x".repeat(65537)}),
        ] {
            assert!(!env(bad));
        }
        let many = |n: usize| -> Value {
            (0..n).map(|n| (format!("V{n}"), json!("x"))).collect::<serde_json::Map<_, _>>().into()
        };
        assert!(env(many(256)));
        assert!(!env(many(257)));
    }

    #[test]
    fn unknown_arguments_are_refused_and_missing_ones_named() {
        for name in Name::ALL {
            assert!(accepts(name, &good(name)), "{name:?}");
            let error = name.accepts(with(name, "comand", json!("x")).as_object().unwrap().clone());
            assert!(error.unwrap_err().contains("unknown argument comand"), "{name:?}");
        }
        let error = Name::RunCommand.accepts(serde_json::Map::new()).unwrap_err();
        assert!(error.contains("missing field `command`"), "{error}");
    }
}
