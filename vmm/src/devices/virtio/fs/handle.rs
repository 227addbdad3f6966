//! Open files and folders of the guest.
//!
//! A handle belongs to one node, and requests must name both. Numbers are never used again. Handles of
//! one file share descriptors where they can, since the place in a file comes with each request. The
//! tables are bounded: beyond that, opens fail with `ENFILE`.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::record::Place;

/// How much the guest may hold open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Most handles.
    pub(super) handles: usize,
    /// Most descriptors of this process for them.
    pub(super) descriptors: usize,
}

impl Limits {
    /// With those of [`super::reach`], fewer than 1,024 descriptors.
    pub(super) const NORMAL: Self = Self { handles: 8192, descriptors: 768 };
}

/// What is open.
#[derive(Debug)]
pub(super) enum Open {
    /// A regular file.
    File(OpenFile),
    /// A folder of a share.
    Dir {
        /// Opened for listing.
        fd: Arc<OwnedFd>,
        /// Where the descriptor stands: the cookie of the next entry.
        position: u64,
    },
    /// The synthetic root.
    Root,
}

/// A regular file that is open.
#[derive(Clone, Debug)]
pub(super) struct OpenFile {
    /// Opened with at least the access below.
    pub(super) fd: Arc<OwnedFd>,
    /// Whether it may be read.
    pub(super) readable: bool,
    /// Whether it may be written.
    pub(super) writable: bool,
    /// Where its use is recorded, if it is.
    pub(super) place: Option<Place>,
}

impl Open {
    fn fd(&self) -> Option<&Arc<OwnedFd>> {
        match self {
            Self::File(OpenFile { fd, .. }) | Self::Dir { fd, .. } => Some(fd),
            Self::Root => None,
        }
    }
}

#[derive(Debug)]
struct Handle {
    node: u64,
    open: Open,
}

/// A descriptor, and what handles may do with it.
#[derive(Debug)]
struct Shared {
    fd: Arc<OwnedFd>,
    readable: bool,
    writable: bool,
    handles: usize,
}

/// All handles.
#[derive(Debug)]
pub(super) struct Handles {
    by_id: HashMap<u64, Handle>,
    by_node: HashMap<u64, Vec<Shared>>,
    descriptors: usize,
    next: u64,
    limits: Limits,
}

impl Handles {
    /// An empty table.
    pub(super) fn new(limits: Limits) -> Self {
        let (by_id, by_node) = (HashMap::new(), HashMap::new());
        Self { by_id, by_node, descriptors: 0, next: 1, limits }
    }

    /// Fails with `ENFILE` if there is no room for one more descriptor and handle.
    pub(super) fn check_room(&self) -> Result<(), Errno> {
        self.check_handles()?;
        if self.descriptors >= self.limits.descriptors { Err(Errno::NFILE) } else { Ok(()) }
    }

    fn check_handles(&self) -> Result<(), Errno> {
        if self.by_id.len() >= self.limits.handles { Err(Errno::NFILE) } else { Ok(()) }
    }

    /// Adds one and returns its number.
    pub(super) fn insert(&mut self, node: u64, open: Open) -> Result<u64, Errno> {
        self.check_handles()?;
        let id = self.next;
        self.next = id.checked_add(1).ok_or(Errno::NFILE)?;
        if let Some(fd) = open.fd() {
            let list = self.by_node.entry(node).or_default();
            if let Some(shared) = list.iter_mut().find(|shared| Arc::ptr_eq(&shared.fd, fd)) {
                shared.handles = shared.handles.saturating_add(1);
            } else {
                let (readable, writable) = match &open {
                    Open::File(file) => (file.readable, file.writable),
                    Open::Dir { .. } | Open::Root => (false, false),
                };
                list.push(Shared { fd: fd.clone(), readable, writable, handles: 1 });
                self.descriptors = self.descriptors.saturating_add(1);
            }
        }
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
    pub(super) fn file(&self, id: u64, node: u64) -> Result<&OpenFile, Errno> {
        match self.get(id, node)? {
            Open::File(file) => Ok(file),
            Open::Dir { .. } | Open::Root => Err(Errno::ISDIR),
        }
    }

    /// As [`Self::file`], and `EBADF` if the handle may not read.
    pub(super) fn readable_file(&self, id: u64, node: u64) -> Result<&OpenFile, Errno> {
        self.file(id, node).and_then(|file| if file.readable { Ok(file) } else { Err(Errno::BADF) })
    }

    /// As [`Self::get`], and `EBADF` if it is no regular file or the handle may not write.
    pub(super) fn writable_file(&self, id: u64, node: u64) -> Result<&OpenFile, Errno> {
        match self.get(id, node)? {
            Open::File(file) if file.writable => Ok(file),
            _ => Err(Errno::BADF),
        }
    }

    /// The folder that handle `id` of `node` has open, and where it stands.
    pub(super) fn dir(&mut self, id: u64, node: u64) -> Result<(&Arc<OwnedFd>, &mut u64), Errno> {
        match self.by_id.get_mut(&id) {
            Some(Handle { node: own, open: Open::Dir { fd, position } }) if *own == node => {
                Ok((fd, position))
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
        let open = self.by_id.remove(&id).map(|handle| handle.open).ok_or(Errno::BADF)?;
        if let Some(fd) = open.fd()
            && let Some(list) = self.by_node.get_mut(&node)
        {
            if let Some(at) = list.iter().position(|shared| Arc::ptr_eq(&shared.fd, fd))
                && let Some(shared) = list.get_mut(at)
            {
                shared.handles = shared.handles.saturating_sub(1);
                if shared.handles == 0 {
                    list.swap_remove(at);
                    self.descriptors = self.descriptors.saturating_sub(1);
                }
            }
            if list.is_empty() {
                self.by_node.remove(&node);
            }
        }
        Ok(open)
    }

    /// A descriptor by which `node` is open already and that allows at least the given access.
    pub(super) fn shared(&self, node: u64, read: bool, write: bool) -> Option<Arc<OwnedFd>> {
        let allows = |shared: &&Shared| {
            (shared.readable || !read) && (shared.writable || !write) && (read || write)
        };
        self.by_node.get(&node)?.iter().find(allows).map(|shared| shared.fd.clone())
    }

    /// Any descriptor by which `node` is open: it leads to the very file, whatever has become of its
    /// names.
    pub(super) fn any_of(&self, node: u64) -> Option<&Arc<OwnedFd>> {
        self.by_node.get(&node)?.first().map(|shared| &shared.fd)
    }

    /// Closes all.
    pub(super) fn clear(&mut self) {
        self.by_id.clear();
        self.by_node.clear();
        self.descriptors = 0;
    }

    /// How many descriptors there are.
    #[cfg(test)]
    pub(super) fn descriptors(&self) -> usize {
        self.descriptors
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Arc<OwnedFd> {
        Arc::new(tempfile::tempfile().unwrap().into())
    }

    #[test]
    fn a_handle_is_good_for_its_own_node_only_and_only_once() {
        let mut handles = Handles::new(Limits { handles: 2, descriptors: 2 });
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

    #[test]
    fn handles_of_a_file_share_a_descriptor_that_allows_enough() {
        let mut handles = Handles::new(Limits { handles: 10, descriptors: 2 });
        let open = |fd: &Arc<OwnedFd>, readable, writable| {
            Open::File(OpenFile { fd: fd.clone(), readable, writable, place: None })
        };
        let (both, other) = (file(), file());
        let first = handles.insert(5, open(&both, true, true)).unwrap();
        assert!(handles.shared(6, true, false).is_none());
        let shared = handles.shared(5, true, false).unwrap();
        assert!(Arc::ptr_eq(&shared, &both));
        let second = handles.insert(5, open(&shared, true, false)).unwrap();
        assert_eq!(handles.descriptors(), 1);
        assert!(handles.writable_file(second, 5).is_err(), "each has its own access");
        assert!(handles.readable_file(second, 5).is_ok());
        handles.insert(6, open(&other, false, true)).unwrap();
        assert!(handles.shared(6, true, false).is_none());
        assert_eq!(handles.check_room(), Err(Errno::NFILE));
        handles.remove(first, 5).unwrap();
        assert!(handles.any_of(5).is_some());
        handles.remove(second, 5).unwrap();
        assert!(handles.any_of(5).is_none());
        assert_eq!(handles.descriptors(), 1);
    }
}
