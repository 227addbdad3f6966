//! The tables of three hosts, read as Linux reads them (`arch/x86/kernel/cpu/topology*.c`).

use super::*;
use crate::arch::x86_64::mptable;

type Leaf = (u32, u32, [u32; 4]);

const AMD: u32 = VENDOR_AMD[0];
const INTEL: u32 = 0x756e_6547;
const ALL: [u32; 4] = [u32::MAX; 4];
/// Sizes that fill their APIC ids and sizes that do not.
const SIZES: [u8; 8] = [1, 2, 3, 4, 8, 17, 31, 32];

/// `KVM_GET_SUPPORTED_CPUID` of a paravirtual host on an AMD EPYC 9004: one level of 0xb, topology extensions
/// with a zero for the identity. Leaves of zeros are left out here and in the next one.
const PARAVIRTUAL: &[Leaf] = &[
    (0x0, 0, [0x1c, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (0x1, 0, [0xa1_0f11, 0x102_0800, 0x8120_2000, 0x78b_fbff]),
    (0x6, 0, [0x4, 0x0, 0x0, 0x0]),
    (0x7, 0, [0x1, 0x180_0002, 0x104, 0x2000_0000]),
    (0xb, 0, [0x0, 0x0, 0x0, 0x1]),
    (0xd, 0, [0xe7, 0x980, 0x980, 0x0]),
    (0x8000_0000, 0, [0x8000_0021, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (0x8000_0001, 0, [0xa1_0f11, 0x4000_0000, 0x40_0393, 0x23d3_fbff]),
    (0x8000_0007, 0, [0x0, 0x0, 0x0, 0x100]),
    (0x8000_0008, 0, [0x3030, 0x5002_0005, 0x7001, 0x0]),
    (0x8000_001d, 0, [0x121, 0x1c0_003f, 0x3f, 0x0]),
    (0x8000_001d, 1, [0x122, 0x1c0_003f, 0x3f, 0x0]),
    (0x8000_001d, 2, [0x143, 0x1c0_003f, 0x7ff, 0x2]),
    (0x8000_001d, 3, [0x4163, 0x3c0_003f, 0x7fff, 0x1]),
    (0x8000_001e, 0, [0x0, 0x0, 0x0, 0x0]),
    (0x8000_0021, 0, [0x204, 0x0, 0x6, 0x0]),
    (0x4000_0000, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
    (0x4000_0001, 0, [0x100_7efb, 0x0, 0x0, 0x0]),
];

/// `KVM_GET_SUPPORTED_CPUID` of an AMD EPYC 7003 of QEMU with two threads in a core: no 0xb, no topology
/// extensions, SVM.
const MILAN: &[Leaf] = &[
    (0x0, 0, [0xd, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (0x1, 0, [0xa0_0f11, 0x2_0800, 0x76f8_3203, 0x78b_fbfd]),
    (0x6, 0, [0x4, 0x0, 0x0, 0x0]),
    (0x7, 0, [0x0, 0x198_01ab, 0xc, 0x2000_0000]),
    (0xd, 0, [0x207, 0xa88, 0xa88, 0x0]),
    (0x8000_0000, 0, [0x8000_0021, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (0x8000_0001, 0, [0xa0_0f11, 0x0, 0x77, 0x2dd3_fbfd]),
    (0x8000_0008, 0, [0x28_3028, 0x0, 0x1001, 0x0]),
    (0x8000_000a, 0, [0x1, 0x8, 0x0, 0x1000_0061]),
    (0x8000_001d, 0, [0x121, 0x1c0_003f, 0x3f, 0x1]),
    (0x8000_001d, 3, [0x4163, 0x3c0_003f, 0x7fff, 0x6]),
    (0x8000_001e, 0, [0x0, 0x0, 0x0, 0x0]),
    (0x4000_0000, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
];

/// An Intel Xeon with 32 cores of two threads, put together after the manual, with all that the processor
/// has and a guest must not see; KVM itself would hide some of it.
const XEON: &[Leaf] = &[
    (0x0, 0, [0x1f, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
    (0x1, 0, [0x6_06a6, 0x4b40_0800, 0x7ffe_fbff, 0xbfeb_fbff]),
    (0x2, 0, [0xfe_ff01, 0xf0, 0x0, 0x0]),
    (0x4, 0, [0x7c00_4121, 0x2c0_003f, 0x3f, 0x0]),
    (0x4, 1, [0x7c00_4122, 0x1c0_003f, 0x3f, 0x0]),
    (0x4, 2, [0x7c00_4143, 0x4c0_003f, 0x3ff, 0x0]),
    (0x4, 3, [0x7c0f_c163, 0x2c0_003f, 0xdfff, 0x4]),
    (0x4, 4, [0x0, 0x0, 0x0, 0x0]),
    (0x5, 0, [0x40, 0x40, 0x3, 0x2020]),
    (0x6, 0, [0xdf_8ff7, 0x2, 0x9, 0x0]),
    (0x7, 0, [0x2, 0xf1bf_27eb, 0x41_7f7e, 0xbc00_0410]),
    (0xa, 0, [0x830_0805, 0x0, 0xf, 0x8604]),
    (0xb, 0, [0x1, 0x2, 0x100, 0x4b]),
    (0xb, 1, [0x6, 0x40, 0x201, 0x4b]),
    (0xb, 2, [0x0, 0x0, 0x2, 0x4b]),
    (0x1f, 0, [0x1, 0x2, 0x100, 0x4b]),
    (0x1f, 1, [0x6, 0x40, 0x201, 0x4b]),
    (0x1f, 2, [0x7, 0x80, 0x502, 0x4b]),
    (0x8000_0000, 0, [0x8000_0008, 0x0, 0x0, 0x0]),
    (0x8000_0001, 0, [0x0, 0x0, 0x121, 0x2c10_0800]),
    (0x8000_0007, 0, [0x0, 0x0, 0x0, 0x100]),
    (0x8000_0008, 0, [0x3039, 0x200, 0x0, 0x0]),
    (0x4000_0000, 0, [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d]),
];

const HOSTS: [(&str, &[Leaf]); 3] =
    [("paravirtual", PARAVIRTUAL), ("Milan", MILAN), ("Xeon", XEON)];

fn entry((function, index, [eax, ebx, ecx, edx]): Leaf) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
}

/// What one vCPU sees.
struct Seen(Vec<kvm_cpuid_entry2>);

impl Seen {
    fn new(host: &[Leaf], cpu: u8, cpus: u8) -> Self {
        let supported: Vec<_> = host.iter().copied().map(entry).collect();
        Self(normalise(&supported, cpu, cpus, true))
    }

    /// A leaf as the CPUID instruction gives it: zeros for what is not there.
    fn leaf(&self, function: u32, index: u32) -> [u32; 4] {
        let found: Vec<_> =
            self.0.iter().filter(|e| (e.function, e.index) == (function, index)).collect();
        assert!(found.len() <= 1, "leaf {function:#x} is there {} times", found.len());
        found.first().map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
    }

    fn amd(&self) -> bool {
        self.leaf(0, 0)[1] == AMD
    }

    /// What `parse_topology_leaf` makes of 0xb or 0x1f.
    fn extended(&self, function: u32) -> Topology {
        let mut topology = Topology { id: self.leaf(function, 0)[3], ..Topology::default() };
        for index in 0.. {
            let [shift, count, ecx, id] = self.leaf(function, index);
            assert_eq!(ecx & 0xff, index, "the index is repeated");
            assert_eq!(id, topology.id, "all levels have the same id");
            match (ecx >> 8) & 0xff {
                0 => {
                    assert_eq!((shift, count), (0, 0));
                    return topology;
                }
                1 => (topology.thread_bits, topology.threads) = (shift, count),
                2 => (topology.bits, topology.cpus) = (shift, count),
                other => panic!("level of type {other}"),
            }
        }
        topology
    }

    /// What `parse_legacy` makes of leaves 1 and 4.
    fn intel(&self) -> Topology {
        let [_, ebx, _, edx] = self.leaf(1, 0);
        let cores = (self.leaf(4, 0)[0] >> 26) + 1;
        let logical = if edx & (1 << 28) == 0 { 1 } else { (ebx >> 16) & 0xff };
        Topology {
            id: ebx >> 24,
            thread_bits: 0,
            threads: logical / cores,
            bits: order(logical),
            cpus: cores,
        }
    }

    /// What `parse_8000_0008` and `parse_8000_001e` make of theirs.
    fn amd_legacy(&self) -> Topology {
        let [_, _, ecx, _] = self.leaf(0x8000_0008, 0);
        let (mut id, mut threads) = (self.leaf(1, 0)[1] >> 24, 1);
        if self.leaf(0x8000_0001, 0)[2] & (1 << 22) != 0 {
            let [eax, ebx, ecx, _] = self.leaf(0x8000_001e, 0);
            assert_eq!(eax, id);
            id = eax;
            threads = ((ebx >> 8) & 0xff) + 1;
            assert_eq!((ebx & 0xff, ecx), (id, 0), "each vCPU is a core of node 0");
        }
        Topology { id, thread_bits: 0, threads, bits: (ecx >> 12) & 0xf, cpus: (ecx & 0xff) + 1 }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Topology {
    /// Of the local APIC.
    id: u32,
    /// Bits of the id that number the threads of a core.
    thread_bits: u32,
    /// Threads of a core.
    threads: u32,
    /// Bits of the id below the package.
    bits: u32,
    /// Logical processors of the package.
    cpus: u32,
}

fn order(count: u32) -> u32 {
    (0..).find(|bits| 1 << bits >= count).unwrap()
}

/// Every host, size and vCPU.
fn every(check: impl Fn(&str, &Seen, u8, u8)) {
    for (name, host) in HOSTS {
        for cpus in SIZES {
            for cpu in 0..cpus {
                check(
                    &format!("{name}, vCPU {cpu} of {cpus}"),
                    &Seen::new(host, cpu, cpus),
                    cpu,
                    cpus,
                );
            }
        }
    }
}

#[test]
fn every_way_to_read_the_topology_finds_the_same() {
    every(|name, seen, cpu, cpus| {
        let expected = Topology {
            id: cpu.into(),
            thread_bits: 0,
            threads: 1,
            bits: order(cpus.into()),
            cpus: cpus.into(),
        };
        assert!(seen.leaf(0, 0)[0] >= 0xb, "{name}");
        assert_eq!(seen.extended(0xb), expected, "{name}");
        if seen.amd() {
            assert_eq!(seen.amd_legacy(), expected, "{name}");
        } else {
            assert_eq!(seen.extended(0x1f), expected, "{name}");
            assert_eq!(seen.intel(), expected, "{name}");
        }
        // One package: no id reaches the bits above.
        assert_eq!(u32::from(cpu) >> expected.bits, 0, "{name}");
    });
}

#[test]
fn leaf_1_tells_of_other_cpus_when_there_are_some() {
    every(|name, seen, cpu, cpus| {
        let [_, ebx, ecx, edx] = seen.leaf(1, 0);
        assert_eq!(ebx >> 24, u32::from(cpu), "{name}");
        assert_eq!((ebx >> 16) & 0xff, u32::from(cpus), "{name}");
        assert_eq!((ebx >> 8) & 0xff, 8, "CLFLUSH is the host's: {name}");
        assert_eq!(edx & leaf1::EDX_HTT != 0, cpus > 1, "{name}");
        assert_ne!(ecx & leaf1::ECX_HYPERVISOR, 0, "{name}");
        assert_ne!(ecx & leaf1::ECX_TSC_DEADLINE, 0, "{name}");
        let hidden = leaf1::ECX_VMX
            | leaf1::ECX_PDCM
            | leaf1::ECX_DTES64
            | leaf1::ECX_MONITOR
            | leaf1::ECX_DS_CPL;
        assert_eq!((ecx & hidden, edx & leaf1::EDX_DS), (0, 0), "{name}");
        if seen.amd() {
            let cmp_legacy = seen.leaf(0x8000_0001, 0)[2] & (1 << 1) != 0;
            assert_eq!(cmp_legacy, cpus > 1, "{name}");
        }
    });
}

#[test]
fn caches_are_shared_by_the_vm_only() {
    every(|name, seen, _, cpus| {
        let function = if seen.amd() { 0x8000_001d } else { 4 };
        for index in 0..4 {
            let [eax, ebx, ecx, _] = seen.leaf(function, index);
            if eax == 0 {
                continue;
            }
            let (level, sharing, cores) =
                ((eax >> 5) & 7, ((eax >> 14) & 0xfff) + 1, (eax >> 26) + 1);
            assert_eq!(sharing, if level == 3 { u32::from(cpus) } else { 1 }, "{name}");
            assert_eq!(cores, if seen.amd() { 1 } else { u32::from(cpus) }, "{name}");
            assert!(ebx != 0 && ecx != 0, "the size is the host's: {name}");
        }
    });
}

#[test]
fn ids_are_those_of_the_mp_table() {
    for cpus in SIZES {
        let table = mptable::build(cpus, &[4, 5]);
        // Pointer 16 bytes, header 44, then 20 for each CPU; the id is the second byte.
        let ids: Vec<u32> =
            (0..cpus).map(|cpu| table[60 + usize::from(cpu) * 20 + 1].into()).collect();
        for (_, host) in HOSTS {
            let seen = (0..cpus).map(|cpu| Seen::new(host, cpu, cpus).leaf(0xb, 0)[3]);
            assert_eq!(seen.collect::<Vec<_>>(), ids);
        }
    }
}

#[test]
fn what_a_guest_gets_no_use_of_is_hidden() {
    every(|name, seen, _, _| {
        // MONITOR, performance counters, SVM, memory encryption, more performance counters.
        for leaf in [5, 0xa, 0x8000_000a, 0x8000_001f, 0x8000_0022, 0x8000_0026] {
            assert_eq!(seen.leaf(leaf, 0), [0; 4], "{name}: {leaf:#x}");
        }
        let [eax, _, ecx, _] = seen.leaf(6, 0);
        assert_eq!((eax & 2, ecx & 8), (0, 0), "turbo and energy bias: {name}");
        let [_, _, ecx, edx] = seen.leaf(7, 0);
        assert_eq!(ecx & (1 << 5), 0, "WAITPKG: {name}");
        assert_eq!(edx & (1 << 29) != 0, !seen.amd(), "ARCH_CAPABILITIES: {name}");
        let svm_and_counters = (1 << 2) | (1 << 23) | (1 << 24) | (1 << 28);
        assert_eq!(seen.leaf(0x8000_0001, 0)[2] & svm_and_counters, 0, "{name}");
        assert_eq!(seen.leaf(0x8000_0007, 0)[3] & (1 << 8), 0, "invariant TSC: {name}");
    });
}

#[test]
fn what_is_not_of_the_topology_is_the_hosts() {
    for (name, host) in HOSTS {
        let seen = Seen::new(host, 2, 3);
        for leaf in [2, 0xd, 0x8000_0000, 0x8000_0021, 0x4000_0000, 0x4000_0001] {
            let own = host.iter().find(|(f, ..)| *f == leaf).map_or([0; 4], |(_, _, own)| *own);
            assert_eq!(seen.leaf(leaf, 0), own, "{name}: {leaf:#x}");
        }
        let address_bits = |leaf: [u32; 4]| [leaf[0], leaf[1]];
        let own = host.iter().find(|(f, ..)| *f == 0x8000_0008).unwrap().2;
        assert_eq!(address_bits(seen.leaf(0x8000_0008, 0)), address_bits(own), "{name}");
        if !seen.amd() {
            // These bits are reserved on Intel.
            assert_eq!(seen.leaf(0x8000_0008, 0)[2], 0);
        }
    }
}

#[test]
fn the_hosts_levels_are_replaced_whole() {
    // A host with more levels than the guest, and one with a single one.
    let many: Vec<Leaf> = (0..7).map(|index| (0xb, index, ALL)).collect();
    for host in [many.as_slice(), &[(0xb, 0, [0, 0, 0, 1])], &[]] {
        let table = Seen::new(host, 1, 2).0;
        assert_eq!(table.len(), 3);
        assert!(table.iter().all(|e| e.function == 0xb && e.flags == SUBLEAF_SIGNIFICANT));
    }
    let topology = Seen::new(&[(0x1f, 4, ALL)], 0, 1).extended(0x1f);
    assert_eq!(topology, Topology { threads: 1, cpus: 1, ..Topology::default() });
}

#[test]
fn topology_extensions_are_offered_with_both_their_leaves_only() {
    let extensions = |change: &dyn Fn(&mut Vec<Leaf>)| {
        let mut host = PARAVIRTUAL.to_vec();
        change(&mut host);
        Seen::new(&host, 1, 2).leaf(0x8000_0001, 0)[2] & (1 << 22) != 0
    };
    assert!(extensions(&|_| ()));
    assert!(!extensions(&|host| host.retain(|(function, ..)| *function != 0x8000_001d)));
    assert!(!extensions(&|host| host.retain(|(function, ..)| *function != 0x8000_001e)));
    let short = |host: &mut Vec<Leaf>| {
        let last = host.iter_mut().find(|(function, ..)| *function == 0x8000_0000).unwrap();
        last.2[0] = 0x8000_001d;
    };
    assert!(!extensions(&short));
}

#[test]
fn the_deadline_timer_is_what_kvm_says() {
    for (_, host) in HOSTS {
        let supported: Vec<_> = host.iter().copied().map(entry).collect();
        for offered in [false, true] {
            let seen = Seen(normalise(&supported, 0, 1, offered));
            assert_eq!(seen.leaf(1, 0)[2] & leaf1::ECX_TSC_DEADLINE != 0, offered);
        }
    }
}

#[test]
fn every_bit_that_is_masked_is_masked_on_both_vendors() {
    // A host that claims everything.
    for vendor in [AMD, INTEL] {
        let mut host: Vec<Leaf> = [1, 4, 5, 6, 7, 0xa]
            .into_iter()
            .chain(0x8000_0001..=0x8000_0026)
            .map(|function| (function, 0, ALL))
            .collect();
        host.push((0, 0, [0x20, vendor, 0, 0]));
        host.push((0x8000_0000, 0, [0x8000_0026, 0, 0, 0]));
        let seen = Seen::new(&host, 0, 1);
        assert_eq!(seen.leaf(1, 0)[2] & leaf1::ECX_VMX, 0);
        assert_eq!(seen.leaf(1, 0)[3] & leaf1::EDX_HTT, 0);
        assert_eq!(seen.leaf(0x8000_0001, 0)[2] & (1 << 2), 0);
        assert_eq!(seen.leaf(0x8000_000a, 0), [0; 4]);
        assert_eq!(seen.leaf(0x8000_0000, 0)[0], 0x8000_0026);
    }
}
