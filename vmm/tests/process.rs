//! `casulo-vmm` as a process: how it starts, refuses, hides and ends.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use casulo_protocol::vmm::{DiskConfig, Message, Request, VERSION, VmConfig};
use common::{Code, Vmm, config, descriptors, elf, has_kvm, kernel_file};

/// The answer to a start that fails: phase and error.
fn refused(config: VmConfig, kernel: std::os::fd::OwnedFd) -> (String, String) {
    let mut vmm = Vmm::spawn();
    vmm.request(&Request::Start(config), &descriptors(kernel));
    let Some(Message::Failed { phase, error }) = vmm.receive() else {
        panic!("it started");
    };
    assert_eq!(vmm.receive(), None);
    assert!(vmm.wait().success());
    (phase, error)
}

#[test]
fn without_a_control_socket_it_says_what_it_is() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_casulo-vmm")).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("started by casulo"), "{text}");
}

#[test]
fn it_tells_its_version_and_takes_no_other_argument() {
    let vmm = || Command::new(env!("CARGO_BIN_EXE_casulo-vmm"));
    let output = vmm().arg("--version").output().unwrap();
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains(&format!("protocol {VERSION}")));
    assert_eq!(vmm().arg("--help").output().unwrap().status.code(), Some(2));
}

#[test]
fn each_bad_start_has_an_error_of_its_own() {
    if !has_kvm() {
        return;
    }
    let good = || elf(Code::new().reset());
    let check = |config, kernel, phase: &str, word: &str| {
        let (p, error) = refused(config, kernel);
        assert_eq!(p, phase, "{error}");
        assert!(error.contains(word), "{error}");
    };
    check(config(), kernel_file(b"no kernel"), "kernel", "not an ELF");
    check(config(), kernel_file(b""), "kernel", "not an ELF");
    check(VmConfig { memory_mib: 0, ..config() }, good(), "memory", "0 MiB");
    check(VmConfig { cpus: 0, ..config() }, good(), "config", "0 vCPUs");
    check(VmConfig { cpus: 33, ..config() }, good(), "config", "33 vCPUs");
    check(VmConfig { kernel_fd: 9, ..config() }, good(), "config", "descriptor 9");
    check(VmConfig { proc_fd: 1, ..config() }, good(), "config", "used twice");
    check(VmConfig { kvm_fd: 2, proc_fd: 0, ..config() }, good(), "kvm", "/dev/kvm");
    check(VmConfig { version: 99, ..config() }, good(), "version", "version 99");
    check(VmConfig { cmdline: "x".repeat(4096), ..config() }, good(), "cmdline", "command line");
    let disks = vec![DiskConfig { fd: 3, read_only: true }];
    check(VmConfig { disks, ..config() }, good(), "config", "descriptor 3");
}

#[test]
fn a_first_request_that_is_no_start_is_refused() {
    for packet in [r#"{"request":"report"}"#, "garbage", "{}"] {
        let mut vmm = Vmm::spawn();
        vmm.packet(packet.as_bytes(), &[]);
        let message = vmm.receive();
        assert!(
            matches!(&message, Some(Message::Failed { phase, .. }) if phase == "protocol"),
            "{message:?}"
        );
        assert!(vmm.wait().success());
    }
}

#[test]
fn it_ends_when_the_control_socket_closes() {
    let mut vmm = Vmm::spawn();
    vmm.socket = None;
    assert!(vmm.wait().success());
    if has_kvm() {
        // Asleep, and busy (jmp to itself).
        for code in [Code::new().idle(), Code::new().spin()] {
            let mut vmm = Vmm::start(config(), code);
            vmm.socket = None;
            assert!(vmm.wait().success());
        }
        // Right after the request, before the answer.
        let mut vmm = Vmm::spawn();
        let code = Code::new().idle();
        vmm.request(&Request::Start(config()), &descriptors(elf(code)));
        vmm.socket = None;
        vmm.wait();
    }
}

/// Most resident memory of a child that has ended, in bytes.
fn peak_memory(child: &std::process::Child) -> i64 {
    let pid = i32::try_from(child.id()).unwrap();
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    let mut status = 0;
    // SAFETY: both places are of the size that the kernel writes.
    let ended = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
    assert_eq!((ended, status), (pid, 0));
    // SAFETY: it was zeroed, and every bit pattern is a value.
    unsafe { usage.assume_init() }.ru_maxrss * 1024
}

#[test]
fn a_closed_control_socket_ends_it_while_it_builds() {
    if has_kvm() {
        // Reading a kernel of a GiB takes a while, and leaves its mark in the memory of the process.
        const SIZE: u64 = 1 << 30;
        let kernel = std::fs::File::from(elf(Code::new().idle()));
        let end = kernel.metadata().unwrap().len();
        kernel.set_len(SIZE).unwrap();
        let segment = SIZE - 120;
        for field in [96, 104] {
            kernel.write_all_at(&segment.to_le_bytes(), field).unwrap();
        }
        assert!(end < SIZE);
        let mut vmm = Vmm::spawn();
        let config = VmConfig { memory_mib: 1100, ..config() };
        vmm.request(&Request::Start(config), &descriptors(kernel.into()));
        vmm.socket = None;
        let peak = peak_memory(&vmm.child);
        assert!(peak < i64::try_from(SIZE / 2).unwrap(), "it went on to {peak} bytes");
    }
}

#[test]
fn every_thread_is_jailed() {
    if !has_kvm() {
        return;
    }
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    let vmm = Vmm::spawn();
    let config = VmConfig { disks: vec![DiskConfig { fd: 3, read_only: false }], ..config() };
    let mut fds = descriptors(elf(Code::new().idle()));
    fds.push(disk.into());
    vmm.request(&Request::Start(config), &fds);
    assert_eq!(vmm.receive(), Some(Message::Started));
    let mut names = Vec::new();
    for task in fs::read_dir(format!("/proc/{}/task", vmm.child.id())).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        // KVM has a thread of its own in the process.
        if field("Name:").starts_with("kvm-") {
            continue;
        }
        names.push(field("Name:"));
        assert_eq!(field("Seccomp:"), "2", "{status}");
        assert_eq!(field("NoNewPrivs:"), "1");
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000");
        }
    }
    names.sort();
    assert_eq!(names, ["casulo-vmm", "disks", "vcpu0", "vsock"]);
    let limits = fs::read_to_string(format!("/proc/{}/limits", vmm.child.id())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"));
}
