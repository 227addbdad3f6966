//! Files of the cache and of `CASULO_HOME`: appear whole or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// SHA-256 in lower-case hex.
pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// SHA-256 of a file, and its size.
pub(crate) fn digest_file(path: &Path) -> Result<(String, u64)> {
    let mut file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut size = 0;
    loop {
        let n =
            file.read(&mut buffer).with_context(|| format!("cannot read {}", path.display()))?;
        if n == 0 {
            return Ok((format!("{:x}", hash.finalize()), size));
        }
        hash.update(buffer.get(..n).unwrap_or_default());
        size += n as u64;
    }
}

/// Passes bytes on and hashes them.
struct Hashing<W> {
    out: W,
    hash: Sha256,
    size: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hash.update(bytes.get(..n).unwrap_or_default());
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes a file through a function and gives its SHA-256 and size. The file is read-only: it may be
/// linked into `CASULO_HOME`.
pub(crate) fn create(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<(String, u64)> {
    let failed = || format!("cannot write {}", path.display());
    let temporary = temporary(path);
    let file = File::create(&temporary).with_context(failed)?;
    let mut out =
        Hashing { out: BufWriter::with_capacity(1 << 20, file), hash: Sha256::new(), size: 0 };
    let result = write(&mut out).and_then(|()| Ok(out.flush()?)).with_context(failed);
    if let Err(error) = result {
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o444)).with_context(failed)?;
    fs::rename(&temporary, path).with_context(failed)?;
    Ok((format!("{:x}", out.hash.finalize()), out.size))
}

/// Puts bytes into a file, unless they are there already.
pub(crate) fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    create(path, |out| Ok(out.write_all(bytes)?)).map(drop)
}

/// Links a file, or copies it from another file system.
pub(crate) fn place(from: &Path, to: &Path) -> Result<()> {
    let failed = || format!("cannot write {}", to.display());
    let temporary = temporary(to);
    let _ = fs::remove_file(&temporary);
    if fs::hard_link(from, &temporary).is_err() {
        if let Err(error) = fs::copy(from, &temporary) {
            let _ = fs::remove_file(&temporary);
            return Err(error).with_context(failed);
        }
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o444)).with_context(failed)?;
    }
    let renamed = fs::rename(&temporary, to).with_context(failed);
    // Between two links of one file rename does nothing.
    let _ = fs::remove_file(&temporary);
    renamed
}

/// Makes a symbolic link or points it elsewhere.
pub(crate) fn point(link: &Path, target: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|old| old == target) {
        return Ok(());
    }
    let temporary = temporary(link);
    let _ = fs::remove_file(&temporary);
    symlink(target, &temporary)
        .and_then(|()| fs::rename(&temporary, link))
        .with_context(|| format!("cannot make the link {}", link.display()))
}

/// Makes a folder and those above it.
pub(crate) fn folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

fn temporary(path: &Path) -> std::path::PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_appear_whole_read_only_and_with_their_digest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (sha256, size) = create(&path, |out| Ok(out.write_all(b"abc")?)).unwrap();
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!((sha256.clone(), size), digest_file(&path).unwrap());
        assert_eq!(sha256, digest(b"abc"));
        assert!(fs::metadata(&path).unwrap().permissions().readonly());
        let failed = create(&path, |out| {
            out.write_all(b"half")?;
            anyhow::bail!("stop")
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"abc");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half-made is left");
    }

    #[test]
    fn placing_and_pointing_twice_leaves_one() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to, link) =
            (folder.path().join("from"), folder.path().join("to"), folder.path().join("link"));
        put(&from, b"abc").unwrap();
        for target in ["to", "to", "from"] {
            place(&from, &to).unwrap();
            point(&link, Path::new(target)).unwrap();
            assert_eq!(fs::read_link(&link).unwrap(), Path::new(target));
        }
        assert_eq!(fs::read(&to).unwrap(), b"abc");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
