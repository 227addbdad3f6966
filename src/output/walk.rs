//! A walk over a folder whose content comes from a guest.
//!
//! Every entry is reached from the descriptor of its folder and no link is followed, so that a link put
//! in the place of a folder leads nowhere. However deep the tree, one folder is open at a time: the
//! way up is `..`, which must be the folder from which the walk came down. Mount points are not entered;
//! a guest cannot enter them either.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// How names are resolved: one at a time, without links and without leaving the file system.
const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// An entry of a folder.
pub(super) struct Entry {
    pub(super) name: CString,
    pub(super) stat: Stat,
}

impl Entry {
    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }
}

/// A folder on the way.
pub(super) struct Place<'a> {
    /// The folder, opened `O_PATH`.
    pub(super) folder: &'a OwnedFd,
    /// Its path from the root of the walk, with a slash at the end unless it is the root.
    pub(super) path: &'a [u8],
    /// Number of folders above it.
    pub(super) depth: usize,
}

impl Place<'_> {
    /// Path of an entry of this folder.
    pub(super) fn path_of(&self, name: &CStr) -> Vec<u8> {
        [self.path, name.to_bytes()].concat()
    }
}

/// What a walk is for.
pub(super) trait Visitor {
    /// What is known of a folder when it is entered.
    type Context;

    /// Looks at the entries of a folder, sorted by name, and gives the folders to enter, in order.
    ///
    /// # Errors
    /// The walk ends with them.
    fn folder(
        &mut self,
        place: &Place<'_>,
        context: Self::Context,
        entries: Vec<Entry>,
    ) -> io::Result<Vec<(CString, Self::Context)>>;

    /// Opens a folder to be entered. What fails is passed over.
    fn open(
        &mut self,
        folder: &OwnedFd,
        name: &CStr,
        _context: &Self::Context,
    ) -> Result<OwnedFd, Errno> {
        open_folder(folder, name)
    }
}

struct Level<C> {
    identity: (u64, u64),
    /// The folders left to enter, the next one last.
    rest: Vec<(CString, C)>,
    /// Length of the path of this folder.
    length: usize,
}

/// Walks over everything below `root`.
///
/// # Errors
/// A folder cannot be read, or was moved during the walk; or an error of the visitor.
pub(super) fn walk<V: Visitor>(
    root: impl AsFd,
    context: V::Context,
    visitor: &mut V,
) -> io::Result<()> {
    let mut folder = open_folder(root, c".")?;
    let mut path = Vec::new();
    let mut stack = Vec::new();
    let mut next = Some(context);
    loop {
        if let Some(context) = next.take() {
            let place = Place { folder: &folder, path: &path, depth: stack.len() };
            let found = match entries(&folder) {
                // What the caller may not list is listed itself, without its content.
                Err(e) if !stack.is_empty() && e.kind() == io::ErrorKind::PermissionDenied => {
                    Vec::new()
                }
                found => found?,
            };
            let mut rest = visitor.folder(&place, context, found)?;
            rest.reverse();
            stack.push(Level { identity: identity(&folder)?, rest, length: path.len() });
        }
        let Some(level) = stack.last_mut() else { return Ok(()) };
        let Some((name, context)) = level.rest.pop() else {
            stack.pop();
            let Some(above) = stack.last() else { return Ok(()) };
            path.truncate(above.length);
            folder = up(&folder, above.identity)?;
            continue;
        };
        if let Ok(inner) = visitor.open(&folder, &name, &context) {
            path.extend_from_slice(name.to_bytes());
            path.push(b'/');
            folder = inner;
            next = Some(context);
        }
    }
}

/// The folder above, if it is the one expected.
fn up(folder: &OwnedFd, expected: (u64, u64)) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let above = rustix::fs::openat(folder, c"..", flags, Mode::empty())?;
    if identity(&above)? != expected {
        return Err(io::Error::other("a folder was moved while it was looked at"));
    }
    Ok(above)
}

fn identity(fd: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Opens a folder as a path, following no link.
pub(crate) fn open_folder(at: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retrying(|| rustix::fs::openat2(&at, name, flags, Mode::empty(), RESOLVE))
}

/// Resolving without leaving a folder is given up when something is renamed at the same time.
pub(super) fn retrying<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut left = 100u32;
    loop {
        match call() {
            Err(Errno::AGAIN) if left > 0 => left = left.saturating_sub(1),
            other => return other,
        }
    }
}

/// The entries of a folder, sorted by name, without `.` and `..`.
fn entries(folder: &OwnedFd) -> io::Result<Vec<Entry>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let readable = rustix::fs::openat(folder, c".", flags, Mode::empty())?;
    let mut list = Vec::new();
    for entry in Dir::new(readable)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        // An entry may vanish at any time.
        if let Ok(stat) = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            list.push(Entry { name: name.to_owned(), stat });
        }
    }
    list.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(list)
}

/// Opens a folder that a guest may have closed to its owner: then it is opened up.
pub(super) fn open_closed_folder(at: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let folder = open_folder(at, name)?;
    let all =
        rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    if rustix::fs::accessat(&folder, c".", all, AtFlags::EACCESS).is_err() {
        let mode = Mode::from_raw_mode(rustix::fs::fstat(&folder)?.st_mode) | Mode::RWXU;
        rustix::fs::chmod(fd_path(&folder), mode)?;
    }
    Ok(folder)
}

/// A path to what a descriptor is open on.
pub(super) fn fd_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Removes an entry, a folder with all that it holds. Nothing on another file system is removed.
///
/// # Errors
/// Something could not be removed; what could be is gone.
pub(crate) fn remove(folder: impl AsFd, name: &CStr) -> io::Result<()> {
    match rustix::fs::unlinkat(&folder, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        other => return Ok(other?),
    }
    let root = open_closed_folder(&folder, name)?;
    let mut remover = Remover { failed: None };
    // From the leaves up: a folder that has others in it is entered, emptied and left first.
    walk(&root, (), &mut remover)?;
    if let Some(error) = remover.failed {
        return Err(error);
    }
    empty(&root)?;
    Ok(rustix::fs::unlinkat(&folder, name, AtFlags::REMOVEDIR)?)
}

/// Removes everything but folders.
struct Remover {
    failed: Option<io::Error>,
}

impl Visitor for Remover {
    type Context = ();

    fn folder(
        &mut self,
        place: &Place<'_>,
        (): (),
        entries: Vec<Entry>,
    ) -> io::Result<Vec<(CString, ())>> {
        let mut folders = Vec::new();
        for entry in entries {
            if entry.kind() == FileType::Directory {
                folders.push((entry.name, ()));
            } else if let Err(e) = rustix::fs::unlinkat(place.folder, &entry.name, AtFlags::empty())
            {
                self.failed.get_or_insert(e.into());
            }
        }
        Ok(folders)
    }

    fn open(&mut self, folder: &OwnedFd, name: &CStr, (): &()) -> Result<OwnedFd, Errno> {
        let opened = open_closed_folder(folder, name);
        if let Err(e) = &opened {
            self.failed.get_or_insert((*e).into());
        }
        opened
    }
}

/// Removes the folders below one that holds nothing but folders.
fn empty(root: &OwnedFd) -> io::Result<()> {
    let mut folder = open_folder(root, c".")?;
    let mut stack: Vec<((u64, u64), Vec<CString>)> = Vec::new();
    let names = |folder: &OwnedFd| -> io::Result<Vec<CString>> {
        Ok(entries(folder)?.into_iter().map(|e| e.name).collect())
    };
    let mut level = (identity(&folder)?, names(&folder)?);
    loop {
        if let Some(name) = level.1.last() {
            match rustix::fs::unlinkat(&folder, name, AtFlags::REMOVEDIR) {
                Ok(()) => {
                    level.1.pop();
                }
                Err(Errno::NOTEMPTY | Errno::EXIST) => {
                    let inner = open_folder(&folder, name)?;
                    let below = (identity(&inner)?, names(&inner)?);
                    stack.push(std::mem::replace(&mut level, below));
                    folder = inner;
                }
                Err(e) => return Err(e.into()),
            }
            continue;
        }
        let Some(above) = stack.pop() else { return Ok(()) };
        folder = up(&folder, above.0)?;
        level = above;
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Count(usize, usize);

    impl Visitor for Count {
        type Context = ();

        fn folder(
            &mut self,
            place: &Place<'_>,
            (): (),
            entries: Vec<Entry>,
        ) -> io::Result<Vec<(CString, ())>> {
            self.0 += entries.len();
            self.1 = self.1.max(place.depth);
            let folders = entries.into_iter().filter(|e| e.kind() == FileType::Directory);
            Ok(folders.map(|e| (e.name, ())).collect())
        }
    }

    /// A chain of folders deeper than a path can name, and than descriptors could be held for.
    fn deep(root: &OwnedFd, depth: usize) {
        let mut folder = open_folder(root, c".").unwrap();
        for _ in 0..depth {
            rustix::fs::mkdirat(&folder, c"d", Mode::RWXU).unwrap();
            folder = open_folder(&folder, c"d").unwrap();
        }
        let flags = OFlags::CREATE | OFlags::WRONLY;
        rustix::fs::openat(&folder, c"leaf", flags, Mode::RUSR).unwrap();
    }

    #[test]
    fn any_depth_with_one_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let root: OwnedFd = File::open(folder.path()).unwrap().into();
        deep(&root, 2000);
        let mut count = Count(0, 0);
        walk(&root, (), &mut count).unwrap();
        assert_eq!((count.0, count.1), (2001, 2000));
        remove(&root, c"d").unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_are_entries_and_lead_nowhere() {
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(outside.path().join("precious"), "x").unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        symlink(outside.path(), folder.path().join("d/way")).unwrap();
        let root: OwnedFd = File::open(folder.path()).unwrap().into();
        let mut count = Count(0, 0);
        walk(&root, (), &mut count).unwrap();
        assert_eq!(count.0, 2);
        assert!(open_folder(&root, c"d/way").is_err());
        remove(&root, c"d").unwrap();
        assert!(outside.path().join("precious").exists());
    }

    #[test]
    fn folders_closed_to_their_owner_are_removed_too() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("f"), "x").unwrap();
        for closed in ["a/b/c", "a/b", "a"] {
            let mode = std::fs::Permissions::from_mode(0o000);
            std::fs::set_permissions(folder.path().join(closed), mode).unwrap();
        }
        let root: OwnedFd = File::open(folder.path()).unwrap().into();
        remove(&root, c"a").unwrap();
        assert!(!folder.path().join("a").exists());
    }
}
