//! A VM that is built: start it, talk to it, ask it, wait for its end.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use casulo_protocol::vmm::{Diagnosis, ExitReason, GuestEnd, UnknownAccess, VcpuState};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::devices::bus::Bus;
use crate::devices::serial::Console;
use crate::devices::virtio::fs::Record;
use crate::devices::virtio::vsock::{VsockEvents, VsockHandle};
use crate::halt::{self, HaltWatch};
use crate::vcpu::VcpuHandle;

/// Bytes of the console that come with a diagnosis.
const CONSOLE: usize = 16 * 1024;
/// Longest wait for the states of all vCPUs, and between two kicks.
const PATIENCE: Duration = Duration::from_millis(500);
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// A VM whose vCPUs wait for [`Vm::start`].
///
/// Its threads and its memory live until the process ends, which is how a VM is discarded: a process is
/// for one VM.
pub struct Vm {
    /// The guest's console.
    pub console: Console,
    /// Whether the guest met the limit of a share, or a full disk of the host.
    pub limit_hit: Arc<AtomicBool>,
    /// Which files of the shares the guest has read and written.
    pub files: Arc<Record>,
    /// Opens and allows connections.
    pub vsock: VsockHandle,
    /// Connections that were made.
    pub vsock_events: VsockEvents,
    pub(crate) ended_event: Arc<EventFd>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) vcpus: Vec<VcpuHandle>,
    pub(crate) states: Receiver<VcpuState>,
    pub(crate) ended: Receiver<(ExitReason, Option<VcpuState>)>,
    pub(crate) start: Arc<Barrier>,
    /// Keeps the VM; nothing is asked of it any more.
    pub(crate) _vm: VmFd,
}

/// Exits of all vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// Returns from `KVM_RUN`.
    pub all: u64,
    /// Of these: MMIO accesses.
    pub mmio: u64,
    /// Of these: port accesses.
    pub pio: u64,
}

impl Vm {
    /// Lets the vCPUs run. Call it once.
    pub fn start(&self) {
        self.start.wait();
    }

    /// Waits until the guest ends.
    #[must_use]
    pub fn wait(&self) -> GuestEnd {
        let mut watch = HaltWatch::new(self);
        loop {
            match self.ended.recv_timeout(halt::PERIOD) {
                Ok((reason, vcpu)) => return self.end(reason, vcpu),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(vcpu) = watch.look(self) {
                        return self.end(ExitReason::Halted, Some(vcpu));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let (reason, vcpu) = gone();
                    return self.end(reason, vcpu);
                }
            }
        }
    }

    /// The end of the guest, if it has ended; to be asked when [`Self::ended_fd`] is readable. That a guest
    /// has halted for ever is told by a [`HaltWatch`].
    #[must_use]
    pub fn try_wait(&self) -> Option<GuestEnd> {
        match self.ended.try_recv() {
            Ok((reason, vcpu)) => Some(self.end(reason, vcpu)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let (reason, vcpu) = gone();
                Some(self.end(reason, vcpu))
            }
        }
    }

    /// The end of a guest that can do nothing more, for this reason.
    pub(crate) fn end(&self, reason: ExitReason, vcpu: Option<VcpuState>) -> GuestEnd {
        // A kernel that panics ends in one way or another, and none of them is orderly.
        let reason = match reason {
            ExitReason::Reset | ExitReason::TripleFault | ExitReason::Halted
                if self.console.shows_panic() =>
            {
                ExitReason::Panic
            }
            other => other,
        };
        GuestEnd { reason, vcpu, devices: self.bus.devices(), accesses: self.accesses() }
    }

    /// Exits so far.
    #[must_use]
    pub fn exits(&self) -> Exits {
        let mut sum = Exits::default();
        for vcpu in &self.vcpus {
            let counters = &vcpu.shared.counters;
            sum.all += counters.all.load(Ordering::Relaxed);
            sum.mmio += counters.mmio.load(Ordering::Relaxed);
            sum.pio += counters.pio.load(Ordering::Relaxed);
        }
        sum
    }

    /// Where the guest stands. Stops each vCPU for a moment.
    #[must_use]
    pub fn diagnose(&self) -> Diagnosis {
        Diagnosis {
            console: self.console.tail(CONSOLE),
            vcpus: self.vcpu_states(),
            devices: self.bus.devices(),
            accesses: self.accesses(),
        }
    }

    /// The states of the vCPUs that answer in time, in order: all but those that are in a call to the
    /// host, and those of a VM that has ended or was not started.
    #[must_use]
    pub fn vcpu_states(&self) -> Vec<VcpuState> {
        // Answers that came too late for an earlier question.
        while self.states.try_recv().is_ok() {}
        for vcpu in &self.vcpus {
            vcpu.ask();
        }
        let deadline = Instant::now() + PATIENCE;
        let mut states: Vec<VcpuState> = Vec::with_capacity(self.vcpus.len());
        while states.len() < self.vcpus.len() && Instant::now() < deadline {
            for (vcpu, number) in self.vcpus.iter().zip(0u8..) {
                if !states.iter().any(|state| state.vcpu == number) {
                    vcpu.kick();
                }
            }
            while let Ok(state) = self.states.recv_timeout(KICK_AGAIN) {
                if !states.iter().any(|known| known.vcpu == state.vcpu) {
                    states.push(state);
                }
            }
        }
        states.sort_by_key(|state| state.vcpu);
        states
    }

    /// The first vCPU of a guest of which none will ever run again: each is halted with interrupts off, or
    /// was not started. Stops each vCPU for a moment.
    #[must_use]
    pub fn stopped_for_ever(&self) -> Option<VcpuState> {
        let states = self.vcpu_states();
        let all =
            states.len() == self.vcpus.len() && states.iter().all(VcpuState::stopped_for_ever);
        states.into_iter().next().filter(|_| all)
    }

    /// Processor time of each vCPU.
    pub(crate) fn cpu_times(&self) -> Vec<Option<Duration>> {
        self.vcpus.iter().map(VcpuHandle::cpu_time).collect()
    }

    fn accesses(&self) -> Vec<UnknownAccess> {
        let mut list = Vec::new();
        for vcpu in &self.vcpus {
            vcpu.shared.accesses.add_to(&mut list);
        }
        list
    }

    /// A descriptor that is readable when the guest has ended.
    #[must_use]
    pub fn ended_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open as long as this VM, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ended_event.as_raw_fd()) }
    }
}

/// Every vCPU thread is gone, which none is before it has told why.
fn gone() -> (ExitReason, Option<VcpuState>) {
    (ExitReason::Vmm { detail: "every vCPU thread has ended".to_owned() }, None)
}
