use serde_json::json;

use super::*;

fn object(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

#[test]
fn arguments_are_checked_by_every_draft_that_servers_use() {
    for draft in [
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft/2020-12/schema",
    ] {
        let schema = Schema::new(&json!({
            "$schema": draft,
            "type": "object",
            "properties": {
                "path": {"type": "string", "minLength": 1},
                "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}, "maxItems": 2},
            },
            "required": ["path"],
            "additionalProperties": false,
            "$defs": {"edit": {"type": "object", "required": ["old"]}},
        }))
        .unwrap();
        let check = |arguments: Value| schema.check(&arguments);
        check(json!({"path": "a", "edits": [{"old": "x"}]})).unwrap();
        for (bad, wanted) in [
            (json!({}), "path"),
            (json!({"path": 1}), "/path"),
            (json!({"path": ""}), "/path"),
            (json!({"path": "a", "more": 1}), "more"),
            (json!({"path": "a", "edits": [{}]}), "/edits/0"),
            (json!({"path": "a", "edits": [{"old": 1}, {"old": 1}, {"old": 1}]}), "/edits"),
            (json!([]), "object"),
            (json!({"path": "x".repeat(MAX_ARGUMENTS)}), "at most"),
        ] {
            let error = check(bad).unwrap_err();
            assert!(error.contains(wanted), "{error}");
            assert!(error.len() < 2000);
        }
    }
}

#[test]
fn a_schema_that_cannot_be_used_is_refused_with_its_reason() {
    let doubling = |steps: usize| {
        let mut defs = serde_json::Map::new();
        defs.insert("s0".into(), json!({"type": "string"}));
        for n in 1..=steps {
            let below = json!({"$ref": format!("#/$defs/s{}", n - 1)});
            defs.insert(format!("s{n}"), json!({"allOf": [below, below]}));
        }
        json!({"type": "object", "$defs": defs, "allOf": [{"$ref": format!("#/$defs/s{steps}")}]})
    };
    let mut deep = json!({"type": "object"});
    for _ in 0..60 {
        deep = object(json!({"x": deep}));
    }
    for (bad, wanted) in [
        (json!(true), "no object"),
        (json!(null), "no object"),
        (json!({}), "type"),
        (json!({"type": "string"}), "type"),
        (json!({"type": "object", "properties": 1}), "1"),
        (json!({"type": "object", "required": [1]}), "1"),
        (object(json!({"x": {"pattern": "("}})), "regex"),
        (object(json!({"x": {"pattern": "(a{1000}){1000}"}})), "regex"),
        (object(json!({"x": {"$ref": "http://169.254.169.254/x"}})), "reference"),
        (object(json!({"x": {"$ref": "file:///etc/passwd"}})), "reference"),
        (object(json!({"x": {"$ref": "#/nowhere"}})), "reference"),
        (object(json!({"x": {"$ref": "#anchor"}})), "reference"),
        (object(json!({"x": {"$ref": "#"}})), "refers to itself"),
        (json!({"type": "object", "allOf": [{"$ref": "#"}]}), "refers to itself"),
        (json!({"type": "object", "$ref": "#"}), "refers to itself"),
        (object(json!({"x": {"$dynamicRef": "#x"}})), "$dynamicRef"),
        (object(json!({"x": {"$id": "http://x/"}})), "$id"),
        (doubling(20), "parts"),
        (deep, "levels"),
        (object(json!({"x": {"description": "x".repeat(MAX_BYTES)}})), "bytes"),
        (object(json!({"pa\u{200b}th": {}})), "hidden"),
        (object(json!({"x": {"enum": ["a\u{e0041}"]}})), "hidden"),
    ] {
        let error = Schema::new(&bad).unwrap_err();
        assert!(error.contains(wanted), "{error} for {bad:.200}");
    }
    Schema::new(&doubling(5)).unwrap();
}

#[test]
fn a_pattern_that_backtracks_for_ever_ends() {
    let schema = Schema::new(&object(json!({"x": {"pattern": "^(a|a)*(?=b)c$"}}))).unwrap();
    schema.check(&json!({"x": "a".repeat(5000)})).unwrap_err();
}

#[test]
fn prose_is_stripped_and_properties_that_have_its_names_are_not() {
    let schema = clean(&json!({
        "type": "object", "description": "do\u{200b} it",
        "properties": {"description": {"type": "string", "title": "a\u{202e}b", "default": ["\u{feff}"]}},
    }))
    .unwrap();
    assert_eq!(schema["description"], "do it");
    let property = &schema["properties"]["description"];
    assert_eq!(property, &json!({"type": "string", "title": "ab", "default": [""]}));
}
