//! How files are found again that nothing holds open, whatever the guest and the host do to names.

use super::*;

/// A folder with folders in it, down to the depth of the names.
fn deep(world: &mut World, names: &[&str]) -> u64 {
    let path = world.path("rw").join(names.join("/"));
    fs::create_dir_all(path).unwrap();
    world.node(&["rw"].iter().chain(names).copied().collect::<Vec<_>>().join("/"))
}

#[test]
fn a_node_holds_no_descriptor() {
    let mut world = World::with_limits(1000, 4);
    for number in 0..200 {
        fs::create_dir(world.path(&format!("rw/sub/{number}"))).unwrap();
        fs::write(world.path(&format!("rw/sub/{number}/f")), number.to_string()).unwrap();
        let node = world.node(&format!("rw/sub/{number}/f"));
        assert_eq!(world.getattr(node).unwrap().attr.size, number.to_string().len() as u64);
        let handle = world.open(node, libc::O_RDONLY).unwrap();
        assert_eq!(world.read(node, handle, 0, 9).unwrap(), number.to_string().as_bytes());
        world.release(node, handle).unwrap();
    }
    assert_eq!(world.server.paths.len(), 2);
    assert_eq!(world.server.handles.descriptors(), 0);
    assert!(world.server.nodes.len() > 400);
}

#[test]
fn what_the_guest_moves_is_found_in_its_new_place() {
    let mut world = World::new();
    let rw = world.node("rw");
    let bottom = deep(&mut world, &["a", "b", "c", "d", "e"]);
    let (file, handle) = world.create(bottom, "f", libc::O_WRONLY, 0o644).unwrap();
    world.write(file.node, handle, 0, b"12345").unwrap();
    world.release(file.node, handle).unwrap();
    world.rename((rw, "a"), (rw, "z"), 0).unwrap();
    let (b, d) = (world.node("rw/z/b"), world.node("rw/z/b/c/d"));
    world.rename((b, "c"), (rw, "up"), 0).unwrap();
    world.rename((bottom, "f"), (d, "g"), 0).unwrap();
    // Others are used in between, so that their descriptors are given up.
    deep(&mut world, &["1", "2", "3", "4"]);
    assert_eq!(world.getattr(file.node).unwrap().attr.size, 5);
    let handle = world.open(file.node, libc::O_RDONLY).unwrap();
    assert_eq!(world.read(file.node, handle, 0, 9).unwrap(), b"12345");
    assert!(world.path("rw/up/d/g").exists());
    // Exchanged, both are.
    let other = deep(&mut world, &["other"]);
    world.rename((rw, "other"), (rw, "up"), flag::RENAME_EXCHANGE).unwrap();
    world.release(file.node, handle).unwrap();
    deep(&mut world, &["1", "2", "3", "4"]);
    assert!(world.lookup(other, "d").is_err());
    assert_eq!(world.lookup(d, "g").unwrap().node, file.node);
}

#[test]
fn what_the_host_moves_or_replaces_is_stale_until_it_is_looked_up() {
    let mut world = World::new();
    let bottom = deep(&mut world, &["a", "b", "c"]);
    fs::write(world.path("rw/a/b/c/f"), "old").unwrap();
    let file = world.lookup(bottom, "f").unwrap().node;
    deep(&mut world, &["1", "2", "3", "4"]);
    fs::rename(world.path("rw/a/b"), world.path("rw/moved")).unwrap();
    assert_eq!(world.getattr(file).unwrap_err(), Errno::STALE);
    assert_eq!(world.open(file, libc::O_RDONLY).unwrap_err(), Errno::STALE);
    assert_eq!(world.lookup(bottom, "f").unwrap_err(), Errno::STALE);
    assert_eq!(world.node("rw/moved/c"), bottom, "the same folder, found again");
    assert_eq!(world.getattr(file).unwrap().attr.size, 3);
    // Another file in its place is not taken for it.
    fs::write(world.path("rw/moved/c/new"), "another").unwrap();
    fs::rename(world.path("rw/moved/c/new"), world.path("rw/moved/c/f")).unwrap();
    assert_eq!(world.getattr(file).unwrap_err(), Errno::STALE);
    assert_ne!(world.lookup(bottom, "f").unwrap().node, file);
    // Nor is what lies outside, behind a link or moved out of the share.
    deep(&mut world, &["1", "2", "3", "4"]);
    fs::rename(world.path("rw/moved/c"), world.path("away")).unwrap();
    std::os::unix::fs::symlink("../../away", world.path("rw/moved/c")).unwrap();
    assert_eq!(world.lookup(bottom, "f").unwrap_err(), Errno::STALE);
    fs::rename(world.path("away"), world.path("rw/away")).unwrap();
}

#[test]
fn an_inode_number_that_is_used_again_makes_another_node() {
    let mut world = World::new();
    let rw = world.node("rw");
    let first = world.node("rw/a.txt");
    let stat =
        crate::devices::virtio::fs::node::stat_fd(fs::File::open(world.path("rw/a.txt")).unwrap())
            .unwrap();
    let name = crate::devices::virtio::fs::names::Name::new(b"b").unwrap();
    let mut later = stat;
    later.stx_btime.tv_nsec ^= 1;
    let second = world.server.nodes.look_up(0, &later, (rw, &name)).unwrap();
    assert_ne!(second, first);
    assert_eq!(world.server.nodes.find(0, &stat), None);
    world.forget(first, 1);
    assert_eq!(world.server.nodes.find(0, &later), Some(second), "is not lost with the first");
    // While it is open, the number cannot be another file's: overlayfs has copied it up.
    let node = world.node("rw/sub");
    let stat =
        crate::devices::virtio::fs::node::stat_fd(fs::File::open(world.path("rw/sub")).unwrap())
            .unwrap();
    world.opendir(node).unwrap();
    let mut copied = stat;
    copied.stx_btime.tv_nsec ^= 1;
    assert_eq!(world.server.nodes.look_up(0, &copied, (rw, &name)).unwrap(), node);
}

#[test]
fn open_files_and_a_removed_working_folder_stay_reachable() {
    let mut world = World::new();
    let rw = world.node("rw");
    let (file, handle) = world.create(rw, "f", libc::O_RDWR, 0o644).unwrap();
    world.write(file.node, handle, 0, b"data").unwrap();
    let (other, _) = world.create(rw, "g", libc::O_RDWR, 0o644).unwrap();
    world.rename((rw, "g"), (rw, "f"), 0).unwrap();
    deep(&mut world, &["1", "2", "3", "4"]);
    assert_eq!(world.getattr(file.node).unwrap().attr.nlink, 0, "renamed over");
    let mode = SetattrIn { valid: flag::SET_MODE, mode: 0o600, ..Default::default() };
    assert_eq!(world.setattr(file.node, mode).unwrap().attr.mode & 0o777, 0o600);
    assert_eq!(world.read(file.node, handle, 0, 9).unwrap(), b"data");
    let again = world.open(file.node, libc::O_RDONLY).unwrap();
    assert_eq!(world.read(file.node, again, 0, 9).unwrap(), b"data");
    assert_eq!(world.lookup(rw, "f").unwrap().node, other.node);
    let folder = deep(&mut world, &["gone"]);
    world.named(op::RMDIR, rw, "gone").unwrap();
    assert_eq!(world.getattr(folder).unwrap().attr.mode & libc::S_IFMT, libc::S_IFDIR);
    assert_eq!(world.lookup(folder, "x").unwrap_err(), Errno::NOENT);
    let create = world.create(folder, "x", libc::O_RDWR, 0o644);
    assert_eq!(create.unwrap_err(), Errno::NOENT);
}

#[test]
fn of_two_names_the_one_that_is_left_leads_to_the_file() {
    let mut world = World::new();
    let rw = world.node("rw");
    let node = world.node("rw/a.txt");
    world.call(op::LINK, rw, &[&bytes_of(&LinkIn { node }), b"second\0"]).unwrap();
    assert_eq!(world.lookup(rw, "a.txt").unwrap().node, node);
    world.named(op::UNLINK, rw, "a.txt").unwrap();
    assert_eq!(world.getattr(node).unwrap_err(), Errno::STALE, "the guest looks it up again");
    assert_eq!(world.lookup(rw, "second").unwrap().node, node);
    assert_eq!(world.getattr(node).unwrap().attr.nlink, 1);
}

#[test]
fn a_crowded_table_makes_the_guest_forget_and_loses_nothing() {
    let mut world = World::with(Limits {
        nodes: node::Limits { nodes: 200, soft: 50, name_bytes: 1 << 20 },
        handles: handle::Limits { handles: 100, descriptors: 100 },
        paths: 4,
        unopened: 2,
    });
    for number in 0..1000 {
        fs::write(world.path(&format!("rw/sub/{number}")), "").unwrap();
    }
    let sub = world.node("rw/sub");
    // An honest guest forgets what it is told not to keep, so it can walk any tree.
    for number in 0..1000 {
        let entry = world.lookup(sub, &number.to_string()).unwrap();
        if entry.entry_valid == 0 {
            world.forget(entry.node, 1);
        }
    }
    assert!(world.server.nodes.len() <= 51);
    let listed = world.list(sub, true, 65536);
    assert_eq!(listed.len(), 1002);
    assert!(world.server.nodes.len() <= 51);
    // The names have a limit of their own.
    let mut world = World::with(Limits {
        nodes: node::Limits { nodes: 10_000, soft: 10_000, name_bytes: 2000 },
        handles: handle::Limits { handles: 100, descriptors: 100 },
        paths: 4,
        unopened: 2,
    });
    let (sub, mut first) = (world.node("rw/sub"), None);
    for number in 0..20 {
        fs::write(world.path(&format!("rw/sub/{number:0>200}")), "").unwrap();
        let found = world.lookup(sub, &format!("{number:0>200}"));
        assert_eq!(found.is_ok(), number < 10, "{number}");
        first = first.or(found.ok().map(|entry| entry.node));
    }
    // A rename to a longer name does not get round it: the place is not remembered.
    let moved = format!("{:x>255}", 0);
    world.rename((sub, &format!("{:0>200}", 0)), (sub, &moved), 0).unwrap();
    assert_eq!(world.getattr(first.unwrap()).unwrap_err(), Errno::STALE);
}

#[test]
fn a_listing_of_a_hundred_thousand_names_is_whole_while_others_come_and_go() {
    let mut world = World::with(Limits::NORMAL);
    let folder = world.path("rw/sub");
    for number in 0..100_000 {
        fs::write(folder.join(format!("stable-{number}")), "").unwrap();
    }
    let sub = world.node("rw/sub");
    let handle = world.opendir(sub).unwrap();
    let (mut seen, mut offset, mut round) = (std::collections::HashMap::new(), 0, 0);
    loop {
        let body = bytes_of(&ReadIn { handle, offset, size: 128 << 10, ..Default::default() });
        let reply = world.call(op::READDIRPLUS, sub, &[&body]).unwrap();
        let mut rest = &reply[..];
        if rest.is_empty() {
            break;
        }
        while !rest.is_empty() {
            rest = &rest[EntryOut::SIZE..];
            let entry = Dirent::parse(rest).unwrap();
            let end = Dirent::SIZE + entry.name_len as usize;
            *seen.entry(rest[Dirent::SIZE..end].to_vec()).or_insert(0) += 1;
            rest = &rest[end.next_multiple_of(8)..];
            offset = entry.offset;
        }
        // Names come and go on the host between the replies.
        fs::write(folder.join(format!("passing-{round}")), "").unwrap();
        if round > 3 {
            fs::remove_file(folder.join(format!("passing-{}", round - 3))).unwrap();
        }
        round += 1;
    }
    assert!(round > 100);
    let stable = seen.iter().filter(|(name, _)| name.starts_with(b"stable-"));
    assert_eq!(stable.filter(|(_, times)| **times == 1).count(), 100_000);
    assert!(seen.values().all(|times| *times == 1), "nothing twice");
}
