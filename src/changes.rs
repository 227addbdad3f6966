//! What a task changed in its output folder: compared before and after, without following links.
//!
//! The folder's content comes from the guest: its depth, its number of entries and the bytes that
//! are hashed are bounded, and every entry is reached from its parent's descriptor, so that a link
//! put in the place of a folder leads nowhere.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use casulo_protocol::result::{Change, FileChange, FileKind};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};

use crate::image::digest_of;

/// Most entries looked at, and most reported.
const MOST_ENTRIES: usize = 100_000;
const MOST_REPORTED: usize = 10_000;
/// Deepest folder.
const DEEPEST: usize = 64;
/// Most bytes hashed in all; larger files are reported without a digest.
const MOST_HASHED: u64 = 4 << 30;

/// State of one entry that changes when the entry does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    kind: FileKind,
    inode: u64,
    size: u64,
    mode: u32,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

/// The entries of a folder at one moment, by path relative to it.
#[derive(Debug, Default)]
pub(crate) struct Snapshot(BTreeMap<Vec<u8>, State>);

/// Looks at everything below `root`.
pub(crate) fn snapshot(root: impl AsFd) -> io::Result<Snapshot> {
    let mut snapshot = Snapshot::default();
    walk(open_folder(root.as_fd(), c".")?, &[], DEEPEST, &mut snapshot.0)?;
    Ok(snapshot)
}

fn open_folder(at: impl AsFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?)
}

fn walk(
    folder: OwnedFd,
    prefix: &[u8],
    depth: usize,
    found: &mut BTreeMap<Vec<u8>, State>,
) -> io::Result<()> {
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() >= MOST_ENTRIES {
            return Ok(());
        }
        // An entry may vanish at any time.
        let Ok(stat) = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let state = state(&stat);
        let mut path = prefix.to_vec();
        path.extend_from_slice(name.to_bytes());
        found.insert(path.clone(), state);
        if state.kind == FileKind::Directory && depth > 0 {
            path.push(b'/');
            // A folder that the caller may not enter is reported itself, without its content.
            if let Ok(inner) = open_folder(&folder, name) {
                walk(inner, &path, depth.saturating_sub(1), found)?;
            }
        }
    }
    Ok(())
}

// The types of `stat` differ between machines; here the conversions change nothing or are cut to
// what serves as a mark of change.
#[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
fn state(stat: &Stat) -> State {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    };
    State {
        kind,
        inode: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode,
        mtime: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
        ctime: (stat.st_ctime as i64, stat.st_ctime_nsec as i64),
    }
}

/// What changed below `root` since `before`, sorted by path, with the digests of new and changed
/// files. A folder whose only change is in its entries is not reported.
pub(crate) fn changes(root: impl AsFd, before: &Snapshot) -> io::Result<Vec<FileChange>> {
    let root = open_folder(root.as_fd(), c".")?;
    let mut after = BTreeMap::new();
    walk(open_folder(&root, c".")?, &[], DEEPEST, &mut after)?;
    let mut list = Vec::new();
    let mut budget = MOST_HASHED;
    for (path, new) in &after {
        let change = match before.0.get(path) {
            None => Change::Created,
            Some(old) if old == new => continue,
            Some(old)
                if new.kind == FileKind::Directory
                    && old.kind == new.kind
                    && (old.inode, old.mode) == (new.inode, new.mode) =>
            {
                continue;
            }
            Some(_) => Change::Modified,
        };
        let mut entry = FileChange::new(lossy(path), new.kind, new.size, change);
        if new.kind == FileKind::File && new.size <= budget {
            budget = budget.saturating_sub(new.size);
            entry.sha256 = open_file(&root, path).and_then(|file| digest_of(&file)).ok();
        }
        list.push(entry);
    }
    let gone = before.0.iter().filter(|(path, _)| !after.contains_key(*path));
    list.extend(gone.map(|(p, s)| FileChange::new(lossy(p), s.kind, s.size, Change::Deleted)));
    list.sort_by(|a, b| a.path.cmp(&b.path));
    list.truncate(MOST_REPORTED);
    Ok(list)
}

fn lossy(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// Opens a regular file below `root`, folder by folder, following no link.
fn open_file(root: &OwnedFd, path: &[u8]) -> io::Result<File> {
    let mut parts: Vec<&[u8]> = path.split(|b| *b == b'/').collect();
    let last = CString::new(parts.pop().unwrap_or_default())?;
    let mut folder = open_folder(root, c".")?;
    for part in parts {
        folder = open_folder(&folder, &CString::new(part)?)?;
    }
    // NONBLOCK: a FIFO put in the file's place must not hold us.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(&folder, &last, flags, Mode::empty())?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("no regular file")) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn reports_what_changed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("sub")).unwrap();
        for name in ["kept", "changed", "gone", "sub/old"] {
            std::fs::write(at(name), "1").unwrap();
        }
        let root = File::open(folder.path()).unwrap();
        let before = snapshot(&root).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        std::fs::write(at("changed"), "2").unwrap();
        std::fs::remove_file(at("gone")).unwrap();
        std::fs::write(at("sub/new"), "abc").unwrap();
        symlink("/etc/passwd", at("link")).unwrap();
        let list = changes(&root, &before).unwrap();
        let short: Vec<_> = list.iter().map(|c| (c.path.as_str(), c.kind, c.change)).collect();
        assert_eq!(
            short,
            [
                ("changed", FileKind::File, Change::Modified),
                ("gone", FileKind::File, Change::Deleted),
                ("link", FileKind::Symlink, Change::Created),
                ("sub/new", FileKind::File, Change::Created),
            ]
        );
        assert_eq!(list[2].sha256, None);
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(list[3].sha256.as_deref(), Some(abc));
    }

    #[test]
    fn links_are_never_followed() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        let root = File::open(folder.path()).unwrap();
        let before = snapshot(&root).unwrap();
        symlink(outside.path(), folder.path().join("way")).unwrap();
        let list = changes(&root, &before).unwrap();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].kind, FileKind::Symlink);
        let fd = open_folder(&root, c".").unwrap();
        assert!(open_file(&fd, b"way/secret").is_err());
    }

    #[test]
    fn deep_trees_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut path = folder.path().to_owned();
        for _ in 0..DEEPEST + 20 {
            path.push("d");
        }
        std::fs::create_dir_all(&path).unwrap();
        let root = File::open(folder.path()).unwrap();
        assert_eq!(snapshot(&root).unwrap().0.len(), DEEPEST + 1);
    }
}
