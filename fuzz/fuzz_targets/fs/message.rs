//! FUSE messages (`linux/fuse.h`, protocol 7.38), with fields that a fuzzer can change one by one.

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::program::Data;

/// Bytes of the header of a request.
const IN_HEADER: usize = 40;
/// Bytes of the header of a reply.
const OUT_HEADER: usize = 16;
/// Most numbers of nodes, and of handles, that the guest keeps in mind.
const KEPT: usize = 64;

/// Names that mean something in the shares, and names that must not.
const NAMES: [&str; 24] = [
    "a.txt",
    "sub",
    "b.txt",
    "link",
    "abs",
    "fifo",
    "new",
    "other",
    "rw",
    "ro",
    "lim",
    "single",
    "..",
    ".",
    "",
    "../outside",
    "../outside/secret.txt",
    "/etc/passwd",
    "secret.txt",
    "outside",
    "sub/b.txt",
    "user.x",
    "security.capability",
    "system.posix_acl_access",
];

/// What a field is.
#[derive(Clone, Copy)]
enum Field {
    /// 4 bytes.
    Word,
    /// 8 bytes.
    Long,
    /// A handle.
    Handle,
    /// A node.
    Node,
    /// Length of the data behind the names, if the fuzzer says nothing else.
    Length,
}
use Field::{Handle, Length, Long, Node, Word};

/// What an operation's message consists of.
struct Shape {
    operation: u32,
    fields: &'static [Field],
    names: usize,
    data: bool,
}

const fn shape(operation: u32, fields: &'static [Field], names: usize, data: bool) -> Shape {
    Shape { operation, fields, names, data }
}

const READ: &[Field] = &[Handle, Long, Word, Word, Long, Word, Word];
const LOCK: &[Field] = &[Handle, Long, Long, Long, Word, Word, Word, Word];
const SETATTR: &[Field] = &[
    Word, Word, Handle, Long, Long, Long, Long, Long, Word, Word, Word, Word, Word, Word, Word,
    Word,
];

macro_rules! operations {
    ($($name:ident = $shape:expr;)*) => {
        /// All operations of the protocol.
        #[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Operation { $($name),* }
        impl Operation {
            fn shape(self) -> Shape {
                match self { $(Self::$name => $shape),* }
            }
        }
    };
}

operations! {
    Lookup = shape(1, &[], 1, false);
    Forget = shape(2, &[Long], 0, false);
    Getattr = shape(3, &[Word, Word, Handle], 0, false);
    Setattr = shape(4, SETATTR, 0, false);
    Readlink = shape(5, &[], 0, false);
    Symlink = shape(6, &[], 2, false);
    Mknod = shape(8, &[Word, Word, Word, Word], 1, false);
    Mkdir = shape(9, &[Word, Word], 1, false);
    Unlink = shape(10, &[], 1, false);
    Rmdir = shape(11, &[], 1, false);
    Rename = shape(12, &[Node], 2, false);
    Link = shape(13, &[Node], 1, false);
    Open = shape(14, &[Word, Word], 0, false);
    Read = shape(15, READ, 0, false);
    Write = shape(16, &[Handle, Long, Length, Word, Long, Word, Word], 0, true);
    Statfs = shape(17, &[], 0, false);
    Release = shape(18, &[Handle, Word, Word, Long], 0, false);
    Fsync = shape(20, &[Handle, Word, Word], 0, false);
    Setxattr = shape(21, &[Length, Word], 1, true);
    Getxattr = shape(22, &[Word, Word], 1, false);
    Listxattr = shape(23, &[Word, Word], 0, false);
    Removexattr = shape(24, &[], 1, false);
    Flush = shape(25, &[Handle, Word, Word, Long], 0, false);
    Init = shape(26, &[Word, Word, Word, Word, Long, Long, Long, Long, Long, Long], 0, false);
    Opendir = shape(27, &[Word, Word], 0, false);
    Readdir = shape(28, READ, 0, false);
    Releasedir = shape(29, &[Handle, Word, Word, Long], 0, false);
    Fsyncdir = shape(30, &[Handle, Word, Word], 0, false);
    Getlk = shape(31, LOCK, 0, false);
    Setlk = shape(32, LOCK, 0, false);
    Setlkw = shape(33, LOCK, 0, false);
    Access = shape(34, &[Word, Word], 0, false);
    Create = shape(35, &[Word, Word, Word, Word], 1, false);
    Interrupt = shape(36, &[Long], 0, false);
    Bmap = shape(37, &[Long, Word, Word], 0, false);
    Destroy = shape(38, &[], 0, false);
    Ioctl = shape(39, &[Handle, Word, Word, Long, Word, Word], 0, false);
    Poll = shape(40, &[Handle, Long, Word, Word], 0, false);
    BatchForget = shape(42, &[Word, Word, Node, Long, Node, Long, Node, Long], 0, false);
    Fallocate = shape(43, &[Handle, Long, Long, Word, Word], 0, false);
    Readdirplus = shape(44, READ, 0, false);
    Rename2 = shape(45, &[Node, Word, Word], 2, false);
    Lseek = shape(46, &[Handle, Long, Word, Word], 0, false);
    CopyFileRange = shape(47, &[Handle, Long, Node, Handle, Long, Long, Long], 0, false);
    Setupmapping = shape(48, &[Handle, Long, Long, Long, Long], 0, false);
    Removemapping = shape(49, &[Word, Long, Long], 0, false);
    Syncfs = shape(50, &[Long], 0, false);
    Tmpfile = shape(51, &[Word, Word, Word, Word], 1, false);
    Statx = shape(52, &[Word, Word, Handle, Word, Word], 0, false);
}

/// A number. For nodes and handles a small one means one of those that the server gave.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Number {
    Small(u8),
    Bit(u8),
    Page(u8),
    Any(u64),
}

impl Number {
    fn value(&self) -> u64 {
        match self {
            Self::Small(n) => u64::from(*n),
            Self::Bit(n) => 1 << (n % 64),
            Self::Page(n) => u64::from(*n) * 4096,
            Self::Any(n) => *n,
        }
    }

    fn among(&self, known: &[u64]) -> u64 {
        match self {
            Self::Small(n) if !known.is_empty() => known[usize::from(*n) % known.len()],
            other => other.value(),
        }
    }
}

/// A name, with the NUL behind it.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Name {
    Known(u8),
    Bytes(Vec<u8>),
    Long { byte: u8, length: u16 },
}

impl Name {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Known(n) => {
                out.extend_from_slice(NAMES[usize::from(*n) % NAMES.len()].as_bytes());
            }
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
            Self::Long { byte, length } => {
                out.resize(out.len() + usize::from(length % 5000), *byte);
            }
        }
        out.push(0);
    }
}

/// A message that has the form of its operation.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Message {
    pub(crate) operation: Operation,
    node: Number,
    numbers: Vec<Number>,
    names: [Name; 2],
    data: Data,
    room: u16,
    /// Where the header is cut in two, if it is, and whether the chain is indirect.
    cut: u8,
}

/// What the guest knows of the server.
#[derive(Default)]
pub(crate) struct Session {
    nodes: Vec<u64>,
    handles: Vec<u64>,
    unique: u64,
}

impl Session {
    /// Mounts the file system and looks around, as every guest does.
    pub(crate) fn start(&mut self, machine: &mut Machine) {
        let mut init = Vec::new();
        for word in [7_u32, 38, 1 << 17, u32::MAX] {
            init.extend_from_slice(&word.to_le_bytes());
        }
        init.resize(64, 0);
        self.raw(machine, 1, 26, 0, &init, None, 200, 0);
        self.nodes = vec![1];
        for (parent, name) in
            [(0, "rw"), (0, "ro"), (0, "lim"), (0, "single"), (1, "a.txt"), (1, "sub"), (2, "sub")]
        {
            let Some(parent) = self.nodes.get(parent).copied() else { return };
            let name = [name.as_bytes(), b"\0"].concat();
            if let Some(body) = self.raw(machine, 1, 1, parent, &name, None, 200, 0) {
                self.learn(Operation::Lookup, &body);
            }
        }
    }

    /// Whether the first lookups of [`Session::start`] all went well.
    pub(crate) fn knows_shares(&self) -> bool {
        self.nodes.len() >= 5
    }

    /// The node that a number means.
    pub(crate) fn node(&self, number: &Number) -> u64 {
        number.among(&self.nodes)
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, machine: &mut Machine, message: &Message) {
        let shape = message.operation.shape();
        let data = if shape.data { message.data.bytes() } else { Vec::new() };
        let mut body = Vec::new();
        for (index, field) in shape.fields.iter().enumerate() {
            let number = message.numbers.get(index);
            let value = number.map_or(0, Number::value);
            match field {
                Word => body.extend_from_slice(&(value as u32).to_le_bytes()),
                Long => body.extend_from_slice(&value.to_le_bytes()),
                Length => {
                    let length = number.map_or(data.len() as u32, |_| value as u32);
                    body.extend_from_slice(&length.to_le_bytes());
                }
                Handle | Node => {
                    let known = if matches!(field, Handle) { &self.handles } else { &self.nodes };
                    let value = number.map_or(0, |number| number.among(known));
                    body.extend_from_slice(&value.to_le_bytes());
                }
            }
        }
        for name in &message.names[..shape.names] {
            name.put(&mut body);
        }
        body.extend_from_slice(&data);
        let node = self.node(&message.node);
        let queue = usize::from(!matches!(message.operation, Operation::Forget));
        let room = u32::from(message.room);
        let reply = self.raw(machine, queue, shape.operation, node, &body, None, room, message.cut);
        if let Some(body) = reply {
            self.learn(message.operation, &body);
        }
    }

    /// Keeps in mind what the server gave.
    fn learn(&mut self, operation: Operation, body: &[u8]) {
        let long = |at: usize| {
            body.get(at..).and_then(|rest| rest.first_chunk()).copied().map(u64::from_le_bytes)
        };
        let (node, handle) = match operation {
            Operation::Lookup
            | Operation::Symlink
            | Operation::Mknod
            | Operation::Mkdir
            | Operation::Link => (long(0), None),
            Operation::Create | Operation::Tmpfile => (long(0), long(128)),
            Operation::Open | Operation::Opendir => (None, long(0)),
            _ => (None, None),
        };
        for (list, number) in [(&mut self.nodes, node), (&mut self.handles, handle)] {
            if let Some(number) = number.filter(|_| list.len() < KEPT) {
                list.push(number);
            }
        }
    }

    /// Sends any message; gives the body of a good reply.
    #[expect(clippy::too_many_arguments, reason = "all that a message is made of")]
    pub(crate) fn raw(
        &mut self,
        machine: &mut Machine,
        queue: usize,
        operation: u32,
        node: u64,
        body: &[u8],
        length: Option<u32>,
        room: u32,
        cut: u8,
    ) -> Option<Vec<u8>> {
        self.unique += 1;
        let length = length.unwrap_or((IN_HEADER + body.len()) as u32);
        let mut message = length.to_le_bytes().to_vec();
        message.extend_from_slice(&operation.to_le_bytes());
        message.extend_from_slice(&self.unique.to_le_bytes());
        message.extend_from_slice(&node.to_le_bytes());
        // User, group, process; no extensions.
        message.extend_from_slice(&[0; 16]);
        message.extend_from_slice(body);
        let (first, second) = message.split_at(usize::from(cut / 2).min(message.len()));
        let half = room / 2;
        let good = machine.status() == 15;
        let (written, reply) =
            machine.request(queue, &[first, second], &[half, room - half], cut % 2 == 1)?;
        if !good {
            return None;
        }
        let header = reply.first_chunk::<OUT_HEADER>()?;
        let error = i32::from_le_bytes(*header[4..].first_chunk()?);
        let unique = u64::from_le_bytes(*header[8..].first_chunk()?);
        // Earlier programs may lead the device to rings or buffers that are not where they were put.
        if written < OUT_HEADER as u32 || unique != self.unique || error != 0 {
            return None;
        }
        reply.get(OUT_HEADER..written as usize).map(<[u8]>::to_vec)
    }
}
