//! The server driven with raw messages, on a temporary folder of the host.
//!
//! Layout of a [`World`]: `rw` and `ro` are shared as what they say, `lim` with a limit, `single.txt`
//! as a file; `outside` is not shared and must never be read or changed.

mod cases;
mod device;
mod hostile;
mod jailed;
mod ordinary;
mod quota;
mod random;
mod reach;
mod unopened;
mod xattr;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tempfile::TempDir;
use vm_memory::VolatileSlice;

use super::abi::*;
use super::server::Limits;
use super::{Server, Share};
use super::{handle, node};

pub(super) const GUEST_UID: u32 = 1000;
pub(super) const GUEST_GID: u32 = 1001;
/// Limit of the share `lim` in bytes.
pub(super) const LIMIT: u64 = 1 << 20;

pub(super) struct World {
    pub(super) base: TempDir,
    pub(super) server: Server,
    before: BTreeMap<PathBuf, String>,
}

pub(super) fn open_path(path: &Path) -> std::os::fd::OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

pub(super) fn share(base: &Path, name: &str, file: &str) -> Share {
    Share {
        name: name.to_owned(),
        root: open_path(&base.join(file)),
        read_only: name == "ro",
        limit_bytes: (name == "lim").then_some(LIMIT),
        limit_files: None,
        xattr: name == "rw" || name == "ro",
        cache: name == "ro",
        guest_uid: GUEST_UID,
        guest_gid: GUEST_GID,
    }
}

/// The shares of a [`World`].
pub(super) fn shares(base: &Path) -> Vec<Share> {
    vec![
        share(base, "rw", "rw"),
        share(base, "ro", "ro"),
        share(base, "lim", "lim"),
        share(base, "single", "single.txt"),
    ]
}

impl World {
    pub(super) fn new() -> Self {
        Self::with_limits(1000, 1000)
    }

    pub(super) fn with_limits(nodes: usize, handles: usize) -> Self {
        // So few path descriptors that they are given up all the time.
        Self::with(Limits {
            nodes: node::Limits { nodes, soft: nodes, name_bytes: 1 << 20 },
            handles: handle::Limits { handles, descriptors: handles },
            paths: 2,
            unopened: 2,
        })
    }

    pub(super) fn with(limits: Limits) -> Self {
        let base = tempfile::tempdir().unwrap();
        let path = base.path();
        for folder in ["rw/sub", "ro/sub", "lim", "outside/sub"] {
            fs::create_dir_all(path.join(folder)).unwrap();
        }
        for file in ["rw/a.txt", "ro/a.txt", "ro/sub/b.txt", "single.txt", "outside/secret.txt"] {
            fs::write(path.join(file), format!("contents of {file}")).unwrap();
        }
        for folder in ["rw", "ro"] {
            std::os::unix::fs::symlink("../outside", path.join(folder).join("link")).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", path.join(folder).join("abs")).unwrap();
            let fifo = path.join(folder).join("fifo");
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &fifo,
                rustix::fs::FileType::Fifo,
                Mode::from_raw_mode(0o666),
                0,
            )
            .unwrap();
        }
        let shares = shares(path);
        let server = Server::with_limits(shares, open_path(Path::new("/proc")), limits).unwrap();
        let before = protected(path);
        let mut world = Self { base, server, before };
        world.init();
        world
    }

    /// Serves other shares of the same folders.
    pub(super) fn serve(&mut self, shares: Vec<Share>) {
        self.server = Server::new(shares, open_path(Path::new("/proc"))).unwrap();
        self.init();
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    /// Whether what must never change is as it was.
    pub(super) fn is_protected(&self) -> bool {
        self.before == protected(self.base.path())
    }

    /// What must never change has not.
    pub(super) fn check_protected(&self) {
        assert_eq!(self.before, protected(self.base.path()));
    }

    pub(super) fn init(&mut self) -> InitOut {
        let body = bytes_of(&InitIn { major: 7, minor: 41, max_readahead: 1 << 17, flags: !0 });
        let reply = self.call(op::INIT, 0, &[&body, &[0xff; 48]]).unwrap();
        InitOut::parse(&reply).unwrap()
    }

    /// Sends one request with a well-formed header.
    pub(super) fn call(&mut self, op: u32, node: u64, parts: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        let body = parts.concat();
        let len = (InHeader::SIZE + body.len()) as u32;
        let header = InHeader { len, opcode: op, unique: 99, node, ..Default::default() };
        let message = [bytes_of(&header), body].concat();
        self.raw(&message, 1 << 17).map(|reply| reply.expect("a reply"))
    }

    /// Sends any bytes. `None`: no reply.
    pub(super) fn raw(&mut self, message: &[u8], room: usize) -> Result<Option<Vec<u8>>, Errno> {
        let mut message = message.to_vec();
        let mut reply = vec![0xee; room];
        // Headers in a slice of their own and the rest in uneven pieces, as a driver may do.
        let request: Vec<_> = message.chunks_mut(40).map(VolatileSlice::from).collect();
        let out: Vec<_> = reply.chunks_mut(1000).map(VolatileSlice::from).collect();
        let written = self.server.handle(&request, &out);
        drop((request, out));
        if written == 0 {
            return Ok(None);
        }
        assert!(written <= room);
        let header = OutHeader::parse(&reply).unwrap();
        assert_eq!(header.len as usize, written);
        assert!(reply[written..].iter().all(|byte| *byte == 0xee) || header.error != 0);
        if header.error != 0 {
            assert!(header.error < 0 && header.error > -4096 && written == OutHeader::SIZE);
            return Err(Errno::from_raw_os_error(-header.error));
        }
        Ok(Some(reply[OutHeader::SIZE..written].to_vec()))
    }

    pub(super) fn lookup(&mut self, parent: u64, name: &str) -> Result<EntryOut, Errno> {
        let reply = self.call(op::LOOKUP, parent, &[&name_bytes(name)])?;
        Ok(EntryOut::parse(&reply).unwrap())
    }

    /// Node of a path of looked-up components.
    pub(super) fn node(&mut self, path: &str) -> u64 {
        path.split('/').fold(ROOT_ID, |node, name| self.lookup(node, name).unwrap().node)
    }

    pub(super) fn open(&mut self, node: u64, flags: i32) -> Result<u64, Errno> {
        let body = bytes_of(&OpenIn { flags: flags as u32, open_flags: 0 });
        let reply = self.call(op::OPEN, node, &[&body])?;
        Ok(OpenOut::parse(&reply).unwrap().handle)
    }

    pub(super) fn create(
        &mut self,
        parent: u64,
        name: &str,
        flags: i32,
        mode: u32,
    ) -> Result<(EntryOut, u64), Errno> {
        let body = bytes_of(&CreateIn { flags: flags as u32, mode, umask: 0, open_flags: 0 });
        let reply = self.call(op::CREATE, parent, &[&body, &name_bytes(name)])?;
        let entry = EntryOut::parse(&reply).unwrap();
        let open = OpenOut::parse(&reply[EntryOut::SIZE..]).unwrap();
        Ok((entry, open.handle))
    }

    pub(super) fn write(
        &mut self,
        node: u64,
        handle: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<u32, Errno> {
        let size = data.len() as u32;
        let body = bytes_of(&WriteIn { handle, offset, size, ..Default::default() });
        let reply = self.call(op::WRITE, node, &[&body, data])?;
        Ok(WriteOut::parse(&reply).unwrap().size)
    }

    pub(super) fn read(
        &mut self,
        node: u64,
        handle: u64,
        offset: u64,
        size: u32,
    ) -> Result<Vec<u8>, Errno> {
        let body = bytes_of(&ReadIn { handle, offset, size, ..Default::default() });
        self.call(op::READ, node, &[&body])
    }

    pub(super) fn release(&mut self, node: u64, handle: u64) -> Result<(), Errno> {
        let body = bytes_of(&ReleaseIn { handle, ..Default::default() });
        self.call(op::RELEASE, node, &[&body]).map(drop)
    }

    pub(super) fn getattr(&mut self, node: u64) -> Result<AttrOut, Errno> {
        let reply = self.call(op::GETATTR, node, &[&bytes_of(&GetattrIn::default())])?;
        Ok(AttrOut::parse(&reply).unwrap())
    }

    pub(super) fn setattr(&mut self, node: u64, wanted: SetattrIn) -> Result<AttrOut, Errno> {
        let reply = self.call(op::SETATTR, node, &[&bytes_of(&wanted)])?;
        Ok(AttrOut::parse(&reply).unwrap())
    }

    pub(super) fn forget(&mut self, node: u64, lookups: u64) {
        let header = InHeader { len: 48, opcode: op::FORGET, node, ..Default::default() };
        let message = [bytes_of(&header), bytes_of(&ForgetIn { lookups })].concat();
        assert_eq!(self.raw(&message, 64), Ok(None));
    }

    pub(super) fn named(&mut self, op: u32, parent: u64, name: &str) -> Result<(), Errno> {
        self.call(op, parent, &[&name_bytes(name)]).map(drop)
    }

    pub(super) fn rename(
        &mut self,
        from: (u64, &str),
        to: (u64, &str),
        flags: u32,
    ) -> Result<(), Errno> {
        let body = bytes_of(&Rename2In { new_parent: to.0, flags, padding: 0 });
        let names = [name_bytes(from.1), name_bytes(to.1)].concat();
        self.call(op::RENAME2, from.0, &[&body, &names]).map(drop)
    }

    pub(super) fn opendir(&mut self, node: u64) -> Result<u64, Errno> {
        let reply = self.call(op::OPENDIR, node, &[&bytes_of(&OpenIn::default())])?;
        Ok(OpenOut::parse(&reply).unwrap().handle)
    }

    /// A whole listing in replies of `size` bytes: names, and nodes if they were given. A reply with room
    /// for one more entry must be the last.
    pub(super) fn list(&mut self, node: u64, plus: bool, size: u32) -> Vec<(String, u64)> {
        let handle = self.opendir(node).unwrap();
        let (mut all, mut offset) = (Vec::new(), 0);
        let op = if plus { op::READDIRPLUS } else { op::READDIR };
        let most = 256 + Dirent::SIZE + if plus { EntryOut::SIZE } else { 0 };
        let mut ended = false;
        loop {
            let body = bytes_of(&ReadIn { handle, offset, size, ..Default::default() });
            let reply = self.call(op, node, &[&body]).unwrap();
            assert!(reply.len() <= size as usize);
            assert!(!ended || reply.is_empty(), "{} bytes behind the end", reply.len());
            ended = reply.len() + most <= size as usize;
            let mut rest = &reply[..];
            if rest.is_empty() {
                break;
            }
            while !rest.is_empty() {
                let mut id = 0;
                if plus {
                    id = EntryOut::parse(rest).unwrap().node;
                    rest = &rest[EntryOut::SIZE..];
                }
                let entry = Dirent::parse(rest).unwrap();
                let end = Dirent::SIZE + entry.name_len as usize;
                all.push((String::from_utf8(rest[Dirent::SIZE..end].to_vec()).unwrap(), id));
                rest = &rest[end.next_multiple_of(8)..];
                offset = entry.offset;
            }
        }
        self.release(node, handle).unwrap();
        all
    }
}

pub(super) fn name_bytes(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Everything about the files that must not change.
fn protected(base: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut todo = vec![base.join("outside"), base.join("ro")];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let contents = if meta.is_file() {
            fs::read_to_string(&path).unwrap()
        } else if meta.is_symlink() {
            format!("{:?}", fs::read_link(&path).unwrap())
        } else {
            String::new()
        };
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let owner = (meta.uid(), meta.gid(), meta.mode(), meta.nlink(), meta.ino());
        let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
        all.insert(path, format!("{owner:?} {times:?} {contents}"));
    }
    // Names beside the shares count as well.
    let names = fs::read_dir(base).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    all.insert(base.to_owned(), format!("{names:?}"));
    all
}
