//! Results of the public tools, beside `RunResult`.

use casulo_protocol::result::{FileChange, HostKind, Rejected};
use schemars::JsonSchema;
use serde::Serialize;

use super::args::Encoding;

/// Result of `read_file`. It has no output schema: an image is no such object.
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
    /// Whether that is the end of the file.
    pub end: bool,
}

/// Result of `write_file`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WriteFileResult {
    /// Size of the file afterwards in bytes.
    pub size: u64,
}

/// Result of `start_process`, `poll_process` and `stop_process`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ProcessResult {
    /// Pass it to poll_process and stop_process.
    pub process_id: String,
    /// Whether it still runs.
    pub running: bool,
    /// Exit status; `null` while it runs and after a signal.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether a process of it was killed for want of memory.
    pub oom: bool,
    /// Standard output and error from the cursor on, in the order in which they came.
    pub output: String,
    /// Where to read on.
    pub next_cursor: u64,
    /// Bytes written in all.
    pub output_bytes: u64,
    /// Bytes between the cursor and `output` that are not held any more.
    pub skipped_bytes: u64,
    /// Milliseconds since its start, or that it ran.
    pub duration_ms: u64,
    /// Files of the sandbox with the whole output, once it has ended and was long.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub output_files: Vec<String>,
    /// Why it is not known how it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Its sandbox.
    pub sandbox_id: String,
    /// What the sandbox runs on.
    pub host: HostKind,
}

/// Result of `create_sandbox`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CreateSandboxResult {
    /// Pass it to the other tools.
    pub sandbox_id: String,
    /// Whether it is new; else it is the one made under this name before.
    pub created: bool,
    /// Seconds without a call after which the sandbox ends.
    pub idle_timeout_seconds: u64,
    /// Seconds after which it ends in any case.
    pub max_life_seconds: u64,
}

/// A file that came out of a sandbox and is kept.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ArtifactFile {
    /// Relative to the output folder; made safe to read.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 in lower-case hex.
    pub sha256: String,
    /// What names it to resources/read.
    pub uri: String,
}

/// Result of `destroy_sandbox`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DestroySandboxResult {
    /// Always true; a sandbox that does not exist is an error.
    pub destroyed: bool,
    /// The files that came out of it and are kept for a while, sorted by path: each is a resource, which
    /// resources/read reads.
    pub artifacts: Vec<ArtifactFile>,
    /// Further ones that are kept, for which `artifacts` has no room.
    pub artifacts_omitted: u64,
    /// Files that are not kept.
    pub artifacts_lost: u64,
    /// Seconds for which they are kept.
    pub artifact_ttl_seconds: u64,
    /// What to know of those that are not named or not kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
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
