//! How much a guest may add to a share.
//!
//! The account counts what the guest's own operations add: 4 KiB for each name it makes, and the
//! allocated blocks by which a file grows. It counts down again when names go and blocks are freed,
//! but never below zero, so that deleting what was there before does not buy more than the limit.
//! A file's blocks are known from the node ([`super::node::Node::blocks`]); each operation that can
//! change them settles the difference afterwards. Before it, the operation is refused or cut so that
//! the share never holds more than the limit plus one write.

use rustix::io::Errno;

/// What one name costs: an inode, or an entry in a folder.
const NAME_COST: u64 = 4096;
/// Unit of `stx_blocks`.
const BLOCK: u64 = 512;
/// Granularity in which file systems allocate; growth is rounded up to it.
const PAGE: u64 = 4096;

/// The account of one share.
#[derive(Debug)]
pub(super) struct Quota {
    limit: Option<u64>,
    used: u64,
}

impl Quota {
    /// An empty account; without a limit it counts nothing.
    pub(super) fn new(limit: Option<u64>) -> Self {
        Self { limit, used: 0 }
    }

    /// Whether there is a limit, so that operations must look at blocks.
    pub(super) fn limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Limit in bytes and what is left of it.
    pub(super) fn state(&self) -> Option<(u64, u64)> {
        self.limit.map(|limit| (limit, limit.saturating_sub(self.used)))
    }

    /// Bytes that may still be added.
    fn room(&self) -> u64 {
        self.state().map_or(u64::MAX, |(_, room)| room)
    }

    /// Fails with `ENOSPC` if there is no room for one more name.
    pub(super) fn check_name(&self) -> Result<(), Errno> {
        if self.room() < NAME_COST { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// A name was made.
    pub(super) fn add_name(&mut self) {
        self.add(NAME_COST);
    }

    /// A name went.
    pub(super) fn remove_name(&mut self) {
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
        if !self.limited() || length == 0 {
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

    fn add(&mut self, bytes: u64) {
        self.used = self.used.saturating_add(bytes);
    }

    fn remove(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_cut_at_the_limit_and_refused_beyond() {
        let mut quota = Quota::new(Some(10_000));
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
        let mut quota = Quota::new(Some(4096));
        quota.add_name();
        assert_eq!(quota.allow_write(0, 1, 1 << 40, 0), Err(Errno::NOSPC));
        assert_eq!(quota.check_name(), Err(Errno::NOSPC));
    }

    #[test]
    fn deleting_what_was_there_before_buys_nothing() {
        let mut quota = Quota::new(Some(8192));
        quota.settle(1 << 20, 0);
        quota.remove_name();
        assert_eq!(quota.state(), Some((8192, 8192)));
    }

    #[test]
    fn offsets_that_overflow_are_refused() {
        assert_eq!(Quota::new(Some(1)).allow_write(u64::MAX, 2, 0, 0), Err(Errno::FBIG));
        assert_eq!(Quota::new(None).allow_write(u64::MAX, 2, 0, 0), Ok(2));
    }
}
