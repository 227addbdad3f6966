//! What clients see of a wrapped server: its tools, resources and prompts with everything that acts
//! unseen taken out, and its results within their size.

use std::collections::{BTreeMap, BTreeSet};

use globset::{Glob, GlobSet, GlobSetBuilder};
use rmcp::model::{CallToolResult, Tool};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::schema::{self, Schema};
use crate::text;

/// Most bytes of a description, and of a server's instructions.
pub(super) const MAX_PROSE: usize = 16 * 1024;
/// Most characters of a name or title.
pub(super) const MAX_NAME: usize = 128;
/// Most bytes of an address of a resource.
const MAX_URI: usize = 2048;

/// Which tools may be used.
#[derive(Clone, Debug, Default)]
pub struct Allowlist(Option<(GlobSet, Vec<String>)>);

impl Allowlist {
    /// Names and patterns with `*` and `?`; none: every tool.
    ///
    /// # Errors
    /// The pattern that makes no sense.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut set = GlobSetBuilder::new();
        let mut all = Vec::new();
        for pattern in patterns {
            let pattern = pattern.trim();
            if pattern.is_empty() {
                return Err("a list of tools has an empty name".to_owned());
            }
            all.push(pattern.to_owned());
            set.add(Glob::new(pattern).map_err(|error| error.to_string())?);
        }
        let set = set.build().map_err(|error| error.to_string())?;
        Ok(Self((!all.is_empty()).then_some((set, all))))
    }

    fn allows(&self, name: &str) -> bool {
        self.0.as_ref().is_none_or(|(set, _)| set.is_match(name))
    }

    /// Names and patterns that none of `tools` has.
    pub(super) fn idle<'a>(&'a self, tools: impl Iterator<Item = &'a Value>) -> Vec<&'a str> {
        let Some((set, all)) = &self.0 else { return Vec::new() };
        let mut idle: Vec<Option<&str>> = all.iter().map(|one| Some(one.as_str())).collect();
        for name in tools.filter_map(|tool| tool.get("name").and_then(Value::as_str)) {
            for place in set.matches(name) {
                if let Some(one) = idle.get_mut(place) {
                    *one = None;
                }
            }
        }
        idle.into_iter().flatten().collect()
    }
}

/// A tool that may be called.
#[derive(Debug)]
pub(super) struct Offered {
    /// Its name at the server.
    pub(super) name: String,
    /// As clients see it.
    pub(super) tool: Tool,
    pub(super) schema: Schema,
}

/// The tools of a server.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// In the server's order, by the name that clients know.
    pub(super) tools: Vec<Offered>,
    /// Why others may not be called, by the name that clients would know.
    pub(super) refused: BTreeMap<String, String>,
}

impl Tools {
    /// Takes `tools/list`. Clients know a tool by its name behind `prefix` and an underscore, where
    /// there is a prefix.
    pub(super) fn new(list: &[Value], allowed: &Allowlist, prefix: &str) -> Self {
        let name = |tool: &Value| tool.get("name").and_then(Value::as_str).unwrap_or("").to_owned();
        let mut seen = BTreeSet::new();
        let twice: BTreeSet<String> =
            list.iter().map(name).filter(|name| !seen.insert(name.clone())).collect();
        let mut all = Self::default();
        for value in list {
            let name = name(value);
            if !allowed.allows(&name) {
                continue;
            }
            let public = prefixed(prefix, &name);
            let taken = if twice.contains(&name) {
                Err("the server has two tools of this name".to_owned())
            } else {
                tool(value, &public)
            };
            match taken {
                Ok((tool, schema)) => all.tools.push(Offered { name, tool, schema }),
                Err(why) => drop(all.refused.insert(public, why)),
            }
        }
        all
    }

    pub(super) fn get(&self, public: &str) -> Option<&Offered> {
        self.tools.iter().find(|offered| offered.tool.name == public)
    }
}

/// The name of something among those of other servers.
pub(super) fn prefixed(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}_{name}") }
}

/// One tool as clients may see it.
fn tool(value: &Value, public: &str) -> Result<(Tool, Schema), String> {
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if public.is_empty() || public.len() > MAX_NAME || !public.chars().all(valid) {
        return Err(format!("a name has 1 to {MAX_NAME} characters out of A-Z a-z 0-9 _ . -"));
    }
    let input = value.get("inputSchema").unwrap_or(&Value::Null);
    let input =
        Schema::new(input).map_err(|why| format!("its input schema cannot be used: {why}"))?;
    let mut shown = Map::new();
    shown.insert("name".to_owned(), public.into());
    shown.insert("inputSchema".to_owned(), Value::Object(input.shown.clone()));
    if let Some(output) = value.get("outputSchema") {
        let output = schema::clean(output)
            .map_err(|why| format!("its output schema cannot be used: {why}"))?;
        shown.insert("outputSchema".to_owned(), Value::Object(output));
    }
    if let Some(title) = value.get("title").and_then(Value::as_str) {
        shown.insert("title".to_owned(), short(title).into());
    }
    if let Some(description) = value.get("description").and_then(Value::as_str) {
        if description.len() > MAX_PROSE {
            let length = description.len();
            return Err(format!(
                "its description has {length} bytes; at most {MAX_PROSE} are taken"
            ));
        }
        shown.insert("description".to_owned(), text::stripped(description).into());
    }
    if let Some(Value::Object(hints)) = value.get("annotations") {
        const HINTS: [&str; 4] =
            ["readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"];
        let hints = HINTS.iter().filter_map(|hint| {
            Some(((*hint).to_owned(), Value::Bool(hints.get(*hint)?.as_bool()?)))
        });
        let mut hints: Map<String, Value> = hints.collect();
        if let Some(title) = value.pointer("/annotations/title").and_then(Value::as_str) {
            hints.insert("title".to_owned(), short(title).into());
        }
        shown.insert("annotations".to_owned(), Value::Object(hints));
    }
    let tool = serde_json::from_value(Value::Object(shown))
        .map_err(|error| format!("it is not understood: {error}"))?;
    Ok((tool, input))
}

/// A name or title to be shown.
pub(super) fn short(text: &str) -> String {
    text::stripped(text).replace(['\n', '\t'], " ").chars().take(MAX_NAME).collect()
}

/// An entry of a list of resources, templates or prompts, with its name and address behind `prefix`.
/// `None` for one that cannot be shown.
pub(super) fn entry<T: DeserializeOwned>(mut value: Value, prefix: &str) -> Option<T> {
    hide(&mut value, &text::stripped);
    let is_prompt = value.get("uri").is_none() && value.get("uriTemplate").is_none();
    let entry = value.as_object_mut()?;
    if is_prompt {
        let name = entry.get("name").and_then(Value::as_str).filter(|name| !name.is_empty())?;
        if name.len() > MAX_NAME {
            return None;
        }
        let name = prefixed(prefix, name);
        entry.insert("name".to_owned(), name.into());
    }
    for key in ["uri", "uriTemplate"] {
        if let Some(uri) = entry.get(key).and_then(Value::as_str) {
            if uri.len() > MAX_URI {
                return None;
            }
            let uri = address(prefix, uri);
            entry.insert(key.to_owned(), uri.into());
        }
    }
    serde_json::from_value(value).ok()
}

/// The address of a resource among those of other servers.
pub(super) fn address(prefix: &str, uri: &str) -> String {
    if prefix.is_empty() { uri.to_owned() } else { format!("{prefix}+{uri}") }
}

/// The result of a request of which clients see the texts.
///
/// # Errors
/// A sentence that says why it cannot be passed on.
pub(super) fn result<T: DeserializeOwned>(
    mut value: Value,
    prefix: &str,
    most: usize,
    raw: bool,
) -> Result<T, String> {
    let kind = value.get("resultType").and_then(Value::as_str).unwrap_or("complete");
    if kind != "complete" {
        let kind = text::safe(&kind.chars().take(50).collect::<String>());
        return Err(format!("its result is of the kind {kind}, which is refused"));
    }
    hide(&mut value, &|text| if raw { text.to_owned() } else { text::safe(text) });
    if let Some(result) = value.as_object_mut() {
        // Older servers do not say so; for older clients it is left out again.
        result.insert("resultType".to_owned(), "complete".into());
    }
    if !prefix.is_empty() {
        for block in ["content", "contents", "messages"] {
            if let Some(Value::Array(blocks)) = value.get_mut(block) {
                blocks.iter_mut().for_each(|block| readdress(block, prefix));
            }
        }
    }
    let bytes = serde_json::to_vec(&value).map_or(usize::MAX, |json| json.len());
    if bytes > most {
        return Err(format!(
            "its result has {bytes} bytes; at most {most} are passed on (--max-result). Ask for less"
        ));
    }
    serde_json::from_value(value).map_err(|error| {
        let error: String = error.to_string().chars().take(300).collect();
        format!("its result is not understood: {}", text::safe(&error))
    })
}

/// The result of a tool.
///
/// # Errors
/// As [`result`].
pub(super) fn tool_result(
    mut value: Value,
    prefix: &str,
    most: usize,
    raw: bool,
) -> Result<CallToolResult, String> {
    if let Some(result) = value.as_object_mut() {
        result.entry("content").or_insert_with(|| json!([]));
    }
    result(value, prefix, most, raw)
}

/// Gives the address of a block's resource its prefix.
fn readdress(block: &mut Value, prefix: &str) {
    let Some(entries) = block.as_object_mut() else { return };
    if let Some(Value::String(uri)) = entries.get_mut("uri") {
        *uri = address(prefix, uri);
    }
    for inner in ["resource", "content"] {
        if let Some(inner) = entries.get_mut(inner) {
            readdress(inner, prefix);
        }
    }
}

/// Has `clean` look at every text but base64, and leaves out what only a client's own program would
/// look at: metadata, and icons, which it would fetch.
fn hide(value: &mut Value, clean: &impl Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = clean(text),
        Value::Array(items) => items.iter_mut().for_each(|item| hide(item, clean)),
        Value::Object(entries) => {
            entries.remove("_meta");
            entries.remove("icons");
            if entries.keys().any(|key| key.chars().any(text::is_hidden)) {
                let old = std::mem::take(entries);
                entries.extend(old.into_iter().map(|(key, value)| (clean(&key), value)));
            }
            for (key, value) in entries.iter_mut() {
                let base64 = matches!(key.as_str(), "data" | "blob");
                if !(base64
                    && value
                        .as_str()
                        .is_some_and(|text| text.is_ascii() && !text.contains('\u{1b}')))
                {
                    hide(value, clean);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{Prompt, Resource};

    use super::*;

    fn tools(list: Value, allowed: &[&str], prefix: &str) -> Tools {
        let allowed = Allowlist::new(allowed.iter().copied()).unwrap();
        Tools::new(list.as_array().unwrap(), &allowed, prefix)
    }

    #[test]
    fn a_tool_is_shown_without_what_acts_unseen() {
        let tag: String =
            "steal".chars().map(|c| char::from_u32(0xe0000 + c as u32).unwrap()).collect();
        let all = tools(
            json!([{
                "name": "read", "title": format!("Re\u{202e}ad{tag}"),
                "description": format!("Reads\u{200b} a \u{1b}[8mfile.{tag}"),
                "inputSchema": {"type": "object", "properties": {
                    "path": {"type": "string", "description": format!("The path{tag}")}}},
                "outputSchema": {"type": "object", "description": format!("Out{tag}")},
                "annotations": {"readOnlyHint": true, "title": format!("T{tag}"), "evil": tag},
                "icons": [{"src": "http://evil/"}], "_meta": {"x": tag}, "execution": {},
            }]),
            &[],
            "files",
        );
        let shown = serde_json::to_value(&all.tools[0].tool).unwrap();
        let wanted = json!({
            "name": "files_read", "title": "Read", "description": "Reads a file.",
            "inputSchema": {"type": "object", "properties": {
                "path": {"type": "string", "description": "The path"}}},
            "outputSchema": {"type": "object", "description": "Out"},
            "annotations": {"readOnlyHint": true, "title": "T"},
        });
        assert_eq!(shown, wanted);
        assert!(all.refused.is_empty());
        assert_eq!(all.get("files_read").unwrap().name, "read");
    }

    #[test]
    fn tools_that_cannot_be_shown_are_refused_with_a_reason_and_others_are_not_there() {
        let schema = json!({"type": "object"});
        let all = tools(
            json!([
                {"name": "good_1", "inputSchema": schema},
                {"name": "twice", "inputSchema": schema}, {"name": "twice", "inputSchema": schema},
                {"name": "good_schema", "inputSchema": {"type": "object", "properties": 3}},
                {"name": "good_none"},
                {"name": "good_long", "inputSchema": schema, "description": "x".repeat(MAX_PROSE + 1)},
                {"name": "good_out", "inputSchema": schema, "outputSchema": 1},
                {"name": "good b", "inputSchema": schema}, {"name": "", "inputSchema": schema},
                {"name": format!("good_{}", "x".repeat(124)), "inputSchema": schema},
                {"name": "other", "inputSchema": schema}, 7,
            ]),
            &["good*", "twice"],
            "",
        );
        let names: Vec<_> = all.tools.iter().map(|offered| offered.name.as_str()).collect();
        assert_eq!(names, ["good_1"]);
        let refused = |name: &str| all.refused[name].as_str();
        assert!(refused("twice").contains("two tools"));
        assert!(refused("good_schema").contains("input schema"));
        assert!(refused("good_none").contains("input schema"));
        assert!(refused("good_long").contains("16385 bytes"));
        assert!(refused("good_out").contains("output schema"));
        assert!(refused("good b").contains("1 to 128 characters"));
        assert_eq!(all.refused.len(), 7, "{:?}", all.refused);
    }

    #[test]
    fn allowlists_have_names_and_patterns() {
        let list = Allowlist::new(["read_*", "list", " get_? "]).unwrap();
        for (name, wanted) in
            [("read_file", true), ("list", true), ("list2", false), ("get_a", true), ("", false)]
        {
            assert_eq!(list.allows(name), wanted, "{name}");
        }
        assert!(Allowlist::new([]).unwrap().allows("any"));
        assert!(Allowlist::new([""]).is_err() && Allowlist::new(["["]).is_err());
    }

    #[test]
    fn results_are_bounded_and_safe_to_read() {
        let value = json!({
            "content": [
                {"type": "text", "text": "a\u{200b}b", "_meta": {"x": 1}},
                {"type": "resource_link", "uri": "file:///x", "name": "n\u{202e}", "icons": []},
                {"type": "resource", "resource": {"uri": "file:///y", "text": "\u{1b}[1mz"}},
                {"type": "image", "data": "AAAA", "mimeType": "image/png"},
            ],
            "structuredContent": {"k\u{200b}": ["\u{feff}"]},
            "_meta": {"evil": true},
        });
        let safe = tool_result(value.clone(), "p", 4000, false).unwrap();
        let safe = serde_json::to_value(&safe).unwrap();
        assert_eq!(safe["content"][0], json!({"type": "text", "text": "a\\u{200b}b"}));
        assert_eq!(safe["content"][1]["uri"], "p+file:///x");
        assert_eq!(safe["content"][1]["name"], "n\\u{202e}");
        assert_eq!(safe["content"][2]["resource"]["text"], "z");
        assert_eq!(safe["content"][2]["resource"]["uri"], "p+file:///y");
        assert_eq!(safe["structuredContent"], json!({"k\\u{200b}": ["\\u{feff}"]}));
        assert!(safe.get("_meta").is_none());
        assert_eq!(safe["resultType"], "complete");
        let raw =
            serde_json::to_value(tool_result(value.clone(), "", 4000, true).unwrap()).unwrap();
        assert_eq!(raw["content"][0]["text"], "a\u{200b}b");
        assert!(tool_result(value, "", 200, false).unwrap_err().contains("at most 200"));
        for (bad, wanted) in [
            (json!({"content": "text"}), "not understood"),
            (json!({"content": [{"type": "nonsense"}]}), "not understood"),
            (json!({"resultType": "input_required"}), "input_required"),
        ] {
            assert!(tool_result(bad, "", 4000, false).unwrap_err().contains(wanted));
        }
        assert!(tool_result(json!({}), "", 4000, false).unwrap().content.is_empty());
    }

    #[test]
    fn entries_of_lists_are_stripped_and_addressed() {
        let resource =
            json!({"uri": "x://a", "name": "n\u{200b}", "icons": [{"src": "http://e/"}]});
        let shown: Resource = entry(resource, "p").unwrap();
        let shown = serde_json::to_value(&shown).unwrap();
        assert_eq!(shown, json!({"uri": "p+x://a", "name": "n"}));
        let prompt =
            json!({"name": "say", "arguments": [{"name": "a", "description": "d\u{202e}"}]});
        let shown: Prompt = entry(prompt, "p").unwrap();
        assert_eq!(shown.name, "p_say");
        assert_eq!(shown.arguments.unwrap()[0].description.as_deref(), Some("d"));
        assert!(entry::<Resource>(json!({"name": "x"}), "").is_none());
        assert!(entry::<Prompt>(json!({"name": "x".repeat(1000)}), "").is_none());
    }
}
