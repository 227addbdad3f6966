//! Open files and folders of the guest.
//!
//! A handle belongs to one node, and requests must name both. Numbers are never used again. The table
//! is bounded: beyond [`MAX_HANDLES`], opens fail with `ENFILE`.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::record::Place;

/// Most handles at a time; each holds one descriptor.
pub(super) const MAX_HANDLES: usize = 16_384;

/// What is open.
#[derive(Debug)]
pub(super) enum Open {
    /// A regular file.
    File {
        /// Opened with the access that the guest asked for.
        fd: OwnedFd,
        /// Whether it may be written.
        writable: bool,
        /// Where its use is recorded, if it is.
        place: Option<Place>,
    },
    /// A folder of a share.
    Dir {
        /// Opened for listing.
        fd: OwnedFd,
        /// Where the descriptor stands: the cookie of the next entry.
        position: u64,
    },
    /// The synthetic root.
    Root,
}

#[derive(Debug)]
struct Handle {
    node: u64,
    open: Open,
}

/// All handles.
#[derive(Debug)]
pub(super) struct Handles {
    by_id: HashMap<u64, Handle>,
    next: u64,
    most: usize,
}

impl Handles {
    /// An empty table for at most `most` handles.
    pub(super) fn new(most: usize) -> Self {
        Self { by_id: HashMap::new(), next: 1, most }
    }

    /// Fails with `ENFILE` if there is no room for one more.
    pub(super) fn check_room(&self) -> Result<(), Errno> {
        if self.by_id.len() >= self.most { Err(Errno::NFILE) } else { Ok(()) }
    }

    /// Adds one and returns its number.
    pub(super) fn insert(&mut self, node: u64, open: Open) -> Result<u64, Errno> {
        self.check_room()?;
        let id = self.next;
        self.next = id.checked_add(1).ok_or(Errno::NFILE)?;
        self.by_id.insert(id, Handle { node, open });
        Ok(id)
    }

    /// What handle `id` of `node` has open.
    ///
    /// # Errors
    /// `EBADF` if there is none, or if it is another node's.
    pub(super) fn get(&self, id: u64, node: u64) -> Result<&Open, Errno> {
        match self.by_id.get(&id) {
            Some(handle) if handle.node == node => Ok(&handle.open),
            _ => Err(Errno::BADF),
        }
    }

    /// The regular file that handle `id` of `node` has open.
    ///
    /// # Errors
    /// `EISDIR` if it is a folder, else as [`Self::get`].
    pub(super) fn file(&self, id: u64, node: u64) -> Result<BorrowedFd<'_>, Errno> {
        match self.get(id, node)? {
            Open::File { fd, .. } => Ok(fd.as_fd()),
            Open::Dir { .. } | Open::Root => Err(Errno::ISDIR),
        }
    }

    /// As [`Self::file`], and `EBADF` if the handle may not write.
    pub(super) fn writable_file(&self, id: u64, node: u64) -> Result<BorrowedFd<'_>, Errno> {
        match self.get(id, node)? {
            Open::File { fd, writable: true, .. } => Ok(fd.as_fd()),
            _ => Err(Errno::BADF),
        }
    }

    /// Where the use of the file that handle `id` has open is recorded.
    pub(super) fn place(&self, id: u64) -> Option<Place> {
        match self.by_id.get(&id)?.open {
            Open::File { place, .. } => place,
            Open::Dir { .. } | Open::Root => None,
        }
    }

    /// The folder that handle `id` of `node` has open, and where it stands.
    pub(super) fn dir(&mut self, id: u64, node: u64) -> Result<(BorrowedFd<'_>, &mut u64), Errno> {
        match self.by_id.get_mut(&id) {
            Some(Handle { node: own, open: Open::Dir { fd, position } }) if *own == node => {
                Ok((OwnedFd::as_fd(fd), position))
            }
            Some(Handle { node: own, .. }) if *own == node => Err(Errno::NOTDIR),
            _ => Err(Errno::BADF),
        }
    }

    /// Closes a handle.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn remove(&mut self, id: u64, node: u64) -> Result<Open, Errno> {
        self.get(id, node)?;
        self.by_id.remove(&id).map(|handle| handle.open).ok_or(Errno::BADF)
    }

    /// Any regular file that is open on `node`: where the host's file system cannot look at an
    /// unlinked file by its path descriptor, an open descriptor may still do.
    pub(super) fn any_file_of(&self, node: u64) -> Option<BorrowedFd<'_>> {
        self.by_id.values().find_map(|handle| match &handle.open {
            Open::File { fd, .. } if handle.node == node => Some(fd.as_fd()),
            _ => None,
        })
    }

    /// Closes all.
    pub(super) fn clear(&mut self) {
        self.by_id.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_for_its_own_node_only_and_only_once() {
        let mut handles = Handles::new(2);
        let id = handles.insert(5, Open::Root).unwrap();
        assert!(handles.get(id, 5).is_ok());
        assert_eq!(handles.get(id, 6).unwrap_err(), Errno::BADF);
        assert_eq!(handles.get(id + 1, 5).unwrap_err(), Errno::BADF);
        assert_eq!(handles.file(id, 5).unwrap_err(), Errno::ISDIR);
        assert_eq!(handles.remove(id, 6).unwrap_err(), Errno::BADF);
        assert!(handles.remove(id, 5).is_ok());
        assert_eq!(handles.remove(id, 5).unwrap_err(), Errno::BADF);
        let again = handles.insert(5, Open::Root).unwrap();
        assert_ne!(again, id);
        handles.insert(5, Open::Root).unwrap();
        assert_eq!(handles.insert(5, Open::Root).unwrap_err(), Errno::NFILE);
    }
}
