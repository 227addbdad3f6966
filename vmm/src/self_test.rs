//! Whether this machine's KVM runs the kernel code of an ordinary guest.
//!
//! Some machines have a `/dev/kvm` that creates VMs and then *interprets* their kernel code, with an
//! interpreter that lacks instructions which every Linux kernel executes early. Real hardware (and
//! real nested virtualisation) executes them without asking KVM. So a guest of three instructions
//! tells the two apart in about a millisecond, instead of a boot that fails.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use kvm_ioctls::VcpuExit;
use vm_memory::{Bytes, GuestAddress};

use crate::arch::x86_64::{boot, registers};
use crate::{kvm, memory};

/// Where the code lies, and the 16 bytes that it compares and exchanges: above the boot structures.
const CODE: GuestAddress = GuestAddress(0x10_0000);
const OPERAND: GuestAddress = GuestAddress(0x10_1000);
/// The POST diagnostic port; nothing listens there.
const PORT: u16 = 0x80;
const GUEST: [u8; 12] = [
    0xf3, 0x48, 0x0f, 0xb8, 0xc3, // popcnt rax, rbx
    0xf0, 0x48, 0x0f, 0xc7, 0x0e, // lock cmpxchg16b [rsi]
    0xe6, 0x80, // out 0x80, al
];
const MEMORY_MIB: u32 = 32;
/// A KVM that does not come back at all is no good either.
const DEADLINE: Duration = Duration::from_secs(5);

/// Runs the guest on this `/dev/kvm`. Ends the process when KVM hangs.
///
/// # Errors
/// What KVM could not do, in words for a user.
pub fn run(fd: OwnedFd) -> Result<(), String> {
    std::thread::spawn(|| {
        std::thread::sleep(DEADLINE);
        eprintln!("it did not run three instructions in {} seconds", DEADLINE.as_secs());
        std::process::exit(1);
    });
    let kvm = kvm::open(fd).map_err(|e| e.to_string())?;
    try_guest(&kvm)
}

fn try_guest(kvm: &kvm_ioctls::Kvm) -> Result<(), String> {
    const RBX: u64 = 0x0123_4567_89ab_cdef;
    const RCX: u64 = 7;
    let memory = memory::map(MEMORY_MIB).map_err(|e| e.to_string())?;
    let failed = |e: vm_memory::GuestMemoryError| e.to_string();
    let ranges = [(0, u64::from(MEMORY_MIB) << 20)];
    boot::write(&memory, &ranges, &CString::default()).map_err(failed)?;
    memory.write_slice(&GUEST, CODE).map_err(failed)?;
    memory.write_obj(u64::from(RBX.count_ones()), OPERAND).map_err(failed)?;

    let vm = kvm::create_vm(kvm).map_err(|e| e.to_string())?;
    kvm::set_memory(&vm, &memory, None).map_err(|e| e.to_string())?;
    let refused = |e: kvm_ioctls::Error| format!("KVM refused a vCPU: {e}");
    let mut vcpu = vm.create_vcpu(0).map_err(refused)?;
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).map_err(refused)?;
    vcpu.set_cpuid2(&cpuid).map_err(refused)?;
    registers::set_boot(&vcpu, CODE).map_err(|e| e.to_string())?;
    let mut regs = vcpu.get_regs().map_err(refused)?;
    (regs.rbx, regs.rcx, regs.rdx, regs.rsi) = (RBX, RCX, 0, OPERAND.0);
    vcpu.set_regs(&regs).map_err(refused)?;

    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, _)) => break,
            Ok(VcpuExit::InternalError) => {
                return Err("it interprets kernel code and lacks instructions that Linux needs \
                            (KVM_EXIT_INTERNAL_ERROR)"
                    .to_owned());
            }
            Ok(other) => return Err(format!("a guest of three instructions ended in {other:?}")),
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {}
            Err(e) => return Err(format!("KVM_RUN failed: {e}")),
        }
    }
    // cmpxchg16b found what popcnt counted, and so put rcx:rbx there.
    let low: u64 = memory.read_obj(OPERAND).map_err(failed)?;
    let high: u64 = memory.read_obj(GuestAddress(OPERAND.0 + 8)).map_err(failed)?;
    if (low, high) == (RBX, RCX) {
        Ok(())
    } else {
        Err("a guest of three instructions computed something wrong".to_owned())
    }
}
