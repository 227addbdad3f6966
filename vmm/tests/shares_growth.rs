//! How much a hostile guest can make the file server grow: the one test of its process, so that the
//! process's own memory and descriptors can be measured.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::fs::File;
use std::os::fd::OwnedFd;

use casulo_vmm::Share;
use casulo_vmm::devices::virtio::fs::Server;
use vm_memory::VolatileSlice;

const MEMORY: u64 = 16 << 20;
const DESCRIPTORS: usize = 1024;
/// More than the server will know.
const FILES: u32 = 70_000;

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Sends one request; the body of the reply, or the error.
fn call(
    server: &mut Server,
    reply: &mut [u8],
    op: u32,
    node: u64,
    body: &[u8],
) -> Result<usize, i32> {
    let mut message = Vec::with_capacity(40 + body.len());
    message.extend((40 + body.len() as u32).to_le_bytes());
    message.extend(op.to_le_bytes());
    message.extend(7_u64.to_le_bytes());
    message.extend(node.to_le_bytes());
    message.extend([0; 16]);
    message.extend(body);
    let written = server
        .handle(&[VolatileSlice::from(&mut message[..])], &[VolatileSlice::from(&mut *reply)]);
    let error = i32::from_le_bytes(reply[4..8].try_into().unwrap());
    if error == 0 { Ok(written) } else { Err(-error) }
}

#[test]
fn storms_of_lookups_and_opens_stay_within_bounds() {
    // Where an inode costs least.
    let base = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    // Names that take as much memory as names of so many files can.
    let name = |number: u32| format!("{number:0>30}");
    for number in 0..FILES {
        File::create(base.path().join(name(number))).unwrap();
    }
    let open = |path: &str| OwnedFd::from(File::open(path).unwrap());
    let share = Share {
        name: "rw".to_owned(),
        root: open(base.path().to_str().unwrap()),
        read_only: false,
        limit_bytes: Some(1 << 30),
        limit_files: None,
        xattr: true,
        cache: true,
        guest_uid: 1000,
        guest_gid: 1000,
    };
    let mut server = Server::new(vec![share], open("/proc")).unwrap();
    let mut reply = vec![0; 1 << 17];
    let init = [7_u32, 38, 0, u32::MAX].map(u32::to_le_bytes).concat();
    call(&mut server, &mut reply, 26, 0, &init).unwrap();
    let (memory, fds) = (resident(), descriptors());

    let root = 2;
    let mut nodes = Vec::with_capacity(FILES as usize);
    let before_nodes = resident();
    let mut refused = 0;
    for number in 0..FILES {
        let body = [name(number).as_bytes(), &[0]].concat();
        match call(&mut server, &mut reply, 1, root, &body) {
            Ok(_) => nodes.push(u64::from_le_bytes(reply[16..24].try_into().unwrap())),
            Err(error) => {
                assert_eq!(error, 23, "ENFILE");
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && nodes.len() > 50_000, "{refused} {}", nodes.len());
    // Each opened several times, and then each folder handle that can be had.
    let mut opened = 0;
    for node in nodes.iter().flat_map(|node| [node; 3]) {
        opened += usize::from(
            call(&mut server, &mut reply, 14, *node, &[2, 0, 0, 0, 0, 0, 0, 0]).is_ok(),
        );
    }
    while call(&mut server, &mut reply, 27, root, &[0; 8]).is_ok() {}
    assert!(opened > 1000, "{opened}");
    let grown = resident().saturating_sub(memory.min(before_nodes));
    let more = descriptors() - fds;
    println!("{} nodes, {opened} opens: {grown} bytes, {more} descriptors", nodes.len());
    assert!(more < DESCRIPTORS, "{more} descriptors");
    assert!(grown < MEMORY, "{grown} bytes");
}
