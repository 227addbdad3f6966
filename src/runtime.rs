//! From a request to a sandbox that is ready.
//!
//! Everything the VM needs is opened and checked before its process exists; then the VMM is spawned,
//! gets the descriptors, and boots (see [`crate::boot`]).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use casulo_protocol::agent::{BOOT_PORT, Personalise, VERSION};
use casulo_protocol::event::Phase;
use casulo_protocol::image::Manifest;
use casulo_protocol::spec::SandboxSpec;
use casulo_protocol::vmm::{self, DiskConfig, ShareConfig, VmConfig};
use rustix::fs::{Mode, OFlags};

use crate::boot::Boot;
use crate::error::Error;
use crate::events::Log;
use crate::image::{Candidate, Store, check_kernel, hex};
use crate::kvm;
use crate::output::{self, Outputs};
use crate::sandbox::{Parts, Sandbox};
use crate::shares::{self, Share};
use crate::vm::capacity;
use crate::vm::control::Control;
use crate::vm::scratch;
use crate::vm::spawn::Process;

/// Kernel command line of every guest; the VMM adds the devices. `noreplace-smp`: with one CPU Linux
/// patches 6,000 lock prefixes out of its code, which takes longer than they ever would.
const CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 random.trust_cpu=on tsc=reliable \
    no_timer_check noreplace-smp 8250.nr_uarts=1 root=/dev/vda rootfstype=erofs ro init=/init";
/// Default deadlines of the boot in seconds.
const BOOT_SECONDS: u32 = 10;
const BOOT_SECONDS_EMULATED: u32 = 120;
/// User and group that own the shares in the guest.
const GUEST_ID: u32 = 1000;
/// Bytes of entropy for each guest.
const ENTROPY: usize = 64;

/// Where everything is. Nothing else of the host's configuration is read.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// The program `casulo-vmm`.
    pub vmm: PathBuf,
    /// The guest kernel `vmlinux`, with `kernel.json` beside it.
    pub kernel: PathBuf,
    /// The agent's boot volume `boot.erofs`, with `agent.json` beside it.
    pub agent: PathBuf,
    /// Folder of the images.
    pub images: PathBuf,
    /// Folder for what may be remembered between runs.
    pub state: PathBuf,
    /// Folders for scratch disks and for what gateways keep; the first that can hold them is used.
    pub scratch: Vec<PathBuf>,
    /// Whether this runs in an emulated host, where everything takes ten times as long.
    pub emulated: bool,
    /// Most seconds until a guest is ready, where the request says nothing; `None`: 10, emulated 120.
    pub boot_timeout_seconds: Option<u32>,
}

impl RuntimeConfig {
    /// The usual layout: everything in one folder, and the program `vmm`.
    pub fn in_home(home: &Path, vmm: PathBuf) -> Self {
        Self {
            vmm,
            kernel: home.join("kernel/vmlinux"),
            agent: home.join("agent/boot.erofs"),
            images: home.join("images"),
            state: home.join("state"),
            // On a disk rather than in memory where there is a choice; some file systems cannot
            // hold files without a name, so the memory is the last resort.
            scratch: ["/var/tmp", "/tmp", "/run", "/dev/shm"].map(PathBuf::from).to_vec(),
            emulated: false,
            boot_timeout_seconds: None,
        }
    }
}

/// Makes sandboxes. Runs inside the caller's tokio runtime; needs its time and I/O drivers.
#[derive(Clone, Debug)]
pub struct Runtime {
    config: RuntimeConfig,
    store: Store,
}

/// What a sandbox is made of, opened and checked.
struct Prepared {
    kvm: OwnedFd,
    proc: OwnedFd,
    kernel: OwnedFd,
    /// Boot volume, layers, and the scratch disk if any.
    disks: Vec<(OwnedFd, bool)>,
    layers: usize,
    scratch: bool,
    shares: Vec<Share>,
    manifest: Manifest,
}

impl Runtime {
    /// A runtime over the given files. They are opened for each sandbox, so that an image or kernel
    /// may be replaced in between.
    ///
    /// # Errors
    /// The VMM program does not exist.
    pub fn open(mut config: RuntimeConfig) -> Result<Self, Error> {
        // The VMM starts in another folder.
        if let Ok(path) = std::path::absolute(&config.vmm) {
            config.vmm = path;
        }
        if !config.vmm.is_file() {
            let source = std::io::Error::from(std::io::ErrorKind::NotFound);
            return Err(Error::Spawn { path: config.vmm, source });
        }
        let store = Store::new(&config.images, &config.state);
        Ok(Self { config, store })
    }

    /// The images.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The configuration.
    pub fn config(&self) -> &RuntimeConfig {
        &self.config
    }

    /// Boots a microVM and waits until it is ready. Dropping the future ends it.
    ///
    /// # Errors
    /// The request is wrong, something it needs is missing or damaged, or the VM did not come up; a
    /// failed boot tells its phase and the last lines of the guest's console.
    pub async fn sandbox(&self, spec: SandboxSpec) -> Result<Sandbox, Error> {
        self.sandbox_with(spec, false).await
    }

    /// The same; `private`: nobody else knows its output folder, so that the guest may remember what is
    /// in it.
    pub(crate) async fn sandbox_with(
        &self,
        spec: SandboxSpec,
        private: bool,
    ) -> Result<Sandbox, Error> {
        let log = Log::new();
        check(&spec)?;
        let mut prepared = self.prepare(&spec).await?;
        let outputs = Outputs::begin(&spec, &mut prepared.shares, private).await?;
        log.phase(Phase::Prepared);
        let default = if self.config.emulated { BOOT_SECONDS_EMULATED } else { BOOT_SECONDS };
        let own = spec.boot_timeout_seconds.or(self.config.boot_timeout_seconds);
        let seconds = own.unwrap_or(default);
        let (control, theirs, accepted) =
            Control::new().map_err(|e| Error::io("cannot make a control socket", e))?;
        let process = Process::spawn(&self.config.vmm, theirs)?;
        log.phase(Phase::VmmSpawned);
        let personal = personal(&spec, &prepared)?;
        let mut boot = Boot::new(control, process, accepted, self.config.emulated);
        let (config, fds) = config(&spec, &prepared);
        let (client, channel) = boot.run(seconds, config, &fds, &personal, &log).await?;
        let writable = prepared.shares.iter().any(|s| !s.mount.read_only);
        Ok(Sandbox::new(Parts {
            control: boot.control,
            process: boot.process,
            client,
            channel,
            manifest: prepared.manifest,
            targets: targets(&prepared.shares),
            outputs,
            writable,
            emulated: self.config.emulated,
            log,
        }))
    }

    /// Checks a request as [`Self::sandbox`] does, without starting anything.
    ///
    /// # Errors
    /// The request is wrong, or something it needs is missing or damaged.
    pub async fn check(&self, spec: &SandboxSpec) -> Result<(), Error> {
        check(spec)?;
        self.prepare(spec).await.map(drop)
    }

    async fn prepare(&self, spec: &SandboxSpec) -> Result<Prepared, Error> {
        let kvm = kvm::open()?;
        let own = [&self.config.vmm, &self.config.kernel, &self.config.agent];
        let folders = [&self.config.images, &self.config.state];
        let own: Vec<&Path> = own.into_iter().chain(folders).map(PathBuf::as_path).collect();
        let shares = shares::open_all(spec, &own)?;
        let image = self.store.open(&spec.image)?;
        let (kernel_info, kernel) = self.store.open_kernel(&self.config.kernel)?;
        check_kernel(&image.manifest.min_kernel, &kernel_info.version)?;
        let (_, agent) = self.store.open_agent(&self.config.agent)?;
        let kernel = self.verified(kernel).await?;
        let layers = image.layers.len();
        let mut disks = vec![(self.verified(agent).await?, true)];
        for layer in image.layers {
            disks.push((self.verified(layer).await?, true));
        }
        if let Some(size) = spec.scratch_mib {
            let folders = self.config.scratch.clone();
            let disk = tokio::task::spawn_blocking(move || scratch::make(&folders, size)).await;
            disks.push((disk.map_err(|e| Error::Scratch(e.to_string()))??, false));
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc = rustix::fs::open("/proc", flags, Mode::empty())
            .map_err(|e| Error::io("cannot open /proc", e))?;
        Ok(Prepared {
            kvm,
            proc,
            kernel,
            disks,
            layers,
            scratch: spec.scratch_mib.is_some(),
            shares,
            manifest: image.manifest,
        })
    }

    /// The file, once its digest is known to be right.
    async fn verified(&self, candidate: Candidate) -> Result<OwnedFd, Error> {
        if self.store.is_verified(&candidate) {
            return Ok(candidate.into_fd());
        }
        let store = self.store.clone();
        let work = move || store.verify(&candidate).map(|()| candidate.into_fd());
        let result = tokio::task::spawn_blocking(work).await;
        Ok(result.map_err(|e| Error::io("cannot verify a file", std::io::Error::other(e)))??)
    }
}

/// Checks the numbers of a request.
fn check(spec: &SandboxSpec) -> Result<(), Error> {
    let range = |what: &str, value: u32, low: u32, high: u32, unit: &str| {
        if (low..=high).contains(&value) {
            return Ok(());
        }
        let text = format!("{what} is {value}{unit}, but must be from {low} to {high}{unit}");
        Err(Error::Invalid(text))
    };
    range("cpus", u32::from(spec.cpus), 1, 32, "")?;
    range("memory", spec.memory_mib, 32, 1 << 20, " MiB")?;
    capacity::check(spec.memory_mib)?;
    range("max_processes", spec.max_processes, 1, 65_536, "")?;
    if let Some(size) = spec.scratch_mib {
        range("the scratch disk", size, scratch::MIN_MIB, 16 << 20, " MiB")?;
    }
    if let Some(seconds) = spec.boot_timeout_seconds {
        range("the boot's time limit", seconds, 1, 3600, " seconds")?;
    }
    output::compile(&spec.artifacts).map_err(Error::Invalid)?;
    if !spec.artifacts.is_empty() && spec.output.is_none() {
        let text = "artifacts need an output folder to be released into: add --output";
        return Err(Error::Invalid(text.to_owned()));
    }
    Ok(())
}

/// The VM's description and the descriptors that go beside it.
fn config<'a>(spec: &SandboxSpec, prepared: &'a Prepared) -> (VmConfig, Vec<BorrowedFd<'a>>) {
    let mut fds: Vec<BorrowedFd<'a>> = Vec::new();
    let mut add = |fd: &'a OwnedFd| {
        fds.push(fd.as_fd());
        fds.len().saturating_sub(1)
    };
    let mut init_args = vec![format!("layers={}", prepared.layers)];
    if prepared.scratch {
        init_args.push("scratch".to_owned());
    }
    let config = VmConfig {
        version: vmm::VERSION,
        cpus: spec.cpus,
        memory_mib: spec.memory_mib,
        kvm_fd: add(&prepared.kvm),
        kernel_fd: add(&prepared.kernel),
        proc_fd: add(&prepared.proc),
        cmdline: CMDLINE.to_owned(),
        init_args,
        disks: prepared
            .disks
            .iter()
            .map(|(fd, read_only)| DiskConfig { fd: add(fd), read_only: *read_only })
            .collect(),
        shares: prepared
            .shares
            .iter()
            .map(|share| ShareConfig {
                name: share.mount.share.clone(),
                fd: add(&share.root),
                read_only: share.mount.read_only,
                limit_bytes: share.limit_bytes,
                limit_files: share.limit_files,
                xattr: spec.share_xattr,
                cache: share.cache,
                guest_uid: GUEST_ID,
                guest_gid: GUEST_ID,
            })
            .collect(),
        listen: vec![BOOT_PORT],
    };
    (config, fds)
}

/// The name of each share and its place in the guest.
fn targets(shares: &[Share]) -> BTreeMap<String, String> {
    shares.iter().map(|s| (s.mount.share.clone(), s.mount.target.clone())).collect()
}

fn personal(spec: &SandboxSpec, prepared: &Prepared) -> Result<Personalise, Error> {
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(Personalise {
        protocol: VERSION,
        entropy: hex(&random::<ENTROPY>()?),
        clock_ns: u64::try_from(clock.as_nanos()).unwrap_or(u64::MAX),
        hostname: "casulo".to_owned(),
        mounts: prepared.shares.iter().map(|s| s.mount.clone()).collect(),
        max_processes: spec.max_processes,
        max_memory: None,
    })
}

/// Random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|r| !r.is_empty()) {
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled = filled.saturating_add(n),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("the kernel gives no random bytes", e)),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_checked() {
        let ok = SandboxSpec::default();
        assert!(check(&ok).is_ok());
        let wrong: [fn(&mut SandboxSpec); 7] = [
            |s| s.memory_mib = 0,
            |s| s.memory_mib = 31,
            |s| s.cpus = 0,
            |s| s.cpus = 33,
            |s| s.max_processes = 0,
            |s| s.scratch_mib = Some(0),
            |s| s.boot_timeout_seconds = Some(0),
        ];
        for change in wrong {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            assert!(matches!(check(&spec), Err(Error::Invalid(_))));
        }
        let mut spec = SandboxSpec::default();
        spec.memory_mib = 0;
        let text = check(&spec).unwrap_err().to_string();
        assert_eq!(text, "memory is 0 MiB, but must be from 32 to 1048576 MiB");
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<32>().unwrap(), random::<32>().unwrap());
    }

    #[test]
    fn a_missing_vmm_is_named() {
        let config = RuntimeConfig::in_home(Path::new("/nowhere"), "/nowhere/casulo-vmm".into());
        let error = Runtime::open(config).unwrap_err();
        assert!(error.to_string().contains("/nowhere/casulo-vmm"));
    }
}
