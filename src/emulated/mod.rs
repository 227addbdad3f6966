//! The emulated host: a machine with real KVM where this one has none.
//!
//! Many development machines and cloud VMs have no usable `/dev/kvm`. There [`run`] starts QEMU,
//! which emulates (TCG) an AMD processor with virtualisation and boots a stock Debian kernel on it;
//! in it the same command runs with the same arguments, environment, folder and user id, on the
//! same root file system. What happens:
//!
//! ```text
//!   this machine                              emulated machine
//!   casulo, run()                             pid 1: this same binary, init()
//!     starts qemu with                          loads modules, mounts, starts the job
//!       kernel + modules.cpio     (files)
//!       + a second cpio           (memory)      /init and /job.json
//!     virtio-serial "data"     <- frames ->     stdin, stdout, stderr, exit
//!     virtio-serial "control"  -- frames ->     signals, window sizes, closed outputs
//!     9p "root", "export1" ..  <- files  ->     / read-only, named folders writable
//! ```
//!
//! Two serial ports, because data stops when its reader does (a job that does not read its stdin),
//! and signals must pass nevertheless.
//!
//! It is slow, for development, and **no boundary against hostile code**: whoever is root in the
//! emulated machine reads the caller's files and writes the named folders. In the emulated machine
//! `/` is read-only, `/tmp` and `/var/tmp` show what is there but keep changes in memory only,
//! `/run` and `/dev/shm` are empty file systems in memory, and there is no network beside loopback;
//! at most one port of this machine is passed on to a server in there.
//! 9p has no sockets, FIFOs, devices, `renameat2` flags, hole punching or `O_TMPFILE`, and a file that
//! is unlinked while open is lost: whoever needs these uses `/tmp` or `/dev/shm`.
//!
//! Nothing is left behind: everything that QEMU gets beside the installed files is memory or a
//! socket pair, and QEMU gets SIGKILL when the thread that called [`run`] ends.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "cli")]
pub mod command;
mod console;
pub(crate) mod cpio;
mod guest;
mod host;
mod idle_vm;
mod initrd;
mod job;
mod pump;
mod qemu;
mod terminal;

pub use guest::{init, is_init};
pub use host::run;

/// What to tell the user, on stderr, when the emulated host was chosen for lack of KVM.
pub const NOTICE: &str =
    "casulo: no usable KVM here; using the emulated host (slow, for development only)";
/// Set, to 1, in the environment of what runs in the emulated host.
pub const MARKER: &str = "CASULO_EMULATED";

/// Whether this process runs in the emulated host.
pub fn is_emulated() -> bool {
    std::env::var_os(MARKER).is_some_and(|v| v == "1")
}

/// Whether this process runs in an emulated host that was started with [`Machine::forward`].
pub fn is_forwarded() -> bool {
    is_emulated() && Path::new("/sys/class/net/eth0").exists()
}

/// The emulated machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Folder with `vmlinuz` and `modules.cpio` (`CASULO_HOME/emulated`).
    pub files: PathBuf,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Processors. Ignored with `icount`, which takes one.
    pub cpus: u32,
    /// Count instructions: one is one nanosecond of the emulated machine's clock, so that times
    /// measured in it do not depend on what else this machine does.
    pub icount: bool,
    /// Deadline from the start of QEMU to the start of the job.
    pub boot_timeout: Duration,
    /// A port of this machine on which a server in there is reached. The server must listen on
    /// [`FORWARDED`] and the same port.
    pub forward: Option<SocketAddrV4>,
}

/// Address of the emulated machine on a network of its own, which has no other way out or in than
/// [`Machine::forward`].
pub const FORWARDED: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);

impl Machine {
    /// The default machine: 3 GiB, 2 processors, real time.
    ///
    /// `home` is `CASULO_HOME`.
    pub fn new(home: &Path) -> Self {
        Self {
            files: home.join("emulated"),
            memory_mib: 3072,
            cpus: 2,
            icount: false,
            boot_timeout: Duration::from_secs(180),
            forward: None,
        }
    }

    /// The QEMU that runs it: that of [`Machine::files`], which `cargo xtask emulated` builds, else the
    /// first in `PATH`. The emulation of AMD's virtualisation in Debian's loses and doubles interrupts now
    /// and then, by which guests with several vCPUs hang or crash.
    ///
    /// # Errors
    /// There is none.
    pub fn program(&self) -> Result<PathBuf, EmulatedError> {
        qemu::find(&self.files)
    }
}

/// A command to run in the emulated host, as the calling user and groups.
#[derive(Clone, Debug)]
pub struct Job {
    /// Program (looked up in the `PATH` of `env` when it has no slash) and its arguments.
    pub argv: Vec<OsString>,
    /// The whole environment; [`MARKER`] is added.
    pub env: Vec<(OsString, OsString)>,
    /// Working folder, absolute.
    pub cwd: PathBuf,
    /// Folders that the job may write, through to this machine. They must exist. A file stands for
    /// its folder. The root folder stays read-only.
    pub writable: Vec<PathBuf>,
    /// Folders that the job reads while others may change them, or that lie where the emulated
    /// machine has a file system of its own (`/run`, `/dev/shm`). What is below other folders is
    /// visible too, but may be seen as it was before.
    pub readable: Vec<PathBuf>,
    /// Give the job a terminal, whose other end is this process's stdin and stdout. Without, stdin,
    /// stdout and stderr pass through as they are.
    pub terminal: bool,
}

impl Job {
    /// A job with this process's environment and working folder, which is writable.
    ///
    /// # Errors
    /// The working folder is gone.
    pub fn new(argv: Vec<OsString>) -> io::Result<Self> {
        let cwd = std::env::current_dir()?;
        Ok(Self {
            argv,
            env: std::env::vars_os().collect(),
            writable: vec![cwd.clone()],
            cwd,
            readable: Vec::new(),
            terminal: false,
        })
    }
}

/// Why a job did not run, or did not run to its end, in the emulated host.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmulatedError {
    /// QEMU is not installed.
    #[error(
        "the emulated host needs the program qemu-system-x86_64, which is not in PATH; install it \
         (Debian: `sudo apt-get install qemu-system-x86`) or run `cargo xtask emulated` in Casulo's \
         sources"
    )]
    NoQemu,
    /// The kernel or the modules are not installed.
    #[error(
        "the emulated host is not set up: {} is missing; run `cargo xtask emulated` in Casulo's \
         sources",
        .0.display()
    )]
    NotInstalled(PathBuf),
    /// The job cannot be described to the emulated machine.
    #[error("cannot run this in the emulated host: {0}")]
    Job(String),
    /// A call to the operating system failed.
    #[error("emulated host: cannot {what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// The emulated machine did not start the job in time.
    #[error("the emulated host did not start within {} seconds{}", .after.as_secs(), tail(.console))]
    BootTimeout {
        /// The deadline.
        after: Duration,
        /// Last lines of its console and of QEMU.
        console: String,
    },
    /// The emulated machine ended before the job did.
    #[error("the emulated host ended before the command did{}", tail(.console))]
    Died {
        /// Last lines of its console and of QEMU.
        console: String,
    },
    /// The user ended it by a second signal, or the job did not heed the first in time.
    #[error("ended by signal {0}")]
    Interrupted(i32),
}

fn tail(console: &str) -> String {
    if console.is_empty() {
        "; its console is empty".to_owned()
    } else {
        format!("; the end of its console:\n{console}")
    }
}

/// Turns an I/O result into an [`EmulatedError::System`].
fn system<T>(
    what: &'static str,
    result: Result<T, impl Into<io::Error>>,
) -> Result<T, EmulatedError> {
    result.map_err(|error| EmulatedError::System { what, error: error.into() })
}
