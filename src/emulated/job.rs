//! What the emulated machine is told about its job: `/job.json` in its initial file system.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{EmulatedError, Job, MARKER};

/// Bytes of a path, an argument or a variable: these need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Bytes(Vec<u8>);

impl Bytes {
    pub(super) fn new(text: &OsStr) -> Self {
        Self(text.as_bytes().to_vec())
    }

    pub(super) fn to_os(&self) -> OsString {
        OsString::from_vec(self.0.clone())
    }

    pub(super) fn to_path(&self) -> PathBuf {
        PathBuf::from(self.to_os())
    }
}

/// One 9p file system beside the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Export {
    /// Mount tag.
    pub(super) tag: String,
    /// The folder, with no symbolic link in its path; the same on both machines.
    pub(super) path: Bytes,
    pub(super) writable: bool,
}

/// The job as the emulated machine's process 1 reads it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GuestJob {
    pub(super) argv: Vec<Bytes>,
    pub(super) env: Vec<(Bytes, Bytes)>,
    pub(super) cwd: Bytes,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    pub(super) umask: u32,
    /// Soft and hard limit of open files.
    pub(super) open_files: (Option<u64>, Option<u64>),
    pub(super) hostname: Bytes,
    /// Rows and columns of the terminal that the job is to have.
    pub(super) terminal: Option<(u16, u16)>,
    pub(super) exports: Vec<Export>,
}

/// QEMU's PCI bus has 32 slots, some of which are taken.
const MAX_EXPORTS: usize = 20;

impl GuestJob {
    pub(super) fn new(job: &Job, terminal: Option<(u16, u16)>) -> Result<Self, EmulatedError> {
        if job.argv.is_empty() {
            return Err(EmulatedError::Job("there is no command".to_owned()));
        }
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let groups = super::system("read the groups", rustix::process::getgroups())?;
        let mut env: Vec<(Bytes, Bytes)> = job
            .env
            .iter()
            .filter(|(key, _)| key != MARKER)
            .map(|(key, value)| (Bytes::new(key), Bytes::new(value)))
            .collect();
        env.push((Bytes::new(OsStr::new(MARKER)), Bytes::new(OsStr::new("1"))));
        Ok(Self {
            argv: job.argv.iter().map(|a| Bytes::new(a)).collect(),
            env,
            cwd: Bytes::new(job.cwd.as_os_str()),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.iter().map(|g| g.as_raw()).collect(),
            umask: current_umask(),
            open_files: (limit.current, limit.maximum),
            hostname: Bytes::new(OsStr::from_bytes(rustix::system::uname().nodename().to_bytes())),
            terminal,
            exports: exports(&job.writable, &job.readable)?,
        })
    }
}

/// The umask can only be read by setting it, which other threads would see; the kernel shows it.
fn current_umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("Umask:"));
    mask.and_then(|m| u32::from_str_radix(m.trim(), 8).ok()).unwrap_or(0o022)
}

/// The exports for these folders: parents before what is below them, and none twice.
fn exports(writable: &[PathBuf], readable: &[PathBuf]) -> Result<Vec<Export>, EmulatedError> {
    let mut folders: Vec<(PathBuf, bool)> = Vec::new();
    for path in writable {
        folders.push((folder(path)?, true));
    }
    for path in readable {
        folders.push((folder(path)?, false));
    }
    // A writable one first among equals, so that it wins.
    folders.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    let mut kept: Vec<(PathBuf, bool)> = Vec::new();
    for (path, writable) in folders {
        let covered = kept
            .iter()
            .rev()
            .find(|(above, _)| path.starts_with(above))
            .is_some_and(|(_, above_writable)| *above_writable || !writable);
        if path != Path::new("/") && !covered {
            kept.push((path, writable));
        }
    }
    if kept.len() > MAX_EXPORTS {
        return Err(EmulatedError::Job(format!(
            "it names {} separate folders and the emulated host takes {MAX_EXPORTS}",
            kept.len()
        )));
    }
    Ok(kept
        .into_iter()
        .enumerate()
        .map(|(index, (path, writable))| Export {
            tag: format!("export{index}"),
            path: Bytes::new(path.as_os_str()),
            writable,
        })
        .collect())
}

fn folder(path: &Path) -> Result<PathBuf, EmulatedError> {
    let cannot = |error: std::io::Error| {
        EmulatedError::Job(format!("cannot export {}: {error}", path.display()))
    };
    let real = path.canonicalize().map_err(cannot)?;
    if real.is_dir() {
        return Ok(real);
    }
    Ok(real.parent().map(Path::to_path_buf).unwrap_or(real))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(exports: &[Export]) -> Vec<(PathBuf, bool)> {
        exports.iter().map(|e| (e.path.to_path(), e.writable)).collect()
    }

    #[test]
    fn a_folder_below_another_needs_no_export_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (a, b) = (root.join("a"), root.join("b"));
        std::fs::create_dir_all(a.join("deep")).unwrap();
        std::fs::create_dir_all(&b).unwrap();
        std::fs::write(b.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&a, root.join("link")).unwrap();
        let writable =
            [a.join("deep"), root.join("link"), b.join("file"), a.clone(), PathBuf::from("/")];
        let found = exports(&writable, &[]).unwrap();
        assert_eq!(paths(&found), [(a, true), (b, true)]);
        assert_ne!(found[0].tag, found[1].tag);
    }

    #[test]
    fn writable_wins_over_readable_and_covers_what_is_below() {
        let (shm, usr) = (PathBuf::from("/dev/shm"), PathBuf::from("/usr"));
        let both = exports(std::slice::from_ref(&shm), &[shm.clone(), usr.clone()]).unwrap();
        assert_eq!(paths(&both), [(shm, true), (usr.clone(), false)]);
        // A writable folder below a readable one has an export of its own, mounted after it.
        let nested = exports(&["/usr/lib".into()], std::slice::from_ref(&usr)).unwrap();
        assert_eq!(paths(&nested), [(usr.clone(), false), ("/usr/lib".into(), true)]);
        let covered = exports(std::slice::from_ref(&usr), &["/usr/lib".into()]).unwrap();
        assert_eq!(paths(&covered), [(usr, true)]);
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = exports(&[PathBuf::from("/nowhere/at all")], &[]).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at all"), "{error}");
    }

    #[test]
    fn a_job_survives_its_journey_with_any_bytes() {
        let job = Job {
            argv: vec!["printf".into(), OsString::from_vec(vec![0xff, b'"', 1])],
            env: vec![("A".into(), "b=c\n".into()), (MARKER.into(), "0".into())],
            cwd: "/".into(),
            writable: vec![],
            readable: vec![],
            terminal: false,
        };
        let guest = GuestJob::new(&job, Some((24, 80))).unwrap();
        let text = serde_json::to_vec(&guest).unwrap();
        assert_eq!(serde_json::from_slice::<GuestJob>(&text).unwrap(), guest);
        assert_eq!(guest.argv[1].to_os(), job.argv[1]);
        let marker: Vec<_> = guest.env.iter().filter(|(k, _)| k.to_os() == MARKER).collect();
        assert_eq!(marker.len(), 1);
        assert_eq!(marker[0].1.to_os(), "1");
    }
}
