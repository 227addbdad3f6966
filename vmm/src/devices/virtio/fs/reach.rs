//! From nodes to files: what is open, what was used lately, or the place where the file was last seen.
//!
//! Path descriptors of the folders that were used last are kept, at most [`MAX_PATHS`]. A file that has
//! been moved or replaced by something on the host, and that neither is open nor has its folder here, is
//! `ESTALE`: then the guest's kernel looks the path up again.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Statx, openat2};
use rustix::io::Errno;

use super::abi::ROOT_ID;
use super::names::Name;
use super::node::{Node, stat_child, stat_fd};
use super::server::{Server, ShareState};

/// Most path descriptors of folders that are kept.
pub(super) const MAX_PATHS: usize = 192;

/// How one component of a path is resolved (see the module's text).
pub(super) const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Path descriptors of folders, by their nodes.
#[derive(Debug)]
pub(super) struct Paths {
    by_id: HashMap<u64, Kept>,
    /// Counts uses.
    clock: u64,
    most: usize,
}

#[derive(Debug)]
struct Kept {
    fd: Arc<OwnedFd>,
    used: u64,
}

impl Paths {
    /// Room for `most`, at least one.
    pub(super) fn new(most: usize) -> Self {
        Self { by_id: HashMap::new(), clock: 0, most: most.max(1) }
    }

    fn get(&mut self, id: u64) -> Option<Arc<OwnedFd>> {
        let kept = self.by_id.get_mut(&id)?;
        self.clock = self.clock.saturating_add(1);
        kept.used = self.clock;
        Some(kept.fd.clone())
    }

    /// Keeps one more, and gives up the one that was not used for longest.
    fn insert(&mut self, id: u64, fd: Arc<OwnedFd>) {
        if self.by_id.len() >= self.most
            && let Some(oldest) = self.by_id.iter().min_by_key(|(_, kept)| kept.used)
        {
            let oldest = *oldest.0;
            self.by_id.remove(&oldest);
        }
        self.clock = self.clock.saturating_add(1);
        self.by_id.insert(id, Kept { fd, used: self.clock });
    }

    /// A node is gone.
    pub(super) fn remove(&mut self, id: u64) {
        self.by_id.remove(&id);
    }

    /// Closes all.
    pub(super) fn clear(&mut self) {
        self.by_id.clear();
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}

/// Opens a child of a folder as a path.
fn open_child(folder: impl AsFd, name: &Name) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(folder, name.as_c_str(), flags, Mode::empty(), RESOLVE)
}

/// What a place that no longer holds the file answers.
fn stale(error: Errno) -> Errno {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV => Errno::STALE,
        other => other,
    }
}

impl ShareState {
    /// Attributes of a child of one of its folders.
    ///
    /// # Errors
    /// `EXDEV` if something is mounted there.
    pub(super) fn stat_child(&self, folder: &OwnedFd, name: &Name) -> Result<Statx, Errno> {
        let stat = stat_child(folder.as_fd(), name)?;
        if stat.stx_mnt_id == self.mount { Ok(stat) } else { Err(Errno::XDEV) }
    }
}

impl Server {
    /// Node `id`, which is a folder of a share.
    pub(super) fn folder(&self, id: u64) -> Result<&Node, Errno> {
        if id == ROOT_ID {
            return Err(Errno::STALE);
        }
        let node = self.nodes.get(id)?;
        if node.kind == FileType::Directory { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    /// A descriptor at hand that is open on the node in some way.
    fn at_hand(&mut self, id: u64) -> Result<Option<Arc<OwnedFd>>, Errno> {
        if let Some(root) = self.nodes.get(id)?.root() {
            return Ok(Some(root.clone()));
        }
        Ok(self.handles.any_of(id).cloned().or_else(|| self.paths.get(id)))
    }

    /// A descriptor that is open on the node, good for everything but data.
    ///
    /// # Errors
    /// `ESTALE` if there is no such node, or the file is not where it was.
    pub(super) fn reach(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(fd) = self.at_hand(id)? {
            return Ok(fd);
        }
        let chain = self.nodes.ancestors(id).ok_or(Errno::STALE)?;
        let mut missing = Vec::new();
        let mut found = None;
        for id in chain {
            found = self.at_hand(id)?;
            if found.is_some() {
                break;
            }
            missing.push(id);
        }
        // The chain ends at the root of a share, which is always at hand.
        let mut fd = found.ok_or(Errno::STALE)?;
        for id in missing.into_iter().rev() {
            fd = self.descend(&fd, id)?;
        }
        Ok(fd)
    }

    /// Opens a node in its folder.
    fn descend(&mut self, folder: &OwnedFd, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        let node = self.nodes.get(id)?;
        let (_, name) = node.place().ok_or(Errno::STALE)?;
        let fd = Arc::new(open_child(folder, name).map_err(stale)?);
        if !node.is(&stat_fd(&fd)?) {
            return Err(Errno::STALE);
        }
        if node.kind == FileType::Directory {
            self.paths.insert(id, fd.clone());
        }
        Ok(fd)
    }

    /// Attributes of a node now.
    ///
    /// # Errors
    /// As [`Self::reach`].
    pub(super) fn stat(&mut self, id: u64) -> Result<Statx, Errno> {
        if let Some(fd) = self.at_hand(id)? {
            return stat_fd(fd);
        }
        let parent = self.nodes.get(id)?.place().ok_or(Errno::STALE)?.0;
        let folder = self.reach(parent)?;
        let node = self.nodes.get(id)?;
        let (_, name) = node.place().ok_or(Errno::STALE)?;
        let stat = self.share(node)?.stat_child(&folder, name).map_err(stale)?;
        if node.is(&stat) { Ok(stat) } else { Err(Errno::STALE) }
    }

    /// A folder that is about to lose its name stays reachable as long as its descriptor is kept: a
    /// program may still stand in it.
    pub(super) fn keep_folder(&mut self, id: u64) {
        // If it cannot be reached now, it could not later.
        let _ = self.reach(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut paths = Paths::new(2);
        let fd = || Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        paths.insert(1, fd());
        paths.insert(2, fd());
        assert!(paths.get(1).is_some());
        paths.insert(3, fd());
        assert!(paths.get(2).is_none());
        assert!(paths.get(1).is_some() && paths.get(3).is_some());
        assert_eq!(paths.len(), 2);
    }
}
