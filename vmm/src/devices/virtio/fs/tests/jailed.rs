//! The server under the filters under which it runs in a VM.
//!
//! A system call that the filter does not know ends the whole test process, by SIGSYS.

use super::*;
use crate::jail::landlock::{Root, restrict};
use crate::jail::seccomp::{Kind, filter, install};
use std::os::fd::AsFd;

/// Everything that the server does for a guest, with the calls of the system that belong to it.
fn everything(world: &mut World) {
    let rw = world.node("rw");
    let (file, handle) = world.create(rw, "new", libc::O_RDWR, 0o644).unwrap();
    let node = file.node;
    world.write(node, handle, 0, &[1; 70_000]).unwrap();
    assert_eq!(world.read(node, handle, 10, 100_000).unwrap().len(), 69_990);
    let append = WriteIn { handle, size: 1, flags: libc::O_APPEND as u32, ..Default::default() };
    world.call(op::WRITE, node, &[&bytes_of(&append), b"x"]).unwrap();
    for flags in [0, flag::FSYNC_DATA] {
        world.call(op::FSYNC, node, &[&bytes_of(&FsyncIn { handle, flags, padding: 0 })]).unwrap();
    }
    let space = FallocateIn { handle, length: 1 << 17, ..Default::default() };
    world.call(op::FALLOCATE, node, &[&bytes_of(&space)]).unwrap();
    let seek = LseekIn { handle, whence: flag::SEEK_HOLE, ..Default::default() };
    world.call(op::LSEEK, node, &[&bytes_of(&seek)]).unwrap();
    let valid = flag::SET_MODE | flag::SET_SIZE | flag::SET_MTIME | flag::SET_ATIME_NOW;
    let wanted = SetattrIn { valid, mode: 0o600, size: 5, mtime: 1, ..Default::default() };
    assert_eq!(world.setattr(node, wanted).unwrap().attr.size, 5);
    let again = world.open(node, libc::O_WRONLY | libc::O_TRUNC).unwrap();
    let own = world.node("rw/a.txt");
    let source = world.open(own, libc::O_RDONLY).unwrap();
    let copy = CopyFileRangeIn {
        handle_in: source,
        node_out: node,
        handle_out: again,
        length: 5,
        ..Default::default()
    };
    world.call(op::COPY_FILE_RANGE, own, &[&bytes_of(&copy)]).unwrap();
    assert_eq!(world.read(node, handle, 0, 10).unwrap(), b"conte");
    let mkdir = bytes_of(&MkdirIn { mode: 0o755, umask: 0 });
    world.call(op::MKDIR, rw, &[&mkdir, b"dir\0"]).unwrap();
    let dir = world.node("rw/dir");
    let mknod = bytes_of(&MknodIn { mode: libc::S_IFREG | 0o644, ..Default::default() });
    world.call(op::MKNOD, dir, &[&mknod, b"plain\0"]).unwrap();
    world.call(op::SYMLINK, dir, &[b"soft\0", b"target\0"]).unwrap();
    let value = bytes_of(&SetxattrIn { size: 1, flags: 0 });
    world.call(op::SETXATTR, dir, &[&value, b"user.a\0", b"x"]).unwrap();
    let room = bytes_of(&GetxattrIn { size: 100, padding: 0 });
    assert_eq!(world.call(op::GETXATTR, dir, &[&room, b"user.a\0"]).unwrap(), b"x");
    assert_eq!(world.call(op::LISTXATTR, dir, &[&room]).unwrap(), b"user.a\0");
    world.call(op::REMOVEXATTR, dir, &[b"user.a\0"]).unwrap();
    let soft = world.node("rw/dir/soft");
    assert_eq!(world.call(op::READLINK, soft, &[]).unwrap(), b"target");
    world.call(op::LINK, dir, &[&bytes_of(&LinkIn { node }), b"hard\0"]).unwrap();
    world.rename((dir, "hard"), (rw, "moved"), 0).unwrap();
    world.rename((rw, "moved"), (dir, "plain"), flag::RENAME_EXCHANGE).unwrap();
    assert_eq!(world.list(dir, true, 4096).len(), 4);
    assert_eq!(world.list(ROOT_ID, false, 4096).len(), 6);
    let folder = world.opendir(dir).unwrap();
    let sync = bytes_of(&FsyncIn { handle: folder, ..Default::default() });
    world.call(op::FSYNCDIR, dir, &[&sync]).unwrap();
    world.call(op::STATFS, dir, &[]).unwrap();
    for name in ["plain", "soft"] {
        world.named(op::UNLINK, dir, name).unwrap();
    }
    world.release(dir, folder).unwrap();
    world.named(op::RMDIR, rw, "dir").unwrap();
    world.release(node, handle).unwrap();
    world.forget(node, 9);
    // The limit, a single file, and the share that is only read.
    let lim = world.node("lim");
    let (big, handle) = world.create(lim, "big", libc::O_RDWR, 0o644).unwrap();
    world.write(big.node, handle, 0, &[1; 5000]).unwrap();
    world.named(op::UNLINK, lim, "big").unwrap();
    world.release(big.node, handle).unwrap();
    world.forget(big.node, 1);
    let single = world.node("single");
    let handle = world.open(single, libc::O_RDWR | libc::O_TRUNC).unwrap();
    world.write(single, handle, 0, b"x").unwrap();
    let input = world.node("ro/a.txt");
    let handle = world.open(input, libc::O_RDONLY).unwrap();
    assert_eq!(world.read(input, handle, 0, 8).unwrap(), b"contents");
    // Without a handle.
    let (input, folder) = (world.node("ro/sub/b.txt"), world.node("ro/sub"));
    assert_eq!(world.read(input, 0, 0, 8).unwrap(), b"contents");
    let list = bytes_of(&ReadIn { size: 4096, ..Default::default() });
    world.call(op::READDIRPLUS, folder, &[&list]).unwrap();
    world.call(op::DESTROY, 0, &[]).unwrap();
}

#[test]
fn the_filters_let_through_what_the_server_needs() {
    let mut world = World::new();
    let names = ["rw", "ro", "lim", "single.txt"];
    let roots = names.map(|name| open_path(&world.path(name)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let roots: Vec<_> = names
                .iter()
                .zip(&roots)
                .map(|(name, fd)| Root {
                    fd: fd.as_fd(),
                    read_only: *name == "ro",
                    file: *name == "single.txt",
                })
                .collect();
            rustix::thread::set_no_new_privs(true).unwrap();
            restrict(&roots).unwrap();
            install(&filter(Kind::Fs)).unwrap();
            everything(&mut world);
        });
    });
    world.check_protected();
}
