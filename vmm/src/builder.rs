//! Puts a machine together: from descriptors and numbers to vCPUs that wait for the word.

use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};

use casulo_protocol::agent::FS_TAG;
use casulo_protocol::vmm::GUEST_CID;
use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::{boot, cpuid, kernel, mptable, registers};
use crate::config::MachineConfig;
use crate::devices::Attached;
use crate::devices::bus::Bus;
use crate::devices::serial::{Console, SerialPort};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::BlockDevice;
use crate::devices::virtio::fs::{FsDevice, FsError};
use crate::devices::virtio::rng::RngDevice;
use crate::devices::virtio::vsock::VsockDevice;
use crate::devices::virtio::worker::serve;
use crate::irq::Lines;
use crate::jail::JailError;
use crate::jail::seccomp::Kind;
use crate::kvm::{self, KvmError, refused};
use crate::memory::{self, MemoryError};
use crate::threads::{self, Threads};
use crate::vcpu::{Shared, Vcpu, VcpuHandle, prepare_kicks};
use crate::vm::Vm;

/// Why the VM could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The configuration is no VM.
    #[error("bad configuration: {0}")]
    Config(String),
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel file.
    #[error(transparent)]
    Kernel(#[from] kernel::KernelError),
    /// The command line.
    #[error(transparent)]
    Cmdline(#[from] boot::CmdlineError),
    /// Boot structures.
    #[error("the boot structures do not fit into guest memory: {0}")]
    Boot(#[from] vm_memory::GuestMemoryError),
    /// A device.
    #[error("a device could not be made: {0}")]
    Device(#[source] io::Error),
    /// The shares.
    #[error(transparent)]
    Shares(#[from] FsError),
    /// Registers of a vCPU.
    #[error(transparent)]
    Registers(#[from] registers::RegisterError),
    /// A thread.
    #[error("a thread could not be started: {0}")]
    Thread(#[source] io::Error),
    /// The jail.
    #[error(transparent)]
    Jail(#[from] JailError),
}

impl BuildError {
    /// Name of the step that failed, for the parent.
    #[must_use]
    pub fn phase(&self) -> &'static str {
        match self {
            Self::Config(_) => "config",
            Self::Kvm(_) => "kvm",
            Self::Memory(_) => "memory",
            Self::Kernel(_) => "kernel",
            Self::Cmdline(_) => "cmdline",
            Self::Boot(_) => "boot",
            Self::Device(_) => "device",
            Self::Shares(_) => "shares",
            Self::Registers(_) => "vcpu",
            Self::Thread(_) => "thread",
            Self::Jail(_) => "jail",
        }
    }
}

/// Builds the machine; its threads are in their jails when this returns.
///
/// # Errors
/// See [`BuildError`].
pub fn build(config: MachineConfig) -> Result<Vm, BuildError> {
    config.check()?;
    let kvm = kvm::open(config.kvm)?;
    let vm = kvm::create_vm(&kvm)?;
    let ram = memory::ranges(config.memory_mib)?;
    let memory = memory::map(config.memory_mib)?;
    let low_memory = ram.first().map_or(0, |(_, size)| *size);

    let mut lines = Lines::default();
    let console = Console::default();
    let line = Arc::new(event()?);
    vm.register_irqfd(&line, lines.serial().into()).map_err(refused("connect an interrupt"))?;
    let serial = SerialPort::new(line, console.clone());

    let mut devices: Vec<(Box<dyn VirtioDevice>, Kind)> = Vec::new();
    for (number, disk) in config.disks.into_iter().enumerate() {
        let id = format!("casulo-{number}");
        let disk = BlockDevice::new(disk.file, disk.read_only, &id).map_err(BuildError::Device)?;
        devices.push((Box::new(disk.log_to(console.clone())), Kind::Disks));
    }
    devices.push((Box::new(RngDevice::new()), Kind::Disks));
    let (sockets, vsock, vsock_events) =
        VsockDevice::new(GUEST_CID, &config.listen).map_err(BuildError::Device)?;
    devices.push((Box::new(sockets), Kind::Vsock));
    let roots = threads::roots(&config.shares)?;
    let (mut limit_hit, mut files) = (Arc::default(), Arc::default());
    if !config.shares.is_empty() {
        let proc_root = config.proc_root.ok_or_else(|| {
            BuildError::Config("shares need a descriptor of /proc (proc_root)".to_owned())
        })?;
        let shares = FsDevice::new(FS_TAG, config.shares, proc_root)?;
        (limit_hit, files) = (shares.limit_hit(), shares.record());
        devices.push((Box::new(shares), Kind::Fs));
    }
    devices.push((Box::new(BalloonDevice::new()), Kind::Disks));
    let attached = Attached::new(&vm, devices, &memory, &console, &mut lines)?;
    kvm::set_memory(&vm, &memory, Some(&attached.pages))?;

    let entry = kernel::load(&config.kernel, &memory, low_memory)?;
    let cmdline = boot::cmdline(&config.cmdline, &attached.places, &config.init_args)?;
    boot::write(&memory, &ram, &cmdline)?;
    mptable::write(&memory, config.cpus, &lines.in_use())?;

    let vcpus = create_vcpus(&kvm, &vm, config.cpus, entry)?;
    let bus = Arc::new(Bus::new(serial, attached.transports));

    let mut threads = Threads::new(config.confine, roots)?;
    for (kind, workers) in attached.threads {
        // They end only with the process; an error of an event loop ends both.
        threads.spawn(format!("{kind:?}").to_lowercase(), kind, move || {
            if let Err(error) = serve(workers) {
                threads::abort(&error);
            }
        })?;
    }
    let (send, ended) = channel();
    let (tell, states) = channel();
    let ended_event = Arc::new(event()?);
    let start = Arc::new(Barrier::new(usize::from(config.cpus) + 1));
    prepare_kicks().map_err(BuildError::Thread)?;
    let mut handles = Vec::new();
    for (number, fd) in (0..config.cpus).zip(vcpus) {
        let shared = Arc::new(Shared::default());
        let (bus, states) = (bus.clone(), tell.clone());
        let vcpu = Vcpu { number, fd, bus, shared: shared.clone(), states };
        let (send, event, start) = (send.clone(), ended_event.clone(), start.clone());
        let thread = threads.spawn(format!("vcpu{number}"), Kind::Vcpu, move || {
            start.wait();
            let end = vcpu.run();
            // Whoever waits may be gone; then there is nobody to tell.
            let _ = send.send(end);
            let _ = event.write(1);
        })?;
        handles.push(VcpuHandle { shared, thread });
    }
    threads.finish()?;
    Ok(Vm {
        console,
        limit_hit,
        files,
        vsock,
        vsock_events,
        ended_event,
        bus,
        vcpus: handles,
        states,
        ended,
        start,
        _vm: vm,
    })
}

fn event() -> Result<EventFd, BuildError> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(BuildError::Device)
}

fn create_vcpus(
    kvm: &Kvm,
    vm: &VmFd,
    cpus: u8,
    entry: GuestAddress,
) -> Result<Vec<VcpuFd>, BuildError> {
    let supported = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(refused("tell the CPUID it supports"))?;
    let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    let mut vcpus = Vec::with_capacity(usize::from(cpus));
    for cpu in 0..cpus {
        let fd = vm.create_vcpu(cpu.into()).map_err(refused("create a vCPU"))?;
        let table = cpuid::normalise(supported.as_slice(), cpu, cpus, tsc_deadline);
        let table = CpuId::from_entries(&table)
            .map_err(|_| BuildError::Config("too many CPUID leaves".into()))?;
        fd.set_cpuid2(&table).map_err(refused("take the CPUID of a vCPU"))?;
        registers::set_msrs(&fd)?;
        if cpu == 0 {
            registers::set_boot(&fd, entry)?;
        }
        vcpus.push(fd);
    }
    Ok(vcpus)
}
