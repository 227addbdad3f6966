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

use std::sync::{Arc, Mutex, PoisonError};

use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::page::{RegisterPage, STATUS_NEEDS_RESET, register};
use super::worker::WorkerHandle;
use super::{Activation, GuestMemory, Interrupt};

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const FAILED: u32 = 128;

/// Features that the transport adds to those of each device.
pub const TRANSPORT_FEATURES: u64 =
    (1 << VIRTIO_F_VERSION_1) | (1 << VIRTIO_RING_F_EVENT_IDX) | (1 << VIRTIO_RING_F_INDIRECT_DESC);

/// One queue as the driver sets it up.
#[derive(Clone, Copy, Debug)]
struct QueueSetup {
    max_size: u16,
    size: u16,
    ready: bool,
    desc: u64,
    avail: u64,
    used: u64,
}

impl QueueSetup {
    fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, ready: false, desc: 0, avail: 0, used: 0 }
    }

    /// The queue, if the driver set it up right.
    fn build(&self, memory: &GuestMemory, event_idx: bool) -> Option<Queue> {
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.desc)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.avail)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.used)).ok()?;
        queue.set_event_idx(event_idx);
        queue.set_ready(self.ready);
        queue.is_valid(memory).then_some(queue)
    }
}

/// What the driver has written since the last reset.
struct State {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: usize,
    queues: Vec<QueueSetup>,
}

/// A device's transport.
pub struct MmioTransport {
    page: Arc<RegisterPage>,
    features: u64,
    memory: Arc<GuestMemory>,
    interrupt: Interrupt,
    kicks: Arc<[EventFd]>,
    worker: WorkerHandle,
    /// Held for one register write only.
    state: Mutex<State>,
}

impl MmioTransport {
    /// A transport in the state after a reset. `features` are the device's own.
    #[must_use]
    pub fn new(
        page: Arc<RegisterPage>,
        features: u64,
        queue_sizes: &[u16],
        memory: Arc<GuestMemory>,
        interrupt: Interrupt,
        kicks: Arc<[EventFd]>,
        worker: WorkerHandle,
    ) -> Self {
        let queues = queue_sizes.iter().map(|size| QueueSetup::new(*size)).collect();
        let state = State {
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues,
        };
        let features = features | TRANSPORT_FEATURES;
        let transport =
            Self { page, features, memory, interrupt, kicks, worker, state: Mutex::new(state) };
        transport.reset(&mut transport.lock());
        transport
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest read registers by an exit (its page is not mapped).
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        self.page.read(offset, data);
    }

    /// The guest wrote a register. Registers are words; any other width is ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
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
        if let Some(kick) = usize::try_from(queue).ok().and_then(|queue| self.kicks.get(queue)) {
            // A full counter is a kick that is not yet seen.
            let _ = kick.write(1);
        }
    }

    fn set_register(&self, offset: u64, value: u32) {
        let mut state = self.lock();
        let status = self.page.status();
        match offset {
            register::DEVICE_FEATURES_SEL => {
                state.device_features_sel = value;
                self.show_features(&state);
            }
            register::DRIVER_FEATURES_SEL => state.driver_features_sel = value,
            register::DRIVER_FEATURES if status & DRIVER != 0 && status & FEATURES_OK == 0 => {
                let shift = match state.driver_features_sel {
                    0 => 0,
                    1 => 32,
                    _ => return,
                };
                let mask = u64::from(u32::MAX) << shift;
                let half = u64::from(value) << shift;
                state.driver_features = (state.driver_features & !mask) | half;
            }
            register::QUEUE_SEL => {
                state.queue_sel = usize::try_from(value).unwrap_or(usize::MAX);
                self.show_queue(&state);
            }
            _ if status & FEATURES_OK != 0 && status & DRIVER_OK == 0 => {
                let selected = state.queue_sel;
                if let Some(queue) = state.queues.get_mut(selected) {
                    set_queue_register(queue, offset, value);
                    self.show_queue(&state);
                }
            }
            _ => {}
        }
    }

    fn set_status(&self, value: u32) {
        let mut state = self.lock();
        if value == 0 {
            self.reset(&mut state);
            return;
        }
        let old = self.page.status();
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
        new |= value & FAILED;
        self.page.update_status(|status| status | new);
        if new & DRIVER_OK != 0 && held & DRIVER_OK == 0 && old & (FAILED | STATUS_NEEDS_RESET) == 0
        {
            self.activate(&state);
        }
    }

    fn accepts(&self, features: u64) -> bool {
        features & !self.features == 0 && features & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn activate(&self, state: &State) {
        let event_idx = state.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let queues: Option<Vec<Queue>> =
            state.queues.iter().map(|queue| queue.build(&self.memory, event_idx)).collect();
        let sent = queues.is_some_and(|queues| {
            // Before the device can interrupt.
            self.page.set_active(true);
            let activation = Activation {
                memory: self.memory.clone(),
                features: state.driver_features,
                queues,
                interrupt: self.interrupt.clone(),
            };
            self.worker.activate(activation).is_ok()
        });
        if !sent {
            self.page.update_status(|status| status | STATUS_NEEDS_RESET);
            let _ = self.interrupt.signal_config();
        }
    }

    fn reset(&self, state: &mut State) {
        if self.page.status() & DRIVER_OK != 0 {
            // The driver may reuse the rings' memory as soon as this write returns. A worker that is
            // gone uses nothing.
            let _ = self.worker.reset();
        }
        self.page.update_status(|_| 0);
        self.page.set_active(false);
        for queue in &mut state.queues {
            *queue = QueueSetup::new(queue.max_size);
        }
        state.driver_features = 0;
        state.device_features_sel = 0;
        state.driver_features_sel = 0;
        state.queue_sel = 0;
        self.show_features(state);
        self.show_queue(state);
    }

    fn show_features(&self, state: &State) {
        let [low, high] = [self.features, self.features >> 32].map(|half| half & 0xffff_ffff);
        let half = match state.device_features_sel {
            0 => low,
            1 => high,
            _ => 0,
        };
        self.page.set(register::DEVICE_FEATURES, u32::try_from(half).unwrap_or(0));
    }

    fn show_queue(&self, state: &State) {
        let queue = state.queues.get(state.queue_sel);
        let max_size = queue.map_or(0, |queue| u32::from(queue.max_size));
        self.page.set(register::QUEUE_NUM_MAX, max_size);
        self.page.set(register::QUEUE_READY, u32::from(queue.is_some_and(|queue| queue.ready)));
    }
}

fn set_queue_register(queue: &mut QueueSetup, offset: u64, value: u32) {
    if offset == register::QUEUE_READY {
        queue.ready = value == 1;
        return;
    }
    // A queue that is ready keeps its place until it is made unready.
    if queue.ready {
        return;
    }
    if offset == register::QUEUE_NUM {
        // Anything that is no size for this queue makes it invalid at DRIVER_OK.
        queue.size = u16::try_from(value).unwrap_or(0);
        return;
    }
    let (address, high) = match offset {
        register::QUEUE_DESC => (&mut queue.desc, false),
        register::QUEUE_DRIVER => (&mut queue.avail, false),
        register::QUEUE_DEVICE => (&mut queue.used, false),
        _ => match offset.wrapping_sub(4) {
            register::QUEUE_DESC => (&mut queue.desc, true),
            register::QUEUE_DRIVER => (&mut queue.avail, true),
            register::QUEUE_DEVICE => (&mut queue.used, true),
            _ => return,
        },
    };
    *address = if high {
        (*address & 0xffff_ffff) | (u64::from(value) << 32)
    } else {
        (*address & !0xffff_ffff) | u64::from(value)
    };
}

#[cfg(test)]
mod tests;
