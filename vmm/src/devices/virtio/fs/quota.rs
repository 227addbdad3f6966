//! How much a guest may add to a share.
//!
//! An account counts what the guest's own operations add: 4 KiB for each name it makes, the allocated
//! blocks by which a file, a folder or a link grows, and the bytes of extended attributes. It counts
//! down again when names go and blocks are freed, but never below zero, so that deleting what was there
//! before does not buy more than the limit. Before an operation, it is refused or cut so that the share
//! never holds more than the limit plus one write; after it, the difference of the allocated blocks is
//! settled ([`Server::settled`]). Nothing is remembered per file, so it does not matter which files the
//! guest has forgotten, nor by which of several shares it reached them.
//!
//! Writable shares of which one lies inside of the other have one account, with the least of their
//! limits.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::Statx;
use rustix::io::Errno;

use super::node::stat_fd;
use super::server::{Server, ShareState};

/// What one name costs: an inode, or an entry in a folder.
const NAME_COST: u64 = 4096;
/// Unit of `stx_blocks`.
const BLOCK: u64 = 512;
/// Granularity in which file systems allocate; growth is rounded up to it.
const PAGE: u64 = 4096;

/// The account of one share, or of several that overlap.
#[derive(Debug, Default)]
pub(super) struct Quota {
    limit: Option<u64>,
    limit_names: Option<u64>,
    used: u64,
    /// Bytes that may have been added beside those ([`super::deferred`]).
    expected: u64,
    names: u64,
}

impl Quota {
    /// An empty account with a limit in bytes and one of names; without limits it counts nothing.
    pub(super) fn new(limit: Option<u64>, limit_names: Option<u64>) -> Self {
        Self { limit, limit_names, used: 0, expected: 0, names: 0 }
    }

    /// The limits of another share count as well.
    fn tighten(&mut self, limit: Option<u64>, limit_names: Option<u64>) {
        let least = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        self.limit = least(self.limit, limit);
        self.limit_names = least(self.limit_names, limit_names);
    }

    /// Whether there is a limit, so that operations must look at blocks.
    pub(super) fn limited(&self) -> bool {
        self.limit.is_some() || self.limit_names.is_some()
    }

    /// Limit in bytes and what is left of it.
    pub(super) fn state(&self) -> Option<(u64, u64)> {
        self.limit.map(|limit| (limit, limit.saturating_sub(self.used)))
    }

    /// Limit in names and what is left of it.
    pub(super) fn names(&self) -> Option<(u64, u64)> {
        self.limit_names.map(|limit| (limit, limit.saturating_sub(self.names)))
    }

    /// Bytes that may still be added.
    fn room(&self) -> u64 {
        self.state().map_or(u64::MAX, |(_, room)| room)
    }

    /// Whether bytes are limited.
    pub(super) fn counts_bytes(&self) -> bool {
        self.limit.is_some()
    }

    /// Whether so much more may be expected without being counted.
    pub(super) fn can_expect(&self, bytes: u64) -> bool {
        self.expected.saturating_add(bytes) <= self.room() / 4
    }

    /// Whether so much of what is left is expected that it has to be counted.
    pub(super) fn is_tight(&self) -> bool {
        self.expected > self.room() / 2
    }

    /// So many bytes more may have been added.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.expected = self.expected.saturating_add(bytes);
    }

    /// It is known what came of so many bytes that were expected.
    pub(super) fn unexpect(&mut self, bytes: u64) {
        self.expected = self.expected.saturating_sub(bytes);
    }

    /// Bytes that are expected.
    #[cfg(test)]
    pub(super) fn expected(&self) -> u64 {
        self.expected
    }

    /// Fails with `ENOSPC` if there is no room for one more name.
    pub(super) fn check_name(&self) -> Result<(), Errno> {
        let full = self.names().is_some_and(|(_, room)| room == 0);
        if full || self.room() < NAME_COST { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// Fails with `ENOSPC` if a folder may not grow by the block that one more entry can take.
    pub(super) fn check_entry(&self) -> Result<(), Errno> {
        if self.room() < PAGE { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// A name was made.
    pub(super) fn add_name(&mut self) {
        self.names = self.names.saturating_add(1);
        self.add(NAME_COST);
    }

    /// A name went.
    pub(super) fn remove_name(&mut self) {
        self.names = self.names.saturating_sub(1);
        self.remove(NAME_COST);
    }

    /// How many of `length` bytes at `offset` may be written to a file of `size` bytes that has
    /// `blocks` blocks.
    ///
    /// # Errors
    /// `ENOSPC` if it is none.
    pub(super) fn allow_write(
        &self,
        offset: u64,
        length: u64,
        size: u64,
        blocks: u64,
    ) -> Result<u64, Errno> {
        if self.limit.is_none() || length == 0 {
            return Ok(length);
        }
        let room = self.room();
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        let sparse = blocks.saturating_mul(BLOCK) < size;
        if room == 0 && sparse {
            return Err(Errno::NOSPC);
        }
        // Bytes up to the end of the last page that the file has are not new.
        let covered = size.checked_next_multiple_of(PAGE).unwrap_or(size);
        let start = offset.max(covered);
        let allowed_end = start.saturating_add(room.saturating_sub(room % PAGE));
        match end.min(allowed_end).checked_sub(offset) {
            None | Some(0) => Err(Errno::NOSPC),
            Some(allowed) => Ok(allowed),
        }
    }

    /// Fails with `ENOSPC` if `length` bytes may not be allocated.
    pub(super) fn allow_allocation(&self, length: u64) -> Result<(), Errno> {
        if length > self.room() { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// A file went from `before` to `after` blocks.
    pub(super) fn settle(&mut self, before: u64, after: u64) {
        if after > before {
            self.add(after.saturating_sub(before).saturating_mul(BLOCK));
        } else {
            self.remove(before.saturating_sub(after).saturating_mul(BLOCK));
        }
    }

    /// Bytes that are no blocks were added.
    pub(super) fn add(&mut self, bytes: u64) {
        self.used = self.used.saturating_add(bytes);
    }

    /// Bytes that are no blocks were removed.
    pub(super) fn remove(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }
}

impl Server {
    /// Index of the account of a node's share.
    pub(super) fn account_of(&self, id: u64) -> Option<usize> {
        let share = usize::from(self.nodes.get(id).ok()?.share);
        Some(self.shares.get(share)?.account)
    }

    /// The account of a node's share.
    pub(super) fn account(&mut self, id: u64) -> Option<&mut Quota> {
        let account = self.account_of(id)?;
        self.accounts.get_mut(account)
    }

    /// The account of a node's share, in which everything is counted.
    pub(super) fn settled_account(&mut self, id: u64) -> Result<&mut Quota, Errno> {
        let account = self.account_of(id).ok_or(Errno::STALE)?;
        self.settle_account(account);
        self.accounts.get_mut(account).ok_or(Errno::STALE)
    }

    /// Whether operations on a node have to be counted.
    pub(super) fn is_limited(&self, id: u64) -> bool {
        let share = self.nodes.get(id).and_then(|node| self.share(node));
        share.is_ok_and(|share| self.quota(share.account).limited())
    }

    /// An account.
    pub(super) fn quota(&self, account: usize) -> &Quota {
        // Every share has one.
        const NONE: &Quota =
            &Quota { limit: None, limit_names: None, used: 0, expected: 0, names: 0 };
        self.accounts.get(account).unwrap_or(NONE)
    }

    /// Whether the guest has a file open, in the share of node `id` or another one of the same account.
    pub(super) fn is_open(&self, id: u64, stat: &Statx) -> bool {
        self.same_account(id, stat).any(|found| self.handles.any_of(found).is_some())
    }

    /// As [`Self::is_open`], but for node `id` itself.
    pub(super) fn is_open_elsewhere(&self, id: u64, stat: &Statx) -> bool {
        let mut others = self.same_account(id, stat).filter(|found| *found != id);
        others.any(|found| self.handles.any_of(found).is_some())
    }

    /// The nodes of one file in all shares that have the account of node `id`.
    fn same_account(&self, id: u64, stat: &Statx) -> impl Iterator<Item = u64> {
        let share = self.nodes.get(id).and_then(|node| self.share(node));
        let account = share.map(|share| share.account).ok();
        let shares = self.shares.iter().zip(0_u16..);
        shares
            .filter(move |(share, _)| Some(share.account) == account)
            .filter_map(|(_, index)| self.nodes.find(index, stat))
    }

    /// Does something that may change the blocks of the file or folder that `fd` is open on, which
    /// belongs to node `id`, and settles the difference.
    pub(super) fn settled<T>(
        &mut self,
        id: u64,
        fd: impl AsFd,
        operation: impl FnOnce(&mut Self) -> T,
    ) -> T {
        if !self.is_limited(id) {
            return operation(self);
        }
        self.settle_node(id);
        let before = self.blocks(id, fd.as_fd());
        let result = operation(self);
        let after = self.blocks(id, fd.as_fd());
        if let (Some(before), Some(after), Some(account)) = (before, after, self.account(id)) {
            account.settle(before, after);
        }
        result
    }

    fn blocks(&mut self, id: u64, fd: BorrowedFd<'_>) -> Option<u64> {
        // Over 9p, a file without a name can be looked at only where it is open, if at all.
        let stat = stat_fd(fd).or_else(|_| self.stat(id));
        stat.ok().map(|stat| stat.stx_blocks)
    }

    /// An account for a share that may be written: that of the shares that lie inside of it or around
    /// it, or a new one: `root` is the path of its root. So is a share of the same folder in another mount;
    /// other ways to the same files (a bind mount of what lies deeper, hard links) are not noticed, and
    /// those shares count for themselves.
    pub(super) fn open_account(
        &mut self,
        (root, stat): (&Path, &Statx),
        limit: Option<u64>,
        limit_names: Option<u64>,
    ) -> usize {
        let identity = root_identity(stat);
        let touches = |share: &&ShareState| {
            let inside = root.starts_with(&share.path) || share.path.starts_with(root);
            inside || share.identity == identity
        };
        let writable = self.shares.iter().filter(|share| !share.read_only);
        let found: Vec<usize> = writable.filter(touches).map(|share| share.account).collect();
        let mut own = Quota::new(limit, limit_names);
        let Some(account) = found.first().copied() else {
            self.accounts.push(own);
            return self.accounts.len().saturating_sub(1);
        };
        // The new share may join some that had nothing to do with each other.
        for other in found {
            let limits = self.quota(other);
            own.tighten(limits.limit, limits.limit_names);
            for share in &mut self.shares {
                if share.account == other {
                    share.account = account;
                }
            }
        }
        if let Some(quota) = self.accounts.get_mut(account) {
            *quota = own;
        }
        account
    }
}

/// What makes two roots the same file: device and inode.
pub(super) fn root_identity(stat: &Statx) -> (u32, u32, u64) {
    (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_cut_at_the_limit_and_refused_beyond() {
        let mut quota = Quota::new(Some(10_000), None);
        assert_eq!(quota.allow_write(0, 20_000, 0, 0), Ok(8192));
        quota.settle(0, 16);
        assert_eq!(quota.allow_write(8192, 1, 8192, 16), Err(Errno::NOSPC));
        assert_eq!(quota.allow_write(0, 8192, 8192, 16), Ok(8192), "in place");
        assert_eq!(quota.allow_write(8000, 1000, 8192, 16), Ok(192), "cut at the end of the page");
        quota.settle(16, 0);
        assert_eq!(quota.state(), Some((10_000, 10_000)));
    }

    #[test]
    fn holes_cannot_be_filled_when_nothing_is_left() {
        let mut quota = Quota::new(Some(4096), None);
        quota.add_name();
        assert_eq!(quota.allow_write(0, 1, 1 << 40, 0), Err(Errno::NOSPC));
        assert_eq!(quota.check_name(), Err(Errno::NOSPC));
    }

    #[test]
    fn names_have_a_limit_of_their_own() {
        let mut quota = Quota::new(None, Some(2));
        assert!(quota.limited());
        quota.add_name();
        assert_eq!(quota.names(), Some((2, 1)));
        quota.add_name();
        assert_eq!(quota.check_name(), Err(Errno::NOSPC));
        assert_eq!(quota.allow_write(0, 1 << 30, 0, 0), Ok(1 << 30), "bytes have none here");
        quota.remove_name();
        assert_eq!(quota.check_name(), Ok(()));
    }

    #[test]
    fn deleting_what_was_there_before_buys_nothing() {
        let mut quota = Quota::new(Some(8192), Some(1));
        quota.settle(1 << 20, 0);
        quota.remove_name();
        assert_eq!(quota.state(), Some((8192, 8192)));
        assert_eq!(quota.names(), Some((1, 1)));
    }

    #[test]
    fn offsets_that_overflow_are_refused() {
        assert_eq!(Quota::new(Some(1), None).allow_write(u64::MAX, 2, 0, 0), Err(Errno::FBIG));
        assert_eq!(Quota::new(None, None).allow_write(u64::MAX, 2, 0, 0), Ok(2));
    }
}
