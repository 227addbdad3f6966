//! What a caller gets: how a command ended, and what it left.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a command ended. The same object in `--json`, in MCP results and in the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct RunResult {
    /// Exit status; `null` after a signal or timeout.
    pub exit_code: Option<i32>,
    /// The signal that ended the command.
    pub signal: Option<i32>,
    /// Standard output as text; empty when it was streamed.
    pub stdout: String,
    /// Standard error as text; empty when it was streamed.
    pub stderr: String,
    /// Whether the time ran out.
    pub timed_out: bool,
    /// Whether a process was killed for want of memory.
    pub oom: bool,
    /// Whether `stdout` or `stderr` holds less than the command wrote.
    pub truncated: bool,
    /// Bytes that the command wrote to standard output.
    pub stdout_bytes: u64,
    /// Bytes that the command wrote to standard error.
    pub stderr_bytes: u64,
    /// Whether the limit of the output folder (or the host's disk) was met.
    pub output_limit_hit: bool,
    /// Value of the last expression, where source text ran in the interpreter of a kept sandbox.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<String>,
    /// Whether the variables of earlier calls are gone: the interpreter has ended or was killed.
    #[serde(skip_serializing_if = "is_false", default)]
    pub state_lost: bool,
    /// File of the kept sandbox with the whole standard output.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stdout_file: Option<String>,
    /// File of the kept sandbox with the whole standard error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stderr_file: Option<String>,
    /// What to do about what is missing.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub note: Option<String>,
    /// Milliseconds that the command ran.
    pub duration_ms: u64,
    /// What became of the sandbox.
    pub sandbox: SandboxFate,
    /// The kept sandbox.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sandbox_id: Option<String>,
    /// What the VM ran on.
    pub host: HostKind,
    /// What changed in the output folder, sorted by path.
    pub files: Vec<FileChange>,
    /// Further changes for which `files` has no room.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub files_omitted: u64,
    /// Which files of the shares the guest has read and written, in the order in which it first opened
    /// them; at most 4,096.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub accessed: Vec<FileUse>,
    /// How often others were opened, for which `accessed` has no room.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub accessed_omitted: u64,
    /// What was not let out because it would be dangerous to meet, sorted by share and path.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub rejected: Vec<Rejected>,
    /// Further ones for which `rejected` has no room.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub rejected_omitted: u64,
    /// Regular files that matched no artifact pattern and are gone.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub withheld: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_false(b: &bool) -> bool {
    !*b
}

impl RunResult {
    /// A result of a discarded sandbox on a native host in which nothing has happened yet.
    pub fn new() -> Self {
        Self {
            exit_code: None,
            signal: None,
            stdout: String::new(),
            stderr: String::new(),
            timed_out: false,
            oom: false,
            truncated: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            output_limit_hit: false,
            result: None,
            state_lost: false,
            stdout_file: None,
            stderr_file: None,
            note: None,
            duration_ms: 0,
            sandbox: SandboxFate::Discarded,
            sandbox_id: None,
            host: HostKind::Native,
            files: Vec::new(),
            files_omitted: 0,
            accessed: Vec::new(),
            accessed_omitted: 0,
            rejected: Vec::new(),
            rejected_omitted: 0,
            withheld: 0,
        }
    }

    /// Exit status of `casulo run` for this result: the command's own, 128+n, or 124.
    pub fn exit_status(&self) -> u8 {
        if self.timed_out {
            return 124;
        }
        let status = match (self.exit_code, self.signal) {
            (Some(code), _) => code,
            (None, Some(signal)) => signal.saturating_add(128),
            (None, None) => 125,
        };
        u8::try_from(status & 0xff).unwrap_or(125)
    }
}

impl Default for RunResult {
    fn default() -> Self {
        Self::new()
    }
}

/// What became of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxFate {
    /// It lives on under its id.
    Kept,
    /// It is gone.
    Discarded,
}

/// What a VM ran on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostKind {
    /// This machine's own KVM.
    Native,
    /// KVM of an emulated machine: for development, no boundary against hostile code.
    Emulated,
}

/// A file that a task left in, changed in or removed from the output folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct FileChange {
    /// Relative to the output folder; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// SHA-256 in lower-case hex. Only of regular files that did not change while they were read, and
    /// not of those beyond the 4 GiB that are read for one result.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sha256: Option<String>,
    /// What happened to it.
    pub change: Change,
    /// What names it to resources/read, where a gateway keeps it for a while.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uri: Option<String>,
}

impl FileChange {
    /// A change without a digest.
    pub fn new(path: String, kind: FileKind, size: u64, change: Change) -> Self {
        Self { path, kind, size, sha256: None, change, uri: None }
    }
}

/// What a guest has done with one file of a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct FileUse {
    /// Path in the guest when the file was first opened; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// Bytes that the guest has fetched. Its kernel reads ahead, and reads again from its cache without
    /// asking: so this may be more or less than its programs have read.
    pub read: u64,
    /// Bytes that the guest has written.
    pub written: u64,
    /// Whether the guest made it, wrote to it or changed its size.
    pub changed: bool,
}

impl FileUse {
    /// A file that was opened.
    pub fn new(path: String, read: u64, written: u64, changed: bool) -> Self {
        Self { path, read, written, changed }
    }
}

/// Something that a task left in a writable share and that was removed when its sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[non_exhaustive]
pub struct Rejected {
    /// Where the share is in the guest.
    pub share: String,
    /// Relative to the share; bytes that are not UTF-8 are replaced, and at most 4,096 are told.
    pub path: String,
    /// What it is. A folder was removed with all that it held.
    pub kind: FileKind,
    /// Why.
    pub reason: Reason,
    /// For [`Reason::Place`]: what is wrong with its place.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub detail: Option<String>,
    /// Why it could not be removed, and so is still there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub still_there: Option<String>,
}

impl Rejected {
    /// One that is gone.
    pub fn new(share: String, path: String, kind: FileKind, reason: Reason) -> Self {
        Self { share, path, kind, reason, detail: None, still_there: None }
    }
}

/// Why something is not let out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// A symbolic link that leads out of the share, or may once its target exists.
    LinkOutside,
    /// A symbolic link, where none are wanted.
    Link,
    /// A FIFO, a socket or a device.
    Special,
    /// Its name holds control characters, which could drive a terminal or split a line.
    Name,
    /// An artifact whose place in the output folder is taken by something other than a regular file,
    /// or cannot be written.
    Place,
}

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link, never followed.
    Symlink,
    /// Anything else.
    Other,
}

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is new.
    Created,
    /// Its content or metadata changed.
    Modified,
    /// It is gone.
    Deleted,
}
