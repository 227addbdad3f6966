//! Running `casulo` and looking at what it leaves behind.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// An ordinary user of the test machine (`nobody` on Debian).
pub(crate) const USER: u32 = 65534;

/// Longest wait for something that must happen; a bound against hanging, not a measurement.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn casulo_path() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_casulo"))
}

/// `CASULO_HOME` of these tests: the caller's, else the default of the machine.
pub(crate) fn home() -> PathBuf {
    if let Some(home) = std::env::var_os("CASULO_HOME") {
        return home.into();
    }
    match std::env::var_os("XDG_DATA_HOME") {
        Some(data) => PathBuf::from(data).join("casulo"),
        None => PathBuf::from(std::env::var_os("HOME").unwrap()).join(".local/share/casulo"),
    }
}

/// `casulo` with `args`, without input.
pub(crate) fn casulo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(casulo_path());
    command.args(args).env("CASULO_HOME", home()).env("TMPDIR", scratch()).stdin(Stdio::null());
    command
}

/// `casulo run --host native` with `args`.
pub(crate) fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = casulo(["run", "--host", "native"]);
    command.args(args);
    command
}

/// Longest life of one `casulo` here. A guest that stands still fails its test, and the others still run.
const LONGEST: Duration = Duration::from_secs(600);

/// Runs to the end.
#[track_caller]
pub(crate) fn output(mut command: Command) -> Output {
    end_of(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// What a child said, once it has ended; one that does not end is killed, and the test fails.
#[track_caller]
fn end_of(child: Child) -> Output {
    let id = rustix::process::Pid::from_child(&child);
    let (ended, end) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || ended.send(child.wait_with_output()));
    if let Ok(output) = end.recv_timeout(LONGEST) {
        waiter.join().unwrap().unwrap();
        return output.unwrap();
    }
    // Not waited for yet, or the waiter would have sent: the id is still the child's.
    rustix::process::kill_process(id, rustix::process::Signal::KILL).unwrap();
    let said = end.recv_timeout(PATIENCE).unwrap().unwrap();
    panic!(
        "still running after {} s; stdout: {}; stderr: {}",
        LONGEST.as_secs(),
        String::from_utf8_lossy(&said.stdout),
        String::from_utf8_lossy(&said.stderr)
    );
}

/// Runs with `input` on standard input.
#[track_caller]
pub(crate) fn output_with_input(mut command: Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = end_of(child);
    writer.join().unwrap().unwrap();
    output
}

#[track_caller]
pub(crate) fn assert_output(output: &Output, status: i32, stdout: &str, stderr: &str) {
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).as_ref(),
            String::from_utf8_lossy(&output.stderr).as_ref()
        ),
        (Some(status), stdout, stderr)
    );
}

/// The output of a failed start: exit 125, nothing on stdout, every word of `wanted` on stderr.
#[track_caller]
pub(crate) fn assert_refused(output: &Output, wanted: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(output.stdout.is_empty());
    for word in wanted {
        assert!(stderr.contains(word), "no {word:?} in: {stderr}");
    }
}

/// A temporary folder on tmpfs: in the emulated host `/tmp` is an overlay, and everything else is
/// 9p, which lacks much that a share needs.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// `TMPDIR` of every `casulo`.
fn scratch() -> &'static Path {
    static SCRATCH: OnceLock<tempfile::TempDir> = OnceLock::new();
    SCRATCH.get_or_init(open_folder).path()
}

/// A folder of its own for a test that ordinary users must reach.
pub(crate) fn open_folder() -> tempfile::TempDir {
    let folder = folder();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// What a test compares before and after: processes of Casulo, mounts, cgroups, UNIX sockets with
/// names, and files in the places for temporary ones.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Leftovers {
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
    sockets: BTreeSet<String>,
    files: BTreeSet<PathBuf>,
}

/// Adds what is under `root`, at most `depth` levels down.
fn walk(root: &Path, depth: u32, into: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        into.insert(entry.path());
        if depth > 1 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), depth - 1, into);
        }
    }
}

impl Leftovers {
    /// What is there before a test. A VMM that an earlier test killed may still be ending: nobody
    /// waits for it but this.
    pub(crate) fn now() -> Self {
        wait_for("the end of earlier VMMs", || {
            let now = Self::look();
            now.processes.is_empty().then_some(now)
        })
    }

    fn look() -> Self {
        let processes = fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(|entry| {
                let name = fs::read_to_string(entry.path().join("comm")).ok()?;
                let state = fs::read_to_string(entry.path().join("stat")).ok()?;
                // A zombie waits for whoever started it, which may be this test's runner.
                let zombie = state.rsplit(')').next().is_some_and(|s| s.trim().starts_with('Z'));
                (name.starts_with("casulo") && !zombie)
                    .then(|| format!("{} {}", entry.file_name().display(), name.trim()))
            })
            // This very test may run under a casulo that emulates the machine.
            .filter(|line| !line.starts_with("1 "))
            .collect();
        let mounts =
            fs::read_to_string("/proc/mounts").unwrap().lines().map(String::from).collect();
        let sockets = fs::read_to_string("/proc/net/unix")
            .unwrap()
            .lines()
            .filter_map(|line| line.split_whitespace().nth(7).map(String::from))
            .collect();
        let mut cgroups = BTreeSet::new();
        walk_folders(Path::new("/sys/fs/cgroup"), &mut cgroups);
        let mut files = BTreeSet::new();
        for place in ["/tmp", "/var/tmp"] {
            walk(Path::new(place), 1, &mut files);
        }
        // These may be full of what others make and remove.
        files.retain(|file| file.to_string_lossy().contains("casulo"));
        for place in [scratch(), Path::new("/run"), Path::new("/dev/shm"), &home()] {
            walk(place, 8, &mut files);
        }
        // What was verified is remembered there on purpose; the emulated host shows it twice.
        let remembered = |file: &Path| {
            file.starts_with(home().join("state"))
                || file.to_string_lossy().contains("/state/verified")
        };
        files.retain(|file| !remembered(file));
        Self { processes, mounts, cgroups, sockets, files }
    }

    /// Waits until the machine is as it was.
    #[track_caller]
    pub(crate) fn assert_unchanged(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = Self::look();
            if &now == self {
                return;
            }
            if Instant::now() > deadline {
                assert_eq!(&now, self);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn walk_folders(root: &Path, into: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            into.insert(entry.path());
            walk_folders(&entry.path(), into);
        }
    }
}

/// The `casulo-vmm` children of a process.
pub(crate) fn vmm_of(parent: u32) -> Vec<u32> {
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let ppid: u32 = rest.split_whitespace().nth(1)?.parse().ok()?;
            (ppid == parent && name == "casulo-vmm").then_some(pid)
        })
        .collect()
}

/// Waits until `ready` gives something.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits for the end of a child.
#[track_caller]
pub(crate) fn wait(child: &mut Child) -> std::process::ExitStatus {
    wait_for("the end of casulo", || child.try_wait().unwrap())
}

/// Binaries and `CASULO_HOME` where an ordinary user can reach them.
pub(crate) struct ForUsers {
    folder: tempfile::TempDir,
}

impl ForUsers {
    fn new() -> Self {
        let folder = open_folder();
        for name in ["casulo", "casulo-vmm"] {
            let from = casulo_path().with_file_name(name);
            fs::copy(from, folder.path().join(name)).unwrap();
        }
        let target = folder.path().join("home");
        fs::create_dir(&target).unwrap();
        let bound = Command::new("mount").arg("--bind").arg(home()).arg(&target).status().unwrap();
        assert!(bound.success(), "cannot bind CASULO_HOME");
        Self { folder }
    }
}

/// `casulo` as an ordinary user who may use `/dev/kvm`, or may not.
pub(crate) fn casulo_as_user<S: AsRef<OsStr>>(
    kvm: bool,
    args: impl IntoIterator<Item = S>,
) -> Command {
    static SETUP: OnceLock<ForUsers> = OnceLock::new();
    let folder = SETUP.get_or_init(ForUsers::new).folder.path();
    let mode = if kvm { 0o666 } else { 0o600 };
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(mode)).unwrap();
    let mut command = Command::new(folder.join("casulo"));
    command
        .args(args)
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", "/nonexistent")
        .env("CASULO_HOME", folder.join("home"))
        .current_dir(folder)
        .stdin(Stdio::null())
        .uid(USER)
        .gid(USER);
    command
}

/// Bytes that do not repeat soon, the same for the same seed.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// SHA-256 in hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
