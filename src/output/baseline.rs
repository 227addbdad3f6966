//! What was in a folder before a task, so that afterwards it is known what the task did.

use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use casulo_protocol::result::FileKind;
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::walk::{Entry, Place, Visitor, open_folder, walk};

/// Most entries remembered.
pub(super) const MOST_ENTRIES: usize = 250_000;

/// State of one entry that changes when the entry does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) kind: FileKind,
    pub(super) inode: u64,
    pub(super) size: u64,
    pub(super) mode: u32,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl State {
    // The types of `stat` differ between machines; here the conversions change nothing or are cut to
    // what serves as a mark of change.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
    pub(super) fn of(stat: &Stat) -> Self {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => FileKind::File,
            FileType::Directory => FileKind::Directory,
            FileType::Symlink => FileKind::Symlink,
            _ => FileKind::Other,
        };
        Self {
            kind,
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mode: stat.st_mode,
            mtime: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            ctime: (stat.st_ctime as i64, stat.st_ctime_nsec as i64),
        }
    }

    /// Whether this is an earlier state of the very file, and only the entries of a folder may differ.
    pub(super) fn same_folder(&self, other: &Self) -> bool {
        self.kind == FileKind::Directory
            && (self.kind, self.inode, self.mode) == (other.kind, other.inode, other.mode)
    }
}

/// Number of a remembered entry.
pub(super) type Id = usize;

/// A remembered entry.
#[derive(Debug)]
pub(super) struct Known {
    name: CString,
    parent: Option<Id>,
    pub(super) state: State,
    /// Where a link leads.
    pub(super) target: Option<CString>,
    children: Range<Id>,
}

/// The entries of a folder at one moment.
#[derive(Debug, Default)]
pub(crate) struct Baseline {
    /// The entries of each folder lie together, sorted by name.
    entries: Vec<Known>,
    top: Range<Id>,
    /// Whether there were more entries than are remembered.
    pub(super) truncated: bool,
}

impl Baseline {
    /// Looks at everything below `root`; `None` when that is more than `most` entries.
    pub(super) fn small(root: impl AsFd, most: usize) -> io::Result<Option<Self>> {
        let baseline = Self::take(root, most)?;
        Ok((!baseline.truncated).then_some(baseline))
    }

    /// Looks at what is below `root`, at most [`MOST_ENTRIES`].
    pub(super) fn all(root: impl AsFd) -> io::Result<Self> {
        Self::take(root, MOST_ENTRIES)
    }

    fn take(root: impl AsFd, most: usize) -> io::Result<Self> {
        let mut taker = Taker { baseline: Self::default(), most };
        walk(root, None, &mut taker)?;
        Ok(taker.baseline)
    }

    /// The remembered entry of that name in a folder; `None` as the folder is the root.
    pub(super) fn find(&self, folder: Option<Id>, name: &CStr) -> Option<(Id, &Known)> {
        let range = match folder {
            Some(id) => self.entries.get(id)?.children.clone(),
            None => self.top.clone(),
        };
        let list = self.entries.get(range.clone())?;
        let at = list.binary_search_by(|known| known.name.as_c_str().cmp(name)).ok()?;
        Some((range.start.checked_add(at)?, list.get(at)?))
    }

    pub(super) fn get(&self, id: Id) -> Option<&Known> {
        self.entries.get(id)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Every remembered entry.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Known)> {
        self.entries.iter().enumerate()
    }

    /// Path of a remembered entry, if it is not longer than `most` bytes.
    pub(super) fn path(&self, id: Id, most: usize) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut length = 0usize;
        let mut next = Some(id);
        while let Some(known) = next.and_then(|id| self.entries.get(id)) {
            let name = known.name.to_bytes();
            length = length.saturating_add(name.len()).saturating_add(1);
            if length > most {
                return None;
            }
            names.push(name);
            next = known.parent;
        }
        names.reverse();
        Some(names.join(&b'/'))
    }
}

struct Taker {
    baseline: Baseline,
    most: usize,
}

impl Visitor for Taker {
    type Context = Option<Id>;

    fn folder(
        &mut self,
        place: &Place<'_>,
        context: Option<Id>,
        entries: Vec<Entry>,
    ) -> io::Result<Vec<(CString, Option<Id>)>> {
        let start = self.baseline.entries.len();
        let room = self.most.saturating_sub(start);
        self.baseline.truncated |= entries.len() > room;
        let mut folders = Vec::new();
        for entry in entries.into_iter().take(room) {
            let state = State::of(&entry.stat);
            let id = self.baseline.entries.len();
            if state.kind == FileKind::Directory {
                folders.push((entry.name.clone(), Some(id)));
            }
            let target = (state.kind == FileKind::Symlink).then(|| target(place.folder, &entry));
            self.baseline.entries.push(Known {
                name: entry.name,
                parent: context,
                state,
                target: target.flatten(),
                children: 0..0,
            });
        }
        let range = start..self.baseline.entries.len();
        match context.and_then(|id| self.baseline.entries.get_mut(id)) {
            Some(folder) => folder.children = range,
            None => self.baseline.top = range,
        }
        Ok(folders)
    }

    fn open(
        &mut self,
        folder: &OwnedFd,
        name: &CStr,
        _context: &Option<Id>,
    ) -> Result<OwnedFd, Errno> {
        // Nothing more would be remembered.
        if self.baseline.truncated { Err(Errno::NOENT) } else { open_folder(folder, name) }
    }
}

/// Where a link leads.
pub(super) fn target(folder: &OwnedFd, link: &Entry) -> Option<CString> {
    rustix::fs::readlinkat(folder, &link.name, Vec::new()).ok()
}
