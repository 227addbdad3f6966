//! Arguments of the public tools. What their schemas say beyond the type is checked by
//! [`super::check`].

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{DEFAULT_TIMEOUT_SECONDS, MIN_OUTPUT_BYTES};

fn default_timeout() -> u32 {
    DEFAULT_TIMEOUT_SECONDS
}

fn default_read_limit() -> u32 {
    16 * 1024
}

fn default_entries() -> u32 {
    200
}

fn default_output() -> u32 {
    super::super::limits::DEFAULT_OUTPUT_BYTES
}

fn default_wait() -> u32 {
    5
}

const _: () = assert!(MIN_OUTPUT_BYTES == 2048, "the schemas below say so");

/// A working folder in the guest; empty: the usual one.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline, extend("maxLength" = 4096, "pattern" = "^(/[^\\x00]*)?$"))]
pub struct Folder(String);

impl Folder {
    /// The folder, unless it is the usual one.
    pub fn wanted(&self) -> Option<String> {
        (!self.0.is_empty()).then(|| self.0.clone())
    }
}

/// Environment variables.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(
    inline,
    extend("maxProperties" = 256),
    extend("propertyNames" = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "maxLength": 256}),
    extend("additionalProperties" = {"type": "string", "maxLength": 65536, "pattern": "^[^\\x00]*$"})
)]
pub struct Env(pub BTreeMap<String, String>);

/// Options that `run_command` and `execute_code` share.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunOptions {
    /// Sandbox made by create_sandbox; empty: a fresh one for this call alone.
    #[serde(default)]
    #[schemars(regex(pattern = "^(sb_[0-9a-f]{32})?$"))]
    pub sandbox_id: String,
    /// Seconds after which it is killed with all its processes.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 600))]
    pub timeout_seconds: u32,
    /// Absolute working folder; empty: /workspace/output, or where the interpreter is.
    #[serde(default)]
    pub cwd: Folder,
    /// Environment variables beside the image's.
    #[serde(default)]
    pub env: Env,
    /// Standard input.
    #[serde(default)]
    #[schemars(length(max = 1_048_576))]
    pub stdin: String,
    /// Most bytes of the whole result; the middle of a longer output is left out.
    #[serde(default = "default_output")]
    #[schemars(range(min = 2048, max = 1_048_576))]
    pub max_output_bytes: u32,
    /// Leave terminal sequences and invisible characters in the output.
    #[serde(default)]
    pub raw: bool,
}

/// What is run; the rest of the arguments are [`RunOptions`].
pub trait Subject: DeserializeOwned + JsonSchema {
    /// Its fields.
    const FIELDS: &'static [&'static str];
}

/// Subject of `run_command`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandLine {
    /// Command line for bash.
    #[schemars(length(min = 1, max = 131_071), regex(pattern = "^[^\\x00]*$"))]
    pub command: String,
}

impl Subject for CommandLine {
    const FIELDS: &'static [&'static str] = &["command"];
}

/// Languages of `execute_code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Language {
    /// Python 3.
    Python,
    /// Bash.
    Bash,
    /// JavaScript (node), where the image has it.
    Javascript,
}

impl Language {
    /// The agent's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Bash => "bash",
            Self::Javascript => "javascript",
        }
    }
}

/// Subject of `execute_code`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Language of the code.
    pub language: Language,
    /// Source text.
    #[schemars(length(min = 1, max = 1_048_576), regex(pattern = "^[^\\x00]*$"))]
    pub code: String,
}

impl Subject for Source {
    const FIELDS: &'static [&'static str] = &["language", "code"];
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
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output.
    #[schemars(length(min = 1, max = 4096), regex(pattern = "^[^\\x00]*$"))]
    pub path: String,
    /// First byte to read.
    #[serde(default)]
    #[schemars(range(max = 9_007_199_254_740_991_u64))]
    pub offset: u64,
    /// Most bytes to read.
    #[serde(default = "default_read_limit")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub limit: u32,
    /// utf-8 replaces bytes that are no text; base64 keeps every byte.
    #[serde(default)]
    pub encoding: Encoding,
    /// Most bytes of the whole result; go on at next_offset for more.
    #[serde(default = "default_output")]
    #[schemars(range(min = 2048, max = 1_048_576))]
    pub max_output_bytes: u32,
    /// Leave terminal sequences and invisible characters in the text.
    #[serde(default)]
    pub raw: bool,
}

/// Arguments of `write_file`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFileArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output; missing folders are made.
    #[schemars(length(min = 1, max = 4096), regex(pattern = "^[^\\x00]*$"))]
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
    /// Permission bits of a new file in octal.
    #[serde(default)]
    #[schemars(regex(pattern = "^([0-7]{3})?$"))]
    pub mode: String,
}

/// Arguments of `list_files`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListFilesArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Absolute path, or relative to /workspace/output; empty: /workspace/output.
    #[serde(default)]
    #[schemars(length(max = 4096), regex(pattern = "^[^\\x00]*$"))]
    pub path: String,
    /// Whether to list the folders below too.
    #[serde(default)]
    pub recursive: bool,
    /// Most entries.
    #[serde(default = "default_entries")]
    #[schemars(range(min = 1, max = 1000))]
    pub limit: u32,
}

/// Arguments of `start_process`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartProcessArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Command line for bash.
    #[schemars(length(min = 1, max = 131_071), regex(pattern = "^[^\\x00]*$"))]
    pub command: String,
    /// Run it in a terminal of 24 lines and 80 columns, for programs that ask whether they have one.
    #[serde(default)]
    pub pty: bool,
    /// Absolute working folder; empty: /workspace/output.
    #[serde(default)]
    pub cwd: Folder,
    /// Environment variables beside the image's.
    #[serde(default)]
    pub env: Env,
}

/// What `POST /v1/sandboxes/{id}/exec` takes.
#[cfg(feature = "http")]
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecArgs {
    /// Program and arguments.
    #[schemars(
        length(min = 1, max = 1024),
        inner(length(max = 131_071), regex(pattern = "^[^\\x00]*$"))
    )]
    pub command: Vec<String>,
    /// Absolute working folder; empty: /workspace/output.
    #[serde(default)]
    pub cwd: Folder,
    /// Environment variables beside the image's.
    #[serde(default)]
    pub env: Env,
}

/// Arguments of `poll_process`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PollProcessArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Process made by start_process.
    #[schemars(regex(pattern = "^p[0-9]{1,9}$"))]
    pub process_id: String,
    /// Text for its standard input; end a line with \n.
    #[serde(default)]
    #[schemars(length(max = 65536))]
    pub stdin: String,
    /// Close its standard input after that.
    #[serde(default)]
    pub close_stdin: bool,
    /// Seconds to wait for output or the end if there is no new output yet.
    #[serde(default = "default_wait")]
    #[schemars(range(max = 50))]
    pub wait_seconds: u32,
    /// Where to read on: next_cursor of the last result; 0: from the start.
    #[serde(default)]
    #[schemars(range(max = 9_007_199_254_740_991_u64))]
    pub cursor: u64,
    /// Most bytes of the whole result.
    #[serde(default = "default_output")]
    #[schemars(range(min = 2048, max = 1_048_576))]
    pub max_output_bytes: u32,
    /// Leave terminal sequences and invisible characters in the output.
    #[serde(default)]
    pub raw: bool,
}

/// Signals of `stop_process`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
#[schemars(inline)]
pub enum Signal {
    /// Interrupt, as Ctrl-C.
    Int,
    /// Asks it to end.
    #[default]
    Term,
    /// Ends it and everything it has started.
    Kill,
    /// Its terminal is gone.
    Hup,
    /// Ends it with a core dump.
    Quit,
    /// Its own meaning.
    Usr1,
    /// Its own meaning.
    Usr2,
}

/// Arguments of `stop_process`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopProcessArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
    /// Process made by start_process.
    #[schemars(regex(pattern = "^p[0-9]{1,9}$"))]
    pub process_id: String,
    /// KILL ends everything that it has started; the others go to its foreground.
    #[serde(default)]
    pub signal: Signal,
}

/// Arguments of `create_sandbox`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandboxArgs {
    /// A name of your own: as long as the sandbox of that name lives, you get it again.
    #[serde(default)]
    #[schemars(regex(pattern = "^[A-Za-z0-9_.-]{0,64}$"))]
    pub name: String,
}

/// Arguments of `destroy_sandbox`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DestroySandboxArgs {
    /// Sandbox made by create_sandbox.
    #[schemars(regex(pattern = "^sb_[0-9a-f]{32}$"))]
    pub sandbox_id: String,
}
