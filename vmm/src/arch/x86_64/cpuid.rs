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

/// The CPUID table of vCPU number `cpu` out of `cpus`, made from what KVM supports
/// (`KVM_GET_SUPPORTED_CPUID`).
///
/// The host's topology is replaced, for Intel in the leaves 1, 4, 0xb and 0x1f (Intel SDM, volume 2A, CPUID),
/// for AMD in 1, 0xb, 0x8000_0001, 0x8000_0008, 0x8000_001d and 0x8000_001e (AMD APM, volume 3, appendix E).
/// 0xb is made new in any case: there are hosts whose list has only its first level.
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
    if amd {
        extended_topology(&mut table);
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
        // MONITOR and the performance counters of Intel; SVM, memory encryption and the counters of AMD:
        // not offered. The other leaf is AMD's newest form of the host's topology.
        5 | 0xa | 0x8000_000a | 0x8000_001f | 0x8000_0022 | 0x8000_0026 => clear(entry),
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

/// The topology extensions of AMD are two leaves. A host that lacks one, or that ends its list before them,
/// must not name the feature: a kernel that trusts it would read zeros, the identity of the first vCPU.
fn extended_topology(table: &mut [kvm_cpuid_entry2]) {
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    let has = |function| table.iter().any(|entry| entry.function == function);
    let last =
        table.iter().find(|entry| entry.function == 0x8000_0000).map_or(0, |entry| entry.eax);
    let complete = has(0x8000_001d) && has(0x8000_001e) && last >= 0x8000_001e;
    if let Some(features) = table.iter_mut().find(|entry| entry.function == 0x8000_0001)
        && !complete
    {
        features.ecx &= !TOPOLOGY_EXTENSIONS;
    }
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
#[path = "cpuid_tests.rs"]
mod tests;
