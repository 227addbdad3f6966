//! What comes out of a sandbox: found, made safe to read, and released, once the VM is gone.
//!
//! Before the guest starts, every writable folder is looked at ([`baseline`]). When the sandbox is
//! closed its VM is killed first, so that nothing changes any more; then each of them is walked without
//! following links ([`walk`]), what changed is listed, and what would be dangerous to meet is taken away
//! ([`inspect`]). With artifact patterns the guest never saw the output folder at all, and only what
//! matches is moved there ([`artifacts`]).

mod artifacts;
mod baseline;
mod inspect;
#[cfg_attr(not(feature = "gateway"), expect(dead_code, reason = "the gateway keeps what came out"))]
mod keep;
mod private;
#[cfg(test)]
mod tests;
mod walk;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use casulo_protocol::result::FileChange;
use casulo_protocol::spec::{OutputLinks, SandboxSpec};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use self::artifacts::Staging;
pub(crate) use self::artifacts::compile;
pub(crate) use self::baseline::Baseline;
pub use self::inspect::Output;
use self::inspect::Wanted;
#[cfg(feature = "gateway")]
pub(crate) use self::keep::{How, Released, keep, open_kept};
#[cfg(feature = "gateway")]
pub(crate) use self::private::PrivateFolder;
#[cfg(feature = "gateway")]
pub(crate) use self::walk::{open_folder, remove};
use crate::error::Error;
use crate::shares::{Share, ShareError};

/// Entries of a folder that are looked at on the spot; more of them on a thread of their own.
const FEW: usize = 500;

/// `V9FS_MAGIC` of Linux's `magic.h`.
const V9FS_MAGIC: i64 = 0x0102_1997;

/// Whether something lies on 9p, which lacks much that a share should have.
pub(crate) fn is_9p(fd: impl AsFd) -> bool {
    // The type of `f_type` differs between machines.
    #[allow(clippy::useless_conversion)]
    rustix::fs::fstatfs(fd).is_ok_and(|stat| i64::from(stat.f_type) == V9FS_MAGIC)
}

/// A folder that the guest may write to.
#[derive(Debug)]
struct Folder {
    /// Its place in the guest.
    target: String,
    root: OwnedFd,
    before: Baseline,
    is_output: bool,
}

/// Every folder that the guest of one sandbox may write to.
#[derive(Debug)]
pub(crate) struct Outputs {
    folders: Vec<Folder>,
    links: OutputLinks,
    staging: Option<Staging>,
    /// The output folder, locked for as long as this lives.
    _lock: Option<OwnedFd>,
}

impl Outputs {
    /// Locks the output folder and looks at what is there. With artifact patterns, `shares` get a
    /// staging folder in the place of the output folder.
    ///
    /// # Errors
    /// A wrong pattern, an output folder in use by another sandbox, or a folder that cannot be read.
    ///
    /// `private`: nobody else knows the output folder.
    pub(crate) async fn begin(
        spec: &SandboxSpec,
        shares: &mut [Share],
        private: bool,
    ) -> Result<Self, Error> {
        let patterns = compile(&spec.artifacts).map_err(Error::Invalid)?;
        let mut outputs =
            Self { folders: Vec::new(), links: spec.output_links, staging: None, _lock: None };
        for share in shares.iter_mut().filter(|s| !s.mount.read_only && !s.mount.file) {
            let is_output = share.mount.share == "output";
            if is_output {
                share.cache = private;
                let path = spec.output.as_deref().unwrap_or(Path::new("the output folder"));
                let failed = |e: io::Error| Error::Share(ShareError::io(path, e));
                let lock = lock(&share.root, path, !spec.artifacts.is_empty())?;
                if !spec.artifacts.is_empty() {
                    let output = lock.try_clone().map_err(failed)?;
                    let staging = Staging::new(output, patterns.clone()).map_err(failed)?;
                    share.root = staging.root().try_clone().map_err(failed)?;
                    outputs.staging = Some(staging);
                    // Nobody else knows it.
                    share.cache = true;
                }
                outputs._lock = Some(lock);
            }
            let target = share.mount.target.clone();
            let failed = |e: io::Error| Error::io(format!("cannot look at {target}'s folder"), e);
            let root = share.root.try_clone().map_err(failed)?;
            let before = take(&root).await.map_err(failed)?;
            outputs.folders.push(Folder { target, root, before, is_output });
        }
        Ok(outputs)
    }

    /// The folder that the guest sees as its output.
    pub(crate) fn output(&self) -> Option<&OwnedFd> {
        self.folders.iter().find(|folder| folder.is_output).map(|folder| &folder.root)
    }

    /// Whether there is anything to look at.
    pub(crate) fn is_empty(&self) -> bool {
        self.folders.is_empty()
    }

    /// Makes everything safe to read and releases nothing. Blocks. The VM must be gone.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn discard(self) -> Result<(), Error> {
        self.clean(false).map(drop)
    }

    /// Makes everything safe to read, releases the artifacts, and tells what changed in the output
    /// folder if `list` says so; artifacts are always told. Blocks. The VM must be gone.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn finish(self, list: bool) -> Result<Output, Error> {
        let mut out = self.clean(list && self.staging.is_none())?;
        let output = self.folders.iter().find(|folder| folder.is_output);
        if let (Some(staging), Some(folder)) = (&self.staging, output) {
            staging
                .release(&folder.target, &mut out)
                .map_err(|e| Error::io("cannot release the artifacts", e))?;
        }
        out.rejected.sort_by(|a, b| (&a.share, &a.path).cmp(&(&b.share, &b.path)));
        Ok(out)
    }

    fn clean(&self, list: bool) -> Result<Output, Error> {
        let mut out = Output::default();
        for folder in &self.folders {
            let wanted = Wanted {
                list: list && folder.is_output,
                clean: Some(self.links),
                share: &folder.target,
            };
            inspect::inspect(&folder.root, &folder.before, wanted, &mut out).map_err(|e| {
                Error::io(format!("cannot look at what was written to {}", folder.target), e)
            })?;
        }
        Ok(out)
    }
}

async fn take(root: &OwnedFd) -> io::Result<Baseline> {
    if let Some(baseline) = Baseline::small(root, FEW)? {
        return Ok(baseline);
    }
    let root = root.try_clone()?;
    tokio::task::spawn_blocking(move || Baseline::all(root)).await.map_err(io::Error::other)?
}

/// Opens and locks an output folder: for one task alone, or, as each task with artifacts has a staging
/// folder of its own, for many of these.
fn lock(output: &OwnedFd, path: &Path, shared: bool) -> Result<OwnedFd, ShareError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let failed = |e: Errno| ShareError::io(path, e.into());
    let folder = rustix::fs::openat(output, c".", flags, Mode::empty()).map_err(failed)?;
    let how = if shared {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(&folder, how) {
        // A file system without locks is no reason to refuse.
        Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL | Errno::NOLCK) => Ok(folder),
        Err(Errno::WOULDBLOCK) => Err(ShareError::Busy { path: path.to_owned() }),
        Err(e) => Err(failed(e)),
    }
}

/// What changed in a folder since `before`, while it may still change.
pub(crate) fn changes(root: &OwnedFd, before: &Baseline) -> io::Result<(Vec<FileChange>, u64)> {
    let mut out = Output::default();
    let wanted = Wanted { list: true, clean: None, share: "" };
    inspect::inspect(root, before, wanted, &mut out)?;
    Ok((out.files, out.files_omitted))
}

/// What is in a folder now.
pub(crate) fn snapshot(root: &OwnedFd) -> io::Result<Baseline> {
    Baseline::all(root)
}
