//! Guest memory, and the one place that decides where things lie in guest physical space.
//!
//! ```text
//! 0            low memory: boot structures (see `arch::x86_64::boot`), EBDA, legacy hole
//! 1 MiB        kernel
//! …            RAM up to 3 GiB
//! 3 GiB        hole: register pages of virtio devices, IOAPIC, local APIC, KVM's own pages
//! 4 GiB        the rest of RAM
//! ```
//! Guest physical space is kept low: some hosts (nested, paravirtual) walk fewer address bits than
//! they report.

use std::num::NonZeroUsize;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::devices::virtio::GuestMemory;

/// Start of the hole in RAM for devices.
pub const HOLE_START: u64 = 3 << 30;
/// End of the hole: RAM goes on here.
pub const HOLE_END: u64 = 4 << 30;
/// First register page of a virtio device; one page each.
pub const VIRTIO_START: u64 = 0xd000_0000;
/// Size of a virtio device's register page in bytes.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// The IOAPIC, where every PC has it.
pub const IOAPIC: u64 = 0xfec0_0000;
/// The local APIC, where every PC has it.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// One page that KVM uses for an identity map on Intel before the guest enables paging.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages that KVM uses for a task state segment on Intel.
pub const KVM_TSS: u64 = 0xfffb_d000;

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
    let bytes = u64::from(memory_mib) << 20;
    let low = bytes.min(HOLE_START);
    let mut ranges = vec![(0, low)];
    if bytes > low {
        ranges.push((HOLE_END, bytes - low));
    }
    Ok(ranges)
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
    fn small_memory_is_one_range() {
        assert_eq!(ranges(32).unwrap(), [(0, 32 << 20)]);
        assert_eq!(ranges(3072).unwrap(), [(0, 3 << 30)]);
    }

    #[test]
    fn large_memory_goes_on_beyond_the_hole() {
        assert_eq!(ranges(3073).unwrap(), [(0, 3 << 30), (4 << 30, 1 << 20)]);
        assert_eq!(ranges(8192).unwrap(), [(0, 3 << 30), (4 << 30, 5 << 30)]);
    }

    #[test]
    fn sizes_outside_of_the_limits_are_refused() {
        for mib in [0, 1, 31, (1 << 20) + 1, u32::MAX] {
            assert!(matches!(ranges(mib), Err(MemoryError::Size(n)) if n == mib));
        }
    }

    #[test]
    fn devices_lie_in_the_hole_and_apart() {
        let mut places = [
            (VIRTIO_START, VIRTIO_SIZE * 64),
            (IOAPIC, 0x1000),
            (LOCAL_APIC, 0x1000),
            (KVM_IDENTITY_MAP, 0x1000),
            (KVM_TSS, 0x3000),
        ];
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
        assert!(places[0].0 >= HOLE_START);
        assert!(places[4].0 + places[4].1 <= HOLE_END);
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
