//! The disk as a virtio device: what it offers, its queue, and its saved state.

use std::fs::File;
use std::io;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES,
};

use super::request::{DISCARD_RANGES, DISCARD_SECTORS, Disk, ZERO_SECTORS};
use crate::devices::serial::Console;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, VirtioDevice};

const DEVICE_TYPE: u32 = 2;
pub(super) const QUEUE_SIZE: u16 = 128;
/// Data buffers of one request: the queue's size less header and status.
pub(super) const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// Sectors of a block of the host, which is given up as a whole or not at all.
const ALIGNMENT: u32 = 8;

/// A disk.
pub struct BlockDevice {
    disk: Disk,
    active: Option<Active>,
}

struct Active {
    activation: Activation,
    queue: Virtqueue,
}

impl BlockDevice {
    /// A disk over a regular file, whose size rounded down to whole sectors is the capacity. `id` is the
    /// serial number that the guest sees.
    pub fn new(file: File, read_only: bool, id: &str) -> io::Result<Self> {
        Ok(Self { disk: Disk::new(file, read_only, id)?, active: None })
    }

    /// Failures of the host are told on this console, the first few of them.
    #[must_use]
    pub fn log_to(mut self, console: Console) -> Self {
        self.disk.log_to(console);
        self
    }
}

impl VirtioDevice for BlockDevice {
    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        let mut features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_FLUSH;
        if self.disk.read_only {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << VIRTIO_BLK_F_WRITE_ZEROES;
        }
        if self.disk.discards {
            features |= 1 << VIRTIO_BLK_F_DISCARD;
        }
        features
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        // struct virtio_blk_config, virtio 1.2, 5.2.4; what is not offered is zero.
        let mut config = self.disk.sectors.to_le_bytes().to_vec();
        let mut at = |offset: usize, value: u32| {
            config.resize(offset, 0);
            config.extend_from_slice(&value.to_le_bytes());
        };
        at(12, SEG_MAX);
        at(36, DISCARD_SECTORS);
        at(40, DISCARD_RANGES);
        at(44, ALIGNMENT);
        at(48, ZERO_SECTORS);
        // Ranges of a request for zeros, and that they may be given up.
        at(52, 1);
        at(56, 1);
        config
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let queue = activation.queues.pop();
        self.active = queue.map(|queue| Active { activation, queue });
        Ok(())
    }

    fn queue_event(&mut self, _queue: usize) -> Result<(), DeviceError> {
        let Some(Active { activation, queue }) = &mut self.active else { return Ok(()) };
        let memory = &*activation.memory;
        queue.serve(memory, &activation.interrupt, |chain| self.disk.request(memory, chain))
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queues(&self) -> Vec<&Virtqueue> {
        self.active.iter().map(|active| &active.queue).collect()
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        // The capacity: a restored guest keeps it, so it must not have changed.
        Ok(self.disk.sectors.into())
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), DeviceError> {
        if state.as_u64() == Some(self.disk.sectors) {
            return Ok(());
        }
        Err(DeviceError::State(format!(
            "the disk has {} sectors, the saved one had {state}",
            self.disk.sectors
        )))
    }
}
