//! What ordinary programs do.

use super::*;
use std::os::unix::fs::PermissionsExt;

#[test]
fn init_agrees_on_large_requests_and_submounts() {
    let reply = World::new().init();
    assert_eq!((reply.major, reply.minor, reply.max_write), (7, 38, 1 << 20));
    assert_eq!(reply.max_pages, 256);
    assert_ne!(reply.flags & init::SUBMOUNTS, 0);
    assert_eq!(reply.flags2, init::BATCH_FORGETS | init::WHOLE_LISTINGS);
    // Write-back caching, and everything else that is not known here.
    assert_eq!(reply.flags & (1 << 16), 0);
    assert_eq!(reply.flags & (1 << 31), 0);
}

#[test]
fn other_versions_are_refused_or_talked_down() {
    let mut world = World::new();
    let old = bytes_of(&InitIn { major: 7, minor: 12, max_readahead: 0, flags: 0 });
    assert_eq!(world.call(op::INIT, 0, &[&old]).unwrap_err(), Errno::PROTO);
    assert_eq!(world.lookup(ROOT_ID, "rw").unwrap_err(), Errno::IO, "not agreed");
    let new = bytes_of(&InitIn { major: 8, minor: 0, max_readahead: 0, flags: 0 });
    let reply = world.call(op::INIT, 0, &[&new]).unwrap();
    assert_eq!(InitOut::parse(&reply).unwrap().major, 7);
    // A guest that offers no second word gets none.
    let plain = bytes_of(&InitIn { major: 7, minor: 38, max_readahead: 0, flags: 0 });
    let reply = world.call(op::INIT, 0, &[&plain, &[0xff; 48]]).unwrap();
    assert_eq!(InitOut::parse(&reply).unwrap().flags2, 0);
    let reply = world.call(op::INIT, 0, &[&new]).unwrap();
    assert_eq!(InitOut::parse(&reply).unwrap().major, 7);
    assert_eq!(world.lookup(ROOT_ID, "rw").unwrap_err(), Errno::IO);
}

#[test]
fn shares_are_submounts_owned_by_the_guest_user() {
    let mut world = World::new();
    let root = world.getattr(ROOT_ID).unwrap().attr;
    assert_eq!(root.mode, libc::S_IFDIR | 0o555);
    let entry = world.lookup(ROOT_ID, "rw").unwrap();
    assert_eq!(entry.attr.flags, flag::ATTR_SUBMOUNT);
    assert_eq!((entry.attr.uid, entry.attr.gid), (GUEST_UID, GUEST_GID));
    let file = world.lookup(entry.node, "a.txt").unwrap();
    assert_eq!(file.attr.flags, 0);
    assert_eq!((file.attr.uid, file.attr.gid), (GUEST_UID, GUEST_GID));
    assert_eq!(file.entry_valid, 1);
    let input = world.node("ro");
    assert_eq!(world.lookup(input, "a.txt").unwrap().entry_valid, 3600);
    let absent = world.lookup(input, "absent").unwrap();
    assert_eq!((absent.node, absent.entry_valid), (0, 3600));
    assert_eq!(world.lookup(entry.node, "absent").unwrap_err(), Errno::NOENT);
    assert_eq!(world.lookup(ROOT_ID, "absent").unwrap_err(), Errno::NOENT);
}

#[test]
fn files_are_made_written_read_and_removed() {
    let mut world = World::new();
    let rw = world.node("rw");
    let (entry, handle) = world.create(rw, "new", libc::O_RDWR | libc::O_EXCL, 0o6754).unwrap();
    assert_eq!(entry.attr.mode, libc::S_IFREG | 0o754);
    let data: Vec<u8> = (0..100_000_u32).map(|value| value as u8).collect();
    assert_eq!(world.write(entry.node, handle, 5, &data), Ok(100_000));
    assert_eq!(world.read(entry.node, handle, 5, 200_000).unwrap(), data);
    assert_eq!(world.read(entry.node, handle, 200_000, 10).unwrap(), b"");
    assert_eq!(fs::read(world.path("rw/new")).unwrap()[5..], data);
    assert_eq!(fs::metadata(world.path("rw/new")).unwrap().permissions().mode() & 0o7777, 0o754);
    let again = world.create(rw, "new", libc::O_RDWR | libc::O_EXCL, 0o644);
    assert_eq!(again.unwrap_err(), Errno::EXIST);
    world.named(op::UNLINK, rw, "new").unwrap();
    assert_eq!(world.read(entry.node, handle, 5, 3).unwrap(), data[..3], "unlinked while open");
    assert_eq!(world.getattr(entry.node).unwrap().attr.nlink, 0);
    world.release(entry.node, handle).unwrap();
    assert_eq!(world.lookup(rw, "new").unwrap_err(), Errno::NOENT);
}

#[test]
fn appends_go_to_the_end_and_truncation_works() {
    let mut world = World::new();
    let node = world.node("rw/a.txt");
    let handle = world.open(node, libc::O_WRONLY | libc::O_APPEND).unwrap();
    fs::write(world.path("rw/a.txt"), "12345").unwrap();
    let flags = libc::O_APPEND as u32;
    let append = WriteIn { handle, offset: 1, size: 2, flags, ..Default::default() };
    world.call(op::WRITE, node, &[&bytes_of(&append), b"67"]).unwrap();
    assert_eq!(fs::read(world.path("rw/a.txt")).unwrap(), b"1234567");
    // From the page cache: the place counts.
    let cached = WriteIn { write_flags: flag::WRITE_CACHE, ..append };
    world.call(op::WRITE, node, &[&bytes_of(&cached), b"bc"]).unwrap();
    assert_eq!(fs::read(world.path("rw/a.txt")).unwrap(), b"1bc4567");
    let cut = SetattrIn { valid: flag::SET_SIZE, size: 3, ..Default::default() };
    assert_eq!(world.setattr(node, cut).unwrap().attr.size, 3);
    let valid = flag::SET_SIZE | flag::SET_HANDLE;
    let by_handle = SetattrIn { valid, handle, size: 2, ..Default::default() };
    assert_eq!(world.setattr(node, by_handle).unwrap().attr.size, 2);
    world.open(node, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    assert_eq!(fs::read(world.path("rw/a.txt")).unwrap(), b"");
}

#[test]
fn mode_times_and_owner() {
    let mut world = World::new();
    let node = world.node("rw/a.txt");
    let mode = SetattrIn { valid: flag::SET_MODE, mode: 0o7640, ..Default::default() };
    assert_eq!(world.setattr(node, mode).unwrap().attr.mode, libc::S_IFREG | 0o1640);
    let host = fs::metadata(world.path("rw/a.txt")).unwrap();
    assert_eq!(host.permissions().mode() & 0o7777, 0o1640, "no set-id bits on the host");
    let valid = flag::SET_ATIME | flag::SET_MTIME;
    let times = SetattrIn { valid, atime: 5, mtime: 1_000_000, mtime_ns: 7, ..Default::default() };
    let attr = world.setattr(node, times).unwrap().attr;
    assert_eq!((attr.atime, attr.mtime, attr.mtime_ns), (5, 1_000_000, 7));
    let before_1970 = SetattrIn { valid, mtime: (-5_i64).cast_unsigned(), ..Default::default() };
    assert_eq!(world.setattr(node, before_1970).unwrap().attr.mtime.cast_signed(), -5);
    let bad = SetattrIn { valid, mtime_ns: 0x3fff_ffff, ..Default::default() };
    assert_eq!(world.setattr(node, bad).unwrap_err(), Errno::INVAL);
    let valid = flag::SET_UID | flag::SET_GID;
    let same = SetattrIn { valid, uid: GUEST_UID, gid: GUEST_GID, ..Default::default() };
    world.setattr(node, same).unwrap();
    let other = SetattrIn { valid, uid: 0, gid: GUEST_GID, ..Default::default() };
    assert_eq!(world.setattr(node, other).unwrap_err(), Errno::PERM);
    let folder = world.node("rw/sub");
    let mode = SetattrIn { valid: flag::SET_MODE, mode: 0o1777, ..Default::default() };
    assert_eq!(world.setattr(folder, mode).unwrap().attr.mode, libc::S_IFDIR | 0o1777);
}

#[test]
fn folders_links_and_renames() {
    let mut world = World::new();
    let rw = world.node("rw");
    let body = bytes_of(&MkdirIn { mode: 0o2755, umask: 0 });
    let reply = world.call(op::MKDIR, rw, &[&body, b"dir\0"]).unwrap();
    let dir = EntryOut::parse(&reply).unwrap();
    assert_eq!(dir.attr.mode, libc::S_IFDIR | 0o755);
    let node = world.node("rw/a.txt");
    let link = bytes_of(&LinkIn { node });
    let reply = world.call(op::LINK, dir.node, &[&link, b"hard\0"]).unwrap();
    let hard = EntryOut::parse(&reply).unwrap();
    assert_eq!((hard.node, hard.attr.nlink), (node, 2));
    let reply = world.call(op::SYMLINK, dir.node, &[b"soft\0", b"../../anything\0"]).unwrap();
    let soft = EntryOut::parse(&reply).unwrap();
    assert_eq!(world.call(op::READLINK, soft.node, &[]).unwrap(), b"../../anything");
    assert_eq!(world.call(op::READLINK, node, &[]).unwrap_err(), Errno::INVAL);
    world.rename((dir.node, "hard"), (rw, "moved"), 0).unwrap();
    assert_eq!(world.lookup(rw, "moved").unwrap().node, node);
    let taken = world.rename((rw, "moved"), (rw, "sub"), flag::RENAME_NOREPLACE);
    assert_eq!(taken.unwrap_err(), Errno::EXIST);
    world.rename((rw, "dir"), (rw, "a.txt"), flag::RENAME_EXCHANGE).unwrap();
    assert_eq!(world.lookup(rw, "a.txt").unwrap().node, dir.node);
    assert_eq!(world.rename((rw, "dir"), (rw, "x"), 4).unwrap_err(), Errno::INVAL, "whiteout");
    assert_eq!(world.named(op::RMDIR, rw, "a.txt").unwrap_err(), Errno::NOTEMPTY);
    world.named(op::UNLINK, dir.node, "soft").unwrap();
    world.named(op::RMDIR, rw, "a.txt").unwrap();
    assert_eq!(world.named(op::UNLINK, rw, "sub").unwrap_err(), Errno::ISDIR);
    let body = bytes_of(&RenameIn { new_parent: rw });
    world.call(op::RENAME, rw, &[&body, b"moved\0back\0"]).unwrap();
    assert!(world.path("rw/back").exists());
    let regular = MknodIn { mode: libc::S_IFREG | 0o4600, ..Default::default() };
    let reply = world.call(op::MKNOD, rw, &[&bytes_of(&regular), b"plain\0"]).unwrap();
    assert_eq!(EntryOut::parse(&reply).unwrap().attr.mode, libc::S_IFREG | 0o600);
}

#[test]
fn listings_are_whole_at_any_size_of_reply() {
    let mut world = World::new();
    for number in 0..300 {
        fs::write(world.path(&format!("rw/sub/file-{number}")), "").unwrap();
    }
    let node = world.node("rw/sub");
    let mut expected: Vec<_> = (0..300).map(|number| format!("file-{number}")).collect();
    expected.extend([".".to_owned(), "..".to_owned()]);
    expected.sort();
    for (plus, size) in [(false, 300), (false, 4096), (true, 500), (true, 4096), (true, 65536)] {
        let mut names: Vec<_> = world.list(node, plus, size).into_iter().map(|one| one.0).collect();
        names.sort();
        assert_eq!(names, expected, "{plus} {size}");
    }
    let long = world.node("rw");
    for number in 0..200 {
        fs::write(world.path(&format!("rw/{number:0>255}")), "").unwrap();
    }
    for (plus, size) in [(false, 4096), (true, 4096), (true, 32768), (true, 131072)] {
        assert_eq!(world.list(long, plus, size).len(), 207, "{plus} {size}");
    }
    let nodes = world.list(node, true, 4096);
    assert!(nodes.iter().all(|(name, id)| (*id == 0) == name.starts_with('.')));
    let mut root: Vec<_> = world.list(ROOT_ID, true, 400).into_iter().map(|one| one.0).collect();
    root.sort();
    assert_eq!(root, [".", "..", "lim", "ro", "rw", "single"]);
    let handle = world.opendir(node).unwrap();
    let small = bytes_of(&ReadIn { handle, size: 20, ..Default::default() });
    assert_eq!(world.call(op::READDIR, node, &[&small]).unwrap_err(), Errno::INVAL);
    let sync = bytes_of(&FsyncIn { handle, ..Default::default() });
    world.call(op::FSYNCDIR, node, &[&sync]).unwrap();
}

#[test]
fn a_share_can_be_a_single_file() {
    let mut world = World::new();
    let entry = world.lookup(ROOT_ID, "single").unwrap();
    assert_eq!(entry.attr.mode & libc::S_IFMT, libc::S_IFREG);
    assert_eq!(entry.attr.flags, 0);
    let handle = world.open(entry.node, libc::O_RDWR).unwrap();
    world.write(entry.node, handle, 0, b"CONTENTS").unwrap();
    assert_eq!(world.read(entry.node, handle, 0, 12).unwrap(), b"CONTENTS of ");
    assert_eq!(world.lookup(entry.node, "x").unwrap_err(), Errno::NOTDIR);
    assert_eq!(world.opendir(entry.node).unwrap_err(), Errno::NOTDIR);
    assert_eq!(world.named(op::UNLINK, ROOT_ID, "single").unwrap_err(), Errno::ROFS);
}

#[test]
fn holes_space_and_copies() {
    let mut world = World::new();
    let rw = world.node("rw");
    let (entry, handle) = world.create(rw, "sparse", libc::O_RDWR, 0o644).unwrap();
    world.write(entry.node, handle, 1 << 20, b"end").unwrap();
    let data = LseekIn { handle, offset: 0, whence: flag::SEEK_DATA, padding: 0 };
    let reply = world.call(op::LSEEK, entry.node, &[&bytes_of(&data)]).unwrap();
    assert!(LseekOut::parse(&reply).unwrap().offset <= 1 << 20);
    let bad = LseekIn { whence: 0, ..data };
    assert_eq!(world.call(op::LSEEK, entry.node, &[&bytes_of(&bad)]).unwrap_err(), Errno::INVAL);
    let space = FallocateIn { handle, offset: 0, length: 2 << 20, mode: 0, padding: 0 };
    world.call(op::FALLOCATE, entry.node, &[&bytes_of(&space)]).unwrap();
    assert_eq!(world.getattr(entry.node).unwrap().attr.size, 2 << 20);
    let collapse = FallocateIn { mode: 8, ..space };
    let refused = world.call(op::FALLOCATE, entry.node, &[&bytes_of(&collapse)]);
    assert_eq!(refused.unwrap_err(), Errno::OPNOTSUPP);
    let (copy, to) = world.create(rw, "copy", libc::O_RDWR, 0o644).unwrap();
    let request = CopyFileRangeIn {
        handle_in: handle,
        offset_in: 1 << 20,
        node_out: copy.node,
        handle_out: to,
        offset_out: 1,
        length: 3,
        flags: 0,
    };
    let reply = world.call(op::COPY_FILE_RANGE, entry.node, &[&bytes_of(&request)]).unwrap();
    assert_eq!(WriteOut::parse(&reply).unwrap().size, 3);
    assert_eq!(fs::read(world.path("rw/copy")).unwrap(), b"\0end");
    for flags in [0, flag::FSYNC_DATA] {
        let sync = bytes_of(&FsyncIn { handle, flags, padding: 0 });
        world.call(op::FSYNC, entry.node, &[&sync]).unwrap();
    }
    world.call(op::SYNCFS, rw, &[&[0; 8]]).unwrap();
    let reply = world.call(op::STATFS, rw, &[]).unwrap();
    assert!(StatfsOut::parse(&reply).unwrap().blocks > 0);
}

#[test]
fn changes_on_the_host_are_seen() {
    let mut world = World::new();
    let rw = world.node("rw");
    let node = world.node("rw/a.txt");
    fs::write(world.path("rw/a.txt"), "longer than it was before").unwrap();
    assert_eq!(world.getattr(node).unwrap().attr.size, 25);
    fs::remove_file(world.path("rw/a.txt")).unwrap();
    assert_eq!(world.lookup(rw, "a.txt").unwrap_err(), Errno::NOENT);
    fs::write(world.path("rw/a.txt"), "another").unwrap();
    assert_ne!(world.lookup(rw, "a.txt").unwrap().node, node, "another file, another node");
}

#[test]
fn nodes_live_as_long_as_lookups_and_handles() {
    let mut world = World::new();
    let rw = world.node("rw");
    let before = world.server.nodes.len();
    let node = world.lookup(rw, "a.txt").unwrap().node;
    assert_eq!(world.lookup(rw, "a.txt").unwrap().node, node);
    let handle = world.open(node, libc::O_RDONLY).unwrap();
    world.forget(node, 2);
    assert!(world.read(node, handle, 0, 1).is_ok());
    assert_eq!(world.lookup(rw, "a.txt").unwrap().node, node, "the handle keeps it");
    world.forget(node, 1);
    world.release(node, handle).unwrap();
    assert_eq!(world.getattr(node).unwrap_err(), Errno::STALE);
    assert_eq!(world.server.nodes.len(), before);
    // DESTROY forgets all, and the file system can be mounted again.
    world.lookup(rw, "a.txt").unwrap();
    world.call(op::DESTROY, 0, &[]).unwrap();
    assert!(!world.server.is_mounted());
    assert_eq!(world.server.nodes.len(), 4);
    world.init();
    assert_eq!(world.node("rw"), rw);
}

#[test]
fn what_is_not_offered_says_so() {
    let mut world = World::new();
    let node = world.node("rw/a.txt");
    // FLUSH, locks, ACCESS, BMAP, IOCTL, POLL, DAX, TMPFILE, and no operations.
    for op in [0, 7, 19, 25, 31, 32, 33, 34, 37, 39, 40, 41, 48, 49, 51, 52, 4096, !0] {
        assert_eq!(world.call(op, node, &[&[0; 64]]).unwrap_err(), Errno::NOSYS, "{op}");
    }
}

#[test]
fn what_is_read_and_written_is_recorded_by_path() {
    use casulo_protocol::vmm::{FileUse, Message};
    let mut world = World::new();
    let (rw, sub) = (world.node("rw"), world.node("rw/sub"));
    let input = world.node("ro/sub/b.txt");
    let handle = world.open(input, libc::O_RDONLY).unwrap();
    world.read(input, handle, 0, 8).unwrap();
    let (new, handle) = world.create(sub, "new", libc::O_RDWR, 0o644).unwrap();
    world.write(new.node, handle, 0, b"12345").unwrap();
    // Under its new name it is another entry, from the next open on.
    world.rename((rw, "sub"), (rw, "dir"), 0).unwrap();
    world.read(new.node, handle, 0, 100).unwrap();
    let again = world.open(new.node, libc::O_RDONLY).unwrap();
    world.read(new.node, again, 1, 100).unwrap();
    let single = world.node("single");
    world.setattr(single, SetattrIn { valid: flag::SET_SIZE, ..Default::default() }).unwrap();
    let parts = world.server.record().parts();
    let [Message::Files { files, left_out: 0, more: false }] = &parts[..] else {
        panic!("{parts:?}")
    };
    let file = |share: &str, path: &str, read, written, changed| FileUse {
        share: share.into(),
        path: path.into(),
        read,
        written,
        changed,
    };
    let expected = [
        file("ro", "sub/b.txt", 8, 0, false),
        file("rw", "sub/new", 5, 5, true),
        file("rw", "dir/new", 4, 0, false),
        file("single", "", 0, 0, true),
    ];
    assert_eq!(files[..], expected);
}
