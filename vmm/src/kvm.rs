//! KVM: what it must be able to do, and a VM of it.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use kvm_bindings::{
    KVM_CAP_X86_USER_SPACE_MSR, KVM_MEM_READONLY, KVM_MSR_EXIT_REASON_UNKNOWN, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MmapRegion};

use crate::devices::virtio::GuestMemory;
use crate::layout::{KVM_IDENTITY_MAP, KVM_TSS, VIRTIO_START};

const API_VERSION: i32 = 12;

/// What this VMM cannot do without.
const CAPABILITIES: [(Cap, &str); 9] = [
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"),
];

/// Why there is no VM.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// The descriptor is not `/dev/kvm`, or of another version.
    #[error("the descriptor given for /dev/kvm does not speak KVM's API version 12")]
    NotKvm,
    /// A capability is missing.
    #[error("this host's KVM lacks {0}; a newer kernel may have it")]
    Missing(&'static str),
    /// A call failed.
    #[error("KVM refused to {what}: {error}")]
    Call {
        /// Which.
        what: &'static str,
        /// Why.
        error: kvm_ioctls::Error,
    },
}

/// Turns an errno into [`KvmError::Call`].
pub(crate) fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> KvmError {
    move |error| KvmError::Call { what, error }
}

/// Takes over `/dev/kvm` after checking that it can do what is needed.
pub fn open(fd: OwnedFd) -> Result<Kvm, KvmError> {
    // SAFETY: the descriptor is owned and given up here; that it is KVM's is checked next, and every
    // other descriptor only refuses the ioctl.
    let kvm = unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) };
    if kvm.get_api_version() != API_VERSION {
        return Err(KvmError::NotKvm);
    }
    for (capability, name) in CAPABILITIES {
        if !kvm.check_extension(capability) {
            return Err(KvmError::Missing(name));
        }
    }
    Ok(kvm)
}

/// Makes a VM with its interrupt controllers. There is no PIT: the guest has the TSC deadline timer and
/// kvm-clock, and a PIT costs the host a kernel thread per VM.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, KvmError> {
    let vm = loop {
        match kvm.create_vm() {
            // Creating a VM can be interrupted (Firecracker issue 5046).
            Err(error) if error.errno() == libc::EINTR => {}
            other => break other.map_err(refused("create a VM"))?,
        }
    };
    vm.set_identity_map_address(KVM_IDENTITY_MAP).map_err(refused("place its identity map"))?;
    let tss = usize::try_from(KVM_TSS).map_err(|_| KvmError::NotKvm)?;
    vm.set_tss_address(tss).map_err(refused("place its task state segment"))?;
    vm.create_irq_chip().map_err(refused("create interrupt controllers"))?;
    report_unknown_msrs(kvm, &vm)?;
    Ok(vm)
}

/// Lets accesses to model specific registers that KVM does not know come out, so that they can be told.
/// KVM itself would raise a #GP and be silent; what it knows it goes on serving alone. A KVM that cannot
/// (before Linux 5.10) stays silent.
fn report_unknown_msrs(kvm: &Kvm, vm: &VmFd) -> Result<(), KvmError> {
    if !kvm.check_extension(Cap::X86UserSpaceMsr) {
        return Ok(());
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    cap.args[0] = KVM_MSR_EXIT_REASON_UNKNOWN.into();
    vm.enable_cap(&cap).map_err(refused("report unknown model specific registers"))
}

/// Gives the VM its RAM, and the register pages of its devices, which it may only read.
pub fn set_memory(
    vm: &VmFd,
    memory: &GuestMemory,
    registers: Option<&MmapRegion<()>>,
) -> Result<(), KvmError> {
    let mut slot = 0;
    let mut add = |guest: u64, size: u64, host: *mut u8, flags: u32| {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: guest,
            memory_size: size,
            userspace_addr: host.addr() as u64,
        };
        slot += 1;
        // SAFETY: the mapping is at least `size` long and lives as long as the VM: guest memory is never
        // unmapped, register pages are held by the devices.
        unsafe { vm.set_user_memory_region(region) }.map_err(refused("map guest memory"))
    };
    for region in memory.iter() {
        add(region.start_addr().0, region.len(), region.as_ptr(), 0)?;
    }
    if let Some(pages) = registers {
        add(VIRTIO_START, pages.size() as u64, pages.as_ptr(), KVM_MEM_READONLY)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_descriptor_is_not_kvm() {
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(open(file.into()), Err(KvmError::NotKvm)));
    }
}
