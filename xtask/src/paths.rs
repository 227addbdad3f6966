//! Where things are: the checkout, the user's cache folder and `CASULO_HOME`.

use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Root of the checkout.
pub(crate) fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

fn home() -> Result<PathBuf> {
    env::var_os("HOME")
        .filter(|h| !h.is_empty())
        .map(PathBuf::from)
        .context("HOME is not set, so there is no place for caches; set HOME")
}

fn xdg(variable: &str, below_home: &str) -> Result<PathBuf> {
    match env::var_os(variable).map(PathBuf::from) {
        Some(path) if path.is_absolute() => Ok(path.join("casulo")),
        _ => Ok(home()?.join(below_home).join("casulo")),
    }
}

/// What can be built again: kernels, packages, layers, by the hash of their inputs.
pub(crate) fn cache() -> Result<PathBuf> {
    xdg("XDG_CACHE_HOME", ".cache")
}

/// `CASULO_HOME`: what the `casulo` command uses.
pub(crate) fn casulo_home() -> Result<PathBuf> {
    match env::var_os("CASULO_HOME").filter(|h| !h.is_empty()) {
        Some(path) => Ok(PathBuf::from(path)),
        None => xdg("XDG_DATA_HOME", ".local/share"),
    }
}

/// Folder of the static release binaries.
pub(crate) fn binaries() -> PathBuf {
    root().join("target/x86_64-unknown-linux-gnu/release")
}

/// Writes a new file that only this user can read.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| format!("cannot write {}", path.display()))
}
