//! What is known of a guest that failed: typed for programs, in words for people.
//!
//! All of it comes from a guest that may be hostile: it explains, nothing is decided by it, and what is
//! text is cleaned before it reaches a terminal.

use std::fmt;

use casulo_protocol::vmm::{
    DeviceState, Diagnosis, ExitReason, GuestEnd, UnknownAccess, VcpuState,
};

/// Most lines and bytes of the console in a message.
const CONSOLE_LINES: usize = 20;
const CONSOLE_BYTES: usize = 4096;
/// Most vCPUs and accesses in a message.
const VCPUS: usize = 4;
const ACCESSES: usize = 8;

/// What is known of a guest that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evidence {
    /// Why the guest ended, if it did.
    pub reason: Option<ExitReason>,
    /// Where its vCPUs were: the one that ended the guest, or all of a guest that hangs.
    pub vcpus: Vec<VcpuState>,
    /// Its virtio devices.
    pub devices: Vec<DeviceState>,
    /// What it looked for in vain.
    pub accesses: Vec<UnknownAccess>,
    /// Last bytes of its console.
    pub console: String,
}

impl Evidence {
    /// Of a guest that ended.
    pub(crate) fn of_end(end: GuestEnd, console: String) -> Self {
        Self {
            reason: Some(end.reason),
            vcpus: end.vcpu.into_iter().collect(),
            devices: end.devices,
            accesses: end.accesses,
            console,
        }
    }

    /// Of a guest that hangs.
    pub(crate) fn of_hang(found: Diagnosis) -> Self {
        Self {
            reason: None,
            vcpus: found.vcpus,
            devices: found.devices,
            accesses: found.accesses,
            console: found.console,
        }
    }

    /// What the user can do about it.
    fn advice(&self) -> Option<&'static str> {
        const MEMORY: &str = "the guest had too little memory; give it more (--memory)";
        let short_of_memory =
            ["Out of memory", "out of memory", "deadlocked on memory", "Out of Memory"];
        match self.reason.as_ref()? {
            ExitReason::Panic if short_of_memory.iter().any(|w| self.console.contains(w)) => {
                Some(MEMORY)
            }
            ExitReason::Panic => Some("the console tells why"),
            ExitReason::Reset | ExitReason::Halted => {
                Some("programs that run as root in the guest can end it (--user changes the user)")
            }
            ExitReason::TripleFault => Some(
                "the guest kernel was overwritten, or asked for a reset in the last way it knows",
            ),
            ExitReason::InternalError { .. }
            | ExitReason::FailEntry { .. }
            | ExitReason::RunFailed { .. }
            | ExitReason::UnknownExit { .. } => Some(
                "`casulo doctor` tells whether KVM works on this host; `--host emulated` does without",
            ),
            _ => None,
        }
    }

    /// Whether registers say more than the reason does.
    fn registers_matter(&self) -> bool {
        !matches!(self.reason, Some(ExitReason::Reset | ExitReason::Halted | ExitReason::Panic))
    }
}

impl fmt::Display for Evidence {
    /// The part of a message that follows the sentence of the error; empty when nothing is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(advice) = self.advice() {
            write!(f, "; {advice}")?;
        }
        if self.registers_matter() {
            for vcpu in self.vcpus.iter().take(VCPUS) {
                write!(f, "\n  {vcpu}")?;
            }
            if let Some(more) = self.vcpus.len().checked_sub(VCPUS).filter(|more| *more > 0) {
                write!(f, "\n  and {more} vCPUs more")?;
            }
        }
        if !self.accesses.is_empty() && self.reason != Some(ExitReason::Reset) {
            let list: Vec<String> =
                self.accesses.iter().take(ACCESSES).map(ToString::to_string).collect();
            write!(f, "\n  what the guest looked for and is not there: {}", list.join(", "))?;
        }
        f.write_str(&console_tail(&self.console))
    }
}

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
    use casulo_protocol::vmm::{AccessKind, Registers};

    use super::*;

    fn vcpu(number: u8) -> VcpuState {
        VcpuState {
            vcpu: number,
            halted: false,
            waits_for_start: false,
            privilege: 0,
            registers: Registers { rip: 0xabcd, ..Registers::default() },
        }
    }

    #[test]
    fn console_cannot_drive_the_terminal() {
        let console = "a\u{1b}[2Jb\r\n\n\u{7}last\n".into();
        let text = Evidence { console, ..Evidence::default() }.to_string();
        assert!(!text.contains('\u{1b}') && !text.contains('\u{7}'), "{text:?}");
        assert!(text.ends_with("a?[2Jb\n  ?last"), "{text:?}");
    }

    #[test]
    fn a_message_is_bounded() {
        let access = UnknownAccess {
            kind: AccessKind::Port,
            address: 1,
            write: true,
            value: u64::MAX,
            count: u64::MAX,
        };
        let evidence = Evidence {
            vcpus: (0..32).map(vcpu).collect(),
            accesses: vec![access; 32],
            console: ("x".repeat(1000) + "\n").repeat(100),
            ..Evidence::default()
        };
        let text = evidence.to_string();
        assert!(text.len() < CONSOLE_BYTES + 3000, "{}", text.len());
        assert!(text.contains("and 28 vCPUs more"));
    }

    #[test]
    fn registers_are_shown_where_they_tell_something() {
        let shown = |reason| {
            let evidence =
                Evidence { reason, vcpus: vec![vcpu(0)], ..Evidence::default() }.to_string();
            evidence.contains("rip=0xabcd")
        };
        assert!(shown(None) && shown(Some(ExitReason::TripleFault)));
        assert!(!shown(Some(ExitReason::Reset)) && !shown(Some(ExitReason::Panic)));
        assert_eq!(Evidence::default().to_string(), "");
    }

    #[test]
    fn each_reason_has_advice_of_its_own() {
        let advice = |reason, console: &str| {
            let (reason, console) = (Some(reason), console.to_owned());
            Evidence { reason, console, ..Evidence::default() }.to_string()
        };
        assert!(advice(ExitReason::Panic, "Kernel panic: Out of memory").contains("--memory"));
        assert!(!advice(ExitReason::Panic, "Kernel panic: no init").contains("--memory"));
        assert!(advice(ExitReason::Halted, "").contains("root"));
        assert!(advice(ExitReason::RunFailed { errno: 14 }, "").contains("casulo doctor"));
    }
}
