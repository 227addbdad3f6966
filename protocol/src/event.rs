//! The one stream of events that feeds timings, progress and audit.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::result::FileUse;
use crate::vmm::Counters;

/// Something that happened to a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// A phase of the life of a sandbox was reached.
    Phase {
        /// Which.
        phase: Phase,
        /// Microseconds since the sandbox was asked for.
        at_us: u64,
    },
    /// A command began.
    ExecStarted {
        /// Microseconds since the sandbox was asked for.
        at_us: u64,
    },
    /// A command ended and its result is known.
    ExecEnded {
        /// Microseconds since the sandbox was asked for.
        at_us: u64,
        /// Exit status, if it exited.
        exit_code: Option<i32>,
    },
    /// Which files of the shares the guest has read and written, once, when the sandbox ends.
    Files {
        /// Microseconds since the sandbox was asked for.
        at_us: u64,
        /// At most 4,096, in the order in which the guest first opened them.
        files: Vec<FileUse>,
        /// How often others were opened, for which there was no room.
        left_out: u64,
    },
    /// What the VM cost.
    Counters(Counters),
}

/// Phases of the life of a sandbox, in order.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// The request is checked and everything the VM needs is open.
    Prepared,
    /// The VMM process runs.
    VmmSpawned,
    /// The VM is built and its vCPUs are about to run.
    KernelEntered,
    /// The agent dialled: the kernel is up.
    AgentUp,
    /// The agent mounted the shares and listens.
    Ready,
    /// The VM is gone.
    Closed,
}
