//! The VMM as a library: a VM inside of this process.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::{self, File};
use std::os::fd::AsFd;

use casulo_protocol::vmm::ExitReason;
use casulo_vmm::builder::BuildError;
use casulo_vmm::{Confine, Disk, MachineConfig, Share};
use common::{Code, elf, has_kvm};

fn config(code: Code) -> MachineConfig {
    let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
    MachineConfig { memory_mib: 32, ..MachineConfig::new(kvm, elf(code).into()) }
}

/// Fields of the `status` of each thread of this process.
fn threads(name: &str, field: &str) -> Vec<String> {
    let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).ok();
    let wanted = |status: &String| status.starts_with(&format!("Name:\t{name}\n"));
    let value = |status: String| {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter_map(status).filter(wanted).map(value).collect()
}

#[test]
fn a_vm_is_described_built_started_and_waited_for() {
    if has_kvm() {
        let vm = config(Code::new().print(b"hello").reset()).build().unwrap();
        assert_eq!(vm.try_wait(), None);
        vm.start();
        assert_eq!(vm.wait().reason, ExitReason::Reset);
        assert_eq!(vm.console.tail(usize::MAX), "hello");
    }
}

#[test]
fn the_threads_of_the_vm_are_jailed_and_the_caller_is_not() {
    if has_kvm() {
        let mut config = config(Code::new().idle());
        let file = tempfile::tempfile().unwrap();
        config.disks.push(Disk { file, read_only: true });
        let vm = config.build().unwrap();
        vm.start();
        for name in ["vcpu0", "disks", "vsock"] {
            let filters = threads(name, "Seccomp:");
            assert!(!filters.is_empty() && filters.iter().all(|mode| mode == "2"), "{name}");
        }
        // This thread opens files and sockets as before.
        let own = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert!(own.contains("Seccomp:\t0") && own.contains("NoNewPrivs:\t0"), "{own}");
        std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    }
}

#[test]
fn a_jail_is_left_out_only_on_request() {
    assert_eq!(Confine::default(), Confine::Threads);
}

#[test]
fn shares_need_proc() {
    if has_kvm() {
        let folder = tempfile::tempdir().unwrap();
        let root = File::open(folder.path()).unwrap();
        let share = || Share {
            name: "input".into(),
            root: root.as_fd().try_clone_to_owned().unwrap(),
            read_only: true,
            limit_bytes: None,
            limit_files: None,
            xattr: false,
            cache: false,
            guest_uid: 0,
            guest_gid: 0,
        };
        let bare = MachineConfig { shares: vec![share()], ..config(Code::new().reset()) };
        assert!(matches!(bare.build(), Err(BuildError::Config(what)) if what.contains("/proc")));
        let proc_root = Some(File::open("/proc").unwrap().into());
        let whole =
            MachineConfig { proc_root, shares: vec![share()], ..config(Code::new().reset()) };
        let vm = whole.build().unwrap();
        vm.start();
        assert_eq!(vm.wait().reason, ExitReason::Reset);
    }
}

#[test]
fn too_many_devices_are_refused_in_words() {
    if has_kvm() {
        let mut config = config(Code::new().reset());
        for _ in 0..20 {
            config.disks.push(Disk { file: tempfile::tempfile().unwrap(), read_only: true });
        }
        let error = config.build().err().unwrap().to_string();
        assert!(error.contains("fewer disks"), "{error}");
    }
}
