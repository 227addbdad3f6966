//! Nodes and their attributes: LOOKUP, GETATTR, READLINK, STATFS.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Statx, StatxTimestamp, fstatfs, readlinkat};
use rustix::io::Errno;

use super::abi::{Attr, AttrOut, EntryOut, GetattrIn, ROOT_ID, StatfsOut, flag};
use super::names::{NAME_MAX, Name, one_name};
use super::node::stat_fd;
use super::server::{Output, Server, ShareState};
use super::unopened::NO_HANDLE;
use super::wire::Cursor;

/// Seconds for which the guest keeps names and attributes of a cached share.
const LONG: u64 = 3600;
/// The same for any other share.
const SHORT: u64 = 1;

/// Permission bits that are shown and taken: set-id bits do not exist in a share.
pub(super) const PERMISSIONS: u32 = 0o1777;

/// Bytes that a request with one name may have beyond its fixed part.
pub(super) const ONE_NAME: usize = NAME_MAX + 1;

impl ShareState {
    /// Seconds for which the guest may keep names and attributes.
    fn valid(&self) -> u64 {
        if self.cache { LONG } else { SHORT }
    }

    /// Attributes of one of its files, as the guest sees them.
    fn attr(&self, stat: &Statx, is_root: bool) -> Attr {
        let mode = u32::from(stat.stx_mode);
        // A share that is a single file cannot be a mount of its own.
        let is_dir = FileType::from_raw_mode(mode) == FileType::Directory;
        let seconds = |time: &StatxTimestamp| time.tv_sec.cast_unsigned();
        Attr {
            ino: stat.stx_ino,
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: seconds(&stat.stx_atime),
            mtime: seconds(&stat.stx_mtime),
            ctime: seconds(&stat.stx_ctime),
            atime_ns: stat.stx_atime.tv_nsec,
            mtime_ns: stat.stx_mtime.tv_nsec,
            ctime_ns: stat.stx_ctime.tv_nsec,
            mode: mode & (libc::S_IFMT | PERMISSIONS),
            nlink: stat.stx_nlink,
            uid: self.uid,
            gid: self.gid,
            // Device numbers of the host mean nothing in the guest.
            rdev: 0,
            blksize: stat.stx_blksize,
            flags: self.no_open(mode) | if is_root && is_dir { flag::ATTR_SUBMOUNT } else { 0 },
        }
    }

    /// The reply for a node of this share.
    pub(super) fn entry(&self, node: u64, stat: &Statx) -> EntryOut {
        EntryOut {
            node,
            generation: 0,
            entry_valid: self.valid(),
            attr_valid: self.valid(),
            entry_valid_ns: 0,
            attr_valid_ns: 0,
            attr: self.attr(stat, node == self.root),
        }
    }
}

impl Server {
    /// LOOKUP
    pub(super) fn lookup(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        let entry = if parent == ROOT_ID {
            self.share_entry(&name)?
        } else {
            match self.look_up_child(parent, &name) {
                Err(Errno::NOENT) => self.absent(parent)?,
                other => other?,
            }
        };
        output.put(&entry);
        Ok(())
    }

    /// The reply for the root of the share with this name.
    fn share_entry(&self, name: &Name) -> Result<EntryOut, Errno> {
        let name = name.as_c_str().to_bytes();
        let share =
            self.shares.iter().find(|share| share.name.as_bytes() == name).ok_or(Errno::NOENT)?;
        let root = self.nodes.get(share.root)?.root().ok_or(Errno::STALE)?;
        Ok(share.entry(share.root, &stat_fd(root)?))
    }

    /// The reply for a name that does not exist: node 0, which a cached share's guest may keep.
    fn absent(&self, parent: u64) -> Result<EntryOut, Errno> {
        let share = self.share(self.nodes.get(parent)?)?;
        if !share.cache {
            return Err(Errno::NOENT);
        }
        Ok(EntryOut { entry_valid: share.valid(), ..EntryOut::default() })
    }

    /// Looks a child up, and counts that for the guest.
    pub(super) fn look_up_child(&mut self, parent: u64, name: &Name) -> Result<EntryOut, Errno> {
        self.folder(parent)?;
        let folder = self.reach(parent)?;
        self.look_up_in(parent, &folder, name)
    }

    /// As [`Self::look_up_child`], in a folder that is open as `fd`.
    pub(super) fn look_up_in(
        &mut self,
        parent: u64,
        fd: &OwnedFd,
        name: &Name,
    ) -> Result<EntryOut, Errno> {
        let stat = self.share(self.nodes.get(parent)?)?.stat_child(fd, name)?;
        self.look_up_stat(parent, name, &stat)
    }

    /// The node of the file with these attributes, found as `name` in `parent`; counts a lookup.
    pub(super) fn look_up_stat(
        &mut self,
        parent: u64,
        name: &Name,
        stat: &Statx,
    ) -> Result<EntryOut, Errno> {
        let index = self.nodes.get(parent)?.share;
        let crowded = self.nodes.is_crowded();
        let id = self.nodes.look_up(index, stat, (parent, name))?;
        let share = self.shares.get(usize::from(index)).ok_or(Errno::STALE)?;
        let mut entry = share.entry(id, stat);
        if crowded {
            // The guest forgets the name as soon as nothing uses it.
            entry.entry_valid = 0;
        }
        Ok(entry)
    }

    /// GETATTR
    pub(super) fn getattr(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: GetattrIn = input.take()?;
        if id == ROOT_ID {
            output.put(&AttrOut { valid: LONG, attr: self.root_attr(), ..AttrOut::default() });
            return Ok(());
        }
        // What the guest has opened itself is as good as the node.
        let by_handle = wanted.flags & flag::GETATTR_HANDLE != 0
            && !(wanted.handle == NO_HANDLE && self.share(self.nodes.get(id)?)?.is_fixed());
        let handle = by_handle.then(|| self.handles.file(wanted.handle, id).cloned()).transpose();
        // A handle of a folder says no more than the node.
        let stat = match handle {
            Ok(Some(file)) => stat_fd(file).or_else(|_| self.stat(id))?,
            Ok(None) | Err(Errno::ISDIR) => self.stat(id)?,
            Err(error) => return Err(error),
        };
        self.put_attr(id, &stat, output)
    }

    /// Appends the attributes of a node.
    pub(super) fn put_attr(
        &self,
        id: u64,
        stat: &Statx,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let share = self.share(self.nodes.get(id)?)?;
        let attr = share.attr(stat, id == share.root);
        output.put(&AttrOut { valid: share.valid(), attr, ..AttrOut::default() });
        Ok(())
    }

    /// Attributes of the synthetic root.
    pub(super) fn root_attr(&self) -> Attr {
        let links = u32::try_from(self.shares.len()).unwrap_or(u32::MAX).saturating_add(2);
        Attr {
            ino: ROOT_ID,
            mode: libc::S_IFDIR | 0o555,
            nlink: links,
            blksize: 4096,
            ..Attr::default()
        }
    }

    /// READLINK
    pub(super) fn readlink(&mut self, id: u64, output: &mut Output<'_>) -> Result<(), Errno> {
        if id == ROOT_ID {
            return Err(Errno::INVAL);
        }
        let node = self.nodes.get(id)?;
        if node.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        // The kernel's own buffer for a target is one page.
        let link = self.reach(id)?;
        output.set_body(readlinkat(&link, c"", Vec::with_capacity(4096))?.into_bytes());
        Ok(())
    }

    /// STATFS
    pub(super) fn statfs(&mut self, id: u64, output: &mut Output<'_>) -> Result<(), Errno> {
        // NAME_MAX
        let namelen = 255;
        if id == ROOT_ID {
            output.put(&StatfsOut { bsize: 4096, frsize: 4096, namelen, ..StatfsOut::default() });
            return Ok(());
        }
        let host = fstatfs(self.reach(id)?)?;
        let account = self.share(self.nodes.get(id)?)?.account;
        self.settle_account(account);
        let quota = self.quota(account);
        let number = |value: i64| u64::try_from(value).unwrap_or(0);
        let unit = number(host.f_bsize).clamp(512, 1 << 20);
        let (mut blocks, mut free, mut available) = (host.f_blocks, host.f_bfree, host.f_bavail);
        if let Some((limit, room)) = quota.state() {
            blocks = blocks.min(limit.div_ceil(unit));
            free = free.min(room / unit);
            available = available.min(room / unit);
        }
        let (mut files, mut files_free) = (host.f_files, host.f_ffree);
        if let Some((limit, room)) = quota.names() {
            // Some file systems do not count files, and say 0.
            files = if files == 0 { limit } else { files.min(limit) };
            files_free = if host.f_files == 0 { room } else { files_free.min(room) };
        }
        let unit = u32::try_from(unit).unwrap_or(4096);
        output.put(&StatfsOut {
            blocks,
            bfree: free,
            bavail: available,
            files,
            ffree: files_free,
            bsize: unit,
            frsize: unit,
            namelen,
            ..StatfsOut::default()
        });
        Ok(())
    }
}
