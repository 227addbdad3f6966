//! virtio-blk over a file, read-only or writable.
//!
//! Data moves between the file and guest memory without a copy. Every request is checked before the file is
//! touched; one that asks for what is not there fails by its status byte, one that has no room for a status
//! byte breaks the rules of the device and fails the device.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_ID_BYTES,
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtio_queue::{Queue, QueueOwnedT, QueueT};

use super::chain::{Buffers, Descriptor, split_chain};
use super::{Activation, DeviceError, GuestMemory, VirtioDevice};
use crate::io::{read_exact_at, write_all_at};

const DEVICE_TYPE: u32 = 2;
const QUEUE_SIZE: u16 = 128;
const SECTOR: u64 = 512;
/// Data buffers of one request: the queue's size less header and status.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// A disk.
pub struct BlockDevice {
    disk: Disk,
    active: Option<Active>,
}

struct Active {
    activation: Activation,
    queue: Queue,
}

impl BlockDevice {
    /// A disk over a regular file, whose size rounded down to whole sectors is the capacity. `id` is the
    /// serial number that the guest sees.
    pub fn new(file: File, read_only: bool, id: &str) -> io::Result<Self> {
        let sectors = file.metadata()?.len() / SECTOR;
        Ok(Self { disk: Disk { file, read_only, sectors, id: id.to_owned() }, active: None })
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
        self.active.as_mut().map_or(Ok(()), |active| active.serve(&self.disk))
    }

    fn reset(&mut self) {
        self.active = None;
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

impl Active {
    fn serve(&mut self, disk: &Disk) -> Result<(), DeviceError> {
        let memory = &*self.activation.memory;
        loop {
            self.queue.disable_notification(memory)?;
            let mut used = false;
            while let Some(chain) = self.queue.iter(memory)?.next() {
                let head = chain.head_index();
                let written = disk.request(memory, chain)?;
                self.queue.add_used(memory, head, written)?;
                used = true;
            }
            if used && self.queue.needs_notification(memory)? {
                self.activation.interrupt.signal_queue()?;
            }
            if !self.queue.enable_notification(memory)? {
                return Ok(());
            }
        }
    }
}

/// What requests work on.
struct Disk {
    file: File,
    read_only: bool,
    sectors: u64,
    id: String,
}

/// A request that failed: the status byte for the driver.
struct Status(u32);

const IO_ERROR: Status = Status(VIRTIO_BLK_S_IOERR);

impl Disk {
    /// Carries out one request; returns the number of bytes written to the guest.
    fn request(
        &self,
        memory: &GuestMemory,
        chain: impl Iterator<Item = Descriptor>,
    ) -> Result<u32, DeviceError> {
        let (mut readable, mut writable) = split_chain(memory, chain)?;
        let broken = |what: &str| DeviceError::Driver(format!("block request without {what}"));
        let data_length =
            writable.len().checked_sub(1).ok_or_else(|| broken("room for its status"))?;
        let mut status = writable.split_off(data_length).unwrap_or_default();
        let header = readable.read_array::<16>().ok_or_else(|| broken("a header"))?;
        let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
        let kind = u32::from_le_bytes([t0, t1, t2, t3]);
        let sector = u64::from_le_bytes(sector);
        let (code, written) = match self.carry_out(kind, sector, &readable, &mut writable) {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Status(code)) => (code, 0),
        };
        status.write(&[u8::try_from(code).unwrap_or(u8::MAX)]);
        // A chain holds less than 4 GiB.
        Ok(u32::try_from(written + 1).unwrap_or(u32::MAX))
    }

    fn carry_out(
        &self,
        kind: u32,
        sector: u64,
        readable: &Buffers<'_>,
        writable: &mut Buffers<'_>,
    ) -> Result<u64, Status> {
        match kind {
            VIRTIO_BLK_T_IN => {
                let offset = self.range(sector, writable.len())?;
                read_exact_at(self.file.as_fd(), writable.slices(), offset)
                    .map_err(|_| IO_ERROR)?;
                Ok(writable.len())
            }
            VIRTIO_BLK_T_OUT => {
                if self.read_only {
                    return Err(IO_ERROR);
                }
                let offset = self.range(sector, readable.len())?;
                write_all_at(self.file.as_fd(), readable.slices(), offset).map_err(|_| IO_ERROR)?;
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                if !self.read_only {
                    self.file.sync_data().map_err(|_| IO_ERROR)?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_GET_ID => {
                let mut id = [0u8; VIRTIO_BLK_ID_BYTES as usize];
                for (to, from) in id.iter_mut().zip(self.id.bytes()) {
                    *to = from;
                }
                Ok(writable.write(&id) as u64)
            }
            _ => Err(Status(VIRTIO_BLK_S_UNSUPP)),
        }
    }

    /// The byte offset of a range of whole sectors that lies on the disk.
    fn range(&self, sector: u64, length: u64) -> Result<u64, Status> {
        let end = sector.checked_add(length / SECTOR).ok_or(IO_ERROR)?;
        if !length.is_multiple_of(SECTOR) || end > self.sectors {
            return Err(IO_ERROR);
        }
        sector.checked_mul(SECTOR).ok_or(IO_ERROR)
    }
}

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;
