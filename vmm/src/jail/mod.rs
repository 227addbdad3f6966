//! What this process can still do once it serves a guest: as little as the devices need.
//!
//! In this order (each step needs what the later ones take away):
//!
//! 1. [`close_inherited`]: at the first instruction, every descriptor but the standard ones and the control
//!    socket is closed.
//! 2. [`drop_privileges`]: no core dumps, not dumpable (no ptrace by the same user), no new privileges, no
//!    capabilities. Started as root, the process stays uid 0 without any of root's powers: it reaches what
//!    the owner root may reach.
//! 3. [`landlock::restrict`]: no file system but the share roots, no network, no signals to others.
//! 4. One [`seccomp`] filter for each kind of thread, before the first `KVM_RUN`.
//!
//! The first two and the jail of the calling thread are for a process that is nothing but a VMM, as
//! `casulo-vmm` is; a program that embeds the library has a jail around the threads of the VM alone
//! ([`Confine`]).

pub mod filter;
pub mod landlock;
pub mod seccomp;

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use casulo_protocol::vmm::CONTROL_FD;

/// What of this process is jailed when a VM is built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confine {
    /// The threads of the VM: each has Landlock and its own filter. The calling thread stays free.
    #[default]
    Threads,
    /// Also the calling thread, which can do little but serve the control socket afterwards. For a
    /// process that has no other work.
    Process,
    /// Nothing. For debugging: a guest that breaks out of a device is this process then.
    Nothing,
}

/// Most descriptors that the VMM may hold: the file server keeps less than 1,024.
const MAX_DESCRIPTORS: u64 = 4096;

const STDERR: i32 = 2;

/// Why the jail could not be closed; the VM must not run then.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A call failed.
    #[error("the VMM could not {what}: {error}")]
    Call {
        /// What it was to do.
        what: &'static str,
        /// Why it failed.
        error: std::io::Error,
    },
    /// Landlock refused its rules.
    #[error("the VMM could not restrict itself to its shares: {0}")]
    Landlock(String),
    /// A filter could not be built or installed.
    #[error("the VMM could not filter its system calls: {0}")]
    Seccomp(#[from] seccompiler::Error),
}

fn failed<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> JailError {
    move |error| JailError::Call { what, error: error.into() }
}

/// Closes every descriptor above the standard ones and the control socket: it may be anything.
pub fn close_inherited() -> Result<(), JailError> {
    let first = libc::c_uint::try_from(CONTROL_FD.max(STDERR) + 1).unwrap_or(libc::c_uint::MAX);
    // SAFETY: this is the start of the process; no object of it owns a descriptor in this range yet.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    if result == 0 {
        return Ok(());
    }
    Err(failed("close inherited descriptors")(std::io::Error::last_os_error()))
}

/// Gives up everything that a program started by this user could use.
pub fn drop_privileges() -> Result<(), JailError> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .map_err(failed("forbid core dumps"))?;
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX).min(MAX_DESCRIPTORS);
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) })
        .map_err(failed("limit its descriptors"))?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(failed("forbid that it is traced"))?;
    rustix::thread::set_no_new_privs(true).map_err(failed("forbid new privileges"))?;
    drop_capabilities()
}

fn drop_capabilities() -> Result<(), JailError> {
    let what = "give up its capabilities";
    let held = rustix::thread::capabilities(None).map_err(failed(what))?;
    let none = CapabilitySet::empty();
    if held.permitted == none && held.inheritable == none {
        return Ok(());
    }
    let _ = rustix::thread::clear_ambient_capability_set();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).map_err(failed(what))
}
