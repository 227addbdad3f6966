//! Takes a file that came out of a sandbox into a private folder, under a name of the host's own, so
//! that it can be given out later whatever its path was.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use sha2::{Digest, Sha256};

use super::inspect::open_file;
use super::walk::{fd_path, open_folder, retrying};
use crate::image::hex;

/// A regular file that came out of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Released {
    /// Path below the output folder, byte for byte.
    pub(crate) path: Vec<u8>,
    /// Bytes.
    pub(crate) size: u64,
    /// SHA-256 in lower-case hex, if it was read.
    pub(crate) sha256: Option<String>,
}

/// Whether the folder that a file comes from may lose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// It is on the same file system, and nobody else's.
    Move,
    /// It is somebody's.
    Copy,
}

/// A private folder's own file.
pub(crate) fn open_kept(folder: impl AsFd, name: &CStr) -> io::Result<File> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // NONBLOCK: whatever it is, opening it must not hold us.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = retrying(|| rustix::fs::openat2(&folder, name, flags, Mode::empty(), resolve))?;
    let file = File::from(file);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("no regular file")) }
}

/// Takes `file` out of `root` into `folder` as `name`, readable by its owner alone, and gives its
/// digest. Nothing is left of a file that cannot be taken. Call it when nothing writes to it any more.
///
/// # Errors
/// It is not there any more, has another size, or cannot be read; or there is no room for it.
pub(crate) fn keep(
    root: impl AsFd,
    file: &Released,
    folder: &OwnedFd,
    name: &CStr,
    how: How,
) -> io::Result<String> {
    let result = match how {
        How::Move => shift(root, file, folder, name),
        How::Copy => copy(root, file, folder, name),
    };
    if result.is_err() {
        // Not there, or nobody's business.
        let _ = rustix::fs::unlinkat(folder, name, rustix::fs::AtFlags::empty());
    }
    result
}

/// The folder of a file, and its name there.
fn place(root: impl AsFd, file: &Released) -> io::Result<(OwnedFd, CString)> {
    let path = file.path.as_slice();
    let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(slash) => path.split_at_checked(slash.saturating_add(1)).unwrap_or((b"", path)),
        None => (&b"."[..], path),
    };
    Ok((open_folder(root, &CString::new(parent)?)?, CString::new(name)?))
}

fn shift(root: impl AsFd, file: &Released, folder: &OwnedFd, name: &CStr) -> io::Result<String> {
    let (from, there) = place(root, file)?;
    rustix::fs::renameat(&from, &there, folder, name)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let moved = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&moved)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("no regular file"));
    }
    // The guest may have closed it to its owner, or opened it to all.
    rustix::fs::chmod(fd_path(&moved), Mode::RUSR | Mode::WUSR)?;
    let kept = open_kept(folder, name)?;
    match &file.sha256 {
        Some(sha256) if kept.metadata()?.len() == file.size => Ok(sha256.clone()),
        _ => through(&kept, file.size, &mut io::sink()),
    }
}

fn copy(root: impl AsFd, file: &Released, folder: &OwnedFd, name: &CStr) -> io::Result<String> {
    let (from, there) = place(root, file)?;
    let source = open_file(&from, &there)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = rustix::fs::openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?;
    through(&source, file.size, &mut File::from(target))
}

/// Passes all `size` bytes of a file on, and gives their digest.
fn through(mut source: &File, size: u64, target: &mut impl Write) -> io::Result<String> {
    let changed = || io::Error::other("it has changed since it was looked at");
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    let mut left = size;
    loop {
        let n = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        left = u64::try_from(n).ok().and_then(|n| left.checked_sub(n)).ok_or_else(changed)?;
        let part = buffer.get(..n).unwrap_or_default();
        hash.update(part);
        target.write_all(part)?;
    }
    if left > 0 { Err(changed()) } else { Ok(hex(&hash.finalize())) }
}
