//! What a thread in its jail can no longer do. Each attempt runs in a process of its own: this test program
//! again, told by the environment what to try.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use casulo_vmm::jail;
use casulo_vmm::jail::landlock::Root;
use casulo_vmm::jail::seccomp::{Kind, filter, install};
use std::os::fd::AsFd;

const ATTEMPT: &str = "CASULO_JAIL_ATTEMPT";
const PLACE: &str = "CASULO_JAIL_PLACE";
const SIGSYS: i32 = 31;

const KINDS: [Kind; 5] = [Kind::Control, Kind::Vcpu, Kind::Disks, Kind::Vsock, Kind::Fs];

/// Runs the attempt `name` in another process.
fn attempt(name: &str, place: &Path) -> ExitStatus {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_attempt", "--nocapture"])
        .env(ATTEMPT, name)
        .env(PLACE, place)
        .output()
        .unwrap();
    if output.status.signal().is_none() && !output.status.success() {
        eprintln!("{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
    output.status
}

/// Not a test of its own: what [`attempt`] runs.
#[test]
fn the_attempt() {
    let (Ok(name), Some(place)) = (std::env::var(ATTEMPT), std::env::var_os(PLACE)) else {
        return;
    };
    if name == "landlock" {
        beneath_the_shares(Path::new(&place));
        return;
    }
    let (call, kind) = name.split_once(' ').unwrap();
    let kind = KINDS.into_iter().find(|known| format!("{known:?}") == kind).unwrap();
    let call = call.to_owned();
    // Another thread, so that the test harness stays as it is.
    let thread = std::thread::spawn(move || {
        install(&filter(kind)).unwrap();
        call_of_the_system(&call);
    });
    thread.join().unwrap();
}

/// Does one thing; the result does not matter, only whether the process lives.
fn call_of_the_system(name: &str) {
    match name {
        "nothing" => drop(vec![1u8; 1 << 20]),
        "open" => drop(File::open("/etc/passwd")),
        "create" => drop(File::create_new("/nowhere/at/all")),
        "tcp" => drop(TcpListener::bind("127.0.0.1:0")),
        "unix" => drop(UnixDatagram::unbound()),
        "pair" => drop(UnixStream::pair()),
        "exec" => drop(Command::new("/bin/true").status()),
        "thread" => drop(std::thread::Builder::new().spawn(|| ())),
        "ptrace" => {
            // SAFETY: it asks to be traced, which touches no memory.
            unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
        }
        "ioctl" => {
            // SAFETY: a request that no descriptor knows.
            unsafe { libc::ioctl(0, 0x1234, 0) };
        }
        "give-back" => advise(libc::MADV_DONTNEED),
        "advise" => advise(libc::MADV_HUGEPAGE),
        "exec-memory" => {
            let (size, anonymous) = (4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let access = libc::PROT_READ | libc::PROT_EXEC;
            // SAFETY: a new mapping replaces none.
            unsafe { libc::mmap(std::ptr::null_mut(), size, access, anonymous, -1, 0) };
        }
        other => panic!("unknown attempt {other}"),
    }
}

/// Gives advice about a new page.
fn advise(advice: i32) {
    let (access, anonymous) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping replaces none.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, anonymous, -1, 0) };
    // SAFETY: nothing is stored in the page.
    unsafe { libc::madvise(page, 4096, advice) };
}

#[test]
fn threads_give_memory_back_and_no_other_advice() {
    let nowhere = Path::new("/");
    for kind in KINDS {
        assert!(attempt(&format!("give-back {kind:?}"), nowhere).success(), "{kind:?}");
        let status = attempt(&format!("advise {kind:?}"), nowhere);
        assert_eq!(status.signal(), Some(SIGSYS), "{kind:?}: {status}");
    }
}

#[test]
fn no_thread_opens_a_socket_starts_a_program_or_makes_code() {
    let nowhere = Path::new("/");
    for kind in KINDS {
        assert!(attempt(&format!("nothing {kind:?}"), nowhere).success(), "{kind:?}");
        for call in ["tcp", "unix", "exec", "thread", "ptrace", "ioctl", "exec-memory"] {
            let status = attempt(&format!("{call} {kind:?}"), nowhere);
            assert_eq!(status.signal(), Some(SIGSYS), "{call} by {kind:?}: {status}");
        }
    }
}

#[test]
fn only_the_file_server_opens_files_and_only_the_sockets_make_pairs() {
    let nowhere = Path::new("/");
    for kind in KINDS {
        for (call, allowed) in [("open", Kind::Fs), ("create", Kind::Fs), ("pair", Kind::Vsock)] {
            let status = attempt(&format!("{call} {kind:?}"), nowhere);
            if kind == allowed {
                assert!(status.success(), "{call} by {kind:?}: {status}");
            } else {
                assert_eq!(status.signal(), Some(SIGSYS), "{call} by {kind:?}: {status}");
            }
        }
    }
}

/// Closes Landlock around the folders that [`the_file_system_is_what_lies_beneath_the_shares`] made.
fn beneath_the_shares(place: &Path) {
    let open = |name: &str| {
        File::options().read(true).custom_flags(libc::O_PATH).open(place.join(name)).unwrap()
    };
    let (input, output, single) = (open("input"), open("output"), open("single"));
    let roots = [
        Root { fd: input.as_fd(), read_only: true, file: false },
        Root { fd: output.as_fd(), read_only: false, file: false },
        Root { fd: single.as_fd(), read_only: true, file: true },
    ];
    jail::landlock::restrict(&roots).unwrap();

    let denied = |result: io::Result<File>, what: &str| {
        let kind = result.map_err(|error| error.kind()).err();
        assert_eq!(kind, Some(io::ErrorKind::PermissionDenied), "{what}");
    };
    fs::read(place.join("input/file")).unwrap();
    fs::read(place.join("single")).unwrap();
    fs::write(place.join("output/new"), "x").unwrap();
    fs::rename(place.join("output/new"), place.join("output/dir/renamed")).unwrap();
    denied(File::create(place.join("input/new")), "create in a read-only share");
    denied(File::options().write(true).open(place.join("input/file")), "write to it");
    denied(File::options().write(true).open(place.join("single")), "write to a single file");
    denied(File::open(place.join("secret")), "read beside the shares");
    denied(File::open(place.join("output/../secret")), "read by a detour");
    denied(File::open("/etc/passwd"), "read elsewhere");
    assert!(fs::read_dir(place).is_err());
    assert!(fs::read_dir(place.join("input")).unwrap().count() == 1);
}

#[test]
fn the_file_system_is_what_lies_beneath_the_shares() {
    let place = tempfile::tempdir().unwrap();
    for folder in ["input", "output", "output/dir"] {
        fs::create_dir(place.path().join(folder)).unwrap();
    }
    for file in ["input/file", "single", "secret"] {
        fs::write(place.path().join(file), "content").unwrap();
    }
    if !has_landlock() {
        eprintln!("this kernel has no Landlock: not tested");
        return;
    }
    assert!(attempt("landlock", place.path()).success());
}

/// Whether the kernel knows Landlock; asking for its version needs no rule set.
fn has_landlock() -> bool {
    const CREATE_RULESET: libc::c_long = 444;
    // SAFETY: with this flag the call only returns a number.
    let version = unsafe { libc::syscall(CREATE_RULESET, std::ptr::null::<u8>(), 0usize, 1u32) };
    version > 0
}
