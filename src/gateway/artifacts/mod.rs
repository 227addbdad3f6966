//! What came out of sandboxes that have ended, kept so that its caller can fetch it for a while.
//!
//! All of it is in one private folder of this process, which goes with it; one left by a process that
//! was killed is removed by the next. A sandbox whose output the operator does not want elsewhere writes
//! to a folder in there; when it has ended, its files are moved to another one, where each has a number
//! for a name: what a guest has called a file is looked up in a list, and never in the file system.
//!
//! ```text
//!   casulo-artifacts-<random>/sb_1.live/...      the output of a sandbox that runs
//!                             sb_1/0 1 2 ...     the files of one that has ended
//! ```
//!
//! Each caller has room of its own, for a number of files and of bytes. What is new takes the place of
//! what is oldest, so that a caller can lose nothing but its own files.

pub(super) mod uri;

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{Mode, OFlags};

use super::sandboxes::Caller;
use crate::output::{self, How, PrivateFolder, Released};

/// Begin of the name of the private folder.
const PREFIX: &[u8] = b"casulo-artifacts-";

/// A poisoned lock means that another call panicked; what it holds is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The private folder, and what in it nobody needs any more.
#[derive(Debug)]
struct Place {
    folder: PrivateFolder,
    unused: Mutex<Vec<CString>>,
}

impl Place {
    /// Makes a folder in it.
    fn folder(self: &Arc<Self>, name: &str) -> io::Result<Folder> {
        let name = CString::new(name)?;
        rustix::fs::mkdirat(self.folder.root(), &name, Mode::RWXU)?;
        let root = output::open_folder(self.folder.root(), &name)?;
        Ok(Folder { place: Arc::clone(self), name, root })
    }

    /// Removes what nobody needs any more. Blocks.
    fn tidy(&self) {
        let unused = std::mem::take(&mut *lock(&self.unused));
        for name in unused {
            match output::remove(self.folder.root(), &name) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // Its VM was not quite gone.
                Err(_) => lock(&self.unused).push(name),
            }
        }
    }
}

/// A folder in the private one. Dropping it lets it be removed, soon.
#[derive(Debug)]
struct Folder {
    place: Arc<Place>,
    name: CString,
    root: OwnedFd,
}

impl Drop for Folder {
    fn drop(&mut self) {
        lock(&self.place.unused).push(std::mem::take(&mut self.name));
    }
}

/// The output folder of a sandbox that runs.
#[derive(Debug)]
pub(super) struct Live {
    folder: Folder,
    path: PathBuf,
}

impl Live {
    /// Its path on the host.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the guest has made nothing in it so far.
    pub(super) fn is_empty(&self) -> bool {
        // Not `Dir::read_from`, which would open it as a path again, and then nothing can be read.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(&self.folder.root, c".", flags, Mode::empty());
        let Ok(mut entries) = folder.and_then(rustix::fs::Dir::new) else { return false };
        entries.all(|entry| {
            entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b".."))
        })
    }
}

/// Where the files of a sandbox that has ended are to be found.
#[derive(Debug)]
pub(super) enum Source {
    /// In the private folder.
    Live(Live),
    /// In the operator's.
    Operator(OwnedFd),
}

/// A file that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Artifact {
    /// Path below the output folder, byte for byte.
    pub(super) path: Vec<u8>,
    /// Bytes.
    pub(super) size: u64,
    /// In lower-case hex.
    pub(super) sha256: String,
    number: u64,
}

/// The files of one sandbox that has ended. They are there for as long as anybody holds this.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) id: String,
    /// Later sandboxes have higher numbers.
    pub(super) number: u64,
    /// Sorted by path.
    pub(super) list: Vec<Artifact>,
    /// When its sandbox had ended.
    #[cfg_attr(not(feature = "http"), expect(dead_code, reason = "only archives tell it"))]
    pub(super) ended: SystemTime,
    /// None where there are no files.
    folder: Option<Folder>,
}

impl Kept {
    /// The artifact of that path.
    pub(super) fn find(&self, path: &[u8]) -> Option<&Artifact> {
        self.list.get(self.place(path)?)
    }

    /// Its place in the list.
    pub(super) fn place(&self, path: &[u8]) -> Option<usize> {
        self.list.binary_search_by(|one| one.path.as_slice().cmp(path)).ok()
    }

    /// Opens one of the list.
    ///
    /// # Errors
    /// It was tampered with.
    pub(super) fn open(&self, artifact: &Artifact) -> io::Result<File> {
        let folder = self.folder.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let file = output::open_kept(&folder.root, &numbered(artifact.number)?)?;
        if file.metadata()?.len() == artifact.size {
            Ok(file)
        } else {
            Err(io::Error::other("it has another size than when it was kept"))
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.list.iter().fold(0, |sum, one| sum.saturating_add(one.size))
    }
}

fn numbered(number: u64) -> io::Result<CString> {
    Ok(CString::new(number.to_string())?)
}

/// What became of the files of a sandbox.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) kept: Arc<Kept>,
    /// Files that are not kept.
    pub(super) omitted: u64,
    /// Why the first of them is not.
    pub(super) reason: Option<String>,
}

/// Files of one sandbox, as far as its caller's room goes.
#[derive(Debug)]
struct Entry {
    owner: Caller,
    files: usize,
    bytes: u64,
    /// The files and until when they are kept; not yet while they are brought here.
    kept: Option<(Arc<Kept>, Instant)>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    ids: HashMap<String, u64>,
    next: u64,
}

impl State {
    /// What `owner` uses of its room.
    fn used(&self, owner: &Caller) -> (usize, u64) {
        let own = self.entries.values().filter(|entry| entry.owner == *owner);
        own.fold((0, 0), |(files, bytes), entry| {
            (entry.files.saturating_add(files), entry.bytes.saturating_add(bytes))
        })
    }

    fn remove(&mut self, number: u64) {
        if let Some(Entry { kept: Some((kept, _)), .. }) = self.entries.remove(&number) {
            self.ids.remove(&kept.id);
        }
    }
}

/// What callers may keep, and for how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// How long files are kept.
    pub(super) ttl: Duration,
    /// Most files of one caller.
    pub(super) files: usize,
    /// Most bytes of one caller.
    pub(super) bytes: u64,
}

/// Everything that a gateway keeps.
#[derive(Debug)]
pub(super) struct Store {
    place: Arc<Place>,
    path: PathBuf,
    room: Room,
    state: Mutex<State>,
}

impl Store {
    /// A store in the first of `folders` that can hold it and that no guest can look into: `shared` are
    /// the folders that guests see.
    ///
    /// # Errors
    /// None of them can.
    pub(super) fn new(folders: &[PathBuf], shared: &[&Path], room: Room) -> Result<Self, String> {
        let shared: Vec<PathBuf> =
            shared.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
        let mut reasons = Vec::new();
        for folder in folders {
            match Self::place(folder, &shared) {
                Ok((place, path)) => {
                    let (place, state) = (Arc::new(place), Mutex::default());
                    return Ok(Self { place, path, room, state });
                }
                Err(e) => reasons.push(format!("{}: {e}", folder.display())),
            }
        }
        Err(format!(
            "there is no folder in which to keep what sandboxes put out ({}); --artifact-ttl 0 does \
             without",
            reasons.join("; ")
        ))
    }

    fn place(folder: &Path, shared: &[PathBuf]) -> io::Result<(Place, PathBuf)> {
        let folder = std::fs::canonicalize(folder)?;
        if shared.iter().any(|shared| folder.starts_with(shared)) {
            return Err(io::Error::other("it is shared with guests"));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(&folder, flags, Mode::empty())?;
        if output::is_9p(&parent) {
            return Err(io::Error::other("9p cannot hold it"));
        }
        let private = PrivateFolder::new(parent, PREFIX)?;
        let path = folder.join(std::ffi::OsStr::from_bytes(private.name().to_bytes()));
        Ok((Place { folder: private, unused: Mutex::default() }, path))
    }

    /// An output folder for the sandbox `id`.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn live(&self, id: &str) -> io::Result<Live> {
        let name = format!("{id}.live");
        Ok(Live { path: self.path.join(&name), folder: self.place.folder(&name)? })
    }

    /// Keeps files of `owner`'s sandbox `id`, which has ended, as far as there is room. Blocks.
    pub(super) fn keep(
        &self,
        owner: &Caller,
        id: &str,
        source: Source,
        mut released: Vec<Released>,
    ) -> Outcome {
        let (root, how) = match &source {
            Source::Live(live) => (&live.folder.root, How::Move),
            Source::Operator(root) => (root, How::Copy),
        };
        released.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let all = released.len();
        let number = self.reserve(owner, &mut released);
        let mut reason = (released.len() < all).then(|| {
            format!(
                "there is room for {} files and {} bytes of yours",
                self.room.files, self.room.bytes
            )
        });
        // What had to go must make place on the disk first.
        self.place.tidy();
        let mut list = Vec::new();
        let mut folder = None;
        if !released.is_empty() {
            match self.place.folder(id) {
                Ok(made) => {
                    for (file, number) in released.into_iter().zip(0..) {
                        match take(root, &file, &made.root, number, how) {
                            Ok(sha256) => {
                                let Released { path, size, .. } = file;
                                list.push(Artifact { path, size, sha256, number });
                            }
                            Err(e) => reason = reason.or(Some(e.to_string())),
                        }
                    }
                    folder = Some(made);
                }
                Err(e) => reason = reason.or(Some(e.to_string())),
            }
        }
        let omitted = u64::try_from(all.saturating_sub(list.len())).unwrap_or(u64::MAX);
        let kept =
            Arc::new(Kept { id: id.to_owned(), number, list, ended: SystemTime::now(), folder });
        self.settle(&kept);
        drop(source);
        self.place.tidy();
        Outcome { kept, omitted, reason }
    }

    /// Makes room for as many of `released` as there can be, and drops the others from the list.
    fn reserve(&self, owner: &Caller, released: &mut Vec<Released>) -> u64 {
        let mut state = lock(&self.state);
        let wanted = released.iter().fold(0u64, |sum, file| sum.saturating_add(file.size));
        let (wanted_files, wanted) =
            (released.len().min(self.room.files), wanted.min(self.room.bytes));
        let mut old: Vec<u64> = state
            .entries
            .iter()
            .filter(|(_, entry)| entry.owner == *owner && entry.kept.is_some())
            .map(|(number, _)| *number)
            .collect();
        old.sort_unstable_by(|a, b| b.cmp(a));
        let (mut files, mut bytes) = loop {
            let (files, bytes) = state.used(owner);
            let left =
                (self.room.files.saturating_sub(files), self.room.bytes.saturating_sub(bytes));
            if left.0 >= wanted_files && left.1 >= wanted {
                break left;
            }
            match old.pop() {
                Some(oldest) => state.remove(oldest),
                // The rest is being brought here at this moment.
                None => break left,
            }
        };
        let before = (files, bytes);
        released.retain(|file| match (files.checked_sub(1), bytes.checked_sub(file.size)) {
            (Some(less_files), Some(less_bytes)) => {
                (files, bytes) = (less_files, less_bytes);
                true
            }
            _ => false,
        });
        let number = state.next;
        state.next = state.next.saturating_add(1);
        let entry = Entry {
            owner: Arc::clone(owner),
            files: before.0.saturating_sub(files),
            bytes: before.1.saturating_sub(bytes),
            kept: None,
        };
        state.entries.insert(number, entry);
        number
    }

    /// Gives back what was not used, and lets the rest be found.
    fn settle(&self, kept: &Arc<Kept>) {
        let mut state = lock(&self.state);
        if kept.list.is_empty() {
            state.entries.remove(&kept.number);
            return;
        }
        if let Some(entry) = state.entries.get_mut(&kept.number) {
            entry.files = kept.list.len();
            entry.bytes = kept.bytes();
            let until = Instant::now().checked_add(self.room.ttl);
            entry.kept = until.map(|until| (Arc::clone(kept), until));
        }
        state.ids.insert(kept.id.clone(), kept.number);
    }

    /// The files of `owner`'s sandbox `id`, and how long they are kept still.
    pub(super) fn get(&self, owner: &Caller, id: &str) -> Option<(Arc<Kept>, Duration)> {
        let state = lock(&self.state);
        let entry = state.entries.get(state.ids.get(id)?)?;
        if entry.owner != *owner {
            return None;
        }
        live(entry, Instant::now())
    }

    /// Everything that is kept for `owner`, oldest first.
    pub(super) fn all(&self, owner: &Caller) -> Vec<(Arc<Kept>, Duration)> {
        let (state, now) = (lock(&self.state), Instant::now());
        let own = state.entries.values().filter(|entry| entry.owner == *owner);
        let mut all: Vec<_> = own.filter_map(|entry| live(entry, now)).collect();
        drop(state);
        all.sort_unstable_by_key(|(kept, _)| kept.number);
        all
    }

    /// Forgets what has been kept long enough, and removes what nobody needs any more. Blocks.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        let mut state = lock(&self.state);
        let over = |entry: &Entry| entry.kept.is_some() && live(entry, now).is_none();
        let old: Vec<u64> =
            state.entries.iter().filter(|(_, entry)| over(entry)).map(|(n, _)| *n).collect();
        old.into_iter().for_each(|number| state.remove(number));
        drop(state);
        self.place.tidy();
    }

    /// Removes everything. Blocks. Nothing can be kept any more.
    pub(super) fn clear(&self) {
        let state = std::mem::take(&mut *lock(&self.state));
        drop(state);
        self.place.folder.clear();
    }

    /// How many files and bytes are kept.
    #[cfg(feature = "http")]
    pub(super) fn count(&self) -> (usize, u64) {
        let state = lock(&self.state);
        state.entries.values().filter(|entry| entry.kept.is_some()).fold(
            (0, 0),
            |(files, bytes), entry| {
                (entry.files.saturating_add(files), entry.bytes.saturating_add(bytes))
            },
        )
    }
}

fn live(entry: &Entry, now: Instant) -> Option<(Arc<Kept>, Duration)> {
    let (kept, until) = entry.kept.as_ref()?;
    let left = until.checked_duration_since(now).filter(|left| !left.is_zero())?;
    Some((Arc::clone(kept), left))
}

fn take(
    root: &OwnedFd,
    file: &Released,
    folder: &OwnedFd,
    number: u64,
    how: How,
) -> io::Result<String> {
    let name: &CStr = &numbered(number)?;
    output::keep(root, file, folder, name, how)
}

#[cfg(test)]
pub(super) mod tests;
