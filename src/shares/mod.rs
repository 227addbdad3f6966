//! Folders and files of the host that the guest may see: opened `O_PATH` and checked.
//!
//! Checks look at the opened descriptor (its real path comes from `/proc/self/fd`), never at the name
//! a second time, so a link that changes in between cannot get another folder shared.
//!
//! An input that is a single file appears as `/workspace/input/<its name>`. An output folder that
//! does not exist is made, with mode 0700, when its parent exists.

mod sensitive;

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use casulo_protocol::agent::Mount;
use casulo_protocol::spec::{INPUT_PATH, OUTPUT_PATH, SandboxSpec};
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use self::sensitive::Sensitive;

/// Most shares of a sandbox, input and output included.
pub const MAX_SHARES: usize = 32;

/// Why something cannot be shared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The path does not exist.
    #[error("cannot share {}: it does not exist", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The caller may not read it.
    #[error("cannot share {}: no permission to read it", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
    },
    /// The caller may not write to it.
    #[error("cannot share {} writable: no permission to write to it", path.display())]
    Unwritable {
        /// The path.
        path: PathBuf,
    },
    /// A file where a folder is needed.
    #[error("cannot use {} as output: it is a file, and a folder is needed", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// Neither a file nor a folder.
    #[error("cannot share {}: it is neither a regular file nor a folder", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// The output folder does not exist and cannot be made.
    #[error("cannot make the output folder {}: {source}", path.display())]
    Create {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is or holds something that contains credentials.
    #[error(
        "refusing to share {}: {reason}. Share a folder that holds only what the task needs, or \
         insist with --share-sensitive", path.display()
    )]
    Sensitive {
        /// The path.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// The place in the guest cannot be used.
    #[error("cannot share at `{target}` in the guest: {reason}")]
    Target {
        /// The place.
        target: String,
        /// Why.
        reason: &'static str,
    },
    /// Another sandbox writes to it.
    #[error(
        "cannot use {} as output: another task writes to it, and what comes from which could not be \
         told; give each task a folder of its own", path.display()
    )]
    Busy {
        /// The path.
        path: PathBuf,
    },
    /// It lies in, or is, a folder that is shared writable.
    #[error(
        "cannot share {}: it lies in {}, which is shared writable, so that the guest would have two \
         ways to it with different rights; share one of them", path.display(), writable.display()
    )]
    Overlap {
        /// The path.
        path: PathBuf,
        /// The other share.
        writable: PathBuf,
    },
    /// It would let the guest change what runs the next guest.
    #[error(
        "refusing to share {} writable: it is, holds or lies in {}, from which Casulo itself runs",
        path.display(), own.display()
    )]
    Own {
        /// The path.
        path: PathBuf,
        /// Casulo's own folder or file.
        own: PathBuf,
    },
    /// Too many.
    #[error("{0} shares, but at most {MAX_SHARES} are possible")]
    TooMany(usize),
    /// Another failure of the system.
    #[error("cannot share {}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl Share {
    fn new(mount: Mount, root: OwnedFd) -> Self {
        Self { mount, root, limit_bytes: None, limit_files: None, cache: false }
    }

    fn limited(mut self, spec: &SandboxSpec) -> Self {
        self.limit_bytes = Some(spec.output_limit);
        self.limit_files = spec.output_files;
        self
    }
}

impl ShareError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// A checked share.
#[derive(Debug)]
pub(crate) struct Share {
    /// Where and how the guest sees it.
    pub(crate) mount: Mount,
    /// The file or folder, `O_PATH`.
    pub(crate) root: OwnedFd,
    /// Most bytes that may be added.
    pub(crate) limit_bytes: Option<u64>,
    /// Most names that may be added.
    pub(crate) limit_files: Option<u64>,
    /// Whether nobody but the guest changes it while the sandbox runs.
    pub(crate) cache: bool,
}

/// Opens and checks every share of a sandbox: input, output, then the rest in the order in which the
/// guest is to mount them. `own` are folders and files that no guest may change.
///
/// # Errors
/// One of them cannot be shared.
pub(crate) fn open_all(spec: &SandboxSpec, own: &[&Path]) -> Result<Vec<Share>, ShareError> {
    let sensitive = if spec.share_sensitive { None } else { Some(Sensitive::of_this_user()) };
    let check = |fd: &OwnedFd, path: &Path| match &sensitive {
        Some(sensitive) => sensitive.check(fd, path),
        None => Ok(()),
    };
    let mut shares = Vec::new();
    if let Some(path) = &spec.input {
        let (root, file) = open(path, false)?;
        check(&root, path)?;
        let target = if file { file_target(path)? } else { INPUT_PATH.to_owned() };
        let mount = Mount { share: "input".into(), target, read_only: true, file };
        shares.push(Share::new(mount, root));
    }
    if let Some(path) = &spec.output {
        make_output(path)?;
        let (root, file) = open(path, true)?;
        if file {
            return Err(ShareError::NotAFolder { path: path.clone() });
        }
        check(&root, path)?;
        let mount = Mount {
            share: "output".into(),
            target: OUTPUT_PATH.into(),
            read_only: false,
            file: false,
        };
        shares.push(Share::new(mount, root).limited(spec));
    }
    let mut rest: Vec<_> = spec.shares.iter().enumerate().collect();
    // The guest mounts them in this order: a place below another one comes later, or it would be hidden.
    rest.sort_by_key(|(_, share)| share.guest.split('/').count());
    for (n, share) in rest {
        check_target(&share.guest)?;
        let (root, file) = open(&share.host, share.writable)?;
        check(&root, &share.host)?;
        let mount = Mount {
            share: format!("share{n}"),
            target: share.guest.clone(),
            read_only: !share.writable,
            file,
        };
        let checked = Share::new(mount, root);
        shares.push(if share.writable { checked.limited(spec) } else { checked });
    }
    if shares.len() > MAX_SHARES {
        return Err(ShareError::TooMany(shares.len()));
    }
    for (n, share) in shares.iter().enumerate() {
        if shares.iter().take(n).any(|s| s.mount.target == share.mount.target) {
            let target = share.mount.target.clone();
            return Err(ShareError::Target { target, reason: "two shares have this place" });
        }
    }
    check_together(&mut shares, spec.input_live, own)?;
    Ok(shares)
}

/// Checks what the shares are to each other, and to Casulo's own files.
///
/// A folder that is writable may lie in one that is not (`--input . --output out`), but nothing may be
/// shared a second time within a writable one: what is read-only would be writable all the same, and
/// what is limited would be counted twice.
///
/// A read-only share is taken for one that nobody changes, unless it is said to be `live` or holds a
/// writable one.
fn check_together(shares: &mut [Share], live: bool, own: &[&Path]) -> Result<(), ShareError> {
    let real = |share: &Share| {
        let path = std::fs::read_link(fd_path(&share.root));
        path.map_err(|e| ShareError::io(Path::new(&share.mount.target), e))
    };
    let all: Vec<(PathBuf, Identity)> = shares
        .iter()
        .map(|share| Ok((real(share)?, Identity::of(&share.root))))
        .collect::<Result<_, ShareError>>()?;
    let writable = shares.iter().zip(&all).enumerate().filter(|(_, (s, _))| !s.mount.read_only);
    for (n, (_, (writable, identity))) in writable {
        let others = all.iter().enumerate().filter(|(other, _)| *other != n);
        for (_, (path, other)) in others {
            if path.starts_with(writable) || other == identity {
                let (path, writable) = (path.clone(), writable.clone());
                return Err(ShareError::Overlap { path, writable });
            }
        }
        for own in own.iter().filter_map(|own| std::fs::canonicalize(own).ok()) {
            if own.starts_with(writable) || writable.starts_with(&own) {
                return Err(ShareError::Own { path: writable.clone(), own });
            }
        }
    }
    let writable: Vec<bool> = shares.iter().map(|share| !share.mount.read_only).collect();
    for (share, (path, _)) in shares.iter_mut().zip(&all) {
        let mut inner = all.iter().zip(&writable).filter(|(_, writable)| **writable);
        let changes = inner.any(|((inner, _), _)| inner.starts_with(path));
        share.cache = share.mount.read_only && !live && !changes;
    }
    Ok(())
}

/// Which file it is, whatever its path: a folder may be mounted in several places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(Option<(u64, u64)>);

impl Identity {
    fn of(fd: impl AsFd) -> Self {
        Self(rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino)))
    }

    fn of_path(path: &Path) -> Self {
        Self(rustix::fs::stat(path).ok().map(|stat| (stat.st_dev, stat.st_ino)))
    }

    fn is_known(self) -> bool {
        self.0.is_some()
    }
}

/// Place of an input that is a file.
fn file_target(path: &Path) -> Result<String, ShareError> {
    match path.file_name().and_then(OsStr::to_str) {
        Some(name) if !name.chars().any(char::is_control) => Ok(format!("{INPUT_PATH}/{name}")),
        _ => Err(ShareError::Target {
            target: INPUT_PATH.into(),
            reason: "the name of the file is not printable UTF-8; share its folder",
        }),
    }
}

fn make_output(path: &Path) -> Result<(), ShareError> {
    match rustix::fs::mkdir(path, Mode::RWXU) {
        // Whatever else is wrong with an existing path is found when it is opened.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(_) if path.exists() => Ok(()),
        Err(e) => Err(ShareError::Create { path: path.to_owned(), source: e.into() }),
    }
}

/// Opens a path; the second value says whether it is a regular file.
fn open(path: &Path, writable: bool) -> Result<(OwnedFd, bool), ShareError> {
    let owned = || path.to_owned();
    let io = |e: Errno| match e {
        Errno::NOENT | Errno::NOTDIR => ShareError::Missing { path: owned() },
        Errno::ACCESS | Errno::PERM => ShareError::Unreadable { path: owned() },
        e => ShareError::Io { path: owned(), source: e.into() },
    };
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(io)?;
    let file = match FileType::from_raw_mode(rustix::fs::fstat(&fd).map_err(io)?.st_mode) {
        FileType::Directory => false,
        FileType::RegularFile => true,
        _ => return Err(ShareError::Kind { path: owned() }),
    };
    if file {
        let flags = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        rustix::fs::open(fd_path(&fd), flags | OFlags::CLOEXEC, Mode::empty()).map_err(
            |e| match e {
                Errno::ACCESS | Errno::PERM | Errno::ROFS if writable => {
                    ShareError::Unwritable { path: owned() }
                }
                e => io(e),
            },
        )?;
        return Ok((fd, true));
    }
    let list = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&fd, ".", list, Mode::empty()).map_err(io)?;
    if writable {
        rustix::fs::accessat(&fd, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
            .map_err(|_| ShareError::Unwritable { path: owned() })?;
    }
    Ok((fd, false))
}

fn fd_path(fd: impl AsFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Places in the guest that a share may not cover, with all below and above them. The agent keeps the
/// device of the shares in `/run/casulo`.
const GUEST_RESERVED: &[&str] = &[
    "/proc",
    "/sys",
    "/dev",
    "/run/casulo",
    "/workspace/input",
    "/workspace/output",
    "/workspace/tmp",
];

fn check_target(target: &str) -> Result<(), ShareError> {
    let fail = |reason| Err(ShareError::Target { target: target.to_owned(), reason });
    let Some(rest) = target.strip_prefix('/') else {
        return fail("it must be an absolute path");
    };
    if target.len() > 4000 || target.chars().any(char::is_control) {
        return fail("it is too long or has control characters");
    }
    if rest.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return fail("it must be a plain path without `.`, `..`, `//` and a slash at the end");
    }
    let path = Path::new(target);
    if GUEST_RESERVED.iter().any(|r| path.starts_with(r) || Path::new(r).starts_with(path)) {
        return fail("the system of the guest or another share has this place");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use casulo_protocol::spec::ShareSpec;

    use super::*;

    fn input(path: impl Into<PathBuf>) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        spec.input = Some(path.into());
        spec
    }

    fn output(path: impl Into<PathBuf>) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        spec.output = Some(path.into());
        spec
    }

    #[test]
    fn folders_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data.csv");
        std::fs::write(&file, "x").unwrap();
        let shares = open_all(&input(folder.path()), &[]).unwrap();
        assert_eq!(shares[0].mount.target, INPUT_PATH);
        assert!(shares[0].mount.read_only && !shares[0].mount.file);
        let shares = open_all(&input(&file), &[]).unwrap();
        assert_eq!(shares[0].mount.target, "/workspace/input/data.csv");
        assert!(shares[0].mount.read_only && shares[0].mount.file);
        assert!(matches!(open_all(&output(&file), &[]), Err(ShareError::NotAFolder { .. })));
        let missing = open_all(&input(folder.path().join("no")), &[]);
        assert!(matches!(missing, Err(ShareError::Missing { .. })));
        assert!(matches!(open_all(&input("/dev/null"), &[]), Err(ShareError::Kind { .. })));
    }

    #[test]
    fn output_is_made_when_the_parent_exists() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        let shares = open_all(&output(&out), &[]).unwrap();
        assert_eq!(shares[0].limit_bytes, Some(1 << 30));
        assert_eq!(std::fs::metadata(&out).unwrap().mode() & 0o777, 0o700);
        let deep = open_all(&output(folder.path().join("a/b")), &[]);
        assert!(matches!(deep, Err(ShareError::Create { .. })));
    }

    #[test]
    fn credentials_are_refused_also_through_links() {
        let folder = tempfile::tempdir().unwrap();
        let ssh = folder.path().join(".ssh");
        std::fs::create_dir_all(ssh.join("keys")).unwrap();
        std::os::unix::fs::symlink(ssh.join("keys"), folder.path().join("innocent")).unwrap();
        let gcloud = folder.path().join("x/.config/gcloud/logs");
        std::fs::create_dir_all(&gcloud).unwrap();
        for path in [
            PathBuf::from("/"),
            std::env::home_dir().unwrap(),
            "/etc".into(),
            "/proc/self/root".into(),
            ssh,
            folder.path().join("innocent"),
            folder.path().to_owned(),
            gcloud,
        ] {
            let mut spec = input(&path);
            let refused = open_all(&spec, &[]);
            assert!(matches!(refused, Err(ShareError::Sensitive { .. })), "{}", path.display());
            spec.share_sensitive = true;
            assert!(open_all(&spec, &[]).is_ok(), "{}", path.display());
        }
        assert!(open_all(&input(folder.path().join("x")), &[]).is_err());
        assert!(open_all(&input(folder.path().join("x/.config/gcloud")), &[]).is_err());
    }

    #[test]
    fn a_folder_between_the_home_folder_and_its_credentials_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join(".config/gcloud")).unwrap();
        std::fs::create_dir_all(folder.path().join(".local/share/keyrings")).unwrap();
        std::fs::create_dir_all(folder.path().join("x/share/keyrings")).unwrap();
        for (name, refused) in
            [(".config", true), (".local", true), (".local/share", true), ("x/share", false)]
        {
            let result = open_all(&input(folder.path().join(name)), &[]);
            let is = matches!(result, Err(ShareError::Sensitive { .. }));
            assert_eq!(is, refused, "{name}: {result:?}");
        }
    }

    #[test]
    fn nothing_is_shared_again_within_a_writable_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/b")).unwrap();
        std::fs::write(at("a/file"), "").unwrap();
        let both = |first: &str, output: &str| {
            let mut spec = input(at(first));
            spec.output = Some(at(output));
            open_all(&spec, &[])
        };
        let overlap = |result| matches!(result, Err(ShareError::Overlap { .. }));
        assert!(overlap(both("a", "a")));
        assert!(overlap(both("a/b", "a")));
        assert!(overlap(both("a/file", "a")));
        std::os::unix::fs::symlink(at("a"), at("alias")).unwrap();
        assert!(overlap(both("alias", "a")));
        // The usual way to work in a project: then the input changes.
        let shares = both("a", "a/b").unwrap();
        assert_eq!(shares.iter().map(|s| s.cache).collect::<Vec<_>>(), [false, false]);
        std::fs::create_dir(at("c")).unwrap();
        let shares = both("a", "c").unwrap();
        assert_eq!(shares.iter().map(|s| s.cache).collect::<Vec<_>>(), [true, false]);
        let mut live = input(at("a"));
        live.input_live = true;
        assert!(!open_all(&live, &[]).unwrap()[0].cache);
        // The same twice, read-only, does no harm.
        let mut spec = input(at("a"));
        spec.shares.push(ShareSpec { host: at("a"), guest: "/again".into(), writable: false });
        assert!(open_all(&spec, &[]).is_ok());
        spec.shares.push(ShareSpec { host: at("a"), guest: "/rw".into(), writable: true });
        assert!(overlap(open_all(&spec, &[])));
    }

    #[test]
    fn casulos_own_files_cannot_be_shared_writable() {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("home/images");
        std::fs::create_dir_all(images.join("base")).unwrap();
        let own = [images.as_path(), Path::new("/no/such/place")];
        for path in [folder.path(), &images, &images.join("base")] {
            let refused = open_all(&output(path), &own);
            assert!(matches!(refused, Err(ShareError::Own { .. })), "{refused:?}");
            assert!(open_all(&input(path), &own).is_ok());
        }
        assert!(open_all(&output(folder.path().join("out")), &own).is_ok());
    }

    #[test]
    fn places_in_the_guest() {
        for bad in [
            "",
            "x",
            "/",
            "/a/../b",
            "/a//b",
            "/a/",
            "/proc/x",
            "/dev",
            "/workspace",
            "/workspace/input/x",
            "/run",
            "/run/casulo",
            "/run/casulo/fs/input",
            "/a\nb",
        ] {
            assert!(check_target(bad).is_err(), "{bad:?}");
        }
        for good in ["/data", "/workspace/extra", "/home/user/x.txt", "/device"] {
            assert!(check_target(good).is_ok(), "{good}");
        }
        let folder = tempfile::tempdir().unwrap();
        let mut spec = SandboxSpec::default();
        for _ in 0..2 {
            let host = folder.path().to_owned();
            spec.shares.push(ShareSpec { host, guest: "/data".into(), writable: false });
        }
        assert!(matches!(open_all(&spec, &[]), Err(ShareError::Target { .. })));
    }

    #[test]
    fn a_place_below_another_one_is_mounted_later() {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = SandboxSpec::default();
        for guest in ["/data/a/b", "/other", "/data/a", "/data"] {
            let host = folder.path().to_owned();
            spec.shares.push(ShareSpec { host, guest: guest.into(), writable: false });
        }
        let shares = open_all(&spec, &[]).unwrap();
        let order: Vec<_> =
            shares.iter().map(|s| (s.mount.target.as_str(), s.mount.share.as_str())).collect();
        assert_eq!(
            order,
            [
                ("/other", "share1"),
                ("/data", "share3"),
                ("/data/a", "share2"),
                ("/data/a/b", "share0"),
            ]
        );
    }

    #[test]
    fn permissions() {
        use std::os::unix::fs::PermissionsExt;
        if rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let set = |mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(folder.path(), permissions).unwrap();
        };
        set(0o000);
        assert!(matches!(open_all(&input(folder.path()), &[]), Err(ShareError::Unreadable { .. })));
        set(0o500);
        assert!(matches!(
            open_all(&output(folder.path()), &[]),
            Err(ShareError::Unwritable { .. })
        ));
        set(0o700);
    }
}
