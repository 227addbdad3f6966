//! A cache of what is built from source: entries named by a hash of their inputs, one build at a time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::sh;

/// Begins the name of the folder a build works in.
const WORK_PREFIX: &str = "building-";

/// The folder of the entries, locked while this lives.
pub(crate) struct Cache {
    folder: PathBuf,
    _lock: File,
}

impl Cache {
    /// Waits until no other build is at work, and removes what a killed one left.
    pub(crate) fn lock(folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let path = folder.join("lock");
        let lock =
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        for file in fs::read_dir(&folder)?.filter_map(std::io::Result::ok) {
            if file.file_name().to_string_lossy().starts_with(WORK_PREFIX) {
                fs::remove_dir_all(file.path())
                    .with_context(|| format!("cannot remove {}", file.path().display()))?;
            }
        }
        Ok(Self { folder, _lock: lock })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A folder to build in.
    pub(crate) fn work(&self) -> Result<TempDir> {
        tempfile::Builder::new()
            .prefix(WORK_PREFIX)
            .tempdir_in(&self.folder)
            .with_context(|| format!("cannot create a folder in {}", self.folder.display()))
    }

    /// Makes what was built in `out` the entry, in place of a damaged one.
    pub(crate) fn keep(&self, out: &Path, entry: &Path) -> Result<()> {
        if entry.exists() {
            fs::remove_dir_all(entry)
                .with_context(|| format!("cannot remove the damaged {}", entry.display()))?;
        }
        fs::rename(out, entry).with_context(|| format!("cannot create {}", entry.display()))
    }
}

/// The name of an entry.
pub(crate) fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length first, so that no two lists of parts hash alike.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Applies a patch; one that does not fit is an error, never a fuzzy match.
pub(crate) fn patch(tree: &Path, patch: &Path) -> Result<()> {
    sh::output(
        Command::new("patch")
            .args(["-p1", "--batch", "--forward", "--fuzz=0", "-i"])
            .arg(patch)
            .current_dir(tree),
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_build_left_is_removed_and_entries_stay() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["building-x", "entry"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let _cache = Cache::lock(folder.path().to_owned()).unwrap();
        assert!(!folder.path().join("building-x").exists());
        assert!(folder.path().join("entry").exists());
    }

    #[test]
    fn parts_are_told_apart() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
    }
}
