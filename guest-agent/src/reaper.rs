//! Children of process 1 that are not its own: orphans of the workload.
//!
//! Own children are awaited through their pidfds, each by who started it, so the reaper looks at a
//! dead child first (WNOWAIT) and leaves it alone when it is one of ours.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus};
use tokio::sync::Notify;

use crate::exec::fd::Fd;

/// Knows which children are ours.
#[derive(Clone, Debug, Default)]
pub struct Reaper {
    own: Arc<Mutex<BTreeSet<i32>>>,
    again: Arc<Notify>,
}

/// A child of ours that has not been awaited.
#[derive(Debug)]
pub struct Own {
    reaper: Reaper,
    pid: Pid,
    pidfd: Fd,
    status: OnceLock<u32>,
}

impl Reaper {
    /// Registers a child. To be called before the event loop gets control again.
    ///
    /// # Errors
    /// The pidfd cannot be watched.
    pub fn own(&self, pid: Pid, pidfd: OwnedFd) -> io::Result<Own> {
        self.set().insert(pid.as_raw_pid());
        match Fd::watch(pidfd) {
            Ok(pidfd) => Ok(Own { reaper: self.clone(), pid, pidfd, status: OnceLock::new() }),
            Err(error) => {
                self.set().remove(&pid.as_raw_pid());
                Err(error)
            }
        }
    }

    fn set(&self) -> std::sync::MutexGuard<'_, BTreeSet<i32>> {
        // The lock is never held across anything that can fail.
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks SIGCHLD for the whole process and gives a descriptor that tells of it. To be called
    /// while there is only one thread.
    ///
    /// # Errors
    /// The kernel is out of descriptors.
    pub fn signals() -> io::Result<OwnedFd> {
        let mut set = empty_signal_set();
        // SAFETY: adds a valid signal number to a valid set.
        unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
        // SAFETY: reads a valid set; no old set is asked for.
        unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        // SAFETY: reads a valid set and makes a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Reaps orphans for ever. Only process 1 may run it.
    ///
    /// # Errors
    /// The descriptor of [`Reaper::signals`] cannot be watched.
    pub async fn run(self, signals: OwnedFd) -> io::Result<Infallible> {
        let signals = Fd::new(signals)?;
        let mut buffer = [0; 1024];
        loop {
            self.sweep();
            tokio::select! {
                read = signals.read(&mut buffer) => { read?; }
                () = self.again.notified() => {}
            }
        }
    }

    fn sweep(&self) {
        while let Some(pid) = next_dead() {
            if self.set().contains(&pid.as_raw_pid()) {
                // Dead children come in a fixed order, so those behind it wait until its owner has
                // seen it, who then notifies us.
                return;
            }
            let _ = rustix::process::waitid(
                WaitId::Pid(pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
            );
        }
    }
}

impl Own {
    /// Waits for the end and gives the status as `waitpid` would; as often as asked.
    ///
    /// # Errors
    /// Someone else took the status.
    pub async fn wait(&self) -> io::Result<u32> {
        loop {
            if let Some(status) = self.status.get() {
                return Ok(*status);
            }
            self.pidfd.readable().await?;
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
        }
    }

    /// The status as `waitpid` would give it, if it has ended.
    ///
    /// # Errors
    /// Someone else took the status.
    pub fn try_wait(&self) -> io::Result<Option<u32>> {
        if let Some(status) = self.status.get() {
            return Ok(Some(*status));
        }
        let status = rustix::process::waitid(
            WaitId::PidFd(rustix::fd::AsFd::as_fd(&self.pidfd)),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        )?;
        Ok(status.map(|status| {
            self.forget();
            *self.status.get_or_init(|| wait_status(&status))
        }))
    }

    /// Kills it; nothing happens if it has ended.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    fn forget(&self) {
        self.reaper.set().remove(&self.pid.as_raw_pid());
        self.reaper.again.notify_one();
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // If nobody awaited it, it is an orphan from now on. If somebody did, the number may be
        // another's by now.
        if self.status.get().is_none() {
            self.forget();
        }
    }
}

/// The status word of `waitpid`.
fn wait_status(status: &WaitIdStatus) -> u32 {
    if let Some(code) = status.exit_status() {
        return (code.unsigned_abs() & 0xff) << 8;
    }
    let core = if status.dumped() { 0x80 } else { 0 };
    (status.terminating_signal().unwrap_or(0).unsigned_abs() & 0x7f) | core
}

fn next_dead() -> Option<Pid> {
    // SAFETY: all zeroes is a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes one siginfo_t.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) };
    if result != 0 {
        return None;
    }
    // SAFETY: waitid fills in the fields of SIGCHLD, or leaves the zeroes.
    Pid::from_raw(unsafe { info.si_pid() })
}

/// A signal set without members.
pub(crate) fn empty_signal_set() -> libc::sigset_t {
    // SAFETY: all zeroes is the empty set on Linux.
    unsafe { std::mem::zeroed() }
}
