//! The public tools: names, descriptions, schemas and annotations.
//!
//! The list is the host's own and the same for every client; nothing that a guest says can change
//! it. Optional arguments are plain types with defaults, since some clients refuse schemas with
//! `null`.

pub mod args;
mod check;
pub mod results;

use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

use casulo_protocol::result::RunResult;
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use args::{
    CommandLine, CreateSandboxArgs, DestroySandboxArgs, ListFilesArgs, PollProcessArgs,
    ReadFileArgs, RunOptions, Source, StartProcessArgs, StopProcessArgs, Subject, WriteFileArgs,
};
use results::{CreateSandboxResult, DestroySandboxResult, ProcessResult, WriteFileResult};

/// Default of `timeout_seconds`.
pub const DEFAULT_TIMEOUT_SECONDS: u32 = 30;
/// Least of `max_output_bytes`: room for a result without its output.
pub const MIN_OUTPUT_BYTES: u32 = 2048;

/// A public tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// Runs a command line.
    RunCommand,
    /// Runs source text.
    ExecuteCode,
    /// Reads part of a file.
    ReadFile,
    /// Writes a file.
    WriteFile,
    /// Lists a folder.
    ListFiles,
    /// Starts a command line and returns.
    StartProcess,
    /// Feeds a process and reads its output.
    PollProcess,
    /// Sends a process a signal.
    StopProcess,
    /// Makes a sandbox that is kept.
    CreateSandbox,
    /// Ends a kept sandbox.
    DestroySandbox,
}

impl Name {
    /// Every tool, in the order of the list.
    pub const ALL: [Self; 10] = [
        Self::RunCommand,
        Self::ExecuteCode,
        Self::ReadFile,
        Self::WriteFile,
        Self::ListFiles,
        Self::StartProcess,
        Self::PollProcess,
        Self::StopProcess,
        Self::CreateSandbox,
        Self::DestroySandbox,
    ];

    /// Name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RunCommand => "run_command",
            Self::ExecuteCode => "execute_code",
            Self::ReadFile => "read_file",
            Self::WriteFile => "write_file",
            Self::ListFiles => "list_files",
            Self::StartProcess => "start_process",
            Self::PollProcess => "poll_process",
            Self::StopProcess => "stop_process",
            Self::CreateSandbox => "create_sandbox",
            Self::DestroySandbox => "destroy_sandbox",
        }
    }

    /// The tool of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.as_str() == name)
    }

    /// Its place in the list.
    pub(super) fn tool(self) -> &'static Tool {
        let [run, code, read, write, list, start, poll, stop, create, destroy] = &*TOOLS;
        match self {
            Self::RunCommand => run,
            Self::ExecuteCode => code,
            Self::ReadFile => read,
            Self::WriteFile => write,
            Self::ListFiles => list,
            Self::StartProcess => start,
            Self::PollProcess => poll,
            Self::StopProcess => stop,
            Self::CreateSandbox => create,
            Self::DestroySandbox => destroy,
        }
    }

    /// The arguments of a call, checked against the schema.
    ///
    /// # Errors
    /// What is wrong with them, in a sentence.
    pub(super) fn arguments<T: DeserializeOwned>(self, map: JsonObject) -> Result<T, String> {
        let value = Value::Object(map);
        self.check(&value)?;
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    /// The same for a tool that runs something.
    ///
    /// # Errors
    /// As [`Self::arguments`].
    pub(super) fn run_arguments<T: Subject>(
        self,
        map: JsonObject,
    ) -> Result<(T, RunOptions), String> {
        let value = Value::Object(map);
        self.check(&value)?;
        let Value::Object(map) = value else { return Err("no object".to_owned()) };
        let (subject, options): (JsonObject, JsonObject) =
            map.into_iter().partition(|(name, _)| T::FIELDS.contains(&name.as_str()));
        let wrong = |error: serde_json::Error| error.to_string();
        let options = serde_json::from_value(Value::Object(options)).map_err(wrong)?;
        Ok((serde_json::from_value(Value::Object(subject)).map_err(wrong)?, options))
    }

    fn check(self, arguments: &Value) -> Result<(), String> {
        check::check(&self.tool().input_schema, arguments)
    }

    /// Whether a call with these arguments would be taken.
    #[cfg(test)]
    fn accepts(self, map: JsonObject) -> Result<(), String> {
        match self {
            Self::RunCommand => self.run_arguments::<CommandLine>(map).map(drop),
            Self::ExecuteCode => self.run_arguments::<Source>(map).map(drop),
            Self::ReadFile => self.arguments::<ReadFileArgs>(map).map(drop),
            Self::WriteFile => self.arguments::<WriteFileArgs>(map).map(drop),
            Self::ListFiles => self.arguments::<ListFilesArgs>(map).map(drop),
            Self::StartProcess => self.arguments::<StartProcessArgs>(map).map(drop),
            Self::PollProcess => self.arguments::<PollProcessArgs>(map).map(drop),
            Self::StopProcess => self.arguments::<StopProcessArgs>(map).map(drop),
            Self::CreateSandbox => self.arguments::<CreateSandboxArgs>(map).map(drop),
            Self::DestroySandbox => self.arguments::<DestroySandboxArgs>(map).map(drop),
        }
    }

    fn describe(self) -> (&'static str, &'static str, JsonObject, Option<JsonObject>) {
        match self {
            Self::RunCommand => (
                "Run a command",
                "Without sandbox_id nothing survives this call: no files, packages or variables. \
                 Runs a bash command line in an isolated Linux microVM without network. Input \
                 files are in /workspace/input (read-only); write results to /workspace/output, \
                 the working folder. For work longer than a minute use start_process.",
                run_schema::<CommandLine>(),
                Some(output::<RunResult>()),
            ),
            Self::ExecuteCode => (
                "Execute code",
                "Without sandbox_id nothing survives this call: no files, packages or variables. \
                 With it, variables live on from call to call, and `result` is the value of the \
                 last expression. Runs Python, Bash or JavaScript source in an isolated Linux \
                 microVM without network. Input files are in /workspace/input (read-only); write \
                 results to /workspace/output, the working folder.",
                run_schema::<Source>(),
                Some(output::<RunResult>()),
            ),
            Self::ReadFile => (
                "Read a file",
                "Reads part of a file in a sandbox. A PNG, JPEG, GIF or WebP image comes as an \
                 image.",
                input::<ReadFileArgs>(),
                None,
            ),
            Self::WriteFile => (
                "Write a file",
                "Writes or extends a file in a sandbox.",
                input::<WriteFileArgs>(),
                Some(output::<WriteFileResult>()),
            ),
            Self::ListFiles => (
                "List files",
                "Lists a folder in a sandbox, sorted by path.",
                input::<ListFilesArgs>(),
                Some(output::<casulo_protocol::agent::FileList>()),
            ),
            Self::StartProcess => (
                "Start a process",
                "Starts a bash command line in a sandbox and returns at once with a process_id. \
                 Read its output and write its input with poll_process. It ends with the sandbox.",
                input::<StartProcessArgs>(),
                Some(output::<ProcessResult>()),
            ),
            Self::PollProcess => (
                "Poll a process",
                "Writes to the standard input of a process, waits for output, and returns what it \
                 has written since the cursor.",
                input::<PollProcessArgs>(),
                Some(output::<ProcessResult>()),
            ),
            Self::StopProcess => (
                "Stop a process",
                "Sends a signal to a process and returns its state.",
                input::<StopProcessArgs>(),
                Some(output::<ProcessResult>()),
            ),
            Self::CreateSandbox => (
                "Create a sandbox",
                "Makes a microVM that keeps files, variables and processes between calls, and \
                 returns its sandbox_id. It ends by itself when idle or too old; end it with \
                 destroy_sandbox when done.",
                input::<CreateSandboxArgs>(),
                Some(output::<CreateSandboxResult>()),
            ),
            Self::DestroySandbox => (
                "Destroy a sandbox",
                "Ends a sandbox and discards everything in it but /workspace/output, whose changed \
                 files it lists with size and SHA-256.",
                input::<DestroySandboxArgs>(),
                Some(output::<DestroySandboxResult>()),
            ),
        }
    }

    fn build(self) -> Tool {
        let (title, description, input, output) = self.describe();
        let mut tool =
            Tool::new(Cow::Borrowed(self.as_str()), Cow::Borrowed(description), Arc::new(input));
        tool.title = Some(title.to_owned());
        tool.output_schema = output.map(Arc::new);
        let mut hints = ToolAnnotations::default();
        let reads = matches!(self, Self::ReadFile | Self::ListFiles);
        hints.title = Some(title.to_owned());
        hints.read_only_hint = Some(reads);
        hints.destructive_hint = Some(!(reads || self == Self::CreateSandbox));
        hints.idempotent_hint = Some(reads || self == Self::DestroySandbox);
        // No network and no host access: the world of every tool is the microVM.
        hints.open_world_hint = Some(false);
        tool.annotations = Some(hints);
        tool
    }
}

static TOOLS: LazyLock<[Tool; 10]> = LazyLock::new(|| Name::ALL.map(Name::build));

/// What the first two tools say of calls without a sandbox.
const FORGETS: &str =
    "Without sandbox_id nothing survives this call: no files, packages or variables.";
/// The same where such calls share one sandbox.
const KEEPS: &str = "Without sandbox_id calls share one sandbox, which keeps files and variables; its \
     sandbox_id is in the result.";

/// The list of a server whose calls without a sandbox share one.
pub(super) fn list_keeping() -> Vec<Tool> {
    let mut tools = list();
    for tool in &mut tools {
        let kept = tool.description.as_ref().and_then(|text| text.strip_prefix(FORGETS));
        if let Some(rest) = kept.map(str::to_owned) {
            tool.description = Some(Cow::Owned(format!("{KEEPS}{rest}")));
        }
    }
    tools
}

/// The list as clients see it.
pub fn list() -> Vec<Tool> {
    TOOLS.to_vec()
}

/// JSON Schema of a type with definitions inlined, since some clients do not follow `$ref`.
fn schema<T: JsonSchema>() -> JsonObject {
    let settings = schemars::generate::SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true);
    let mut value = settings.into_generator().into_root_schema_for::<T>().to_value();
    let mut object = value.as_object_mut().map(std::mem::take).unwrap_or_default();
    object.remove("title");
    object.remove("description");
    object.values_mut().for_each(plain_enumerations);
    object.values_mut().for_each(without_sizes);
    object
}

/// The body of `POST /v1/sandboxes/{id}/exec`, checked as the arguments of a tool are.
///
/// # Errors
/// What is wrong with it, in a sentence.
#[cfg(feature = "http")]
pub(super) fn exec_arguments(body: &[u8]) -> Result<args::ExecArgs, String> {
    static SCHEMA: LazyLock<JsonObject> = LazyLock::new(input::<args::ExecArgs>);
    let value = serde_json::from_slice::<Value>(body).map_err(|error| error.to_string())?;
    check::check(&SCHEMA, &value)?;
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn input<T: JsonSchema>() -> JsonObject {
    schema::<T>()
}

/// `oneOf` of constants, which schemars makes of an enumeration with comments, as `enum`.
fn plain_enumerations(value: &mut Value) {
    let Value::Object(object) = value else { return };
    object.values_mut().for_each(plain_enumerations);
    if let Some(Value::Array(variants)) = object.get("oneOf") {
        let constants: Option<Vec<Value>> =
            variants.iter().map(|variant| variant.get("const").cloned()).collect();
        if let Some(constants) = constants {
            object.remove("oneOf");
            object.insert("type".to_owned(), "string".into());
            object.insert("enum".to_owned(), constants.into());
        }
    }
}

/// Without the formats of Rust's numbers, `uint64` and such: JSON Schema has none of them, and some
/// clients complain of each.
fn without_sizes(value: &mut Value) {
    match value {
        Value::Object(object) => {
            let sized = |format: &Value| format.as_str().is_some_and(|f| f.contains("int"));
            if object.get("format").is_some_and(sized) {
                object.remove("format");
            }
            object.values_mut().for_each(without_sizes);
        }
        Value::Array(values) => values.iter_mut().for_each(without_sizes),
        _ => {}
    }
}

/// Schema of a subject and its options as one object.
fn run_schema<T: Subject>() -> JsonObject {
    let (mut all, options) = (schema::<T>(), schema::<RunOptions>());
    if let (Some(Value::Object(all)), Some(Value::Object(options))) =
        (all.get_mut("properties"), options.get("properties"))
    {
        all.extend(options.clone());
    }
    all
}

/// Schema of a result. One that may be `null` says so by `anyOf`: some clients refuse a list of types.
fn output<T: JsonSchema>() -> JsonObject {
    let mut object = schema::<T>();
    object.values_mut().for_each(without_lists);
    object
}

fn without_lists(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_lists),
        Value::Object(object) => {
            object.values_mut().for_each(without_lists);
            if let Some(Value::Array(types)) = object.get("type").cloned() {
                object.remove("type");
                let mut variants = Vec::new();
                for kind in types {
                    let mut variant = if kind == "null" {
                        JsonObject::new()
                    } else {
                        object.iter().filter(|(k, _)| *k != "description").map(pair).collect()
                    };
                    variant.insert("type".to_owned(), kind);
                    variants.push(Value::Object(variant));
                }
                object.retain(|key, _| key == "description");
                object.insert("anyOf".to_owned(), Value::Array(variants));
            }
        }
        _ => {}
    }
}

fn pair((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_golden_file() {
        let list = serde_json::to_string_pretty(&list()).unwrap() + "\n";
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tools.json");
        if std::env::var_os("CASULO_UPDATE_GOLDEN").is_some() {
            std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")).unwrap();
            std::fs::write(golden, &list).unwrap();
        }
        assert_eq!(
            list,
            std::fs::read_to_string(golden).unwrap(),
            "the public tools changed; if that is meant, run the tests with CASULO_UPDATE_GOLDEN=1"
        );
    }

    #[test]
    fn only_what_calls_without_a_sandbox_do_differs_where_they_share_one() {
        let changed = |(tool, kept): &(Tool, Tool)| tool.description != kept.description;
        let pairs = list().into_iter().zip(list_keeping());
        let changed: Vec<_> = pairs.filter(changed).map(|(tool, _)| tool.name).collect();
        assert_eq!(changed, ["run_command", "execute_code"]);
    }

    #[test]
    fn names_round_trip() {
        for name in Name::ALL {
            assert_eq!(Name::parse(name.as_str()), Some(name));
            assert_eq!(name.tool().name, name.as_str());
        }
        assert_eq!(Name::parse("sudo"), None);
    }

    #[test]
    fn every_schema_is_closed_and_plain_and_every_hint_is_given() {
        for tool in list() {
            let text = serde_json::to_string(&tool.input_schema).unwrap();
            assert!(text.contains(r#""additionalProperties":false"#), "{}", tool.name);
            for word in ["$ref", "null", "anyOf", "oneOf"] {
                assert!(!text.contains(word), "{}: {word}", tool.name);
            }
            let output = serde_json::to_string(&tool.output_schema).unwrap();
            assert!(!output.contains(r#""type":["#), "{}", tool.name);
            let hints = tool.annotations.unwrap();
            assert!(hints.title.is_some() && hints.read_only_hint.is_some());
            assert!(hints.destructive_hint.is_some() && hints.idempotent_hint.is_some());
            assert_eq!(hints.open_world_hint, Some(false));
            assert!(tool.description.is_some_and(|d| d.len() < 600));
        }
    }
}
