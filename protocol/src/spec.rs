//! What a caller asks for: a sandbox, and a command in it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::agent::WindowSize;

/// Default of [`SandboxSpec::memory_mib`].
pub const DEFAULT_MEMORY_MIB: u32 = 512;
/// Default of [`SandboxSpec::output_limit`]: 1 GiB.
pub const DEFAULT_OUTPUT_LIMIT: u64 = 1 << 30;
/// Default of [`SandboxSpec::max_processes`].
pub const DEFAULT_MAX_PROCESSES: u32 = 512;
/// Where the input share is mounted.
pub const INPUT_PATH: &str = "/workspace/input";
/// Where the output share is mounted, and the default working folder.
pub const OUTPUT_PATH: &str = "/workspace/output";

/// A microVM to make. Unknown fields are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SandboxSpec {
    /// Name or digest of the image.
    pub image: String,
    /// Number of vCPUs, 1 to 32.
    pub cpus: u8,
    /// Guest memory in MiB, 32 to 1,048,576.
    pub memory_mib: u32,
    /// File or folder on the host to show read-only at [`INPUT_PATH`].
    pub input: Option<PathBuf>,
    /// Folder on the host to show read-write at [`OUTPUT_PATH`]. `None`: output is lost.
    pub output: Option<PathBuf>,
    /// Most bytes that may be added to the output folder.
    pub output_limit: u64,
    /// Most names (files, folders, links) that may be added to the output folder; `None`: as many as the
    /// bytes allow, 4 KiB each.
    pub output_files: Option<u64>,
    /// Whether the host changes read-only shares while the sandbox runs: then the guest asks again
    /// instead of trusting what it has read. Slower.
    pub input_live: bool,
    /// Whether extended attributes `user.*` of files in shares are shown and kept.
    pub share_xattr: bool,
    /// Which symbolic links may stay in writable shares.
    pub output_links: OutputLinks,
    /// Patterns of the files to release into the output folder; empty: the guest writes to the output
    /// folder itself. `*` and `?` match within one name, `**` matches folders.
    pub artifacts: Vec<String>,
    /// More shares.
    pub shares: Vec<ShareSpec>,
    /// Whether folders that hold credentials may be shared.
    pub share_sensitive: bool,
    /// Size of a disk for the writable layer in MiB. `None`: a tmpfs of half the memory.
    pub scratch_mib: Option<u32>,
    /// Most processes in the guest, 1 to 65,536.
    pub max_processes: u32,
    /// Most seconds from the start until the agent is ready; `None`: 10, emulated 120.
    pub boot_timeout_seconds: Option<u32>,
    /// Whether to boot instead of using a template.
    pub cold: bool,
    /// Whose sandbox it is, for quotas and audit.
    pub tenant: Option<String>,
    /// Named unit of work, for audit.
    pub workspace: Option<String>,
    /// Free labels, for audit.
    pub labels: BTreeMap<String, String>,
    /// Makes a repeated request give the same sandbox.
    pub idempotency_key: Option<String>,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            image: "base".to_owned(),
            cpus: 1,
            memory_mib: DEFAULT_MEMORY_MIB,
            input: None,
            output: None,
            output_limit: DEFAULT_OUTPUT_LIMIT,
            output_files: None,
            input_live: false,
            share_xattr: false,
            output_links: OutputLinks::Inside,
            artifacts: Vec::new(),
            shares: Vec::new(),
            share_sensitive: false,
            scratch_mib: None,
            max_processes: DEFAULT_MAX_PROCESSES,
            boot_timeout_seconds: None,
            cold: false,
            tenant: None,
            workspace: None,
            labels: BTreeMap::new(),
            idempotency_key: None,
        }
    }
}

/// Which of the symbolic links that a task made may stay in writable shares when its sandbox ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputLinks {
    /// Those that stay inside their share wherever it lies on the host. An absolute one never does.
    #[default]
    Inside,
    /// All, also those that lead anywhere on the host.
    All,
    /// None.
    None,
}

/// One more share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareSpec {
    /// File or folder on the host.
    pub host: PathBuf,
    /// Absolute path in the guest.
    pub guest: String,
    /// Whether the guest may change it.
    #[serde(default)]
    pub writable: bool,
}

/// A command to run in a sandbox. Unknown fields are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RunSpec {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Environment beside the image's; nothing is inherited from the host.
    pub env: BTreeMap<String, String>,
    /// Working folder; `None`: the image's, else [`OUTPUT_PATH`].
    pub workdir: Option<String>,
    /// User in the guest; `None`: the image's, else uid 1000.
    pub user: Option<String>,
    /// Milliseconds from the start of the command; `None`: no limit.
    pub timeout_ms: Option<u64>,
    /// A terminal, with its first size.
    pub terminal: Option<WindowSize>,
}

impl RunSpec {
    /// A run of `command` with every default.
    pub fn new<I, S>(command: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        Self { command: command.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}
