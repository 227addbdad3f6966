//! Packages of PyPI in the cache, touching neither the machine's Python nor the user's.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{paths, sh};

/// Installs one requirement (`name==version`) and gives the folder to name in `PYTHONPATH`.
///
/// Exact versions only: what is in the cache is taken as it is.
pub(crate) fn install(requirement: &str, with_dependencies: bool) -> Result<PathBuf> {
    let cache = paths::cache()?.join("pip");
    let folder = cache.join(requirement.replace("==", "-"));
    if folder.is_dir() {
        return Ok(folder);
    }
    if sh::output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
        sh::need(&[("pip3", "python3-pip")])?;
    }
    eprintln!("fetching {requirement} from PyPI");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let work = tempfile::tempdir_in(&cache)?;
    let target = work.path().join("packages");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    if !with_dependencies {
        pip.arg("--no-deps");
    }
    sh::output(pip.arg("--target").arg(&target).arg(requirement))
        .with_context(|| format!("cannot get {requirement} from PyPI"))?;
    fs::rename(&target, &folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}
