//! A folder for one process's own use, which is removed with it.
//!
//! It is private and has a name that cannot be guessed. A lock tells a folder in use from one whose owner
//! was killed; the latter is removed when the next one with this prefix is made in the same place.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::walk::remove;
use crate::image::hex;
use crate::runtime::random;

/// A private folder. Dropping it removes it, with all that it holds.
#[derive(Debug)]
pub(crate) struct PrivateFolder {
    parent: OwnedFd,
    name: CString,
    root: OwnedFd,
}

impl PrivateFolder {
    /// Makes one in `parent` whose name begins with `prefix`, and removes those that nobody uses any
    /// more.
    pub(crate) fn new(parent: OwnedFd, prefix: &[u8]) -> io::Result<Self> {
        sweep(&parent, prefix);
        loop {
            let token = random::<16>().map_err(io::Error::other)?;
            let name = CString::new([prefix, hex(&token).as_bytes()].concat())?;
            rustix::fs::mkdirat(&parent, &name, Mode::RWXU)?;
            if let Some(root) = lock(&parent, &name)? {
                return Ok(Self { parent, name, root });
            }
            // Another process took it for one that nobody uses.
        }
    }

    /// The folder itself.
    pub(crate) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// The folder that it is in.
    pub(crate) fn parent(&self) -> &OwnedFd {
        &self.parent
    }

    /// Its name there.
    #[cfg(feature = "gateway")]
    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }
}

impl PrivateFolder {
    /// Removes it now. What cannot be removed is removed by the next one in this place.
    pub(crate) fn clear(&self) {
        let _ = remove(&self.parent, &self.name);
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Opens and locks a private folder; `None` when somebody else has it, or it is gone.
fn lock(parent: &OwnedFd, name: &CStr) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    match rustix::fs::flock(&root, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    let ours = rustix::fs::fstat(&root)?;
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) => Ok(Some(root)),
        _ => Ok(None),
    }
}

/// Removes private folders whose owners are gone.
fn sweep(parent: &OwnedFd, prefix: &[u8]) {
    // On 9p a lock tells nothing of the other side's tasks.
    if super::is_9p(parent) {
        return;
    }
    let Ok(entries) = Dir::read_from(parent) else { return };
    let names = entries.flatten().map(|entry| entry.file_name().to_owned());
    let stale: Vec<CString> = names.filter(|name| name.to_bytes().starts_with(prefix)).collect();
    for name in stale {
        if let Ok(Some(_lock)) = lock(parent, &name) {
            let _ = remove(parent, &name);
        }
    }
}
