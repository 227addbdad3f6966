//! Loads an uncompressed ELF `vmlinux` into guest memory.
//!
//! The headers are checked here first, so that each kind of bad file has an error of its own; the
//! segments are then loaded by `linux-loader`. Segments are not cleared beyond their bytes in the file:
//! guest memory is fresh and zero.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{GuestAddress, ReadVolatile, VolatileMemoryError, VolatileSlice};

use crate::devices::virtio::GuestMemory;
use crate::io::read_exact_at;
use crate::layout::{HIGH_MEMORY, HOLE_START};

const HEADER_SIZE: usize = 64;
const PROGRAM_HEADER_SIZE: usize = 56;
const MACHINE_X86_64: u16 = 62;
const TYPE_LOAD: u32 = 1;

/// Why a file is no kernel for this machine.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// No ELF magic.
    #[error("the kernel is not an ELF file; give an uncompressed vmlinux, not a bzImage")]
    NotElf,
    /// ELF, but of another kind.
    #[error("the kernel is not a 64-bit little-endian x86-64 executable with program headers")]
    WrongElf,
    /// The file is shorter than its headers say.
    #[error("the kernel file is truncated: it has {actual} bytes, its headers speak of {needed}")]
    Truncated {
        /// Size of the file.
        actual: u64,
        /// Size that the headers ask for.
        needed: u64,
    },
    /// The kernel does not fit.
    #[error(
        "the kernel needs memory up to {needed} MiB, the VM has {available} MiB; give it more memory"
    )]
    TooBig {
        /// MiB.
        needed: u64,
        /// MiB.
        available: u64,
    },
    /// A segment or the entry point lies below 1 MiB.
    #[error("the kernel wants to be loaded below 1 MiB, where the boot structures lie")]
    TooLow,
    /// The file could not be read.
    #[error("the kernel file cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The loader refused it for another reason.
    #[error("the kernel cannot be loaded: {0}")]
    Load(#[from] linux_loader::loader::Error),
}

/// Loads the kernel; returns its 64-bit entry point (guest physical).
///
/// `low_memory` is the RAM from 0 on, in bytes.
pub fn load(
    file: &File,
    memory: &GuestMemory,
    low_memory: u64,
) -> Result<GuestAddress, KernelError> {
    check(file, low_memory)?;
    let mut reader = Positioned { file, offset: 0 };
    let loaded = Elf::load(memory, None, &mut reader, Some(GuestAddress(HIGH_MEMORY)))?;
    Ok(loaded.kernel_load)
}

/// Checks headers and segments against the file and guest memory.
fn check(file: &File, low_memory: u64) -> Result<(), KernelError> {
    let size = file.metadata()?.len();
    let header = match read_array::<HEADER_SIZE>(file, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(KernelError::NotElf),
        other => other?,
    };
    if !header.starts_with(b"\x7fELF") {
        return Err(KernelError::NotElf);
    }
    // Class 64 bit, little endian.
    if header[4..6] != [2, 1] || u16_at(&header, 18) != MACHINE_X86_64 {
        return Err(KernelError::WrongElf);
    }
    let entry = u64_at(&header, 24);
    let table = u64_at(&header, 32);
    let count = u64::from(u16_at(&header, 56));
    if usize::from(u16_at(&header, 54)) != PROGRAM_HEADER_SIZE || count == 0 {
        return Err(KernelError::WrongElf);
    }
    let needed = table.saturating_add(count * PROGRAM_HEADER_SIZE as u64);
    if needed > size {
        return Err(KernelError::Truncated { actual: size, needed });
    }
    let limit = low_memory.min(HOLE_START);
    for index in 0..count {
        let offset = table + index * PROGRAM_HEADER_SIZE as u64;
        let segment = read_array::<PROGRAM_HEADER_SIZE>(file, offset)?;
        if u32_at(&segment, 0) != TYPE_LOAD {
            continue;
        }
        let needed = u64_at(&segment, 8).saturating_add(u64_at(&segment, 32));
        if needed > size {
            return Err(KernelError::Truncated { actual: size, needed });
        }
        let start = u64_at(&segment, 24);
        let in_memory = u64_at(&segment, 40).max(u64_at(&segment, 32));
        if start < HIGH_MEMORY {
            // An empty segment at 0 would do no harm, but no kernel has one.
            return Err(KernelError::TooLow);
        }
        let end = start.saturating_add(in_memory);
        if end > limit {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            return Err(KernelError::TooBig { needed: mib(end), available: mib(limit) });
        }
    }
    if entry < HIGH_MEMORY {
        return Err(KernelError::TooLow);
    }
    Ok(())
}

fn read_array<const N: usize>(file: &File, offset: u64) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes.get(offset..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, offset))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, offset))
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, offset))
}

/// Reads a file by position: the parent may share the open file, and with it its offset.
struct Positioned<'a> {
    file: &'a File,
    offset: u64,
}

impl Positioned<'_> {
    fn advance(&mut self, bytes: usize) {
        self.offset = self.offset.saturating_add(bytes as u64);
    }
}

impl Read for Positioned<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let done = self.file.read_at(buffer, self.offset)?;
        self.advance(done);
        Ok(done)
    }
}

impl Seek for Positioned<'_> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.offset = match position {
            SeekFrom::Start(offset) => offset,
            SeekFrom::Current(delta) => {
                self.offset.checked_add_signed(delta).ok_or(ErrorKind::InvalidInput)?
            }
            SeekFrom::End(_) => return Err(ErrorKind::Unsupported.into()),
        };
        Ok(self.offset)
    }
}

impl ReadVolatile for Positioned<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        let guard = buffer.ptr_guard_mut();
        // SAFETY: the guard keeps the host address valid for this length while the slice is used; the
        // new slice lives no longer than this call.
        let target = unsafe { VolatileSlice::new(guard.as_ptr(), guard.len()) };
        read_exact_at(self.file.as_fd(), &[target], self.offset)
            .map_err(VolatileMemoryError::IOError)?;
        self.advance(guard.len());
        Ok(guard.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::Bytes;

    const MIB: u64 = 1 << 20;

    /// An executable with one segment: `bytes` at `address`, `in_memory` bytes long.
    fn elf(address: u64, bytes: &[u8], in_memory: u64) -> Vec<u8> {
        let mut file = vec![0; HEADER_SIZE + PROGRAM_HEADER_SIZE];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
        file[24..32].copy_from_slice(&address.to_le_bytes());
        file[32..40].copy_from_slice(&(HEADER_SIZE as u64).to_le_bytes());
        file[54..56].copy_from_slice(&(PROGRAM_HEADER_SIZE as u16).to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        let segment = &mut file[HEADER_SIZE..];
        segment[..4].copy_from_slice(&TYPE_LOAD.to_le_bytes());
        segment[8..16].copy_from_slice(&120u64.to_le_bytes());
        segment[24..32].copy_from_slice(&address.to_le_bytes());
        segment[32..40].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        segment[40..48].copy_from_slice(&in_memory.to_le_bytes());
        file.extend_from_slice(bytes);
        file
    }

    fn try_load(bytes: &[u8]) -> Result<u64, KernelError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let memory = crate::memory::map(32).unwrap();
        load(&file, &memory, 32 * MIB).map(|address| {
            assert_eq!(memory.read_obj::<[u8; 4]>(address).unwrap(), *b"code");
            address.0
        })
    }

    #[test]
    fn a_good_file_is_loaded_at_its_address() {
        assert_eq!(try_load(&elf(16 * MIB, b"code", 16 * MIB)).unwrap(), 16 * MIB);
    }

    #[test]
    fn each_kind_of_bad_file_has_its_error() {
        let good = elf(2 * MIB, b"code", 8);
        assert!(matches!(try_load(b""), Err(KernelError::NotElf)));
        assert!(matches!(try_load(&[0; 4096]), Err(KernelError::NotElf)));
        assert!(matches!(try_load(&good[..63]), Err(KernelError::NotElf)));
        assert!(matches!(
            try_load(&good[..64]),
            Err(KernelError::Truncated { actual: 64, needed: 120 })
        ));
        assert!(matches!(
            try_load(&good[..123]),
            Err(KernelError::Truncated { actual: 123, needed: 124 })
        ));
        let mut thirty_two_bit = good.clone();
        thirty_two_bit[4] = 1;
        assert!(matches!(try_load(&thirty_two_bit), Err(KernelError::WrongElf)));
        let mut no_segments = good;
        no_segments[56] = 0;
        assert!(matches!(try_load(&no_segments), Err(KernelError::WrongElf)));
        assert!(matches!(
            try_load(&elf(16 * MIB, b"code", 16 * MIB + 1)),
            Err(KernelError::TooBig { needed: 33, available: 32 })
        ));
        assert!(matches!(
            try_load(&elf(u64::MAX - 1, b"code", 8)),
            Err(KernelError::TooBig { .. })
        ));
        assert!(matches!(try_load(&elf(0x1000, b"code", 8)), Err(KernelError::TooLow)));
    }

    #[test]
    fn damaged_headers_never_panic() {
        let good = elf(2 * MIB, b"code", 8);
        for index in 0..HEADER_SIZE + PROGRAM_HEADER_SIZE {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[index] = value;
                let mut file = tempfile::tempfile().unwrap();
                file.write_all(&bad).unwrap();
                let memory = crate::memory::map(32).unwrap();
                let _ = load(&file, &memory, 32 * MIB);
            }
        }
    }
}
