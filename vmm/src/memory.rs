//! Guest memory: the mappings behind the RAM of [`crate::layout`].

use std::num::NonZeroUsize;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::devices::virtio::GuestMemory;
use crate::layout;

/// Least and most guest memory in MiB.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 32..=1 << 20;

const HUGE_PAGE: usize = 2 << 20;
/// What the host counts memory in.
const PAGE: u64 = 4096;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is outside of the limits.
    #[error("guest memory of {0} MiB is outside of 32 to 1048576 MiB")]
    Size(u32),
    /// The host refused the mapping.
    #[error("the host refused {mib} MiB of guest memory ({source}); ask for less memory")]
    Map {
        /// Size asked for.
        mib: u32,
        /// Why.
        source: std::io::Error,
    },
    /// The regions do not fit together.
    #[error("guest memory regions are inconsistent: {0}")]
    Regions(String),
}

/// Ranges of RAM as (guest physical start, bytes), in order.
pub fn ranges(memory_mib: u32) -> Result<Vec<(u64, u64)>, MemoryError> {
    if !MEMORY_MIB.contains(&memory_mib) {
        return Err(MemoryError::Size(memory_mib));
    }
    Ok(layout::ram(u64::from(memory_mib) << 20))
}

/// Maps guest memory: anonymous, 2 MiB aligned, with transparent huge pages where the host has them.
///
/// The mapping lives as long as the process: a VMM is one VM, and its end frees everything.
pub fn map(memory_mib: u32) -> Result<Arc<GuestMemory>, MemoryError> {
    let ranges = ranges(memory_mib)?;
    let refused =
        |source: rustix::io::Errno| MemoryError::Map { mib: memory_mib, source: source.into() };
    let mut regions = Vec::with_capacity(ranges.len());
    for (start, size) in ranges {
        let size = usize::try_from(size).map_err(|_| MemoryError::Size(memory_mib))?;
        let region = map_aligned(size).map_err(refused)?;
        let region = GuestRegionMmap::new(region, GuestAddress(start))
            .ok_or_else(|| MemoryError::Regions(format!("{size:#x} bytes at {start:#x}")))?;
        regions.push(region);
    }
    let memory = GuestMemory::from_regions(regions)
        .map_err(|error| MemoryError::Regions(error.to_string()))?;
    Ok(Arc::new(memory))
}

/// An anonymous private mapping at a multiple of 2 MiB, never unmapped.
fn map_aligned(size: usize) -> rustix::io::Result<MmapRegion<()>> {
    use rustix::mm::{Advice, MapFlags, ProtFlags};
    let reserve = size.checked_add(HUGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces no other one.
    let base =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserve, protection, flags) }?;
    let skip = base.addr().wrapping_neg() % HUGE_PAGE;
    let start = base.wrapping_byte_add(skip);
    // Less alignment leaves at most 2 MiB of address space unused on either side; it is never touched.
    // SAFETY: the advice covers only the mapping made above, and does not change its content.
    match unsafe { rustix::mm::madvise(start, size, Advice::LinuxHugepage) } {
        // A host kernel without transparent huge pages.
        Ok(()) | Err(rustix::io::Errno::INVAL) => {}
        Err(error) => return Err(error),
    }
    let build = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
    // SAFETY: `start..start + size` lies inside of the mapping made above, which lives for ever.
    let region = unsafe { MmapRegion::build_raw(start.cast(), size, build.0, build.1) };
    region.map_err(|_| rustix::io::Errno::INVAL)
}

/// Why memory could not be given back to the host.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The range is not RAM from its first to its last byte.
    #[error("{length:#x} bytes at {start:#x} are not all guest memory")]
    NotMemory {
        /// Guest physical address.
        start: u64,
        /// Bytes.
        length: u64,
    },
    /// The host refused.
    #[error("the host did not take memory back: {0}")]
    Host(std::io::Error),
}

/// Gives the whole pages of a range back to the host; returns their bytes. The guest finds zeros when it
/// uses them again.
///
/// The range must lie in RAM, in one piece; nothing is given back of one that does not. Incomplete pages
/// at its ends stay. May be called for any memory of the guest while it runs: it is the guest's to lose,
/// and what the devices have there they reach only by copies.
pub fn release(memory: &GuestMemory, start: u64, length: u64) -> Result<u64, ReleaseError> {
    let outside = || ReleaseError::NotMemory { start, length };
    let end = start.checked_add(length).ok_or_else(outside)?;
    let region = memory.find_region(GuestAddress(start)).ok_or_else(outside)?;
    let offset = start.checked_sub(region.start_addr().0).ok_or_else(outside)?;
    let room = region.len().checked_sub(offset).ok_or_else(outside)?;
    if length > room {
        return Err(outside());
    }
    // Regions begin at a page in the guest and in the host, so pages are the same in both. In a region
    // that ends at the top of the address space there is no next page.
    let first = start.checked_next_multiple_of(PAGE).ok_or_else(outside)?;
    let last = end - end % PAGE;
    let Some(bytes) = last.checked_sub(first).filter(|bytes| *bytes > 0) else {
        return Ok(0);
    };
    let skip = usize::try_from(first - region.start_addr().0).map_err(|_| outside())?;
    let size = usize::try_from(bytes).map_err(|_| outside())?;
    let pages = region.as_ptr().wrapping_byte_add(skip);
    // SAFETY: `first..last` is part of `start..end`, which was found to lie inside of this region, so the
    // pages are of its mapping and of no other. It is a private one that nothing in this process refers
    // to: guest memory is only copied from and to, and changes under the feet of every reader anyway.
    unsafe { rustix::mm::madvise(pages.cast(), size, rustix::mm::Advice::LinuxDontNeed) }
        .map_err(|error| ReleaseError::Host(error.into()))?;
    Ok(bytes)
}

/// An anonymous, zeroed mapping of whole pages that both the guest and the VMM see.
///
/// For register pages of devices: the guest may only read it (`KVM_MEM_READONLY`).
pub fn map_pages(size: NonZeroUsize) -> Result<Arc<MmapRegion<()>>, MemoryError> {
    MmapRegion::new(size.get())
        .map(Arc::new)
        .map_err(|error| MemoryError::Regions(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn sizes_outside_of_the_limits_are_refused() {
        for mib in [0, 1, 31, (1 << 20) + 1, u32::MAX] {
            assert!(matches!(ranges(mib), Err(MemoryError::Size(n)) if n == mib));
        }
    }

    #[test]
    fn memory_is_aligned_zero_and_writable_to_its_end() {
        let memory = map(33).unwrap();
        let region = memory.find_region(GuestAddress(0)).unwrap();
        assert_eq!(region.len(), 33 << 20);
        assert_eq!(region.as_ptr().addr() % HUGE_PAGE, 0);
        let last = GuestAddress((33 << 20) - 8);
        assert_eq!(memory.read_obj::<u64>(last).unwrap(), 0);
        memory.write_obj(u64::MAX, last).unwrap();
        assert!(memory.write_obj(0u64, GuestAddress(33 << 20)).is_err());
    }

    /// Two regions with a hole between them, every byte 1.
    fn two_regions() -> GuestMemory {
        let ranges = [(GuestAddress(0), 0x8000), (GuestAddress(0x10_0000), 0x4000)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        for (start, size) in ranges {
            memory.write_slice(&vec![1; size], start).unwrap();
        }
        memory
    }

    /// The pages of [`two_regions`] that hold nothing any more; each is all ones or all zeros.
    fn empty_pages(memory: &GuestMemory) -> Vec<u64> {
        let pages = (0..0x8000).chain(0x10_0000..0x10_4000).step_by(0x1000);
        let mut empty = Vec::new();
        for page in pages {
            let mut bytes = [0; 0x1000];
            memory.read_slice(&mut bytes, GuestAddress(page)).unwrap();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{page:#x}");
            if bytes[0] == 0 {
                empty.push(page);
            }
        }
        empty
    }

    #[test]
    fn released_pages_are_empty_and_others_are_not() {
        let memory = two_regions();
        assert_eq!(release(&memory, 0x1000, 0x2000).unwrap(), 0x2000);
        assert_eq!(release(&memory, 0x10_3000, 0x1000).unwrap(), 0x1000);
        assert_eq!(empty_pages(&memory), [0x1000, 0x2000, 0x10_3000]);
        memory.write_obj(7u8, GuestAddress(0x1000)).unwrap();
        assert_eq!(memory.read_obj::<u8>(GuestAddress(0x1000)).unwrap(), 7);
    }

    #[test]
    fn only_whole_pages_are_released() {
        let memory = two_regions();
        assert_eq!(release(&memory, 0x1001, 0x2fff).unwrap(), 0x2000);
        assert_eq!(release(&memory, 0x5000, 0x1fff).unwrap(), 0x1000);
        for (start, length) in [(0x6001, 0x1ffe), (0x6000, 0), (0x6000, 0xfff), (0x7fff, 1)] {
            assert_eq!(release(&memory, start, length).unwrap(), 0, "{start:#x} {length:#x}");
        }
        assert_eq!(empty_pages(&memory), [0x2000, 0x3000, 0x5000]);
    }

    #[test]
    fn what_is_not_all_ram_is_not_released() {
        let memory = two_regions();
        for (start, length) in [
            (0x7000, 0x1001),
            (0, 0x10_0000),
            (0x7000, 0x10_0000),
            (0x8000, 0),
            (0x9000, 0x1000),
            (0xf_f000, 0x2000),
            (0x10_4000, 0x1000),
            (0x10_0000, u64::MAX),
            (u64::MAX, 1),
            (u64::MAX - 0xfff, 0x1000),
            (0, u64::MAX),
        ] {
            let result = release(&memory, start, length);
            assert!(
                matches!(result, Err(ReleaseError::NotMemory { .. })),
                "{start:#x} {length:#x}: {result:?}"
            );
        }
        assert_eq!(empty_pages(&memory), [0u64; 0]);
    }

    #[test]
    fn released_memory_leaves_the_process() {
        let memory = map(64).unwrap();
        memory.write_slice(&vec![1; 48 << 20], GuestAddress(8 << 20)).unwrap();
        let resident = || {
            let page = memory.find_region(GuestAddress(0)).unwrap().as_ptr();
            let mut pages = vec![0u8; 64 << 8];
            // SAFETY: the vector has a byte for each page of the mapping.
            let result = unsafe { libc::mincore(page.cast(), 64 << 20, pages.as_mut_ptr()) };
            assert_eq!(result, 0);
            pages.iter().filter(|page| **page & 1 == 1).count()
        };
        assert!(resident() >= 48 << 8);
        assert_eq!(release(&memory, 8 << 20, 48 << 20).unwrap(), 48 << 20);
        assert_eq!(resident(), 0);
    }

    proptest::proptest! {
        #[test]
        fn any_range_releases_exactly_its_whole_pages(start in 0u64..0x11_0000, length in 0u64..0x2_0000) {
            let memory = two_regions();
            let inside = |from: u64, to: u64| from <= start && start < to && start + length <= to;
            let ram = inside(0, 0x8000) || inside(0x10_0000, 0x10_4000);
            let result = release(&memory, start, length);
            proptest::prop_assert_eq!(result.is_ok(), ram);
            let expected: Vec<u64> = (0..0x8000).chain(0x10_0000..0x10_4000).step_by(0x1000)
                .filter(|page| ram && start <= *page && page + 0x1000 <= start + length)
                .collect();
            proptest::prop_assert_eq!(result.unwrap_or(0), expected.len() as u64 * 0x1000);
            proptest::prop_assert_eq!(empty_pages(&memory), expected);
        }
    }
}
