//! Puts a machine together: from descriptors and numbers to vCPUs that wait for the word.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread;

use casulo_protocol::agent::FS_TAG;
use casulo_protocol::vmm::{ExitReason, GUEST_CID, ShareConfig, VmConfig};
use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use seccompiler::BpfProgram;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::{boot, cpuid, kernel, mptable, registers};
use crate::devices::Attached;
use crate::devices::bus::Ports;
use crate::devices::serial::{self, Console, SerialPort};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::block::BlockDevice;
use crate::devices::virtio::fs::{FsDevice, FsError, Share};
use crate::devices::virtio::rng::RngDevice;
use crate::devices::virtio::vsock::{VsockDevice, VsockEvents, VsockHandle};
use crate::devices::virtio::worker::serve;
use crate::jail::seccomp::Kind;
use crate::jail::{self, JailError};
use crate::kvm::{self, KvmError, refused};
use crate::memory::{self, MemoryError};
use crate::vcpu::{ExitCounters, Machine, Vcpu};

/// Room for what a device or a vCPU puts on its stack; only touched pages cost memory.
const STACK_SIZE: usize = 256 * 1024;

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

/// What a VM is made of, with the descriptors in their places.
pub struct Parts {
    /// Number of vCPUs.
    pub cpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// `/dev/kvm`.
    pub kvm: OwnedFd,
    /// The kernel.
    pub kernel: File,
    /// `/proc`.
    pub proc_root: OwnedFd,
    /// Command line without devices.
    pub cmdline: String,
    /// Arguments of process 1.
    pub init_args: Vec<String>,
    /// Disks, and whether each is read-only.
    pub disks: Vec<(File, bool)>,
    /// Shares.
    pub shares: Vec<(OwnedFd, ShareConfig)>,
    /// Ports that the guest may dial.
    pub listen: Vec<u32>,
}

impl Parts {
    /// Puts each descriptor in its place; each is used once.
    pub fn new(config: VmConfig, descriptors: Vec<OwnedFd>) -> Result<Self, BuildError> {
        if !(1..=mptable::MAX_CPUS).contains(&config.cpus) {
            let cpus = config.cpus;
            return Err(BuildError::Config(format!("{cpus} vCPUs; it must be 1 to 32")));
        }
        let mut descriptors: Vec<Option<OwnedFd>> = descriptors.into_iter().map(Some).collect();
        let mut take = |index: usize, what: &str| {
            descriptors.get_mut(index).and_then(Option::take).ok_or_else(|| {
                BuildError::Config(format!("descriptor {index} ({what}) is missing or used twice"))
            })
        };
        let kvm = take(config.kvm_fd, "kvm")?;
        let kernel = take(config.kernel_fd, "kernel")?.into();
        let proc_root = take(config.proc_fd, "proc")?;
        let mut disks = Vec::with_capacity(config.disks.len());
        for disk in &config.disks {
            disks.push((take(disk.fd, "disk")?.into(), disk.read_only));
        }
        let mut shares = Vec::with_capacity(config.shares.len());
        for share in config.shares {
            shares.push((take(share.fd, "share")?, share));
        }
        Ok(Self {
            cpus: config.cpus,
            memory_mib: config.memory_mib,
            kvm,
            kernel,
            proc_root,
            cmdline: config.cmdline,
            init_args: config.init_args,
            disks,
            shares,
            listen: config.listen,
        })
    }
}

/// A VM whose threads wait for [`Vm::start`].
pub struct Vm {
    /// The guest's console.
    pub console: Console,
    /// Exits of each vCPU.
    pub counters: Vec<Arc<ExitCounters>>,
    /// Whether the guest met the limit of a share, or a full disk of the host.
    pub limit_hit: Arc<AtomicBool>,
    /// Opens and allows connections.
    pub vsock: VsockHandle,
    /// Connections that were made.
    pub vsock_events: VsockEvents,
    /// Readable when there is something in `ended`.
    pub ended_event: Arc<EventFd>,
    /// Why the guest ended.
    pub ended: Receiver<ExitReason>,
    start: Arc<Barrier>,
    /// Keeps the VM; nothing is asked of it any more.
    _vm: VmFd,
}

impl Vm {
    /// Lets the vCPUs run.
    pub fn start(&self) {
        self.start.wait();
    }
}

/// Builds the machine and closes the jail around this thread and all others of it.
pub fn build(parts: Parts) -> Result<Vm, BuildError> {
    let kvm = kvm::open(parts.kvm)?;
    let vm = kvm::create_vm(&kvm)?;
    let ram = memory::ranges(parts.memory_mib)?;
    let memory = memory::map(parts.memory_mib)?;
    let low_memory = ram.first().map_or(0, |(_, size)| *size);

    let console = Console::default();
    let line = Arc::new(event()?);
    vm.register_irqfd(&line, serial::IRQ).map_err(refused("connect an interrupt"))?;
    let serial = SerialPort::new(line, console.clone());

    let mut devices: Vec<(Box<dyn VirtioDevice>, Kind)> = Vec::new();
    for (number, (file, read_only)) in parts.disks.into_iter().enumerate() {
        let id = format!("casulo-{number}");
        let disk = BlockDevice::new(file, read_only, &id).map_err(BuildError::Device)?;
        devices.push((Box::new(disk), Kind::Disks));
    }
    devices.push((Box::new(RngDevice::new()), Kind::Disks));
    let (sockets, vsock, vsock_events) =
        VsockDevice::new(GUEST_CID, &parts.listen).map_err(BuildError::Device)?;
    devices.push((Box::new(sockets), Kind::Vsock));
    let mut limit_hit = Arc::default();
    if !parts.shares.is_empty() {
        let shares = file_system(&parts.shares, parts.proc_root)?;
        limit_hit = shares.limit_hit();
        devices.push((Box::new(shares), Kind::Fs));
    }
    let attached = Attached::new(&vm, devices, &memory, &console)?;
    kvm::set_memory(&vm, &memory, Some(&attached.pages))?;

    let entry = kernel::load(&parts.kernel, &memory, low_memory)?;
    let cmdline = boot::cmdline(&parts.cmdline, &attached.places, &parts.init_args)?;
    boot::write(&memory, &ram, &cmdline)?;
    let lines = attached.places.iter().map(|place| place.irq).chain([serial::IRQ]);
    let lines: Vec<u8> = lines.filter_map(|line| u8::try_from(line).ok()).collect();
    mptable::write(&memory, parts.cpus, &lines)?;

    let vcpus = create_vcpus(&kvm, &vm, parts.cpus, entry)?;
    let machine = Arc::new(Machine { ports: Ports::new(serial), virtio: attached.transports });

    jail::landlock::restrict(&share_roots(&parts.shares))?;
    drop(parts.shares);
    let mut threads = Threads::new()?;
    for (kind, workers) in attached.threads {
        // They end only with the process; an error of an event loop ends both.
        threads.spawn(format!("{kind:?}").to_lowercase(), kind, move || {
            if let Err(error) = serve(workers) {
                abort(&error);
            }
        })?;
    }
    let (send, ended) = channel();
    let ended_event = Arc::new(event()?);
    let start = Arc::new(Barrier::new(usize::from(parts.cpus) + 1));
    let mut counters = Vec::new();
    for (number, fd) in vcpus.into_iter().enumerate() {
        let own = Arc::new(ExitCounters::default());
        counters.push(own.clone());
        let vcpu = Vcpu { fd, machine: machine.clone(), counters: own };
        let (send, event, start) = (send.clone(), ended_event.clone(), start.clone());
        threads.spawn(format!("vcpu{number}"), Kind::Vcpu, move || {
            run_vcpu(vcpu, &start, &send, &event);
        })?;
    }
    threads.finish()?;
    Ok(Vm { console, counters, limit_hit, vsock, vsock_events, ended_event, ended, start, _vm: vm })
}

/// The device that serves the shares.
fn file_system(
    shares: &[(OwnedFd, ShareConfig)],
    proc_root: OwnedFd,
) -> Result<FsDevice, BuildError> {
    let mut table = Vec::with_capacity(shares.len());
    for (root, config) in shares {
        table.push(Share {
            name: config.name.clone(),
            root: root.try_clone().map_err(BuildError::Device)?,
            read_only: config.read_only,
            limit_bytes: config.limit_bytes,
            cache: config.cache,
            guest_uid: config.guest_uid,
            guest_gid: config.guest_gid,
        });
    }
    Ok(FsDevice::new(FS_TAG, table, proc_root)?)
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

fn run_vcpu(vcpu: Vcpu, start: &Barrier, ended: &Sender<ExitReason>, event: &EventFd) {
    start.wait();
    let reason = vcpu.run();
    // The control thread ends the process; if it is gone already, there is nobody to tell.
    let _ = ended.send(reason);
    let _ = event.write(1);
}

/// Ends the process with a word on standard error.
fn abort(error: &dyn std::fmt::Display) -> ! {
    eprintln!("casulo-vmm: a device thread ended: {error}");
    std::process::abort();
}

/// Threads that are started, and the filters that each installs first.
struct Threads {
    filters: Vec<(Kind, Arc<BpfProgram>)>,
    ready: Sender<Result<(), JailError>>,
    reports: Receiver<Result<(), JailError>>,
    count: usize,
}

impl Threads {
    fn new() -> Result<Self, BuildError> {
        let (ready, reports) = channel();
        Ok(Self { filters: Vec::new(), ready, reports, count: 0 })
    }

    fn filter(&mut self, kind: Kind) -> Arc<BpfProgram> {
        if let Some((_, filter)) = self.filters.iter().find(|(known, _)| *known == kind) {
            return filter.clone();
        }
        let filter = Arc::new(jail::seccomp::filter(kind));
        self.filters.push((kind, filter.clone()));
        filter
    }

    /// Starts a thread that installs its filter, reports, and runs `body`.
    fn spawn(
        &mut self,
        name: String,
        kind: Kind,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), BuildError> {
        let filter = self.filter(kind);
        let ready = self.ready.clone();
        let thread = move || {
            let result = jail::seccomp::install(&filter);
            let failed = result.is_err();
            drop(filter);
            // The builder waits for every report.
            let _ = ready.send(result);
            drop(ready);
            if !failed {
                body();
            }
        };
        thread::Builder::new()
            .name(name)
            .stack_size(STACK_SIZE)
            .spawn(thread)
            .map_err(BuildError::Thread)?;
        self.count += 1;
        Ok(())
    }

    /// Waits until every thread is in its jail, and enters that of this thread.
    fn finish(mut self) -> Result<(), BuildError> {
        for _ in 0..self.count {
            let gone = |_| BuildError::Thread(io::ErrorKind::BrokenPipe.into());
            self.reports.recv().map_err(gone)??;
        }
        let filter = self.filter(Kind::Control);
        Ok(jail::seccomp::install(&filter)?)
    }
}

/// The share roots as Landlock wants them.
#[must_use]
pub fn share_roots<'a>(shares: &'a [(OwnedFd, ShareConfig)]) -> Vec<jail::landlock::Root<'a>> {
    shares
        .iter()
        .map(|(fd, config)| jail::landlock::Root {
            fd: fd.as_fd(),
            read_only: config.read_only,
            file: rustix::fs::fstat(fd).is_ok_and(|stat| {
                rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Directory
            }),
        })
        .collect()
}
