//! Artifacts: the guest writes to a staging folder, and only what matches a pattern comes out of it.
//!
//! The staging folder lies in the output folder, private and with a name that cannot be guessed: only
//! there is it sure to be on the same file system, so that a file comes out by one rename, whole or not
//! at all.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use casulo_protocol::result::{Change, FileChange, FileKind, Reason, Rejected};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::inspect::{Hasher, Output, has_control, lossy, open_file};
use super::private::PrivateFolder;
use super::walk::{Entry, Place, Visitor, open_closed_folder, open_folder, walk};

/// Begin of the name of every staging folder.
const PREFIX: &[u8] = b".casulo-staging-";
/// Most patterns, and most bytes of one.
const MOST_PATTERNS: usize = 256;
const LONGEST_PATTERN: usize = 1024;

/// Patterns as one matcher.
///
/// # Errors
/// In words, for the caller.
pub(crate) fn compile(patterns: &[String]) -> Result<GlobSet, String> {
    if patterns.len() > MOST_PATTERNS {
        return Err(format!("more than {MOST_PATTERNS} artifact patterns"));
    }
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let bad = |why: &str| format!("the artifact pattern {pattern:?} {why}");
        if pattern.len() > LONGEST_PATTERN {
            return Err(format!("an artifact pattern is longer than {LONGEST_PATTERN} bytes"));
        }
        let relative = pattern.strip_prefix("./").unwrap_or(pattern);
        if relative.is_empty() || relative.starts_with('/') {
            return Err(bad(
                "must be relative to the output folder, such as `*.csv` or `plots/**`",
            ));
        }
        if relative.split('/').any(|part| part == "..") {
            return Err(bad("must not hold `..`"));
        }
        let whole;
        let relative = if relative.ends_with('/') {
            whole = format!("{relative}**");
            &whole
        } else {
            relative
        };
        let glob =
            GlobBuilder::new(relative).literal_separator(true).backslash_escape(true).build();
        set.add(glob.map_err(|e| bad(&format!("is wrong: {}", e.kind())))?);
    }
    set.build().map_err(|e| format!("the artifact patterns are too large: {e}"))
}

/// A staging folder. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Staging {
    folder: PrivateFolder,
    patterns: GlobSet,
}

impl Staging {
    /// Makes one in `output`, and removes those that nobody uses any more.
    pub(super) fn new(output: OwnedFd, patterns: GlobSet) -> io::Result<Self> {
        Ok(Self { folder: PrivateFolder::new(output, PREFIX)?, patterns })
    }

    /// Where the guest writes.
    pub(super) fn root(&self) -> &OwnedFd {
        self.folder.root()
    }

    /// Moves every regular file that matches a pattern to its place in the output folder.
    ///
    /// A regular file that is there already is replaced; anything else there is left, and the artifact
    /// is not released. Call it when nothing writes to the staging folder any more.
    pub(super) fn release(&self, share: &str, out: &mut Output) -> io::Result<()> {
        let mut release =
            Release { staging: self, share, out, hasher: Hasher::default(), target: None };
        walk(self.root(), (), &mut release)?;
        out.files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(())
    }
}

struct Release<'a> {
    staging: &'a Staging,
    share: &'a str,
    out: &'a mut Output,
    hasher: Hasher,
    /// The folder of the output that belongs to the folder being walked, once it is needed.
    target: Option<(Vec<u8>, OwnedFd)>,
}

impl Visitor for Release<'_> {
    type Context = ();

    fn folder(
        &mut self,
        place: &Place<'_>,
        (): (),
        entries: Vec<Entry>,
    ) -> io::Result<Vec<(CString, ())>> {
        let mut folders = Vec::new();
        for entry in entries {
            let kind = entry.kind();
            if kind == FileType::Directory {
                folders.push((entry.name, ()));
                continue;
            }
            let path = place.path_of(&entry.name);
            let wanted = kind == FileType::RegularFile
                && !has_control(&path)
                && self.staging.patterns.is_match(OsStr::from_bytes(&path));
            if !wanted {
                self.out.withheld = self.out.withheld.saturating_add(1);
                continue;
            }
            match self.release(place, &entry, &path) {
                Ok(change) => {
                    self.out.release(&path, &change);
                    self.out.change(change);
                }
                Err(e) => {
                    let share = self.share.to_owned();
                    let mut rejected =
                        Rejected::new(share, lossy(&path), FileKind::File, Reason::Place);
                    rejected.detail = Some(e.to_string());
                    self.out.reject(rejected);
                }
            }
        }
        Ok(folders)
    }

    fn open(&mut self, folder: &OwnedFd, name: &CStr, (): &()) -> Result<OwnedFd, Errno> {
        open_closed_folder(folder, name)
    }
}

impl Release<'_> {
    fn release(&mut self, place: &Place<'_>, entry: &Entry, path: &[u8]) -> io::Result<FileChange> {
        let file = readable(place.folder, &entry.name)?;
        let size = file.metadata()?.len();
        if entry.stat.st_mode & 0o6000 != 0 {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(entry.stat.st_mode & 0o777))?;
        }
        let sha256 = self.hasher.digest(file);
        let change = self.place(place, &entry.name)?;
        let mut file = FileChange::new(lossy(path), FileKind::File, size, change);
        file.sha256 = sha256;
        Ok(file)
    }

    /// Moves a file into its place.
    fn place(&mut self, place: &Place<'_>, name: &CStr) -> io::Result<Change> {
        if self.target.as_ref().is_none_or(|(path, _)| path != place.path) {
            let folder = make_folders(self.staging.folder.parent(), place.path)?;
            self.target = Some((place.path.to_owned(), folder));
        }
        let Some((_, target)) = &self.target else { return Err(Errno::NOENT.into()) };
        let there = match rustix::fs::statat(target, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(FileType::from_raw_mode(stat.st_mode)),
            Err(Errno::NOENT) => None,
            Err(e) => return Err(e.into()),
        };
        match there {
            None => {
                let exclusive = RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(place.folder, name, target, name, exclusive) {
                    // Not every file system can do that.
                    Err(Errno::INVAL | Errno::NOSYS) => {
                        rustix::fs::renameat(place.folder, name, target, name)?;
                    }
                    other => other?,
                }
                Ok(Change::Created)
            }
            Some(FileType::RegularFile) => {
                rustix::fs::renameat(place.folder, name, target, name)?;
                Ok(Change::Modified)
            }
            Some(_) => Err(io::Error::other("its place is taken by something that is no file")),
        }
    }
}

/// Opens a regular file of the staging folder, which the guest may have closed to its owner.
fn readable(folder: &OwnedFd, name: &CStr) -> io::Result<std::fs::File> {
    match open_file(folder, name) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
            let mode = rustix::fs::fstat(&file)?.st_mode;
            let mode = Mode::from_raw_mode(mode) | Mode::RUSR;
            rustix::fs::chmod(super::walk::fd_path(&file), mode)?;
            open_file(folder, name)
        }
        other => other,
    }
}

/// Opens the folder `path` (names, each with a slash behind it) below `root`, and makes what is missing.
fn make_folders(root: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    let mut folder = open_folder(root, c".")?;
    for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
        let name = CString::new(part)?;
        match rustix::fs::mkdirat(&folder, &name, Mode::RWXU | Mode::RWXG | Mode::RWXO) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        folder = open_folder(&folder, &name)
            .map_err(|e| io::Error::other(format!("{:?} is no folder: {e}", lossy(part))))?;
    }
    Ok(folder)
}
