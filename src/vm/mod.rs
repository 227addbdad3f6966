//! One microVM as its parent sees it: a process, and a control socket to it.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

pub(crate) mod capacity;
pub(crate) mod control;
pub(crate) mod scratch;
pub(crate) mod spawn;

/// Registers a descriptor with the caller's tokio runtime.
pub(crate) fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open for as long as it lives, its number never changes, and the AsyncFd
    // owns it; nothing here replaces the file behind the number.
    let registered = unsafe { AsyncFd::register(fd) };
    registered.map_err(|e| e.into_parts().1)
}
