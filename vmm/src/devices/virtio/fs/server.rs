//! The FUSE server: one request in, one reply out.
//!
//! [`Server::handle`] is the only door. It checks the header, picks the operation, and turns its
//! result into a reply. The operations are in `lookup` (nodes and attributes), `setattr`, `io` (file
//! data), `dir` (listings) and `change` (names made, moved and removed).

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, Mode, OFlags, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use vm_memory::VolatileSlice;

use super::abi::{
    BatchForgetIn, ForgetIn, ForgetOne, InHeader, InitIn, InitOut, MAJOR, MINOR, OutHeader,
    ROOT_ID, Wire, init, op,
};
use super::deferred::Deferred;
use super::handle::{self, Handles, Open, OpenFile};
use super::names::Name;
use super::node::{self, Node, Nodes, kind_of, stat_fd};
use super::quota::{Quota, root_identity};
use super::reach::{MAX_PATHS, Paths};
use super::record::Record;
use super::unopened::{MAX_KEPT, Unopened};
use super::wire::Cursor;
use super::{FsError, Share};

/// Most data bytes in one `READ` or `WRITE`.
pub(super) const MAX_DATA: u32 = 1 << 20;
/// The same in pages of 4 KiB.
const MAX_PAGES: u16 = 256;
/// How far the guest may read ahead, in bytes.
const MAX_READAHEAD: u32 = 1 << 20;

/// Features that are taken if the guest offers them.
const FEATURES: u32 = init::ASYNC_READ
    | init::ATOMIC_O_TRUNC
    | init::BIG_WRITES
    | init::AUTO_INVAL_DATA
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::SUBMOUNTS
    | init::HANDLE_KILLPRIV_V2
    | init::INIT_EXT;
/// The same in the second word. No node holds a descriptor, so it does no harm if forgets come late; and
/// replies of `dir` end early only at the end.
const FEATURES2: u32 = init::BATCH_FORGETS | init::WHOLE_LISTINGS;

/// A share in service.
#[derive(Debug)]
pub(super) struct ShareState {
    pub(super) name: Arc<str>,
    /// Node of its root.
    pub(super) root: u64,
    pub(super) read_only: bool,
    pub(super) cache: bool,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Whether extended attributes are served.
    pub(super) xattr: bool,
    /// The mount of its root, which is never left.
    pub(super) mount: u64,
    /// Path of its root on the host, for comparisons only.
    pub(super) path: PathBuf,
    /// Device and inode of its root.
    pub(super) identity: (u32, u32, u64),
    /// Index of its account.
    pub(super) account: usize,
}

/// Sizes of the tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) nodes: node::Limits,
    pub(super) handles: handle::Limits,
    /// Path descriptors of folders that are kept.
    pub(super) paths: usize,
    /// Descriptors for reading without a handle.
    pub(super) unopened: usize,
}

impl Limits {
    /// Together less than 16 MiB and 1,024 descriptors, whatever the guest does.
    pub(super) const NORMAL: Self = Self {
        nodes: node::Limits::NORMAL,
        handles: handle::Limits::NORMAL,
        paths: MAX_PATHS,
        unopened: MAX_KEPT,
    };
}

/// The server of one file system.
#[derive(Debug)]
pub struct Server {
    pub(super) shares: Vec<ShareState>,
    pub(super) nodes: Nodes,
    pub(super) handles: Handles,
    pub(super) paths: Paths,
    pub(super) accounts: Vec<Quota>,
    pub(super) deferred: Deferred,
    pub(super) unopened: Unopened,
    proc_fd: OwnedFd,
    limit_hit: Arc<AtomicBool>,
    pub(super) record: Arc<Record>,
    /// Whether `INIT` was answered.
    ready: bool,
}

/// Where the reply goes: behind a header that is written last.
pub(super) struct Output<'a> {
    memory: Cursor<'a>,
    body: Vec<u8>,
    /// Bytes that went straight into guest memory, instead of a body.
    pub(super) direct: usize,
}

impl<'a> Output<'a> {
    /// Appends a part to the reply.
    pub(super) fn put(&mut self, part: &impl Wire) {
        part.put(&mut self.body);
    }

    /// Sets the whole body.
    pub(super) fn set_body(&mut self, body: Vec<u8>) {
        self.body = body;
    }

    /// Guest memory for the body.
    pub(super) fn memory(&mut self) -> &mut Cursor<'a> {
        &mut self.memory
    }
}

impl Server {
    /// A server for `shares`. `proc_fd` is an `O_PATH` descriptor of `/proc`, through which the server
    /// opens for data what it holds as a path.
    ///
    /// The process's umask is set to 0: the guest applies its own, and this process makes no other
    /// files.
    ///
    /// # Errors
    /// A bad name or root of a share.
    pub fn new(shares: Vec<Share>, proc_fd: OwnedFd) -> Result<Self, FsError> {
        let mut limits = Limits::NORMAL;
        // Where this process may have few descriptors, the other devices must still get theirs.
        let all = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let eighth = usize::try_from(all / 8).unwrap_or(usize::MAX / 8);
        limits.handles.descriptors = limits.handles.descriptors.min(eighth * 5);
        limits.paths = limits.paths.min(eighth);
        limits.unopened = limits.unopened.min(eighth / 4);
        Self::with_limits(shares, proc_fd, limits)
    }

    /// As [`Self::new`], with other sizes of the tables.
    pub(super) fn with_limits(
        shares: Vec<Share>,
        proc_fd: OwnedFd,
        limits: Limits,
    ) -> Result<Self, FsError> {
        rustix::process::umask(Mode::empty());
        let mut server = Self {
            shares: Vec::new(),
            nodes: Nodes::new(limits.nodes),
            handles: Handles::new(limits.handles),
            paths: Paths::new(limits.paths),
            accounts: Vec::new(),
            deferred: Deferred::default(),
            unopened: Unopened::new(limits.unopened),
            proc_fd,
            limit_hit: Arc::default(),
            record: Arc::default(),
            ready: false,
        };
        for share in shares {
            server.add_share(share)?;
        }
        Ok(server)
    }

    fn add_share(&mut self, share: Share) -> Result<(), FsError> {
        let root_error =
            |error: Errno| FsError::Root { name: share.name.clone(), error: error.into() };
        let name = Arc::<str>::from(share.name.as_str());
        if Name::new(name.as_bytes()).is_err() || self.shares.iter().any(|other| other.name == name)
        {
            return Err(FsError::Name(share.name));
        }
        let stat = stat_fd(&share.root).map_err(root_error)?;
        if !matches!(kind_of(&stat), FileType::Directory | FileType::RegularFile) {
            return Err(FsError::Kind(share.name));
        }
        let path = readlinkat(&self.proc_fd, fd_path(&share.root).as_str(), Vec::new());
        let path = PathBuf::from(OsString::from_vec(path.map_err(root_error)?.into_bytes()));
        let account = if share.read_only {
            self.accounts.push(Quota::default());
            self.accounts.len().saturating_sub(1)
        } else {
            self.open_account((&path, &stat), share.limit_bytes, share.limit_files)
        };
        let index = u16::try_from(self.shares.len()).map_err(|_| root_error(Errno::NFILE))?;
        let root = self.nodes.add_share_root(index, share.root, &stat).map_err(root_error)?;
        self.shares.push(ShareState {
            name,
            root,
            read_only: share.read_only,
            cache: share.cache,
            uid: share.guest_uid,
            gid: share.guest_gid,
            xattr: share.xattr,
            mount: stat.stx_mnt_id,
            path,
            identity: root_identity(&stat),
            account,
        });
        Ok(())
    }

    /// Becomes true when a write or an allocation failed for want of space: the limit of a share, or
    /// the host's disk or quota.
    #[must_use]
    pub fn limit_hit(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.limit_hit)
    }

    /// Which files the guest reads and writes.
    #[must_use]
    pub fn record(&self) -> Arc<Record> {
        Arc::clone(&self.record)
    }

    /// Notes that space was wanting.
    pub(super) fn note_limit(&self) {
        self.limit_hit.store(true, Ordering::Relaxed);
    }

    /// Forgets all that belongs to the guest: nodes, handles, the agreed protocol. What it has added
    /// to the shares stays counted.
    pub fn reset(&mut self) {
        self.settle_all();
        self.handles.clear();
        self.unopened.clear();
        self.paths.clear();
        self.nodes.clear();
        self.ready = false;
    }

    /// Whether the guest has the file system mounted.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.ready
    }

    /// Serves one request, and returns how many bytes of `reply` were written. 0: no reply is due, or
    /// there was no room for one.
    pub fn handle(&mut self, request: &[VolatileSlice<'_>], reply: &[VolatileSlice<'_>]) -> usize {
        let mut input = Cursor::new(request);
        let mut start = Cursor::new(reply);
        let Ok(header) = input.take::<InHeader>() else { return 0 };
        let length = usize::try_from(header.len).unwrap_or(usize::MAX);
        let body = length.checked_sub(InHeader::SIZE).filter(|body| *body <= input.left());

        // These have no reply, whatever the guest left room for.
        match (header.opcode, body) {
            (op::FORGET | op::BATCH_FORGET, Some(body)) => {
                // A chain can have gigabytes, of the same memory again and again.
                input.truncate(body.min(MAX_DATA as usize));
                self.forget(&header, &mut input);
                return 0;
            }
            (op::FORGET | op::BATCH_FORGET | op::INTERRUPT, _) => return 0,
            _ => {}
        }
        if start.left() < OutHeader::SIZE {
            return 0;
        }
        let mut memory = start.clone();
        memory.advance(OutHeader::SIZE);
        let mut output = Output { memory, body: Vec::new(), direct: 0 };
        let result = match body {
            Some(body) => {
                input.truncate(body);
                self.dispatch(&header, &mut input, &mut output)
            }
            None => Err(Errno::INVAL),
        };
        let (error, body) = match result {
            Ok(()) if output.body.len() <= output.memory.left() => {
                output.memory.write(&output.body);
                (0, output.body.len().max(output.direct))
            }
            Ok(()) => (Errno::INVAL.raw_os_error(), 0),
            // The limit of this process is not the guest program's.
            Err(Errno::MFILE) => (Errno::NFILE.raw_os_error(), 0),
            Err(error) => {
                if matches!(error, Errno::NOSPC | Errno::DQUOT) {
                    self.note_limit();
                }
                (error.raw_os_error(), 0)
            }
        };
        let length = OutHeader::SIZE.saturating_add(body);
        let mut head = Vec::with_capacity(OutHeader::SIZE);
        // A reply is at most `MAX_DATA` and a header long.
        let len = u32::try_from(length).unwrap_or(u32::MAX);
        OutHeader { len, error: error.wrapping_neg(), unique: header.unique }.put(&mut head);
        start.write(&head);
        length
    }

    fn dispatch(
        &mut self,
        header: &InHeader,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        if !self.ready && header.opcode != op::INIT {
            return Err(Errno::IO);
        }
        let node = header.node;
        match header.opcode {
            op::INIT => self.init(input, output),
            op::DESTROY => {
                self.reset();
                Ok(())
            }
            // See the module's text on caching.
            op::SYNCFS => Ok(()),
            op::LOOKUP => self.lookup(node, input, output),
            op::GETATTR => self.getattr(node, input, output),
            op::SETATTR => self.setattr(node, input, output),
            op::READLINK => self.readlink(node, output),
            op::STATFS => self.statfs(node, output),
            op::OPEN => self.open(node, input, output),
            op::READ => self.read(node, input, output),
            op::WRITE => self.write(node, input, output),
            op::RELEASE => self.release(node, input),
            op::FSYNC => self.fsync(node, input),
            op::FALLOCATE => self.fallocate(node, input),
            op::LSEEK => self.lseek(node, input, output),
            op::COPY_FILE_RANGE => self.copy_file_range(node, input, output),
            op::OPENDIR => self.opendir(node, output),
            op::READDIR => self.readdir(node, input, output, false),
            op::READDIRPLUS => self.readdir(node, input, output, true),
            op::RELEASEDIR => self.release(node, input),
            op::FSYNCDIR => self.fsyncdir(node, input),
            op::CREATE => self.create(node, input, output),
            op::MKNOD => self.mknod(node, input, output),
            op::MKDIR => self.mkdir(node, input, output),
            op::SYMLINK => self.symlink(node, input, output),
            op::LINK => self.link(node, input, output),
            op::UNLINK => self.unlink(node, input, false),
            op::RMDIR => self.unlink(node, input, true),
            op::SETXATTR => self.set_xattr(node, input),
            op::GETXATTR => self.get_xattr(node, input, output),
            op::LISTXATTR => self.list_xattr(node, input, output),
            op::REMOVEXATTR => self.remove_xattr(node, input),
            op::RENAME => self.rename(node, input, false),
            op::RENAME2 => self.rename(node, input, true),
            // Among them: FLUSH and ACCESS, which the guest then does without, and locks, which it then
            // keeps itself.
            _ => Err(Errno::NOSYS),
        }
    }

    fn init(&mut self, input: &mut Cursor<'_>, output: &mut Output<'_>) -> Result<(), Errno> {
        let wanted: InitIn = input.take()?;
        let second = wanted.flags & init::INIT_EXT != 0;
        let flags2 = if second { input.take::<u32>().unwrap_or(0) & FEATURES2 } else { 0 };
        self.reset();
        if wanted.major < MAJOR {
            return Err(Errno::PROTO);
        }
        if wanted.major > MAJOR {
            // The guest tries again with this version.
            output.put(&InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() });
            return Ok(());
        }
        // Older ones have other layouts. 7.31 is Linux 5.4.
        if wanted.minor < 31 {
            return Err(Errno::PROTO);
        }
        self.ready = true;
        output.put(&InitOut {
            major: MAJOR,
            minor: MINOR,
            max_readahead: wanted.max_readahead.min(MAX_READAHEAD),
            flags: wanted.flags & FEATURES,
            max_background: 256,
            congestion_threshold: 192,
            max_write: MAX_DATA,
            time_gran: 1,
            max_pages: MAX_PAGES,
            flags2,
            ..InitOut::default()
        });
        Ok(())
    }

    fn forget(&mut self, header: &InHeader, input: &mut Cursor<'_>) {
        if header.opcode == op::FORGET {
            if let Ok(forget) = input.take::<ForgetIn>() {
                self.forget_node(header.node, forget.lookups);
            }
            return;
        }
        let Ok(batch) = input.take::<BatchForgetIn>() else { return };
        for _ in 0..batch.count {
            let Ok(one) = input.take::<ForgetOne>() else { return };
            self.forget_node(one.node, one.lookups);
        }
    }

    pub(super) fn forget_node(&mut self, id: u64, lookups: u64) {
        self.settle_node(id);
        if self.nodes.forget(id, lookups) {
            self.paths.remove(id);
            self.unopened.remove(id);
        }
    }

    /// Closes a handle of any kind.
    pub(super) fn close(&mut self, handle: u64, id: u64) -> Result<(), Errno> {
        let open = self.handles.remove(handle, id)?;
        if let Open::File(file) = open {
            self.settle_closed(id, file);
        }
        // A folder that only this handle held is gone now.
        self.settle_node(id);
        // The root has handles, but is no node.
        if self.nodes.remove_handle(id) {
            self.paths.remove(id);
            self.unopened.remove(id);
        }
        Ok(())
    }

    /// Settles what the end of a handle frees: what the file system has allocated ahead of a writer,
    /// and a file that has no name any more.
    fn settle_closed(&mut self, id: u64, file: OpenFile) {
        if !self.is_limited(id) {
            return;
        }
        let Ok(before) = stat_fd(&file) else {
            self.settle_node(id);
            return;
        };
        self.settle_node_at(id, Some(before.stx_blocks));
        let last = self.handles.any_of(id).is_none();
        drop(file);
        let last = last && !self.is_open_elsewhere(id, &before);
        let after = if last && before.stx_nlink == 0 {
            0
        } else if before.stx_blocks <= before.stx_size.div_ceil(4096).saturating_mul(8) {
            // Nothing was allocated ahead.
            before.stx_blocks
        } else {
            self.stat(id).map_or(before.stx_blocks, |after| after.stx_blocks)
        };
        if let Some(account) = self.account(id) {
            account.settle(before.stx_blocks, after);
        }
    }

    /// The share of a node.
    pub(super) fn share(&self, node: &Node) -> Result<&ShareState, Errno> {
        self.shares.get(usize::from(node.share)).ok_or(Errno::STALE)
    }

    /// Node `id` in a share that may be changed.
    ///
    /// # Errors
    /// `EROFS` for the synthetic root and for shares that are read-only.
    pub(super) fn writable_node(&self, id: u64) -> Result<&Node, Errno> {
        if id == ROOT_ID {
            return Err(Errno::ROFS);
        }
        let node = self.nodes.get(id)?;
        if self.share(node)?.read_only { Err(Errno::ROFS) } else { Ok(node) }
    }

    /// Opens through `/proc` what a descriptor of ours is open on.
    pub(super) fn reopen(&self, fd: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
        openat(&self.proc_fd, fd_path(fd).as_str(), flags | OFlags::CLOEXEC, Mode::empty())
    }

    /// The folder for which [`fd_path`] is meant.
    pub(super) fn proc_fd(&self) -> &OwnedFd {
        &self.proc_fd
    }
}

/// Path of a descriptor of ours below `/proc`. It leads to the very file, whatever has become of its
/// name.
pub(super) fn fd_path(fd: impl AsFd) -> String {
    use std::os::fd::AsRawFd;
    format!("self/fd/{}", fd.as_fd().as_raw_fd())
}
