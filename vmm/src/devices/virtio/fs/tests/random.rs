//! Generated messages: nothing panics, and nothing outside of a share is read or changed.

use super::*;
use proptest::prelude::*;

/// A number that has a meaning somewhere, or none.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        5 => 0_u64..12,
        1 => prop::sample::select(vec![255, 4096, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 40, u64::MAX]),
        1 => any::<u64>(),
    ]
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        5 => prop::sample::select(vec![
            "a.txt", "sub", "link", "abs", "fifo", "new", "..", ".", "", "../outside",
            "../outside/secret.txt", "user.a", "security.capability", "/etc/passwd", "secret.txt", "rw", "ro", "lim", "single",
        ])
        .prop_map(|name| name.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..300),
    ]
}

#[derive(Clone, Debug)]
pub(super) struct Message {
    op: u32,
    pub(super) node: u64,
    /// Each as 4 or 8 bytes.
    fields: Vec<(u64, bool)>,
    names: Vec<Vec<u8>>,
    lie: Option<u32>,
    pub(super) room: usize,
}

pub(super) fn message() -> impl Strategy<Value = Message> {
    (
        prop_oneof![20 => 1_u32..53, 1 => any::<u32>()],
        number(),
        prop::collection::vec((number(), any::<bool>()), 0..12),
        prop::collection::vec(name(), 0..3),
        prop_oneof![9 => Just(None), 1 => any::<u32>().prop_map(Some)],
        prop::sample::select(vec![0, 15, 16, 100, 160, 300, 5000, 70_000]),
    )
        .prop_map(|(op, node, fields, names, lie, room)| Message {
            op,
            node,
            fields,
            names,
            lie,
            room,
        })
}

impl Message {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for (value, wide) in &self.fields {
            let value = value.to_le_bytes();
            body.extend_from_slice(if *wide { &value } else { &value[..4] });
        }
        for name in &self.names {
            body.extend_from_slice(name);
            body.push(0);
        }
        let len = self.lie.unwrap_or((InHeader::SIZE + body.len()) as u32);
        let header =
            InHeader { len, opcode: self.op, unique: 99, node: self.node, ..Default::default() };
        [bytes_of(&header), body].concat()
    }
}

/// Messages with the right shape for their operation, so that more of them get far.
pub(super) fn shaped() -> impl Strategy<Value = Message> {
    let fields: Vec<(u32, &[bool], usize)> = vec![
        (op::LOOKUP, &[], 1),
        (op::GETATTR, &[false, false, true], 0),
        (
            op::SETATTR,
            &[
                false, false, true, true, true, true, true, true, false, false, false, false,
                false, false, false, false,
            ],
            0,
        ),
        (op::READLINK, &[], 0),
        (op::SYMLINK, &[], 2),
        (op::MKNOD, &[false, false, false, false], 1),
        (op::MKDIR, &[false, false], 1),
        (op::UNLINK, &[], 1),
        (op::RMDIR, &[], 1),
        (op::RENAME, &[true], 2),
        (op::RENAME2, &[true, false, false], 2),
        (op::LINK, &[true], 1),
        (op::OPEN, &[false, false], 0),
        (op::CREATE, &[false, false, false, false], 1),
        (op::READ, &[true, true, false, false, true, false, false], 0),
        (op::RELEASE, &[true, false, false, true], 0),
        (op::FSYNC, &[true, false, false], 0),
        (op::OPENDIR, &[false, false], 0),
        (op::READDIR, &[true, true, false, false, true, false, false], 0),
        (op::READDIRPLUS, &[true, true, false, false, true, false, false], 0),
        (op::FALLOCATE, &[true, true, true, false, false], 0),
        (op::LSEEK, &[true, true, false, false], 0),
        (op::COPY_FILE_RANGE, &[true, true, true, true, true, true, true], 0),
        (op::WRITE, &[true, true, false, false, true, false, false], 1),
        (op::SETXATTR, &[false, false], 2),
        (op::GETXATTR, &[false, false], 1),
        (op::LISTXATTR, &[false, false], 0),
        (op::REMOVEXATTR, &[], 1),
        (op::RELEASEDIR, &[true, false, false, true], 0),
        (op::FSYNCDIR, &[true, false, false], 0),
        (op::BATCH_FORGET, &[false, false, true, true, true, true], 0),
        (op::FORGET, &[true], 0),
        (op::STATFS, &[], 0),
    ];
    prop::sample::select(fields).prop_flat_map(|(op, widths, names)| {
        (
            1_u64..14,
            prop::collection::vec(number(), widths.len()),
            prop::collection::vec(name(), names),
        )
            .prop_map(move |(node, values, names)| Message {
                op,
                node,
                fields: values.into_iter().zip(widths.iter().copied()).collect(),
                names,
                lie: None,
                room: 9000,
            })
    })
}

fn run(messages: &[Message]) {
    let mut world = World::with_limits(40, 30);
    // Something to hit: nodes 2 to 5 are the shares, these get the next numbers.
    for path in ["rw/a.txt", "rw/sub", "rw/link", "rw/fifo", "ro/a.txt", "ro/sub"] {
        world.node(path);
    }
    let file = world.node("rw/a.txt");
    world.open(file, libc::O_RDWR).unwrap();
    let folder = world.node("ro");
    world.opendir(folder).unwrap();
    for message in messages {
        let reply = world.raw(&message.bytes(), message.room);
        if let Ok(Some(reply)) = reply {
            let needle = b"contents of outside";
            assert!(!reply.windows(needle.len()).any(|window| window == needle), "{message:?}");
        }
    }
    world.check_protected();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_messages_do_no_harm(messages in prop::collection::vec(message(), 1..60)) {
        run(&messages);
    }

    #[test]
    fn shaped_messages_do_no_harm(messages in prop::collection::vec(shaped(), 1..120)) {
        run(&messages);
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200), room in 0_usize..300) {
        let mut world = World::new();
        let _ = world.raw(&bytes, room);
        world.check_protected();
    }
}
