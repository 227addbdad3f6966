//! The device: three queues, driven by the guest's kicks and by the sockets of the muxer.
//!
//! The work is the same for all causes: take packets from the guest, let the muxer answer, interrupt
//! once. The guest is told to kick the receive queue only while we wait for a buffer.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vm_memory::VolatileSlice;

use super::connection::{RxBuffers, Turn};
use super::event::EventQueue;
use super::handle::{VsockEvents, VsockHandle, channels};
use super::muxer::{Muxer, SendError};
use super::packet::{self, Access, Chain, HEADER_LEN, Header};
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, Interrupt, VirtioDevice};

/// Size of each queue.
const QUEUE_SIZE: u16 = 256;
/// Index of the queue with buffers for packets to the guest.
const RX: usize = 0;
/// Index of the queue with packets of the guest.
const TX: usize = 1;
/// Index of the queue with buffers for events.
const EVENT: usize = 2;

/// Most packets of the guest, and most turns of connections, that one call handles. A guest that keeps
/// the queues full gets another call, but timers and sockets come in between.
const BUDGET: usize = 512;

/// The vsock device.
#[derive(Debug)]
pub struct VsockDevice {
    guest_cid: u64,
    muxer: Muxer,
    active: Option<Active>,
    /// Whether the next driver is one that was restored with connections.
    restored: bool,
}

#[derive(Debug)]
struct Active {
    queues: Queues,
    /// Buffers for events.
    interrupt: Interrupt,
}

impl VsockDevice {
    /// A device without connections, to whose ports `listen` the guest may dial, and what to talk to it
    /// with.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(guest_cid: u64, listen: &[u32]) -> io::Result<(Self, VsockHandle, VsockEvents)> {
        let (handle, commands, sender, events) = channels()?;
        let muxer = Muxer::new(guest_cid, listen, commands, sender)?;
        Ok((Self { guest_cid, muxer, active: None, restored: false }, handle, events))
    }

    fn run(&mut self, tx: bool) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else { return Ok(()) };
        if active.queues.run(&mut self.muxer, tx, Instant::now())? {
            active.interrupt.signal_queue()?;
        }
        Ok(())
    }
}

impl VirtioDevice for VsockDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        // Stream sockets need no feature bit.
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 3]
    }

    fn config(&self) -> Vec<u8> {
        self.guest_cid.to_le_bytes().to_vec()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let mut queues = activation.queues.into_iter();
        let (Some(rx), Some(tx), Some(event)) = (queues.next(), queues.next(), queues.next())
        else {
            return Err(DeviceError::Driver("the vsock device needs its queues".into()));
        };
        let event = EventQueue::new(event, std::mem::take(&mut self.restored));
        let queues = Queues { memory: activation.memory, rx, tx, event };
        self.active = Some(Active { queues, interrupt: activation.interrupt });
        // A driver may fill its queues before it says DRIVER_OK.
        self.run(true)
    }

    fn queue_event(&mut self, queue: usize) -> Result<(), DeviceError> {
        match queue {
            RX | EVENT => self.run(false),
            TX => self.run(true),
            _ => Ok(()),
        }
    }

    fn poll_fd(&self) -> Option<RawFd> {
        Some(self.muxer.poll_fd())
    }

    fn poll_event(&mut self) -> Result<(), DeviceError> {
        self.muxer.poll(Instant::now())?;
        // The wake-up may be our own, because the budget was used up.
        self.run(true)
    }

    fn reset(&mut self) {
        self.active = None;
        self.restored = false;
        self.muxer.reset();
    }

    fn queues(&self) -> Vec<&Virtqueue> {
        self.active
            .iter()
            .flat_map(|active| [&active.queues.rx, &active.queues.tx, active.queues.event.queue()])
            .collect()
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        // Connections do not survive a snapshot; the ports that they used are not used again.
        Ok(serde_json::json!({
            "next_port": self.muxer.next_port(),
            "active": self.active.is_some(),
        }))
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), DeviceError> {
        let port = state.get("next_port").and_then(serde_json::Value::as_u64);
        let port = port.and_then(|port| u32::try_from(port).ok());
        let active = state.get("active").and_then(serde_json::Value::as_bool);
        let (Some(port), Some(active)) = (port, active) else {
            return Err(DeviceError::State(format!("vsock: no next_port and active in {state}")));
        };
        if !self.muxer.set_next_port(port) {
            return Err(DeviceError::State(format!("vsock: next_port {port} is out of range")));
        }
        self.restored = active;
        Ok(())
    }
}

/// The queues in use and the memory that they live in. Apart from the device, so that tests (and
/// fuzzing) can drive it without a transport.
#[derive(Debug)]
pub struct Queues {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// Buffers for packets to the guest.
    pub rx: Virtqueue,
    /// Packets of the guest.
    pub tx: Virtqueue,
    /// What the guest has to know of its connections.
    pub event: EventQueue,
}

impl Queues {
    /// Moves packets both ways, from the guest only if `tx`. Returns whether to interrupt the driver.
    ///
    /// # Errors
    /// A queue is broken.
    pub fn run(&mut self, muxer: &mut Muxer, tx: bool, now: Instant) -> Result<bool, DeviceError> {
        let memory = Arc::clone(&self.memory);
        let mut done = true;
        let mut interrupt = self.event.run(&memory)?;
        if tx {
            let (all, used) = self.take(&memory, muxer)?;
            done &= all;
            interrupt |= used && self.tx.needs_notification(&memory)?;
        }
        if self.event.allows_packets() && muxer.has_work() {
            let mut rx = RxQueue::new(&memory, &mut self.rx);
            let result = muxer.send(&mut rx, BUDGET, now);
            let used = rx.finish()?;
            let turn = match result {
                Ok(turn) => turn,
                Err(SendError::Queue(error)) => return Err(error),
                Err(SendError::Io(error)) => return Err(error.into()),
            };
            match turn {
                // The budget may be used up.
                Turn::Done => done &= !muxer.has_work(),
                // Ask for a kick; if a buffer came in the meantime, none will come for it.
                Turn::NoBuffer => done &= !self.rx.enable_notification(&memory)?,
            }
            interrupt |= used && self.rx.needs_notification(&memory)?;
        }
        if !done {
            muxer.wake();
        }
        Ok(interrupt)
    }

    /// Takes packets from the guest. Returns whether that were all, and whether there were any.
    fn take(
        &mut self,
        memory: &GuestMemory,
        muxer: &mut Muxer,
    ) -> Result<(bool, bool), DeviceError> {
        let mut slices = Vec::new();
        let mut count = 0;
        loop {
            while count < BUDGET
                && let Some(chain) = self.tx.pop(memory)?
            {
                let head = chain.head();
                slices.clear();
                // Nobody can be told about a chain without a whole header.
                if let Some(chain) = packet::flatten(memory, chain, Access::Read, &mut slices)? {
                    let header = slices.get(chain.header).map(packet::read_header);
                    let payload = slices.get(chain.payload);
                    if let (Some(header), Some(payload)) = (header, payload) {
                        muxer.packet(&header, payload, chain.payload_len)?;
                    }
                }
                self.tx.add_used(memory, head, 0)?;
                count += 1;
            }
            if count >= BUDGET {
                return Ok((false, true));
            }
            if !self.tx.enable_notification(memory)? {
                return Ok((true, count > 0));
            }
        }
    }
}

/// The receive queue during one batch. Chains are taken from the queue as needed, and those that were
/// not used go back to it at the end, so that between batches the queue is all the state there is.
struct RxQueue<'m, 'q> {
    memory: &'m GuestMemory,
    queue: &'q mut Virtqueue,
    slices: Vec<VolatileSlice<'m>>,
    chains: Vec<Chain>,
    /// How many of `chains` were delivered.
    delivered: usize,
    used: bool,
    error: Option<DeviceError>,
}

impl<'m, 'q> RxQueue<'m, 'q> {
    fn new(memory: &'m GuestMemory, queue: &'q mut Virtqueue) -> Self {
        Self {
            memory,
            queue,
            slices: Vec::new(),
            chains: Vec::new(),
            delivered: 0,
            used: false,
            error: None,
        }
    }

    /// Puts back what was not used. Returns whether anything was used.
    fn finish(self) -> Result<bool, DeviceError> {
        let left = self.chains.len().saturating_sub(self.delivered);
        // At most the size of the queue, a u16.
        let left = u16::try_from(left).unwrap_or(0);
        self.queue.put_back(left);
        self.error.map_or(Ok(self.used), Err)
    }

    fn chain(&self, index: usize) -> Option<&Chain> {
        self.chains.get(self.delivered.checked_add(index)?)
    }

    fn fetch(&mut self) -> Result<bool, DeviceError> {
        // Chains that cannot carry a packet go back at once, but not endlessly: the guest may
        // offer them again while we are at it.
        for _ in 0..QUEUE_SIZE {
            let Some(chain) = self.queue.pop(self.memory)? else { return Ok(false) };
            let head = chain.head();
            let flat = packet::flatten(self.memory, chain, Access::Write, &mut self.slices)?;
            match flat {
                Some(chain) if chain.payload_len > 0 => {
                    self.chains.push(chain);
                    return Ok(true);
                }
                _ => {
                    self.queue.add_used(self.memory, head, 0)?;
                    self.used = true;
                }
            }
        }
        Ok(false)
    }
}

impl RxBuffers for RxQueue<'_, '_> {
    fn ready(&mut self, wanted: usize) -> usize {
        if self.delivered == self.chains.len() {
            self.chains.clear();
            self.slices.clear();
            self.delivered = 0;
        }
        while self.error.is_none() && self.chains.len() - self.delivered < wanted {
            match self.fetch() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.error = Some(error),
            }
        }
        (self.chains.len() - self.delivered).min(wanted)
    }

    fn payload(&self, index: usize) -> &[VolatileSlice<'_>] {
        let range = self.chain(index).map(|chain| chain.payload.clone());
        range.and_then(|range| self.slices.get(range)).unwrap_or_default()
    }

    fn capacity(&self, index: usize) -> usize {
        self.chain(index).map_or(0, |chain| chain.payload_len)
    }

    fn deliver(&mut self, header: Header) -> Result<(), DeviceError> {
        let Some(chain) = self.chains.get(self.delivered) else {
            return Err(self
                .error
                .take()
                .unwrap_or_else(|| DeviceError::Driver("no receive buffer".into())));
        };
        let slices = self.slices.get(chain.header.clone()).unwrap_or_default();
        packet::write_header(slices, header);
        let written = u32::try_from(HEADER_LEN).unwrap_or(0).saturating_add(header.len);
        self.queue.add_used(self.memory, chain.head, written)?;
        self.delivered += 1;
        self.used = true;
        Ok(())
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
