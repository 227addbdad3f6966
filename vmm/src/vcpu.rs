//! A vCPU thread: runs the guest and serves its exits, holding no lock while it does either.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use casulo_protocol::vmm::ExitReason;
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::devices::bus::Bus;
use crate::devices::i8042::Reset;

/// Exits of one vCPU; written by its thread alone.
#[derive(Debug, Default)]
pub struct ExitCounters {
    /// Returns from `KVM_RUN`.
    pub all: AtomicU64,
    /// Of these: MMIO accesses.
    pub mmio: AtomicU64,
    /// Of these: port accesses.
    pub pio: AtomicU64,
}

/// One vCPU.
pub struct Vcpu {
    /// KVM's end.
    pub fd: VcpuFd,
    /// Shared by all vCPUs.
    pub bus: Arc<Bus>,
    /// Its own.
    pub counters: Arc<ExitCounters>,
}

/// Why `KVM_RUN` is not to be called again.
enum Stop {
    Reset,
    TripleFault,
    /// KVM could not go on; the words lack the registers.
    Kvm(String),
    InternalError,
}

impl Vcpu {
    /// Runs until the guest ends. There is no way to stop it from outside but the end of the process, which
    /// is how a VM is discarded.
    pub fn run(mut self) -> ExitReason {
        loop {
            let Some(reason) = self.step() else {
                continue;
            };
            return match reason {
                Stop::Reset => ExitReason::Reset,
                Stop::TripleFault => ExitReason::TripleFault,
                Stop::Kvm(what) => self.failure(&what),
                Stop::InternalError => {
                    let what = self.internal_error();
                    self.failure(&what)
                }
            };
        }
    }

    /// One entry into the guest and one exit.
    fn step(&mut self) -> Option<Stop> {
        let exit = self.fd.run();
        count(&self.counters.all);
        match exit {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&self.counters.mmio);
                self.bus.mmio_read(address, data);
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&self.counters.mmio);
                self.bus.mmio_write(address, data);
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                count(&self.counters.pio);
                self.bus.port_read(port, data);
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                count(&self.counters.pio);
                if let Some(Reset) = self.bus.port_write(port, data) {
                    return Some(Stop::Reset);
                }
            }
            Ok(VcpuExit::Shutdown) => return Some(Stop::TripleFault),
            Ok(VcpuExit::InternalError) => return Some(Stop::InternalError),
            Ok(VcpuExit::Hlt) => {
                return Some(Stop::Kvm("halt left to the VMM (KVM_EXIT_HLT)".into()));
            }
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                return Some(Stop::Kvm(format!(
                    "the processor refused to enter the guest (KVM_EXIT_FAIL_ENTRY, reason \
                     {reason:#x}, host CPU {cpu})"
                )));
            }
            Ok(VcpuExit::SystemEvent(kind, _)) => {
                return Some(Stop::Kvm(format!("unexpected system event {kind}")));
            }
            Ok(other) => return Some(Stop::Kvm(format!("unexpected exit {other:?}"))),
            Err(error) => match error.errno() {
                // A signal, or a CPU that was just woken for its first instruction.
                libc::EINTR | libc::EAGAIN => {}
                _ => return Some(Stop::Kvm(format!("KVM_RUN failed: {error}"))),
            },
        }
        None
    }

    /// The exit in words, with the registers that help to see where the guest was.
    fn failure(&self, what: &str) -> ExitReason {
        let registers = match self.fd.get_regs() {
            Ok(regs) => format!(
                "rip={:#x} rsp={:#x} rflags={:#x} rax={:#x} rbx={:#x} rcx={:#x} rdx={:#x} rsi={:#x} \
                 rdi={:#x}",
                regs.rip,
                regs.rsp,
                regs.rflags,
                regs.rax,
                regs.rbx,
                regs.rcx,
                regs.rdx,
                regs.rsi,
                regs.rdi
            ),
            Err(error) => format!("registers unknown: {error}"),
        };
        ExitReason::Kvm { detail: format!("{what}; {registers}") }
    }

    fn internal_error(&mut self) -> String {
        let run = self.fd.get_kvm_run();
        // SAFETY: the exit reason is KVM_EXIT_INTERNAL_ERROR, for which KVM fills this member; any bits
        // are valid for it.
        let internal = unsafe { run.__bindgen_anon_1.internal };
        let count = usize::try_from(internal.ndata).unwrap_or(0).min(internal.data.len());
        let name = match internal.suberror {
            1 => "emulation",
            2 => "simultaneous exceptions",
            3 => "event delivery",
            4 => "unexpected exit reason",
            _ => "unknown",
        };
        format!(
            "KVM could not go on (KVM_EXIT_INTERNAL_ERROR, sub-error {} {name}, data {:x?})",
            internal.suberror,
            internal.data.get(..count).unwrap_or_default()
        )
    }
}

/// Adds one; a plain load and store, because only one thread writes.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
