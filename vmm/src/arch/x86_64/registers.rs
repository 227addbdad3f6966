//! Registers of the boot CPU at the kernel's 64-bit entry point. The other CPUs wait for `INIT`.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::GuestAddress;

use super::boot::GDT_ENTRIES;
use crate::layout::{GDT, IDT, PML4, STACK, ZERO_PAGE};

const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always set; interrupts are off.
const RFLAGS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEFAULT: u32 = 0x2ff;
/// MTRRs on, write-back memory.
const MTRR_ENABLE_WRITE_BACK: u64 = (1 << 11) | 6;

/// Why the registers could not be set.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// KVM refused.
    #[error("KVM refused {0}: {1}")]
    Kvm(&'static str, kvm_ioctls::Error),
    /// KVM took only some of the model specific registers.
    #[error("KVM refused model specific register {0:#x}")]
    Msr(u32),
}

/// Sets the MSRs that a BIOS would; all others are zero after reset, as the kernel expects.
pub fn set_msrs(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let entries = [
        entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MSR_MTRR_DEFAULT, MTRR_ENABLE_WRITE_BACK),
    ];
    let msrs = Msrs::from_entries(&entries).map_err(|_| RegisterError::Msr(0))?;
    let set = vcpu.set_msrs(&msrs).map_err(|error| RegisterError::Kvm("MSRs", error))?;
    match entries.get(set) {
        Some(refused) => Err(RegisterError::Msr(refused.index)),
        None => Ok(()),
    }
}

/// Long mode with paging on, flat segments, and the registers of the 64-bit boot protocol.
pub fn set_boot(vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), RegisterError> {
    let regs = kvm_regs {
        rip: entry.0,
        rsp: STACK,
        rbp: STACK,
        rsi: ZERO_PAGE,
        rflags: RFLAGS,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(|error| RegisterError::Kvm("general registers", error))?;

    let special = |error| RegisterError::Kvm("special registers", error);
    let mut sregs = vcpu.get_sregs().map_err(special)?;
    let [_, code, data, task] = GDT_ENTRIES;
    sregs.cs = segment(code, 1);
    let data = segment(data, 2);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = segment(task, 3);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = const { size_of_val(&GDT_ENTRIES) as u16 - 1 };
    sregs.idt.base = IDT;
    sregs.idt.limit = 7;
    sregs.cr3 = PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.efer |= EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs).map_err(special)
}

/// A segment register as loading GDT entry number `index` would make it.
fn segment(entry: u64, index: u16) -> kvm_segment {
    // Each is masked to the width of its target.
    let bits = |shift: u32, mask: u64| ((entry >> shift) & mask) as u8;
    let limit = (entry & 0xffff) | ((entry >> 32) & 0xf_0000);
    let granularity = bits(55, 1);
    kvm_segment {
        base: ((entry >> 16) & 0xff_ffff) | ((entry >> 32) & 0xff00_0000),
        limit: if granularity == 1 { ((limit << 12) | 0xfff) as u32 } else { limit as u32 },
        selector: index * 8,
        type_: bits(40, 0xf),
        present: bits(47, 1),
        dpl: bits(45, 3),
        db: bits(54, 1),
        s: bits(44, 1),
        l: bits(53, 1),
        g: granularity,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_match_their_descriptors() {
        let [_, code, data, task] = GDT_ENTRIES.map(|entry| segment(entry, 1));
        assert_eq!((code.type_, code.s, code.l, code.db), (0xb, 1, 1, 0));
        assert_eq!((data.type_, data.s, data.l, data.db), (3, 1, 0, 1));
        assert_eq!((task.type_, task.s, task.present), (0xb, 0, 1));
        assert!([code, data, task].iter().all(|s| s.limit == 0xffff_ffff && s.base == 0));
    }

    #[test]
    fn a_descriptor_with_every_field() {
        let s = segment(0x1245_f300_5678_9abc & !(1 << 55), 2);
        assert_eq!(s.base, 0x1200_5678);
        assert_eq!(s.limit, 0x5_9abc);
        assert_eq!((s.selector, s.dpl, s.g), (16, 3, 0));
    }
}
