//! The shares on the host, and what lies beside them.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::machine::{DATA, DATA_END};
use casulo_vmm::devices::virtio::fs::{FsDevice, Share};
use memchr::memmem;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use tempfile::TempDir;

/// Limit of the share `lim` in bytes.
const LIMIT: u64 = 64 << 10;
/// Most names that the guest may add to it.
const LIMIT_FILES: u64 = 10;
/// Most bytes by which one write may go beyond it.
const ONE_WRITE: u64 = 256 << 10;

/// Something that a user does on the host while the guest is at work.
#[derive(Arbitrary, Debug)]
pub(crate) enum HostOp {
    /// A folder of the share becomes a link that leads out.
    FolderToLink,
    /// A file of the share becomes a link that leads out.
    FileToLink,
    /// A folder goes away with all that is in it.
    RemoveFolder,
    /// A file grows, or is made.
    Append,
    /// A file becomes a folder.
    FileToFolder,
}

/// The tree. `rw`, `lim` and `single.txt` may be changed; `ro` and `outside` must stay as they are.
pub(crate) struct World {
    base: TempDir,
    secret: Vec<u8>,
    /// What must stay.
    before: OnceLock<BTreeMap<PathBuf, String>>,
}

impl World {
    /// The shares as they are at first.
    pub(crate) fn fresh() -> &'static Self {
        static WORLD: OnceLock<World> = OnceLock::new();
        let world = WORLD.get_or_init(Self::new);
        world.rebuild();
        world.before.get_or_init(|| world.protected());
        world
    }

    fn new() -> Self {
        let base = tempfile::tempdir().expect("a temporary folder");
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .expect("random bytes");
        // No input can hold it.
        let secret: Vec<u8> = random.iter().map(|byte| byte | 0x80).collect();
        let world = Self { base, secret, before: OnceLock::new() };
        for folder in ["ro/sub", "outside/sub", "rw", "lim"] {
            fs::create_dir_all(world.path(folder)).expect("a folder");
        }
        fs::write(world.path("ro/a.txt"), "read only").expect("a file");
        fs::write(world.path("ro/sub/b.txt"), "read only too").expect("a file");
        fs::write(world.path("outside/secret.txt"), &world.secret).expect("a file");
        fs::write(world.path("outside/b.txt"), &world.secret).expect("a file");
        world.lures("ro");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    /// What must not be followed or opened.
    fn lures(&self, share: &str) {
        let share = self.path(share);
        symlink("../outside", share.join("link")).expect("a link");
        symlink("/etc/passwd", share.join("abs")).expect("a link");
        mknodat(CWD, share.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0)
            .expect("a FIFO");
    }

    fn rebuild(&self) {
        for share in ["rw", "lim"] {
            fs::remove_dir_all(self.path(share)).expect("a share to remove");
            fs::create_dir(self.path(share)).expect("a share");
        }
        fs::create_dir(self.path("rw/sub")).expect("a folder");
        fs::write(self.path("rw/a.txt"), [b'a'; 5000]).expect("a file");
        fs::write(self.path("rw/sub/b.txt"), "b").expect("a file");
        self.lures("rw");
        fs::write(self.path("single.txt"), "one file").expect("a file");
    }

    /// The device, with its shares.
    pub(crate) fn device(&self) -> FsDevice {
        let share = |name: &str, file: &str| Share {
            name: name.to_owned(),
            root: open_path(&self.path(file)),
            read_only: name == "ro",
            limit_bytes: (name == "lim").then_some(LIMIT),
            limit_files: (name == "lim").then_some(LIMIT_FILES),
            xattr: name == "rw" || name == "ro",
            cache: name == "ro",
            guest_uid: 1000,
            guest_gid: 1000,
        };
        let shares = vec![
            share("rw", "rw"),
            share("ro", "ro"),
            share("lim", "lim"),
            share("single", "single.txt"),
        ];
        FsDevice::new("casulo", shares, open_path(Path::new("/proc"))).expect("a device")
    }

    /// Does something on the host. It may fail, when the guest was quicker.
    pub(crate) fn host(&self, op: &HostOp) {
        let (sub, file) = (self.path("rw/sub"), self.path("rw/a.txt"));
        match op {
            HostOp::FolderToLink => {
                let _ = fs::rename(&sub, self.path("rw/was-sub"));
                let _ = symlink("../outside", &sub);
            }
            HostOp::FileToLink => {
                let _ = fs::remove_file(&file);
                let _ = symlink("../outside/secret.txt", &file);
            }
            HostOp::RemoveFolder => {
                let _ = fs::remove_dir_all(&sub);
            }
            HostOp::Append => {
                // Not through a link that the guest may have put there.
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW;
                let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
                if let Ok(fd) = rustix::fs::open(&file, flags, Mode::from_raw_mode(0o644)) {
                    let _ = rustix::io::write(&fd, &[b'h'; 3000]);
                }
            }
            HostOp::FileToFolder => {
                let _ = fs::remove_file(&file);
                let _ = fs::create_dir(&file);
            }
        }
    }

    /// All that the guest must not change, as text.
    fn protected(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(self.base.path()).expect("a folder") {
            found.insert(entry.expect("an entry").path(), String::new());
        }
        let mut todo = vec![self.path("ro"), self.path("outside")];
        while let Some(path) = todo.pop() {
            let stat = fs::symlink_metadata(&path).expect("metadata");
            let mut text = format!(
                "{:o} {} {} {} {} {}.{} {}.{}",
                stat.mode(),
                stat.ino(),
                stat.nlink(),
                stat.uid(),
                stat.size(),
                stat.mtime(),
                stat.mtime_nsec(),
                stat.ctime(),
                stat.ctime_nsec()
            );
            if stat.is_dir() {
                todo.extend(
                    fs::read_dir(&path).expect("a folder").map(|e| e.expect("an entry").path()),
                );
            } else if stat.is_file() {
                text += &format!(" {:?}", fs::read(&path).expect("its content"));
            }
            found.insert(path, text);
        }
        found
    }

    /// Nothing was changed, read or held that must not be.
    pub(crate) fn check(&self, machine: &Machine) {
        assert_eq!(Some(&self.protected()), self.before.get(), "changed outside of the shares");
        let memory = machine.bytes(DATA, (DATA_END - DATA) as usize);
        assert!(memmem::find(&memory, &self.secret).is_none(), "read outside of the shares");
        let (held, names) = held(&self.path("lim"));
        assert!(held <= LIMIT + ONE_WRITE, "a share of {LIMIT} bytes holds {held}");
        assert!(names <= LIMIT_FILES, "a share of {LIMIT_FILES} names holds {names}");
    }
}

/// What limits count: blocks and 4 KiB for each name; and the names.
fn held(folder: &Path) -> (u64, u64) {
    let (mut bytes, mut names) = (0, 0);
    let mut todo = vec![folder.to_owned()];
    while let Some(folder) = todo.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let entry = entry.expect("an entry");
            let stat = entry.metadata().expect("metadata");
            names += 1;
            bytes += 4096 + stat.blocks() * 512;
            if stat.is_dir() {
                todo.push(entry.path());
            }
        }
    }
    (bytes, names)
}

fn open_path(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("a folder or file")
}
