//! The files that the guest knows: node numbers, each with an `O_PATH` descriptor.
//!
//! A node's identity is share, device and inode as read from its own descriptor, so it cannot be
//! swapped for another file. The descriptor keeps the inode alive, so its number is not used again
//! while the node exists; node numbers are never used again. A node lives while the guest holds
//! lookups or handles of it. The table is bounded: beyond [`MAX_NODES`], or the process's own limit of
//! descriptors, lookups fail with `ENFILE`.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use rustix::io::Errno;

use super::abi::ROOT_ID;
use super::names::Name;

/// Most nodes at a time; each holds one descriptor. See [`super::Server::new`] for the limit that binds.
pub(super) const MAX_NODES: usize = 65_536;

/// Most components of a path that is told to anyone. A hostile guest can make a circle of folders.
const MAX_DEPTH: usize = 1024;

/// One file that the guest knows.
#[derive(Debug)]
pub(super) struct Node {
    fd: OwnedFd,
    /// Index of its share.
    pub(super) share: usize,
    /// Type; it never changes.
    pub(super) kind: FileType,
    /// Allocated blocks of 512 bytes that the share's account knows of.
    pub(super) blocks: u64,
    identity: Identity,
    /// Folder in which it was last looked up, 0 for the root of a share, and its name there.
    parent: u64,
    name: Box<[u8]>,
    lookups: u64,
    handles: u64,
    /// A share's root: it stays without lookups.
    pinned: bool,
}

impl Node {
    /// Whether it is the root of its share.
    pub(super) fn is_share_root(&self) -> bool {
        self.pinned
    }

    /// Its attributes now.
    pub(super) fn stat(&self) -> Result<Statx, Errno> {
        stat_fd(self.as_fd())
    }
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What makes two descriptors the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Identity {
    share: usize,
    device: (u32, u32),
    inode: u64,
    /// Part of it because no node may change its type, whatever numbers a file system uses again.
    kind: u32,
}

impl Identity {
    fn new(share: usize, stat: &Statx) -> Self {
        Self {
            share,
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            kind: kind_of(stat).as_raw_mode(),
        }
    }
}

/// Attributes of what `fd` is open on.
pub(super) fn stat_fd(fd: BorrowedFd<'_>) -> Result<Statx, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Type of a file from its attributes.
pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}

/// All nodes but the synthetic root.
#[derive(Debug)]
pub(super) struct Nodes {
    by_id: HashMap<u64, Node>,
    by_identity: HashMap<Identity, u64>,
    next: u64,
    most: usize,
}

impl Nodes {
    /// An empty table for at most `most` nodes.
    pub(super) fn new(most: usize) -> Self {
        Self { by_id: HashMap::new(), by_identity: HashMap::new(), next: ROOT_ID + 1, most }
    }

    /// Adds the root of a share, which stays for ever, and returns its number.
    ///
    /// # Errors
    /// What the system says of the descriptor.
    pub(super) fn add_share_root(&mut self, share: usize, fd: OwnedFd) -> Result<u64, Errno> {
        let stat = stat_fd(fd.as_fd())?;
        self.insert(share, fd, &stat, true)
    }

    /// Whether `id` is a node.
    pub(super) fn get(&self, id: u64) -> Result<&Node, Errno> {
        self.by_id.get(&id).ok_or(Errno::STALE)
    }

    /// See [`Self::get`].
    pub(super) fn get_mut(&mut self, id: u64) -> Result<&mut Node, Errno> {
        self.by_id.get_mut(&id).ok_or(Errno::STALE)
    }

    /// Fails with `ENFILE` if there is no room for one more node. To be asked before something is
    /// made on the host for which a node is needed afterwards.
    pub(super) fn check_room(&self) -> Result<(), Errno> {
        if self.by_id.len() >= self.most { Err(Errno::NFILE) } else { Ok(()) }
    }

    /// The node of what `fd` is open on, counting one lookup.
    pub(super) fn look_up(
        &mut self,
        share: usize,
        fd: OwnedFd,
        stat: &Statx,
        (parent, name): (u64, &Name),
    ) -> Result<u64, Errno> {
        let id = match self.by_identity.get(&Identity::new(share, stat)) {
            Some(id) => {
                let id = *id;
                let node = self.get_mut(id)?;
                // On a local file system these are one inode. Over 9p a number is used again while the
                // guest has not yet forgotten the file before: then the new descriptor is the good one.
                if !node.pinned {
                    node.fd = fd;
                }
                id
            }
            None => {
                self.check_room()?;
                self.insert(share, fd, stat, false)?
            }
        };
        let node = self.get_mut(id)?;
        node.lookups = node.lookups.saturating_add(1);
        node.parent = parent;
        node.name = name.as_c_str().to_bytes().into();
        Ok(id)
    }

    /// The node of a file, if the guest knows it.
    pub(super) fn find(&self, share: usize, stat: &Statx) -> Option<u64> {
        self.by_identity.get(&Identity::new(share, stat)).copied()
    }

    fn insert(
        &mut self,
        share: usize,
        fd: OwnedFd,
        stat: &Statx,
        pinned: bool,
    ) -> Result<u64, Errno> {
        let id = self.next;
        self.next = id.checked_add(1).ok_or(Errno::NFILE)?;
        let identity = Identity::new(share, stat);
        let (kind, blocks) = (kind_of(stat), stat.stx_blocks);
        let node = Node {
            fd,
            share,
            kind,
            blocks,
            identity,
            parent: 0,
            name: Box::default(),
            lookups: 0,
            handles: 0,
            pinned,
        };
        self.by_id.insert(id, node);
        self.by_identity.insert(identity, id);
        Ok(id)
    }

    /// The node has moved within its share.
    pub(super) fn moved(&mut self, id: u64, parent: u64, name: &Name) {
        if let Some(node) = self.by_id.get_mut(&id)
            && !node.pinned
        {
            node.parent = parent;
            node.name = name.as_c_str().to_bytes().into();
        }
    }

    /// Path of a node in its share, as far as the guest's own operations have shown it; `None` if it
    /// is not known up to the root.
    pub(super) fn path(&self, id: u64) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut node = self.by_id.get(&id)?;
        while !node.pinned {
            if names.len() >= MAX_DEPTH {
                return None;
            }
            names.push(&*node.name);
            node = self.by_id.get(&node.parent)?;
        }
        names.reverse();
        Some(names.join(&b'/'))
    }

    /// The guest forgets `count` lookups, or all if it has fewer. Returns the node if it is gone.
    pub(super) fn forget(&mut self, id: u64, count: u64) -> Option<Node> {
        let node = self.by_id.get_mut(&id)?;
        node.lookups = node.lookups.saturating_sub(count);
        self.remove_if_unused(id)
    }

    /// One more handle of a node.
    pub(super) fn add_handle(&mut self, id: u64) -> Result<(), Errno> {
        let node = self.get_mut(id)?;
        node.handles = node.handles.saturating_add(1);
        Ok(())
    }

    /// One handle fewer. Returns the node if it is gone.
    pub(super) fn remove_handle(&mut self, id: u64) -> Option<Node> {
        let node = self.by_id.get_mut(&id)?;
        node.handles = node.handles.saturating_sub(1);
        self.remove_if_unused(id)
    }

    fn remove_if_unused(&mut self, id: u64) -> Option<Node> {
        let node = self.by_id.get(&id)?;
        if node.pinned || node.lookups > 0 || node.handles > 0 {
            return None;
        }
        let node = self.by_id.remove(&id)?;
        self.by_identity.remove(&node.identity);
        Some(node)
    }

    /// Forgets all that belongs to the guest.
    pub(super) fn clear(&mut self) {
        self.by_id.retain(|_, node| node.pinned);
        self.by_identity.retain(|_, id| self.by_id.contains_key(id));
        for node in self.by_id.values_mut() {
            (node.lookups, node.handles) = (0, 0);
        }
    }

    /// How many nodes there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}
