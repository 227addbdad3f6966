//! What the guest learns of its CPU: what KVM supports, made consistent for this VM.
//!
//! KVM's list describes the host: its topology, features that need set-up which this VMM does not do
//! (performance counters, nested virtualisation), and nothing of the vCPU's own identity. The model here
//! is one socket with one core per vCPU and no hyper-threads; the APIC id is the vCPU's index.

use kvm_bindings::kvm_cpuid_entry2;

const SUBLEAF_SIGNIFICANT: u32 = kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX;

/// `AuthenticAMD` and `HygonGenuine`, as EBX of leaf 0.
const VENDOR_AMD: [u32; 2] = [0x6874_7541, 0x6f67_7948];

mod leaf1 {
    pub(super) const ECX_DTES64: u32 = 1 << 2;
    pub(super) const ECX_MONITOR: u32 = 1 << 3;
    pub(super) const ECX_DS_CPL: u32 = 1 << 4;
    pub(super) const ECX_VMX: u32 = 1 << 5;
    pub(super) const ECX_PDCM: u32 = 1 << 15;
    pub(super) const ECX_TSC_DEADLINE: u32 = 1 << 24;
    pub(super) const ECX_HYPERVISOR: u32 = 1 << 31;
    pub(super) const EDX_DS: u32 = 1 << 21;
    pub(super) const EDX_HTT: u32 = 1 << 28;
}

/// The CPUID table of vCPU number `cpu` out of `cpus`.
///
/// `tsc_deadline` says whether KVM's local APIC has the TSC deadline timer: that bit is a capability
/// of its own and not in every kernel's list.
#[must_use]
pub fn normalise(
    supported: &[kvm_cpuid_entry2],
    cpu: u8,
    cpus: u8,
    tsc_deadline: bool,
) -> Vec<kvm_cpuid_entry2> {
    let amd = supported.iter().any(|entry| entry.function == 0 && VENDOR_AMD.contains(&entry.ebx));
    let mut table: Vec<_> =
        supported.iter().filter(|entry| !matches!(entry.function, 0xb | 0x1f)).copied().collect();
    for entry in &mut table {
        normalise_leaf(entry, cpu, cpus, amd, tsc_deadline);
    }
    let topology = |function| (0..3).map(move |index| topology_leaf(function, index, cpu, cpus));
    table.extend(topology(0xb));
    if supported.iter().any(|entry| entry.function == 0x1f) {
        table.extend(topology(0x1f));
    }
    table
}

fn normalise_leaf(entry: &mut kvm_cpuid_entry2, cpu: u8, cpus: u8, amd: bool, tsc_deadline: bool) {
    let (id, count) = (u32::from(cpu), u32::from(cpus));
    match entry.function {
        0 => entry.eax = entry.eax.max(0xb),
        1 => {
            entry.ebx = (entry.ebx & 0x0000_ffff) | (count << 16) | (id << 24);
            entry.ecx &= !(leaf1::ECX_DTES64
                | leaf1::ECX_MONITOR
                | leaf1::ECX_DS_CPL
                | leaf1::ECX_VMX
                | leaf1::ECX_PDCM);
            entry.ecx |= leaf1::ECX_HYPERVISOR;
            set(&mut entry.ecx, leaf1::ECX_TSC_DEADLINE, tsc_deadline);
            entry.edx &= !leaf1::EDX_DS;
            set(&mut entry.edx, leaf1::EDX_HTT, cpus > 1);
        }
        // Deterministic cache parameters: who shares it, and how many cores there are.
        4 => share_cache(entry, count, (count - 1).min(0x3f) << 26),
        0x8000_001d => share_cache(entry, count, 0),
        // Turbo and the energy/performance bias need MSRs that a guest does not get.
        6 => {
            entry.eax &= !(1 << 1);
            entry.ecx &= !(1 << 3);
        }
        7 if entry.index == 0 => {
            // WAITPKG: a guest could stop the CPU for longer than its host wants.
            entry.ecx &= !(1 << 5);
            // KVM emulates ARCH_CAPABILITIES on AMD, where no guest kernel expects it.
            if amd {
                entry.edx &= !(1 << 29);
            }
        }
        // Performance counters of Intel and of AMD, and SVM: not offered.
        0xa | 0x8000_0022 | 0x8000_000a => clear(entry),
        0x8000_0001 => {
            const CMP_LEGACY: u32 = 1 << 1;
            const SVM: u32 = 1 << 2;
            const PERFCTR: u32 = (1 << 23) | (1 << 24) | (1 << 28);
            entry.ecx &= !(SVM | PERFCTR);
            if amd {
                set(&mut entry.ecx, CMP_LEGACY, cpus > 1);
            }
        }
        // Invariant TSC: hidden, so that Linux keeps to kvm-clock, which goes on across a snapshot that
        // is restored on another host or much later; a raw TSC would jump.
        0x8000_0007 => entry.edx &= !(1 << 8),
        0x8000_0008 if amd => {
            entry.ecx = (apic_id_bits(cpus) << 12) | (count - 1);
        }
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = id & 0xff;
            entry.ecx = 0;
        }
        _ => {}
    }
}

/// One core per vCPU: the first two levels of cache are a core's own, the others the socket's.
fn share_cache(entry: &mut kvm_cpuid_entry2, cpus: u32, cores: u32) {
    let (kind, level) = (entry.eax & 0x1f, (entry.eax >> 5) & 0x7);
    if kind == 0 {
        return;
    }
    let sharing = if level >= 3 { cpus - 1 } else { 0 };
    entry.eax = (entry.eax & 0x3fff) | (sharing << 14) | cores;
}

/// Extended topology: level 0 is a core's only thread, level 1 the cores, level 2 the end.
fn topology_leaf(function: u32, index: u32, cpu: u8, cpus: u8) -> kvm_cpuid_entry2 {
    let (eax, ebx, kind) = match index {
        0 => (0, 1, 1),
        1 => (apic_id_bits(cpus), u32::from(cpus), 2),
        _ => (0, 0, 0),
    };
    kvm_cpuid_entry2 {
        function,
        index,
        flags: SUBLEAF_SIGNIFICANT,
        eax,
        ebx,
        ecx: (kind << 8) | index,
        edx: u32::from(cpu),
        ..Default::default()
    }
}

/// Bits that number `cpus` APIC ids.
fn apic_id_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

fn set(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

fn clear(entry: &mut kvm_cpuid_entry2) {
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = registers;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn one(leaf: kvm_cpuid_entry2, vendor: u32, cpu: u8, cpus: u8) -> kvm_cpuid_entry2 {
        let supported = [entry(0, 0, [0x10, vendor, 0, 0]), leaf];
        let table = normalise(&supported, cpu, cpus, true);
        *table.iter().find(|e| (e.function, e.index) == (leaf.function, leaf.index)).unwrap()
    }

    const AMD: u32 = VENDOR_AMD[0];
    const INTEL: u32 = 0x756e_6547;
    const ALL: [u32; 4] = [u32::MAX; 4];

    #[test]
    fn identity_and_features_of_leaf_1() {
        let leaf = one(entry(1, 0, ALL), AMD, 3, 4);
        assert_eq!(leaf.ebx >> 24, 3);
        assert_eq!((leaf.ebx >> 16) & 0xff, 4);
        assert_eq!(leaf.ecx & leaf1::ECX_VMX, 0);
        assert_ne!(leaf.edx & leaf1::EDX_HTT, 0);
        let leaf = one(entry(1, 0, [0; 4]), INTEL, 0, 1);
        assert_ne!(leaf.ecx & leaf1::ECX_HYPERVISOR, 0);
        assert_ne!(leaf.ecx & leaf1::ECX_TSC_DEADLINE, 0);
        assert_eq!(leaf.edx & leaf1::EDX_HTT, 0);
    }

    #[test]
    fn no_nesting_no_counters_no_invariant_tsc() {
        assert_eq!(one(entry(0x8000_0001, 0, ALL), AMD, 0, 1).ecx & (1 << 2), 0);
        for leaf in [0xa, 0x8000_000a, 0x8000_0022] {
            let leaf = one(entry(leaf, 0, ALL), AMD, 0, 1);
            assert_eq!([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx], [0; 4]);
        }
        assert_eq!(one(entry(0x8000_0007, 0, ALL), AMD, 0, 1).edx & (1 << 8), 0);
        assert_eq!(one(entry(7, 0, ALL), AMD, 0, 1).edx & (1 << 29), 0);
        assert_ne!(one(entry(7, 0, ALL), INTEL, 0, 1).edx & (1 << 29), 0);
    }

    #[test]
    fn the_hosts_topology_is_replaced() {
        for (cpus, bits) in [(1, 0), (2, 1), (3, 2), (32, 5)] {
            let table = normalise(&[entry(0xb, 0, ALL), entry(0xb, 7, ALL)], cpus - 1, cpus, true);
            assert_eq!(table.len(), 3);
            assert_eq!((table[0].eax, table[0].ebx, table[0].ecx), (0, 1, 0x100));
            assert_eq!((table[1].eax, table[1].ebx), (bits, u32::from(cpus)));
            assert_eq!((table[1].ecx, table[2].ecx), (0x201, 2));
            assert!(table.iter().all(|e| e.edx == u32::from(cpus) - 1 && e.flags == 1));
        }
    }

    #[test]
    fn caches_are_shared_by_the_vm_only() {
        // Level 1 data cache and level 3 cache of a host with 64 threads.
        let (level1, level3) = (0xfc1f_c121, 0xfc1f_c163);
        assert_eq!(one(entry(4, 0, [level1, 0, 0, 0]), INTEL, 0, 4).eax, 0x0c00_0121);
        assert_eq!(one(entry(4, 3, [level3, 0, 0, 0]), INTEL, 0, 4).eax, 0x0c00_c163);
        assert_eq!(one(entry(4, 4, [0; 4]), INTEL, 0, 4).eax, 0);
        assert_eq!(one(entry(0x8000_001d, 3, [0x3fc163, 0, 0, 0]), AMD, 0, 1).eax, 0x163);
    }

    #[test]
    fn amd_topology() {
        let leaf = one(entry(0x8000_001e, 0, ALL), AMD, 5, 6);
        assert_eq!((leaf.eax, leaf.ebx, leaf.ecx), (5, 5, 0));
        assert_eq!(one(entry(0x8000_0008, 0, [0x3030, 0, 0xff, 0]), AMD, 0, 6).ecx, 0x3005);
    }
}
