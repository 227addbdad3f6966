//! Reading without a handle.

use rustix::fs::inotify;

use super::*;

#[test]
fn only_what_everybody_may_read_of_a_share_that_does_not_change_needs_no_open() {
    let mut world = World::new();
    let set = |path: &str, mode| {
        fs::set_permissions(world.path(path), std::os::unix::fs::PermissionsExt::from_mode(mode))
            .unwrap();
    };
    set("ro/a.txt", 0o644);
    set("ro/sub", 0o755);
    set("ro/sub/b.txt", 0o640);
    set("rw/a.txt", 0o644);
    let mut flags = |path: &str| {
        let node = world.node(path);
        world.getattr(node).unwrap().attr.flags & flag::ATTR_NO_OPEN
    };
    for path in ["ro/a.txt", "ro/sub"] {
        assert_eq!(flags(path), flag::ATTR_NO_OPEN, "{path}");
    }
    for path in ["ro/sub/b.txt", "ro/link", "ro/fifo", "rw/a.txt", "rw/sub", "single", "lim"] {
        assert_eq!(flags(path), 0, "{path}");
    }
}

#[test]
fn files_and_folders_are_read_without_a_handle() {
    let mut world = World::new();
    let (file, sub) = (world.node("ro/a.txt"), world.node("ro/sub"));
    assert_eq!(world.read(file, 0, 0, 100).unwrap(), b"contents of ro/a.txt");
    assert_eq!(world.read(file, 0, 12, 2).unwrap(), b"ro");
    assert_eq!(world.read(sub, 0, 0, 100).unwrap_err(), Errno::ISDIR);
    let by_handle = GetattrIn { flags: flag::GETATTR_HANDLE, handle: 0, ..Default::default() };
    let attr = world.call(op::GETATTR, file, &[&bytes_of(&by_handle)]).unwrap();
    assert_eq!(AttrOut::parse(&attr).unwrap().attr.size, 20);
    let hole = LseekIn { handle: 0, offset: 0, whence: flag::SEEK_HOLE, padding: 0 };
    let end = world.call(op::LSEEK, file, &[&bytes_of(&hole)]).unwrap();
    assert_eq!(LseekOut::parse(&end).unwrap().offset, 20);
    for (op, node) in [(op::FSYNC, file), (op::FSYNCDIR, sub)] {
        world.call(op, node, &[&bytes_of(&FsyncIn::default())]).unwrap();
    }
    for op in [op::READDIR, op::READDIRPLUS] {
        for _ in 0..2 {
            let list = ReadIn { size: 4096, ..Default::default() };
            let reply = world.call(op, sub, &[&bytes_of(&list)]).unwrap();
            assert!(reply.windows(5).any(|part| part == b"b.txt"));
        }
        let file = world.call(op, file, &[&bytes_of(&ReadIn { size: 4096, ..Default::default() })]);
        assert_eq!(file.unwrap_err(), Errno::NOTDIR);
    }
    // What was read is in the record as after an open.
    let record = world.server.record();
    let text = format!("{record:?}");
    assert!(text.contains("97, 46, 116, 120, 116") || text.contains("a.txt"), "{text}");
    world.check_protected();
}

#[test]
fn a_handle_is_needed_for_all_that_may_change() {
    let mut world = World::new();
    for path in ["rw/a.txt", "single", "rw/sub", "ro/fifo", "ro/link"] {
        let node = world.node(path);
        assert!(world.read(node, 0, 0, 10).is_err(), "{path}");
        let list = bytes_of(&ReadIn { size: 4096, ..Default::default() });
        assert!(world.call(op::READDIR, node, &[&list]).is_err(), "{path}");
    }
    for node in [0, ROOT_ID, 77, u64::MAX] {
        assert!(world.read(node, 0, 0, 10).is_err(), "{node}");
    }
    let file = world.node("ro/a.txt");
    assert_eq!(world.write(file, 0, 0, b"x").unwrap_err(), Errno::BADF);
    let space = FallocateIn { length: 10, ..Default::default() };
    assert!(world.call(op::FALLOCATE, file, &[&bytes_of(&space)]).is_err());
    assert_eq!(world.release(file, 0).unwrap_err(), Errno::BADF);
    let copy = |node_out| CopyFileRangeIn { node_out, length: 10, ..Default::default() };
    let target = world.node("rw/a.txt");
    for node_out in [target, file] {
        let refused = world.call(op::COPY_FILE_RANGE, file, &[&bytes_of(&copy(node_out))]);
        assert_eq!(refused.unwrap_err(), Errno::BADF);
    }
    world.check_protected();
}

#[test]
fn few_descriptors_are_kept_and_none_of_what_is_forgotten() {
    let mut world = World::new();
    let paths: Vec<String> = (0..10).map(|number| format!("ro/sub/{number}")).collect();
    for path in &paths {
        fs::write(world.path(path), path).unwrap();
    }
    let nodes: Vec<u64> = paths.iter().map(|path| world.node(path)).collect();
    for _ in 0..2 {
        for (node, path) in nodes.iter().zip(&paths) {
            assert_eq!(world.read(*node, 0, 0, 100).unwrap(), path.as_bytes());
            assert!(world.server.unopened.len() <= 2);
        }
    }
    assert_eq!(world.server.handles.descriptors(), 0);
    for node in &nodes {
        world.forget(*node, 1);
        assert!(world.read(*node, 0, 0, 100).is_err());
    }
    assert_eq!(world.server.unopened.len(), 0);
}

#[test]
fn a_fifo_that_takes_the_place_of_a_file_is_not_opened() {
    let mut world = World::new();
    let path = world.path("ro/sub/new");
    fs::write(&path, "file").unwrap();
    let node = world.node("ro/sub/new");
    fs::remove_file(&path).unwrap();
    let (kind, mode) = (rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o666));
    rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &path, inotify::WatchFlags::OPEN).unwrap();
    assert_eq!(world.read(node, 0, 0, 100).unwrap_err(), Errno::STALE);
    assert_eq!(world.open(node, libc::O_RDONLY).unwrap_err(), Errno::STALE);
    let mut events = [0; 256];
    assert_eq!(rustix::io::read(&watch, &mut events), Err(Errno::AGAIN), "it was opened");
    // The watch does see an open.
    drop(fs::File::options().read(true).write(true).open(&path).unwrap());
    assert!(rustix::io::read(&watch, &mut events).unwrap() > 0);
}

#[test]
fn what_takes_the_place_of_a_file_is_not_read() {
    let mut world = World::new();
    let path = world.path("ro/sub/new");
    for kind in 0..3 {
        fs::write(&path, "file").unwrap();
        let node = world.node("ro/sub/new");
        fs::remove_file(&path).unwrap();
        match kind {
            0 => std::os::unix::fs::symlink(world.path("outside/secret.txt"), &path).unwrap(),
            // A reader of a FIFO would wait for a writer.
            1 => rustix::fs::mknodat(
                rustix::fs::CWD,
                &path,
                rustix::fs::FileType::Fifo,
                Mode::from_raw_mode(0o666),
                0,
            )
            .unwrap(),
            _ => fs::hard_link(world.path("outside/secret.txt"), &path).unwrap(),
        }
        assert_eq!(world.read(node, 0, 0, 100).unwrap_err(), Errno::STALE, "{kind}");
        assert_eq!(world.open(node, libc::O_RDONLY).unwrap_err(), Errno::STALE, "{kind}");
        fs::remove_file(&path).unwrap();
    }
}
