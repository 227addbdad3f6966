//! What a VM is made of: descriptors and numbers, from a program or from the control socket.

use std::fs::File;
use std::os::fd::OwnedFd;

use casulo_protocol::vmm::VmConfig;

use crate::arch::x86_64::mptable;
use crate::builder::{self, BuildError};
use crate::devices::virtio::fs::Share;
use crate::jail::Confine;
use crate::vm::Vm;

/// Least that Linux boots in; see [`MachineConfig::memory_mib`].
const DEFAULT_MEMORY_MIB: u32 = 128;

/// A microVM to build. [`Self::new`] fills in defaults; every field may be changed.
#[derive(Debug)]
pub struct MachineConfig {
    /// Number of vCPUs, 1 to 32.
    pub cpus: u8,
    /// Guest memory in MiB, at least 32.
    pub memory_mib: u32,
    /// `/dev/kvm`, opened read-write.
    pub kvm: OwnedFd,
    /// An uncompressed ELF `vmlinux`.
    pub kernel: File,
    /// `/proc`, opened `O_PATH`: the file server reopens its own descriptors through it. Needed when
    /// there are shares.
    pub proc_root: Option<OwnedFd>,
    /// Kernel command line without the devices, which are appended before any `--`.
    pub cmdline: String,
    /// Arguments of process 1.
    pub init_args: Vec<String>,
    /// Disks in the order in which the guest sees them: `vda`, `vdb`, …
    pub disks: Vec<Disk>,
    /// Shares, the children of the root of the one virtio-fs device. Empty: no such device.
    pub shares: Vec<Share>,
    /// Ports of the host that the guest may dial.
    pub listen: Vec<u32>,
    /// How much of this process is jailed.
    pub confine: Confine,
}

/// One virtio-blk disk.
#[derive(Debug)]
pub struct Disk {
    /// A regular file; its size, rounded down to 512 bytes, is the capacity.
    pub file: File,
    /// Whether the device refuses writes.
    pub read_only: bool,
}

impl MachineConfig {
    /// A VM with one vCPU, 128 MiB, a serial console, and neither disks nor shares; its threads are jailed.
    #[must_use]
    pub fn new(kvm: impl Into<OwnedFd>, kernel: File) -> Self {
        Self {
            cpus: 1,
            memory_mib: DEFAULT_MEMORY_MIB,
            kvm: kvm.into(),
            kernel,
            proc_root: None,
            // Resets at once when it panics, so that the VM ends.
            cmdline: "console=ttyS0 reboot=k panic=-1".to_owned(),
            init_args: Vec::new(),
            disks: Vec::new(),
            shares: Vec::new(),
            listen: Vec::new(),
            confine: Confine::default(),
        }
    }

    /// Puts the descriptors that came beside a request into their places; each is used once. The whole
    /// process is to be jailed.
    ///
    /// # Errors
    /// A descriptor is missing or used twice, or a number is out of range.
    pub fn from_request(config: VmConfig, descriptors: Vec<OwnedFd>) -> Result<Self, BuildError> {
        let mut descriptors: Vec<Option<OwnedFd>> = descriptors.into_iter().map(Some).collect();
        let mut take = |index: usize, what: &str| {
            descriptors.get_mut(index).and_then(Option::take).ok_or_else(|| {
                BuildError::Config(format!("descriptor {index} ({what}) is missing or used twice"))
            })
        };
        let kvm = take(config.kvm_fd, "kvm")?;
        let kernel = take(config.kernel_fd, "kernel")?.into();
        let proc_root = Some(take(config.proc_fd, "proc")?);
        let mut disks = Vec::with_capacity(config.disks.len());
        for disk in &config.disks {
            disks.push(Disk { file: take(disk.fd, "disk")?.into(), read_only: disk.read_only });
        }
        let mut shares = Vec::with_capacity(config.shares.len());
        for share in config.shares {
            shares.push(Share {
                root: take(share.fd, "share")?,
                name: share.name,
                read_only: share.read_only,
                limit_bytes: share.limit_bytes,
                limit_files: share.limit_files,
                xattr: share.xattr,
                cache: share.cache,
                guest_uid: share.guest_uid,
                guest_gid: share.guest_gid,
            });
        }
        let config = Self {
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
            confine: Confine::Process,
        };
        config.check()?;
        Ok(config)
    }

    /// Checks what no later step would.
    pub(crate) fn check(&self) -> Result<(), BuildError> {
        if !(1..=mptable::MAX_CPUS).contains(&self.cpus) {
            let (cpus, most) = (self.cpus, mptable::MAX_CPUS);
            return Err(BuildError::Config(format!("{cpus} vCPUs; it must be 1 to {most}")));
        }
        Ok(())
    }

    /// Builds the VM; it runs from [`Vm::start`] on. The first real-time signal of the process is taken to
    /// interrupt vCPUs.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(self) -> Result<Vm, BuildError> {
        builder::build(self)
    }
}
