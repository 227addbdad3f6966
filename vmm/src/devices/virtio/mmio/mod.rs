//! The virtio-mmio transport (version 2): what happens when a driver writes a register.
//!
//! Reads are served from the [register page](super::page). Writes come from vCPU threads, from a guest that
//! may be hostile, so the state machine only goes forward:
//!
//! ```text
//! reset -> ACKNOWLEDGE -> DRIVER -> FEATURES_OK -> queues -> DRIVER_OK -> (kicks) -> reset
//! ```
//! Status bits are only added. Features can be chosen until `FEATURES_OK`, which is refused for features
//! that were not offered or without `VERSION_1`. Queues can be set up between `FEATURES_OK` and `DRIVER_OK`
//! and are frozen after it: the device's worker holds them then. Everything else is ignored.
//!
//! A reset waits for the worker, because Linux reuses the memory of the rings as soon as its write returns
//! (`vm_reset`). The worker may be in a call to a slow host, so the wait ends after [`RESET_PATIENCE`]; the
//! status register then goes to 0 when the device has let go, as virtio 1.2, 2.4.1 allows, and until then
//! the device takes no other write.

mod queue_setup;
mod state;

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use casulo_protocol::vmm::DeviceState;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::queue_setup::{QueueSetup, SetupError};
pub use self::state::{QueueState, TransportState};
use super::page::{RegisterPage, STATUS_NEEDS_RESET, register};
use super::queue::{Position, Virtqueue};
use super::worker::{Shared, Worker, WorkerHandle};
use super::{Activation, GuestMemory, Interrupt, VirtioDevice};
use crate::devices::serial::Console;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const FAILED: u32 = 128;

/// Features that the transport adds to those of each device.
pub const TRANSPORT_FEATURES: u64 =
    (1 << VIRTIO_F_VERSION_1) | (1 << VIRTIO_RING_F_EVENT_IDX) | (1 << VIRTIO_RING_F_INDIRECT_DESC);

/// Longest wait of a vCPU for a device to let go of its queues.
pub const RESET_PATIENCE: Duration = Duration::from_secs(1);

/// What the driver has written since the last reset.
#[derive(Debug)]
struct State {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueSetup>,
    /// A reset that the worker has not answered yet.
    resetting: Option<Receiver<()>>,
}

impl State {
    fn new(queue_sizes: &[u16]) -> Self {
        Self {
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues: queue_sizes.iter().map(|size| QueueSetup::new(*size)).collect(),
            resetting: None,
        }
    }

    fn selected(&self) -> Option<usize> {
        usize::try_from(self.queue_sel).ok().filter(|index| *index < self.queues.len())
    }

    /// Whether a reset is still under way; waits for its end at most this long.
    fn is_resetting(&mut self, patience: Duration) -> bool {
        let Some(wait) = &self.resetting else { return false };
        let answer = if patience.is_zero() {
            wait.try_recv().map_err(|error| error == TryRecvError::Empty)
        } else {
            wait.recv_timeout(patience).map_err(|error| error == RecvTimeoutError::Timeout)
        };
        // A worker that is gone uses nothing.
        let going_on = answer == Err(true);
        if !going_on {
            self.resetting = None;
        }
        going_on
    }
}

/// A device's transport.
#[derive(Debug)]
pub struct MmioTransport {
    shared: Arc<Shared>,
    device_type: u32,
    config: Vec<u8>,
    features: u64,
    memory: Arc<GuestMemory>,
    worker: WorkerHandle,
    /// Held for one register write only.
    state: Mutex<State>,
}

impl MmioTransport {
    /// Puts a device behind the registers on page number `index` of `pages`; returns its transport, for the
    /// vCPUs, and its worker, for a thread that [serves](super::worker::serve) it. `line` is its interrupt.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        pages: Arc<MmapRegion<()>>,
        index: usize,
        line: Arc<EventFd>,
        console: Console,
    ) -> io::Result<(Self, Worker)> {
        let queue_sizes = device.queue_sizes();
        let kicks: io::Result<Vec<EventFd>> =
            queue_sizes.iter().map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)).collect();
        let (device_type, config) = (device.device_type(), device.config());
        let page = RegisterPage::new(pages, index, device_type, &config);
        let too_big = || io::Error::other("its configuration does not fit into a page");
        let page = Arc::new(page.ok_or_else(too_big)?);
        let shared = Arc::new(Shared {
            name: format!("virtio device {index} ({})", kind(device_type)),
            interrupt: Interrupt::of_page(page.clone(), line),
            page,
            kicks: kicks?.into(),
            console,
            complaints: AtomicU32::new(0),
            rounds: AtomicU64::new(0),
        });
        let features = device.features() | TRANSPORT_FEATURES;
        let (worker, handle) = Worker::new(device, shared.clone())?;
        let state = Mutex::new(State::new(&queue_sizes));
        let transport =
            Self { shared, device_type, config, features, memory, worker: handle, state };
        transport.reset(&mut transport.lock());
        Ok((transport, worker))
    }

    /// The device as its driver left it; takes no lock.
    #[must_use]
    pub fn device_state(&self) -> DeviceState {
        let mut status = [0; 4];
        self.shared.page.read(register::STATUS, &mut status);
        DeviceState {
            device: self.device_type,
            status: u32::from_le_bytes(status),
            rounds: self.shared.rounds.load(Ordering::Relaxed),
        }
    }

    /// The events by which queues are kicked, in the order of the queues.
    #[must_use]
    pub fn kicks(&self) -> &[EventFd] {
        &self.shared.kicks
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest read registers by an exit (its page is not mapped).
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        self.shared.page.read(offset, data);
    }

    /// The guest wrote a register. Registers are words; any other width is ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            let width = data.len();
            self.shared.complain(&format_args!("ignored {width} bytes for register {offset:#x}"));
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset {
            // Usually an ioeventfd takes it before it gets here.
            register::QUEUE_NOTIFY => self.kick(value),
            register::STATUS => self.set_status(value),
            // The interrupt status stays as it is: see the page.
            register::INTERRUPT_ACK => {}
            _ => self.set_register(offset, value),
        }
    }

    fn kick(&self, queue: u32) {
        if let Some(kick) = usize::try_from(queue).ok().and_then(|queue| self.kicks().get(queue)) {
            // A full counter is a kick that is not yet seen.
            let _ = kick.write(1);
        }
    }

    fn set_register(&self, offset: u64, value: u32) {
        let mut state = self.lock();
        let status = self.shared.page.status();
        if state.is_resetting(Duration::ZERO) || !self.take(&mut state, status, offset, value) {
            // Linux makes queues unready that are so already, after a reset.
            if (offset, value) != (register::QUEUE_READY, 0) {
                self.shared.complain(&format_args!(
                    "ignored {value:#x} for register {offset:#x} while the status is {status:#x}"
                ));
            }
        }
    }

    /// Takes what was written, if this is the time for it.
    fn take(&self, state: &mut State, status: u32, offset: u64, value: u32) -> bool {
        let choosing = status & DRIVER != 0 && status & FEATURES_OK == 0;
        let setting_up = status & FEATURES_OK != 0 && status & DRIVER_OK == 0;
        match offset {
            register::DEVICE_FEATURES_SEL => {
                state.device_features_sel = value;
                self.show_features(state);
            }
            register::DRIVER_FEATURES_SEL => state.driver_features_sel = value,
            register::DRIVER_FEATURES if choosing => {
                let shift = match state.driver_features_sel {
                    0 => 0,
                    1 => 32,
                    // Features that nobody offers.
                    _ => return value == 0,
                };
                let mask = u64::from(u32::MAX) << shift;
                let half = u64::from(value) << shift;
                state.driver_features = (state.driver_features & !mask) | half;
            }
            register::QUEUE_SEL => {
                state.queue_sel = value;
                self.show_queue(state);
            }
            _ if setting_up => {
                let selected = state.selected();
                let Some(queue) = selected.and_then(|index| state.queues.get_mut(index)) else {
                    return false;
                };
                let taken = queue.set_register(offset, value);
                self.show_queue(state);
                return taken;
            }
            _ => return false,
        }
        true
    }

    fn set_status(&self, value: u32) {
        let mut state = self.lock();
        if value == 0 {
            self.reset(&mut state);
            return;
        }
        if state.is_resetting(Duration::ZERO) {
            return;
        }
        let old = self.shared.page.status();
        let driver_bits = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        let held = old & driver_bits;
        if value & held != held || value & !(driver_bits | STATUS_NEEDS_RESET) != 0 {
            return;
        }
        let mut new = held;
        // Each step needs the one before, in the same write or an earlier one.
        for (bit, needs) in [
            (ACKNOWLEDGE, 0),
            (DRIVER, ACKNOWLEDGE),
            (FEATURES_OK, DRIVER),
            (DRIVER_OK, FEATURES_OK),
        ] {
            let allowed = bit != FEATURES_OK || self.accepts(state.driver_features);
            if value & bit != 0 && new & needs == needs && (held & bit != 0 || allowed) {
                new |= bit;
            }
        }
        if value & !new & FEATURES_OK != 0 {
            let (taken, offered) = (state.driver_features, self.features);
            self.shared.complain(&format_args!("refused features {taken:#x} of {offered:#x}"));
        }
        new |= value & FAILED;
        self.shared.page.update_status(|status| status | new);
        if new & DRIVER_OK != 0 && held & DRIVER_OK == 0 && old & (FAILED | STATUS_NEEDS_RESET) == 0
        {
            self.activate(&state);
        }
    }

    fn accepts(&self, features: u64) -> bool {
        features & !self.features == 0 && features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn activate(&self, state: &State) {
        let sent = self.activation(state, &[]).map_err(|error| error.to_string()).and_then(|all| {
            // Before the device can interrupt.
            self.shared.page.set_active(true);
            self.worker.activate(all).map_err(|error| format!("its thread is gone: {error}"))
        });
        if let Err(error) = sent {
            self.shared.fail(&error);
        }
    }

    /// What the device gets; its queues are at `positions`, or at their beginning.
    fn activation(&self, state: &State, positions: &[Position]) -> Result<Activation, SetupError> {
        let features = state.driver_features;
        let mut queues = Vec::with_capacity(state.queues.len());
        for (index, setup) in state.queues.iter().enumerate() {
            let position = positions.get(index).copied().unwrap_or_default();
            let ring = setup.build(index, &self.memory, position)?;
            let kicks = self.shared.kicks.clone();
            queues.push(Virtqueue::new(ring, features).with_kick(kicks, index));
        }
        let interrupt = self.shared.interrupt.clone();
        Ok(Activation { memory: self.memory.clone(), features, queues, interrupt })
    }

    fn reset(&self, state: &mut State) {
        if state.resetting.is_none() && self.shared.page.status() & DRIVER_OK != 0 {
            // Without a worker there is nobody to wait for.
            state.resetting = self.worker.reset().ok();
        }
        state.driver_features = 0;
        state.device_features_sel = 0;
        state.driver_features_sel = 0;
        state.queue_sel = 0;
        for queue in &mut state.queues {
            *queue = QueueSetup::new(queue.max_size);
        }
        self.show_features(state);
        self.show_queue(state);
        if state.is_resetting(RESET_PATIENCE) {
            self.shared.complain(&"the reset waits for the host (a slow disk or file system?)");
            return;
        }
        self.shared.page.update_status(|_| 0);
        self.shared.page.set_active(false);
    }

    fn show_features(&self, state: &State) {
        let [low, high] = [self.features, self.features >> 32].map(|half| half & 0xffff_ffff);
        let half = match state.device_features_sel {
            0 => low,
            1 => high,
            _ => 0,
        };
        self.shared.page.set(register::DEVICE_FEATURES, u32::try_from(half).unwrap_or(0));
    }

    fn show_queue(&self, state: &State) {
        let queue = state.selected().and_then(|index| state.queues.get(index));
        let max_size = queue.map_or(0, |queue| u32::from(queue.max_size));
        self.shared.page.set(register::QUEUE_NUM_MAX, max_size);
        self.shared
            .page
            .set(register::QUEUE_READY, u32::from(queue.is_some_and(|queue| queue.ready)));
    }
}

/// The name of a device type.
fn kind(device_type: u32) -> String {
    let name = match device_type {
        2 => "disk",
        4 => "entropy",
        5 => "balloon",
        19 => "sockets",
        26 => "shares",
        other => return format!("type {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests;
