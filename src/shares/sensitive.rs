//! What must not be shared by accident: the home folder, what holds credentials, and the system's own.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::AtFlags;

use super::{Identity, ShareError, fd_path};

/// Names, relative to a home folder, of what holds credentials.
const SECRETS: &[&str] = &[
    ".ssh",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".config/op",
    ".config/rclone",
    ".config/containers/auth.json",
    ".cargo/credentials.toml",
    ".vault-token",
    ".docker",
    ".gnupg",
    ".kube",
    ".netrc",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    ".password-store",
    ".local/share/keyrings",
    // Browser profiles.
    ".mozilla",
    ".config/google-chrome",
    ".config/chromium",
    ".config/BraveSoftware",
    ".config/microsoft-edge",
    ".config/vivaldi",
    ".config/opera",
    ".var/app/org.mozilla.firefox",
    "snap/firefox",
    ".thunderbird",
];

/// Folders of the system that are refused with all below them, and those refused as such.
const SYSTEM_TREES: &[&str] = &[
    "/proc",
    "/sys",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/run/secrets",
];
const SYSTEM_ROOTS: &[&str] = &["/", "/home", "/root", "/etc", "/dev", "/run", "/var"];

/// What must not be shared by accident.
pub(super) struct Sensitive {
    homes: Vec<PathBuf>,
    /// The home folders and what holds credentials there, as far as it exists.
    places: Vec<(PathBuf, Identity)>,
}

impl Sensitive {
    pub(super) fn of_this_user() -> Self {
        let home = std::env::home_dir().filter(|h| h.is_absolute());
        let real = home.as_ref().and_then(|h| std::fs::canonicalize(h).ok());
        let real = real.filter(|real| home.as_ref() != Some(real));
        Self::of(home.into_iter().chain(real).collect())
    }

    /// Looks once at what is in the home folders, for all shares.
    fn of(homes: Vec<PathBuf>) -> Self {
        let secrets = homes.iter().flat_map(|home| SECRETS.iter().map(|secret| home.join(secret)));
        let places = homes.iter().cloned().chain(secrets);
        let known = places.map(|path| (Identity::of_path(&path), path));
        let known = known.filter(|(identity, _)| identity.is_known());
        let places = known.map(|(identity, path)| (path, identity)).collect();
        Self { homes, places }
    }

    /// `path` is the caller's name for it, for messages only.
    pub(super) fn check(&self, fd: &OwnedFd, path: &Path) -> Result<(), ShareError> {
        let real = std::fs::read_link(fd_path(fd)).map_err(|e| ShareError::io(path, e))?;
        match self.reason(&real).or_else(|| holds(fd, &real)).or_else(|| self.mounted(fd)) {
            Some(reason) => Err(ShareError::Sensitive { path: path.to_owned(), reason }),
            None => Ok(()),
        }
    }

    /// Another path to the home folder or to what holds credentials there, such as a mount.
    fn mounted(&self, fd: &OwnedFd) -> Option<String> {
        let identity = Identity::of(fd);
        let (found, _) = self.places.iter().find(|(_, place)| *place == identity)?;
        Some(format!("it is {} by another path", found.display()))
    }

    fn reason(&self, real: &Path) -> Option<String> {
        if self.homes.iter().any(|home| home.starts_with(real)) {
            return Some(format!("{} is or contains your home folder", real.display()));
        }
        if SYSTEM_ROOTS.iter().any(|r| Path::new(r) == real)
            || SYSTEM_TREES.iter().any(|r| real.starts_with(r))
        {
            return Some(format!("{} is a folder of the system", real.display()));
        }
        let parts: Vec<&OsStr> = real
            .components()
            .filter_map(|c| if let Component::Normal(part) = c { Some(part) } else { None })
            .collect();
        SECRETS.iter().find_map(|secret| {
            let wanted: Vec<&OsStr> = secret.split('/').map(OsStr::new).collect();
            let inside = parts.windows(wanted.len()).any(|w| w == wanted.as_slice());
            inside.then(|| format!("it lies in `{secret}`, which may hold credentials"))
        })
    }
}

/// A credential in a folder, where it would be in a home folder: a folder of another name may still be
/// somebody's home, and `.config` may be shared without its parent.
fn holds(fd: &OwnedFd, real: &Path) -> Option<String> {
    SECRETS.iter().find_map(|secret| {
        let parts: Vec<&str> = secret.split('/').collect();
        (0..parts.len()).find_map(|n| {
            let (above, below) = parts.split_at_checked(n)?;
            let below = below.join("/");
            let there = real.ends_with(above.join("/"))
                && rustix::fs::statat(fd, &below, AtFlags::SYMLINK_NOFOLLOW).is_ok();
            there.then(|| format!("it holds `{below}`, which may hold credentials"))
        })
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[test]
    fn another_path_to_the_home_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home");
        std::fs::create_dir_all(home.join(".aws")).unwrap();
        let open = |path: &Path| {
            rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
        };
        let sensitive = Sensitive::of(vec![home.clone()]);
        // As for a bind mount, whose path says nothing.
        assert!(sensitive.mounted(&open(&home)).is_some());
        assert!(sensitive.mounted(&open(&home.join(".aws"))).is_some());
        assert!(sensitive.mounted(&open(folder.path())).is_none());
        let nowhere = Sensitive::of(vec!["/nowhere".into()]);
        assert!(nowhere.mounted(&open(&home)).is_none());
    }

    #[test]
    fn a_parent_of_the_home_folder_is_refused() {
        let sensitive = Sensitive::of(vec![PathBuf::from("/srv/people/ann")]);
        for (path, refused) in [
            ("/srv/people/ann", true),
            ("/srv/people", true),
            ("/srv", true),
            ("/srv/people/ann/work", false),
            ("/srv/people/bob", false),
            ("/srv/people/ann/.ssh/x", true),
            ("/srv/sshd", false),
        ] {
            assert_eq!(sensitive.reason(Path::new(path)).is_some(), refused, "{path}");
        }
    }
}
