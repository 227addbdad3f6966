//! Where everything lies in guest physical space. No other file decides an address.
//!
//! ```text
//! 0x0000_0500  GDT: null, 64-bit code, data, TSS      0x0000_0520  empty IDT
//! 0x0000_7000  zero page (struct boot_params)         0x0000_8ff0  first stack, grows down
//! 0x0000_9000  PML4, PDPT, one page directory         0x0002_0000  command line
//! 0x0009_fc00  EBDA: MP table, the last KiB below the legacy hole (640 KiB to 1 MiB, no RAM)
//! 0x0010_0000  kernel, and RAM up to 3 GiB
//! 0xc000_0000  hole in RAM: register pages of virtio devices, IOAPIC, local APIC, KVM's own pages
//! 4 GiB        the rest of RAM
//! ```
//! Guest physical space is kept low: some hosts (nested, paravirtual) walk fewer address bits than
//! they report.

/// Global descriptor table.
pub const GDT: u64 = 0x500;
/// Interrupt descriptor table; empty, the kernel loads its own before it enables interrupts.
pub const IDT: u64 = 0x520;
/// `struct boot_params`.
pub const ZERO_PAGE: u64 = 0x7000;
/// First stack pointer.
pub const STACK: u64 = 0x8ff0;
/// Top level page table.
pub const PML4: u64 = 0x9000;
/// Second level page table.
pub const PDPT: u64 = 0xa000;
/// Third level page table: 512 large pages, the first GiB.
pub const PAGE_DIRECTORY: u64 = 0xb000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Largest command line in bytes, the final zero included (`COMMAND_LINE_SIZE` of Linux on x86).
pub const CMDLINE_SIZE: usize = 2048;
/// Extended BIOS data area, where Linux looks for the MP table; here RAM ends below the legacy hole.
pub const EBDA: u64 = 0x9_fc00;
/// Bytes of the EBDA.
pub const EBDA_SIZE: u64 = 1024;
/// RAM above the legacy hole: the kernel lies here.
pub const HIGH_MEMORY: u64 = 0x10_0000;
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

/// Ranges of RAM for this many bytes of it as (start, bytes), in order: all below the hole, or both
/// sides of it.
#[must_use]
pub fn ram(bytes: u64) -> Vec<(u64, u64)> {
    let low = bytes.min(HOLE_START);
    let mut ranges = vec![(0, low)];
    if bytes > low {
        ranges.push((HOLE_END, bytes - low));
    }
    ranges
}

/// The ranges of RAM that the kernel is told of: without the EBDA and the legacy hole below 1 MiB.
#[must_use]
pub fn e820(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut map = vec![(0, EBDA)];
    for &(start, size) in ranges {
        let end = start + size;
        let start = start.max(HIGH_MEMORY);
        if end > start {
            map.push((start, end - start));
        }
    }
    map
}

/// Address of the register page of the virtio device with this number.
#[must_use]
pub fn virtio(index: usize) -> u64 {
    // A VM has fewer devices than interrupt lines.
    VIRTIO_START.saturating_add((index as u64).saturating_mul(VIRTIO_SIZE))
}

/// Number of the virtio device at this address and the offset in its page; the device may not exist.
#[must_use]
pub fn virtio_at(address: u64) -> Option<(usize, u64)> {
    let offset = address.checked_sub(VIRTIO_START)?;
    Some((usize::try_from(offset / VIRTIO_SIZE).ok()?, offset % VIRTIO_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::irq::VIRTIO_LINES;

    #[test]
    fn small_memory_is_one_range_and_large_memory_goes_on_beyond_the_hole() {
        assert_eq!(ram(32 << 20), [(0, 32 << 20)]);
        assert_eq!(ram(3 << 30), [(0, 3 << 30)]);
        assert_eq!(ram(3073 << 20), [(0, 3 << 30), (4 << 30, 1 << 20)]);
        assert_eq!(ram(8 << 30), [(0, 3 << 30), (4 << 30, 5 << 30)]);
    }

    #[test]
    fn the_kernel_is_not_told_of_the_legacy_hole() {
        assert_eq!(e820(&[(0, 32 << 20)]), [(0, 0x9fc00), (0x10_0000, 31 << 20)]);
        assert_eq!(
            e820(&[(0, 3 << 30), (4 << 30, 1 << 30)]),
            [(0, 0x9fc00), (0x10_0000, (3 << 30) - (1 << 20)), (4 << 30, 1 << 30)]
        );
    }

    /// Sizes in MiB around every border of the map, up to the largest guest.
    const SIZES: [u64; 14] =
        [32, 33, 64, 512, 3071, 3072, 3073, 4095, 4096, 4097, 8192, 65_536, (1 << 20) - 1, 1 << 20];

    #[test]
    fn no_byte_of_ram_is_lost_doubled_or_in_the_hole() {
        for mib in SIZES {
            let ranges = ram(mib << 20);
            assert_eq!(ranges.iter().map(|(_, size)| size).sum::<u64>(), mib << 20, "{mib} MiB");
            assert_eq!(ranges[0].0, 0);
            apart(&ranges);
            for (start, size) in &ranges {
                assert!(*size > 0 && start + size <= 1 << 41, "{mib} MiB");
                assert!(start + size <= HOLE_START || *start >= HOLE_END, "{mib} MiB");
                // KVM maps large pages only where guest and host agree on their borders.
                assert_eq!(start % (2 << 20), 0);
            }
        }
        // As much as fits lies below the hole.
        assert_eq!(ram(1 << 40), [(0, 3 << 30), (4 << 30, (1 << 40) - (3 << 30))]);
    }

    #[test]
    fn the_kernel_is_told_of_all_ram_but_the_legacy_hole() {
        for mib in SIZES {
            let ranges = ram(mib << 20);
            let map = e820(&ranges);
            apart(&map);
            let known: u64 = map.iter().map(|(_, size)| size).sum();
            assert_eq!(known, (mib << 20) - (HIGH_MEMORY - EBDA), "{mib} MiB");
            let inside = |(start, size): &(u64, u64)| {
                ranges.iter().any(|(from, length)| from <= start && start + size <= from + length)
            };
            assert!(map.iter().all(inside), "{mib} MiB: {map:x?}");
            // They fit into the table of the zero page.
            assert!(map.len() <= 3);
        }
    }

    fn apart(places: &[(u64, u64)]) {
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
    }

    #[test]
    fn boot_structures_lie_apart_below_the_legacy_hole() {
        let places = [
            (GDT, 32),
            (IDT, 8),
            (ZERO_PAGE, 0x1000),
            // What is left for the stack.
            (ZERO_PAGE + 0x1000, STACK - ZERO_PAGE - 0x1000),
            (PML4, 0x1000),
            (PDPT, 0x1000),
            (PAGE_DIRECTORY, 0x1000),
            (CMDLINE, CMDLINE_SIZE as u64),
            (EBDA, EBDA_SIZE),
            (0xa_0000, HIGH_MEMORY - 0xa_0000),
        ];
        apart(&places);
    }

    #[test]
    fn devices_lie_apart_in_the_hole() {
        let last = VIRTIO_LINES.len() - 1;
        let places = [
            (HOLE_START, 0),
            (VIRTIO_START, VIRTIO_SIZE),
            (virtio(last), VIRTIO_SIZE),
            (IOAPIC, 0x1000),
            (LOCAL_APIC, 0x1000),
            (KVM_IDENTITY_MAP, 0x1000),
            (KVM_TSS, 0x3000),
            (HOLE_END, 0),
        ];
        apart(&places);
    }

    #[test]
    fn an_address_is_a_device_and_an_offset() {
        assert_eq!(virtio_at(VIRTIO_START), Some((0, 0)));
        assert_eq!(virtio_at(virtio(3) + 0x70), Some((3, 0x70)));
        assert_eq!(virtio_at(VIRTIO_START - 1), None);
        assert!(virtio_at(u64::MAX).is_some_and(|(index, _)| index > VIRTIO_LINES.len()));
    }
}
