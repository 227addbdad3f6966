//! System call filters, one for each kind of thread. Any other call ends the process.
//!
//! The lists hold what the code of each thread calls, and what the C library and the Rust runtime call
//! beneath it (memory, locks, the end of a thread). No list has a way to start a program, to open a network
//! socket, or, except the file server's, to open a file.

use seccompiler::BpfProgram;

use super::JailError;
use super::filter::{Condition, Rule, compile};

/// Kinds of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The control thread.
    Control,
    /// A vCPU.
    Vcpu,
    /// virtio-blk, all disks, and virtio-rng.
    Disks,
    /// virtio-vsock.
    Vsock,
    /// virtio-fs.
    Fs,
}

/// `KVM_RUN`, and what tells where a vCPU stands: `KVM_GET_REGS`, `KVM_GET_SREGS`, `KVM_GET_MP_STATE`.
const VCPU_IOCTLS: [u32; 4] = [0xae80, 0x8090_ae81, 0x8138_ae83, 0x8004_ae98];

/// For every thread.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_write,
];

/// For every thread that runs an event loop.
const EVENTS: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_ppoll,
];

const CONTROL: &[i64] =
    &[libc::SYS_getrusage, libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_fcntl];

const DISKS: &[i64] = &[libc::SYS_fdatasync, libc::SYS_preadv, libc::SYS_pwritev];
/// Ways in which a disk may call `fallocate`: holes and zeros, neither of which changes the size.
const DISK_RANGES: [i32; 2] = [
    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
    libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
];

const VSOCK: &[i64] =
    &[libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_shutdown, libc::SYS_timerfd_settime];

const FS: &[i64] = &[
    libc::SYS_copy_file_range,
    libc::SYS_fallocate,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_readlinkat,
    libc::SYS_renameat2,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
];

/// The filter for a kind of thread.
#[must_use]
pub fn filter(kind: Kind) -> BpfProgram {
    let own: &[i64] = match kind {
        Kind::Control => CONTROL,
        Kind::Disks => DISKS,
        Kind::Vsock => VSOCK,
        Kind::Fs => FS,
        Kind::Vcpu => &[],
    };
    let events = if kind == Kind::Vcpu { &[] } else { EVENTS };
    let plain = COMMON.iter().chain(own).chain(events);
    let plain = plain.map(|call| rule(*call, Condition::Always));
    // Memory is never executable.
    let executable = u32::try_from(libc::PROT_EXEC).unwrap_or(u32::MAX);
    let data = || Condition::Argument { index: 2, mask: executable, values: vec![0] };
    let mut checked = vec![rule(libc::SYS_mmap, data()), rule(libc::SYS_mprotect, data())];
    let one_of = |index, values: &[u32]| Condition::Argument {
        index,
        mask: u32::MAX,
        values: values.into(),
    };
    // Memory is given back, by the C library's allocator and by the balloon; other advice changes how the
    // host treats it.
    let give_back = u32::try_from(libc::MADV_DONTNEED).unwrap_or(u32::MAX);
    checked.push(rule(libc::SYS_madvise, one_of(2, &[give_back])));
    match kind {
        Kind::Vcpu => checked.push(rule(libc::SYS_ioctl, one_of(1, &VCPU_IOCTLS))),
        Kind::Disks => {
            let ways = DISK_RANGES.map(|way| u32::try_from(way).unwrap_or(u32::MAX));
            checked.push(rule(libc::SYS_fallocate, one_of(1, &ways)));
        }
        Kind::Vsock => {
            let local = u32::try_from(libc::AF_UNIX).unwrap_or(u32::MAX);
            checked.push(rule(libc::SYS_socketpair, one_of(0, &[local])));
        }
        _ => {}
    }
    compile(plain.chain(checked))
}

fn rule(call: i64, condition: Condition) -> Rule {
    // Every number of a call fits; one that did not would match none.
    (u32::try_from(call).unwrap_or(u32::MAX), condition)
}

/// Installs a filter for the calling thread.
pub fn install(filter: &BpfProgram) -> Result<(), JailError> {
    Ok(seccompiler::apply_filter(filter)?)
}
