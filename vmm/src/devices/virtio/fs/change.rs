//! Names made, moved and removed: CREATE, MKNOD, MKDIR, SYMLINK, LINK, UNLINK, RMDIR, RENAME.
//!
//! None of the system calls here follows a symbolic link in the last component, and the names have
//! only one.

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat2, renameat_with,
    symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::abi::{
    CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, ROOT_ID, Rename2In, RenameIn, flag,
};
use super::handle::Open;
use super::io::Access;
use super::lookup::{ONE_NAME, PERMISSIONS, RESOLVE, open_child};
use super::names::{Name, TARGET_MAX, name_and_target, one_name, two_names};
use super::node::{Node, kind_of, stat_fd};
use super::server::{Output, Server, fd_path};
use super::wire::Cursor;

/// Permission bits of a new file.
fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & PERMISSIONS)
}

/// What a name will be gone from, for the share's account.
struct Victim {
    /// Its node, if the guest knows it: then its blocks count until the node is gone.
    known: bool,
    blocks: u64,
    links: u32,
    kind: FileType,
}

impl Server {
    /// Folder `id` of a share in which names may be changed.
    fn writable_folder(&self, id: u64) -> Result<&Node, Errno> {
        self.writable_node(id)?;
        self.folder(id)
    }

    /// Folder `id`, in which there is room for one more name.
    fn folder_with_room(&self, id: u64) -> Result<&Node, Errno> {
        let folder = self.writable_folder(id)?;
        self.share(folder)?.quota.check_name()?;
        // A file that could not be told to the guest would have been made all the same.
        self.nodes.check_room()?;
        Ok(folder)
    }

    /// Counts one more name in the share of a folder.
    fn count_name(&mut self, folder: u64) {
        let Ok(index) = self.nodes.get(folder).map(|node| node.share) else { return };
        if let Some(share) = self.shares.get_mut(index) {
            share.quota.add_name();
        }
    }

    /// Counts the name that was just made in a folder, and appends its node to the reply.
    fn put_new(&mut self, folder: u64, name: &Name, output: &mut Output<'_>) -> Result<(), Errno> {
        self.count_name(folder);
        let entry = self.look_up_child(folder, name)?;
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
        // What exists is found as a path first, so that a FIFO or device is not opened.
        if !exclusive {
            match self.look_up_child(parent, &name) {
                Ok(entry) => return self.open_found(entry, access, output),
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        let flags = access.flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let folder = self.folder_with_room(parent)?;
        let made = openat2(
            folder,
            name.as_c_str(),
            flags | OFlags::CLOEXEC,
            permissions(wanted.mode),
            RESOLVE,
        );
        let fd = match made {
            Ok(fd) => fd,
            Err(Errno::EXIST) if !exclusive => {
                // The host was faster.
                let entry = self.look_up_child(parent, &name)?;
                return self.open_found(entry, access, output);
            }
            Err(error) => return Err(error),
        };
        self.count_name(parent);
        // The name may be another file's by now, the descriptor cannot.
        let path = self.reopen(&fd, OFlags::PATH)?;
        let entry = self.look_up_fd(parent, &name, path)?;
        let place = self.enter(entry.node, true);
        output.put(&entry);
        self.put_handle(entry.node, Open::File { fd, writable: access.writable, place }, output)
    }

    /// Opens a file that CREATE has found, for which a lookup was counted.
    fn open_found(
        &mut self,
        entry: EntryOut,
        access: Access,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let opened = self.open_node(entry.node, access.flags);
        if opened.is_err() {
            // The guest does not get to know of the lookup.
            self.nodes.forget(entry.node, 1);
        }
        let fd = opened?;
        self.settle(entry.node);
        let place = self.enter(entry.node, access.flags.contains(OFlags::TRUNC));
        output.put(&entry);
        self.put_handle(entry.node, Open::File { fd, writable: access.writable, place }, output)
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
        let folder = self.folder_with_room(parent)?;
        let mode = permissions(wanted.mode);
        mknodat(folder, name.as_c_str(), FileType::RegularFile, mode, 0)?;
        self.put_new(parent, &name, output)
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
        let folder = self.folder_with_room(parent)?;
        mkdirat(folder, name.as_c_str(), permissions(wanted.mode))?;
        self.put_new(parent, &name, output)
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
        let folder = self.folder_with_room(parent)?;
        symlinkat(target.as_c_str(), folder, name.as_c_str())?;
        self.put_new(parent, &name, output)
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
        let folder = self.folder_with_room(parent)?;
        if wanted.node == ROOT_ID {
            return Err(Errno::XDEV);
        }
        let source = self.nodes.get(wanted.node)?;
        if source.share != folder.share || source.is_share_root() {
            return Err(Errno::XDEV);
        }
        if !matches!(source.kind, FileType::RegularFile | FileType::Symlink) {
            return Err(Errno::PERM);
        }
        // Follows the one link in /proc, to the very file of the node, and none beyond.
        let path = fd_path(source);
        let flags = AtFlags::SYMLINK_FOLLOW;
        linkat(self.proc_fd(), path.as_str(), folder, name.as_c_str(), flags)?;
        self.put_new(parent, &name, output)
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
        let victim = self.victim(folder, &name);
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        unlinkat(folder, name.as_c_str(), flags)?;
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
        if from.share != to.share {
            return Err(Errno::XDEV);
        }
        let victim = if flags == 0 { self.replaced(from, &name, to, &new_name) } else { None };
        let flags = RenameFlags::from_bits_truncate(flags);
        renameat_with(from, name.as_c_str(), to, new_name.as_c_str(), flags)?;
        let moved = self.known_child(new_parent, &new_name);
        let exchanged = self.known_child(parent, &name);
        self.uncount(new_parent, victim);
        if let Some(id) = moved {
            self.nodes.moved(id, new_parent, &new_name);
        }
        if let Some(id) = exchanged {
            self.nodes.moved(id, parent, &name);
        }
        Ok(())
    }

    /// The node of a child, if the guest knows it.
    fn known_child(&self, folder: u64, name: &Name) -> Option<u64> {
        let folder = self.nodes.get(folder).ok()?;
        self.nodes.find(folder.share, &stat_child(folder, name)?)
    }

    /// What a rename takes the name from. Nothing, if both names are the same file's: then it does
    /// nothing.
    fn replaced(&self, from: &Node, name: &Name, to: &Node, new_name: &Name) -> Option<Victim> {
        let victim = self.victim(to, new_name)?;
        let (old, new) = (stat_child(from, name)?, stat_child(to, new_name)?);
        let same = (old.stx_dev_major, old.stx_dev_minor, old.stx_ino)
            == (new.stx_dev_major, new.stx_dev_minor, new.stx_ino);
        (!same).then_some(victim)
    }

    /// What loses a name in a folder, if its share counts.
    fn victim(&self, folder: &Node, name: &Name) -> Option<Victim> {
        if !self.share(folder).ok()?.quota.limited() {
            return None;
        }
        let stat = stat_child(folder, name)?;
        Some(Victim {
            known: self.nodes.find(folder.share, &stat).is_some(),
            blocks: stat.stx_blocks,
            links: stat.stx_nlink,
            kind: kind_of(&stat),
        })
    }

    /// A name is gone from a folder.
    fn uncount(&mut self, folder: u64, victim: Option<Victim>) {
        let Some(victim) = victim else { return };
        let Ok(index) = self.nodes.get(folder).map(|node| node.share) else { return };
        let Some(share) = self.shares.get_mut(index) else { return };
        share.quota.remove_name();
        if !victim.known && victim.links == 1 && victim.kind == FileType::RegularFile {
            share.quota.settle(victim.blocks, 0);
        }
    }
}

/// Attributes of a child of a folder.
fn stat_child(folder: &Node, name: &Name) -> Option<rustix::fs::Statx> {
    use std::os::fd::AsFd;
    open_child(folder, name).and_then(|fd| stat_fd(fd.as_fd())).ok()
}
