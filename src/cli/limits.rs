//! Options for what a gateway allows.

use std::time::Duration;

use crate::gateway::Limits;

/// What clients may use.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct LimitOptions {
    /// Most sandboxes at once
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_sandboxes: u16,
    /// Most sandboxes of one caller [default: half of all, for `casulo mcp` all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_sandboxes_per_caller: Option<u16>,
    /// Most memory of all sandboxes together [default: the machine's]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    max_sum_of_memory: Option<u64>,
    /// Most calls that run at once; more wait
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_calls: u16,
    /// Most calls of one caller that run at once [default: half of all, for `casulo mcp` all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_calls_per_caller: Option<u16>,
    /// Most calls of one caller in a minute
    #[arg(long, default_value_t = 600, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_calls_per_minute: u32,
    /// Most of `max_output_bytes` of a call
    #[arg(long, default_value_t = 262_144, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(24_576..=1_048_576))]
    max_output_bytes: u32,
    /// Seconds without a call after which a kept sandbox ends
    #[arg(long, default_value_t = 900, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    idle_timeout: u32,
    /// Seconds after which a kept sandbox ends in any case
    #[arg(long, default_value_t = 14_400, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    max_life: u32,
    /// Seconds for which what a sandbox put out can be fetched after its end; 0: not at all
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    artifact_ttl: u32,
    /// Most files of one caller that are kept so; the oldest go first
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_artifacts: u32,
    /// Most bytes of them
    #[arg(long, default_value_t = 2 << 30, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    max_artifact_bytes: u64,
}

impl LimitOptions {
    /// The limits; `alone`: there is one caller.
    pub(crate) fn limits(&self, alone: bool) -> Limits {
        let part = |own: Option<u16>, all: u16| {
            let default = if alone { all } else { all.div_ceil(2) };
            usize::from(own.unwrap_or(default).min(all))
        };
        Limits {
            sandboxes: self.max_sandboxes.into(),
            sandboxes_per_caller: part(self.max_sandboxes_per_caller, self.max_sandboxes),
            memory_mib: self.max_sum_of_memory,
            calls: self.max_calls.into(),
            calls_per_caller: part(self.max_calls_per_caller, self.max_calls),
            calls_per_minute: self.max_calls_per_minute,
            output_bytes: self.max_output_bytes,
            idle: Duration::from_secs(self.idle_timeout.into()),
            life: Duration::from_secs(self.max_life.into()),
            artifact_ttl: Duration::from_secs(self.artifact_ttl.into()),
            artifacts: usize::try_from(self.max_artifacts).unwrap_or(usize::MAX),
            artifact_bytes: self.max_artifact_bytes,
            ..Limits::default()
        }
    }
}
