//! Listings: OPENDIR, READDIR, READDIRPLUS, FSYNCDIR.
//!
//! The place in a listing is the host file system's own cookie, so nothing is kept between requests
//! but the descriptor and where it stands.
//!
//! A reply ends only where the next entry does not fit, or at the end of the folder: Casulo's guest kernel
//! (`FUSE_WHOLE_LISTINGS`, a patch in `kernel-config`) takes a reply with room left for the end.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, RawDir, SeekFrom, fsync, openat2, seek};
use rustix::io::Errno;

use super::abi::{Dirent, EntryOut, FsyncIn, ROOT_ID, ReadIn, Wire};
use super::handle::Open;
use super::names::Name;
use super::reach::RESOLVE;
use super::server::{Output, Server};
use super::unopened::NO_HANDLE;
use super::wire::Cursor;

/// Most bytes of one listing reply.
const MAX_REPLY: usize = 128 << 10;
/// Bytes that are read from the host's folder at a time: at most this many, at least enough for the
/// longest name.
const BUFFER: (usize, usize) = (1024, 32 << 10);

/// Collects entries up to a size.
struct Listing {
    bytes: Vec<u8>,
    /// Of its entries, each with a lookup.
    nodes: Vec<u64>,
    most: usize,
    plus: bool,
}

impl Listing {
    /// Whether one more entry with such a name fits.
    fn fits(&self, name: &[u8]) -> bool {
        let entry = if self.plus { EntryOut::SIZE } else { 0 };
        let size = (entry + Dirent::SIZE).saturating_add(name.len().next_multiple_of(8));
        self.bytes.len().saturating_add(size) <= self.most
    }

    fn push(&mut self, entry: &EntryOut, dirent: (u64, u64, FileType), name: &[u8]) {
        let (ino, offset, kind) = dirent;
        if self.plus {
            entry.put(&mut self.bytes);
            self.nodes.extend((entry.node != 0).then_some(entry.node));
        }
        let name_len = u32::try_from(name.len()).unwrap_or(0);
        // As in a mode, without the permissions.
        let kind = (kind.as_raw_mode() & libc::S_IFMT) >> 12;
        Dirent { ino, offset, name_len, kind }.put(&mut self.bytes);
        self.bytes.extend_from_slice(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }
}

/// What a folder of the host says is in it.
enum Child {
    /// `.` or `..`
    Dots,
    Named(Name),
}

impl Child {
    /// `None` for names that no request can have, such as those of over 255 bytes on vfat: they are not
    /// listed. One would also not fit where the guest's kernel takes it for certain that one more does.
    fn new(name: &[u8]) -> Option<Self> {
        match name {
            b"." | b".." => Some(Self::Dots),
            name => Name::new(name).ok().map(Self::Named),
        }
    }
}

impl Server {
    /// OPENDIR
    pub(super) fn opendir(&mut self, id: u64, output: &mut Output<'_>) -> Result<(), Errno> {
        self.handles.check_room()?;
        let open = if id == ROOT_ID {
            Open::Root
        } else {
            Open::Dir { fd: self.open_dir(id)?, position: 0 }
        };
        self.put_handle(id, open, output)
    }

    /// Opens a folder for listing.
    pub(super) fn open_dir(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.folder(id)?;
        Ok(Arc::new(openat2(self.reach(id)?, c".", flags, Mode::empty(), RESOLVE)?))
    }

    /// READDIR, READDIRPLUS
    pub(super) fn readdir(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
        plus: bool,
    ) -> Result<(), Errno> {
        let wanted: ReadIn = input.take()?;
        let most = (wanted.size as usize).min(output.memory().left()).min(MAX_REPLY);
        let (bytes, nodes) = (Vec::with_capacity(most), Vec::new());
        let mut listing = Listing { bytes, nodes, most, plus };
        if wanted.handle != NO_HANDLE && matches!(self.handles.get(wanted.handle, id)?, Open::Root)
        {
            self.list_shares(wanted.offset, &mut listing)?;
        } else {
            self.list_folder(id, wanted.handle, wanted.offset, &mut listing)?;
        }
        output.set_body(listing.bytes);
        Ok(())
    }

    /// The entries of the synthetic root. None of them counts as a lookup.
    fn list_shares(&self, offset: u64, listing: &mut Listing) -> Result<(), Errno> {
        let dots = [(&b"."[..], ROOT_ID), (b"..", ROOT_ID)].into_iter();
        let dots = dots.map(|(name, ino)| (name, ino, FileType::Directory));
        let shares = self.shares.iter().filter_map(|share| {
            let kind = self.nodes.get(share.root).ok()?.kind;
            Some((share.name.as_bytes(), share.root, kind))
        });
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        for ((name, ino, kind), next) in dots.chain(shares).zip(1_u64..).skip(skip) {
            if !listing.fits(name) {
                // An empty reply would mean the end.
                return if listing.bytes.is_empty() { Err(Errno::INVAL) } else { Ok(()) };
            }
            listing.push(&EntryOut::default(), (ino, next, kind), name);
        }
        Ok(())
    }

    fn list_folder(
        &mut self,
        id: u64,
        handle: u64,
        offset: u64,
        listing: &mut Listing,
    ) -> Result<(), Errno> {
        if i64::try_from(offset).is_err() {
            return Err(Errno::INVAL);
        }
        self.listed_dir(handle, id)?;
        let at_root = self.folder(id)?.is_share_root();
        let (fd, position) = self.listed_dir(handle, id)?;
        // Until this has ended well, nobody knows where the descriptor stands. No cookie has this value.
        if std::mem::replace(position, u64::MAX) != offset {
            seek(&**fd, SeekFrom::Start(offset))?;
        }
        // An entry of the guest's with attributes is some five times as large as one of the host's.
        let share_of_reply = if listing.plus { listing.most / 4 } else { listing.most };
        let mut buffer = vec![MaybeUninit::uninit(); share_of_reply.clamp(BUFFER.0, BUFFER.1)];
        // The table of handles must not stay borrowed while children are looked up.
        let fd = fd.clone();
        let mut last = offset;
        let mut entries = RawDir::new(fd.as_fd(), &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    // The guest does not get to know of these lookups.
                    listing.nodes.drain(..).for_each(|node| self.forget_node(node, 1));
                    return Err(error);
                }
            };
            let name = entry.file_name().to_bytes();
            let cookie = entry.next_entry_cookie();
            let Some(child) = Child::new(name) else {
                last = cookie;
                continue;
            };
            if !listing.fits(name) {
                // An empty reply would mean the end. The descriptor stands further on than the guest.
                return if listing.bytes.is_empty() { Err(Errno::INVAL) } else { Ok(()) };
            }
            // What lies above a share is not the guest's business, its inode number included.
            let ino = if name == b".." && at_root { ROOT_ID } else { entry.ino() };
            let plus = match &child {
                // Without a node, the guest looks the name up when it needs it, and meets the error.
                Child::Named(name) if listing.plus && !self.nodes.is_crowded() => {
                    self.look_up_in(id, &fd, name).unwrap_or_default()
                }
                _ => EntryOut::default(),
            };
            listing.push(&plus, (ino, cookie, entry.file_type()), name);
            last = cookie;
        }
        *self.listed_dir(handle, id)?.1 = last;
        Ok(())
    }

    /// FSYNCDIR
    pub(super) fn fsyncdir(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let wanted: FsyncIn = input.take()?;
        if wanted.handle == NO_HANDLE {
            // Nothing was changed.
            return self.listed_dir(wanted.handle, id).map(drop);
        }
        if let Open::Root = self.handles.get(wanted.handle, id)? {
            return Ok(());
        }
        fsync(self.handles.dir(wanted.handle, id)?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_request_can_have_are_not_listed() {
        assert!(matches!(Child::new(b"."), Some(Child::Dots)));
        assert!(matches!(Child::new(b".."), Some(Child::Dots)));
        assert!(matches!(Child::new(&[b'x'; 255]), Some(Child::Named(_))));
        for name in [&[b'x'; 256][..], b"a/b", b""] {
            assert!(Child::new(name).is_none(), "{name:?}");
        }
    }

    #[test]
    fn where_the_guest_takes_a_reply_for_the_end_every_name_would_have_fitted() {
        // As the guest's kernel computes it (`fuse_listing_end` in `kernel-config/patches`).
        for (plus, most) in [(false, 24 + 256), (true, 152 + 256)] {
            let listing = |most| Listing { bytes: Vec::new(), nodes: Vec::new(), most, plus };
            assert!(listing(most).fits(&[b'x'; 255]));
            assert!(!listing(most - 1).fits(&[b'x'; 255]));
        }
    }
}
