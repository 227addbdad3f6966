//! The public tools: names, descriptions, schemas and annotations.
//!
//! The list is the host's own and the same for every client; nothing that a guest says can change
//! it. Optional arguments are plain types with defaults, since some clients refuse schemas with
//! `null`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use casulo_protocol::result::{FileChange, Rejected, RunResult};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Default of `timeout_seconds`.
pub const DEFAULT_TIMEOUT_SECONDS: u32 = 30;
/// Most of `timeout_seconds`.
pub const MAX_TIMEOUT_SECONDS: u32 = 600;
/// Most bytes of one `read_file`.
pub const MAX_READ: u32 = 1 << 20;
/// Most entries of one `list_files`.
pub const MAX_ENTRIES: u32 = 1000;

fn default_timeout() -> u32 {
    DEFAULT_TIMEOUT_SECONDS
}

fn default_read_limit() -> u32 {
    16 * 1024
}

fn default_entries() -> u32 {
    200
}

/// Arguments of `run_command`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunCommandArgs {
    /// Command line for bash.
    #[schemars(length(min = 1, max = 131_072))]
    pub command: String,
    /// Sandbox made by create_sandbox; empty: a fresh one for this call alone.
    #[serde(default)]
    pub sandbox_id: String,
    /// Seconds after which the command and all its processes are killed.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 600))]
    pub timeout_seconds: u32,
    /// Absolute working folder; empty: /workspace/output.
    #[serde(default)]
    pub cwd: String,
    /// Environment variables beside the image's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Standard input.
    #[serde(default)]
    pub stdin: String,
}

/// Languages of `execute_code`.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Language {
    /// Python 3.
    Python,
    /// Bash.
    Bash,
}

impl Language {
    /// The agent's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Bash => "bash",
        }
    }
}

/// Arguments of `execute_code`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecuteCodeArgs {
    /// Language of the code.
    pub language: Language,
    /// Source text.
    #[schemars(length(min = 1, max = 1_048_576))]
    pub code: String,
    /// Sandbox made by create_sandbox; empty: a fresh one for this call alone.
    #[serde(default)]
    pub sandbox_id: String,
    /// Seconds after which the code and all its processes are killed.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 600))]
    pub timeout_seconds: u32,
    /// Absolute working folder; empty: /workspace/output.
    #[serde(default)]
    pub cwd: String,
    /// Environment variables beside the image's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Standard input.
    #[serde(default)]
    pub stdin: String,
}

/// How bytes stand in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Encoding {
    /// Text.
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    /// Any bytes.
    #[serde(rename = "base64")]
    Base64,
}

/// Arguments of `read_file`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFileArgs {
    /// Sandbox made by create_sandbox.
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,
    /// First byte to read.
    #[serde(default)]
    pub offset: u64,
    /// Most bytes to read.
    #[serde(default = "default_read_limit")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub limit: u32,
    /// utf-8 replaces bytes that are no text; base64 keeps every byte.
    #[serde(default)]
    pub encoding: Encoding,
}

/// Result of `read_file`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReadFileResult {
    /// The bytes read.
    pub content: String,
    /// How `content` is encoded.
    pub encoding: Encoding,
    /// Size of the whole file in bytes.
    pub size: u64,
    /// First byte after what was read.
    pub next_offset: u64,
}

/// Arguments of `write_file`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFileArgs {
    /// Sandbox made by create_sandbox.
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output; missing folders are made.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,
    /// What to write.
    #[schemars(length(max = 1_398_104))]
    pub content: String,
    /// How `content` is encoded.
    #[serde(default)]
    pub encoding: Encoding,
    /// Add at the end instead of replacing the file.
    #[serde(default)]
    pub append: bool,
}

/// Result of `write_file`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WriteFileResult {
    /// Size of the file afterwards in bytes.
    pub size: u64,
}

/// Arguments of `list_files`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListFilesArgs {
    /// Sandbox made by create_sandbox.
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output; empty: /workspace/output.
    #[serde(default)]
    #[schemars(length(max = 4096))]
    pub path: String,
    /// Whether to list the folders below too.
    #[serde(default)]
    pub recursive: bool,
    /// Most entries.
    #[serde(default = "default_entries")]
    #[schemars(range(min = 1, max = 1000))]
    pub limit: u32,
}

/// Arguments of `create_sandbox`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandboxArgs {}

/// Result of `create_sandbox`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CreateSandboxResult {
    /// Pass it to the other tools.
    pub sandbox_id: String,
    /// Seconds without a call after which the sandbox ends.
    pub idle_timeout_seconds: u64,
    /// Seconds after which it ends in any case.
    pub max_life_seconds: u64,
}

/// Arguments of `destroy_sandbox`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DestroySandboxArgs {
    /// Sandbox made by create_sandbox.
    pub sandbox_id: String,
}

/// Result of `destroy_sandbox`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DestroySandboxResult {
    /// Always true; a sandbox that does not exist is an error.
    pub destroyed: bool,
    /// What changed in the output folder, or was released into it, sorted by path.
    pub files: Vec<FileChange>,
    /// Further changes for which `files` has no room.
    pub files_omitted: u64,
    /// What was not let out because it would be dangerous to meet.
    pub rejected: Vec<Rejected>,
    /// Further ones for which `rejected` has no room.
    pub rejected_omitted: u64,
    /// Files that matched no artifact pattern and are gone.
    pub withheld: u64,
}

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
    /// Makes a sandbox that is kept.
    CreateSandbox,
    /// Ends a kept sandbox.
    DestroySandbox,
}

impl Name {
    /// Every tool, in the order of the list.
    pub const ALL: [Self; 7] = [
        Self::RunCommand,
        Self::ExecuteCode,
        Self::ReadFile,
        Self::WriteFile,
        Self::ListFiles,
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
            Self::CreateSandbox => "create_sandbox",
            Self::DestroySandbox => "destroy_sandbox",
        }
    }

    /// The tool of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.as_str() == name)
    }

    fn tool(self) -> Tool {
        let (title, description, input, output) = match self {
            Self::RunCommand => (
                "Run a command",
                "Without sandbox_id nothing survives this call: no files, packages or variables. \
                 Runs a bash command line in an isolated Linux microVM without network. Input \
                 files are in /workspace/input (read-only); write results to /workspace/output, \
                 the working folder.",
                schema::<RunCommandArgs>(),
                schema::<RunResult>(),
            ),
            Self::ExecuteCode => (
                "Execute code",
                "Without sandbox_id nothing survives this call: no files, packages or variables. \
                 Runs Python or Bash source in an isolated Linux microVM without network. Print \
                 what you want to see. Input files are in /workspace/input (read-only); write \
                 results to /workspace/output, the working folder.",
                schema::<ExecuteCodeArgs>(),
                schema::<RunResult>(),
            ),
            Self::ReadFile => (
                "Read a file",
                "Reads part of a file in a sandbox.",
                schema::<ReadFileArgs>(),
                schema::<ReadFileResult>(),
            ),
            Self::WriteFile => (
                "Write a file",
                "Writes or extends a file in a sandbox.",
                schema::<WriteFileArgs>(),
                schema::<WriteFileResult>(),
            ),
            Self::ListFiles => (
                "List files",
                "Lists a folder in a sandbox, sorted by path.",
                schema::<ListFilesArgs>(),
                schema::<casulo_protocol::agent::FileList>(),
            ),
            Self::CreateSandbox => (
                "Create a sandbox",
                "Makes a microVM that keeps files between calls, and returns its sandbox_id. It \
                 ends by itself when idle or too old; end it with destroy_sandbox when done.",
                schema::<CreateSandboxArgs>(),
                schema::<CreateSandboxResult>(),
            ),
            Self::DestroySandbox => (
                "Destroy a sandbox",
                "Ends a sandbox and discards everything in it but /workspace/output.",
                schema::<DestroySandboxArgs>(),
                schema::<DestroySandboxResult>(),
            ),
        };
        let mut tool =
            Tool::new(Cow::Borrowed(self.as_str()), Cow::Borrowed(description), Arc::new(input));
        tool.title = Some(title.to_owned());
        tool.output_schema = Some(Arc::new(output));
        let mut hints = ToolAnnotations::default();
        hints.title = Some(title.to_owned());
        hints.read_only_hint = Some(matches!(self, Self::ReadFile | Self::ListFiles));
        hints.destructive_hint =
            Some(!matches!(self, Self::ReadFile | Self::ListFiles | Self::CreateSandbox));
        hints.idempotent_hint =
            Some(matches!(self, Self::ReadFile | Self::ListFiles | Self::DestroySandbox));
        // No network and no host access: the world of every tool is the microVM.
        hints.open_world_hint = Some(false);
        tool.annotations = Some(hints);
        tool
    }
}

/// The list as clients see it.
pub fn list() -> Vec<Tool> {
    Name::ALL.into_iter().map(Name::tool).collect()
}

/// JSON Schema of a type with definitions inlined, since some clients do not follow `$ref`.
fn schema<T: JsonSchema>() -> JsonObject {
    let settings = schemars::generate::SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true);
    let mut value = settings.into_generator().into_root_schema_for::<T>().to_value();
    let mut object = value.as_object_mut().map(std::mem::take).unwrap_or_default();
    object.remove("title");
    object.remove("description");
    object
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
    fn names_round_trip() {
        for name in Name::ALL {
            assert_eq!(Name::parse(name.as_str()), Some(name));
        }
        assert_eq!(Name::parse("sudo"), None);
    }

    #[test]
    fn unknown_arguments_are_refused() {
        let parsed = serde_json::from_value::<RunCommandArgs>(
            serde_json::json!({"command": "true", "comand": "x"}),
        );
        assert!(parsed.unwrap_err().to_string().contains("unknown field `comand`"));
    }
}
