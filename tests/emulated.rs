//! Drives `casulo emulated-host` on this machine: bytes, statuses, signals, terminals, and what is
//! left behind. Needs QEMU and the files of `cargo xtask emulated`, and starts a machine per test.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

/// A bound against hanging, not a measurement.
const PATIENCE: Duration = Duration::from_secs(180);

fn casulo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_casulo"));
    command.arg("emulated-host").stdin(Stdio::null());
    command
}

/// A shell script in the emulated host, in this folder.
fn shell(folder: &Path, script: &str) -> Command {
    let mut command = casulo();
    command.args(["--", "sh", "-c", script]).current_dir(folder);
    command
}

fn home() -> PathBuf {
    match std::env::var_os("CASULO_HOME") {
        Some(home) => home.into(),
        None => match std::env::var_os("XDG_DATA_HOME") {
            Some(data) => PathBuf::from(data).join("casulo"),
            None => PathBuf::from(std::env::var_os("HOME").unwrap()).join(".local/share/casulo"),
        },
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

/// The QEMU that a process started.
fn qemu_of(parent: u32) -> Option<u32> {
    fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let id: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let ppid: u32 = rest.split_whitespace().nth(1)?.parse().ok()?;
        (ppid == parent && name.starts_with("qemu")).then_some(id)
    })
}

/// Bytes that do not repeat soon.
fn pattern(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        bytes.extend((state ^ (state >> 33)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn with_input(mut command: Command, input: Vec<u8>) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    output
}

#[test]
fn a_hundred_megabytes_go_in_and_come_out_whole() {
    let dir = tempfile::tempdir().unwrap();
    let input = pattern(100_000_000);
    let output = with_input(shell(dir.path(), "cat; echo apart >&2; exit 7"), input.clone());
    assert_eq!(text(&output.stderr), "apart\n");
    assert_eq!(output.status.code(), Some(7));
    assert!(output.stdout == input, "{} bytes came back", output.stdout.len());
}

#[test]
fn it_is_the_same_machine_to_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let named = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("before"), "seen").unwrap();
    let script = "pwd; cat before; echo; echo $CASULO_EMULATED $EXTRA; umask; ulimit -n
        echo new >after; echo named >$NAMED/file
        touch /etc/x 2>&1 | grep -o 'Read-only file system'
        mkfifo /tmp/fifo && test -p /tmp/fifo && echo fifo
        test -w /dev/kvm && echo kvm; ls -d /proc/1 /sys/fs/cgroup/cgroup.procs /dev/pts/ptmx
        test -S /nowhere; sleep 1000 & exit 3";
    let mut command = casulo();
    command
        .arg("--writable")
        .arg(named.path())
        .args(["--", "sh", "-c", script])
        .current_dir(dir.path())
        .env("EXTRA", "a b")
        .env("NAMED", named.path());
    let output = command.output().unwrap();
    let native = Command::new("sh").args(["-c", "umask; ulimit -n"]).output().unwrap();
    let expected = format!(
        "{}\nseen\n1 a b\n{}Read-only file system\nfifo\nkvm\n/dev/pts/ptmx\n/proc/1\n\
         /sys/fs/cgroup/cgroup.procs\n",
        dir.path().canonicalize().unwrap().display(),
        text(&native.stdout),
    );
    assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(3));
    let after = dir.path().join("after");
    assert_eq!(fs::read_to_string(&after).unwrap(), "new\n");
    assert_eq!(fs::metadata(&after).unwrap().uid(), rustix::process::geteuid().as_raw());
    assert_eq!(fs::read_to_string(named.path().join("file")).unwrap(), "named\n");
    assert!(!Path::new("/tmp/fifo").exists(), "/tmp is kept in memory");
}

#[test]
fn a_missing_program_is_127_and_a_signal_128_more() {
    let mut missing = casulo();
    let output = missing.args(["--", "no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("no-such-program"));
    let dir = tempfile::tempdir().unwrap();
    let output = shell(dir.path(), "kill -SEGV $$").output().unwrap();
    assert_eq!(output.status.code(), Some(139), "{}", text(&output.stderr));
}

#[test]
fn a_reader_that_leaves_ends_the_writer() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = shell(dir.path(), "exec yes").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 2];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"y\n");
    drop(stdout);
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(128 + 13));
}

/// Starts a script that says `ready`, and waits for that.
fn started(dir: &Path, script: &str) -> Child {
    let mut child = shell(dir, script).stdout(Stdio::piped()).spawn().unwrap();
    let mut word = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ready\n");
    child
}

#[test]
fn a_signal_is_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let script = "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let mut child = started(dir.path(), script);
    rustix::process::kill_process(pid(&child), Signal::TERM).unwrap();
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(5));
    let mut rest = String::new();
    child.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "got it\n");
}

#[test]
fn a_second_signal_ends_what_ignores_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = started(dir.path(), "trap '' INT; echo ready; sleep 1000; sleep 1000");
    let qemu = qemu_of(child.id()).unwrap();
    rustix::process::kill_process(pid(&child), Signal::INT).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().unwrap().is_none());
    rustix::process::kill_process(pid(&child), Signal::INT).unwrap();
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(125));
    assert!(!Path::new(&format!("/proc/{qemu}")).exists());
}

fn temporary_files() -> BTreeSet<PathBuf> {
    ["/tmp", "/var/tmp", "/run", "/dev/shm"]
        .iter()
        .flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().map(|n| n.to_string_lossy().to_lowercase());
            name.is_some_and(|n| ["casulo", "qemu", "vl."].iter().any(|w| n.contains(w)))
        })
        .collect()
}

#[test]
fn after_sigkill_nothing_is_left() {
    let before = temporary_files();
    let dir = tempfile::tempdir().unwrap();
    let mut child = started(dir.path(), "echo ready; sleep 1000");
    let qemu = qemu_of(child.id()).unwrap();
    assert_eq!(temporary_files(), before, "nothing is there even while it runs");
    let raw = Pid::from_raw(i32::try_from(qemu).unwrap()).unwrap();
    let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // A pidfd is readable when its process has ended.
    let mut fds = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "QEMU still runs");
    assert_eq!(temporary_files(), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_terminal_passes_keys_and_resizes() {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let size = |rows, columns| {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&master, size).unwrap();
    };
    size(33, 111);
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let slave = fs::OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut command = casulo();
    let script = "stty size
        while test \"$(stty size)\" = '33 111'; do sleep 0.1; done; stty size
        trap 'echo interrupted' INT; echo now
        until read -r line; do :; done; echo \"<$line>\"; exit 4";
    command
        .args(["-t", "--", "bash", "-c", script])
        .stdin(slave.try_clone().unwrap())
        .stdout(slave.try_clone().unwrap())
        .stderr(slave);
    let take_terminal = || {
        rustix::process::setsid()?;
        rustix::process::ioctl_tiocsctty(rustix::stdio::stdin().as_fd())?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls.
    unsafe { command.pre_exec(take_terminal) };
    let mut child = command.spawn().unwrap();
    drop(command);

    let (sender, received) = std::sync::mpsc::channel();
    let mut reader = fs::File::from(master.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = reader.read(&mut buffer) {
            if sender.send(buffer[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut seen = String::new();
    let mut expect = |word: &str| {
        while !seen.contains(word) {
            match received.recv_timeout(PATIENCE) {
                Ok(bytes) => seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(error) => panic!("no {word:?} in {seen:?}: {error}"),
            }
        }
        let end = seen.find(word).unwrap() + word.len();
        seen.drain(..end);
    };
    let mut keys = fs::File::from(master.try_clone().unwrap());
    expect("33 111");
    size(44, 122);
    expect("44 122");
    expect("now");
    keys.write_all(b"\x03").unwrap();
    expect("interrupted");
    keys.write_all(b"hello\r").unwrap();
    expect("<hello>");
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(4));
    let after = rustix::termios::tcgetattr(&master).unwrap();
    assert!(
        after.local_modes.contains(rustix::termios::LocalModes::ICANON),
        "the terminal is restored"
    );
}

/// A `CASULO_HOME` whose emulated host has these modules.
fn home_with(modules: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("emulated");
    fs::create_dir(&files).unwrap();
    std::os::unix::fs::symlink(home().join("emulated/vmlinuz"), files.join("vmlinuz")).unwrap();
    fs::write(files.join("modules.cpio"), modules).unwrap();
    dir
}

#[test]
fn a_machine_that_cannot_boot_shows_its_console() {
    let home = home_with(b"");
    let output = casulo().args(["--", "true"]).env("CASULO_HOME", home.path()).output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(stderr.contains("ended before the command did"), "{stderr}");
    assert!(stderr.contains("the initial file system has no modules"), "{stderr}");
}

#[test]
fn what_is_missing_is_named_with_what_to_do() {
    let empty = tempfile::tempdir().unwrap();
    let output = casulo().args(["--", "true"]).env("CASULO_HOME", empty.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("cargo xtask emulated"), "{}", text(&output.stderr));

    let home = home_with(b"");
    let mut command = casulo();
    command.args(["--", "true"]).env("CASULO_HOME", home.path()).env("PATH", empty.path());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("qemu-system-x86"), "{}", text(&output.stderr));

    let mut command = casulo();
    let output = command.args(["--writable", "/no such/folder", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("/no such/folder"), "{}", text(&output.stderr));
}
