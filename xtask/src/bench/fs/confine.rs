//! What Casulo's agent puts around a command, for the guest that has no agent: a control group with limits,
//! in which each allocation of the kernel is counted, and a seccomp filter, which each system call passes.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs;

use anyhow::{Context, Result};
use rustix::mount::MountFlags;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Puts this process, the first of its guest, behind them.
pub(super) fn as_an_agent_does() -> Result<()> {
    group().context("cannot make a control group")?;
    let filter = filter().context("cannot compile the seccomp filter")?;
    seccompiler::apply_filter(&filter).context("cannot install the seccomp filter")
}

fn group() -> Result<()> {
    rustix::mount::mount("cgroup", "/sys", "cgroup2", MountFlags::empty(), None::<&CStr>)?;
    let controllers = "+memory +pids";
    fs::write("/sys/cgroup.subtree_control", controllers)?;
    fs::create_dir("/sys/workload")?;
    fs::write("/sys/workload/cgroup.subtree_control", controllers)?;
    fs::create_dir("/sys/workload/command")?;
    // Far away from what is used, so that nothing is reclaimed.
    fs::write("/sys/workload/memory.max", (1_u64 << 30).to_string())?;
    fs::write("/sys/workload/pids.max", "512")?;
    Ok(fs::write("/sys/workload/command/cgroup.procs", "0")?)
}

/// No sockets of AF_VSOCK and no io_uring.
fn filter() -> Result<BpfProgram> {
    const AF_VSOCK: u64 = 40;
    const SOCKET: i64 = 41;
    const SOCKETPAIR: i64 = 53;
    const IO_URING_SETUP: i64 = 425;
    const EAFNOSUPPORT: u32 = 97;
    let vsock = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, AF_VSOCK)?;
    let vsock = SeccompRule::new(vec![vsock])?;
    let rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::from([
        (SOCKET, vec![vsock.clone()]),
        (SOCKETPAIR, vec![vsock]),
        (IO_URING_SETUP, vec![]),
    ]);
    let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(EAFNOSUPPORT));
    Ok(SeccompFilter::new(rules, allow, refuse, TargetArch::x86_64)?.try_into()?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_filter_compiles() {
        assert!(!super::filter().unwrap().is_empty());
    }
}
