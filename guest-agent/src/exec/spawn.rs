//! Starting a process: `clone3` straight into the command's cgroup, then from the child's side only
//! system calls on memory that was prepared before.
//!
//! `clone3` and not `fork`, because moving a process into a cgroup after the fact takes a lock that
//! waits for a grace period of the kernel (milliseconds), and because it gives the pidfd. Not
//! `vfork`: the parent would sleep until the `execve`, which a file system of the workload's own
//! making could delay for ever.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{Gid, Uid};
use rustix::io::FdFlags;
use rustix::process::Pid;
use rustix::thread::CapabilitySet;
use seccompiler::BpfProgram;

use super::command::{Command, StartError};
use super::user::User;

/// What becomes descriptors 0, 1 and 2 of the command.
#[derive(Debug)]
pub enum Stdio {
    /// Three descriptors.
    Pipes {
        /// Standard input.
        stdin: OwnedFd,
        /// Standard output.
        stdout: OwnedFd,
        /// Standard error.
        stderr: OwnedFd,
    },
    /// The slave side of a terminal, to be the controlling one.
    Terminal(OwnedFd),
}

/// A process that was started but whose program may not run yet.
#[derive(Debug)]
pub struct Spawned {
    /// Process id; also that of its session and process group.
    pub pid: Pid,
    /// Becomes readable when it ends.
    pub pidfd: OwnedFd,
    /// Ends empty when the program runs; else carries why it does not (see [`failure`]).
    pub failure: OwnedFd,
}

/// Arguments of [`spawn`] beside the command.
#[derive(Debug)]
pub struct Setting<'a> {
    /// Whom to become.
    pub user: &'a User,
    /// Filter for the child.
    pub filter: &'a BpfProgram,
    /// Cgroup to be born in.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// One more descriptor to pass on under its own number.
    pub extra: Option<BorrowedFd<'a>>,
}

/// Where the child failed; the first byte of the failure report.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Stage {
    Session = 1,
    Streams = 2,
    User = 3,
    Folder = 4,
    Privileges = 5,
    Exec = 6,
}

/// Length of a failure report: stage, then the error number.
const REPORT: usize = 5;

/// Starts `command`.
///
/// # Errors
/// No memory, or the limit of processes is met.
pub fn spawn(command: &Command, setting: &Setting<'_>, stdio: Stdio) -> io::Result<Spawned> {
    let (failure, report) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let argv = pointers(&command.argv);
    let envp = pointers(&command.envp);
    // For a script without an interpreter line: `sh SCRIPT ARGUMENTS`.
    let mut shell_argv = argv.clone();
    shell_argv.insert(0, c"sh".as_ptr());
    let groups: Vec<Gid> = setting.user.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let mut child = Child {
        command,
        setting,
        groups: &groups,
        argv: &argv,
        shell_argv: &mut shell_argv,
        envp: &envp,
        stdio: &stdio,
    };
    match clone(setting.cgroup)? {
        None => {
            let (stage, errno) = child.run();
            let e = errno.to_le_bytes();
            let bytes: [u8; REPORT] = [stage as u8, e[0], e[1], e[2], e[3]];
            let _ = rustix::io::write(&report, &bytes);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(127) }
        }
        Some((pid, pidfd)) => Ok(Spawned { pid, pidfd, failure }),
    }
}

/// Turns a failure report into words; `None` when it is empty, so that the program runs.
pub fn failure(report: &[u8], command: &Command) -> Option<StartError> {
    let [stage, rest @ ..] = report else { return None };
    let errno = rest.first_chunk::<4>().map_or(0, |e| i32::from_le_bytes(*e));
    let error = io::Error::from_raw_os_error(errno);
    Some(match *stage {
        s if s == Stage::Exec as u8 => command.exec_error(errno),
        s if s == Stage::Folder as u8 => command.cwd_error(errno),
        s if s == Stage::User as u8 => {
            StartError::cannot_run(format!("cannot become the user: {error}"))
        }
        s if s == Stage::Privileges as u8 => {
            StartError::cannot_run(format!("cannot give up privileges: {error}"))
        }
        s if s == Stage::Streams as u8 => {
            StartError::cannot_run(format!("cannot set up the standard streams: {error}"))
        }
        _ => StartError::cannot_run(format!("cannot make a session: {error}")),
    })
}

fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter().map(|c| c.as_ptr()).chain([std::ptr::null()]).collect()
}

/// `None` in the child.
fn clone(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<(Pid, OwnedFd)>> {
    const CLONE_PIDFD: u64 = 0x1000;
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

    /// `struct clone_args` of linux/sched.h up to its version 2.
    #[derive(Default)]
    #[repr(C)]
    struct CloneArgs {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
        cgroup: u64,
    }
    const { assert!(size_of::<CloneArgs>() == 88) };

    let mut pidfd: i32 = -1;
    let mut args = CloneArgs {
        flags: CLONE_PIDFD,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: u64::from(libc::SIGCHLD.unsigned_abs()),
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(cgroup.as_raw_fd().unsigned_abs());
    }
    // SAFETY: a fork without shared memory. The kernel reads `args`, which has the size given, and
    // writes the pidfd to a live i32. The child goes on in a copy of this stack and, by the
    // contract of `Child::run`, takes no lock and no memory until it execs or exits.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    // SAFETY: the kernel has just made this descriptor for us.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Some((pid, pidfd)))
}

/// The child's side. Its methods make system calls and nothing else: another thread of the parent
/// may have held the allocator's lock at the moment of the clone. The C library's own setuid family
/// is out too (it would signal threads that this copy does not have); rustix calls the kernel.
struct Child<'a> {
    command: &'a Command,
    setting: &'a Setting<'a>,
    groups: &'a [Gid],
    argv: &'a [*const libc::c_char],
    shell_argv: &'a mut [*const libc::c_char],
    envp: &'a [*const libc::c_char],
    stdio: &'a Stdio,
}

type Failed = (Stage, i32);

fn at(stage: Stage) -> impl Fn(rustix::io::Errno) -> Failed {
    move |errno| (stage, errno.raw_os_error())
}

impl Child<'_> {
    /// Returns only on failure.
    fn run(&mut self) -> Failed {
        match self.prepare() {
            Err(failed) => failed,
            Ok(()) => (Stage::Exec, self.exec()),
        }
    }

    fn prepare(&self) -> Result<(), Failed> {
        reset_signals();
        rustix::process::setsid().map_err(at(Stage::Session))?;
        self.streams().map_err(at(Stage::Streams))?;
        let user = self.setting.user;
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        // Tests run as an ordinary user, who can only stay what it is.
        if !rustix::process::getuid().is_root() && rustix::process::getuid() == uid {
            // Nothing to change.
        } else {
            if !uid.is_root() {
                forget_capabilities();
            }
            rustix::thread::set_thread_groups(self.groups).map_err(at(Stage::User))?;
            rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(at(Stage::User))?;
            // Leaving uid 0 clears the permitted, effective and ambient capabilities.
            rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(at(Stage::User))?;
        }
        rustix::process::chdir(self.command.cwd.as_c_str()).map_err(at(Stage::Folder))?;
        if !uid.is_root() {
            rustix::thread::set_no_new_privs(true).map_err(at(Stage::Privileges))?;
        }
        super::seccomp::install(self.setting.filter)
            .map_err(|e| (Stage::Privileges, e.raw_os_error().unwrap_or(libc::EINVAL)))
    }

    fn streams(&self) -> Result<(), rustix::io::Errno> {
        match self.stdio {
            Stdio::Pipes { stdin, stdout, stderr } => {
                rustix::stdio::dup2_stdin(stdin)?;
                rustix::stdio::dup2_stdout(stdout)?;
                rustix::stdio::dup2_stderr(stderr)?;
            }
            Stdio::Terminal(terminal) => {
                rustix::process::ioctl_tiocsctty(terminal)?;
                rustix::stdio::dup2_stdin(terminal)?;
                rustix::stdio::dup2_stdout(terminal)?;
                rustix::stdio::dup2_stderr(terminal)?;
            }
        }
        close_on_exec_from(3);
        if let Some(extra) = self.setting.extra {
            rustix::io::fcntl_setfd(extra.as_fd(), FdFlags::empty())?;
        }
        Ok(())
    }

    /// Tries each candidate as a shell does, and gives the error number that a shell would report.
    fn exec(&mut self) -> i32 {
        let mut result = libc::ENOENT;
        for candidate in &self.command.candidates {
            let mut errno = execve(candidate, self.argv, self.envp);
            if errno == libc::ENOEXEC
                && let Some(script) = self.shell_argv.get_mut(1)
            {
                *script = candidate.as_ptr();
                errno = execve(c"/bin/sh", self.shell_argv, self.envp);
            }
            match errno {
                // One that may not be run is remembered, in case no later one can.
                libc::EACCES => result = errno,
                libc::ENOENT | libc::ENOTDIR => {}
                other => return other,
            }
        }
        result
    }
}

fn execve(path: &CStr, argv: &[*const libc::c_char], envp: &[*const libc::c_char]) -> i32 {
    // SAFETY: the path is a C string; both lists end with a null pointer and hold pointers to C
    // strings that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

/// Empties the bounding set: no program can give a capability back. (A user namespace starts with a
/// full set of its own, which holds only within it.)
fn forget_capabilities() {
    for capability in CapabilitySet::all().iter() {
        // Fails beyond the last capability of the kernel.
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
}

/// The agent ignores SIGPIPE (as every Rust program) and blocks SIGCHLD, and whoever started it may
/// have had it ignore others (`nohup`, a shell's `&`); a program expects none of that.
fn reset_signals() {
    for signal in 1..=libc::SIGSYS {
        // SAFETY: sets the disposition of one signal to its default; for SIGKILL and SIGSTOP it fails.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let none = crate::reaper::empty_signal_set();
    // SAFETY: reads a valid set; no old set is asked for.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// Second line of defence beside CLOEXEC on every descriptor that the agent opens.
fn close_on_exec_from(first: u32) {
    // SAFETY: only sets flags of descriptors of this process.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}
