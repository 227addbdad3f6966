//! The scratch disk: a sparse file without a name, formatted as ext4.
//!
//! It lies on a disk and not in memory, and has no name from the start, so that it is gone with the
//! last process that holds it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};

use crate::error::Error;

/// Smallest scratch disk in MiB.
pub(crate) const MIN_MIB: u32 = 8;

/// Makes a scratch disk in the first of `folders` that can hold files without a name.
pub(crate) fn make(folders: &[PathBuf], size_mib: u32) -> Result<OwnedFd, Error> {
    let file = unnamed(folders)?;
    let bytes = u64::from(size_mib).saturating_mul(1 << 20);
    file.set_len(bytes).map_err(|e| Error::Scratch(format!("cannot set its size: {e}")))?;
    format(&file)?;
    Ok(file.into())
}

fn unnamed(folders: &[PathBuf]) -> Result<File, Error> {
    let mut reasons = Vec::new();
    for folder in folders {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => return Ok(fd.into()),
            Err(e) => reasons.push(format!("{}: {e}", folder.display())),
        }
    }
    Err(Error::Scratch(format!("no folder for it ({})", reasons.join("; "))))
}

/// `mke2fs` by the places where Debian and others put it; an ordinary user's PATH has no `/sbin`.
fn mke2fs() -> Option<PathBuf> {
    let fixed = ["/sbin/mke2fs", "/usr/sbin/mke2fs"].into_iter().map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let searched = std::env::split_paths(&path).map(|p| p.join("mke2fs")).collect::<Vec<_>>();
    fixed.chain(searched).find(|p| Path::is_file(p))
}

fn format(file: &File) -> Result<(), Error> {
    let program = mke2fs().ok_or_else(|| {
        Error::Scratch("mke2fs is missing: install it with `sudo apt-get install e2fsprogs`".into())
    })?;
    let stdin = file.try_clone().map_err(|e| Error::Scratch(e.to_string()))?;
    // The file has no name, so it is handed over as standard input and named through /proc.
    let output = Command::new(&program)
        .args(["-t", "ext4", "-O", "^has_journal", "-m", "0", "-F", "-q"])
        .args(["-E", "lazy_itable_init=1,nodiscard", "/proc/self/fd/0"])
        .env_clear()
        .stdin(Stdio::from(stdin))
        .output()
        .map_err(|e| Error::Scratch(format!("cannot run {}: {e}", program.display())))?;
    if output.status.success() {
        return Ok(());
    }
    let words: String = String::from_utf8_lossy(&output.stderr).chars().take(500).collect();
    Err(Error::Scratch(format!(
        "{} failed ({}): {}",
        program.display(),
        output.status,
        words.trim()
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_formatted_sparse_file_without_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let no = PathBuf::from("/proc/nowhere");
        let file = File::from(make(&[no.clone(), folder.path().to_owned()], 64).unwrap());
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.len(), metadata.nlink()), (64 << 20, 0));
        assert!(metadata.blocks() * 512 < 8 << 20);
        let mut magic = [0; 2];
        file.read_exact_at(&mut magic, 1024 + 56).unwrap();
        assert_eq!(u16::from_le_bytes(magic), 0xef53);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(make(&[no], 64).unwrap_err().to_string().contains("no folder"));
    }
}
