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
    // Where folders take blocks, they count as well.
    assert!(made <= LIMIT / 4096 && made > LIMIT / 4096 * 9 / 10, "{made}");
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

#[test]
fn files_have_a_limit_of_their_own() {
    let mut world = World::new();
    let few = Share { limit_files: Some(3), ..share(world.base.path(), "few", "rw") };
    world.serve(vec![few]);
    let hit = world.server.limit_hit();
    let few = world.node("few");
    let (file, handle) = world.create(few, "1", libc::O_RDWR, 0o644).unwrap();
    world.call(op::MKDIR, few, &[&bytes_of(&MkdirIn::default()), b"2\0"]).unwrap();
    let statfs = StatfsOut::parse(&world.call(op::STATFS, few, &[]).unwrap()).unwrap();
    assert_eq!((statfs.files, statfs.ffree), (3, 1));
    assert_eq!(world.write(file.node, handle, 0, &[1; 1 << 16]), Ok(1 << 16), "bytes have none");
    let link = bytes_of(&LinkIn { node: file.node });
    world.call(op::LINK, few, &[&link, b"3\0"]).unwrap();
    assert!(!hit.load(Ordering::Relaxed));
    for (op, body) in [
        (op::LINK, link),
        (op::MKDIR, bytes_of(&MkdirIn::default())),
        (op::CREATE, bytes_of(&CreateIn::default())),
    ] {
        assert_eq!(world.call(op, few, &[&body, b"4\0"]).unwrap_err(), Errno::NOSPC, "{op}");
    }
    assert!(hit.load(Ordering::Relaxed));
    // What is there can still be opened with O_CREAT, and removed.
    world.create(few, "1", libc::O_RDWR, 0o644).unwrap();
    world.named(op::UNLINK, few, "3").unwrap();
    world.create(few, "4", libc::O_RDWR, 0o644).unwrap();
}

/// Ten million empty files would need a disk; what counts is that no more are made than fit, however
/// often the guest tries.
#[test]
fn attempts_without_end_make_no_more_files_than_the_limit_allows() {
    let mut world = World::new();
    let lim = world.node("lim");
    let mut made = 0_u64;
    for number in 0..3000 {
        if let Ok((file, handle)) = world.create(lim, &number.to_string(), libc::O_RDWR, 0o644) {
            world.release(file.node, handle).unwrap();
            world.forget(file.node, 1);
            made += 1;
        }
    }
    assert!(made <= LIMIT / 4096);
    assert_eq!(fs::read_dir(world.path("lim")).unwrap().count() as u64, made);
}

#[test]
fn open_files_without_a_name_hold_what_they_hold() {
    let mut world = World::new();
    let lim = world.node("lim");
    let (mut open, mut written) = (Vec::new(), 0);
    for number in 0..100 {
        let Ok((file, handle)) = world.create(lim, "same", libc::O_RDWR, 0o644) else { break };
        for part in 0..4 {
            let result = world.write(file.node, handle, part << 16, &[1; 1 << 16]);
            written += u64::from(result.unwrap_or(0));
        }
        world.named(op::UNLINK, lim, "same").unwrap();
        open.push((file.node, handle));
        assert!(written <= LIMIT, "{number}");
    }
    assert!(written > LIMIT / 2);
    for (node, handle) in open {
        world.release(node, handle).unwrap();
    }
    let statfs = StatfsOut::parse(&world.call(op::STATFS, lim, &[]).unwrap()).unwrap();
    let free = statfs.bavail * u64::from(statfs.frsize);
    assert!(
        free > LIMIT - 65536,
        "all of it is free again, but for what the folder has grown: {free}"
    );
}

#[test]
fn shares_inside_of_each_other_have_one_account() {
    let mut world = World::new();
    let base = world.base.path().to_owned();
    fs::create_dir(base.join("lim/inner")).unwrap();
    fs::write(base.join("lim/inner/file"), "").unwrap();
    let limited = |name, at| Share { limit_bytes: Some(LIMIT), ..share(&base, name, at) };
    let unlimited = |name, at| Share { limit_bytes: None, ..share(&base, name, at) };
    for shares in [
        vec![limited("outer", "lim"), unlimited("inner", "lim/inner")],
        vec![unlimited("inner", "lim/inner"), limited("outer", "lim")],
        vec![
            limited("one", "lim/inner/file"),
            unlimited("inner", "lim/inner"),
            unlimited("outer", "lim"),
        ],
        vec![limited("outer", "lim"), unlimited("inner", "lim")],
    ] {
        let names: Vec<String> = shares.iter().map(|share| share.name.clone()).collect();
        world.serve(shares);
        let outer = world.node("outer");
        let (file, handle) = world.create(outer, "big", libc::O_RDWR, 0o644).unwrap();
        assert_eq!(fill(&mut world, file.node, handle, 0), Errno::NOSPC, "{names:?}");
        let inner = world.node("inner");
        let refused = world.create(inner, "more", libc::O_RDWR, 0o644);
        let refused =
            refused.and_then(|(file, handle)| world.write(file.node, handle, 0, &[1; 8192]));
        assert_eq!(refused.unwrap_err(), Errno::NOSPC, "{names:?}");
        // What is removed is free again, once and not twice.
        world.named(op::UNLINK, outer, "big").unwrap();
        world.release(file.node, handle).unwrap();
        let (file, handle) = world.create(inner, "big2", libc::O_RDWR, 0o644).unwrap();
        assert_eq!(fill(&mut world, file.node, handle, 0), Errno::NOSPC, "{names:?}");
        assert!(world.getattr(file.node).unwrap().attr.blocks * 512 <= LIMIT, "{names:?}");
        world.release(file.node, handle).unwrap();
        world.named(op::UNLINK, inner, "big2").unwrap();
    }
    // Side by side, each has its own.
    world.serve(vec![limited("outer", "lim"), limited("rw", "rw")]);
    let outer = world.node("outer");
    let (file, handle) = world.create(outer, "big", libc::O_RDWR, 0o644).unwrap();
    fill(&mut world, file.node, handle, 0);
    let rw = world.node("rw");
    let (file, handle) = world.create(rw, "big", libc::O_RDWR, 0o644).unwrap();
    assert_eq!(world.write(file.node, handle, 0, &[1; 1 << 16]), Ok(1 << 16));
}

#[test]
fn attributes_count() {
    let mut world = World::new();
    let limit_bytes = Some(10_000);
    let share = Share { xattr: true, limit_bytes, ..share(world.base.path(), "x", "rw") };
    world.serve(vec![share]);
    let node = world.node("x/sub");
    let mut set = |name: &str| {
        let body = bytes_of(&SetxattrIn { size: 1000, flags: 0 });
        world.call(op::SETXATTR, node, &[&body, name.as_bytes(), b"\0", &[7; 1000]]).map(drop)
    };
    // Written again, the same one counts once.
    for round in 0..20 {
        assert_eq!(set("user.same"), Ok(()), "{round}");
    }
    let refused = (0..20).find_map(|number| set(&format!("user.{number}")).err());
    assert_eq!(refused, Some(Errno::NOSPC));
}

/// What a limited share says is left, in bytes.
fn left(world: &mut World, node: u64) -> u64 {
    let reply = world.call(op::STATFS, node, &[]).unwrap();
    let statfs = StatfsOut::parse(&reply).unwrap();
    statfs.bavail * u64::from(statfs.frsize)
}

/// A share of the folder `lim` with a limit far from what these tests write.
fn roomy(world: &mut World, limit: u64) -> u64 {
    let share = Share { limit_bytes: Some(limit), ..share(world.base.path(), "roomy", "lim") };
    world.serve(vec![share]);
    world.node("roomy")
}

#[test]
fn what_is_counted_later_is_counted_to_the_byte_when_somebody_looks() {
    let limit = 64 << 20;
    let mut world = World::new();
    let roomy = roomy(&mut world, limit);
    let start = left(&mut world, roomy);
    let (file, handle) = world.create(roomy, "a", libc::O_RDWR, 0o644).unwrap();
    for page in 0..100 {
        world.write(file.node, handle, page * 4096, &[1; 4096]).unwrap();
        // The same again is not more.
        world.write(file.node, handle, page * 4096, &[2; 4096]).unwrap();
    }
    let folder = fs::metadata(world.path("lim")).unwrap().blocks();
    let grown = |world: &World| used_on_host(world) + 4096;
    let counted = start - left(&mut world, roomy);
    assert!(counted.abs_diff(grown(&world)) <= 8192, "{counted} {}", grown(&world));
    assert_eq!(folder, fs::metadata(world.path("lim")).unwrap().blocks());
    // Cut, closed, without a name: each time what is freed is free.
    let cut = SetattrIn { valid: flag::SET_SIZE, size: 4096, ..Default::default() };
    world.setattr(file.node, cut).unwrap();
    assert!(start - left(&mut world, roomy) <= 16384);
    world.write(file.node, handle, 0, &[1; 1 << 17]).unwrap();
    world.named(op::UNLINK, roomy, "a").unwrap();
    world.release(file.node, handle).unwrap();
    assert!(start - left(&mut world, roomy) <= 8192);
    // And nothing is left to be counted when the guest starts anew.
    let (file, handle) = world.create(roomy, "b", libc::O_RDWR, 0o644).unwrap();
    world.write(file.node, handle, 0, &[1; 1 << 17]).unwrap();
    world.init();
    let roomy = world.node("roomy");
    let counted = start - left(&mut world, roomy);
    assert!((1 << 17..1 << 18).contains(&counted), "{counted}");
}

#[test]
fn nothing_stays_expected_of_a_folder_that_only_a_handle_held() {
    let mut world = World::new();
    let roomy = roomy(&mut world, 64 << 20);
    let mkdir = bytes_of(&MkdirIn { mode: 0o755, umask: 0 });
    for number in 0..100 {
        let name = format!("dir{number}");
        world.call(op::MKDIR, roomy, &[&mkdir, &name_bytes(&name)]).unwrap();
        let folder = world.node(&format!("roomy/{name}"));
        let handle = world.opendir(folder).unwrap();
        world.forget(folder, 2);
        let (file, open) = world.create(folder, "file", libc::O_RDWR, 0o644).unwrap();
        world.release(file.node, open).unwrap();
        world.forget(file.node, 1);
        world.release(folder, handle).unwrap();
        assert_eq!(world.getattr(folder).unwrap_err(), Errno::STALE);
    }
    left(&mut world, roomy);
    assert_eq!(world.server.quota(0).expected(), 0);
}

#[test]
fn many_files_that_are_written_at_once_stay_within_the_limit() {
    let limit = 8 << 20;
    let mut world = World::new();
    let roomy = roomy(&mut world, limit);
    let files: Vec<_> = (0..100)
        .map(|number| world.create(roomy, &number.to_string(), libc::O_RDWR, 0o644).unwrap())
        .collect();
    let mut full = 0;
    for round in 0..64 {
        for (file, handle) in &files {
            let refused = world.write(file.node, *handle, round << 16, &[1; 5000]).is_err();
            full += usize::from(refused);
            assert!(used_on_host(&world) + 100 * 4096 <= limit + 8192);
        }
    }
    assert!(full > 0);
    assert!(used_on_host(&world) + 100 * 4096 > limit - (1 << 17), "all of it can be used");
}

#[test]
fn the_blocks_of_a_file_with_many_names_count_once_and_until_the_last_is_gone() {
    let limit = 8 << 20;
    let mut world = World::new();
    let roomy = roomy(&mut world, limit);
    let start = left(&mut world, roomy);
    let (file, handle) = world.create(roomy, "first", libc::O_RDWR, 0o644).unwrap();
    world.write(file.node, handle, 0, &[1; 1 << 17]).unwrap();
    world.release(file.node, handle).unwrap();
    let once = start - left(&mut world, roomy);
    let link = bytes_of(&LinkIn { node: file.node });
    for number in 0..10 {
        let name = name_bytes(&format!("link{number}"));
        world.call(op::LINK, roomy, &[&link, &name]).unwrap();
    }
    assert!((start - left(&mut world, roomy)).abs_diff(once + 10 * 4096) <= 8192);
    world.named(op::UNLINK, roomy, "first").unwrap();
    for number in 0..9 {
        world.named(op::UNLINK, roomy, &format!("link{number}")).unwrap();
    }
    assert!((start - left(&mut world, roomy)).abs_diff(once) <= 8192, "one name is left");
    world.rename((roomy, "link9"), (roomy, "link10"), 0).unwrap();
    world.named(op::UNLINK, roomy, "link10").unwrap();
    assert!(start - left(&mut world, roomy) <= 8192);
}

#[test]
fn names_of_one_file_in_two_shares_never_buy_more_than_both_limits() {
    let mut world = World::new();
    let base = world.base.path().to_owned();
    fs::write(base.join("lim/both"), "").unwrap();
    fs::hard_link(base.join("lim/both"), base.join("rw/both")).unwrap();
    let limited = |name, at| Share { limit_bytes: Some(LIMIT), ..share(&base, name, at) };
    world.serve(vec![limited("one", "lim"), limited("two", "rw")]);
    let (one, two) = (world.node("one"), world.node("two"));
    for round in 0..5 {
        // Written here, freed there, and the other way round.
        for (name, other, folder) in [("one/both", "two/both", two), ("two/both", "one/both", one)]
        {
            let node = world.node(name);
            let handle = world.open(node, libc::O_RDWR).unwrap();
            fill(&mut world, node, handle, 0);
            world.release(node, handle).unwrap();
            let there = world.node(other);
            let cut = SetattrIn { valid: flag::SET_SIZE, ..Default::default() };
            world.setattr(there, cut).unwrap();
            let (kept, handle) = world
                .create(folder, &format!("kept{round}"), libc::O_RDWR, 0o644)
                .unwrap_or((EntryOut::default(), 0));
            if handle != 0 {
                fill(&mut world, kept.node, handle, 0);
                world.release(kept.node, handle).unwrap();
            }
            let rw: u64 = fs::read_dir(base.join("rw"))
                .unwrap()
                .map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512)
                .sum();
            assert!(used_on_host(&world) + rw <= 2 * LIMIT + 65536, "{round}");
        }
    }
}

/// Detached, so that it needs no mount namespace; and only root may.
fn bind_mount(path: &Path) -> Option<std::os::fd::OwnedFd> {
    use rustix::mount::{OpenTreeFlags, open_tree};
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    match open_tree(rustix::fs::CWD, path, flags) {
        Ok(fd) => Some(fd),
        Err(Errno::PERM | Errno::NOSYS) => {
            eprintln!("not root: no bind mounts");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_folder_and_its_bind_mount_have_one_account() {
    let mut world = World::new();
    let base = world.base.path().to_owned();
    let Some(mount) = bind_mount(&base.join("lim")) else { return };
    let one = Share { limit_bytes: Some(LIMIT), ..share(&base, "one", "lim") };
    let two = Share { root: mount, limit_bytes: None, ..share(&base, "two", "lim") };
    world.serve(vec![one, two]);
    let (one, two) = (world.node("one"), world.node("two"));
    let (file, handle) = world.create(one, "big", libc::O_RDWR, 0o644).unwrap();
    assert_eq!(fill(&mut world, file.node, handle, 0), Errno::NOSPC);
    let (file, handle) = match world.create(two, "more", libc::O_RDWR, 0o644) {
        Ok(made) => made,
        Err(error) => return assert_eq!(error, Errno::NOSPC),
    };
    assert_eq!(world.write(file.node, handle, 0, &[1; 1 << 16]).unwrap_err(), Errno::NOSPC);
    assert!(used_on_host(&world) <= LIMIT);
}

#[test]
fn a_full_share_takes_no_renames_that_make_a_folder_grow() {
    let mut world = World::new();
    let lim = world.node("lim");
    let mkdir = bytes_of(&MkdirIn { mode: 0o755, umask: 0 });
    world.call(op::MKDIR, lim, &[&mkdir, b"other\0"]).unwrap();
    let other = world.node("lim/other");
    for name in ["one", "two", "a", "b", "c"] {
        world.call(op::MKNOD, lim, &[&bytes_of(&MknodIn::default()), &name_bytes(name)]).unwrap();
    }
    let (file, handle) = world.create(lim, "big", libc::O_RDWR, 0o644).unwrap();
    fill(&mut world, file.node, handle, 0);
    let mut names = 0;
    while world
        .call(op::MKNOD, lim, &[&bytes_of(&MknodIn::default()), &name_bytes(&names.to_string())])
        .is_ok()
    {
        names += 1;
    }
    let long = "x".repeat(255);
    assert_eq!(world.rename((lim, "one"), (other, "one"), 0), Err(Errno::NOSPC));
    assert_eq!(world.rename((lim, "one"), (lim, &long), 0), Err(Errno::NOSPC));
    // As programs replace a file with its next version.
    world.rename((lim, "one"), (lim, "two"), 0).unwrap();
    for name in ["a", "b", "c"] {
        world.named(op::UNLINK, lim, name).unwrap();
    }
    world.rename((lim, "two"), (other, "two"), 0).unwrap();
    assert_eq!(world.lookup(lim, "two").unwrap_err(), Errno::NOENT);
}

#[test]
fn a_folder_that_grows_by_long_names_counts_what_it_takes() {
    // Where the temporary folder's file system has no blocks for folders (tmpfs), only the names count.
    let limit = 16 << 20;
    let mut world = World::new();
    let roomy = roomy(&mut world, limit);
    let start = left(&mut world, roomy);
    let before = fs::metadata(world.path("lim")).unwrap().blocks() * 512;
    for number in 0..1000 {
        let name = format!("{number:0>250}");
        let (file, handle) = world.create(roomy, &name, libc::O_RDWR, 0o644).unwrap();
        world.release(file.node, handle).unwrap();
        world.forget(file.node, 1);
    }
    let folder = fs::metadata(world.path("lim")).unwrap().blocks() * 512 - before;
    let counted = start - left(&mut world, roomy);
    assert!(counted.abs_diff(1000 * 4096 + folder) <= 4096, "{counted}, folder {folder}");
    // Links and renames grow a folder like files do.
    let sub = bytes_of(&MkdirIn { mode: 0o755, ..Default::default() });
    world.call(op::MKDIR, roomy, &[&sub, b"sub\0"]).unwrap();
    let sub = world.node("roomy/sub");
    let before = start - left(&mut world, roomy);
    let empty = fs::metadata(world.path("lim/sub")).unwrap().blocks() * 512;
    for number in 0..1000 {
        let name = format!("{number:0>250}");
        world.rename((roomy, &name), (sub, &name), 0).unwrap();
    }
    let grown = fs::metadata(world.path("lim/sub")).unwrap().blocks() * 512 - empty;
    let counted = start - left(&mut world, roomy) - before;
    assert!(counted.abs_diff(grown) <= 4096, "{counted}, folder {grown}");
}
