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

/// Runs a program as root of the guest that ends the guest; gives what the user reads.
fn ended_by(options: &[&str], program: &str) -> String {
    let before = Leftovers::now();
    let args = [&["--user", "root"], options, &["--", "python3", "-c", program]].concat();
    let out = output(run(args));
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(125), "{stderr}");
    assert!(stderr.contains("the VM was lost"), "{stderr}");
    before.assert_unchanged();
    stderr
}

/// `reboot(2)` with this command.
fn reboot(command: u32) -> String {
    let number = format!("ctypes.c_int({command:#x})");
    ended_by(&[], &format!("import ctypes; ctypes.CDLL(None).reboot({number})"))
}

#[test]
fn a_guest_that_resets_itself_is_lost_not_a_result() {
    let stderr = reboot(0x0123_4567);
    assert!(stderr.contains("the guest ended itself (reset)"), "{stderr}");
    assert!(stderr.contains("--user"), "{stderr}");
}

#[test]
fn a_guest_that_halts_or_powers_off_is_lost_and_does_not_hang() {
    for command in [0xcdef_0123, 0x4321_fedc] {
        let stderr = reboot(command);
        assert!(stderr.contains("the guest halted or powered itself off"), "{stderr}");
        // The kernel's own words.
        assert!(stderr.contains("reboot: "), "{stderr}");
    }
}

#[test]
fn a_panic_of_the_guest_kernel_is_told_with_its_last_words() {
    // Root writes traps over process 1, which may not end.
    let stderr = ended_by(
        &[],
        "
for line in open('/proc/1/maps'):
    if 'r-xp' in line and '[v' not in line:
        begin, end = (int(n, 16) for n in line.split()[0].split('-'))
        memory = open('/proc/1/mem', 'r+b', buffering=0)
        memory.seek(begin)
        memory.write(b'\\xcc' * (end - begin))
",
    );
    assert!(stderr.contains("the guest kernel panicked"), "{stderr}");
    assert!(stderr.contains("Last lines of the guest's console"), "{stderr}");
    assert!(stderr.contains("Attempted to kill init!"), "{stderr}");
}

#[test]
fn a_guest_that_panics_for_lack_of_memory_says_what_to_do() {
    let stderr = ended_by(
        &["--memory", "256"],
        "
open('/proc/sys/vm/panic_on_oom', 'w').write('2')
hold = [b'x' * (1 << 20) for _ in range(4096)]
",
    );
    assert!(stderr.contains("the guest kernel panicked"), "{stderr}");
    assert!(stderr.contains("--memory"), "{stderr}");
}
