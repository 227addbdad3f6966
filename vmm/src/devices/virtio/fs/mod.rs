//! The virtio-fs device: the shares of a VM, served by a FUSE server in this process.
//!
//! There is one device with one file system. Its root is synthetic; the children of the root are the
//! shares, each marked as a mount of its own (`FUSE_ATTR_SUBMOUNT`). What a share allows is decided
//! and enforced here, whatever the guest has mounted how.
//!
//! The guest, kernel included, is hostile. Four rules keep it inside of its shares:
//!
//! 1. Every name is checked first ([`names`]): one component, never `..`.
//! 2. Every lookup opens exactly that component, relative to the descriptor of the folder, with
//!    `openat2` and `RESOLVE_BENEATH`, `NO_SYMLINKS`, `NO_MAGICLINKS`, `NO_XDEV`. What came out is
//!    judged by its own descriptor (`statx`, `AT_EMPTY_PATH`), never by its name again. Mount points
//!    below a share's root are not entered (`EXDEV`): a share is one file system, so that nothing that
//!    is mounted later becomes visible.
//! 3. Only regular files and folders are ever opened for data, and only such are made (and symbolic
//!    links, which the host never follows). Set-id bits are never set, and are taken away from a file
//!    that the guest opens for writing.
//! 4. Tables, sizes and counts are bounded; file data goes straight between file and guest memory.
//!
//! A folder that something on the host moves out of a share stays reachable for the guest, with what is in
//! it, as long as the guest has it open or used it lately; nothing beside or above it does.
//!
//! **Owner.** Everything appears as owned by the share's guest user; on the host it belongs to the
//! user of this process. `chown` to that guest user and group succeeds and does nothing, to others it
//! is `EPERM`. Permission bits are the host's own; the guest kernel checks them for its users, and the
//! host checks them for this process.
//!
//! **Caching.** A share of which the host promises that nothing else changes it lets the guest keep
//! names, attributes, listings and pages for an hour. In other shares the guest keeps names and
//! attributes for one second and looks at a file's pages anew at each open. There is no write-back
//! cache: what `write` accepted is in the host's file. `SYNCFS` therefore has nothing to do here, and
//! does not let a guest flush the host's whole file system; `FSYNC` reaches the host's `fsync`.
//!
//! **Locks** are local to the guest, and FIFOs, sockets and devices are refused (`EPERM`). Extended
//! attributes are served where the share asks for them, and then only `user.*`.
//!
//! **Bounds.** The guest may know 57,344 files and hold 768 different files or folders open; nodes hold
//! no descriptors ([`reach`]). Beyond that it meets `ENFILE`. Of a share that does not change it may read
//! without opening ([`unopened`]).
//!
//! **Requests.** Casulo's guest kernel saves some, told so by flags that are not upstream (see
//! `kernel-config/patches`): those reads, the request for the end of a listing, and most of those that forget.

use std::os::fd::OwnedFd;

mod abi;
mod change;
mod deferred;
mod device;
mod dir;
mod handle;
mod io;
mod lookup;
mod names;
mod node;
mod quota;
mod reach;
mod record;
mod server;
mod setattr;
mod unopened;
mod wire;
mod xattr;

#[cfg(test)]
mod tests;

pub use device::FsDevice;
pub use record::Record;
pub use server::Server;

/// One share: a child of the root of the file system.
#[derive(Debug)]
pub struct Share {
    /// Name of the child: one path component of 1 to 255 bytes, unlike all others.
    pub name: String,
    /// The folder or regular file, opened `O_PATH`.
    pub root: OwnedFd,
    /// Whether every change is refused with `EROFS`.
    pub read_only: bool,
    /// Most bytes that the guest may add, in allocated blocks and 4 KiB for each name; `None`: no
    /// limit but the host's.
    ///
    /// Writable shares of which one lies inside of the other, or that are the same folder in two mounts,
    /// have one account with the least of their limits. Hard links between shares, and mounts of what lies
    /// deeper, are not noticed: then each share counts for itself.
    pub limit_bytes: Option<u64>,
    /// Most names that the guest may add; `None`: no limit but the host's.
    pub limit_files: Option<u64>,
    /// Whether extended attributes `user.*` are served.
    pub xattr: bool,
    /// Whether nothing else changes the share, so that the guest may cache without asking again.
    pub cache: bool,
    /// User that owns everything in the share, as the guest sees it.
    pub guest_uid: u32,
    /// Group of everything in the share, as the guest sees it.
    pub guest_gid: u32,
}

/// Why the device cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    /// The tag does not fit into the configuration space.
    #[error("the tag {0:?} must have 1 to 36 bytes")]
    Tag(String),
    /// A share's name is no path component, or is used twice.
    #[error("the share name {0:?} must be one path component that no other share has")]
    Name(String),
    /// A share's root cannot be looked at.
    #[error("share {name}: its descriptor cannot be read: {error}")]
    Root {
        /// Name of the share.
        name: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// A share's root is neither a folder nor a regular file.
    #[error("share {0}: only a folder or a regular file can be shared")]
    Kind(String),
}
