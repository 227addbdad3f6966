//! A file tree in memory: read from a tar, changed, compared with another, written as erofs.
//!
//! Paths are bytes without a leading slash; the root is the empty path. File contents stay where
//! they are (in the tar) until they are written. Hard links are several paths of one inode.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};

/// Contents of a file.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    /// In memory.
    Bytes(Vec<u8>),
    /// A part of another file.
    Slice { source: Rc<File>, offset: u64, len: u64 },
}

/// What an inode is.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// A regular file.
    File(Data),
    /// A folder; its entries are the paths below it.
    Dir,
    /// A symbolic link and its target.
    Symlink(Vec<u8>),
    /// A character device, major and minor.
    Char(u32, u32),
    /// A block device, major and minor.
    Block(u32, u32),
    /// A named pipe.
    Fifo,
}

/// A file, folder, link or device.
#[derive(Clone, Debug)]
pub(crate) struct Inode {
    /// What it is.
    pub(crate) kind: Kind,
    /// Permission bits.
    pub(crate) mode: u16,
    /// Owner.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// Seconds since the epoch.
    pub(crate) mtime: u64,
    /// Extended attributes by full name.
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Inode {
    /// Something that belongs to root and has no attributes.
    pub(crate) fn new(kind: Kind, mode: u16, mtime: u64) -> Inode {
        Inode { kind, mode, uid: 0, gid: 0, mtime, xattrs: BTreeMap::new() }
    }

    /// What overlayfs takes for "deleted here": a character device 0:0.
    pub(crate) fn whiteout(mtime: u64) -> Inode {
        Inode::new(Kind::Char(0, 0), 0, mtime)
    }
}

impl Data {
    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Data::Bytes(bytes) => bytes.len() as u64,
            Data::Slice { len, .. } => *len,
        }
    }

    /// All of it.
    pub(crate) fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.copy(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies it to a writer.
    pub(crate) fn copy(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Data::Bytes(bytes) => out.write_all(bytes),
            Data::Slice { source, offset, len } => {
                let mut buffer = vec![0u8; 256 * 1024];
                let (mut at, mut left) = (*offset, *len);
                while left > 0 {
                    let want = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                    let part = buffer.get_mut(..want).unwrap_or_default();
                    source.read_exact_at(part, at)?;
                    out.write_all(part)?;
                    at += want as u64;
                    left -= want as u64;
                }
                Ok(())
            }
        }
    }

    fn same(&self, other: &Data) -> Result<bool> {
        Ok(self.len() == other.len() && self.read()? == other.read()?)
    }
}

/// A file tree. It always has a root.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    inodes: Vec<Inode>,
    paths: BTreeMap<Vec<u8>, usize>,
}

impl Tree {
    /// A tree that is only a root.
    pub(crate) fn new(mtime: u64) -> Tree {
        Tree {
            inodes: vec![Inode::new(Kind::Dir, 0o755, mtime)],
            paths: BTreeMap::from([(Vec::new(), 0)]),
        }
    }

    /// Reads a tar; times after `latest` become `latest`.
    pub(crate) fn from_tar(path: &Path, latest: u64) -> Result<Tree> {
        let name = path.display();
        let source = Rc::new(File::open(path).with_context(|| format!("cannot open {name}"))?);
        let mut archive = tar::Archive::new(source.as_ref());
        let mut tree = Tree::new(latest);
        for entry in archive.entries_with_seek().with_context(|| format!("cannot read {name}"))? {
            let entry = entry.with_context(|| format!("cannot read {name}"))?;
            tree.add_tar_entry(entry, &source, latest).with_context(|| format!("in {name}"))?;
        }
        Ok(tree)
    }

    fn add_tar_entry<R: io::Read>(
        &mut self,
        mut entry: tar::Entry<'_, R>,
        source: &Rc<File>,
        latest: u64,
    ) -> Result<()> {
        use tar::EntryType;
        let path = clean(&entry.path_bytes())?;
        let link = entry.link_name_bytes().map(|l| l.into_owned()).unwrap_or_default();
        let header = entry.header();
        // Empty where there is no device.
        let major = || header.device_major().map(Option::unwrap_or_default);
        let minor = || header.device_minor().map(Option::unwrap_or_default);
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous => Kind::File(Data::Slice {
                source: Rc::clone(source),
                offset: entry.raw_file_position(),
                len: entry.size(),
            }),
            EntryType::Directory => Kind::Dir,
            EntryType::Symlink => Kind::Symlink(link),
            EntryType::Char => Kind::Char(major()?, minor()?),
            EntryType::Block => Kind::Block(major()?, minor()?),
            EntryType::Fifo => Kind::Fifo,
            EntryType::Link => {
                let target = clean(&link)?;
                let index = *self.paths.get(&target).with_context(|| {
                    format!("hard link to {}, which is not there", show(&target))
                })?;
                self.add_parents(&path, latest)?;
                self.paths.insert(path, index);
                return Ok(());
            }
            other => bail!("{} is of the unexpected type {other:?}", show(&path)),
        };
        let mut inode = Inode {
            kind,
            mode: u16::try_from(header.mode()? & 0o7777)?,
            uid: u32::try_from(header.uid()?)?,
            gid: u32::try_from(header.gid()?)?,
            mtime: header.mtime()?.min(latest),
            xattrs: BTreeMap::new(),
        };
        if let Some(extensions) = entry.pax_extensions()? {
            for extension in extensions {
                let extension = extension?;
                if let Some(name) = extension.key_bytes().strip_prefix(b"SCHILY.xattr.") {
                    inode.xattrs.insert(name.to_vec(), extension.value_bytes().to_vec());
                }
            }
        }
        self.insert(&path, inode)
    }

    /// Adds or replaces a path; missing folders above it are made.
    pub(crate) fn insert(&mut self, path: &[u8], inode: Inode) -> Result<()> {
        self.add_parents(path, inode.mtime)?;
        let index = self.inodes.len();
        match self.paths.get(path).copied() {
            // A folder keeps its place, so that what is below it stays.
            Some(old) if matches!(inode.kind, Kind::Dir) => {
                *self.inodes.get_mut(old).context("lost inode")? = inode;
            }
            _ => {
                ensure!(!path.is_empty(), "the root is not a folder");
                self.remove(path);
                self.inodes.push(inode);
                self.paths.insert(path.to_vec(), index);
            }
        }
        Ok(())
    }

    fn add_parents(&mut self, path: &[u8], mtime: u64) -> Result<()> {
        let mut above = path;
        while !above.is_empty() {
            above = parent_path(above);
            match self.get(above) {
                Some(inode) if matches!(inode.kind, Kind::Dir) => break,
                Some(_) => bail!("{} is not a folder but has {} in it", show(above), show(path)),
                None => {
                    self.paths.insert(above.to_vec(), self.inodes.len());
                    self.inodes.push(Inode::new(Kind::Dir, 0o755, mtime));
                }
            }
        }
        Ok(())
    }

    /// Removes a path and all below it; the root itself stays.
    pub(crate) fn remove(&mut self, path: &[u8]) {
        let mut below = path.to_vec();
        below.push(b'/');
        self.paths.retain(|p, _| p.is_empty() || (p != path && !p.starts_with(&below)));
    }

    /// Keeps what the function wants; a folder takes what is below it along.
    pub(crate) fn retain(&mut self, keep: impl Fn(&[u8], &Inode) -> bool) {
        let doomed: Vec<Vec<u8>> = self
            .paths
            .iter()
            .filter(|(path, index)| {
                !path.is_empty() && self.inodes.get(**index).is_some_and(|inode| !keep(path, inode))
            })
            .map(|(path, _)| path.clone())
            .collect();
        for path in doomed {
            if self.paths.contains_key(&path) {
                self.remove(&path);
            }
        }
    }

    /// The inode at a path.
    pub(crate) fn get(&self, path: &[u8]) -> Option<&Inode> {
        self.inodes.get(*self.paths.get(path)?)
    }

    /// The contents of a regular file.
    pub(crate) fn file(&self, path: &str) -> Result<Option<Vec<u8>>> {
        match self.get(path.as_bytes()).map(|inode| &inode.kind) {
            Some(Kind::File(data)) => data.read().map(Some),
            Some(_) => bail!("/{path} is not a regular file"),
            None => Ok(None),
        }
    }

    /// All inodes, those without a path included.
    pub(crate) fn inodes(&self) -> &[Inode] {
        &self.inodes
    }

    /// One inode.
    pub(crate) fn inode(&self, index: usize) -> Result<&Inode> {
        self.inodes.get(index).with_context(|| format!("no inode {index}"))
    }

    /// All paths, sorted, with their inodes.
    pub(crate) fn paths(&self) -> &BTreeMap<Vec<u8>, usize> {
        &self.paths
    }

    /// The root's inode.
    pub(crate) fn root(&self) -> usize {
        self.paths.get(&Vec::new()).copied().unwrap_or(0)
    }

    /// Number of links of each inode: paths, and for a folder `.` and the `..` of each one in it.
    pub(crate) fn links(&self) -> HashMap<usize, u32> {
        let mut links: HashMap<usize, u32> = HashMap::new();
        for (path, index) in &self.paths {
            *links.entry(*index).or_default() += 1;
            if self.inodes.get(*index).is_some_and(|i| matches!(i.kind, Kind::Dir)) {
                *links.entry(*index).or_default() += 1;
                if let (false, Some(above)) = (path.is_empty(), self.paths.get(parent_path(path))) {
                    *links.entry(*above).or_default() += 1;
                }
            }
        }
        links
    }

    /// Names and inodes in each folder, by the folder's inode, and each folder's parent.
    pub(crate) fn folders(&self) -> Result<HashMap<usize, Folder>> {
        let mut folders: HashMap<usize, Folder> = HashMap::new();
        for (path, index) in &self.paths {
            let above = *self
                .paths
                .get(parent_path(path))
                .with_context(|| format!("{} has no folder", show(path)))?;
            if matches!(self.inode(*index)?.kind, Kind::Dir) {
                folders.entry(*index).or_default().parent = above;
            }
            if !path.is_empty() {
                let name = file_name(path).to_vec();
                folders.entry(above).or_default().names.push((name, *index));
            }
        }
        Ok(folders)
    }

    /// What an overlay on `lower` must hold so that both together look like `self`: what is new or
    /// differs, the folders above it, and a whiteout for what is gone.
    pub(crate) fn diff(&self, lower: &Tree, mtime: u64) -> Result<Tree> {
        let mut upper = Tree::new(mtime);
        let mut moved: HashMap<usize, usize> = HashMap::new();
        let mut wanted: Vec<&Vec<u8>> = Vec::new();
        for path in self.paths.keys() {
            let changed = match (self.get(path), lower.get(path)) {
                (Some(new), Some(old)) => !same_inode(new, old)?,
                _ => true,
            };
            if changed {
                wanted.push(path);
            }
        }
        // All names of a file come along when one does: a link must not reach into another layer.
        let changed: std::collections::HashSet<usize> = wanted
            .iter()
            .filter_map(|path| self.paths.get(*path).copied())
            .filter(|i| self.inodes.get(*i).is_some_and(|n| !matches!(n.kind, Kind::Dir)))
            .collect();
        let wanted: std::collections::HashSet<&Vec<u8>> = wanted.into_iter().collect();
        for (path, index) in &self.paths {
            if wanted.contains(path) || changed.contains(index) {
                self.copy_parents(path, &mut upper)?;
                match moved.get(index) {
                    Some(there) => {
                        upper.paths.insert(path.clone(), *there);
                    }
                    None => {
                        upper.insert(path, self.inode(*index)?.clone())?;
                        if let Some(there) = upper.paths.get(path) {
                            moved.insert(*index, *there);
                        }
                    }
                }
            }
        }
        for path in lower.paths.keys().filter(|path| !self.paths.contains_key(*path)) {
            // Only the highest deleted folder, and not below what is a file now.
            if self.get(parent_path(path)).is_some_and(|i| matches!(i.kind, Kind::Dir)) {
                self.copy_parents(path, &mut upper)?;
                upper.insert(path, Inode::whiteout(mtime))?;
            }
        }
        let root = upper.root();
        if let (Some(place), Some(inode)) = (upper.inodes.get_mut(root), self.get(b"")) {
            *place = inode.clone();
        }
        Ok(upper)
    }

    fn copy_parents(&self, path: &[u8], into: &mut Tree) -> Result<()> {
        let mut missing = Vec::new();
        let mut above = parent_path(path);
        while !above.is_empty() && into.get(above).is_none() {
            missing.push(above);
            above = parent_path(above);
        }
        for folder in missing.into_iter().rev() {
            let inode = self.get(folder).with_context(|| format!("{} is lost", show(folder)))?;
            into.insert(folder, inode.clone())?;
        }
        Ok(())
    }
}

/// Names and inodes.
pub(crate) type Names = Vec<(Vec<u8>, usize)>;

/// The entries of a folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folder {
    /// Inode of the folder above; the root's is itself.
    pub(crate) parent: usize,
    /// What is in it.
    pub(crate) names: Names,
}

fn same_inode(a: &Inode, b: &Inode) -> Result<bool> {
    let kind = match (&a.kind, &b.kind) {
        (Kind::File(a), Kind::File(b)) => a.same(b)?,
        (Kind::Symlink(a), Kind::Symlink(b)) => a == b,
        (Kind::Char(a, x), Kind::Char(b, y)) | (Kind::Block(a, x), Kind::Block(b, y)) => {
            (a, x) == (b, y)
        }
        // A folder's time changes with what is in it and is no reason to repeat the folder.
        (Kind::Dir, Kind::Dir) => return Ok(same_owner(a, b)),
        (Kind::Fifo, Kind::Fifo) => true,
        _ => false,
    };
    Ok(kind && same_owner(a, b) && a.mtime == b.mtime)
}

fn same_owner(a: &Inode, b: &Inode) -> bool {
    (a.mode, a.uid, a.gid, &a.xattrs) == (b.mode, b.uid, b.gid, &b.xattrs)
}

/// The folder above; of the root: the root.
pub(crate) fn parent_path(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|b| *b == b'/').unwrap_or(0);
    path.get(..end).unwrap_or_default()
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').next().unwrap_or_default()
}

/// A path as in this module: no `.` parts, no slashes around; `..` is refused.
fn clean(path: &[u8]) -> Result<Vec<u8>> {
    let parts: Vec<&[u8]> =
        path.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    ensure!(parts.iter().all(|part| *part != b".."), "{} has a part `..`", show(path));
    Ok(parts.join(&b'/'))
}

fn show(path: &[u8]) -> String {
    format!("/{}", String::from_utf8_lossy(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Inode {
        Inode::new(Kind::File(Data::Bytes(text.into())), 0o644, 7)
    }

    fn dir() -> Inode {
        Inode::new(Kind::Dir, 0o755, 7)
    }

    fn tree(entries: &[(&str, Inode)]) -> Tree {
        let mut tree = Tree::new(7);
        for (path, inode) in entries {
            tree.insert(path.as_bytes(), inode.clone()).unwrap();
        }
        tree
    }

    fn names(tree: &Tree) -> Vec<String> {
        tree.paths().keys().map(|path| String::from_utf8_lossy(path).into_owned()).collect()
    }

    fn is_whiteout(tree: &Tree, path: &str) -> bool {
        matches!(tree.get(path.as_bytes()).unwrap().kind, Kind::Char(0, 0))
    }

    #[test]
    fn a_layer_holds_what_is_new_or_differs_and_the_folders_above() {
        let lower = tree(&[("etc/same", file("a")), ("etc/changed", file("a")), ("usr", dir())]);
        let upper = tree(&[
            ("etc/same", file("a")),
            ("etc/changed", file("b")),
            ("usr", dir()),
            ("var/lib/new", file("c")),
        ]);
        let layer = upper.diff(&lower, 7).unwrap();
        assert_eq!(names(&layer), ["", "etc", "etc/changed", "var", "var/lib", "var/lib/new"]);
    }

    #[test]
    fn owner_mode_time_and_attributes_are_differences() {
        let lower = tree(&[("a", file("x"))]);
        for change in [
            |i: &mut Inode| i.uid = 1,
            |i: &mut Inode| i.mode = 0o600,
            |i: &mut Inode| i.mtime = 6,
            |i: &mut Inode| drop(i.xattrs.insert(b"user.x".to_vec(), b"y".to_vec())),
        ] {
            let mut inode = file("x");
            change(&mut inode);
            let layer = tree(&[("a", inode)]).diff(&lower, 7).unwrap();
            assert_eq!(names(&layer), ["", "a"]);
        }
        let mut folder = dir();
        folder.mtime = 3;
        let layer = tree(&[("d", folder)]).diff(&tree(&[("d", dir())]), 7).unwrap();
        assert_eq!(names(&layer), [""], "the time of a folder is no difference");
    }

    #[test]
    fn what_is_gone_becomes_one_whiteout() {
        let lower = tree(&[("a/b/c", file("1")), ("a/b/d", file("2")), ("a/keep", file("3"))]);
        let layer = tree(&[("a/keep", file("3"))]).diff(&lower, 7).unwrap();
        assert_eq!(names(&layer), ["", "a", "a/b"]);
        assert!(is_whiteout(&layer, "a/b"));
    }

    #[test]
    fn files_and_folders_may_change_places() {
        let lower = tree(&[("a/b", file("1")), ("c", file("2"))]);
        let upper = tree(&[("a", file("now a file")), ("c/d", file("now in a folder"))]);
        let layer = upper.diff(&lower, 7).unwrap();
        // Above a file of a lower layer a folder is alone, so nothing has to be hidden.
        assert_eq!(names(&layer), ["", "a", "c", "c/d"]);
        assert!(!is_whiteout(&layer, "a"));
    }

    #[test]
    fn all_links_of_a_changed_file_come_along() {
        let link = |text: &str| {
            let mut tree = tree(&[("one", file(text))]);
            let index = tree.paths[b"one".as_slice()];
            tree.paths.insert(b"two".to_vec(), index);
            tree
        };
        let layer = link("new").diff(&link("old"), 7).unwrap();
        assert_eq!(names(&layer), ["", "one", "two"]);
        assert_eq!(layer.paths[b"one".as_slice()], layer.paths[b"two".as_slice()]);
        assert_eq!(names(&link("x").diff(&link("x"), 7).unwrap()), [""]);
    }

    #[test]
    fn a_tar_is_read_with_links_times_and_attributes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.tar");
        let mut tar = tar::Builder::new(File::create(&path).unwrap());
        let header = |kind, size, mtime| {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(size);
            header.set_mtime(mtime);
            header.set_mode(0o4755);
            header.set_uid(1000);
            header.set_gid(50);
            header
        };
        tar.append_data(&mut header(tar::EntryType::Directory, 0, 5), "./d/", &b""[..]).unwrap();
        tar.append_pax_extensions([("SCHILY.xattr.security.capability", &b"\x01\x00"[..])])
            .unwrap();
        tar.append_data(&mut header(tar::EntryType::Regular, 3, 99), "./d/f", &b"abc"[..]).unwrap();
        tar.append_link(&mut header(tar::EntryType::Link, 0, 5), "./d/g", "./d/f").unwrap();
        tar.append_link(&mut header(tar::EntryType::Symlink, 0, 5), "./s", "d/../../f").unwrap();
        tar.finish().unwrap();

        let tree = Tree::from_tar(&path, 50).unwrap();
        assert_eq!(names(&tree), ["", "d", "d/f", "d/g", "s"]);
        let f = tree.get(b"d/f").unwrap();
        assert_eq!((f.mode, f.uid, f.gid, f.mtime), (0o4755, 1000, 50, 50));
        assert_eq!(f.xattrs[b"security.capability".as_slice()], b"\x01\x00");
        assert_eq!(tree.file("d/g").unwrap().unwrap(), b"abc");
        assert_eq!(tree.links()[&tree.paths[b"d/g".as_slice()]], 2);
        assert_eq!(tree.links()[&tree.root()], 3);
        assert!(matches!(&tree.get(b"s").unwrap().kind, Kind::Symlink(t) if t == b"d/../../f"));
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        assert_eq!(clean(b"./a//b/./c/").unwrap(), b"a/b/c");
        assert!(clean(b"a/../b").is_err());
        let under_a_file = tree(&[("a", file("x"))]).insert(b"a/b", file("y"));
        assert!(under_a_file.unwrap_err().to_string().contains("not a folder"));
    }

    #[test]
    fn leaving_out_a_folder_leaves_out_all_below() {
        let mut tree = tree(&[("a/b/c", file("1")), ("ab", file("2"))]);
        tree.retain(|path, _| path != b"a");
        assert_eq!(names(&tree), ["", "ab"]);
    }
}
