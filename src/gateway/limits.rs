//! What a gateway allows. The table of docs/mcp-limits.md says the same.

use std::time::Duration;

/// Default of `max_output_bytes`.
pub(super) const DEFAULT_OUTPUT_BYTES: u32 = 24 * 1024;
/// Longest wait of a call for its place, and of a call without `sandbox_id` for its sandbox.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// What a gateway allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most sandboxes at once, fresh and kept.
    pub sandboxes: usize,
    /// Most of them that one caller can have.
    pub sandboxes_per_caller: usize,
    /// Most memory of all sandboxes together, in MiB; `None`: what the machine has.
    pub memory_mib: Option<u64>,
    /// Most calls that run at once; more wait.
    pub calls: usize,
    /// Most of them that are one caller's.
    pub calls_per_caller: usize,
    /// Most calls of one caller in a minute, over time.
    pub calls_per_minute: u32,
    /// Most calls of one caller in a moment.
    pub burst: u32,
    /// Most of `max_output_bytes`.
    pub output_bytes: u32,
    /// Time without a call after which a kept sandbox ends.
    pub idle: Duration,
    /// Age at which a kept sandbox ends.
    pub life: Duration,
    /// How long files that came out of a sandbox can be fetched after its end; zero: not at all.
    pub artifact_ttl: Duration,
    /// Most such files of one caller; the oldest go first.
    pub artifacts: usize,
    /// Most bytes of them.
    pub artifact_bytes: u64,
    /// Longest time for which a client of HTTP takes nothing of what is sent to it; then it is cut off.
    pub stall: Duration,
}

impl Limits {
    /// Sandboxes of `memory_mib` MiB that may be there at once.
    pub(super) fn places(&self, memory_mib: u32) -> usize {
        let all = self.memory_mib.unwrap_or_else(|| {
            let host = rustix::system::sysinfo();
            host.totalram.saturating_mul(host.mem_unit.max(1).into()) >> 20
        });
        let fit = all / u64::from(memory_mib.max(1));
        self.sandboxes.min(usize::try_from(fit).unwrap_or(usize::MAX))
    }
}

impl Default for Limits {
    /// Those of several callers.
    fn default() -> Self {
        Self {
            sandboxes: 16,
            sandboxes_per_caller: 8,
            memory_mib: None,
            calls: 32,
            calls_per_caller: 16,
            calls_per_minute: 600,
            burst: 200,
            output_bytes: 256 * 1024,
            idle: Duration::from_secs(15 * 60),
            life: Duration::from_secs(4 * 60 * 60),
            artifact_ttl: Duration::from_secs(60 * 60),
            artifacts: 10_000,
            artifact_bytes: 2 << 30,
            stall: Duration::from_secs(60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_memory_limits_the_number() {
        let limits = |memory_mib| Limits { memory_mib, ..Limits::default() };
        assert_eq!(limits(Some(1024)).places(512), 2);
        assert_eq!(limits(Some(1023)).places(512), 1);
        assert_eq!(limits(Some(511)).places(512), 0);
        assert_eq!(limits(Some(1 << 40)).places(512), 16);
        assert!(limits(None).places(32) >= 1);
        assert_eq!(limits(None).places(u32::MAX), 0);
    }
}
