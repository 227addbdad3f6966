//! The file tools. They act as the workload's user, so that the kernel applies its permissions: in
//! a thread of their own that has become the user, since credentials belong to threads on Linux.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, IntoRawFd as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{
    FileContent, FileEntry, FileList, FileWritten, ListFiles, ReadFile, WriteFile,
};
use casulo_protocol::spec::OUTPUT_PATH;
use rustix::fs::{Gid, Uid};
use tokio::sync::{Semaphore, oneshot};

use crate::exec::user::{self, User};

/// Most bytes of one answer to [`ReadFile`], whatever its limit: the agent's memory is a small
/// reserve. The caller reads on from the next offset.
pub const MAX_READ: u64 = 2 << 20;
/// Most entries of one answer to [`ListFiles`], whatever its limit.
pub const MAX_ENTRIES: u64 = 10_000;
/// Entries that a listing looks at before it gives up, and the time for it.
const MAX_VISITED: u32 = 1_000_000;
const MAX_TIME: Duration = Duration::from_secs(30);
/// Operations at once; each has a thread.
const MAX_THREADS: usize = 8;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The kernel's reason.
    #[error("cannot {what} {path}: {error}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// To what.
        path: String,
        /// Why not.
        error: std::io::Error,
    },
    /// Not a regular file.
    #[error("{0} is not a regular file")]
    NotRegular(String),
    /// A file of the kernel.
    #[error("{0} is a file of the kernel; use a command to read or write it")]
    Kernel(String),
    /// The bytes are not base64.
    #[error("data is not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    /// Too many operations, or no thread.
    #[error("too many file operations at once; try again")]
    Busy,
    /// The agent could not become the user.
    #[error("cannot become uid {0}: {1}")]
    User(u32, std::io::Error),
}

/// Runs file operations as one user.
#[derive(Debug)]
pub struct Files {
    root: PathBuf,
    base: PathBuf,
    threads: Semaphore,
}

impl Files {
    /// Operations as uid 1000 of the root file system `root`; relative paths start at the output
    /// folder.
    pub fn new(root: PathBuf) -> Self {
        Self::with_base(root, PathBuf::from(OUTPUT_PATH))
    }

    /// The same with another folder for relative paths.
    pub fn with_base(root: PathBuf, base: PathBuf) -> Self {
        Self { root, base, threads: Semaphore::new(MAX_THREADS) }
    }

    async fn as_user<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, FileError> {
        let Ok(_permit) = self.threads.acquire().await else { return Err(FileError::Busy) };
        let root = self.root.clone();
        let (done, result) = oneshot::channel();
        std::thread::Builder::new()
            .stack_size(256 << 10)
            .spawn(move || {
                // An image without uid 1000 in its /etc/passwd: `lookup` gives the number itself.
                let result =
                    user::lookup("", &root).map_err(|_| FileError::Busy).and_then(|user| {
                        become_user(&user).map_err(|e| FileError::User(user.uid, e.into()))?;
                        work()
                    });
                // The call may have been cancelled.
                let _ = done.send(result);
            })
            .map_err(|_| FileError::Busy)?;
        result.await.unwrap_or(Err(FileError::Busy))
    }

    /// Reads part of a file.
    ///
    /// # Errors
    /// What the kernel says to the user, or no regular file.
    pub async fn read(&self, request: ReadFile) -> Result<FileContent, FileError> {
        let path = self.base.join(request.path);
        self.as_user(move || read(&path, request.offset, request.limit)).await
    }

    /// Writes a file and the folders above it.
    ///
    /// # Errors
    /// What the kernel says to the user, or no regular file.
    pub async fn write(&self, request: WriteFile) -> Result<FileWritten, FileError> {
        let data = STANDARD.decode(&request.data)?;
        let path = self.base.join(request.path);
        self.as_user(move || write(&path, &data, request.append, request.mode)).await
    }

    /// Lists a folder.
    ///
    /// # Errors
    /// What the kernel says to the user about the folder itself; folders below it that cannot be
    /// read are listed without their content.
    pub async fn list(&self, request: ListFiles) -> Result<FileList, FileError> {
        let path = self.base.join(request.path);
        self.as_user(move || list(&path, request.recursive, request.limit)).await
    }
}

fn become_user(user: &User) -> rustix::io::Result<()> {
    if !rustix::process::getuid().is_root() {
        // Tests of an ordinary user.
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let groups: Vec<Gid> = user.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)
}

fn failed<'a>(
    what: &'static str,
    path: &'a Path,
) -> impl Fn(std::io::Error) -> FileError + use<'a> {
    move |error| FileError::System { what, path: path.display().to_string(), error }
}

/// Opens a regular file, without waiting for the other side of a FIFO.
fn open(options: &mut OpenOptions, path: &Path) -> Result<(File, Metadata), FileError> {
    let file = options.custom_flags(libc::O_NONBLOCK).open(path).map_err(failed("open", path))?;
    let metadata = file.metadata().map_err(failed("open", path))?;
    if !metadata.is_file() {
        return Err(FileError::NotRegular(path.display().to_string()));
    }
    // /proc/self here would be the agent, and a thread of a process may do to it what the user may
    // not do to other processes.
    let kind = rustix::fs::fstatfs(file.as_fd()).map_err(|e| failed("open", path)(e.into()))?;
    if kind.f_type == libc::PROC_SUPER_MAGIC {
        return Err(FileError::Kernel(path.display().to_string()));
    }
    Ok((file, metadata))
}

fn read(path: &Path, offset: u64, limit: u64) -> Result<FileContent, FileError> {
    let (mut file, metadata) = open(OpenOptions::new().read(true), path)?;
    let mut data = Vec::new();
    // Beyond what the kernel can seek to, nothing is left to read.
    if i64::try_from(offset).is_ok() {
        file.seek(SeekFrom::Start(offset)).map_err(failed("read", path))?;
        file.take(limit.min(MAX_READ)).read_to_end(&mut data).map_err(failed("read", path))?;
    }
    Ok(FileContent { data: STANDARD.encode(&data), size: metadata.len() })
}

fn write(
    path: &Path,
    data: &[u8],
    append: bool,
    mode: Option<u32>,
) -> Result<FileWritten, FileError> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed("make the folder", folder))?;
    }
    let mut options = OpenOptions::new();
    options.create(true).mode(mode.unwrap_or(0o644) & 0o777);
    // Not truncated on opening: it might not be a regular file.
    let (mut file, _) = if append {
        open(options.append(true), path)?
    } else {
        open(options.write(true).truncate(false), path)?
    };
    if !append {
        file.set_len(0).map_err(failed("write", path))?;
    }
    file.write_all(data).map_err(failed("write", path))?;
    let size = file.metadata().map_err(failed("write", path))?.len();
    // Closing is what brings the bytes to the host if the folder is a share; std hides its errors.
    close(file).map_err(failed("write", path))?;
    Ok(FileWritten { size })
}

fn close(file: File) -> std::io::Result<()> {
    // SAFETY: the descriptor is ours and nothing uses it afterwards.
    let result = unsafe { libc::close(file.into_raw_fd()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn list(path: &Path, recursive: bool, limit: u64) -> Result<FileList, FileError> {
    let limit = usize::try_from(limit.min(MAX_ENTRIES)).unwrap_or(0);
    let deadline = Instant::now() + MAX_TIME;
    let mut found: BTreeMap<PathBuf, FileEntry> = BTreeMap::new();
    let mut truncated = false;
    let mut visited = 0_u32;
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let entries = match std::fs::read_dir(path.join(&folder)) {
            Ok(entries) => entries,
            Err(error) if folder.as_os_str().is_empty() => {
                return Err(failed("list", path)(error));
            }
            Err(_) => continue,
        };
        for entry in entries {
            let Ok(entry) = entry else { break };
            visited = visited.saturating_add(1);
            if visited > MAX_VISITED || (visited.is_multiple_of(256) && Instant::now() > deadline) {
                truncated = true;
                folders.clear();
                break;
            }
            // Not followed if it is a link.
            let Ok(metadata) = entry.metadata() else { continue };
            let name = folder.join(entry.file_name());
            if recursive && metadata.is_dir() && folders.len() < 100_000 {
                folders.push(name.clone());
            }
            // The smallest names are kept, so that the answer is the same each time.
            if found.len() == limit {
                truncated = true;
                if found.last_key_value().is_none_or(|(last, _)| *last < name) {
                    continue;
                }
                found.pop_last();
            }
            let shown = describe(&name, &metadata);
            found.insert(name, shown);
        }
    }
    Ok(FileList { entries: found.into_values().collect(), truncated })
}

fn describe(name: &Path, metadata: &Metadata) -> FileEntry {
    let kind = metadata.file_type();
    let kind = if kind.is_file() {
        "file"
    } else if kind.is_dir() {
        "directory"
    } else if kind.is_symlink() {
        "symlink"
    } else {
        "other"
    };
    FileEntry {
        path: name.to_string_lossy().into_owned(),
        kind: kind.to_owned(),
        size: metadata.len(),
        mode: metadata.mode() & 0o7777,
        modified: metadata.mtime(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that any user may write, since operations are those of uid 1000.
    fn folder() -> (tempfile::TempDir, Files) {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let all = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(folder.path(), all).unwrap();
        let files = Files::with_base(PathBuf::from("/"), folder.path().to_owned());
        (folder, files)
    }

    fn write_request(path: &str, data: &str) -> WriteFile {
        WriteFile { path: path.into(), data: STANDARD.encode(data), ..WriteFile::default() }
    }

    #[tokio::test]
    async fn what_is_written_is_read_back() {
        let (_folder, files) = folder();
        let long = write_request("a/b/c.txt", "hello world");
        assert_eq!(files.write(long).await.unwrap().size, 11);
        let short = write_request("a/b/c.txt", "hello");
        assert_eq!(files.write(short).await.unwrap().size, 5);
        let more = WriteFile { append: true, ..write_request("a/b/c.txt", ", you") };
        assert_eq!(files.write(more).await.unwrap().size, 10);
        let read = |offset, limit| files.read(ReadFile { path: "a/b/c.txt".into(), offset, limit });
        let part = read(3, 4).await.unwrap();
        assert_eq!((STANDARD.decode(part.data).unwrap().as_slice(), part.size), (&b"lo, "[..], 10));
        assert_eq!(read(100, 5).await.unwrap().data, "");
        assert_eq!(read(u64::MAX, u64::MAX).await.unwrap().data, "");
        assert_eq!(STANDARD.decode(read(0, u64::MAX).await.unwrap().data).unwrap().len(), 10);
    }

    #[tokio::test]
    async fn what_is_no_plain_file_is_refused() {
        let (folder, files) = folder();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
        for path in ["fifo", ".", "/dev/null", "/proc/self/mem", "missing", "a\0b"] {
            let request = ReadFile { path: path.into(), offset: 0, limit: 10 };
            assert!(files.read(request).await.is_err(), "{path:?}");
        }
        for path in ["fifo", ".", "/dev/full", "/proc/self/mem", "/proc/self/comm", "a\0b"] {
            assert!(files.write(write_request(path, "x")).await.is_err(), "{path:?}");
        }
        let bad = WriteFile { path: "x".into(), data: "%%%".into(), ..WriteFile::default() };
        assert!(matches!(files.write(bad).await, Err(FileError::Base64(_))));
    }

    #[tokio::test]
    async fn the_user_is_not_root() {
        let (folder, files) = folder();
        if !rustix::process::getuid().is_root() {
            return;
        }
        std::fs::write(folder.path().join("secret"), "x").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(folder.path().join("secret"), mode).unwrap();
        let request = ReadFile { path: "secret".into(), offset: 0, limit: 10 };
        let error = files.read(request).await.unwrap_err().to_string();
        assert!(error.contains("Permission denied"), "{error}");
        // And this thread still is.
        assert!(rustix::process::getuid().is_root());
    }

    #[tokio::test]
    async fn a_listing_is_sorted_and_bounded() {
        let (folder, files) = folder();
        for name in ["b", "a", "d/x", "d/y", "c"] {
            files.write(write_request(name, "1")).await.unwrap();
        }
        std::os::unix::fs::symlink("/", folder.path().join("e")).unwrap();
        let list = |recursive, limit| files.list(ListFiles { path: ".".into(), recursive, limit });
        let names = |l: &FileList| l.entries.iter().map(|e| e.path.clone()).collect::<Vec<_>>();
        let all = list(true, 100).await.unwrap();
        assert_eq!(names(&all), ["a", "b", "c", "d", "d/x", "d/y", "e"]);
        assert!(!all.truncated);
        let kinds: Vec<&str> = all.entries.iter().map(|e| e.kind.as_str()).collect();
        assert_eq!(kinds, ["file", "file", "file", "directory", "file", "file", "symlink"]);
        let some = list(true, 4).await.unwrap();
        assert_eq!(names(&some), ["a", "b", "c", "d"]);
        assert!(some.truncated);
        assert_eq!(names(&list(false, 100).await.unwrap()), ["a", "b", "c", "d", "e"]);
        assert!(list(true, 0).await.unwrap().truncated);
        let missing = ListFiles { path: "nothing".into(), recursive: true, limit: 5 };
        assert!(files.list(missing).await.is_err());
    }
}
