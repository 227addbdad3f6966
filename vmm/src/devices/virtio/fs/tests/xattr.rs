//! Extended attributes, where a share asks for them.

use super::*;

fn set(world: &mut World, node: u64, name: &[u8], value: &[u8], flags: u32) -> Result<(), Errno> {
    let size = value.len() as u32;
    let body = bytes_of(&SetxattrIn { size, flags });
    world.call(op::SETXATTR, node, &[&body, name, b"\0", value]).map(drop)
}

fn get(world: &mut World, node: u64, name: &[u8], size: u32) -> Result<Vec<u8>, Errno> {
    world.call(op::GETXATTR, node, &[&bytes_of(&GetxattrIn { size, padding: 0 }), name, b"\0"])
}

fn list(world: &mut World, node: u64) -> Vec<u8> {
    let room = bytes_of(&GetxattrIn { size: 1000, padding: 0 });
    world.call(op::LISTXATTR, node, &[&room]).unwrap()
}

#[test]
fn user_attributes_are_kept_on_the_host() {
    let mut world = World::new();
    for path in ["rw/a.txt", "rw/sub"] {
        let node = world.node(path);
        set(&mut world, node, b"user.one", b"1\0\xff", 0).unwrap();
        assert_eq!(get(&mut world, node, b"user.one", 100).unwrap(), b"1\0\xff");
        let size = GetxattrOut::parse(&get(&mut world, node, b"user.one", 0).unwrap()).unwrap();
        assert_eq!(size.size, 3);
        assert_eq!(get(&mut world, node, b"user.one", 2).unwrap_err(), Errno::RANGE);
        assert_eq!(get(&mut world, node, b"user.two", 9).unwrap_err(), Errno::NODATA);
        assert_eq!(list(&mut world, node), b"user.one\0");
        let again = set(&mut world, node, b"user.one", b"", libc::XATTR_CREATE as u32);
        assert_eq!(again.unwrap_err(), Errno::EXIST);
        world.call(op::REMOVEXATTR, node, &[b"user.one\0"]).unwrap();
        assert_eq!(list(&mut world, node), b"");
    }
}

#[test]
fn attributes_that_the_host_gives_a_meaning_do_not_exist() {
    let mut world = World::new();
    let node = world.node("rw/a.txt");
    let long = [b"user.".to_vec(), vec![b'x'; 251]].concat();
    for name in [
        &b"security.capability"[..],
        b"trusted.x",
        b"system.posix_acl_access",
        b"user.",
        b"user",
        b"",
        b"USER.x",
        &long,
    ] {
        for result in [
            set(&mut world, node, name, b"x", 0),
            get(&mut world, node, name, 100).map(drop),
            world.call(op::REMOVEXATTR, node, &[name, b"\0"]).map(drop),
        ] {
            let error = result.unwrap_err();
            assert!(
                matches!(error, Errno::OPNOTSUPP | Errno::RANGE | Errno::NAMETOOLONG),
                "{name:?}"
            );
        }
    }
    for target in ["rw/link", "rw/fifo"] {
        let node = world.node(target);
        assert_eq!(set(&mut world, node, b"user.x", b"", 0).unwrap_err(), Errno::OPNOTSUPP);
    }
    assert_eq!(set(&mut world, ROOT_ID, b"user.x", b"", 0).unwrap_err(), Errno::OPNOTSUPP);
    // Lies about the size, and values that are too large.
    let body = bytes_of(&SetxattrIn { size: 5, flags: 0 });
    assert!(world.call(op::SETXATTR, node, &[&body, b"user.x\0", b"four"]).is_err());
    assert!(set(&mut world, node, b"user.x", &vec![0; (64 << 10) + 1], 0).is_err());
    assert!(set(&mut world, node, b"user.x", b"", 77).is_err());
    assert_eq!(list(&mut world, node), b"");
}

#[test]
fn a_share_without_them_and_one_that_is_only_read() {
    let mut world = World::new();
    let (lim, ro) = (world.node("lim"), world.node("ro/a.txt"));
    assert_eq!(set(&mut world, lim, b"user.x", b"", 0).unwrap_err(), Errno::OPNOTSUPP);
    assert_eq!(set(&mut world, ro, b"user.x", b"", 0).unwrap_err(), Errno::ROFS);
    let refused = world.call(op::REMOVEXATTR, ro, &[b"user.x\0"]).unwrap_err();
    assert_eq!(refused, Errno::ROFS);
    assert_eq!(list(&mut world, ro), b"");
    // Where no share has them, the guest's kernel is told not to ask again.
    for share in &mut world.server.shares {
        share.xattr = false;
    }
    for op in [op::SETXATTR, op::GETXATTR, op::LISTXATTR, op::REMOVEXATTR] {
        assert_eq!(world.call(op, lim, &[&[0; 20]]).unwrap_err(), Errno::NOSYS);
    }
    world.check_protected();
}
