//! File data: OPEN, READ, WRITE, RELEASE, FSYNC, FALLOCATE, LSEEK, COPY_FILE_RANGE.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    FallocateFlags, FileType, OFlags, SeekFrom, copy_file_range, fallocate, fdatasync, fsync, seek,
};
use rustix::io::Errno;

use super::abi::{
    CopyFileRangeIn, FallocateIn, FsyncIn, LseekIn, LseekOut, OpenIn, OpenOut, ROOT_ID, ReadIn,
    ReleaseIn, WriteIn, WriteOut, flag,
};
use super::handle::Open;
use super::lookup::PERMISSIONS;
use super::node::stat_fd;
use super::record::Place;
use super::server::{MAX_DATA, Output, Server};
use super::wire::Cursor;

/// Most bytes that one `COPY_FILE_RANGE` copies, so that it does not hold up other requests.
const MAX_COPY: u64 = 16 << 20;

/// What the guest may ask of an open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    /// Access mode and `O_TRUNC`, for the host.
    pub(super) flags: OFlags,
    pub(super) writable: bool,
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
        let truncate = flags & OFlags::TRUNC;
        Ok(Self { flags: mode | truncate, writable: mode != OFlags::RDONLY })
    }

    /// Whether the open changes the share.
    fn changes(self) -> bool {
        self.writable || self.flags.contains(OFlags::TRUNC)
    }
}

impl Server {
    /// Opens a node for data. Special files are never opened, nor are links followed: the descriptor
    /// of the node is of a regular file, and so is what comes out.
    pub(super) fn open_node(&self, id: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
        let access = Access::new(flags.bits())?;
        let node = if access.changes() { self.writable_node(id)? } else { self.nodes.get(id)? };
        match node.kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::PERM),
        }
        if access.changes() {
            // The host's kernel takes set-id bits away at a write only where this process has no
            // privileges; a program that the guest has changed must not keep them in any case.
            let mode = u32::from(node.stat()?.stx_mode);
            if mode & (libc::S_ISUID | libc::S_ISGID) != 0 {
                self.set_mode(id, mode & PERMISSIONS)?;
            }
        }
        self.reopen(node, flags)
    }

    /// Adds a handle for a node, and appends it to the reply.
    pub(super) fn put_handle(
        &mut self,
        id: u64,
        open: Open,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let flags = match (&open, self.nodes.get(id).and_then(|node| self.share(node))) {
            (Open::File { .. }, Ok(share)) if share.cache => flag::OPEN_KEEP_CACHE,
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
        self.handles.check_room()?;
        let fd = self.open_node(id, access.flags)?;
        let truncated = access.flags.contains(OFlags::TRUNC);
        if truncated {
            self.settle(id);
        }
        let place = self.enter(id, truncated);
        self.put_handle(id, Open::File { fd, writable: access.writable, place }, output)
    }

    /// READ
    pub(super) fn read(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: ReadIn = input.take()?;
        let file = self.handles.file(wanted.handle, id)?;
        let size = wanted.size.min(MAX_DATA) as usize;
        output.direct = output.memory().fill_from(file, wanted.offset, size)?;
        self.record.read(self.handles.place(wanted.handle), output.direct);
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
        let file = self.handles.writable_file(wanted.handle, id)?;
        if wanted.size > MAX_DATA || wanted.size as usize != input.left() {
            return Err(Errno::INVAL);
        }
        let append = wanted.write_flags & flag::WRITE_CACHE == 0
            && OFlags::from_bits_truncate(wanted.flags).contains(OFlags::APPEND);
        let length = u64::from(wanted.size);
        let allowed = self.allow_write(id, file, wanted.offset, length, append)?;
        let size = usize::try_from(allowed).map_err(|_| Errno::INVAL)?;
        let written = input.drain_to(file, wanted.offset, size, append);
        self.settle(id);
        let written = written?;
        self.record.written(self.handles.place(wanted.handle), written);
        let size = u32::try_from(written).map_err(|_| Errno::IO)?;
        output.put(&WriteOut { size, padding: 0 });
        Ok(())
    }

    /// How many of `length` bytes the share's account lets the guest write.
    fn allow_write(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        append: bool,
    ) -> Result<u64, Errno> {
        let share = self.share(self.nodes.get(id)?)?;
        if !share.quota.limited() {
            return Ok(length);
        }
        let stat = stat_fd(file).or_else(|_| self.stat(id))?;
        let offset = if append { stat.stx_size } else { offset };
        let allowed = share.quota.allow_write(offset, length, stat.stx_size, stat.stx_blocks)?;
        if allowed < length {
            self.note_limit();
        }
        Ok(allowed)
    }

    /// Brings a share's account up to date with a file's blocks after a change.
    pub(super) fn settle(&mut self, id: u64) {
        let Ok(node) = self.nodes.get(id) else { return };
        let index = node.share;
        if !self.shares.get(index).is_some_and(|share| share.quota.limited()) {
            return;
        }
        let Ok(after) = self.stat(id).map(|stat| stat.stx_blocks) else { return };
        let Ok(node) = self.nodes.get_mut(id) else { return };
        let before = std::mem::replace(&mut node.blocks, after);
        if let Some(share) = self.shares.get_mut(index) {
            share.quota.settle(before, after);
        }
    }

    /// RELEASE, RELEASEDIR
    pub(super) fn release(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: ReleaseIn = input.take()?;
        self.close(wanted.handle, id)
    }

    /// FSYNC
    pub(super) fn fsync(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: FsyncIn = input.take()?;
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
        let file = self.handles.writable_file(wanted.handle, id)?;
        let end = wanted.offset.checked_add(wanted.length).ok_or(Errno::FBIG)?;
        if i64::try_from(end).is_err() {
            return Err(Errno::FBIG);
        }
        if wanted.mode & flag::FALLOC_PUNCH_HOLE == 0 {
            self.share(self.nodes.get(id)?)?.quota.allow_allocation(wanted.length)?;
        }
        let mode = FallocateFlags::from_bits_truncate(wanted.mode);
        let result = fallocate(file, mode, wanted.offset, wanted.length);
        self.settle(id);
        if result.is_ok() {
            self.record.written(self.handles.place(wanted.handle), 0);
        }
        result
    }

    /// LSEEK
    pub(super) fn lseek(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: LseekIn = input.take()?;
        let file = self.handles.file(wanted.handle, id)?;
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
        let source = self.handles.file(wanted.handle_in, id)?;
        let target = self.handles.writable_file(wanted.handle_out, wanted.node_out)?;
        let length = wanted.length.min(MAX_COPY);
        let fits =
            |offset: u64| offset.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok());
        if !fits(wanted.offset_in) || !fits(wanted.offset_out) {
            return Err(Errno::OVERFLOW);
        }
        // Nothing is copied beyond the end of the source, so nothing is charged for it.
        let available = stat_fd(source)?.stx_size.saturating_sub(wanted.offset_in);
        let length = length.min(available);
        let allowed =
            self.allow_write(wanted.node_out, target, wanted.offset_out, length, false)?;
        let (mut from, mut to) = (wanted.offset_in, wanted.offset_out);
        let length = usize::try_from(allowed).map_err(|_| Errno::INVAL)?;
        let copied =
            copy_file_range(source.as_fd(), Some(&mut from), target.as_fd(), Some(&mut to), length);
        self.settle(wanted.node_out);
        let copied = copied?;
        self.record.read(self.handles.place(wanted.handle_in), copied);
        self.record.written(self.handles.place(wanted.handle_out), copied);
        let size = u32::try_from(copied).map_err(|_| Errno::IO)?;
        output.put(&WriteOut { size, padding: 0 });
        Ok(())
    }
}
