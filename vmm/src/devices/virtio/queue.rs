//! A virtqueue of an active device (split ring, virtio 1.2, 2.7): the one door through which what a driver
//! puts into its rings comes in.
//!
//! `virtio-queue` keeps the positions and writes the used ring. It passes over much that a driver may not
//! do: a chain that runs in a circle or leaves its table just ends early there, and so a device would take
//! half a request for a whole one. Here each breach is an error with its name, and the device needs a reset.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryError};
use vmm_sys_util::eventfd::EventFd;

use super::chain::Chain;
use super::{DeviceError, GuestMemory, Interrupt};

/// How a driver broke the rules of its queues.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// More chains are available than there are descriptors.
    #[error(
        "available index {index} is more than the {size} entries of the queue ahead of used index {used}"
    )]
    AvailableIndex {
        /// As the driver wrote it.
        index: u16,
        /// What the device has used so far.
        used: u16,
        /// Size of the queue.
        size: u16,
    },
    /// A descriptor number that the table does not have.
    #[error("descriptor {index} is beyond the end of a table of {entries}")]
    Descriptor {
        /// The number.
        index: u16,
        /// Entries of the table.
        entries: u32,
    },
    /// A chain with more descriptors than it may have; usually a circle.
    #[error("a chain has more than {0} descriptors or runs in a circle")]
    Length(u32),
    /// A buffer without bytes.
    #[error("a descriptor has a length of zero")]
    Empty,
    /// More bytes than a length in the used ring can tell.
    #[error("the buffers of a chain have 4 GiB or more in all")]
    Bytes,
    /// Something to read for the device behind something to write.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// `INDIRECT_DESC` was not negotiated.
    #[error("an indirect descriptor although the driver did not negotiate them")]
    IndirectRefused,
    /// An indirect descriptor in an indirect table.
    #[error("an indirect descriptor inside of an indirect table")]
    IndirectNested,
    /// An indirect descriptor that is not the last of its chain.
    #[error("an indirect descriptor has the flag for a next one")]
    IndirectNext,
    /// An indirect table that does not consist of descriptors.
    #[error("an indirect table of {0} bytes, which is no multiple of 16 from 16 on")]
    IndirectSize(u32),
    /// Rings or tables lie outside of guest memory.
    #[error("a ring or table lies outside of guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
    /// Any other failure of the rings.
    #[error("{0}")]
    Ring(#[from] virtio_queue::Error),
}

/// Where a device stands in a queue: what is saved of it beside the driver's setup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Entries taken from the available ring, modulo 2^16.
    pub next_avail: u16,
    /// Entries put into the used ring, modulo 2^16.
    pub next_used: u16,
}

/// A queue that the driver has set up, and where the device stands in it.
#[derive(Debug)]
pub struct Virtqueue {
    ring: Queue,
    indirect: bool,
    kick: Option<(Arc<[EventFd]>, usize)>,
}

impl Virtqueue {
    /// A queue at the position that `ring` says, with the features that the driver took. The ring must be
    /// valid ([`QueueT::is_valid`]).
    #[must_use]
    pub fn new(mut ring: Queue, features: u64) -> Self {
        ring.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        let indirect = features & (1 << VIRTIO_RING_F_INDIRECT_DESC) != 0;
        Self { ring, indirect, kick: None }
    }

    /// Lets the device kick the queue itself, by number `index` of `kicks`.
    #[must_use]
    pub fn with_kick(mut self, kicks: Arc<[EventFd]>, index: usize) -> Self {
        self.kick = Some((kicks, index));
        self
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Whether the driver took `EVENT_IDX`.
    #[must_use]
    pub fn event_idx(&self) -> bool {
        self.ring.event_idx_enabled()
    }

    /// Where the device stands.
    #[must_use]
    pub fn position(&self) -> Position {
        Position { next_avail: self.ring.next_avail(), next_used: self.ring.next_used() }
    }

    /// Takes the next chain, if the driver has made one available.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemory) -> Result<Option<Chain<'m>>, QueueError> {
        let index = self.ring.avail_idx(memory, Ordering::Acquire)?.0;
        let Position { next_avail, next_used } = self.position();
        let size = self.ring.size();
        // The driver counts every chain once, and has them back only when they are used: what is available
        // and what is used are at most a queue apart, and available never goes back.
        let ahead = index.wrapping_sub(next_used);
        if ahead > size || ahead < next_avail.wrapping_sub(next_used) {
            return Err(QueueError::AvailableIndex { index, used: next_used, size });
        }
        if index == next_avail {
            return Ok(None);
        }
        // The ring begins with flags and index. It was checked to lie in guest memory.
        let slot = u64::from(next_avail.checked_rem(size).unwrap_or(0));
        let at = GuestAddress(self.ring.avail_ring())
            .checked_add(4 + 2 * slot)
            .ok_or(virtio_queue::Error::AddressOverflow)?;
        let head = u16::from_le(memory.load(at, Ordering::Acquire)?);
        self.ring.set_next_avail(next_avail.wrapping_add(1));
        let table = GuestAddress(self.ring.desc_table());
        Chain::new(memory, table, size, head, self.indirect).map(Some)
    }

    /// Gives back the last `count` chains that were taken and not used.
    pub fn put_back(&mut self, count: u16) {
        self.ring.set_next_avail(self.ring.next_avail().wrapping_sub(count));
    }

    /// Tells the driver that a chain is used and `written` bytes were written into it.
    pub fn add_used(
        &mut self,
        memory: &GuestMemory,
        head: u16,
        written: u32,
    ) -> Result<(), QueueError> {
        Ok(self.ring.add_used(memory, head, written)?)
    }

    /// Asks the driver to kick when it makes more available. Returns whether it has done so already, for
    /// which no kick may come.
    pub fn enable_notification(&mut self, memory: &GuestMemory) -> Result<bool, QueueError> {
        Ok(self.ring.enable_notification(memory)?)
    }

    /// How many chains the driver has made available so far, modulo 2^16.
    pub fn available(&self, memory: &GuestMemory) -> Result<u16, QueueError> {
        Ok(self.ring.avail_idx(memory, Ordering::Acquire)?.0)
    }

    /// Like [`Virtqueue::enable_notification`], for what comes after the first `available` chains, while
    /// those before that stay where they are.
    pub fn enable_notification_after(
        &mut self,
        memory: &GuestMemory,
        available: u16,
    ) -> Result<bool, QueueError> {
        let next = self.ring.next_avail();
        self.ring.set_next_avail(available);
        let more = self.ring.enable_notification(memory);
        self.ring.set_next_avail(next);
        Ok(more?)
    }

    /// Asks the driver not to kick; it is free to.
    pub fn disable_notification(&mut self, memory: &GuestMemory) -> Result<(), QueueError> {
        Ok(self.ring.disable_notification(memory)?)
    }

    /// Whether the driver wants an interrupt for what was used since the last call.
    pub fn needs_notification(&mut self, memory: &GuestMemory) -> Result<bool, QueueError> {
        // Contains the fence between the used index and the driver's wish.
        let needed = self.ring.needs_notification(memory)?;
        if self.event_idx() {
            return Ok(needed);
        }
        let flags: u16 = memory.load(GuestAddress(self.ring.avail_ring()), Ordering::Relaxed)?;
        Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
    }

    /// Serves what is available: `request` returns the bytes written into the chain.
    ///
    /// At most as many as the queue has room for; then the queue kicks itself and the thread looks at what
    /// else it has to do, because a driver can make chains available as fast as they are served.
    pub fn serve<'m>(
        &mut self,
        memory: &'m GuestMemory,
        interrupt: &Interrupt,
        mut request: impl FnMut(Chain<'m>) -> Result<u32, DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut left = self.size();
        loop {
            self.disable_notification(memory)?;
            let mut used = false;
            while left > 0
                && let Some(chain) = self.pop(memory)?
            {
                let head = chain.head();
                let written = request(chain)?;
                self.add_used(memory, head, written)?;
                used = true;
                left -= 1;
            }
            if used && self.needs_notification(memory)? {
                interrupt.signal_queue()?;
            }
            if !self.enable_notification(memory)? {
                return Ok(());
            }
            if left == 0 {
                self.kick();
                return Ok(());
            }
        }
    }

    /// Has the worker look at the queue again.
    pub fn kick(&self) {
        if let Some((kicks, index)) = &self.kick
            && let Some(kick) = kicks.get(*index)
        {
            // A full counter is a kick that is not yet seen.
            let _ = kick.write(1);
        }
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
