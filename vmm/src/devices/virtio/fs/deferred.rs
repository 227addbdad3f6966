//! Growth that is counted later, so that a write or a new name does not take two looks at its file.
//!
//! Far from the limit it does not matter to the byte how much a file has grown. An operation then goes
//! ahead at once, and the most by which it can have made its file or folder grow is noted as expected;
//! what it really was is looked up once, when the file is closed, the folder is forgotten, or somebody
//! wants to know. Expected growth is never more than a quarter of what is left of the limit when it is
//! noted, so that the limit holds even where a file system allocates ahead of a writer; nearer to the
//! limit, each operation is counted at once as before.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::Statx;

use super::node::stat_fd;
use super::server::Server;

/// Most files and folders of which growth is expected.
const MOST: usize = 64;
/// Least unit in which growth is expected: file systems allocate in units of up to so many bytes, if they
/// do not say that they have larger ones.
const UNIT: u64 = 64 << 10;
/// Largest unit that is believed.
const MAX_UNIT: u64 = 16 << 20;
/// Bytes by which a name makes its folder grow, rounded up to units.
pub(super) const NAME_GROWTH: u64 = 16 << 10;

/// Files and folders of which growth is expected, by node.
#[derive(Debug, Default)]
pub(super) struct Deferred(HashMap<u64, Growth>);

/// What is not yet counted of one file.
#[derive(Clone, Copy, Debug)]
struct Growth {
    /// Where it is expected.
    account: usize,
    /// Blocks that are counted.
    blocks: u64,
    /// Unit of what is expected.
    unit: u64,
    /// Bytes that may have been added since.
    most: u64,
}

impl Growth {
    fn new(account: usize, stat: &Statx) -> Self {
        let unit = u64::from(stat.stx_blksize).clamp(UNIT, MAX_UNIT);
        Self { account, blocks: stat.stx_blocks, unit, most: 0 }
    }
}

impl Server {
    /// Does something that makes the file or folder that `fd` is open on, which belongs to node `id`, grow
    /// by at most `bytes` in the file system's own units, and has that counted.
    pub(super) fn growing<T>(
        &mut self,
        id: u64,
        fd: &OwnedFd,
        bytes: u64,
        operation: impl FnOnce(&mut Self) -> T,
    ) -> T {
        if self.defer(id, fd, bytes) { operation(self) } else { self.settled(id, fd, operation) }
    }

    /// Whether something that makes a file grow by at most `bytes` may go ahead without being counted;
    /// that growth is expected from now on.
    pub(super) fn defer(&mut self, id: u64, fd: impl AsFd, bytes: u64) -> bool {
        let Some(account) = self.account_of(id) else { return false };
        if !self.quota(account).counts_bytes() {
            return true;
        }
        // The same file may belong to other nodes there.
        if self.shares.iter().filter(|share| share.account == account).count() != 1 {
            return false;
        }
        let unit = self.deferred.0.get(&id).map_or(UNIT, |growth| growth.unit);
        let most = |unit: u64| bytes.div_ceil(unit).saturating_add(1).saturating_mul(unit);
        if !self.quota(account).can_expect(most(unit)) {
            return false;
        }
        if !self.deferred.0.contains_key(&id) {
            let Ok(stat) = stat_fd(fd) else { return false };
            self.watch(id, &stat);
        }
        let Some(growth) = self.deferred.0.get_mut(&id) else { return false };
        let most = most(growth.unit);
        let Some(quota) = self.accounts.get_mut(account).filter(|quota| quota.can_expect(most))
        else {
            return false;
        };
        quota.expect(most);
        growth.most = growth.most.saturating_add(most);
        true
    }

    /// Growth of node `id`, of whose file these attributes are counted, will be deferred.
    pub(super) fn watch(&mut self, id: u64, stat: &Statx) {
        let Some(account) = self.account_of(id).filter(|at| self.quota(*at).counts_bytes()) else {
            return;
        };
        if self.deferred.0.len() >= MOST {
            self.settle_all();
        }
        self.deferred.0.entry(id).or_insert_with(|| Growth::new(account, stat));
    }

    /// Counts what was deferred of node `id`.
    pub(super) fn settle_node(&mut self, id: u64) {
        if self.deferred.0.contains_key(&id) {
            let blocks = self.stat(id).ok().map(|stat| stat.stx_blocks);
            self.settle_node_at(id, blocks);
        }
    }

    /// Counts what was deferred of node `id`, whose file has so many blocks now; `None`: it cannot be
    /// found any more.
    pub(super) fn settle_node_at(&mut self, id: u64, blocks: Option<u64>) {
        let Some(growth) = self.deferred.0.remove(&id) else { return };
        let Some(account) = self.accounts.get_mut(growth.account) else { return };
        account.unexpect(growth.most);
        match blocks {
            Some(blocks) => account.settle(growth.blocks, blocks),
            None => account.add(growth.most),
        }
    }

    /// Counts what was deferred in an account.
    pub(super) fn settle_account(&mut self, account: usize) {
        self.settle_chosen(|growth| growth.account == account);
    }

    fn settle_chosen(&mut self, chosen: impl Fn(&Growth) -> bool) {
        let all = self.deferred.0.iter();
        let ids: Vec<u64> = all.filter(|(_, growth)| chosen(growth)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.settle_node(id));
    }

    /// Counts all that was deferred.
    pub(super) fn settle_all(&mut self) {
        self.settle_chosen(|_| true);
    }
}
