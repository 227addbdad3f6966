//! What a hostile guest tries, and what a busy host does meanwhile.

use super::*;
use std::os::unix::fs::{PermissionsExt, symlink};

const BAD_NAMES: [&str; 9] =
    ["", ".", "..", "/", "../outside", "sub/../../outside", "/etc/passwd", "a.txt/", "sub/x"];

/// Every request that takes a name, with `name` in each place.
fn requests_with(name: &str, rw: u64, file: u64) -> Vec<(u32, Vec<u8>)> {
    let name = name_bytes(name);
    let good = name_bytes("good");
    let with = |body: Vec<u8>, names: &[&[u8]]| [body, names.concat()].concat();
    let create = CreateIn { flags: libc::O_RDWR as u32, mode: 0o644, ..Default::default() };
    let mknod = MknodIn { mode: libc::S_IFREG | 0o644, ..Default::default() };
    let to = RenameIn { new_parent: rw };
    let to2 = Rename2In { new_parent: rw, ..Default::default() };
    vec![
        (op::LOOKUP, name.clone()),
        (op::CREATE, with(bytes_of(&create), &[&name])),
        (op::MKNOD, with(bytes_of(&mknod), &[&name])),
        (op::MKDIR, with(bytes_of(&MkdirIn { mode: 0o755, umask: 0 }), &[&name])),
        (op::SYMLINK, with(name.clone(), &[b"target\0"])),
        (op::LINK, with(bytes_of(&LinkIn { node: file }), &[&name])),
        (op::UNLINK, name.clone()),
        (op::RMDIR, name.clone()),
        (op::RENAME, with(bytes_of(&to), &[&name, &good])),
        (op::RENAME, with(bytes_of(&to), &[b"a.txt\0", &name])),
        (op::RENAME2, with(bytes_of(&to2), &[&name, &good])),
        (op::RENAME2, with(bytes_of(&to2), &[b"a.txt\0", &name])),
    ]
}

#[test]
fn no_operation_takes_a_name_that_leads_elsewhere() {
    let mut world = World::new();
    let (rw, file) = (world.node("rw"), world.node("rw/a.txt"));
    let long = "x".repeat(256);
    for name in BAD_NAMES.into_iter().chain([long.as_str()]) {
        for (op, body) in requests_with(name, rw, file) {
            let error = world.call(op, rw, &[&body]).unwrap_err();
            assert!(matches!(error, Errno::INVAL | Errno::NAMETOOLONG), "{op} {name}: {error}");
        }
    }
    // Without an end, with bytes behind it, and far too long.
    for (op, mut body) in requests_with("fine", rw, file) {
        body.pop();
        assert_eq!(world.call(op, rw, &[&body]).unwrap_err(), Errno::INVAL, "{op}");
        body.extend(b"\0x");
        assert_eq!(world.call(op, rw, &[&body]).unwrap_err(), Errno::INVAL, "{op}");
        assert!(world.call(op, rw, &[&body, &[b'y'; 9000]]).is_err(), "{op}");
    }
    world.check_protected();
    assert_eq!(fs::read_dir(world.path("rw")).unwrap().count(), 5);
}

#[test]
fn links_are_shown_and_never_followed() {
    let mut world = World::new();
    let rw = world.node("rw");
    for name in ["link", "abs"] {
        let link = world.lookup(rw, name).unwrap();
        assert_eq!(link.attr.mode & libc::S_IFMT, libc::S_IFLNK);
        assert_eq!(world.lookup(link.node, "secret.txt").unwrap_err(), Errno::NOTDIR);
        assert_eq!(world.open(link.node, libc::O_RDONLY).unwrap_err(), Errno::LOOP);
        assert_eq!(world.opendir(link.node).unwrap_err(), Errno::NOTDIR);
        let cut = SetattrIn { valid: flag::SET_SIZE, ..Default::default() };
        assert_eq!(world.setattr(link.node, cut).unwrap_err(), Errno::LOOP);
        let mode = SetattrIn { valid: flag::SET_MODE, mode: 0o777, ..Default::default() };
        assert_eq!(world.setattr(link.node, mode).unwrap_err(), Errno::OPNOTSUPP);
        let valid = flag::SET_MTIME | flag::SET_ATIME;
        world.setattr(link.node, SetattrIn { valid, ..Default::default() }).unwrap();
        assert_eq!(world.create(rw, name, libc::O_RDWR, 0o644).unwrap_err(), Errno::LOOP);
        for (op, body) in requests_with("evil", rw, link.node) {
            if op != op::LINK {
                assert_eq!(world.call(op, link.node, &[&body]).unwrap_err(), Errno::NOTDIR, "{op}");
            }
        }
        // A hard link to the link is a link again.
        let body = bytes_of(&LinkIn { node: link.node });
        let hard = name_bytes(&format!("hard-{name}"));
        let reply = world.call(op::LINK, rw, &[&body, &hard]).unwrap();
        assert_eq!(EntryOut::parse(&reply).unwrap().node, link.node);
    }
    world.check_protected();
}

#[test]
fn a_folder_swapped_for_a_link_leads_nowhere() {
    let mut world = World::new();
    let rw = world.node("rw");
    let sub = world.node("rw/sub");
    fs::write(world.path("rw/sub/inner"), "inner").unwrap();
    let inner = world.lookup(sub, "inner").unwrap().node;
    fs::rename(world.path("rw/sub"), world.path("rw/old")).unwrap();
    symlink("../outside", world.path("rw/sub")).unwrap();
    // The node is the folder that it was.
    assert_eq!(world.lookup(sub, "secret.txt").unwrap_err(), Errno::NOENT);
    world.create(sub, "mine", libc::O_RDWR, 0o644).unwrap();
    assert!(world.path("rw/old/mine").exists());
    // The name is a link now.
    let link = world.lookup(rw, "sub").unwrap();
    assert_eq!(link.attr.mode & libc::S_IFMT, libc::S_IFLNK);
    // The same for a file: what is open is what was looked up.
    fs::remove_file(world.path("rw/old/inner")).unwrap();
    symlink("../../outside/secret.txt", world.path("rw/old/inner")).unwrap();
    if let Ok(handle) = world.open(inner, libc::O_RDWR) {
        assert_eq!(world.read(inner, handle, 0, 100).unwrap(), b"inner");
        world.write(inner, handle, 0, b"INNER").unwrap();
    }
    world.check_protected();
}

#[test]
fn names_swapped_by_the_host_at_high_speed_lead_nowhere() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut world = World::new();
    let rw = world.node("rw");
    let (path, stop) = (world.path("rw"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = fs::remove_file(path.join("flip"));
                let _ = symlink("../outside/secret.txt", path.join("flip"));
                let _ = fs::remove_file(path.join("flip"));
                let _ = fs::write(path.join("flip"), "inside");
            }
        });
        for _ in 0..2000 {
            if let Ok((entry, handle)) = world.create(rw, "flip", libc::O_RDWR, 0o644) {
                let data = world.read(entry.node, handle, 0, 100).unwrap();
                assert!(!data.starts_with(b"contents"), "{data:?}");
                world.write(entry.node, handle, 0, b"guest").unwrap();
                world.release(entry.node, handle).unwrap();
            }
            if let Ok(entry) = world.lookup(rw, "flip") {
                let cut = SetattrIn { valid: flag::SET_SIZE, ..Default::default() };
                let _ = world.setattr(entry.node, cut);
                world.forget(entry.node, u64::MAX);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    world.check_protected();
}

#[test]
fn a_read_only_share_refuses_every_change() {
    let mut world = World::new();
    let (ro, file, sub) = (world.node("ro"), world.node("ro/a.txt"), world.node("ro/sub"));
    let rw = world.node("rw");
    for name in ["good", "a.txt", "sub"] {
        for (op, body) in requests_with(name, ro, file) {
            for parent in [ro, sub] {
                if op != op::LOOKUP {
                    let error = world.call(op, parent, &[&body]).unwrap_err();
                    assert_eq!(error, Errno::ROFS, "{op} {name}");
                }
            }
        }
    }
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC, libc::O_RDWR | libc::O_APPEND] {
        assert_eq!(world.open(file, flags).unwrap_err(), Errno::ROFS);
    }
    assert_eq!(world.open(file, 3).unwrap_err(), Errno::INVAL);
    for bit in 0..12 {
        let wanted =
            SetattrIn { valid: 1 << bit, uid: GUEST_UID, gid: GUEST_GID, ..Default::default() };
        assert_eq!(world.setattr(file, wanted).unwrap_err(), Errno::ROFS, "{bit}");
    }
    // Through a handle for reading, and from the share that may be written.
    let handle = world.open(file, libc::O_RDONLY).unwrap();
    assert_eq!(world.read(file, handle, 0, 8).unwrap(), b"contents");
    assert_eq!(world.write(file, handle, 0, b"x").unwrap_err(), Errno::BADF);
    let space = FallocateIn { handle, length: 4096, ..Default::default() };
    assert_eq!(world.call(op::FALLOCATE, file, &[&bytes_of(&space)]).unwrap_err(), Errno::BADF);
    let own = world.node("rw/a.txt");
    let from = world.open(own, libc::O_RDONLY).unwrap();
    let copy = CopyFileRangeIn {
        handle_in: from,
        node_out: file,
        handle_out: handle,
        length: 5,
        ..Default::default()
    };
    assert_eq!(world.call(op::COPY_FILE_RANGE, own, &[&bytes_of(&copy)]).unwrap_err(), Errno::BADF);
    assert_eq!(world.rename((rw, "a.txt"), (ro, "new"), 0).unwrap_err(), Errno::ROFS);
    assert_eq!(world.rename((ro, "a.txt"), (rw, "new"), 0).unwrap_err(), Errno::ROFS);
    let exchange = world.rename((rw, "a.txt"), (ro, "a.txt"), flag::RENAME_EXCHANGE);
    assert_eq!(exchange.unwrap_err(), Errno::ROFS);
    let link = bytes_of(&LinkIn { node: file });
    assert_eq!(world.call(op::LINK, rw, &[&link, b"in\0"]).unwrap_err(), Errno::XDEV);
    world.check_protected();
}

#[test]
fn nothing_crosses_shares_or_touches_the_root() {
    let mut world = World::new();
    let (rw, lim, file) = (world.node("rw"), world.node("lim"), world.node("rw/a.txt"));
    assert_eq!(world.rename((rw, "a.txt"), (lim, "a"), 0).unwrap_err(), Errno::XDEV);
    for node in [file, rw, ROOT_ID] {
        let link = bytes_of(&LinkIn { node });
        assert!(world.call(op::LINK, lim, &[&link, b"a\0"]).is_err());
    }
    for (op, body) in requests_with("good", rw, file) {
        let error = world.call(op, ROOT_ID, &[&body]).unwrap_err();
        assert!(matches!(error, Errno::ROFS | Errno::NOENT), "{op} {error}");
    }
    let mode = SetattrIn { valid: flag::SET_MODE, mode: 0, ..Default::default() };
    assert_eq!(world.setattr(ROOT_ID, mode).unwrap_err(), Errno::ROFS);
    assert_eq!(world.open(ROOT_ID, libc::O_RDONLY).unwrap_err(), Errno::ISDIR);
    for name in ["..", ".", "outside", "rw/..", "rw\0"] {
        assert!(world.call(op::LOOKUP, ROOT_ID, &[&name_bytes(name)]).is_err());
    }
}

#[test]
fn special_files_are_neither_made_nor_opened() {
    let mut world = World::new();
    let rw = world.node("rw");
    for kind in [libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR, libc::S_IFBLK, libc::S_IFDIR] {
        let mknod = MknodIn { mode: kind | 0o666, rdev: 0x103, ..Default::default() };
        let refused = world.call(op::MKNOD, rw, &[&bytes_of(&mknod), b"dev\0"]);
        assert_eq!(refused.unwrap_err(), Errno::PERM);
    }
    // An open of the FIFO would block for ever.
    let fifo = world.lookup(rw, "fifo").unwrap();
    assert_eq!(fifo.attr.mode & libc::S_IFMT, libc::S_IFIFO);
    for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR] {
        assert_eq!(world.open(fifo.node, flags).unwrap_err(), Errno::PERM);
        assert_eq!(world.create(rw, "fifo", flags, 0o644).unwrap_err(), Errno::PERM);
    }
    let cut = SetattrIn { valid: flag::SET_SIZE, ..Default::default() };
    assert_eq!(world.setattr(fifo.node, cut).unwrap_err(), Errno::PERM);
    let link = bytes_of(&LinkIn { node: fifo.node });
    assert_eq!(world.call(op::LINK, rw, &[&link, b"f\0"]).unwrap_err(), Errno::PERM);
}

#[test]
fn a_set_id_program_of_the_host_loses_its_bits_before_it_is_written() {
    let mut world = World::new();
    let path = world.path("rw/a.txt");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    let node = world.node("rw/a.txt");
    assert_eq!(world.getattr(node).unwrap().attr.mode, libc::S_IFREG | 0o755);
    world.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o6755);
    world.open(node, libc::O_WRONLY).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
}

#[test]
fn forged_nodes_and_handles_are_refused() {
    let mut world = World::new();
    let (rw, file) = (world.node("rw"), world.node("rw/a.txt"));
    let handle = world.open(file, libc::O_RDWR).unwrap();
    let folder = world.opendir(rw).unwrap();
    for node in [0, 77, 1 << 32, u64::MAX] {
        assert_eq!(world.getattr(node).unwrap_err(), Errno::STALE);
        assert_eq!(world.open(node, libc::O_RDONLY).unwrap_err(), Errno::STALE);
        assert_eq!(world.opendir(node).unwrap_err(), Errno::STALE);
        assert_eq!(world.call(op::STATFS, node, &[]).unwrap_err(), Errno::STALE);
        for (op, body) in requests_with("good", rw, file) {
            assert_eq!(world.call(op, node, &[&body]).unwrap_err(), Errno::STALE, "{op}");
        }
        for (op, body) in requests_with("good", node, node) {
            if matches!(op, op::LINK | op::RENAME | op::RENAME2) {
                assert_eq!(world.call(op, rw, &[&body]).unwrap_err(), Errno::STALE, "{op}");
            }
        }
    }
    for (node, handle) in
        [(file, 0), (file, handle + 1000), (file, u64::MAX), (rw, handle), (file, folder)]
    {
        let read = bytes_of(&ReadIn { handle, size: 10, ..Default::default() });
        let fields = [
            (op::READ, read.clone()),
            (op::WRITE, bytes_of(&WriteIn { handle, ..Default::default() })),
            (op::READDIR, read.clone()),
            (op::READDIRPLUS, read),
            (op::RELEASE, bytes_of(&ReleaseIn { handle, ..Default::default() })),
            (op::FSYNC, bytes_of(&FsyncIn { handle, ..Default::default() })),
            (op::FSYNCDIR, bytes_of(&FsyncIn { handle, ..Default::default() })),
            (op::FALLOCATE, bytes_of(&FallocateIn { handle, length: 1, ..Default::default() })),
            (op::LSEEK, bytes_of(&LseekIn { handle, whence: 3, ..Default::default() })),
        ];
        for (op, body) in fields {
            let error = world.call(op, node, &[&body]).unwrap_err();
            assert_eq!(error, Errno::BADF, "{op} {node} {handle}");
        }
    }
    // Folders are no files, and files no folders.
    assert_eq!(world.read(rw, folder, 0, 10).unwrap_err(), Errno::ISDIR);
    let read = bytes_of(&ReadIn { handle, size: 4096, ..Default::default() });
    assert_eq!(world.call(op::READDIR, file, &[&read]).unwrap_err(), Errno::NOTDIR);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut world = World::new();
    let (rw, file) = (world.node("rw"), world.node("rw/a.txt"));
    let handle = world.open(file, libc::O_RDWR).unwrap();
    // Every operation with every shorter body.
    for op in 1..60 {
        for size in [0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 39, 40, 55, 56, 87] {
            let before = fs::read(world.path("rw/a.txt")).unwrap();
            if !matches!(op, op::FORGET | op::BATCH_FORGET | op::INTERRUPT | op::DESTROY | op::INIT)
            {
                let _ = world.call(op, file, &[&vec![0xff; size]]);
                let _ = world.call(op, rw, &[&vec![0; size]]);
            }
            assert_eq!(fs::read(world.path("rw/a.txt")).unwrap(), before);
        }
    }
    // Lengths in the header that lie.
    let good = bytes_of(&GetattrIn::default());
    for len in [0, 1, 39, 57, 1000, u32::MAX] {
        let header = InHeader { len, opcode: op::GETATTR, node: file, ..Default::default() };
        let message = [bytes_of(&header), good.clone()].concat();
        assert_eq!(world.raw(&message, 500), Err(Errno::INVAL), "{len}");
    }
    for size in 0..40 {
        assert_eq!(world.raw(&vec![0xff; size], 500), Ok(None));
    }
    // Data that is not there, or too much of it.
    for size in [1, 99, MAX_OF_WRITE + 1, u32::MAX] {
        let write = WriteIn { handle, size, ..Default::default() };
        assert_eq!(world.call(op::WRITE, file, &[&bytes_of(&write)]).unwrap_err(), Errno::INVAL);
    }
    let far = WriteIn { handle, offset: u64::MAX, size: 1, ..Default::default() };
    assert!(world.call(op::WRITE, file, &[&bytes_of(&far), b"x"]).is_err());
    assert!(world.read(file, handle, u64::MAX, 1).is_err());
    // More than there is room for: what fits.
    assert_eq!(world.read(file, handle, 0, u32::MAX).unwrap(), b"contents of rw/a.txt");
    // No room for the reply.
    let header = InHeader { len: 56, opcode: op::GETATTR, node: file, ..Default::default() };
    let message = [bytes_of(&header), good].concat();
    for room in 0..16 {
        assert_eq!(world.raw(&message, room), Ok(None));
    }
    for room in 16..120 {
        assert_eq!(world.raw(&message, room), Err(Errno::INVAL));
    }
}

const MAX_OF_WRITE: u32 = super::super::server::MAX_DATA;

#[test]
fn forgetting_too_much_is_harmless() {
    let mut world = World::new();
    let (rw, file) = (world.node("rw"), world.node("rw/a.txt"));
    for node in [ROOT_ID, rw, file, 0, u64::MAX] {
        world.forget(node, u64::MAX);
        world.forget(node, u64::MAX);
    }
    assert_eq!(world.getattr(file).unwrap_err(), Errno::STALE);
    assert!(world.getattr(rw).is_ok(), "the root of a share stays");
    assert!(world.getattr(ROOT_ID).is_ok());
    let file = world.node("rw/a.txt");
    // A batch that promises more than it holds.
    let one = bytes_of(&ForgetOne { node: file, lookups: 1 });
    let body = [bytes_of(&BatchForgetIn { count: u32::MAX, dummy: 0 }), one].concat();
    let len = (InHeader::SIZE + body.len()) as u32;
    let header = InHeader { len, opcode: op::BATCH_FORGET, ..Default::default() };
    assert_eq!(world.raw(&[bytes_of(&header), body].concat(), 100), Ok(None));
    assert_eq!(world.getattr(file).unwrap_err(), Errno::STALE);
    // One that would keep the server busy is cut.
    let file = world.node("rw/a.txt");
    let mut body = bytes_of(&BatchForgetIn { count: u32::MAX, dummy: 0 });
    body.resize(body.len() + (1 << 20), 0);
    body.extend(bytes_of(&ForgetOne { node: file, lookups: 1 }));
    let len = (InHeader::SIZE + body.len()) as u32;
    let header = InHeader { len, opcode: op::BATCH_FORGET, ..Default::default() };
    assert_eq!(world.raw(&[bytes_of(&header), body].concat(), 100), Ok(None));
    assert!(world.getattr(file).is_ok());
}

#[test]
fn storms_of_lookups_and_opens_end_with_enfile() {
    let mut world = World::with_limits(50, 20);
    for number in 0..100 {
        fs::write(world.path(&format!("rw/sub/{number}")), "x").unwrap();
    }
    let sub = world.node("rw/sub");
    let results: Vec<_> = (0..100).map(|number| world.lookup(sub, &number.to_string())).collect();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 50 - 5);
    let known = results[0].as_ref().unwrap().node;
    assert_eq!(*results[99].as_ref().unwrap_err(), Errno::NFILE);
    // Nothing is made that the guest could not be told of.
    for (op, body) in requests_with("good", sub, known) {
        if matches!(op, op::CREATE | op::MKNOD | op::MKDIR | op::SYMLINK | op::LINK) {
            assert_eq!(world.call(op, sub, &[&body]).unwrap_err(), Errno::NFILE, "{op}");
        }
    }
    assert!(!world.path("rw/sub/good").exists());
    // A listing still shows all names, some without a node.
    let listed = world.list(sub, true, 4096);
    assert_eq!(listed.len(), 102);
    for _ in 0..3 {
        for number in 0..20 {
            assert!(world.open(known, libc::O_RDONLY).is_ok(), "{number}");
        }
        assert_eq!(world.open(known, libc::O_RDONLY).unwrap_err(), Errno::NFILE);
        assert_eq!(world.opendir(sub).unwrap_err(), Errno::NFILE);
        world.server.handles.clear();
    }
}

#[test]
fn mount_points_and_magic_links_are_not_entered() {
    // A share of /proc would be foolish, and is a good supply of both.
    let proc_share = Share {
        name: "proc".to_owned(),
        root: open_path(Path::new("/proc")),
        read_only: true,
        limit_bytes: None,
        limit_files: None,
        xattr: false,
        cache: false,
        guest_uid: 0,
        guest_gid: 0,
    };
    let root_share =
        Share { name: "root".to_owned(), root: open_path(Path::new("/")), ..proc_share };
    let proc_share = Share {
        name: "proc".to_owned(),
        root: open_path(Path::new("/proc")),
        read_only: true,
        limit_bytes: None,
        limit_files: None,
        xattr: false,
        cache: false,
        guest_uid: 0,
        guest_gid: 0,
    };
    let mut world = World::new();
    let shares = vec![proc_share, root_share];
    world.server = Server::new(shares, open_path(Path::new("/proc"))).unwrap();
    world.init();
    let root = world.node("root");
    assert_eq!(world.lookup(root, "proc").unwrap_err(), Errno::XDEV);
    let pid = std::process::id().to_string();
    let me = world.node(&format!("proc/{pid}"));
    for name in ["cwd", "root", "exe"] {
        let link = world.lookup(me, name).unwrap();
        assert_eq!(link.attr.mode & libc::S_IFMT, libc::S_IFLNK);
        assert!(world.lookup(link.node, "etc").is_err());
        assert!(world.open(link.node, libc::O_RDONLY).is_err());
    }
}

#[test]
fn shares_with_bad_names_or_roots_are_refused() {
    let world = World::new();
    let base = world.base.path();
    let proc_fd = || open_path(Path::new("/proc"));
    for name in ["", "..", "a/b", "a\0"] {
        let shares = vec![share(base, name, "rw")];
        assert!(matches!(
            Server::new(shares, proc_fd()),
            Err(crate::devices::virtio::fs::FsError::Name(_))
        ));
    }
    let twice = vec![share(base, "a", "rw"), share(base, "a", "ro")];
    assert!(Server::new(twice, proc_fd()).is_err());
    let fifo = vec![share(base, "a", "rw/fifo")];
    assert!(matches!(
        Server::new(fifo, proc_fd()),
        Err(crate::devices::virtio::fs::FsError::Kind(_))
    ));
}
