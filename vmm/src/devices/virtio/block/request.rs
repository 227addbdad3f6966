//! One request: checked, carried out on the file, answered by its status byte.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};

use crate::devices::virtio::chain::{Buffers, Chain, split_chain};
use crate::devices::virtio::{DeviceError, GuestMemory};
use crate::io::{read_exact_at, write_all_at};

const SECTOR: u64 = 512;

/// What requests work on.
pub(super) struct Disk {
    file: File,
    pub(super) read_only: bool,
    /// Capacity.
    pub(super) sectors: u64,
    id: String,
}

/// A request that failed: the status byte for the driver.
struct Status(u32);

const IO_ERROR: Status = Status(VIRTIO_BLK_S_IOERR);

impl Disk {
    pub(super) fn new(file: File, read_only: bool, id: &str) -> io::Result<Self> {
        let sectors = file.metadata()?.len() / SECTOR;
        Ok(Self { file, read_only, sectors, id: id.to_owned() })
    }

    /// Carries out one request; returns the number of bytes written to the guest.
    pub(super) fn request(
        &self,
        memory: &GuestMemory,
        chain: Chain<'_>,
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
