//! Names made, moved and removed: CREATE, MKNOD, MKDIR, SYMLINK, LINK, UNLINK, RMDIR, RENAME.
//!
//! None of the system calls here follows a symbolic link in the last component, and the names have
//! only one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Statx, linkat, mkdirat, mknodat, openat2,
    renameat_with, symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::abi::{CreateIn, LinkIn, MkdirIn, MknodIn, ROOT_ID, Rename2In, RenameIn, flag};
use super::deferred::NAME_GROWTH;
use super::handle::Open;
use super::io::Access;
use super::lookup::{ONE_NAME, PERMISSIONS};
use super::names::{Name, TARGET_MAX, name_and_target, one_name, two_names};
use super::node::{kind_of, stat_fd};
use super::quota::Quota;
use super::reach::RESOLVE;
use super::server::{Output, Server, fd_path};
use super::wire::Cursor;

/// Permission bits of a new file.
fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & PERMISSIONS)
}

/// What a name will be gone from.
struct Victim {
    blocks: u64,
    /// Whether nothing but this name keeps the blocks.
    last: bool,
}

impl Server {
    /// Folder `id` of a share in which names may be changed.
    fn writable_folder(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        self.writable_node(id)?;
        self.folder(id)?;
        self.reach(id)
    }

    /// The account of a node's share, counted if little of it is left.
    fn counted(&mut self, id: u64) -> Result<&Quota, Errno> {
        let account = self.account_of(id).ok_or(Errno::STALE)?;
        if self.quota(account).is_tight() {
            self.settle_account(account);
        }
        Ok(self.quota(account))
    }

    /// Folder `id`, in which there is room for one more name.
    fn folder_with_room(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        self.writable_node(id)?;
        self.folder(id)?;
        self.counted(id)?.check_name()?;
        // A file that could not be told to the guest would have been made all the same.
        self.nodes.check_room()?;
        self.reach(id)
    }

    /// Makes a name in a folder by `make`, counts it, and appends its node to the reply.
    fn make(
        &mut self,
        parent: u64,
        name: &Name,
        output: &mut Output<'_>,
        make: impl FnOnce(&Self, &OwnedFd) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let folder = self.folder_with_room(parent)?;
        self.growing(parent, &folder, NAME_GROWTH, |server| make(server, &folder))?;
        if let Some(account) = self.account(parent) {
            account.add_name();
        }
        let stat = self.share(self.nodes.get(parent)?)?.stat_child(&folder, name)?;
        let kind = kind_of(&stat);
        if let Some(account) = self.account(parent)
            && (kind == FileType::Directory || (kind == FileType::Symlink && stat.stx_nlink == 1))
        {
            account.settle(0, stat.stx_blocks);
        }
        let entry = self.look_up_stat(parent, name, &stat)?;
        output.put(&entry);
        Ok(())
    }

    /// CREATE
    pub(super) fn create(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: CreateIn = input.take()?;
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        let access = Access::new(wanted.flags)?;
        self.handles.check_room()?;
        self.writable_folder(parent)?;
        let exclusive = OFlags::from_bits_truncate(wanted.flags).contains(OFlags::EXCL);
        let folder = match self.folder_with_room(parent) {
            Ok(folder) => folder,
            // What exists needs no room.
            Err(error) if !exclusive => {
                return self.open_found(parent, &name, access, error, output);
            }
            Err(error) => return Err(error),
        };
        // With `O_EXCL`, so that what exists, a FIFO for example, is not opened by its name.
        let flags =
            access.mode | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = permissions(wanted.mode);
        let made = self.growing(parent, &folder, NAME_GROWTH, |_| {
            openat2(&folder, name.as_c_str(), flags, mode, RESOLVE)
        });
        let fd = match made {
            Ok(fd) => Arc::new(fd),
            Err(Errno::EXIST) if !exclusive => {
                return self.open_found(parent, &name, access, Errno::EXIST, output);
            }
            Err(error) => return Err(error),
        };
        if let Some(account) = self.account(parent) {
            account.add_name();
        }
        // The name may be another file's by now, the descriptor cannot.
        let stat = stat_fd(&fd)?;
        let entry = self.look_up_stat(parent, &name, &stat)?;
        self.watch(entry.node, &stat);
        let place = self.enter(entry.node, true);
        output.put(&entry);
        self.put_handle(entry.node, Open::File(access.open_file(fd, place)), output)
    }

    /// Opens what CREATE has found to exist; `absent` is the answer if it does not.
    fn open_found(
        &mut self,
        parent: u64,
        name: &Name,
        access: Access,
        absent: Errno,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let entry = match self.look_up_child(parent, name) {
            Err(Errno::NOENT) => return Err(absent),
            other => other?,
        };
        match self.open_as(entry.node, access) {
            Ok(file) => {
                output.put(&entry);
                self.put_handle(entry.node, Open::File(file), output)
            }
            Err(error) => {
                // The guest does not get to know of the lookup.
                self.forget_node(entry.node, 1);
                Err(error)
            }
        }
    }

    /// MKNOD: regular files only.
    pub(super) fn mknod(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: MknodIn = input.take()?;
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        let kind = wanted.mode & libc::S_IFMT;
        if kind != 0 && kind != libc::S_IFREG {
            return Err(Errno::PERM);
        }
        let mode = permissions(wanted.mode);
        self.make(parent, &name, output, |_, folder| {
            mknodat(folder, name.as_c_str(), FileType::RegularFile, mode, 0)
        })
    }

    /// MKDIR
    pub(super) fn mkdir(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: MkdirIn = input.take()?;
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        self.make(parent, &name, output, |_, folder| {
            mkdirat(folder, name.as_c_str(), permissions(wanted.mode))
        })
    }

    /// SYMLINK
    pub(super) fn symlink(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let bytes = input.take_rest(ONE_NAME + TARGET_MAX + 1)?;
        let (name, target) = name_and_target(&bytes)?;
        self.make(parent, &name, output, |_, folder| {
            symlinkat(target.as_c_str(), folder, name.as_c_str())
        })
    }

    /// LINK
    pub(super) fn link(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let wanted: LinkIn = input.take()?;
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        self.folder_with_room(parent)?;
        if wanted.node == ROOT_ID {
            return Err(Errno::XDEV);
        }
        let source = self.nodes.get(wanted.node)?;
        if source.share != self.nodes.get(parent)?.share || source.is_share_root() {
            return Err(Errno::XDEV);
        }
        if !matches!(source.kind, FileType::RegularFile | FileType::Symlink) {
            return Err(Errno::PERM);
        }
        let source = self.reach(wanted.node)?;
        self.make(parent, &name, output, |server, folder| {
            // Follows the one link in /proc, to the very file of the node, and none beyond.
            let (path, flags) = (fd_path(&source), AtFlags::SYMLINK_FOLLOW);
            linkat(server.proc_fd(), path.as_str(), folder, name.as_c_str(), flags)
        })
    }

    /// UNLINK, RMDIR
    pub(super) fn unlink(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        is_folder: bool,
    ) -> Result<(), Errno> {
        let name = one_name(&input.take_rest(ONE_NAME)?)?;
        let folder = self.writable_folder(parent)?;
        let victim = self.victim(parent, &folder, &name);
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(&folder, name.as_c_str(), flags)?;
        self.uncount(parent, victim);
        Ok(())
    }

    /// RENAME, RENAME2
    pub(super) fn rename(
        &mut self,
        parent: u64,
        input: &mut Cursor<'_>,
        with_flags: bool,
    ) -> Result<(), Errno> {
        let (new_parent, flags) = if with_flags {
            let wanted: Rename2In = input.take()?;
            (wanted.new_parent, wanted.flags)
        } else {
            (input.take::<RenameIn>()?.new_parent, 0)
        };
        let (name, new_name) = two_names(&input.take_rest(2 * ONE_NAME)?)?;
        // RENAME_WHITEOUT, which makes a device, is among the others.
        if flags & !(flag::RENAME_NOREPLACE | flag::RENAME_EXCHANGE) != 0 {
            return Err(Errno::INVAL);
        }
        let from = self.writable_folder(parent)?;
        let to = self.writable_folder(new_parent)?;
        let share = self.nodes.get(parent)?.share;
        if share != self.nodes.get(new_parent)?.share {
            return Err(Errno::XDEV);
        }
        let old = self.stat_in(parent, &from, &name);
        let new = self.stat_in(new_parent, &to, &new_name);
        // If both names are the same file's, nothing happens.
        let same = match (&old, &new) {
            (Some(old), Some(new)) => same_file(old, new),
            _ => false,
        };
        // A folder does not shrink when names go, so a guest with no room left could have its names make
        // one folder after the other grow. What takes the place of another name needs no room.
        if new.is_none() {
            self.counted(new_parent)?.check_entry()?;
        }
        let exchange = flags & flag::RENAME_EXCHANGE != 0;
        let victim = if exchange || same { None } else { self.victim(new_parent, &to, &new_name) };
        let flags = RenameFlags::from_bits_truncate(flags);
        self.growing(new_parent, &to, NAME_GROWTH, |_| {
            renameat_with(&from, name.as_c_str(), &to, new_name.as_c_str(), flags)
        })?;
        self.uncount(new_parent, victim);
        if same {
            return Ok(());
        }
        if let Some(id) = old.and_then(|stat| self.nodes.find(share, &stat)) {
            self.nodes.moved(id, new_parent, &new_name);
        }
        if let Some(id) = new.filter(|_| exchange).and_then(|stat| self.nodes.find(share, &stat)) {
            self.nodes.moved(id, parent, &name);
        }
        Ok(())
    }

    /// Attributes of a child of a folder, which is open as `fd`.
    fn stat_in(&self, folder: u64, fd: &OwnedFd, name: &Name) -> Option<Statx> {
        self.share(self.nodes.get(folder).ok()?).ok()?.stat_child(fd, name).ok()
    }

    /// What loses a name in a folder, which is open as `fd`.
    fn victim(&mut self, folder: u64, fd: &OwnedFd, name: &Name) -> Option<Victim> {
        let share = self.nodes.get(folder).ok()?.share;
        let stat = self.stat_in(folder, fd, name)?;
        let is_folder = kind_of(&stat) == FileType::Directory;
        if let Some(id) = self.nodes.find(share, &stat) {
            self.settle_node(id);
            if is_folder {
                self.keep_folder(id);
            }
        }
        let last = is_folder || (stat.stx_nlink == 1 && !self.is_open(folder, &stat));
        Some(Victim { blocks: stat.stx_blocks, last })
    }

    /// A name is gone from a folder.
    fn uncount(&mut self, folder: u64, victim: Option<Victim>) {
        let Some(victim) = victim else { return };
        let Some(account) = self.account(folder) else { return };
        account.remove_name();
        // An open file's blocks become free when it is closed.
        if victim.last {
            account.settle(victim.blocks, 0);
        }
    }
}

fn same_file(a: &Statx, b: &Statx) -> bool {
    let identity = |stat: &Statx| (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino);
    identity(a) == identity(b)
}
