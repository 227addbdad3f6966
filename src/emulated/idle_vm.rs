//! An idle VM that lives as long as the emulated machine.
//!
//! KVM rewrites code of the running kernel (static keys) when the first VM appears and the last one
//! goes: `preempt_notifier_key` in the scheduler (`virt/kvm/kvm_main.c`), and `apic_sw_disabled`
//! (`arch/x86/kvm/lapic.c`) whenever no local APIC is off. QEMU's TCG may run a stale copy of a place
//! that is being rewritten on another processor, which ends in an unexpected breakpoint trap and a
//! panic. While one VM with one vCPU that never runs exists, neither key changes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

// linux/kvm.h: _IO(KVMIO, …) with KVMIO = 0xAE.
const KVM_CREATE_VM: libc::Ioctl = 0xAE01;
const KVM_CREATE_VCPU: libc::Ioctl = 0xAE41;
const KVM_CREATE_IRQCHIP: libc::Ioctl = 0xAE60;

/// Keeps the VM; dropping it ends it.
pub(super) struct IdleVm {
    _kvm: File,
    _vm: OwnedFd,
    _vcpu: OwnedFd,
}

impl IdleVm {
    /// Makes the VM. Its vCPU has a local APIC that is never enabled.
    pub(super) fn new() -> io::Result<Self> {
        let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
        let vm = owned(ioctl(&kvm, KVM_CREATE_VM)?);
        ioctl(&vm, KVM_CREATE_IRQCHIP)?;
        let vcpu = owned(ioctl(&vm, KVM_CREATE_VCPU)?);
        Ok(Self { _kvm: kvm, _vm: vm, _vcpu: vcpu })
    }
}

/// An ioctl of KVM whose argument is the number 0.
fn ioctl(fd: &impl AsRawFd, request: libc::Ioctl) -> io::Result<i32> {
    // SAFETY: the three requests take a number (machine type, none, vCPU id), no pointer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The descriptor that an ioctl has just made.
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: KVM has just made this descriptor (close-on-exec) for this process; nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
