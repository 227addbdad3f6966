//! What a microVM tells of itself when it ends, or when it does not do what it should.
//!
//! Everything here comes from the guest or depends on it: it explains, and nothing is decided by it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a guest ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitReason {
    /// The guest reset the machine through the i8042: an orderly end.
    Reset,
    /// The guest kernel panicked (its console says so), whatever it did then.
    Panic,
    /// A triple fault (`KVM_EXIT_SHUTDOWN`): a crash, or the last resort of a kernel that wants a reset.
    TripleFault,
    /// Every vCPU waits for ever: halted with interrupts off, or never started. Linux without ACPI ends
    /// so when it is told to halt or to power off.
    Halted,
    /// KVM could not go on (`KVM_EXIT_INTERNAL_ERROR`).
    InternalError {
        /// `KVM_INTERNAL_ERROR_*`.
        suberror: u32,
        /// What KVM adds, at most 16 numbers; their meaning depends on the sub-error.
        data: Vec<u64>,
        /// The instruction that KVM could not emulate, when it tells: at most 15 bytes.
        instruction: Vec<u8>,
    },
    /// The processor refused to enter the guest (`KVM_EXIT_FAIL_ENTRY`).
    FailEntry {
        /// What the processor gives as the reason.
        hardware_reason: u64,
        /// Number of the host's CPU.
        host_cpu: u32,
    },
    /// KVM left the guest for a reason that this VMM never asks for.
    UnknownExit {
        /// `KVM_EXIT_*`.
        exit: u32,
    },
    /// `KVM_RUN` failed.
    RunFailed {
        /// Number of the error.
        errno: i32,
    },
    /// The VMM itself could not go on.
    Vmm {
        /// One sentence.
        detail: String,
    },
}

impl fmt::Display for ExitReason {
    /// A sentence without an end: what happened.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset => f.write_str("the guest ended itself (reset)"),
            Self::Panic => f.write_str("the guest kernel panicked"),
            Self::TripleFault => f.write_str("the guest crashed (triple fault)"),
            Self::Halted => f.write_str(
                "the guest halted or powered itself off (all of its CPUs stopped with interrupts off)",
            ),
            Self::InternalError { suberror, data, instruction } => {
                let name = match suberror {
                    1 => "an instruction that it cannot emulate",
                    2 => "simultaneous exceptions",
                    3 => "an exit while an event was delivered",
                    4 => "an unexpected exit of the processor",
                    _ => "unknown",
                };
                write!(
                    f,
                    "KVM could not go on (KVM_EXIT_INTERNAL_ERROR, sub-error {suberror}: {name}"
                )?;
                if !instruction.is_empty() {
                    f.write_str(", instruction")?;
                    for byte in instruction {
                        write!(f, " {byte:02x}")?;
                    }
                } else if !data.is_empty() {
                    write!(f, ", data {data:x?}")?;
                }
                f.write_str(")")
            }
            Self::FailEntry { hardware_reason, host_cpu } => write!(
                f,
                "the processor refused to enter the guest (KVM_EXIT_FAIL_ENTRY, reason \
                 {hardware_reason:#x}, host CPU {host_cpu})"
            ),
            Self::UnknownExit { exit } => {
                write!(f, "KVM left the guest for an unexpected reason (exit number {exit})")
            }
            Self::RunFailed { errno } => {
                let error = std::io::Error::from_raw_os_error(*errno);
                write!(f, "KVM could not run the guest (KVM_RUN: {error})")
            }
            Self::Vmm { detail } => write!(f, "the VMM stopped: {detail}"),
        }
    }
}

/// The end of a guest, with what explains it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestEnd {
    /// Why.
    pub reason: ExitReason,
    /// The vCPU that ended it, when one did and KVM told its registers.
    pub vcpu: Option<VcpuState>,
    /// Virtio devices, see [`Diagnosis::devices`].
    pub devices: Vec<DeviceState>,
    /// Accesses to what is not there, see [`Diagnosis::accesses`].
    pub accesses: Vec<UnknownAccess>,
}

/// Where a running guest stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Last bytes of the guest's console, lossy.
    pub console: String,
    /// The vCPUs that answered, in order. One that does not is in a call to the host.
    pub vcpus: Vec<VcpuState>,
    /// Virtio devices, in the order of their addresses.
    pub devices: Vec<DeviceState>,
    /// Accesses of the guest to model specific registers, ports and memory that are not there, each
    /// once, at most 32. They do not end a VM, but may explain one that ends or hangs.
    pub accesses: Vec<UnknownAccess>,
}

/// A vCPU between two instructions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuState {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Whether it waits for an interrupt.
    pub halted: bool,
    /// Whether it has not been started by the others.
    pub waits_for_start: bool,
    /// Privilege level: 0 is the kernel, 3 a program.
    pub privilege: u8,
    /// Registers.
    pub registers: Registers,
}

impl VcpuState {
    /// Bit of `rflags`: interrupts are on.
    const INTERRUPTS: u64 = 1 << 9;

    /// Whether nothing inside of the VM can wake this vCPU.
    #[must_use]
    pub fn stopped_for_ever(&self) -> bool {
        self.waits_for_start || self.halted && self.registers.rflags & Self::INTERRUPTS == 0
    }
}

/// Registers that show where a guest was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the processor's names")]
pub struct Registers {
    pub rip: u64,
    pub rsp: u64,
    pub rflags: u64,
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
}

impl fmt::Display for VcpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}", self.vcpu)?;
        if self.waits_for_start {
            return f.write_str(": not started");
        }
        let r = &self.registers;
        let interrupts = if r.rflags & Self::INTERRUPTS == 0 { "off" } else { "on" };
        let doing = match (self.halted, self.privilege) {
            (true, _) => "halted",
            (false, 3) => "in a program",
            (false, _) => "in the kernel",
        };
        write!(
            f,
            ": {doing}, interrupts {interrupts}, rip={:#x} rsp={:#x} rflags={:#x} cr0={:#x} cr2={:#x} \
             cr3={:#x} cr4={:#x} rax={:#x} rbx={:#x} rcx={:#x} rdx={:#x} rsi={:#x} rdi={:#x}",
            r.rip,
            r.rsp,
            r.rflags,
            r.cr0,
            r.cr2,
            r.cr3,
            r.cr4,
            r.rax,
            r.rbx,
            r.rcx,
            r.rdx,
            r.rsi,
            r.rdi
        )
    }
}

/// A virtio device as its driver left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// Device type of the virtio specification: 2 block, 4 entropy, 5 balloon, 19 socket, 26 file system.
    pub device: u32,
    /// The status register.
    pub status: u32,
    /// How often the device has looked at its queues.
    pub rounds: u64,
}

impl DeviceState {
    const DRIVER_OK: u32 = 4;

    /// Whether a driver has set it up.
    #[must_use]
    pub fn driver_ok(&self) -> bool {
        self.status & Self::DRIVER_OK != 0
    }
}

/// What the guest looked for in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessKind {
    /// A model specific register that KVM does not know; the guest got #GP.
    Msr,
    /// A port; reads gave ones.
    Port,
    /// An address without memory or a device; reads gave ones.
    Memory,
}

/// An access to what is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownAccess {
    /// Of what.
    pub kind: AccessKind,
    /// Number or address.
    pub address: u64,
    /// Whether it was a write.
    pub write: bool,
    /// The value last written, at most 8 bytes of it; 0 for a read.
    pub value: u64,
    /// How often.
    pub count: u64,
}

impl fmt::Display for UnknownAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, count) = (self.address, self.count);
        let what = match self.kind {
            AccessKind::Msr => "MSR",
            AccessKind::Port => "port",
            AccessKind::Memory => "memory",
        };
        if self.write {
            write!(f, "write to {what} {address:#x} (last {:#x}, {count} times)", self.value)
        } else {
            write!(f, "read of {what} {address:#x} ({count} times)")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(halted: bool, rflags: u64) -> VcpuState {
        VcpuState {
            vcpu: 1,
            halted,
            waits_for_start: false,
            privilege: 0,
            registers: Registers { rip: 0xffff_8000_0000_1000, rflags, ..Registers::default() },
        }
    }

    #[test]
    fn only_a_halt_with_interrupts_off_is_for_ever() {
        assert!(state(true, 0x2).stopped_for_ever());
        assert!(!state(true, 0x202).stopped_for_ever());
        assert!(!state(false, 0x2).stopped_for_ever());
        assert!(VcpuState { waits_for_start: true, ..state(false, 0x202) }.stopped_for_ever());
    }

    #[test]
    fn an_instruction_is_told_when_it_is_known_and_else_the_data() {
        let error = |data: &[u64], instruction: &[u8]| {
            let (data, instruction) = (data.to_vec(), instruction.to_vec());
            ExitReason::InternalError { suberror: 1, data, instruction }.to_string()
        };
        let text = error(&[1, 2], &[0x0f, 0xc7]);
        assert!(text.contains("emulate") && text.ends_with("instruction 0f c7)"), "{text}");
        assert!(error(&[0xab], &[]).ends_with("data [ab])"));
        assert!(error(&[], &[]).ends_with("emulate)"));
    }

    #[test]
    fn accesses_and_vcpus_in_words() {
        let access = UnknownAccess {
            kind: AccessKind::Port,
            address: 0x80,
            write: true,
            value: 0x1f,
            count: 3,
        };
        assert_eq!(access.to_string(), "write to port 0x80 (last 0x1f, 3 times)");
        let read = UnknownAccess { kind: AccessKind::Msr, address: 0x10, write: false, ..access };
        assert_eq!(read.to_string(), "read of MSR 0x10 (3 times)");
        let text = state(true, 0x202).to_string();
        assert!(
            text.starts_with("vCPU 1: halted, interrupts on, rip=0xffff800000001000 "),
            "{text}"
        );
    }

    #[test]
    fn an_end_survives_the_wire() {
        let end = GuestEnd {
            reason: ExitReason::FailEntry { hardware_reason: u64::MAX, host_cpu: 3 },
            vcpu: Some(state(false, u64::MAX)),
            devices: vec![],
            accesses: vec![],
        };
        let text = serde_json::to_string(&end).unwrap();
        assert_eq!(serde_json::from_str::<GuestEnd>(&text).unwrap(), end);
    }
}
