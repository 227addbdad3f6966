//! The whole output of calls, in files that the workload can read and nobody but the agent can write.
//!
//! They take the guest's memory, so that together they have a budget: what does not fit is not kept,
//! and the oldest files make room for new ones.

use std::collections::VecDeque;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use casulo_protocol::agent::Keep;

/// Part of the memory that all files together may take.
const SHARE_OF_MEMORY: u64 = 8;
/// Most files.
const MAX_FILES: usize = 256;

/// The files of past calls.
#[derive(Clone, Debug)]
pub struct Calls {
    folder: PathBuf,
    budget: u64,
    files: Arc<Mutex<VecDeque<(PathBuf, u64)>>>,
}

impl Calls {
    /// Files in `folder`, which is made when the first one is.
    pub fn new(folder: PathBuf) -> Self {
        let info = rustix::system::sysinfo();
        let budget = info.totalram.saturating_mul(info.mem_unit.into()) / SHARE_OF_MEMORY;
        Self { folder, budget, files: Arc::default() }
    }

    /// Keeps one output as `keep` says. A name that is none keeps nothing.
    pub fn keep(&self, keep: Option<&Keep>, output: &str) -> Kept {
        let good = |name: &str| {
            !name.is_empty()
                && name.len() <= 64
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        };
        let target = keep.filter(|keep| good(&keep.name)).map(|keep| Target {
            path: self.folder.join(format!("{}.{output}", keep.name)),
            after: usize::try_from(keep.after.min(1 << 20)).unwrap_or(0),
            // One file may take half: two outputs of one call fit.
            limit: self.budget / 2,
            start: Vec::new(),
            file: None,
            size: 0,
        });
        Kept { calls: self.clone(), target }
    }

    /// Forgets the oldest files until the rest and the new one fit.
    fn add(&self, path: PathBuf, size: u64) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.push_back((path, size));
        let mut total = files.iter().fold(0u64, |sum, (_, size)| sum.saturating_add(*size));
        while total > self.budget || files.len() > MAX_FILES {
            let Some((path, size)) = files.pop_front() else { break };
            let _ = std::fs::remove_file(path);
            total = total.saturating_sub(size);
        }
    }
}

#[derive(Debug)]
struct Target {
    path: PathBuf,
    after: usize,
    limit: u64,
    /// What came before there was a file.
    start: Vec<u8>,
    file: Option<File>,
    size: u64,
}

/// One output that is kept once it is long enough.
#[derive(Debug)]
pub struct Kept {
    calls: Calls,
    target: Option<Target>,
}

impl Kept {
    /// Keeps nothing.
    pub fn none() -> Self {
        Calls { folder: PathBuf::new(), budget: 0, files: Arc::default() }.keep(None, "")
    }

    /// Adds output. What cannot be stored ends the file, not the command.
    pub fn push(&mut self, data: &[u8]) {
        let Some(target) = &mut self.target else { return };
        if target.push(&self.calls.folder, data).is_err() {
            self.end();
        }
    }

    /// Bytes in the file; 0 if there is none.
    pub fn finish(mut self) -> u64 {
        self.end()
    }

    fn end(&mut self) -> u64 {
        let Some(Target { path, file: Some(_), size, .. }) = self.target.take() else { return 0 };
        self.calls.add(path, size);
        size
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.end();
    }
}

impl Target {
    fn push(&mut self, folder: &Path, data: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            if self.start.len().saturating_add(data.len()) <= self.after {
                self.start.extend_from_slice(data);
                return Ok(());
            }
            let mut file = create(folder, &self.path)?;
            file.write_all(&self.start)?;
            self.size = self.start.len() as u64;
            self.start = Vec::new();
            self.file = Some(file);
        }
        let room = usize::try_from(self.limit.saturating_sub(self.size)).unwrap_or(usize::MAX);
        let data = data.get(..room.min(data.len())).unwrap_or_default();
        if let Some(file) = &mut self.file {
            file.write_all(data)?;
            self.size = self.size.saturating_add(data.len() as u64);
        }
        Ok(())
    }
}

/// Makes `folder` so that others can read what is in it.
///
/// # Errors
/// Those of `mkdir(2)`, unless it is there.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Makes a file that must not be there, for others to read.
///
/// # Errors
/// Those of `open(2)`.
pub fn create(folder: &Path, path: &Path) -> io::Result<File> {
    make_folder(folder)?;
    OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(budget: u64) -> (tempfile::TempDir, Calls) {
        let folder = tempfile::tempdir().unwrap();
        let calls = Calls { folder: folder.path().join("calls"), budget, files: Arc::default() };
        (folder, calls)
    }

    fn keep(name: &str) -> Keep {
        Keep { name: name.into(), after: 4 }
    }

    #[test]
    fn a_short_output_gets_no_file_and_a_long_one_is_whole() {
        let (_folder, calls) = calls(1000);
        let mut short = calls.keep(Some(&keep("a")), "stdout");
        short.push(b"12");
        short.push(b"34");
        assert_eq!(short.finish(), 0);
        assert!(!calls.folder.exists());
        let mut long = calls.keep(Some(&keep("b")), "stdout");
        for part in [&b"12"[..], b"34", b"5", b"6789"] {
            long.push(part);
        }
        assert_eq!(long.finish(), 9);
        assert_eq!(std::fs::read(calls.folder.join("b.stdout")).unwrap(), b"123456789");
    }

    #[test]
    fn a_file_is_cut_at_half_the_budget_and_old_ones_make_room() {
        let (_folder, calls) = calls(100);
        for name in ["a", "b", "c"] {
            let mut kept = calls.keep(Some(&keep(name)), "stdout");
            kept.push(&[7; 80]);
            assert_eq!(kept.finish(), 50);
        }
        let there = |name: &str| calls.folder.join(format!("{name}.stdout")).exists();
        assert_eq!((there("a"), there("b"), there("c")), (false, true, true));
    }

    #[test]
    fn a_name_cannot_lead_elsewhere_and_what_is_there_is_not_overwritten() {
        let (folder, calls) = calls(100);
        for name in ["", "../x", "a/b", "a.b", "é"] {
            let mut kept = calls.keep(Some(&keep(name)), "stdout");
            kept.push(&[7; 80]);
            assert_eq!(kept.finish(), 0, "{name:?}");
        }
        std::fs::write(folder.path().join("target"), "1").unwrap();
        make_folder(&calls.folder).unwrap();
        std::os::unix::fs::symlink("../target", calls.folder.join("a.stdout")).unwrap();
        let mut kept = calls.keep(Some(&keep("a")), "stdout");
        kept.push(&[7; 80]);
        assert_eq!(kept.finish(), 0);
        assert_eq!(std::fs::read(folder.path().join("target")).unwrap(), b"1");
    }
}
