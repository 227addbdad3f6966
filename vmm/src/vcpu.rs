//! A vCPU thread: runs the guest and serves its exits, holding no lock while it does either.
//!
//! # Exits
//!
//! An exit that a device serves goes to the [`Bus`]. One that nothing serves is remembered
//! ([`Accesses`]) and answered as hardware would: ports and memory read as ones, writes are lost, an
//! unknown model specific register is a #GP. All others end the VM; [`ExitReason`] says why.
//!
//! # Being asked
//!
//! Other threads may ask where a vCPU stands ([`VcpuHandle`]): they leave the question and kick the vCPU
//! out of `KVM_RUN` with a signal, whose handler does nothing. A signal may come just before `KVM_RUN` and
//! be lost, so it is sent again until there is an answer. So the vCPU's own loop costs one relaxed load
//! more, and neither a signal mask nor a page that the handler would have to find.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use casulo_protocol::vmm::{AccessKind, ExitReason, Registers, VcpuState};
use kvm_bindings::{
    KVM_INTERNAL_ERROR_EMULATION, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED,
    KVM_MP_STATE_UNINITIALIZED,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::accesses::{Accesses, number};
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

/// What a vCPU and those who ask it share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Its exits.
    pub counters: ExitCounters,
    /// What it looked for in vain.
    pub accesses: Accesses,
    asked: AtomicBool,
}

/// A vCPU as other threads see it.
pub struct VcpuHandle {
    /// What it counts and remembers.
    pub shared: Arc<Shared>,
    /// Its thread.
    pub thread: JoinHandle<()>,
}

impl VcpuHandle {
    /// Asks the vCPU to send its state. Kick it until it has answered.
    pub fn ask(&self) {
        self.shared.asked.store(true, Ordering::Release);
    }

    /// Interrupts `KVM_RUN`, so that the vCPU sees what it is asked.
    pub fn kick(&self) {
        // The thread has not been joined, so the signal reaches it or nothing.
        let _ = self.thread.kill(kick_signal());
    }

    /// Processor time that the vCPU has had, the guest's included.
    #[must_use]
    pub fn cpu_time(&self) -> Option<Duration> {
        let mut clock = 0;
        let thread = self.thread.pthread_handle();
        // SAFETY: the thread has not been joined, so its handle is valid; the number of the clock goes to
        // a place of its own.
        if unsafe { libc::pthread_getcpuclockid(thread, &raw mut clock) } != 0 {
            return None;
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes one timespec to a place of that size; an unknown clock is an error.
        if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
            return None;
        }
        let (seconds, nanoseconds) = (time.tv_sec.try_into().ok()?, time.tv_nsec.try_into().ok()?);
        Some(Duration::new(seconds, nanoseconds))
    }
}

/// The signal that interrupts a vCPU.
fn kick_signal() -> i32 {
    SIGRTMIN()
}

/// Lets [`VcpuHandle::kick`] interrupt and do nothing else, in this process.
pub fn prepare_kicks() -> std::io::Result<()> {
    extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(kick_signal(), nothing).map_err(Into::into)
}

/// One vCPU.
pub struct Vcpu {
    /// Its number.
    pub number: u8,
    /// KVM's end.
    pub fd: VcpuFd,
    /// The devices, shared by all vCPUs.
    pub bus: Arc<Bus>,
    /// What others see of it.
    pub shared: Arc<Shared>,
    /// Where it tells its state.
    pub states: Sender<VcpuState>,
}

/// Why `KVM_RUN` is not to be called again.
enum Stop {
    Reset,
    TripleFault,
    InternalError,
    FailEntry {
        hardware_reason: u64,
        host_cpu: u32,
    },
    /// The number is in the page that KVM shares.
    Unknown,
    RunFailed(i32),
}

impl Vcpu {
    /// Runs until the guest ends; gives why, and where it was if KVM tells.
    pub fn run(mut self) -> (ExitReason, Option<VcpuState>) {
        loop {
            if self.shared.asked.load(Ordering::Relaxed)
                && self.shared.asked.swap(false, Ordering::Acquire)
                && let Some(state) = self.state()
            {
                // Whoever asked may have given up waiting.
                let _ = self.states.send(state);
            }
            let Some(stop) = self.step() else {
                continue;
            };
            let reason = match stop {
                Stop::Reset => ExitReason::Reset,
                Stop::TripleFault => ExitReason::TripleFault,
                Stop::InternalError => self.internal_error(),
                Stop::FailEntry { hardware_reason, host_cpu } => {
                    ExitReason::FailEntry { hardware_reason, host_cpu }
                }
                Stop::Unknown => {
                    ExitReason::UnknownExit { exit: self.fd.get_kvm_run().exit_reason }
                }
                Stop::RunFailed(errno) => ExitReason::RunFailed { errno },
            };
            return (reason, self.state().filter(|state| !is_reset(state)));
        }
    }

    /// One entry into the guest and one exit.
    fn step(&mut self) -> Option<Stop> {
        let exit = self.fd.run();
        let (counters, accesses) = (&self.shared.counters, &self.shared.accesses);
        count(&counters.all);
        match exit {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&counters.mmio);
                if !self.bus.mmio_read(address, data) {
                    accesses.record(AccessKind::Memory, address, None);
                }
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&counters.mmio);
                if !self.bus.mmio_write(address, data) {
                    accesses.record(AccessKind::Memory, address, Some(number(data)));
                }
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                count(&counters.pio);
                if !self.bus.port_read(port, data) {
                    accesses.record(AccessKind::Port, port.into(), None);
                }
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                count(&counters.pio);
                match self.bus.port_write(port, data) {
                    Some(None) => {}
                    Some(Some(Reset)) => return Some(Stop::Reset),
                    None => accesses.record(AccessKind::Port, port.into(), Some(number(data))),
                }
            }
            // KVM knows nothing of them, and asks (see `kvm::create_vm`). An error is a #GP, as a
            // processor without this register would raise it; kernels probe and expect it.
            Ok(VcpuExit::X86Rdmsr(msr)) => {
                accesses.record(AccessKind::Msr, msr.index.into(), None);
                *msr.error = 1;
            }
            Ok(VcpuExit::X86Wrmsr(msr)) => {
                accesses.record(AccessKind::Msr, msr.index.into(), Some(msr.data));
                *msr.error = 1;
            }
            Ok(VcpuExit::Shutdown) => return Some(Stop::TripleFault),
            Ok(VcpuExit::InternalError) => return Some(Stop::InternalError),
            Ok(VcpuExit::FailEntry(hardware_reason, host_cpu)) => {
                return Some(Stop::FailEntry { hardware_reason, host_cpu });
            }
            Ok(_) => return Some(Stop::Unknown),
            Err(error) => match error.errno() {
                // A signal, or a CPU that was just woken for its first instruction.
                libc::EINTR | libc::EAGAIN => {}
                errno => return Some(Stop::RunFailed(errno)),
            },
        }
        None
    }

    /// Where this vCPU stands; `None` when KVM does not tell.
    fn state(&self) -> Option<VcpuState> {
        let (regs, special) = (self.fd.get_regs().ok()?, self.fd.get_sregs().ok()?);
        let running = self.fd.get_mp_state().ok()?.mp_state;
        Some(VcpuState {
            vcpu: self.number,
            halted: running == KVM_MP_STATE_HALTED,
            waits_for_start: matches!(
                running,
                KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
            ),
            privilege: special.ss.dpl,
            registers: Registers {
                rip: regs.rip,
                rsp: regs.rsp,
                rflags: regs.rflags,
                cr0: special.cr0,
                cr2: special.cr2,
                cr3: special.cr3,
                cr4: special.cr4,
                rax: regs.rax,
                rbx: regs.rbx,
                rcx: regs.rcx,
                rdx: regs.rdx,
                rsi: regs.rsi,
                rdi: regs.rdi,
            },
        })
    }

    fn internal_error(&mut self) -> ExitReason {
        let run = self.fd.get_kvm_run();
        // SAFETY: the exit reason is KVM_EXIT_INTERNAL_ERROR, for which KVM fills this member; any bits
        // are valid for it.
        let internal = unsafe { run.__bindgen_anon_1.internal };
        let count = usize::try_from(internal.ndata).unwrap_or(0).min(internal.data.len());
        let data = internal.data.get(..count).unwrap_or_default().to_vec();
        let instruction = instruction(internal.suberror, &data).unwrap_or_default();
        ExitReason::InternalError { suberror: internal.suberror, data, instruction }
    }
}

/// Whether these are the registers of a vCPU after a reset: on AMD, KVM makes them so when there is a
/// triple fault, because the processor leaves nothing that is defined.
fn is_reset(state: &VcpuState) -> bool {
    const RESET_VECTOR: u64 = 0xfff0;
    const PROTECTED: u64 = 1;
    state.registers.rip == RESET_VECTOR && state.registers.cr0 & PROTECTED == 0
}

/// The instruction that KVM could not emulate. With the first number's lowest bit set
/// (`KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES`) the next two numbers hold a length and up to
/// 15 bytes; Linux 5.15 is the first that does so.
fn instruction(suberror: u32, data: &[u64]) -> Option<Vec<u8>> {
    if suberror != KVM_INTERNAL_ERROR_EMULATION || data.first()? & 1 == 0 {
        return None;
    }
    let bytes = [data.get(1)?.to_le_bytes(), data.get(2)?.to_le_bytes()].concat();
    let (length, bytes) = bytes.split_first()?;
    Some(bytes.get(..usize::from(*length)).unwrap_or(bytes).to_vec())
}

/// Adds one; a plain load and store, because only one thread writes.
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_bytes_are_taken_where_kvm_gives_them() {
        let data = [1, u64::from_le_bytes([3, 0x0f, 0xc7, 0xf0, 9, 9, 9, 9]), 0];
        assert_eq!(instruction(1, &data), Some(vec![0x0f, 0xc7, 0xf0]));
        assert_eq!(instruction(1, &[1, u64::MAX, u64::MAX]).unwrap().len(), 15);
        // Without the flag, of another error, and cut short.
        assert_eq!(instruction(1, &[0, 3, 0]), None);
        assert_eq!(instruction(3, &data), None);
        assert_eq!(instruction(1, &data[..2]), None);
        assert_eq!(instruction(1, &[]), None);
    }
}
