//! The files that the guest knows: node numbers, each with the place where the file was last seen.
//!
//! A node holds no descriptor of its own, so that the guest may know many files while this process holds
//! few descriptors: what the guest has open is reached through its handles, everything else through the
//! folder and the name where the guest last found it ([`super::reach`]). What is reached there counts
//! only if it is the same file: device, inode and type, and the birth time while nothing holds the inode
//! number.
//!
//! A node lives while the guest holds lookups or handles of it; node numbers are never used again. The
//! table is bounded in nodes and in bytes of their names; beyond that, lookups fail with `ENFILE`. Well
//! before, from [`Limits::soft`] on, the guest is told not to keep names, so that it forgets them.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use rustix::io::Errno;

use super::abi::ROOT_ID;
use super::names::Name;

/// How large the table may become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Most nodes.
    pub(super) nodes: usize,
    /// Nodes from which on the guest is told to keep no more.
    pub(super) soft: usize,
    /// Most bytes of names.
    pub(super) name_bytes: usize,
}

impl Limits {
    /// Some 12 MiB in all: at most 130 bytes for a node (the maps of this size are full before they
    /// double), and the names with what the allocator adds to them.
    pub(super) const NORMAL: Self = Self { nodes: 57_344, soft: 49_152, name_bytes: 2 << 20 };
}

/// Low bits of a node number: its place in the table, counted from 2, behind the number of the root.
/// The bits above count how often the place has been used.
const INDEX_BITS: u32 = 24;

/// Most components of a path. A hostile guest can make a circle of folders, with help from the host.
const MAX_DEPTH: usize = 4096;

/// One file that the guest knows.
#[derive(Debug)]
pub(super) struct Node {
    /// Index of its share.
    pub(super) share: u16,
    /// Type; it never changes.
    pub(super) kind: FileType,
    identity: Identity,
    born: u64,
    /// Where it was last found: a folder and the name in it.
    parent: u64,
    name: Option<Name>,
    lookups: u64,
    handles: u32,
    /// The descriptor of a share's root, which stays without lookups.
    root: Option<Arc<OwnedFd>>,
}

impl Node {
    /// Whether it is the root of its share.
    pub(super) fn is_share_root(&self) -> bool {
        self.root.is_some()
    }

    /// The descriptor of a share's root.
    pub(super) fn root(&self) -> Option<&Arc<OwnedFd>> {
        self.root.as_ref()
    }

    /// The folder and the name where it was last found; `None` for the root of a share.
    pub(super) fn place(&self) -> Option<(u64, &Name)> {
        Some((self.parent, self.name.as_ref()?))
    }

    /// Whether these are the attributes of this very file.
    pub(super) fn is(&self, stat: &Statx) -> bool {
        // An open file keeps its inode; its birth time changes on overlayfs when it is copied up.
        self.identity == Identity::new(self.share, stat)
            && (self.born == born(stat) || self.handles > 0)
    }

    fn name_bytes(&self) -> usize {
        self.name.as_ref().map_or(0, |name| name.as_c_str().count_bytes())
    }
}

/// What makes two files the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    share: u16,
    /// Part of it because no node may change its type, whatever numbers a file system uses again.
    kind: u16,
}

impl Hash for Identity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // In one piece, which the standard hasher takes in half the time.
        let rest = u64::from(self.share) << 16 | u64::from(self.kind);
        state.write([self.device, self.inode, rest].map(u64::to_le_bytes).as_flattened());
    }
}

impl Identity {
    fn new(share: u16, stat: &Statx) -> Self {
        Self {
            device: u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor),
            inode: stat.stx_ino,
            share,
            kind: stat.stx_mode & 0o170_000,
        }
    }
}

/// When the file was made, in nanoseconds, as far as the file system knows (else 0): tells apart files
/// that have had the same inode number one after the other.
fn born(stat: &Statx) -> u64 {
    if stat.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return 0;
    }
    let seconds = stat.stx_btime.tv_sec.cast_unsigned();
    seconds.wrapping_mul(1_000_000_000).wrapping_add(u64::from(stat.stx_btime.tv_nsec))
}

/// What is asked of a file.
const WANTED: StatxFlags =
    StatxFlags::BASIC_STATS.union(StatxFlags::BTIME).union(StatxFlags::MNT_ID);

/// Attributes of what `fd` is open on.
pub(super) fn stat_fd(fd: impl AsFd) -> Result<Statx, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH, WANTED)
}

/// Attributes of a child of a folder: of a link itself, and of the mount point if something is to be
/// mounted there only when it is used.
pub(super) fn stat_child(folder: BorrowedFd<'_>, name: &Name) -> Result<Statx, Errno> {
    statx(folder, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, WANTED)
}

/// Type of a file from its attributes.
pub(super) fn kind_of(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}

#[derive(Debug)]
struct Slot {
    /// Number of the node, or of the next one.
    id: u64,
    node: Option<Node>,
}

/// All nodes but the synthetic root.
#[derive(Debug)]
pub(super) struct Nodes {
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_identity: HashMap<Identity, u64>,
    count: usize,
    name_bytes: usize,
    limits: Limits,
}

impl Nodes {
    /// An empty table.
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_identity: HashMap::new(),
            count: 0,
            name_bytes: 0,
            limits,
        }
    }

    /// Adds the root of a share, which stays for ever, and returns its number.
    pub(super) fn add_share_root(
        &mut self,
        share: u16,
        fd: OwnedFd,
        stat: &Statx,
    ) -> Result<u64, Errno> {
        self.insert(Node {
            share,
            kind: kind_of(stat),
            identity: Identity::new(share, stat),
            born: born(stat),
            parent: 0,
            name: None,
            lookups: 0,
            handles: 0,
            root: Some(Arc::new(fd)),
        })
    }

    fn index(id: u64) -> Option<usize> {
        let index = id & ((1 << INDEX_BITS) - 1);
        usize::try_from(index).ok()?.checked_sub(2)
    }

    /// Node `id`.
    ///
    /// # Errors
    /// `ESTALE` if there is none.
    pub(super) fn get(&self, id: u64) -> Result<&Node, Errno> {
        let slot = Self::index(id).and_then(|index| self.slots.get(index)).ok_or(Errno::STALE)?;
        slot.node.as_ref().filter(|_| slot.id == id).ok_or(Errno::STALE)
    }

    fn get_mut(&mut self, id: u64) -> Option<&mut Node> {
        let slot = self.slots.get_mut(Self::index(id)?)?;
        slot.node.as_mut().filter(|_| slot.id == id)
    }

    /// Fails with `ENFILE` if there is no room for one more node. To be asked before something is
    /// made on the host for which a node is needed afterwards.
    pub(super) fn check_room(&self) -> Result<(), Errno> {
        let full = self.count >= self.limits.nodes || self.name_bytes >= self.limits.name_bytes;
        if full { Err(Errno::NFILE) } else { Ok(()) }
    }

    /// Whether the guest should forget what it does not use.
    pub(super) fn is_crowded(&self) -> bool {
        self.count >= self.limits.soft || self.name_bytes >= self.limits.name_bytes / 4 * 3
    }

    /// The node of the file with these attributes, found as `name` in `parent`; counts one lookup.
    pub(super) fn look_up(
        &mut self,
        share: u16,
        stat: &Statx,
        (parent, name): (u64, &Name),
    ) -> Result<u64, Errno> {
        if let Some(id) = self.by_identity.get(&Identity::new(share, stat)).copied()
            && let Some(node) = self.get_mut(id)
            && (node.is(stat) || node.is_share_root())
        {
            node.born = born(stat);
            node.lookups = node.lookups.saturating_add(1);
            self.moved(id, parent, name);
            return Ok(id);
        }
        self.check_room()?;
        self.insert(Node {
            share,
            kind: kind_of(stat),
            identity: Identity::new(share, stat),
            born: born(stat),
            parent,
            name: Some(name.clone()),
            lookups: 1,
            handles: 0,
            root: None,
        })
    }

    /// The node of a file, if the guest knows it.
    pub(super) fn find(&self, share: u16, stat: &Statx) -> Option<u64> {
        let id = *self.by_identity.get(&Identity::new(share, stat))?;
        self.get(id).is_ok_and(|node| node.is(stat)).then_some(id)
    }

    fn insert(&mut self, node: Node) -> Result<u64, Errno> {
        let (identity, name_bytes) = (node.identity, node.name_bytes());
        let id = if let Some(index) = self.free.pop() {
            let index = usize::try_from(index).map_err(|_| Errno::NFILE)?;
            let slot = self.slots.get_mut(index).ok_or(Errno::NFILE)?;
            slot.node = Some(node);
            slot.id
        } else {
            // The limits keep it far below the number of bits.
            let id = u64::try_from(self.slots.len()).map_err(|_| Errno::NFILE)?;
            let id = id.checked_add(ROOT_ID + 1).ok_or(Errno::NFILE)?;
            self.slots.push(Slot { id, node: Some(node) });
            id
        };
        self.count = self.count.saturating_add(1);
        self.name_bytes = self.name_bytes.saturating_add(name_bytes);
        // A file that had the same inode number before is no longer found by it.
        self.by_identity.insert(identity, id);
        Ok(id)
    }

    /// A node is now found as `name` in `parent`.
    pub(super) fn moved(&mut self, id: u64, parent: u64, name: &Name) {
        let Some(node) = self.get_mut(id).filter(|node| !node.is_share_root()) else { return };
        node.parent = parent;
        if node.name.as_ref() == Some(name) {
            return;
        }
        let before = node.name_bytes();
        let after = name.as_c_str().count_bytes();
        let all = self.name_bytes.saturating_sub(before).saturating_add(after);
        // Where there is no room for a longer name, the guest has to look the file up again.
        let fits = all <= self.limits.name_bytes || after <= before;
        let Some(node) = self.get_mut(id) else { return };
        node.name = fits.then(|| name.clone());
        self.name_bytes = if fits { all } else { self.name_bytes.saturating_sub(before) };
    }

    /// The nodes from `id` up to the root of its share, which is the last; `None` if it is not known
    /// how they hang together.
    pub(super) fn ancestors(&self, id: u64) -> Option<Vec<u64>> {
        let mut chain = vec![id];
        let mut node = self.get(id).ok()?;
        while !node.is_share_root() {
            let (parent, _) = node.place()?;
            let above = self.get(parent).ok()?;
            // Not to be expected from an honest guest.
            if chain.len() >= MAX_DEPTH || above.share != node.share {
                return None;
            }
            chain.push(parent);
            node = above;
        }
        Some(chain)
    }

    /// Path of a node in its share, as far as the guest's own operations have shown it; `None` if it
    /// is not known up to the root.
    pub(super) fn path(&self, id: u64) -> Option<Vec<u8>> {
        let chain = self.ancestors(id)?;
        let names = chain.iter().rev().filter_map(|id| self.get(*id).ok()?.place());
        let names: Vec<&[u8]> = names.map(|(_, name)| name.as_c_str().to_bytes()).collect();
        Some(names.join(&b'/'))
    }

    /// The guest forgets `count` lookups, or all if it has fewer. True if the node is gone.
    pub(super) fn forget(&mut self, id: u64, count: u64) -> bool {
        let Some(node) = self.get_mut(id) else { return false };
        node.lookups = node.lookups.saturating_sub(count);
        self.remove_if_unused(id)
    }

    /// One more handle of a node.
    pub(super) fn add_handle(&mut self, id: u64) -> Result<(), Errno> {
        let node = self.get_mut(id).ok_or(Errno::STALE)?;
        node.handles = node.handles.saturating_add(1);
        Ok(())
    }

    /// One handle fewer. True if the node is gone.
    pub(super) fn remove_handle(&mut self, id: u64) -> bool {
        let Some(node) = self.get_mut(id) else { return false };
        node.handles = node.handles.saturating_sub(1);
        self.remove_if_unused(id)
    }

    fn remove_if_unused(&mut self, id: u64) -> bool {
        let Some(slot) = Self::index(id).and_then(|index| self.slots.get_mut(index)) else {
            return false;
        };
        let unused =
            |node: &mut Node| node.lookups == 0 && node.handles == 0 && !node.is_share_root();
        let Some(node) = slot.node.take_if(unused) else { return false };
        // A place whose numbers are used up is not used again.
        if let Some(next) = id.checked_add(1 << INDEX_BITS)
            && let Some(index) = Self::index(id).and_then(|index| u32::try_from(index).ok())
        {
            slot.id = next;
            self.free.push(index);
        }
        self.count = self.count.saturating_sub(1);
        self.name_bytes = self.name_bytes.saturating_sub(node.name_bytes());
        if self.by_identity.get(&node.identity) == Some(&id) {
            self.by_identity.remove(&node.identity);
        }
        true
    }

    /// Forgets all that belongs to the guest.
    pub(super) fn clear(&mut self) {
        let ids: Vec<u64> = self.slots.iter().map(|slot| slot.id).collect();
        for id in ids {
            if let Some(node) = self.get_mut(id) {
                (node.lookups, node.handles) = (0, 0);
                self.remove_if_unused(id);
            }
        }
        self.by_identity.shrink_to_fit();
    }

    /// How many nodes there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.count
    }
}
