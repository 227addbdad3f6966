//! Guest memory: the mappings behind the RAM of [`crate::layout`].

use std::num::NonZeroUsize;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::devices::virtio::GuestMemory;
use crate::layout;

/// Least and most guest memory in MiB.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 32..=1 << 20;

const HUGE_PAGE: usize = 2 << 20;

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
    use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

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
}
