//! A queue while its driver sets it up.

use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use crate::devices::virtio::GuestMemory;
use crate::devices::virtio::page::register;
use crate::devices::virtio::queue::Position;

/// Why a queue cannot be used as the driver set it up.
#[derive(Debug, thiserror::Error)]
#[error("queue {queue} is set up wrong: {why}")]
pub(super) struct SetupError {
    queue: usize,
    why: String,
}

/// One queue as the driver sets it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueSetup {
    pub max_size: u16,
    /// As written, or 0 if no queue can be that large.
    pub size: u16,
    pub ready: bool,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
}

impl QueueSetup {
    pub(super) fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, ready: false, desc: 0, avail: 0, used: 0 }
    }

    /// Queue number `index` at this position, if the driver set it up right.
    pub(super) fn build(
        &self,
        index: usize,
        memory: &GuestMemory,
        position: Position,
    ) -> Result<Queue, SetupError> {
        self.ring(memory, position).map_err(|why| SetupError { queue: index, why })
    }

    fn ring(&self, memory: &GuestMemory, position: Position) -> Result<Queue, String> {
        let Self { max_size, size, ready, desc, avail, used } = *self;
        if !ready {
            return Err("it is not ready".into());
        }
        let mut ring = Queue::new(max_size).map_err(|error| error.to_string())?;
        ring.try_set_size(size)
            .map_err(|_| format!("size {size} is no power of two up to {max_size}"))?;
        let misplaced = |what: &str, at: u64| format!("the {what} at {at:#x} is not aligned");
        ring.try_set_desc_table_address(GuestAddress(desc))
            .map_err(|_| misplaced("descriptor table", desc))?;
        ring.try_set_avail_ring_address(GuestAddress(avail))
            .map_err(|_| misplaced("available ring", avail))?;
        ring.try_set_used_ring_address(GuestAddress(used))
            .map_err(|_| misplaced("used ring", used))?;
        ring.set_ready(true);
        if !ring.is_valid(memory) {
            return Err(format!(
                "{size} entries with descriptors at {desc:#x}, available ring at {avail:#x} and used ring \
                 at {used:#x} do not lie in guest memory"
            ));
        }
        let Position { next_avail, next_used } = position;
        if next_avail.wrapping_sub(next_used) > size {
            return Err(format!("{next_avail} entries taken and {next_used} used of {size}"));
        }
        ring.set_next_avail(next_avail);
        ring.set_next_used(next_used);
        Ok(ring)
    }

    /// The driver wrote a register while queues can be set up. Returns whether it was taken.
    pub(super) fn set_register(&mut self, offset: u64, value: u32) -> bool {
        if offset == register::QUEUE_READY {
            self.ready = value == 1;
            return true;
        }
        // A queue that is ready keeps its place until it is made unready.
        if self.ready {
            return false;
        }
        if offset == register::QUEUE_NUM {
            // Anything that is no size for this queue makes it invalid at DRIVER_OK.
            self.size = u16::try_from(value).unwrap_or(0);
            return true;
        }
        let (address, high) = match offset {
            register::QUEUE_DESC => (&mut self.desc, false),
            register::QUEUE_DRIVER => (&mut self.avail, false),
            register::QUEUE_DEVICE => (&mut self.used, false),
            _ => match offset.wrapping_sub(4) {
                register::QUEUE_DESC => (&mut self.desc, true),
                register::QUEUE_DRIVER => (&mut self.avail, true),
                register::QUEUE_DEVICE => (&mut self.used, true),
                _ => return false,
            },
        };
        *address = if high {
            (*address & 0xffff_ffff) | (u64::from(value) << 32)
        } else {
            (*address & !0xffff_ffff) | u64::from(value)
        };
        true
    }
}
