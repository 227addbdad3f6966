//! What a task did to a writable folder: which files it changed, and what it left there that would be
//! dangerous to meet.
//!
//! Dangerous are symbolic links that lead out of the folder, since whoever reads "the task's output"
//! through one reads something else; FIFOs, sockets and devices, which hang or act when opened; and
//! names with control characters, which can drive a terminal or pass for two names. Only what the task
//! made is taken away: an entry that was there before, of the same kind and with the same target, stays.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use casulo_protocol::result::{Change, FileChange, FileKind, Reason, Rejected, RunResult};
use casulo_protocol::spec::OutputLinks;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use super::baseline::{Baseline, Id, MOST_ENTRIES, State, target};
use super::keep::Released;
use super::walk::{Entry, Place, Visitor, open_closed_folder, open_folder, remove, retrying, walk};
use crate::image::hex;

/// Most changes reported.
pub(super) const MOST_CHANGES: usize = 10_000;
/// Most rejected entries reported.
pub(super) const MOST_REJECTED: usize = 1000;
/// Most bytes hashed in all; larger files are reported without a digest.
pub(super) const MOST_HASHED: u64 = 4 << 30;
/// Longest path reported.
const LONGEST: usize = 4096;

/// What came out of a sandbox: see the fields of the same names in
/// [`RunResult`](casulo_protocol::result::RunResult).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// What changed in the output folder, or was released into it, sorted by path.
    pub files: Vec<FileChange>,
    /// Further changes for which `files` has no room.
    pub files_omitted: u64,
    /// What was taken out of the writable shares, or not released.
    pub rejected: Vec<Rejected>,
    /// Further ones for which `rejected` has no room.
    pub rejected_omitted: u64,
    /// Files and links that matched no artifact pattern.
    pub withheld: u64,
    /// The regular files among `files`, by their very names.
    pub(crate) released: Vec<Released>,
}

impl Output {
    /// Puts all of it into a result.
    pub fn add_to(self, result: &mut RunResult) {
        result.files = self.files;
        result.files_omitted = self.files_omitted;
        result.rejected = self.rejected;
        result.rejected_omitted = self.rejected_omitted;
        result.withheld = self.withheld;
    }
}

impl Output {
    pub(super) fn change(&mut self, change: FileChange) {
        if self.files.len() < MOST_CHANGES {
            self.files.push(change);
        } else {
            self.files_omitted = self.files_omitted.saturating_add(1);
        }
    }

    /// Notes a regular file that is there at the end.
    pub(super) fn release(&mut self, path: &[u8], change: &FileChange) {
        if self.released.len() < MOST_CHANGES {
            let (size, sha256) = (change.size, change.sha256.clone());
            self.released.push(Released { path: path.to_owned(), size, sha256 });
        }
    }

    pub(super) fn reject(&mut self, rejected: Rejected) {
        if self.rejected.len() < MOST_REJECTED {
            self.rejected.push(rejected);
        } else {
            self.rejected_omitted = self.rejected_omitted.saturating_add(1);
        }
    }
}

/// What is wanted of an inspection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    /// Whether to list and hash what changed.
    pub(super) list: bool,
    /// Whether to take away what is dangerous, and which links count as that.
    pub(super) clean: Option<OutputLinks>,
    /// The share's place in the guest.
    pub(super) share: &'a str,
}

/// Looks at everything below `root`, of which `before` is an earlier state.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn inspect(
    root: impl AsFd,
    before: &Baseline,
    wanted: Wanted<'_>,
    out: &mut Output,
) -> io::Result<()> {
    let root = open_folder(root, c".")?;
    let mut inspector = Inspector {
        root: &root,
        before,
        wanted,
        out,
        seen: vec![false; before.len()],
        hasher: Hasher::default(),
    };
    walk(&root, Some(None), &mut inspector)?;
    let Inspector { seen, .. } = inspector;
    if wanted.list {
        for (id, known) in before.iter().filter(|(id, _)| seen.get(*id) == Some(&false)) {
            let Some(path) = before.path(id, LONGEST) else { continue };
            let State { kind, size, .. } = known.state;
            out.change(FileChange::new(lossy(&path), kind, size, Change::Deleted));
        }
        out.files.sort_by(|a, b| a.path.cmp(&b.path));
    }
    Ok(())
}

struct Inspector<'a> {
    root: &'a OwnedFd,
    before: &'a Baseline,
    wanted: Wanted<'a>,
    out: &'a mut Output,
    /// Which of the earlier entries are still there.
    seen: Vec<bool>,
    hasher: Hasher,
}

impl Visitor for Inspector<'_> {
    /// The folder before: not there, or the root (`Some(None)`), or an entry.
    type Context = Option<Option<Id>>;

    fn folder(
        &mut self,
        place: &Place<'_>,
        context: Self::Context,
        entries: Vec<Entry>,
    ) -> io::Result<Vec<(CString, Self::Context)>> {
        let mut folders = Vec::new();
        for entry in entries {
            let known = context.and_then(|folder| self.before.find(folder, &entry.name));
            if let Some(seen) = known.and_then(|(id, _)| self.seen.get_mut(id)) {
                *seen = true;
            }
            let now = State::of(&entry.stat);
            if self.wanted.clean.is_some() && self.rejects(place, &entry, known.map(|(id, _)| id)) {
                continue;
            }
            if self.wanted.list {
                self.compare(place, &entry, &now, known.map(|(_, known)| &known.state));
            }
            if now.kind == FileKind::Directory {
                let before = known.filter(|(_, k)| k.state.kind == FileKind::Directory);
                folders.push((entry.name, before.map(|(id, _)| Some(id))));
            }
        }
        Ok(folders)
    }

    fn open(
        &mut self,
        folder: &OwnedFd,
        name: &CStr,
        context: &Self::Context,
    ) -> Result<OwnedFd, Errno> {
        let opened = open_folder(folder, name)?;
        // What the task has closed must be looked at all the same; what the caller's own mode closes
        // was closed to the guest too.
        let before = context.flatten().and_then(|id| self.before.get(id));
        let mode = rustix::fs::fstat(&opened)?.st_mode;
        if self.wanted.clean.is_some() && before.is_none_or(|known| known.state.mode != mode) {
            return open_closed_folder(folder, name).or(Ok(opened));
        }
        Ok(opened)
    }
}

impl Inspector<'_> {
    /// Notes a change.
    fn compare(&mut self, place: &Place<'_>, entry: &Entry, now: &State, before: Option<&State>) {
        let change = match before {
            None => Change::Created,
            Some(before) if before == now || now.same_folder(before) => return,
            Some(_) => Change::Modified,
        };
        let mut path = place.path_of(&entry.name);
        let whole = path.len() < LONGEST;
        path.truncate(LONGEST);
        let mut file = FileChange::new(lossy(&path), now.kind, now.size, change);
        if now.kind == FileKind::File && self.out.files.len() < MOST_CHANGES {
            let opened = open_file(place.folder, &entry.name);
            file.sha256 = opened.ok().and_then(|file| self.hasher.digest(file));
            // A longer path cannot be opened.
            if whole {
                self.out.release(&path, &file);
            }
        }
        self.out.change(file);
    }

    /// Takes an entry away if it is dangerous; then it has no further part in this.
    fn rejects(&mut self, place: &Place<'_>, entry: &Entry, known: Option<Id>) -> bool {
        let Some((reason, target)) = self.danger(place, entry) else { return false };
        let kind = State::of(&entry.stat).kind;
        let same = known.and_then(|id| self.before.get(id)).is_some_and(|before| {
            before.state.kind == kind && (kind != FileKind::Symlink || before.target == target)
        });
        if same {
            return false;
        }
        let mut path = place.path_of(&entry.name);
        path.truncate(LONGEST);
        let mut rejected = Rejected::new(self.wanted.share.to_owned(), lossy(&path), kind, reason);
        if self.before.truncated {
            rejected.still_there = Some(format!(
                "the folder held more than {MOST_ENTRIES} entries before the task, so it is not \
                 known whose this is"
            ));
        } else if let Err(e) = remove(place.folder, &entry.name) {
            rejected.still_there = Some(e.to_string());
        }
        self.out.reject(rejected);
        true
    }

    /// Why an entry is dangerous; and where it leads, when it is a link.
    fn danger(&self, place: &Place<'_>, entry: &Entry) -> Option<(Reason, Option<CString>)> {
        let kind = State::of(&entry.stat).kind;
        let target = (kind == FileKind::Symlink).then(|| target(place.folder, entry)).flatten();
        if has_control(entry.name.to_bytes()) {
            return Some((Reason::Name, target));
        }
        match (kind, self.wanted.clean) {
            (FileKind::Other, _) => Some((Reason::Special, None)),
            (FileKind::Symlink, Some(OutputLinks::None)) => Some((Reason::Link, target)),
            (FileKind::Symlink, Some(OutputLinks::Inside)) => {
                let inside = target
                    .as_ref()
                    .is_some_and(|target| stays_inside(self.root, place, &entry.name, target));
                (!inside).then_some((Reason::LinkOutside, target))
            }
            _ => None,
        }
    }
}

/// Whether a symbolic link leads to a place below `root`, or will when its target is made.
///
/// The kernel itself follows the link, and gives up where that would leave `root`. For a link that
/// leads nowhere yet it is enough to look at its words: steps up may stand only at the begin, where
/// they are counted, since after a name it depends on what that name becomes.
fn stays_inside(root: &OwnedFd, place: &Place<'_>, name: &CStr, target: &CStr) -> bool {
    let words = target.to_bytes();
    if words.starts_with(b"/") || has_control(words) {
        return false;
    }
    let path = place.path_of(name);
    // A path that is longer than the kernel takes cannot be resolved from the root.
    let resolved = CString::new(path).map_err(|_| Errno::INVAL).and_then(|path| {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        retrying(|| rustix::fs::openat2(root, &path, flags, Mode::empty(), resolve))
    });
    match resolved {
        Ok(_) => true,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::ACCESS) => {
            let parts = words.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".");
            let up = parts.clone().take_while(|p| *p == b"..").count();
            up <= place.depth && !parts.skip(up).any(|p| p == b"..")
        }
        Err(_) => false,
    }
}

/// Whether a name holds characters that are not to be seen but to be obeyed.
pub(super) fn has_control(name: &[u8]) -> bool {
    name.iter().any(u8::is_ascii_control)
        || name.utf8_chunks().any(|chunk| chunk.valid().chars().any(char::is_control))
}

pub(super) fn lossy(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// Opens a regular file for reading, following no link.
pub(super) fn open_file(folder: &OwnedFd, name: &CStr) -> io::Result<File> {
    // NONBLOCK: a FIFO put in the file's place must not hold us.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("no regular file")) }
}

/// Hashes files, within bounds.
pub(super) struct Hasher {
    /// Bytes left.
    left: u64,
    buffer: Vec<u8>,
}

impl Default for Hasher {
    fn default() -> Self {
        Self { left: MOST_HASHED, buffer: Vec::new() }
    }
}

impl Hasher {
    /// Digest of a file, unless it is too large or changes while it is read.
    pub(super) fn digest(&mut self, file: File) -> Option<String> {
        let state = || rustix::fs::fstat(&file).ok().map(|stat| State::of(&stat));
        let before = state()?;
        self.left = self.left.checked_sub(before.size)?;
        self.buffer.resize(1 << 20, 0);
        let mut hash = Sha256::new();
        let mut reader = (&file).take(before.size);
        loop {
            match reader.read(&mut self.buffer) {
                Ok(0) => break,
                Ok(n) => hash.update(self.buffer.get(..n)?),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        (state()? == before).then(|| hex(&hash.finalize()))
    }
}
