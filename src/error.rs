//! The errors of the library. Each says what failed, why, and what to do.

use std::io;
use std::path::PathBuf;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};

use crate::boot::BootPhase;
use crate::evidence::Evidence;
use crate::image::ImageError;
use crate::kvm::KvmError;
use crate::shares::ShareError;

/// Why Casulo could not do what was asked. A program that fails is a result, not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    /// An image, the guest kernel or the agent's boot volume cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A folder or file cannot be shared.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// KVM cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The scratch disk could not be made.
    #[error("cannot make the scratch disk: {0}")]
    Scratch(String),
    /// What sandboxes put out could not be kept.
    #[error("{0}")]
    Artifacts(String),
    /// The VMM program could not be started.
    #[error("cannot start the VMM {}: {source}", path.display())]
    Spawn {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VM did not come up.
    #[error("the VM did not start: {phase}{}: {reason}{evidence}", in_brackets(.step))]
    Boot {
        /// What was going on.
        phase: BootPhase,
        /// Step of building the VM that failed, in the VMM's own words.
        step: Option<String>,
        /// Why it failed.
        reason: String,
        /// What is known of the guest.
        evidence: Box<Evidence>,
    },
    /// The VM ended or fell silent during a task. Whether the task took effect is not known.
    #[error("the VM was lost: {reason}{evidence}")]
    GuestLost {
        /// Why.
        reason: String,
        /// What is known of the guest.
        evidence: Box<Evidence>,
    },
    /// The guest agent refused a request.
    #[error("{0}")]
    Agent(String),
    /// The caller did not want it any more.
    #[error("the call was cancelled; its processes were killed")]
    Cancelled,
    /// An operation of the host failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// An error of the host's system, with what was tried.
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }

    /// Kind of the error.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Invalid(_) | Self::Share(_) | Self::Agent(_) => ErrorClass::InvalidArgument,
            Self::Image(ImageError::Unknown { .. } | ImageError::Name { .. }) => {
                ErrorClass::InvalidArgument
            }
            Self::Boot { .. } => ErrorClass::BootFailed,
            Self::GuestLost { .. } => ErrorClass::GuestLost,
            Self::Image(_) | Self::Kvm(_) | Self::Scratch(_) | Self::Artifacts(_) => {
                ErrorClass::Internal
            }
            Self::Spawn { .. } | Self::Io { .. } | Self::Cancelled => ErrorClass::Internal,
        }
    }

    /// Whether the same request may succeed later.
    pub fn retry(&self) -> Retry {
        match self {
            Self::GuestLost { .. } => Retry::Unknown,
            Self::Boot { .. } | Self::Spawn { .. } | Self::Io { .. } => Retry::Yes,
            _ => Retry::No,
        }
    }
}

impl From<Error> for TaskError {
    fn from(error: Error) -> Self {
        Self { class: error.class(), retry: error.retry(), message: error.to_string() }
    }
}

fn in_brackets(step: &Option<String>) -> String {
    step.as_ref().map_or_else(String::new, |step| format!(" ({step})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_boot_tells_phase_step_and_reason() {
        let boot = |step| Error::Boot {
            phase: BootPhase::Building,
            step,
            reason: "no".into(),
            evidence: Box::default(),
        };
        assert_eq!(boot(None).to_string(), "the VM did not start: building the VM: no");
        let text = boot(Some("kernel".into())).to_string();
        assert_eq!(text, "the VM did not start: building the VM (kernel): no");
    }

    #[test]
    fn classes() {
        let lost = Error::GuestLost { reason: "gone".into(), evidence: Box::default() };
        let task = TaskError::from(lost);
        assert_eq!((task.class, task.retry), (ErrorClass::GuestLost, Retry::Unknown));
        assert_eq!(task.message, "the VM was lost: gone");
    }
}
