//! How a task ends before its time: timeout, signals, SIGKILL; and that nothing stays.

use std::io::Read;
use std::process::Stdio;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::support::{Leftovers, PATIENCE, folder, output, run, vmm_of, wait, wait_for};

fn pid(child: &std::process::Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

/// Starts a command that prints `up` and waits for the word.
fn started(mut command: std::process::Command) -> std::process::Child {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut word = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(&word, b"up\n");
    child
}

#[test]
fn timeout_is_124_with_the_output_so_far() {
    let before = Leftovers::now();
    let out =
        output(run(["--timeout", "2", "--", "sh", "-c", "echo before; sleep 60; echo after"]));
    assert_eq!(out.status.code(), Some(124));
    assert_eq!(out.stdout, b"before\n");
    before.assert_unchanged();
}

#[test]
fn timeout_kills_what_the_command_left_running() {
    let out = output(run([
        "--timeout",
        "2",
        "--",
        "sh",
        "-c",
        "(trap '' TERM HUP; setsid sleep 1000) & trap '' TERM; sleep 1000",
    ]));
    assert_eq!(out.status.code(), Some(124));
}

#[test]
fn files_written_before_a_timeout_are_on_the_host() {
    let folder = folder();
    let path = folder.path().to_str().unwrap();
    let script = "dd if=/dev/zero of=big bs=1M count=8 status=none; echo done > small; sleep 60";
    let out = output(run(["--timeout", "5", "--output", path, "--", "sh", "-c", script]));
    assert_eq!(out.status.code(), Some(124));
    assert_eq!(std::fs::read(folder.path().join("small")).unwrap(), b"done\n");
    assert_eq!(std::fs::read(folder.path().join("big")).unwrap(), vec![0; 8 << 20]);
}

#[test]
fn interrupt_and_terminate_end_the_vm_and_clean_up() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let before = Leftovers::now();
        let mut child = started(run(["--", "sh", "-c", "echo up; sleep 1000"]));
        kill_process(pid(&child), signal).unwrap();
        assert_eq!(wait(&mut child).code(), Some(status));
        before.assert_unchanged();
    }
}

#[test]
fn an_interrupt_during_the_boot_cleans_up() {
    let before = Leftovers::now();
    let mut child = run(["--", "true"]).spawn().unwrap();
    wait_for("the VMM", || vmm_of(child.id()).first().copied());
    kill_process(pid(&child), Signal::INT).unwrap();
    assert_eq!(wait(&mut child).code(), Some(130));
    before.assert_unchanged();
}

#[test]
fn after_sigkill_nothing_is_left() {
    let before = Leftovers::now();
    let folder = folder();
    let path = folder.path().to_str().unwrap();
    let mut child = started(run(["--output", path, "--", "sh", "-c", "echo up; sleep 1000"]));
    let vmm = wait_for("the VMM", || vmm_of(child.id()).first().copied());
    let vmm = Pid::from_raw(i32::try_from(vmm).unwrap()).unwrap();
    let pidfd = pidfd_open(vmm, PidfdFlags::empty()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The VMM's pidfd becomes readable when it has ended.
    let mut poll = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    let patience =
        rustix::event::Timespec { tv_sec: i64::try_from(PATIENCE.as_secs()).unwrap(), tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&patience)).unwrap(), 1);
    drop(folder);
    before.assert_unchanged();
}

#[test]
fn a_guest_that_resets_itself_is_lost_not_a_result() {
    let script = "import ctypes; ctypes.CDLL(None).reboot(0x01234567)";
    let out = output(run(["--user", "root", "--", "python3", "-c", script]));
    assert_eq!(out.status.code(), Some(125));
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(stderr.contains("reset"), "{stderr}");
}
