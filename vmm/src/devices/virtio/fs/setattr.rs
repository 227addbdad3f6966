//! SETATTR: mode, owner, size and times.

use rustix::fs::{
    AtFlags, FileType, Mode, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, chmodat, ftruncate,
    utimensat,
};
use rustix::io::Errno;

use super::abi::{ROOT_ID, SetattrIn, flag};
use super::io::Access;
use super::lookup::PERMISSIONS;
use super::server::{Output, Server, fd_path};
use super::wire::Cursor;

impl Server {
    /// SETATTR
    pub(super) fn setattr(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: SetattrIn = input.take()?;
        let node = self.writable_node(id)?;
        let share = self.share(node)?;
        let has = |bit: u32| wanted.valid & bit != 0;
        // Everything that can be refused comes before the first change.
        if (has(flag::SET_UID) && wanted.uid != share.uid)
            || (has(flag::SET_GID) && wanted.gid != share.gid)
        {
            return Err(Errno::PERM);
        }
        let times = times(&wanted)?;
        if has(flag::SET_SIZE) {
            let handle = has(flag::SET_HANDLE).then_some(wanted.handle);
            self.truncate(id, handle, wanted.size)?;
            self.enter(id, true);
        }
        if has(flag::SET_MODE) {
            self.set_mode(id, wanted.mode)?;
        }
        if let Some(times) = times {
            utimensat(self.reach(id)?, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        let stat = self.stat(id)?;
        self.put_attr(id, &stat, output)
    }

    /// Sets the permission bits of a node.
    pub(super) fn set_mode(&mut self, id: u64, mode: u32) -> Result<(), Errno> {
        let node = self.nodes.get(id)?;
        match node.kind {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::PERM),
        }
        let mode = Mode::from_raw_mode(mode & PERMISSIONS);
        let file = self.reach(id)?;
        chmodat(self.proc_fd(), fd_path(&file).as_str(), mode, AtFlags::empty())
    }

    /// Sets the size of a regular file, through a handle if there is one.
    fn truncate(&mut self, id: u64, handle: Option<u64>, size: u64) -> Result<(), Errno> {
        if id == ROOT_ID || i64::try_from(size).is_err() {
            return Err(Errno::INVAL);
        }
        let fd = match handle {
            Some(handle) => self.handles.writable_file(handle, id)?.fd.clone(),
            None => self.open_node(id, Access::WRITE)?,
        };
        self.settled(id, &fd, |_| ftruncate(&fd, size))
    }
}

/// The times that a request sets; `None` if it sets none.
fn times(wanted: &SetattrIn) -> Result<Option<Timestamps>, Errno> {
    let access = time(wanted, flag::SET_ATIME, flag::SET_ATIME_NOW, wanted.atime, wanted.atime_ns)?;
    let change = time(wanted, flag::SET_MTIME, flag::SET_MTIME_NOW, wanted.mtime, wanted.mtime_ns)?;
    let omit = || Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    Ok(match (access, change) {
        (None, None) => None,
        (access, change) => Some(Timestamps {
            last_access: access.unwrap_or_else(omit),
            last_modification: change.unwrap_or_else(omit),
        }),
    })
}

fn time(
    wanted: &SetattrIn,
    bit: u32,
    now: u32,
    seconds: u64,
    nanoseconds: u32,
) -> Result<Option<Timespec>, Errno> {
    if wanted.valid & now != 0 {
        return Ok(Some(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }));
    }
    if wanted.valid & bit == 0 {
        return Ok(None);
    }
    // Greater ones have a meaning of their own.
    if nanoseconds >= 1_000_000_000 {
        return Err(Errno::INVAL);
    }
    // Times before 1970 are negative.
    Ok(Some(Timespec { tv_sec: seconds.cast_signed(), tv_nsec: i64::from(nanoseconds) }))
}
