//! The disk as a virtio device: what it offers, its queue, and its saved state.

use std::fs::File;
use std::io;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
};

use super::request::Disk;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, VirtioDevice};

const DEVICE_TYPE: u32 = 2;
pub(super) const QUEUE_SIZE: u16 = 128;
/// Data buffers of one request: the queue's size less header and status.
pub(super) const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

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
}

impl VirtioDevice for BlockDevice {
    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        let read_only = if self.disk.read_only { 1 << VIRTIO_BLK_F_RO } else { 0 };
        (1 << VIRTIO_BLK_F_SEG_MAX) | (1 << VIRTIO_BLK_F_FLUSH) | read_only
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        // struct virtio_blk_config: capacity, size_max (not offered), seg_max.
        let mut config = self.disk.sectors.to_le_bytes().to_vec();
        config.extend_from_slice(&[0; 4]);
        config.extend_from_slice(&SEG_MAX.to_le_bytes());
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
