//! The errors of the library. Each says what failed, why, and what to do.

use std::io;
use std::path::PathBuf;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};

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
    /// The VMM program could not be started.
    #[error("cannot start the VMM {}: {source}", path.display())]
    Spawn {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VM did not come up.
    #[error("the VM did not start: {phase}: {reason}{}", console_tail(.console))]
    Boot {
        /// What was going on: one of the phases of the boot, in words.
        phase: String,
        /// Why it failed.
        reason: String,
        /// Last lines of the guest's console.
        console: String,
    },
    /// The VM ended or fell silent during a task. Whether the task took effect is not known.
    #[error("the VM was lost: {reason}{}", console_tail(.console))]
    GuestLost {
        /// Why.
        reason: String,
        /// Last lines of the guest's console.
        console: String,
    },
    /// The guest agent refused a request.
    #[error("{0}")]
    Agent(String),
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
            Self::Image(_) | Self::Kvm(_) | Self::Scratch(_) | Self::Spawn { .. } => {
                ErrorClass::Internal
            }
            Self::Io { .. } => ErrorClass::Internal,
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

/// Most lines and bytes of the console in a message.
const CONSOLE_LINES: usize = 20;
const CONSOLE_BYTES: usize = 4096;

/// The end of a console as it appears in a message. The bytes come from the guest, so control
/// characters, which could drive the reader's terminal, are replaced.
fn console_tail(console: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut bytes = 0usize;
    for line in console.lines().rev().filter(|l| !l.trim().is_empty()).take(CONSOLE_LINES) {
        let clean: String =
            line.chars().map(|c| if c.is_control() && c != '\t' { '?' } else { c }).collect();
        let clean = clean.trim_end_matches('?').to_owned();
        bytes = bytes.saturating_add(clean.len());
        if bytes > CONSOLE_BYTES {
            break;
        }
        lines.push(clean);
    }
    if lines.is_empty() {
        return String::new();
    }
    lines.reverse();
    format!("\nLast lines of the guest's console:\n  {}", lines.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn console_cannot_drive_the_terminal() {
        let error = Error::Boot {
            phase: "p".into(),
            reason: "r".into(),
            console: "a\u{1b}[2Jb\r\n\n\u{7}last\n".into(),
        };
        let text = error.to_string();
        assert!(!text.contains('\u{1b}') && !text.contains('\u{7}'), "{text:?}");
        assert!(text.ends_with("a?[2Jb\n  ?last"), "{text:?}");
    }

    #[test]
    fn console_is_bounded() {
        let console = "x".repeat(1000).to_string() + "\n";
        let text = console_tail(&console.repeat(100));
        assert!(text.len() < CONSOLE_BYTES + 200);
    }

    #[test]
    fn classes() {
        let lost = Error::GuestLost { reason: "gone".into(), console: String::new() };
        let task = TaskError::from(lost);
        assert_eq!((task.class, task.retry), (ErrorClass::GuestLost, Retry::Unknown));
        assert_eq!(task.message, "the VM was lost: gone");
    }
}
