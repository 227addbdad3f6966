//! What a gateway allows. The table of docs/mcp-limits.md is this file.

use std::time::Duration;

/// Default of `max_output_bytes`.
pub(super) const DEFAULT_OUTPUT_BYTES: u32 = 24 * 1024;

/// What a gateway allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most sandboxes at once, fresh and kept.
    pub sandboxes: usize,
    /// Time without a call after which a kept sandbox ends.
    pub idle: Duration,
    /// Age at which a kept sandbox ends.
    pub life: Duration,
    /// Most of `max_output_bytes`.
    pub output_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sandboxes: 16,
            idle: Duration::from_secs(15 * 60),
            life: Duration::from_secs(4 * 60 * 60),
            output_bytes: 256 * 1024,
        }
    }
}
