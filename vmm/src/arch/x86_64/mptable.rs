//! The [MultiProcessor table] that tells a kernel without ACPI of its CPUs, IOAPIC and interrupt lines.
//!
//! [MultiProcessor table]: https://pdos.csail.mit.edu/6.828/2018/readings/ia32/MPspec.pdf

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::devices::virtio::GuestMemory;
use crate::irq::IOAPIC_PINS;
use crate::layout::{EBDA, IOAPIC, LOCAL_APIC};

/// Most CPUs that the KiB of the EBDA has room for.
pub const MAX_CPUS: u8 = 32;

const EBDA_SIZE: usize = crate::layout::EBDA_SIZE as usize;
const SPECIFICATION: u8 = 4;
const APIC_VERSION: u8 = 0x14;
const CPU_ENABLED: u8 = 1;
const CPU_BOOT: u8 = 2;
const CPU_STEPPING: u32 = 0x600;
/// Bits 0 and 9: there is an FPU and an APIC.
const CPU_FEATURES: u32 = 0x201;
const INTERRUPT: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTERNAL: u8 = 3;
const ALL_LOCAL_APICS: u8 = 0xff;

/// The table for `cpus` CPUs (1 to [`MAX_CPUS`]) and the interrupt lines in use, as it lies at [`EBDA`].
#[must_use]
pub fn build(cpus: u8, lines: &[u8]) -> Vec<u8> {
    let ioapic_id = cpus;
    let mut entries = Vec::with_capacity(EBDA_SIZE);
    let mut count = 0u16;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for id in 0..cpus {
        let flags = CPU_ENABLED | if id == 0 { CPU_BOOT } else { 0 };
        let mut entry = vec![0, id, APIC_VERSION, flags];
        entry.extend_from_slice(&CPU_STEPPING.to_le_bytes());
        entry.extend_from_slice(&CPU_FEATURES.to_le_bytes());
        entry.extend_from_slice(&[0; 8]);
        add(&entry);
    }
    add(b"\x01\x00ISA   ");
    // Both addresses lie below 4 GiB.
    let mut ioapic = vec![2, ioapic_id, APIC_VERSION, 1];
    ioapic.extend_from_slice(&(IOAPIC as u32).to_le_bytes());
    add(&ioapic);
    for pin in lines.iter().copied().filter(|pin| *pin < IOAPIC_PINS) {
        add(&[3, INTERRUPT, 0, 0, 0, pin, ioapic_id, pin]);
    }
    add(&[4, INTERRUPT_EXTERNAL, 0, 0, 0, 0, 0, 0]);
    add(&[4, INTERRUPT_NMI, 0, 0, 0, 0, ALL_LOCAL_APICS, 1]);

    let mut header = Vec::with_capacity(44);
    header.extend_from_slice(b"PCMP");
    let length = u16::try_from(entries.len() + 44).unwrap_or(u16::MAX);
    header.extend_from_slice(&length.to_le_bytes());
    header.extend_from_slice(&[SPECIFICATION, 0]);
    header.extend_from_slice(b"CASULO  000000000000");
    header.extend_from_slice(&[0; 6]);
    header.extend_from_slice(&count.to_le_bytes());
    header.extend_from_slice(&(LOCAL_APIC as u32).to_le_bytes());
    header.extend_from_slice(&[0; 4]);
    let sum = checksum(&header).wrapping_add(checksum(&entries));
    set(&mut header, 7, sum);

    let mut pointer = Vec::with_capacity(16);
    pointer.extend_from_slice(b"_MP_");
    pointer.extend_from_slice(&(EBDA as u32 + 16).to_le_bytes());
    pointer.extend_from_slice(&[1, SPECIFICATION, 0, 0, 0, 0, 0, 0]);
    let sum = checksum(&pointer);
    set(&mut pointer, 10, sum);

    let mut table = pointer;
    table.extend_from_slice(&header);
    table.extend_from_slice(&entries);
    table
}

/// Writes the table into the EBDA.
pub fn write(memory: &GuestMemory, cpus: u8, lines: &[u8]) -> Result<(), GuestMemoryError> {
    memory.write_slice(&build(cpus, lines), GuestAddress(EBDA))
}

/// What must be added to `bytes` so that they sum to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

fn set(bytes: &mut [u8], index: usize, value: u8) {
    if let Some(byte) = bytes.get_mut(index) {
        *byte = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [u8; 24] =
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];

    #[test]
    fn both_parts_sum_to_zero_and_the_length_is_right() {
        for cpus in [1, 2, MAX_CPUS] {
            let table = build(cpus, &ALL);
            assert_eq!(checksum(&table[..16]), 0);
            assert_eq!(checksum(&table[16..]), 0);
            let length = u16::from_le_bytes([table[20], table[21]]);
            assert_eq!(usize::from(length), table.len() - 16);
        }
    }

    #[test]
    fn entries_are_counted_and_of_their_size() {
        let table = build(3, &[4, 5, 23, 24]);
        let count = u16::from_le_bytes([table[16 + 34], table[16 + 35]]);
        let mut rest = &table[60..];
        let mut seen = 0;
        while let Some(kind) = rest.first() {
            rest = &rest[if *kind == 0 { 20 } else { 8 }..];
            seen += 1;
        }
        assert_eq!(seen, count);
        assert_eq!(count, 3 + 1 + 1 + 3 + 2);
    }

    #[test]
    fn the_largest_table_fits_below_the_legacy_hole() {
        assert!(build(MAX_CPUS, &ALL).len() <= EBDA_SIZE);
    }
}
