//! Builds the guest kernel from Debian's source and `kernel-config/casulo.config`.
//!
//! Same inputs, same bytes: the cache is keyed by a hash of everything that reaches the compiler
//! (source package, configuration, tool versions, the way it is built), and the build takes nothing
//! from the environment, the clock or the name of a folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cache::{self, Cache};
use crate::progress::Build;
use crate::{paths, sh};

mod config;
mod source;

/// Part of the cache key: raise it when this file builds the same inputs into other bytes.
const RECIPE: &str = "1";

const BUILD: Build = Build { name: "kernel", steps: 1430, is_step };

/// Whether a line of `make` says that one file is being made: two spaces, what, and the file.
fn is_step(line: &str) -> bool {
    line.strip_prefix("  ").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// What is known about an installed kernel: `kernel.json` beside `vmlinux`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Version of the Debian source package, such as `6.12.117-1~deb12u1`.
    pub(crate) version: String,
    /// SHA-256 of the Debian source package.
    pub(crate) source_sha256: String,
    /// SHA-256 of the complete configuration the kernel was built with.
    pub(crate) config_sha256: String,
    /// SHA-256 of `vmlinux`.
    pub(crate) sha256: String,
    /// Size of `vmlinux` in bytes.
    pub(crate) size: u64,
}

pub(crate) fn run(_args: Args) -> Result<()> {
    let (path, manifest) = ensure()?;
    eprintln!(
        "kernel {}: {} ({} KiB, sha256 {})",
        manifest.version,
        path.display(),
        manifest.size / 1024,
        manifest.sha256
    );
    Ok(())
}

/// Builds the kernel if the cache has none for these inputs and installs it into `CASULO_HOME`.
pub(crate) fn ensure() -> Result<(PathBuf, Manifest)> {
    sh::need(&[
        ("gcc", "gcc"),
        ("/usr/include/stdio.h", "libc6-dev"),
        ("make", "make"),
        ("flex", "flex"),
        ("bison", "bison"),
        ("bc", "bc"),
        ("xz", "xz-utils"),
        ("patch", "patch"),
        ("/usr/include/libelf.h", "libelf-dev"),
    ])?;
    let inputs = Inputs::read(&paths::root().join("kernel-config"))?;
    let wanted = config::parse(&inputs.fragment)
        .context("kernel-config/casulo.config is not a kernel configuration")?;

    let package = source::newest()?;
    let cache = Cache::lock(paths::cache()?.join("kernel"))?;
    let entry = cache.folder().join(input_hash(&package, &inputs)?);
    let manifest = match cached(&entry) {
        Some(manifest) => manifest,
        None => build(&cache, &entry, &package, &inputs, &wanted)?,
    };
    let installed = install(&entry, &manifest)?;
    Ok((installed, manifest))
}

/// What `kernel-config/` holds.
struct Inputs {
    /// The configuration as it is written, comments included.
    fragment: String,
    /// Patches by file name, applied in that order.
    patches: BTreeMap<String, String>,
}

impl Inputs {
    fn read(folder: &Path) -> Result<Inputs> {
        let read = |path: &Path| {
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let patches_folder = folder.join("patches");
        let mut patches = BTreeMap::new();
        for file in fs::read_dir(&patches_folder)
            .with_context(|| format!("cannot list {}", patches_folder.display()))?
        {
            let path = file?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.ends_with(".patch") {
                patches.insert(name, read(&path)?);
            }
        }
        Ok(Inputs { fragment: read(&folder.join("casulo.config"))?, patches })
    }
}

/// Hash of all that decides the bytes of the kernel.
fn input_hash(package: &source::Package, inputs: &Inputs) -> Result<String> {
    let version = |program: &str| -> Result<String> {
        let text = sh::output(Command::new(program).arg("--version"))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    };
    let (gcc, ld) = (version("gcc")?, version("ld")?);
    let fixed = [RECIPE, &package.version, &package.sha256, &inputs.fragment, &gcc, &ld];
    let parts = fixed.into_iter().chain(inputs.patches.values().map(String::as_str));
    Ok(cache::key(parts.map(str::as_bytes)))
}

/// The manifest of a whole cache entry; a damaged one counts as absent and is built again.
fn cached(entry: &Path) -> Option<Manifest> {
    let manifest: Manifest =
        serde_json::from_slice(&fs::read(entry.join("kernel.json")).ok()?).ok()?;
    let (sha256, size) = digest(&entry.join("vmlinux")).ok()?;
    (sha256 == manifest.sha256 && size == manifest.size).then_some(manifest)
}

fn build(
    cache: &Cache,
    entry: &Path,
    package: &source::Package,
    inputs: &Inputs,
    wanted: &[config::Wanted],
) -> Result<Manifest> {
    eprintln!(
        "building the guest kernel {}: about 5 minutes on 2 cores, 2 GB of disk meanwhile",
        package.version
    );
    let deb = source::fetch(cache.folder(), package)?;
    let work = cache.work()?;
    let tree = source::unpack(&deb, work.path())?;

    for (name, patch) in &inputs.patches {
        apply(&tree, name, patch)?;
    }
    let fragment_path = work.path().join("casulo.config");
    fs::write(&fragment_path, &inputs.fragment)?;
    sh::output(make(&tree).env("KCONFIG_ALLCONFIG", &fragment_path).arg("allnoconfig"))
        .context("cannot configure the kernel")?;
    let complete = fs::read(tree.join(".config")).context("the kernel was not configured")?;
    config::verify(wanted, &String::from_utf8_lossy(&complete))?;

    let log = cache.folder().join("build.log");
    BUILD.run(make(&tree).arg("vmlinux"), &log)?;

    let out = work.path().join("out");
    fs::create_dir(&out)?;
    let vmlinux = out.join("vmlinux");
    sh::run(Command::new("strip").arg("-s").arg("-o").arg(&vmlinux).arg(tree.join("vmlinux")))?;
    let (sha256, size) = digest(&vmlinux)?;
    let manifest = Manifest {
        version: package.version.clone(),
        source_sha256: package.sha256.clone(),
        config_sha256: hex(&Sha256::digest(&complete)),
        sha256,
        size,
    };
    fs::write(out.join("config"), &complete)?;
    fs::copy(tree.join("System.map"), out.join("System.map"))?;
    fs::write(out.join("kernel.json"), to_json(&manifest)?)?;
    cache.keep(&out, entry)?;
    Ok(manifest)
}

/// Applies one patch; one that does not fit is an error, never a fuzzy match.
fn apply(tree: &Path, name: &str, patch: &str) -> Result<()> {
    let file = tree.join("../").join(name);
    fs::write(&file, patch).with_context(|| format!("cannot write {}", file.display()))?;
    cache::patch(tree, &file).with_context(|| {
        format!("kernel-config/patches/{name} does not fit this version of the kernel source")
    })
}

/// `make` in the tree, with nothing from this environment but `PATH`.
fn make(tree: &Path) -> Command {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut command = Command::new("make");
    command
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .envs(BTreeMap::from([
            ("LC_ALL", "C"),
            ("TZ", "UTC"),
            // What would otherwise be the clock and the builder's name in /proc/version.
            ("KBUILD_BUILD_TIMESTAMP", "Thu Jan  1 00:00:00 UTC 1970"),
            ("KBUILD_BUILD_VERSION", "1"),
            ("KBUILD_BUILD_USER", "casulo"),
            ("KBUILD_BUILD_HOST", "casulo"),
        ]))
        .current_dir(tree)
        .arg("ARCH=x86_64")
        .arg(format!("-j{jobs}"));
    command
}

/// Copies a cache entry into `CASULO_HOME/kernel`, each file in one step.
fn install(entry: &Path, manifest: &Manifest) -> Result<PathBuf> {
    let folder = paths::casulo_home()?.join("kernel");
    let vmlinux = folder.join("vmlinux");
    if cached(&folder).as_ref() == Some(manifest) {
        return Ok(vmlinux);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let place = |name: &str| -> Result<()> {
        let target = folder.join(name);
        let context = || format!("cannot install {}", target.display());
        let temporary = tempfile::NamedTempFile::new_in(&folder).with_context(context)?;
        fs::copy(entry.join(name), temporary.path()).with_context(context)?;
        temporary.as_file().sync_all().with_context(context)?;
        temporary.persist(&target).with_context(context)?;
        Ok(())
    };
    place("vmlinux")?;
    place("kernel.json")?;
    Ok(vmlinux)
}

fn to_json(manifest: &Manifest) -> Result<String> {
    Ok(serde_json::to_string_pretty(manifest)? + "\n")
}

/// SHA-256 in hex and size of a file.
fn digest(path: &Path) -> Result<(String, u64)> {
    let context = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(context)?;
    let mut hash = Sha256::new();
    let size = std::io::copy(&mut file, &mut hash).with_context(context)?;
    Ok((hex(&hash.finalize()), size))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fails with what is to be done when a file has not the hash that was promised.
fn check_digest(path: &Path, expected: &str) -> Result<()> {
    let (found, _) = digest(path)?;
    if found != expected {
        bail!("{} has the SHA-256 {found}, expected {expected}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(folder: &Path, content: &[u8]) -> Manifest {
        fs::write(folder.join("vmlinux"), content).unwrap();
        let manifest = Manifest {
            version: "6.12.1-1".into(),
            source_sha256: "00".into(),
            config_sha256: "11".into(),
            sha256: hex(&Sha256::digest(content)),
            size: content.len() as u64,
        };
        fs::write(folder.join("kernel.json"), to_json(&manifest).unwrap()).unwrap();
        manifest
    }

    #[test]
    fn steps_are_told_from_other_lines() {
        assert!(is_step("  CC      init/main.o"));
        assert!(is_step("  LD      vmlinux"));
        for other in ["", "make[1]: Entering", "init/main.c:1: warning: x", "  123", "    | ^~~"] {
            assert!(!is_step(other), "{other}");
        }
    }

    #[test]
    fn a_whole_entry_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = entry(folder.path(), b"kernel");
        assert_eq!(cached(folder.path()), Some(manifest));
    }

    #[test]
    fn a_damaged_entry_counts_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cached(folder.path()), None);
        entry(folder.path(), b"kernel");
        fs::write(folder.path().join("vmlinux"), b"kerne1").unwrap();
        assert_eq!(cached(folder.path()), None);
        entry(folder.path(), b"kernel");
        fs::write(folder.path().join("kernel.json"), b"{").unwrap();
        assert_eq!(cached(folder.path()), None);
    }

    #[test]
    fn every_input_changes_the_hash() {
        let package = |version: &str, sha256: &str| source::Package {
            version: version.into(),
            sha256: sha256.into(),
        };
        let inputs = |fragment: &str, patches: &[&str]| Inputs {
            fragment: fragment.into(),
            patches: patches
                .iter()
                .enumerate()
                .map(|(number, text)| (format!("{number}.patch"), (*text).into()))
                .collect(),
        };
        let plain = inputs("CONFIG_X=y\n", &["p"]);
        let base = input_hash(&package("1", "a"), &plain).unwrap();
        assert_eq!(base, input_hash(&package("1", "a"), &plain).unwrap());
        for (other, inputs) in [
            (package("2", "a"), &plain),
            (package("1", "b"), &plain),
            (package("1a", ""), &plain),
            (package("1", "a"), &inputs("CONFIG_X=n\n", &["p"])),
            (package("1", "a"), &inputs("CONFIG_X=y\n", &[])),
            (package("1", "a"), &inputs("CONFIG_X=y\n", &["q"])),
            (package("1", "a"), &inputs("CONFIG_X=y\n", &["p", ""])),
        ] {
            assert_ne!(base, input_hash(&other, inputs).unwrap());
        }
    }

    /// The repository's own configuration is well formed and names no option twice.
    #[test]
    fn our_configuration_parses() {
        let inputs = Inputs::read(&paths::root().join("kernel-config")).unwrap();
        assert!(config::parse(&inputs.fragment).unwrap().len() > 100);
    }

    #[test]
    fn a_patch_fits_or_fails() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("a"), "one\ntwo\n").unwrap();
        let patch = "Why.\n\n--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n-one\n+1\n two\n";
        apply(&tree, "x.patch", patch).unwrap();
        assert_eq!(fs::read_to_string(tree.join("a")).unwrap(), "1\ntwo\n");
        let error = apply(&tree, "x.patch", patch).unwrap_err().to_string();
        assert!(error.contains("x.patch"), "{error}");
    }
}
