//! QEMU for the emulated host: Debian's source with the patches of `xtask/qemu`.
//!
//! QEMU's emulation of AMD's virtualisation loses and doubles interrupts when two threads are at work,
//! which is seen as guests that hang or crash once in some minutes; each patch says how. Only the
//! emulator for x86-64 is built, with what the emulated host uses of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::sha256;
use crate::cache::{self, Cache};
use crate::progress::Build;
use crate::{paths, sh};

/// Name of the program, here and in `CASULO_HOME/emulated`.
pub(super) const PROGRAM: &str = "qemu-system-x86_64";
/// Part of the cache key: raise it when this file builds the same inputs into another program.
const RECIPE: &str = "1";
const BUILD: Build = Build { name: "QEMU", steps: 1440, is_step: |line| line.starts_with('[') };

/// Firmware is Debian's: its source package has none.
const CONFIGURE: &[&str] = &[
    "--prefix=/usr",
    "--firmwarepath=/usr/share/qemu:/usr/share/seabios",
    "--target-list=x86_64-softmmu",
    "--without-default-features",
    "--enable-system",
    "--enable-tcg",
    "--enable-fdt=system",
    "--enable-virtfs",
    "--enable-attr",
    "--enable-cap-ng",
    "--enable-slirp",
    "--disable-werror",
    "--disable-debug-info",
];

/// The program in the cache; builds it if there is none for these inputs.
pub(super) fn ensure(cache: &Path) -> Result<PathBuf> {
    let patches = patches()?;
    let version = version()?;
    let cache = Cache::lock(cache.join("qemu"))?;
    let entry = cache.folder().join(key(&version, &patches)?);
    if let Some(program) = cached(&entry) {
        return Ok(program);
    }
    build(&cache, &entry, &version, &patches)
}

/// Patches by file name, applied in that order.
fn patches() -> Result<BTreeMap<String, PathBuf>> {
    let folder = paths::root().join("xtask/qemu");
    let mut patches = BTreeMap::new();
    for file in
        fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?
    {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "patch") {
            patches.insert(super::name_of(&path), path);
        }
    }
    Ok(patches)
}

/// Version of Debian's source package.
fn version() -> Result<String> {
    let text = sh::output(Command::new("apt-cache").args([
        "show",
        "--no-all-versions",
        "qemu-system-x86",
    ]))
    .context(
        "this distribution offers no package qemu-system-x86; the emulated host needs Debian 12",
    )?;
    source_version(&text).context("apt-cache does not tell the version of qemu-system-x86")
}

/// A binary package that was built again has a version of its own and names that of its source.
fn source_version(record: &str) -> Option<String> {
    let field =
        |name: &str| record.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    let named = field("Source").and_then(|source| source.split_once('(')?.1.strip_suffix(')'));
    let version = named.or_else(|| field("Version"))?.trim();
    let valid = version.bytes().all(|b| b.is_ascii_alphanumeric() || b".+-~:".contains(&b));
    (valid && !version.is_empty()).then(|| version.to_owned())
}

fn key(version: &str, patches: &BTreeMap<String, PathBuf>) -> Result<String> {
    let gcc = sh::output(Command::new("gcc").arg("--version"))?;
    let first = gcc.lines().next().unwrap_or_default();
    let mut parts: Vec<Vec<u8>> = [RECIPE, version, first]
        .iter()
        .chain(CONFIGURE)
        .map(|part| part.as_bytes().to_vec())
        .collect();
    for patch in patches.values() {
        parts.push(fs::read(patch).with_context(|| format!("cannot read {}", patch.display()))?);
    }
    Ok(cache::key(parts.iter().map(Vec::as_slice)))
}

/// The program of a whole cache entry; a damaged one counts as absent.
fn cached(entry: &Path) -> Option<PathBuf> {
    let program = entry.join(PROGRAM);
    let wanted = fs::read_to_string(entry.join("sha256")).ok()?;
    (sha256(&program).ok()? == wanted).then_some(program)
}

fn build(
    cache: &Cache,
    entry: &Path,
    version: &str,
    patches: &BTreeMap<String, PathBuf>,
) -> Result<PathBuf> {
    sh::need(&[
        ("gcc", "gcc"),
        ("/usr/include/stdio.h", "libc6-dev"),
        ("dpkg-source", "dpkg-dev"),
        ("patch", "patch"),
        ("meson", "meson"),
        ("ninja", "ninja-build"),
        ("pkg-config", "pkg-config"),
        ("/usr/bin/python3", "python3"),
        ("/usr/lib/python3.11/distutils/cmd.py", "python3-distutils"),
        ("/usr/include/glib-2.0/glib.h", "libglib2.0-dev"),
        ("/usr/include/pixman-1/pixman.h", "libpixman-1-dev"),
        ("/usr/include/libfdt.h", "libfdt-dev"),
        ("/usr/include/cap-ng.h", "libcap-ng-dev"),
        ("/usr/include/attr/libattr.h", "libattr1-dev"),
        ("/usr/include/slirp/libslirp.h", "libslirp-dev"),
    ])?;
    eprintln!("building QEMU {version}: about 3 minutes on 2 cores, 1 GB of disk meanwhile");
    let work = cache.work()?;
    let tree = source(work.path(), version)?;
    for (name, patch) in patches {
        cache::patch(&tree, patch)
            .with_context(|| format!("xtask/qemu/{name} does not fit QEMU {version}"))?;
    }
    let objects = work.path().join("objects");
    fs::create_dir(&objects)?;
    let mut configure = Command::new(tree.join("configure"));
    sh::output(debian(configure.args(CONFIGURE)).current_dir(&objects))
        .context("cannot configure QEMU")?;
    let mut ninja = Command::new("ninja");
    BUILD
        .run(debian(ninja.arg(PROGRAM)).current_dir(&objects), &cache.folder().join("build.log"))?;

    let out = work.path().join("out");
    fs::create_dir(&out)?;
    let program = out.join(PROGRAM);
    sh::output(Command::new("strip").arg("-o").arg(&program).arg(objects.join(PROGRAM)))?;
    fs::write(out.join("sha256"), sha256(&program)?)?;
    cache.keep(&out, entry)?;
    Ok(entry.join(PROGRAM))
}

/// Lets a program find Debian's own tools: another Python in `PATH` has other modules.
fn debian(command: &mut Command) -> &mut Command {
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
}

/// Downloads and unpacks the source, with Debian's own patches applied. apt checks its signature.
///
/// Machines seldom have source packages among their package sources, so lists of our own are fetched,
/// from the same mirrors.
fn source(work: &Path, version: &str) -> Result<PathBuf> {
    let apt_folder = work.join("apt");
    for dir in ["lists/partial", "archives/partial", "download"] {
        fs::create_dir_all(apt_folder.join(dir))?;
    }
    let list = apt_folder.join("sources.list");
    let targets = sh::output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
    ]))?;
    fs::write(&list, source_lines(&targets))?;
    let options = [
        format!("Dir::Etc::SourceList={}", list.display()),
        "Dir::Etc::SourceParts=-".to_owned(),
        format!("Dir::State::Lists={}", apt_folder.join("lists").display()),
        format!("Dir::Cache={}", apt_folder.display()),
        "APT::Sandbox::User=".to_owned(),
        "APT::Update::Post-Invoke::=".to_owned(),
    ];
    sh::output(super::apt("apt-get", &options).args(["update", "-qq"]))
        .context("cannot fetch Debian's lists of source packages")?;
    let download = apt_folder.join("download");
    sh::output(
        super::apt("apt-get", &options)
            .args(["source", "--download-only", "-qq"])
            .arg(format!("qemu={version}"))
            .current_dir(&download),
    )
    .with_context(|| {
        format!(
            "cannot download the source of QEMU {version}; if the mirror has a newer one by now, \
             `apt-get update` tells apt about it"
        )
    })?;
    let description = fs::read_dir(&download)?
        .filter_map(|file| Some(file.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "dsc"))
        .context("apt-get source gave no .dsc file")?;
    let tree = work.join("source");
    // `--no-check`: apt has checked the signed digests of all three files.
    sh::output(Command::new("dpkg-source").args(["--no-check", "-x"]).arg(&description).arg(&tree))
        .context("cannot unpack QEMU's source")?;
    Ok(tree)
}

/// Lines for source packages, from `address release component` of the machine's own package sources.
fn source_lines(targets: &str) -> String {
    let mut lines: Vec<String> = targets
        .lines()
        .filter(|line| line.contains("debian") && line.ends_with(" main"))
        .map(|line| format!("deb-src {line}\n"))
        .collect();
    lines.sort();
    lines.dedup();
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_source() {
        let again = "Package: qemu-system-x86\nSource: qemu (1:7.2+dfsg-7+deb12u18)\nVersion: 1:7.2+dfsg-7+deb12u18+b3\n";
        assert_eq!(source_version(again).as_deref(), Some("1:7.2+dfsg-7+deb12u18"));
        let first = "Package: qemu-system-x86\nSource: qemu\nVersion: 1:7.2+dfsg-7+deb12u18\n";
        assert_eq!(source_version(first).as_deref(), Some("1:7.2+dfsg-7+deb12u18"));
        assert_eq!(source_version("Version: 1:7.2; reboot\n"), None);
        assert_eq!(source_version(""), None);
    }

    #[test]
    fn source_packages_come_from_debians_mirrors_of_this_machine() {
        let targets = "http://m/debian/ bookworm main\nhttp://m/debian/ bookworm main\n\
                       http://m/debian/ bookworm non-free\nhttps://other/ nodistro main\n";
        assert_eq!(source_lines(targets), "deb-src http://m/debian/ bookworm main\n");
    }

    #[test]
    fn a_damaged_entry_counts_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cached(folder.path()), None);
        let program = folder.path().join(PROGRAM);
        fs::write(&program, "elf").unwrap();
        fs::write(folder.path().join("sha256"), sha256(&program).unwrap()).unwrap();
        assert_eq!(cached(folder.path()), Some(program.clone()));
        fs::write(&program, "e1f").unwrap();
        assert_eq!(cached(folder.path()), None);
    }

    #[test]
    fn every_patch_is_one() {
        let patches = patches().unwrap();
        assert!(!patches.is_empty());
        for path in patches.values() {
            assert!(fs::read_to_string(path).unwrap().contains("\n--- a/"), "{}", path.display());
        }
    }
}
