use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::*;

const DRAFTS: [&str; 4] = [
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
];

fn object(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

#[test]
fn arguments_are_checked_by_every_draft_that_servers_use() {
    for draft in
        ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
    {
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
        (object(json!({"x": {"$ref": "#/properties/x"}})), "refers to itself"),
        (json!({"type": "object", "allOf": [{"$ref": "#"}]}), "refers to itself"),
        (json!({"type": "object", "$ref": "#"}), "refers to itself"),
        (json!({"type": "object", "dependentSchemas": {"a": {"$ref": "#"}}}), "refers to itself"),
        (json!({"type": "object", "if": {"not": {"$ref": "#"}}}), "refers to itself"),
        (
            json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {
                "a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]},
                "b": {"$ref": "#/$defs/a"},
            }}),
            "refers to itself",
        ),
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

/// A schema with the argument `v`, which is the definition `t`.
fn defined(t: Value) -> Value {
    json!({"type": "object", "properties": {"v": {"$ref": "#/$defs/t"}}, "$defs": {"t": t}})
}

fn tree() -> Value {
    defined(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/t"}},
        },
        "required": ["name"],
        "additionalProperties": false,
    }))
}

/// A value `levels` below a `key`, as an only item where `list` says so.
fn below(key: &str, list: bool, levels: u32, value: Value) -> Value {
    (0..levels).fold(value, |value, _| {
        let value = if list { json!([value]) } else { value };
        json!({"name": "n", key: value})
    })
}

/// Whether a schema takes `v`.
fn takes(schema: &Schema, v: Value) -> bool {
    schema.check(&json!({"v": v})).is_ok()
}

#[test]
fn a_tree_is_checked_in_its_first_levels_and_the_rest_is_for_the_server() {
    for draft in [None].into_iter().chain(DRAFTS.map(Some)) {
        let mut whole = tree();
        if let Some(draft) = draft {
            whole["$schema"] = draft.into();
        }
        let schema = Schema::new(&whole).unwrap();
        assert_eq!(Value::Object(schema.shown.clone()), whole, "clients see it as it was");
        for above in 0..MAX_ROUNDS {
            let nodes = |node: Value| below("children", true, above, node);
            assert!(takes(&schema, nodes(json!({"name": "x"}))));
            assert!(takes(&schema, nodes(json!({"name": "x", "children": []}))));
            for bad in [
                json!({}),
                json!({"name": 1}),
                json!({"name": "x", "more": 1}),
                json!({"name": "x", "children": {}}),
                json!("x"),
            ] {
                let error = schema.check(&json!({"v": nodes(bad.clone())})).unwrap_err();
                let place = format!("/v{}", "/children/0".repeat(above as usize));
                assert!(error.starts_with(&place), "{bad} at {above}: {error}");
            }
        }
        assert!(takes(&schema, below("children", true, MAX_ROUNDS, json!({"name": 1}))));
        // A fault above is found with any depth below it.
        let deep = below("children", true, 100, json!({"name": 1}));
        assert!(takes(&schema, deep.clone()));
        let deep = below("children", true, 3, json!({"children": [deep]}));
        assert!(!takes(&schema, deep));
    }
}

#[test]
fn circles_as_generators_write_them_are_checked() {
    // Python's pydantic: tagged unions, in which each kind refers to all.
    let kind = |name: &str, more: Value| {
        let mut kind = json!({
            "type": "object",
            "properties": {"op": {"const": name}},
            "required": ["op"],
            "additionalProperties": false,
        });
        for (key, value) in more.as_object().unwrap() {
            kind["properties"][key] = value.clone();
            kind["required"].as_array_mut().unwrap().push(json!(key));
        }
        kind
    };
    let kinds = ["And", "Not", "Eq"].map(|kind| json!({"$ref": format!("#/$defs/{kind}")}));
    let any = json!({
        "discriminator": {"propertyName": "op", "mapping": {"and": "#/$defs/And"}},
        "oneOf": kinds,
    });
    let filter = json!({
        "type": "object",
        "properties": {"v": any},
        "required": ["v"],
        "$defs": {
            "And": kind("and", json!({"of": {"type": "array", "items": any}})),
            "Not": kind("not", json!({"of": any})),
            "Eq": kind("eq", json!({"field": {"type": "string"}})),
        },
    });
    let schema = Schema::new(&filter).unwrap();
    let (good, bad) = (json!({"op": "eq", "field": "a"}), json!({"op": "eq", "field": 1}));
    for (leaf, wanted) in [(&good, true), (&bad, false), (&json!({"op": "or"}), false)] {
        let not = json!({"op": "not", "of": leaf});
        let and = json!({"op": "and", "of": [good, not, {"op": "and", "of": []}]});
        for value in [leaf, &not, &and, &json!({"op": "not", "of": and})] {
            assert_eq!(takes(&schema, value.clone()), wanted, "{value}");
        }
    }
    let deep = (0..60).fold(good, |of, _| json!({"op": "not", "of": of}));
    assert!(takes(&schema, deep), "what is deep is left to the server");

    // zod: places in properties, and the schema itself.
    let lazy = object(json!({
        "v": {"anyOf": [{"type": "string"}, object(json!({
            "left": {"$ref": "#/properties/v"},
            "right": {"$ref": "#/properties/v/anyOf/1"},
        }))]},
        "again": {"$ref": "#"},
    }));
    let schema = Schema::new(&lazy).unwrap();
    for (value, wanted) in [
        (json!("x"), true),
        (json!({"left": "x", "right": {"left": {"left": "x"}}}), true),
        (json!(1), false),
        (json!({"left": {"right": "x"}}), false),
        (json!({"left": {"right": {"right": {"left": 1}}}}), false),
    ] {
        assert_eq!(takes(&schema, value.clone()), wanted, "{value}");
        let again = json!({"again": {"again": {"v": value}}});
        assert_eq!(schema.check(&again).is_ok(), wanted, "{again}");
    }

    // OpenAPI: definitions at a place of their own, with names that a pointer escapes.
    let named = json!({
        "type": "object",
        "properties": {"v": {"$ref": "#/components/schemas/a~1b~0c"}},
        "components": {"schemas": {
            "a/b~c": object(json!({"next": {"$ref": "#/components/schemas/other"}, "n": {"type": "null"}})),
            "other": object(json!({"next": {"$ref": "#/components/schemas/a~1b~0c"}, "s": {"type": "string"}})),
        }},
    });
    let schema = Schema::new(&named).unwrap();
    for levels in 0..MAX_ROUNDS {
        let (right, wrong) = if levels % 2 == 0 { ("n", "s") } else { ("s", "n") };
        assert!(takes(&schema, below("next", false, levels, json!({wrong: null}))));
        assert!(!takes(&schema, below("next", false, levels, json!({"n": 1, "s": 1}))));
        let value = if right == "n" { json!(null) } else { json!("x") };
        assert!(takes(&schema, below("next", false, levels, json!({right: value}))));
    }
}

#[test]
fn what_is_right_passes_whatever_keyword_is_around_the_end() {
    let t = json!({"$ref": "#/$defs/t"});
    let modern = &DRAFTS[2..];
    for (drafts, keywords) in [
        (&DRAFTS[..], json!({"properties": {"x": {"not": t}}})),
        (&DRAFTS[..], json!({"properties": {"x": {"not": {"not": t}}}})),
        (&DRAFTS[..], json!({"properties": {"x": {"oneOf": [t, {"type": "string"}]}}})),
        (
            &DRAFTS[..],
            json!({"properties": {"x": {
                "anyOf": [{"type": "object"}, {"type": "string"}],
                "oneOf": [{"properties": {"x": t}, "required": ["x"]}, {"not": {"required": ["x"]}}],
            }}}),
        ),
        (&DRAFTS[1..], json!({"properties": {"x": {"if": t, "then": {"type": "object"}}}})),
        (
            &DRAFTS[1..],
            json!({"properties": {"x": {"if": {"not": t}, "then": {"type": "string"}}}}),
        ),
        (
            modern,
            json!({
                "properties": {"x": {"anyOf": [{"type": "string"}, t]}},
                "unevaluatedProperties": false,
            }),
        ),
        (
            modern,
            json!({
                "allOf": [{"anyOf": [{"properties": {"x": t}}]}],
                "unevaluatedProperties": false,
            }),
        ),
        (
            modern,
            json!({"properties": {"x": {
                "if": {"properties": {"x": t}}, "then": {"properties": {"y": true}},
                "unevaluatedProperties": false,
            }}}),
        ),
        (
            modern,
            json!({"properties": {"x": {"$ref": "#/$defs/t", "unevaluatedProperties": false}}}),
        ),
    ] {
        for draft in drafts {
            let mut whole = defined(keywords.clone());
            whole["$schema"] = (*draft).into();
            let schema = Schema::new(&whole).unwrap();
            let native = jsonschema::validator_for(&whole).unwrap();
            let mut taken = 0;
            for levels in 0..20 {
                for end in [json!("s"), json!({}), json!(1), json!({"x": {"y": 1}})] {
                    let value = (0..levels).fold(end, |value, _| json!({"x": value}));
                    if native.is_valid(&json!({"v": value})) {
                        taken += 1;
                        assert!(takes(&schema, value.clone()), "{whole} with {value}");
                    }
                }
            }
            assert!(taken > 20, "{whole} takes {taken}");
        }
    }
    for draft in modern {
        // What the end of a list's circle has evaluated counts so.
        let mut whole = defined(json!({
            "anyOf": [{"type": "object"}, {"type": "array", "items": t}],
            "properties": {"x": {"$ref": "#/$defs/t", "unevaluatedItems": false}},
        }));
        whole["$schema"] = (*draft).into();
        let schema = Schema::new(&whole).unwrap();
        for levels in 0..20 {
            let value = (0..levels).fold(json!([[], {}]), |value, _| json!({"x": value}));
            assert!(takes(&schema, value));
        }
        let bad = json!({"x": {"x": [1]}});
        assert!(!takes(&schema, bad));

        let list = json!({"$schema": draft, "type": "object", "properties": {"v": {"$ref": "#/$defs/t"}},
            "$defs": {"t": {"type": "array", "contains": t, "maxContains": 1, "minContains": 0}}});
        let schema = Schema::new(&list).unwrap();
        let native = jsonschema::validator_for(&list).unwrap();
        // Only a list that contains two lists is none, however deep they are.
        let none = json!([[], []]);
        let value = (0..20).fold(json!([]), |value, _| json!([none, none, value]));
        assert!(native.is_valid(&json!({"v": value})));
        assert!(takes(&schema, value));
        assert!(!takes(&schema, json!({})));
    }
}

#[test]
fn what_stands_beside_a_reference_counts_as_the_draft_says() {
    let node = json!({"type": "object", "properties": {
        "next": {"$ref": "#/$defs/t", "required": ["extra"]},
    }});
    for draft in [None].into_iter().chain(DRAFTS.map(Some)) {
        let mut whole = defined(node.clone());
        if let Some(draft) = draft {
            whole["$schema"] = draft.into();
        }
        let schema = Schema::new(&whole).unwrap();
        // Without a word on it the draft is 2020-12.
        let counts = draft.is_none_or(|draft| draft.contains("20"));
        for levels in [1, 3, MAX_ROUNDS] {
            let value =
                (0..levels).fold(json!({"extra": 1}), |v, _| json!({"next": v, "extra": 1}));
            assert!(takes(&schema, value));
            let value =
                (1..levels).fold(json!({"next": {}}), |v, _| json!({"next": v, "extra": 1}));
            assert_eq!(!takes(&schema, value), counts, "{draft:?} at {levels}");
            let value = (1..levels).fold(json!({"next": 1}), |v, _| json!({"next": v, "extra": 1}));
            assert_eq!(takes(&schema, value), levels == MAX_ROUNDS && !counts);
        }
    }
}

#[test]
fn a_circle_that_grows_with_each_level_is_unfolded_as_far_as_it_fits() {
    // Thirty kinds of nodes that each may hold all thirty.
    let names: Vec<String> = (0..30).map(|n| format!("d{n}")).collect();
    let all = names.iter().map(|name| (name.clone(), json!({"$ref": format!("#/$defs/{name}")})));
    let kind = object(all.collect());
    let kinds: Map<_, _> = names.iter().map(|name| (name.clone(), kind.clone())).collect();
    let whole =
        json!({"type": "object", "properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": kinds});
    let schema = Schema::new(&whole).unwrap();
    assert!(takes(&schema, json!({"d7": {"d9": {}}})));
    assert!(!takes(&schema, json!(1)));
    assert!(!takes(&schema, json!({"d7": 1})));
    assert!(takes(&schema, json!({"d7": {"d9": {"d1": {"d2": 1}}}})));

    for whole in [whole, tree()] {
        let parts = Parts::new(&whole).unwrap();
        let unfolded = parts.without_circles().unwrap();
        Count::check(&unfolded).unwrap();
        // Its references are longer, and each copy has them but once.
        let bytes = |value: &Value| value.to_string().len();
        assert!(bytes(&unfolded) < 3 * MAX_ROUNDS as usize * bytes(&whole));
    }

    // As many bytes as are taken, and as many parts.
    for (properties, fits) in [(3000, true), (4000, true), (4100, false)] {
        let mut wide = tree();
        for n in 0..properties {
            wide["$defs"]["t"]["properties"][format!("p{n}")] = json!({});
        }
        wide["$defs"]["t"]["properties"]["name"]["description"] = "x".repeat(15_000).into();
        match Schema::new(&wide) {
            Ok(schema) => {
                assert!(fits);
                assert!(!takes(&schema, json!({})) && takes(&schema, json!({"name": "n"})));
            }
            Err(error) => assert!(!fits && error.contains("parts"), "{error}"),
        }
    }
    // The longer it is, the fewer levels.
    for (bytes, levels) in [(15_000, MAX_ROUNDS), (30_000, 4), (60_000, 2)] {
        let mut long = tree();
        long["$defs"]["t"]["properties"]["name"]["description"] = "x".repeat(bytes).into();
        let schema = Schema::new(&long).unwrap();
        let bad = |level: u32| below("children", true, level - 1, json!({"name": 1}));
        assert!(!takes(&schema, bad(levels)), "{bytes}");
        assert!(takes(&schema, bad(levels + 1)), "{bytes}");
    }
    // One level has too many parts.
    let doubling: Map<_, _> = (0..20)
        .map(|n| {
            let next = json!({"$ref": format!("#/$defs/s{}", n + 1)});
            (format!("s{n}"), json!({"allOf": [next, next]}))
        })
        .chain([("s20".to_owned(), object(json!({"x": {"$ref": "#/$defs/s0"}})))])
        .collect();
    let doubling =
        json!({"type": "object", "properties": {"v": {"$ref": "#/$defs/s0"}}, "$defs": doubling});
    let error = Schema::new(&doubling).unwrap_err();
    assert!(error.contains("parts"), "{error}");
}

#[test]
fn a_circle_that_nothing_leads_to_changes_nothing() {
    let mut whole = tree();
    whole["properties"]["v"] = json!({"type": "string"});
    let schema = Schema::new(&whole).unwrap();
    assert!(takes(&schema, json!("x")) && !takes(&schema, json!({"name": "x"})));
    let parts = Parts::new(&whole).unwrap();
    assert!(matches!(parts.without_circles(), Ok(Cow::Borrowed(_))));
}

/// Schemas out of most keywords. Their references may lead to any of four definitions. `loose`: with
/// keywords that are loosened before a circle.
fn any_schema(loose: bool) -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        4 => (0..4u8).prop_map(|n| json!({"$ref": format!("#/$defs/d{n}")})),
        1 => Just(json!({})),
        1 => prop_oneof!["object", "array", "integer", "string"].prop_map(|t| json!({"type": t})),
        1 => (0..3).prop_map(|n| json!({"enum": [n, "x", {"a": n}, [n]]})),
        1 => (0..3).prop_map(|n| json!({"maxProperties": n, "maxItems": n})),
        1 => Just(json!({"required": ["a"]})),
    ];
    leaf.prop_recursive(4, 24, 3, move |part| {
        let keyword = |name: &'static str| part.clone().prop_map(move |part| json!({name: part}));
        let list = |name: &'static str| {
            vec(part.clone(), 1..3).prop_map(move |parts| json!({name: parts}))
        };
        let by_name = |name: &'static str| {
            let names = prop_oneof![Just("a"), Just("b")];
            vec((names, part.clone()), 1..3)
                .prop_map(move |parts| json!({name: parts.into_iter().map(|(n, part)| (n.to_owned(), part)).collect::<Map<_, _>>()}))
        };
        let safe = prop_oneof![
            6 => by_name("properties"),
            1 => by_name("patternProperties"),
            1 => by_name("dependentSchemas"),
            3 => keyword("items"),
            1 => keyword("additionalProperties"),
            1 => keyword("propertyNames"),
            1 => keyword("contains"),
            1 => keyword("unevaluatedProperties"),
            1 => keyword("unevaluatedItems"),
            1 => list("allOf"),
            2 => list("anyOf"),
            1 => list("prefixItems"),
        ];
        let loosened = prop_oneof![
            keyword("not"),
            list("oneOf"),
            (part.clone(), part.clone(), part.clone())
                .prop_map(|(a, b, c)| json!({"if": a, "then": b, "else": c})),
            part.clone().prop_map(|part| json!({"contains": part, "maxContains": 1})),
        ];
        let one = if loose { prop_oneof![3 => safe, 1 => loosened].boxed() } else { safe.boxed() };
        // Some keywords beside one another.
        vec(one, 1..3).prop_map(|all| {
            let all = all.into_iter().filter_map(|keywords| match keywords {
                Value::Object(keywords) => Some(keywords),
                _ => None,
            });
            Value::Object(all.flatten().collect())
        })
    })
    .boxed()
}

fn whole(loose: bool) -> impl Strategy<Value = Value> {
    let draft = proptest::sample::select(&DRAFTS[..]);
    (draft, vec(any_schema(loose), 4)).prop_map(|(draft, definitions)| {
        let definitions: Map<_, _> =
            (0..).zip(definitions).map(|(n, part): (u32, _)| (format!("d{n}"), part)).collect();
        json!({
            "$schema": draft,
            "type": "object",
            "properties": {"v": {"$ref": "#/$defs/d0"}},
            "$defs": definitions,
        })
    })
}

/// Leads references of each definition to later ones.
fn forward(schema: &mut Value) {
    fn walk(value: &mut Value, own: u64) {
        match value {
            Value::Object(entries) => {
                if let Some(Value::String(reference)) = entries.get_mut("$ref") {
                    let wanted: u64 = reference[reference.len() - 1..].parse().unwrap();
                    *reference = format!("#/$defs/d{}", (wanted + own + 1).min(4));
                }
                entries.values_mut().for_each(|value| walk(value, own));
            }
            Value::Array(items) => items.iter_mut().for_each(|item| walk(item, own)),
            _ => {}
        }
    }
    for own in 0..4 {
        walk(&mut schema["$defs"][format!("d{own}")], own);
    }
    schema["$defs"]["d4"] = json!({"type": ["integer", "object"]});
}

fn any_arguments() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        (0..3).prop_map(Value::from),
        Just(json!("x")),
        Just(json!({})),
        Just(json!([]))
    ];
    let value = leaf.prop_recursive(12, 24, 2, |value| {
        let names = prop_oneof![Just("a"), Just("b"), Just("c")];
        prop_oneof![
            3 => vec((names, value.clone()), 1..3).prop_map(|entries| {
                Value::Object(entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
            }),
            1 => vec(value, 1..3).prop_map(Value::Array),
        ]
    });
    value.prop_map(|value| json!({"v": value}))
}

fn levels(value: &Value) -> u32 {
    let below = match value {
        Value::Object(entries) => entries.values().map(levels).max(),
        Value::Array(items) => items.iter().map(levels).max(),
        _ => return 0,
    };
    1 + below.unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn without_circles_copies_say_what_the_schema_says(
        mut schema in whole(true), arguments in vec(any_arguments(), 20), rounds in 1..4u32,
    ) {
        forward(&mut schema);
        let native = jsonschema::validator_for(&schema).unwrap();
        let parts = Parts::new(&schema).unwrap();
        let copies = jsonschema::validator_for(&parts.unfolded(rounds)).unwrap();
        let checked = Schema::new(&schema);
        for arguments in arguments {
            let wanted = native.is_valid(&arguments);
            prop_assert_eq!(copies.is_valid(&arguments), wanted, "{}", arguments);
            if let Ok(checked) = &checked {
                prop_assert_eq!(checked.check(&arguments).is_ok(), wanted, "{}", arguments);
            }
        }
    }

    #[test]
    fn with_circles_all_that_is_right_passes(
        schema in whole(true), arguments in vec(any_arguments(), 20), rounds in 1..4u32,
    ) {
        let native = jsonschema::validator_for(&schema).unwrap();
        if let Ok(parts) = Parts::new(&schema) {
            let unfolded = jsonschema::validator_for(&parts.unfolded(rounds)).unwrap();
            let checked = Schema::new(&schema);
            for arguments in arguments.into_iter().filter(|arguments| native.is_valid(arguments)) {
                prop_assert!(unfolded.is_valid(&arguments), "{}", arguments);
                if let Ok(checked) = &checked {
                    prop_assert_eq!(checked.check(&arguments), Ok(()), "{}", arguments);
                }
            }
        }
    }

    #[test]
    fn with_circles_all_that_is_wrong_in_the_first_levels_is_found(
        schema in whole(false), arguments in vec(any_arguments(), 20), rounds in 1..6u32,
    ) {
        let native = jsonschema::validator_for(&schema).unwrap();
        if let Ok(parts) = Parts::new(&schema) {
            let unfolded = jsonschema::validator_for(&parts.unfolded(rounds)).unwrap();
            for arguments in arguments.into_iter().filter(|value| levels(value) < rounds) {
                let wanted = native.is_valid(&arguments);
                prop_assert_eq!(unfolded.is_valid(&arguments), wanted, "{}", arguments);
            }
        }
    }
}
