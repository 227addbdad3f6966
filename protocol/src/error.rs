//! Errors that a caller can act on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An error of Casulo itself; a program that fails is a result, not an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{message}")]
pub struct TaskError {
    /// Kind of error.
    pub class: ErrorClass,
    /// What failed, why, and what to do.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retry: Retry,
}

/// Kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorClass {
    /// The request is wrong.
    InvalidArgument,
    /// No such sandbox: never made, expired, or another caller's.
    SandboxNotFound,
    /// A policy refuses it.
    Denied,
    /// A person must agree first.
    ApprovalRequired,
    /// A limit of the host or the operator is met.
    Capacity,
    /// The VM did not come up.
    BootFailed,
    /// The VM ended or fell silent during the task; whether the task took effect is not known.
    GuestLost,
    /// A fault of Casulo or its host.
    Internal,
}

/// Whether to try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// It may work.
    Yes,
    /// It will fail again.
    No,
    /// The task may already have taken effect.
    Unknown,
}
