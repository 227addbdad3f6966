//! The workload has no AF_VSOCK: the sockets to the host belong to the agent.
//!
//! A guest is hostile as a whole and the host trusts nothing in it; this only keeps an unprivileged
//! program from posing as the agent or taking ports of it.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Compiles the filter: `socket` and `socketpair` of AF_VSOCK give EAFNOSUPPORT, and io_uring,
/// which could make sockets past the filter, is not there; everything else is allowed.
///
/// # Errors
/// The compiler refuses the rules (it does not).
pub fn compile() -> io::Result<BpfProgram> {
    let vsock = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        u64::from(libc::AF_VSOCK.unsigned_abs()),
    )
    .and_then(|condition| SeccompRule::new(vec![condition]))
    .map_err(io::Error::other)?;
    let filter = |rules: Vec<(i64, Vec<SeccompRule>)>, errno: i32| -> io::Result<BpfProgram> {
        SeccompFilter::new(
            rules.into_iter().collect::<BTreeMap<_, _>>(),
            SeccompAction::Allow,
            SeccompAction::Errno(errno.unsigned_abs()),
            TargetArch::x86_64,
        )
        .and_then(BpfProgram::try_from)
        .map_err(io::Error::other)
    };
    filter(
        vec![
            (libc::SYS_socket, vec![vsock.clone()]),
            (libc::SYS_socketpair, vec![vsock]),
            (libc::SYS_io_uring_setup, vec![]),
        ],
        libc::EAFNOSUPPORT,
    )
}

/// Installs a compiled filter in the calling thread; async-signal-safe.
///
/// # Errors
/// The kernel refuses it: without `no_new_privs` only a privileged process may.
pub fn install(program: &[seccompiler::sock_filter]) -> io::Result<()> {
    let Ok(len) = u16::try_from(program.len()) else {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    };
    // Not `libc::sock_fprog`: its pointer is to another type of the same layout.
    #[repr(C)]
    struct Program {
        len: u16,
        filter: *const seccompiler::sock_filter,
    }
    let program = Program { len, filter: program.as_ptr() };
    // SAFETY: the kernel reads `len` instructions through the pointer, which is that of a live
    // slice of this length, and keeps neither.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_takes_vsock_away_and_nothing_else() {
        let program = compile().unwrap();
        // In a thread of its own: a filter cannot be taken off again.
        std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            install(&program).unwrap();
            let open = |family| {
                // SAFETY: socket(2) takes numbers only.
                let fd = unsafe { libc::socket(family, libc::SOCK_STREAM, 0) };
                let error = io::Error::last_os_error();
                if fd < 0 { error.raw_os_error() } else { None }
            };
            assert_eq!(open(libc::AF_VSOCK), Some(libc::EAFNOSUPPORT));
            assert_eq!(open(libc::AF_UNIX), None);
        })
        .join()
        .unwrap();
    }
}
