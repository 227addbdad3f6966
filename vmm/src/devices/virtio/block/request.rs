//! One request: checked, carried out on the file, answered by its status byte.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::range;
use crate::devices::serial::Console;
use crate::devices::virtio::chain::{Buffers, Chain, split_chain};
use crate::devices::virtio::{DeviceError, GuestMemory};
use crate::io::{read_exact_at, write_all_at};

/// Bytes of a sector, the unit of all numbers of the driver.
pub(super) const SECTOR: u64 = 512;
/// Most sectors that one range of a discard request may have, 2 GiB.
pub(super) const DISCARD_SECTORS: u32 = 1 << 22;
/// Most ranges of one discard request.
pub(super) const DISCARD_RANGES: u32 = 32;
/// Most sectors of a request for zeros, 32 MiB: on a host file system without holes they are written.
pub(super) const ZERO_SECTORS: u32 = 1 << 16;
/// Failures of the host that are told on the console for each disk.
const MOST_REPORTS: u32 = 8;

/// What requests work on.
pub(super) struct Disk {
    file: File,
    pub(super) read_only: bool,
    /// Capacity.
    pub(super) sectors: u64,
    id: String,
    /// Whether the host's file system can give up blocks of the file.
    pub(super) discards: bool,
    console: Option<Console>,
    reports: u32,
}

/// A request that failed: the status byte for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(u32);

const IO_ERROR: Status = Status(VIRTIO_BLK_S_IOERR);
const UNSUPPORTED: Status = Status(VIRTIO_BLK_S_UNSUPP);

impl Disk {
    pub(super) fn new(file: File, read_only: bool, id: &str) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let discards = !read_only && range::can_punch(file.as_fd(), length);
        let (sectors, id) = (length / SECTOR, id.to_owned());
        Ok(Self { file, read_only, sectors, id, discards, console: None, reports: 0 })
    }

    pub(super) fn log_to(&mut self, console: Console) {
        self.console = Some(console);
    }

    /// Carries out one request; returns the number of bytes written to the guest.
    pub(super) fn request(
        &mut self,
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
        let (code, written) = match self.carry_out(kind, sector, &mut readable, &mut writable) {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(Status(code)) => (code, 0),
        };
        status.write(&[u8::try_from(code).unwrap_or(u8::MAX)]);
        // A chain holds less than 4 GiB.
        Ok(u32::try_from(written + 1).unwrap_or(u32::MAX))
    }

    fn carry_out(
        &mut self,
        kind: u32,
        sector: u64,
        readable: &mut Buffers<'_>,
        writable: &mut Buffers<'_>,
    ) -> Result<u64, Status> {
        let changes =
            [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES].contains(&kind);
        if changes && self.read_only {
            return Err(IO_ERROR);
        }
        match kind {
            VIRTIO_BLK_T_IN => {
                let offset = self.place(sector, writable.len())?;
                let done = read_exact_at(self.file.as_fd(), writable.slices(), offset);
                self.reported("read", done)?;
                Ok(writable.len())
            }
            VIRTIO_BLK_T_OUT => {
                let offset = self.place(sector, readable.len())?;
                let done = write_all_at(self.file.as_fd(), readable.slices(), offset);
                self.reported("write", done)?;
                Ok(0)
            }
            VIRTIO_BLK_T_FLUSH => {
                if !self.read_only {
                    let done = self.file.sync_data();
                    self.reported("flush", done)?;
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
            VIRTIO_BLK_T_DISCARD if self.discards => {
                for range in self.ranges(readable, DISCARD_RANGES, DISCARD_SECTORS, 0)? {
                    let done = range::discard(self.file.as_fd(), range.offset, range.length);
                    self.reported("discard", done)?;
                }
                Ok(0)
            }
            VIRTIO_BLK_T_WRITE_ZEROES => {
                let unmap = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                for range in self.ranges(readable, 1, ZERO_SECTORS, unmap)? {
                    let file = self.file.as_fd();
                    let done =
                        range::zero(file, range.offset, range.length, range.flags & unmap != 0);
                    self.reported("write zeros", done)?;
                }
                Ok(0)
            }
            _ => Err(UNSUPPORTED),
        }
    }

    /// The byte offset of whole sectors that lie on the disk.
    fn place(&self, sector: u64, length: u64) -> Result<u64, Status> {
        let end = sector.checked_add(length / SECTOR).ok_or(IO_ERROR)?;
        if !length.is_multiple_of(SECTOR) || end > self.sectors {
            return Err(IO_ERROR);
        }
        sector.checked_mul(SECTOR).ok_or(IO_ERROR)
    }

    /// The ranges of a request for zeros or a discard, all of them good: an array of `struct
    /// virtio_blk_discard_write_zeroes`, virtio 1.2, 5.2.6. Flags that are not `allowed` make it unsupported.
    fn ranges(
        &self,
        readable: &mut Buffers<'_>,
        most: u32,
        most_sectors: u32,
        allowed: u32,
    ) -> Result<Vec<Range>, Status> {
        const SIZE: u64 = 16;
        let length = readable.len();
        if !length.is_multiple_of(SIZE) || length / SIZE > u64::from(most) {
            return Err(IO_ERROR);
        }
        let mut ranges = Vec::new();
        while let Some(bytes) = readable.read_array::<16>() {
            let [sector @ .., c0, c1, c2, c3, f0, f1, f2, f3] = bytes;
            let sector = u64::from_le_bytes(sector);
            let count = u32::from_le_bytes([c0, c1, c2, c3]);
            let flags = u32::from_le_bytes([f0, f1, f2, f3]);
            if flags & !allowed != 0 {
                return Err(UNSUPPORTED);
            }
            if count > most_sectors {
                return Err(IO_ERROR);
            }
            let length = u64::from(count) * SECTOR;
            ranges.push(Range { offset: self.place(sector, length)?, length, flags });
        }
        Ok(ranges)
    }

    /// What the guest learns of a failure of the host, and a line on the console, as the guest cannot know
    /// why. Neither ends anything: the next request may succeed.
    fn reported(&mut self, what: &str, done: io::Result<()>) -> Result<(), Status> {
        let Err(error) = done else { return Ok(()) };
        if let Some(console) = &mut self.console
            && self.reports < MOST_REPORTS
        {
            self.reports += 1;
            let id = &self.id;
            // Writing to the ring cannot fail.
            let _ = writeln!(console, "casulo-vmm: disk {id}: {what} failed on the host: {error}");
        }
        Err(IO_ERROR)
    }
}

/// Sectors to change, as bytes.
struct Range {
    offset: u64,
    length: u64,
    flags: u32,
}
