//! The event queue, and the one event there is: all connections are gone.
//!
//! Connections do not survive a snapshot. The guest that wakes up from one must learn that before it
//! gets a packet: else it would take a new connection for an old one, or reset the new one together
//! with the old ones when the event comes at last. So after a restore, and only then,
//!
//! 1. a buffer of the event queue gets `TRANSPORT_RESET` (as soon as there is one), and
//! 2. no packet goes to the guest until its driver has offered another event buffer, which is how a
//!    driver says that it has handled one.
//!
//! Packets of the guest are taken meanwhile; what answers them waits. Virtio 1.2, 5.10.6.7.

use vm_memory::Bytes;

use crate::devices::virtio::chain::Chain;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{DeviceError, GuestMemory};

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` as a `struct virtio_vsock_event`.
const TRANSPORT_RESET: [u8; 4] = 0_u32.to_le_bytes();

/// The event queue and what the guest has to learn from it.
#[derive(Debug)]
pub struct EventQueue {
    queue: Virtqueue,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The guest knows all.
    Idle,
    /// The guest has to be told.
    Due,
    /// It was told when its driver had offered buffers up to this index.
    Told(u16),
}

impl EventQueue {
    /// A queue for a driver that may have connections of another life if `restored`.
    #[must_use]
    pub fn new(queue: Virtqueue, restored: bool) -> Self {
        Self { queue, state: if restored { State::Due } else { State::Idle } }
    }

    /// Whether packets may go to the guest.
    #[must_use]
    pub fn allows_packets(&self) -> bool {
        self.state == State::Idle
    }

    /// The queue, for its position.
    #[must_use]
    pub fn queue(&self) -> &Virtqueue {
        &self.queue
    }

    /// Tells the guest what it has to know, or learns that it knows. Returns whether to interrupt the
    /// driver.
    ///
    /// # Errors
    /// The queue is broken.
    pub fn run(&mut self, memory: &GuestMemory) -> Result<bool, DeviceError> {
        let mut interrupt = false;
        if self.state == State::Due {
            interrupt = self.tell(memory)?;
        }
        if let State::Told(available) = self.state
            && self.queue.available(memory)? != available
        {
            self.state = State::Idle;
        }
        Ok(interrupt)
    }

    /// Puts the event into the first buffer that has room for it. Returns whether any buffer was used.
    fn tell(&mut self, memory: &GuestMemory) -> Result<bool, DeviceError> {
        let mut used = false;
        // No more buffers than there can be, as the guest may offer others while we are at it.
        for _ in 0..self.queue.size() {
            let available = self.queue.available(memory)?;
            let Some(chain) = self.queue.pop(memory)? else {
                // If one came in between, take it.
                if self.queue.enable_notification(memory)? {
                    continue;
                }
                break;
            };
            let head = chain.head();
            let room = write_event(memory, chain)?;
            let written = if room { TRANSPORT_RESET.len() } else { 0 };
            self.queue.add_used(memory, head, u32::try_from(written).unwrap_or(0))?;
            used = true;
            if room {
                self.state = State::Told(available);
                // A buffer that came in between is seen by our caller.
                self.queue.enable_notification_after(memory, available)?;
                break;
            }
        }
        Ok(used)
    }
}

/// Writes the event into a chain, if that has room for it in one piece, as every driver's has.
fn write_event(memory: &GuestMemory, chain: Chain<'_>) -> Result<bool, DeviceError> {
    for descriptor in chain {
        let descriptor = descriptor?;
        let len = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
        if descriptor.is_write_only() && len >= TRANSPORT_RESET.len() {
            memory.write_slice(&TRANSPORT_RESET, descriptor.addr())?;
            return Ok(true);
        }
    }
    Ok(false)
}
