//! The limit of a share.

use super::*;
use std::sync::atomic::Ordering;

fn used_on_host(world: &World) -> u64 {
    let files = fs::read_dir(world.path("lim")).unwrap();
    files.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

fn fill(world: &mut World, node: u64, handle: u64, mut offset: u64) -> Errno {
    loop {
        match world.write(node, handle, offset, &[7; 100_000]) {
            Ok(written) => offset += u64::from(written),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_file_stops_growing_at_the_limit() {
    let mut world = World::new();
    let lim = world.node("lim");
    let hit = world.server.limit_hit();
    let (entry, handle) = world.create(lim, "big", libc::O_RDWR, 0o644).unwrap();
    assert!(!hit.load(Ordering::Relaxed));
    assert_eq!(fill(&mut world, entry.node, handle, 0), Errno::NOSPC);
    assert!(hit.load(Ordering::Relaxed));
    let used = used_on_host(&world);
    assert!(used > LIMIT - 200_000 && used <= LIMIT, "{used}");
    assert_eq!(world.write(entry.node, handle, 0, &[1; 4096]), Ok(4096), "in place");
    // What is freed can be used again.
    let cut = SetattrIn { valid: flag::SET_SIZE, size: 0, ..Default::default() };
    world.setattr(entry.node, cut).unwrap();
    assert_eq!(fill(&mut world, entry.node, handle, 0), Errno::NOSPC);
    assert!(used_on_host(&world) > LIMIT - 200_000);
    let reply = world.call(op::STATFS, lim, &[]).unwrap();
    let statfs = StatfsOut::parse(&reply).unwrap();
    assert!(statfs.blocks * u64::from(statfs.bsize) <= LIMIT + u64::from(statfs.bsize));
    assert!(statfs.bavail < 32);
}

#[test]
fn removed_files_count_until_they_are_closed_and_forgotten() {
    let mut world = World::new();
    let lim = world.node("lim");
    let (entry, handle) = world.create(lim, "big", libc::O_RDWR, 0o644).unwrap();
    fill(&mut world, entry.node, handle, 0);
    world.named(op::UNLINK, lim, "big").unwrap();
    let (next, second) = world.create(lim, "next", libc::O_RDWR, 0o644).unwrap();
    let refused = fill(&mut world, next.node, second, 0);
    assert_eq!(refused, Errno::NOSPC);
    assert!(used_on_host(&world) < 200_000);
    world.release(entry.node, handle).unwrap();
    world.forget(entry.node, 1);
    fill(&mut world, next.node, second, 0);
    let used = used_on_host(&world);
    assert!(used > LIMIT - 200_000 && used <= LIMIT, "{used}");
}

#[test]
fn names_holes_allocations_and_copies_count() {
    let mut world = World::new();
    let lim = world.node("lim");
    let (entry, handle) = world.create(lim, "sparse", libc::O_RDWR, 0o644).unwrap();
    let size = SetattrIn { valid: flag::SET_SIZE, size: 1 << 40, ..Default::default() };
    world.setattr(entry.node, size).unwrap();
    let error =
        (0..).find_map(|step| world.write(entry.node, handle, step << 30, &[1; 65536]).err());
    assert_eq!(error, Some(Errno::NOSPC));
    assert!(used_on_host(&world) <= LIMIT + 65536);
    let space = FallocateIn { handle, offset: 0, length: 1 << 30, mode: 0, padding: 0 };
    let refused = world.call(op::FALLOCATE, entry.node, &[&bytes_of(&space)]);
    assert_eq!(refused.unwrap_err(), Errno::NOSPC);
    world.release(entry.node, handle).unwrap();
    world.named(op::UNLINK, lim, "sparse").unwrap();
    world.forget(entry.node, 1);

    let mut made = 0;
    while let Ok((file, handle)) = world.create(lim, &format!("f{made}"), libc::O_RDWR, 0o644) {
        world.release(file.node, handle).unwrap();
        world.forget(file.node, 1);
        made += 1;
    }
    assert_eq!(made, LIMIT / 4096);
    for (op, body) in [
        (op::MKDIR, bytes_of(&MkdirIn::default())),
        (op::MKNOD, bytes_of(&MknodIn::default())),
        (op::SYMLINK, Vec::new()),
    ] {
        let tail: &[u8] = if op == op::SYMLINK { b"t\0" } else { b"" };
        let refused = world.call(op, lim, &[&body, b"more\0", tail]);
        assert_eq!(refused.unwrap_err(), Errno::NOSPC, "{op}");
    }
    world.named(op::UNLINK, lim, "f0").unwrap();
    world.rename((lim, "f1"), (lim, "f2"), 0).unwrap();
    world.create(lim, "g0", libc::O_RDWR, 0o644).unwrap();
    world.create(lim, "g1", libc::O_RDWR, 0o644).unwrap();
    assert_eq!(world.create(lim, "g2", libc::O_RDWR, 0o644).unwrap_err(), Errno::NOSPC);
}

#[test]
fn a_copy_is_cut_like_a_write() {
    let mut world = World::new();
    fs::write(world.path("rw/big"), vec![1; 3 << 20]).unwrap();
    let source = world.node("rw/big");
    let from = world.open(source, libc::O_RDONLY).unwrap();
    let lim = world.node("lim");
    let (entry, handle) = world.create(lim, "copy", libc::O_RDWR, 0o644).unwrap();
    let mut request = CopyFileRangeIn {
        handle_in: from,
        offset_in: 0,
        node_out: entry.node,
        handle_out: handle,
        offset_out: 0,
        length: 3 << 20,
        flags: 0,
    };
    let reply = world.call(op::COPY_FILE_RANGE, source, &[&bytes_of(&request)]).unwrap();
    let copied = u64::from(WriteOut::parse(&reply).unwrap().size);
    assert!(copied <= LIMIT && copied > LIMIT - 8192);
    request.offset_out = copied;
    let refused = world.call(op::COPY_FILE_RANGE, source, &[&bytes_of(&request)]);
    assert_eq!(refused.unwrap_err(), Errno::NOSPC);
    assert!(used_on_host(&world) <= LIMIT);
}
