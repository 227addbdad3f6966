//! What the host reads from somebody else's MCP server: answers, lists of tools with any schemas, and
//! anything in between.
#![no_main]

use std::sync::{Arc, OnceLock};

use arbitrary::Arbitrary;
use casulo::fuzzing;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::Data;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// What the server says, in order. It hears a request before each step, if it is to.
#[derive(Arbitrary, Debug)]
struct Step {
    listen: bool,
    says: Says,
}

#[derive(Arbitrary, Debug)]
enum Says {
    /// Who it is, in a revision, with these words for the model.
    Hello(u8, String),
    /// A page of tools, and whether another follows.
    Tools(Vec<Tool>, bool),
    /// The result of a tool.
    Result(Vec<(u8, String)>, Json),
    /// A page of anything.
    List(u8, Vec<Json>),
    Error(i64, String),
    /// A request or notification.
    Ask(u8, bool, Json),
    Any(Json),
    Bytes(Data),
}

#[derive(Arbitrary, Debug)]
struct Tool {
    name: Option<String>,
    number: u8,
    description: String,
    properties: Vec<(String, Schema)>,
    definitions: Vec<Schema>,
    output: Option<Json>,
}

#[derive(Arbitrary, Debug)]
enum Schema {
    Keywords(Vec<(u8, Json)>),
    Reference(u8),
    Both(Box<Schema>, Box<Schema>),
    Any(Json),
}

#[derive(Arbitrary, Debug)]
enum Json {
    Null,
    Bool(bool),
    Number(i64),
    Float(f64),
    Text(String),
    Known(u8),
    List(Vec<Json>),
    Map(Vec<(u8, Json)>),
}

const WORDS: [&str; 44] = [
    "2025-11-25",
    "2026-07-28",
    "type",
    "object",
    "string",
    "array",
    "properties",
    "items",
    "required",
    "pattern",
    "^(a|a)*$",
    "enum",
    "const",
    "allOf",
    "anyOf",
    "not",
    "if",
    "$ref",
    "#",
    "#/$defs/d0",
    "$defs",
    "$id",
    "$schema",
    "http://json-schema.org/draft-07/schema#",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "dependentSchemas",
    "minLength",
    "maxItems",
    "multipleOf",
    "format",
    "uri",
    "text",
    "data",
    "path",
    "content",
    "resource",
    "mimeType",
    "structuredContent",
    "nextCursor",
    "capabilities",
    "_meta",
    "progressToken",
];
const METHODS: [&str; 6] = [
    "ping",
    "sampling/createMessage",
    "notifications/progress",
    "notifications/tools/list_changed",
    "notifications/message",
    "notifications/cancelled",
];

fn word(number: u8) -> &'static str {
    WORDS[usize::from(number) % WORDS.len()]
}

impl Json {
    fn value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(bool) => json!(bool),
            Self::Number(number) => json!(number),
            Self::Float(number) => json!(number),
            Self::Text(text) => json!(text),
            Self::Known(number) => json!(word(*number)),
            Self::List(list) => list.iter().map(Json::value).collect(),
            Self::Map(fields) => Value::Object(map(fields)),
        }
    }
}

fn map(fields: &[(u8, Json)]) -> Map<String, Value> {
    fields.iter().map(|(key, value)| (word(*key).to_owned(), value.value())).collect()
}

impl Schema {
    fn value(&self) -> Value {
        match self {
            Self::Keywords(keywords) => Value::Object(map(keywords)),
            Self::Reference(number) => json!({"$ref": format!("#/$defs/d{}", number % 8)}),
            Self::Both(a, b) => json!({"allOf": [a.value(), b.value()]}),
            Self::Any(json) => json.value(),
        }
    }
}

impl Tool {
    fn value(&self) -> Value {
        let name = self.name.clone().unwrap_or_else(|| format!("tool{}", self.number));
        let properties: Map<_, _> =
            self.properties.iter().map(|(name, schema)| (name.clone(), schema.value())).collect();
        let definitions: Map<_, _> = (0..)
            .zip(&self.definitions)
            .map(|(n, schema): (u32, _)| (format!("d{n}"), schema.value()))
            .collect();
        let schema = json!({"type": "object", "properties": properties, "$defs": definitions});
        let mut tool =
            json!({"name": name, "description": self.description, "inputSchema": schema});
        if let Some(output) = &self.output {
            tool["outputSchema"] = output.value();
        }
        tool
    }
}

impl Says {
    fn line(&self, id: &Value) -> Vec<u8> {
        let answer = |result: Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
        let message = match self {
            Self::Hello(version, words) => answer(json!({
                "protocolVersion": word(*version), "supportedVersions": [word(*version)],
                "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
                "serverInfo": {"name": words, "version": "1"}, "instructions": words,
            })),
            Self::Tools(tools, more) => {
                let tools: Vec<Value> = tools.iter().take(16).map(Tool::value).collect();
                match more {
                    true => answer(json!({"tools": tools, "nextCursor": "x"})),
                    false => answer(json!({"tools": tools})),
                }
            }
            Self::Result(texts, structured) => {
                let blocks = texts.iter().map(|(kind, text)| match kind % 3 {
                    0 => json!({"type": "text", "text": text}),
                    1 => json!({"type": "resource_link", "uri": text, "name": text}),
                    _ => json!({"type": "resource", "resource": {"uri": text, "text": text}}),
                });
                let blocks: Vec<Value> = blocks.collect();
                answer(json!({"content": blocks, "structuredContent": structured.value()}))
            }
            Self::List(key, entries) => {
                let key = ["resources", "prompts", "tools"][usize::from(*key % 3)];
                answer(json!({key: entries.iter().map(Json::value).collect::<Vec<_>>()}))
            }
            Self::Error(code, message) => {
                json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}})
            }
            Self::Ask(method, request, params) => {
                let method = METHODS[usize::from(*method) % METHODS.len()];
                let mut ask = json!({"jsonrpc": "2.0", "method": method, "params": params.value()});
                if *request {
                    ask["id"] = id.clone();
                }
                ask
            }
            Self::Any(json) => json.value(),
            Self::Bytes(data) => return data.bytes(),
        };
        format!("{message}\n").into_bytes()
    }
}

/// Says a program to the host, then hangs up.
async fn serve(stream: UnixStream, steps: &[Step]) {
    const ALL: usize = 1 << 20;
    let mut stream = BufReader::new(stream);
    let (mut id, mut left) = (json!(1), ALL);
    for step in steps.iter().take(64) {
        if step.listen {
            let mut line = String::new();
            if !matches!(stream.read_line(&mut line).await, Ok(1..)) {
                return;
            }
            let heard: Value = serde_json::from_str(&line).expect("the host speaks JSON");
            id = heard.get("id").cloned().unwrap_or(id);
        }
        let line = step.says.line(&id);
        let Some(rest) = left.checked_sub(line.len()) else { return };
        left = rest;
        if stream.get_mut().write_all(&line).await.is_err() {
            return;
        }
    }
}

fn ignore_broken_pipes() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        signal_hook::flag::register(signal_hook::consts::SIGPIPE, Arc::default())
            .map(drop)
            .expect("a signal handler");
    });
}

libfuzzer_sys::fuzz_target!(|steps: Vec<Step>| {
    ignore_broken_pipes();
    let limits = Limits::new();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        // When the server has gone, so has every wait.
        tokio::join!(fuzzing::wrapped(ours), serve(theirs, &steps));
    });
    drop(runtime);
    limits.check();
});
