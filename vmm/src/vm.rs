//! A VM that is built: start it, talk to it, wait for its end.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Barrier};

use casulo_protocol::vmm::ExitReason;
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use crate::devices::serial::Console;
use crate::devices::virtio::fs::Record;
use crate::devices::virtio::vsock::{VsockEvents, VsockHandle};
use crate::vcpu::ExitCounters;

/// A VM whose vCPUs wait for [`Vm::start`].
///
/// Its threads and its memory live until the process ends, which is how a VM is discarded: a process is
/// for one VM.
pub struct Vm {
    /// The guest's console.
    pub console: Console,
    /// Exits of each vCPU.
    pub counters: Vec<Arc<ExitCounters>>,
    /// Whether the guest met the limit of a share, or a full disk of the host.
    pub limit_hit: Arc<AtomicBool>,
    /// Which files of the shares the guest has read and written.
    pub files: Arc<Record>,
    /// Opens and allows connections.
    pub vsock: VsockHandle,
    /// Connections that were made.
    pub vsock_events: VsockEvents,
    /// Readable when the guest has ended.
    pub ended_event: Arc<EventFd>,
    pub(crate) ended: Receiver<ExitReason>,
    pub(crate) start: Arc<Barrier>,
    /// Keeps the VM; nothing is asked of it any more.
    pub(crate) _vm: VmFd,
}

impl Vm {
    /// Lets the vCPUs run. Call it once.
    pub fn start(&self) {
        self.start.wait();
    }

    /// Waits until the guest ends.
    #[must_use]
    pub fn wait(&self) -> ExitReason {
        let reason = self.ended.recv();
        self.told(reason.unwrap_or_else(|_| gone()))
    }

    /// Why the guest ended, if it has; to be asked when [`Self::ended_event`] is readable.
    #[must_use]
    pub fn try_wait(&self) -> Option<ExitReason> {
        match self.ended.try_recv() {
            Ok(reason) => Some(self.told(reason)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(gone()),
        }
    }

    /// A reset after a panic of the guest kernel is no orderly end.
    fn told(&self, reason: ExitReason) -> ExitReason {
        if reason == ExitReason::Reset && self.console.shows_panic() {
            return ExitReason::Panic;
        }
        reason
    }
}

/// Every vCPU thread is gone, which none is before it has told why.
fn gone() -> ExitReason {
    ExitReason::Vmm { detail: "every vCPU thread has ended".to_owned() }
}
