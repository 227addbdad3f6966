//! Control messages between `casulo` and the guest agent.
//!
//! * The **boot channel**: the agent dials [`BOOT_PORT`] of the host once when it is up and says
//!   [`Hello`]; the host answers with [`Personalise`]; the agent mounts the shares, seeds its entropy,
//!   starts to listen and says [`Personalised`]. One JSON object a line. The channel stays open for
//!   the life of the VM; nothing more is said on it.
//! * **MCP** (newline-delimited JSON-RPC) on [`MCP_PORT`] of the guest: the tools whose arguments and
//!   results are below. They are private to Casulo: the gateway on the host owns the public tools.
//! * **Streams** on [`STREAM_PORT`] of the guest: bulk bytes in the frames of [`crate::stream`]. The
//!   host opens one, sends `Open` with a token of its own choice, and names the token in the call
//!   ([`RunCommand::stream`]).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Version of the agent protocol; a mismatch is a named error on either side.
pub const VERSION: u32 = 1;
/// Port of the host that the agent dials when it is ready.
pub const BOOT_PORT: u32 = 1024;
/// Port of the guest on which the agent serves MCP.
pub const MCP_PORT: u32 = 1024;
/// Port of the guest on which the agent accepts bulk streams.
pub const STREAM_PORT: u32 = 1025;
/// Longest line on the boot channel in bytes.
pub const MAX_LINE: usize = 256 * 1024;
/// Longest line of the agent's MCP that the host accepts, in bytes.
pub const MAX_MCP_LINE: usize = 16 * 1024 * 1024;
/// Folder of the guest in which the agent keeps the whole output of calls (see [`ExecOptions::keep`]).
pub const CALLS_PATH: &str = "/run/casulo-calls";
/// Tag of the virtio-fs device.
pub const FS_TAG: &str = "casulo";

/// First line from the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the agent.
    pub protocol: u32,
    /// Version of the agent's package, for messages.
    pub agent: String,
    /// Microseconds of guest uptime when the agent began, and when it dialled.
    pub started_us: u64,
    /// See `started_us`.
    pub dialled_us: u64,
}

/// First line from the host on every start, cold or restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Personalise {
    /// [`VERSION`] of the host.
    pub protocol: u32,
    /// Fresh random bytes for the guest kernel's pool, in lower-case hex.
    pub entropy: String,
    /// Wall clock in nanoseconds since the epoch.
    pub clock_ns: u64,
    /// Host name of the guest.
    pub hostname: String,
    /// What to bind from the virtio-fs device, in order.
    pub mounts: Vec<Mount>,
    /// Most processes of the workload; also the default of each command's cgroup.
    pub max_processes: u32,
    /// Most memory of the workload in bytes; `None`: what the VM has, less a reserve for the agent.
    pub max_memory: Option<u64>,
}

/// A share and the place where the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Name of the share on the virtio-fs device.
    pub share: String,
    /// Absolute path in the guest, made if it does not exist.
    pub target: String,
    /// Whether to mount it read-only; the host refuses writes in any case.
    pub read_only: bool,
    /// Whether the share is a single file.
    pub file: bool,
}

/// Second line from the agent: everything is mounted and it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Personalised {
    /// All is well.
    Ready {
        /// Microseconds of guest uptime.
        ready_us: u64,
    },
    /// What failed and why, in a sentence.
    Failed {
        /// The sentence.
        error: String,
    },
}

/// Names of the agent's tools.
pub mod tool {
    /// Takes [`super::RunCommand`], gives [`super::CommandResult`].
    pub const RUN_COMMAND: &str = "run_command";
    /// Takes [`super::ExecuteCode`], gives [`super::CommandResult`].
    pub const EXECUTE_CODE: &str = "execute_code";
    /// Takes [`super::ReadFile`], gives [`super::FileContent`].
    pub const READ_FILE: &str = "read_file";
    /// Takes [`super::WriteFile`], gives [`super::FileWritten`].
    pub const WRITE_FILE: &str = "write_file";
    /// Takes [`super::ListFiles`], gives [`super::FileList`].
    pub const LIST_FILES: &str = "list_files";
}

/// Rows and columns of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// How a command is to run; part of [`RunCommand`] and [`ExecuteCode`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExecOptions {
    /// The whole environment: nothing is inherited. `HOME`, `USER`, `LOGNAME`, `SHELL`, `PATH` and
    /// `TERM` (with a terminal) get defaults of the user when absent.
    pub env: BTreeMap<String, String>,
    /// Absolute working folder.
    pub cwd: String,
    /// Name, uid, or `user:group` in the guest; empty: uid 1000.
    pub user: String,
    /// Milliseconds from the start of the command; 0: no limit.
    pub timeout_ms: u64,
    /// Token of a stream that carries stdin, stdout and stderr; `None`: stdin is `stdin`, and the
    /// result holds the head and tail of the output.
    pub stream: Option<u64>,
    /// Standard input when there is no stream.
    pub stdin: String,
    /// A terminal instead of pipes, with its first size. Only with a stream.
    pub terminal: Option<WindowSize>,
    /// Most bytes of each of stdout and stderr to keep in the result, half of them from the end.
    pub max_output: u64,
    /// Keep the whole of an output that a stream carries in a file of the guest too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
}

/// Where the whole of an output is kept: `NAME.stdout` and `NAME.stderr` in [`CALLS_PATH`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Keep {
    /// Letters, digits and `-`.
    pub name: String,
    /// Bytes up to which an output gets no file.
    pub after: u64,
}

/// Runs one program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunCommand {
    /// Program and arguments; a program without `/` is searched in `PATH`.
    pub argv: Vec<String>,
    /// How.
    #[serde(default)]
    pub options: ExecOptions,
}

/// Runs source text with an interpreter of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecuteCode {
    /// `python`, `bash` or `javascript`.
    pub language: String,
    /// The source.
    pub code: String,
    /// How.
    #[serde(default)]
    pub options: ExecOptions,
    /// Run it in the resident interpreter of this language and user, which is started, as
    /// `options` say, if there is none. Needs a stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<Session>,
}

/// What a call changes in a resident interpreter before its source runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Session {
    /// Working folder to enter; empty: stay where the last call left it.
    pub cwd: String,
    /// Variables to add to its environment.
    pub env: BTreeMap<String, String>,
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct CommandResult {
    /// Exit status; `None` after a signal or timeout.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether the time ran out; then all its processes were killed.
    pub timed_out: bool,
    /// Whether the guest killed a process of it for want of memory.
    pub oom: bool,
    /// Why the program could not be started (then `exit_code` is 126 or 127).
    pub start_error: Option<String>,
    /// Standard output, when there was no stream.
    pub stdout: Captured,
    /// Standard error, when there was no stream.
    pub stderr: Captured,
    /// Milliseconds from the start of the program to its end.
    pub duration_ms: u64,
    /// Bytes of standard output in its file; 0: there is none.
    pub stdout_kept: u64,
    /// Bytes of standard error in its file; 0: there is none.
    pub stderr_kept: u64,
    /// Value of the last expression in a resident interpreter.
    pub result: Option<String>,
    /// What earlier calls left in the resident interpreter is gone: it has ended, or was killed since.
    pub state_lost: bool,
}

/// Head and tail of an output.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Captured {
    /// First bytes, base64.
    pub head: String,
    /// Last bytes, base64; empty when `head` holds all.
    pub tail: String,
    /// Bytes written in all.
    pub bytes: u64,
}

/// Reads part of a regular file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// Absolute, or relative to the working folder.
    pub path: String,
    /// First byte.
    #[serde(default)]
    pub offset: u64,
    /// Most bytes.
    pub limit: u64,
}

/// Answer to [`ReadFile`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileContent {
    /// The bytes, base64.
    pub data: String,
    /// Size of the whole file.
    pub size: u64,
}

/// Writes a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    /// Absolute, or relative to the working folder; missing folders are made.
    pub path: String,
    /// The bytes, base64.
    pub data: String,
    /// Whether to add at the end instead of replacing the file.
    #[serde(default)]
    pub append: bool,
    /// Permission bits of a new file; `None`: 0644.
    #[serde(default)]
    pub mode: Option<u32>,
}

/// Answer to [`WriteFile`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileWritten {
    /// Size of the file afterwards.
    pub size: u64,
}

/// Lists a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListFiles {
    /// Absolute, or relative to the working folder.
    pub path: String,
    /// Whether to list the folders below too.
    #[serde(default)]
    pub recursive: bool,
    /// Most entries.
    pub limit: u64,
}

/// Answer to [`ListFiles`], sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileList {
    /// The entries.
    pub entries: Vec<FileEntry>,
    /// Whether there were more than the limit.
    pub truncated: bool,
}

/// One entry of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FileEntry {
    /// Relative to the listed folder; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// `file`, `directory`, `symlink` or `other`.
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Seconds since the epoch.
    pub modified: i64,
}
