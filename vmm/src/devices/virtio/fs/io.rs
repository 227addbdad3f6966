//! File data: OPEN, READ, WRITE, RELEASE, FSYNC, FALLOCATE, LSEEK, COPY_FILE_RANGE.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, FileType, OFlags, SeekFrom, copy_file_range, fallocate, fdatasync, fsync,
    ftruncate, seek,
};
use rustix::io::Errno;

use super::abi::{
    CopyFileRangeIn, FallocateIn, FsyncIn, LseekIn, LseekOut, OpenIn, OpenOut, ROOT_ID, ReadIn,
    ReleaseIn, WriteIn, WriteOut, flag,
};
use super::handle::{Open, OpenFile};
use super::lookup::PERMISSIONS;
use super::node::stat_fd;
use super::record::Place;
use super::server::{MAX_DATA, Output, Server};
use super::unopened::NO_HANDLE;
use super::wire::Cursor;

/// Most bytes that one `COPY_FILE_RANGE` copies, so that it does not hold up other requests.
const MAX_COPY: u64 = 16 << 20;

/// What the guest may ask of an open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// Access mode, for the host.
    pub(super) mode: OFlags,
    pub(super) truncate: bool,
}

impl Access {
    /// Takes from the guest's flags what the host has to know. `O_APPEND` comes again with each write;
    /// `O_SYNC` comes as `FSYNC`; `O_DIRECT` is between the guest and its page cache.
    pub(super) fn new(flags: u32) -> Result<Self, Errno> {
        let flags = OFlags::from_bits_truncate(flags);
        let mode = flags & OFlags::RWMODE;
        if mode != OFlags::RDONLY && mode != OFlags::WRONLY && mode != OFlags::RDWR {
            return Err(Errno::INVAL);
        }
        Ok(Self { mode, truncate: flags.contains(OFlags::TRUNC) })
    }

    /// For reading only.
    pub(super) const READ: Self = Self { mode: OFlags::RDONLY, truncate: false };

    /// For writing only.
    pub(super) const WRITE: Self = Self { mode: OFlags::WRONLY, truncate: false };

    pub(super) fn readable(self) -> bool {
        self.mode != OFlags::WRONLY
    }

    pub(super) fn writable(self) -> bool {
        self.mode != OFlags::RDONLY
    }

    /// What a handle with this access holds.
    pub(super) fn open_file(self, fd: Arc<OwnedFd>, place: Option<Place>) -> OpenFile {
        OpenFile { fd, readable: self.readable(), writable: self.writable(), place }
    }
}

impl Server {
    /// Opens a node for data, or finds a descriptor by which it is open already. Special files are
    /// never opened, nor are links followed: the path descriptor is of a regular file, and so is what
    /// comes out. `O_TRUNC` is left to the caller.
    pub(super) fn open_node(&mut self, id: u64, access: Access) -> Result<Arc<OwnedFd>, Errno> {
        let changes = access.writable() || access.truncate;
        let node = if changes { self.writable_node(id)? } else { self.nodes.get(id)? };
        match node.kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::PERM),
        }
        let path = self.reach(id)?;
        if changes {
            // The host's kernel takes set-id bits away at a write only where this process has no
            // privileges; a program that the guest has changed must not keep them in any case.
            let mode = u32::from(stat_fd(&path).or_else(|_| self.stat(id))?.stx_mode);
            if mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
                self.set_mode(id, mode & PERMISSIONS)?;
            }
        }
        // `O_TRUNC` with `O_RDONLY` does truncate, so it takes a descriptor that may.
        let write = changes;
        if let Some(fd) = self.handles.shared(id, access.readable(), write) {
            return Ok(fd);
        }
        self.handles.check_room()?;
        let mode = if write && access.readable() { OFlags::RDWR } else { access.mode };
        Ok(Arc::new(self.reopen(&*path, mode)?))
    }

    /// Opens a node for data as a handle holds it, truncates it if it is to be, and records that.
    pub(super) fn open_as(&mut self, id: u64, access: Access) -> Result<OpenFile, Errno> {
        let fd = self.open_node(id, access)?;
        if access.truncate {
            self.settled(id, &fd, |_| ftruncate(&fd, 0))?;
        }
        let place = self.enter(id, access.truncate);
        Ok(access.open_file(fd, place))
    }

    /// Adds a handle for a node, and appends it to the reply.
    pub(super) fn put_handle(
        &mut self,
        id: u64,
        open: Open,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let flags = match (&open, self.nodes.get(id).and_then(|node| self.share(node))) {
            (Open::File(_), Ok(share)) if share.cache => flag::OPEN_KEEP_CACHE,
            (Open::Dir { .. }, Ok(share)) if share.cache => {
                flag::OPEN_KEEP_CACHE | flag::OPEN_CACHE_DIR
            }
            _ => 0,
        };
        let handle = self.handles.insert(id, open)?;
        if id != ROOT_ID {
            self.nodes.add_handle(id)?;
        }
        output.put(&OpenOut { handle, flags, padding: 0 });
        Ok(())
    }

    /// Enters a file in the record.
    pub(super) fn enter(&self, id: u64, changed: bool) -> Option<Place> {
        let share = self.nodes.get(id).and_then(|node| self.share(node)).ok()?;
        // One whose name is not known has been moved by something on the host.
        let place = self.record.enter(&share.name, &self.nodes.path(id).unwrap_or(b"?".into()));
        if changed {
            self.record.written(place, 0);
        }
        place
    }

    /// OPEN
    pub(super) fn open(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: OpenIn = input.take()?;
        if id == ROOT_ID {
            return Err(Errno::ISDIR);
        }
        let access = Access::new(wanted.flags)?;
        let file = self.open_as(id, access)?;
        self.put_handle(id, Open::File(file), output)
    }

    /// READ
    pub(super) fn read(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: ReadIn = input.take()?;
        let file = self.readable_file(wanted.handle, id)?;
        let size = wanted.size.min(MAX_DATA) as usize;
        output.direct = output.memory().fill_from(file.as_fd(), wanted.offset, size)?;
        self.record.read(file.place, output.direct);
        Ok(())
    }

    /// WRITE
    pub(super) fn write(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: WriteIn = input.take()?;
        let OpenFile { fd, place, .. } = self.handles.writable_file(wanted.handle, id)?.clone();
        if wanted.size > MAX_DATA || wanted.size as usize != input.left() {
            return Err(Errno::INVAL);
        }
        let append = wanted.write_flags & flag::WRITE_CACHE == 0
            && OFlags::from_bits_truncate(wanted.flags).contains(OFlags::APPEND);
        let length = u64::from(wanted.size);
        let written = self.within_limit(id, &fd, (wanted.offset, length), append, |length| {
            let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
            input.drain_to(fd.as_fd(), wanted.offset, length, append)
        })?;
        self.record.written(place, written);
        let size = u32::try_from(written).map_err(|_| Errno::IO)?;
        output.put(&WriteOut { size, padding: 0 });
        Ok(())
    }

    /// Writes to a file as many of the bytes of a range (offset and length) as the share's account
    /// allows, by `write`, which is told their number; settles what was allocated.
    fn within_limit(
        &mut self,
        id: u64,
        fd: &OwnedFd,
        (offset, length): (u64, u64),
        append: bool,
        write: impl FnOnce(u64) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        if !self.is_limited(id) || self.defer(id, fd, length) {
            return write(length);
        }
        self.settled_account(id)?;
        let before = stat_fd(fd).or_else(|_| self.stat(id))?;
        let offset = if append { before.stx_size } else { offset };
        let account = self.account(id).ok_or(Errno::STALE)?;
        let allowed = account.allow_write(offset, length, before.stx_size, before.stx_blocks)?;
        if allowed < length {
            self.note_limit();
        }
        let written = write(allowed);
        let after = stat_fd(fd).or_else(|_| self.stat(id));
        if let (Ok(after), Some(account)) = (after, self.account(id)) {
            account.settle(before.stx_blocks, after.stx_blocks);
        }
        written
    }

    /// RELEASE, RELEASEDIR
    pub(super) fn release(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: ReleaseIn = input.take()?;
        self.close(wanted.handle, id)
    }

    /// FSYNC
    pub(super) fn fsync(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: FsyncIn = input.take()?;
        if wanted.handle == NO_HANDLE {
            // Nothing was written.
            return self.readable_file(wanted.handle, id).map(drop);
        }
        let file = self.handles.file(wanted.handle, id)?;
        if wanted.flags & flag::FSYNC_DATA != 0 { fdatasync(file) } else { fsync(file) }
    }

    /// FALLOCATE
    pub(super) fn fallocate(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: FallocateIn = input.take()?;
        let known = flag::FALLOC_KEEP_SIZE | flag::FALLOC_PUNCH_HOLE | flag::FALLOC_ZERO_RANGE;
        if wanted.mode & !known != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let OpenFile { fd, place, .. } = self.handles.writable_file(wanted.handle, id)?.clone();
        let end = wanted.offset.checked_add(wanted.length).ok_or(Errno::FBIG)?;
        if i64::try_from(end).is_err() {
            return Err(Errno::FBIG);
        }
        if wanted.mode & flag::FALLOC_PUNCH_HOLE == 0 {
            self.settled_account(id)?.allow_allocation(wanted.length)?;
        }
        let mode = FallocateFlags::from_bits_truncate(wanted.mode);
        self.settled(id, &fd, |_| fallocate(&fd, mode, wanted.offset, wanted.length))?;
        self.record.written(place, 0);
        Ok(())
    }

    /// LSEEK
    pub(super) fn lseek(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: LseekIn = input.take()?;
        let file = if wanted.handle == NO_HANDLE {
            self.readable_file(wanted.handle, id)?
        } else {
            self.handles.file(wanted.handle, id)?.clone()
        };
        // The guest knows all other places itself.
        let place = match wanted.whence {
            flag::SEEK_DATA => SeekFrom::Data(wanted.offset),
            flag::SEEK_HOLE => SeekFrom::Hole(wanted.offset),
            _ => return Err(Errno::INVAL),
        };
        if i64::try_from(wanted.offset).is_err() {
            return Err(Errno::NXIO);
        }
        output.put(&LseekOut { offset: seek(file, place)? });
        Ok(())
    }

    /// COPY_FILE_RANGE
    pub(super) fn copy_file_range(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: CopyFileRangeIn = input.take()?;
        if wanted.flags != 0 {
            return Err(Errno::INVAL);
        }
        let source = self.readable_file(wanted.handle_in, id)?;
        let target = self.handles.writable_file(wanted.handle_out, wanted.node_out)?.clone();
        let length = wanted.length.min(MAX_COPY);
        let fits =
            |offset: u64| offset.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok());
        if !fits(wanted.offset_in) || !fits(wanted.offset_out) {
            return Err(Errno::OVERFLOW);
        }
        // Nothing is copied beyond the end of the source, so nothing is charged for it.
        let available = stat_fd(&source)?.stx_size.saturating_sub(wanted.offset_in);
        let range = (wanted.offset_out, length.min(available));
        let copied = self.within_limit(wanted.node_out, &target.fd, range, false, |length| {
            let (mut from, mut to) = (wanted.offset_in, wanted.offset_out);
            let length = usize::try_from(length).map_err(|_| Errno::INVAL)?;
            copy_file_range(&source, Some(&mut from), &target, Some(&mut to), length)
        })?;
        self.record.read(source.place, copied);
        self.record.written(target.place, copied);
        let size = u32::try_from(copied).map_err(|_| Errno::IO)?;
        output.put(&WriteOut { size, padding: 0 });
        Ok(())
    }
}
