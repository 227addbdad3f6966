//! Reading without OPEN and OPENDIR.
//!
//! The guest's kernel opens what everybody may read of a share that does not change itself, and reads
//! with the handle 0 (`FUSE_ATTR_NO_OPEN`, a patch in `kernel-config`): two requests less for each file.
//! Here the descriptors for that are kept, those that were used last. A guest without the patch opens
//! files as ever.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::abi::flag;
use super::handle::{Open, OpenFile};
use super::io::Access;
use super::lookup::PERMISSIONS;
use super::server::{Server, ShareState};

/// The handle with which the guest reads what it has opened itself. No other handle has this number.
pub(super) const NO_HANDLE: u64 = 0;
/// Most descriptors that are kept.
pub(super) const MAX_KEPT: usize = 32;

/// Descriptors of files and folders, that which was used last at the end.
#[derive(Debug)]
pub(super) struct Unopened {
    kept: Vec<(u64, Open)>,
    most: usize,
}

impl Unopened {
    /// Room for `most`, at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { kept: Vec::new(), most: most.max(1) }
    }

    fn get(&mut self, id: u64) -> Option<&mut Open> {
        let at = self.kept.iter().rposition(|(kept, _)| *kept == id)?;
        if let Some(rest) = self.kept.get_mut(at..) {
            rest.rotate_left(1);
        }
        self.kept.last_mut().map(|(_, open)| open)
    }

    fn insert(&mut self, id: u64, open: Open) {
        if self.kept.len() >= self.most {
            self.kept.remove(0);
        }
        self.kept.push((id, open));
    }

    /// A node is gone.
    pub(super) fn remove(&mut self, id: u64) {
        self.kept.retain(|(kept, _)| *kept != id);
    }

    /// Closes all.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }
}

impl ShareState {
    /// Whether the guest may read without a handle.
    pub(super) fn is_fixed(&self) -> bool {
        self.cache && self.read_only
    }

    /// The flag that tells the guest so, for a file that can be opened for certain.
    pub(super) fn no_open(&self, mode: u32) -> u32 {
        let (file, folder) = (0o444, 0o555);
        let readable = match FileType::from_raw_mode(mode) {
            FileType::RegularFile => mode & PERMISSIONS & file == file,
            FileType::Directory => mode & PERMISSIONS & folder == folder,
            _ => false,
        };
        if readable && self.is_fixed() { flag::ATTR_NO_OPEN } else { 0 }
    }
}

impl Server {
    /// The regular file that handle `handle` of node `id` may read.
    pub(super) fn readable_file(&mut self, handle: u64, id: u64) -> Result<OpenFile, Errno> {
        if handle != NO_HANDLE {
            return self.handles.readable_file(handle, id).cloned();
        }
        match self.unopened(id)? {
            Open::File(file) => Ok(file.clone()),
            Open::Dir { .. } | Open::Root => Err(Errno::ISDIR),
        }
    }

    /// The folder that handle `handle` of node `id` has open, and where it stands.
    pub(super) fn listed_dir(
        &mut self,
        handle: u64,
        id: u64,
    ) -> Result<(&Arc<OwnedFd>, &mut u64), Errno> {
        if handle != NO_HANDLE {
            return self.handles.dir(handle, id);
        }
        match self.unopened(id)? {
            Open::Dir { fd, position } => Ok((fd, position)),
            Open::File(_) | Open::Root => Err(Errno::NOTDIR),
        }
    }

    /// What is open of node `id` without a handle.
    ///
    /// # Errors
    /// `EBADF` if its share may change.
    fn unopened(&mut self, id: u64) -> Result<&mut Open, Errno> {
        let node = self.nodes.get(id).map_err(|_| Errno::BADF)?;
        if !self.share(node)?.is_fixed() {
            return Err(Errno::BADF);
        }
        if self.unopened.get(id).is_none() {
            let open = match self.nodes.get(id)?.kind {
                FileType::Directory => Open::Dir { fd: self.open_dir(id)?, position: 0 },
                _ => Open::File(self.open_as(id, Access::READ)?),
            };
            self.unopened.insert(id, open);
        }
        self.unopened.get(id).ok_or(Errno::BADF)
    }
}
