//! The kernel source: the newest `linux-source-6.12` the distribution offers.
//!
//! The package is downloaded and unpacked into the cache, not installed, so this needs no root.
//! `apt-get` checks its signature; its SHA-256 is checked once more each time it is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::check_digest;
use crate::sh;

/// The long-term series the configuration is written for.
const PACKAGE: &str = "linux-source-6.12";

/// Large folders of which only the Kconfig files and Makefiles are read. Leaving their sources out
/// saves 0.9 GB of the 1.7 GB of the whole tree.
const NOT_BUILT: [&str; 12] = [
    "drivers/gpu",
    "drivers/infiniband",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/scsi",
    "drivers/staging",
    "drivers/usb",
    "sound",
    "tools/perf",
    "tools/testing",
    "Documentation",
];

/// A source package as the package lists describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Package {
    pub(super) version: String,
    pub(super) sha256: String,
}

/// The newest version that the configured package sources offer.
pub(super) fn newest() -> Result<Package> {
    if !sh::has("apt-cache") || !sh::has("dpkg-deb") {
        bail!(
            "the guest kernel is built from Debian's package {PACKAGE}, and this machine has no \
             apt; build it on Debian 12 or 13 (a container will do) and copy \
             CASULO_HOME/kernel here"
        );
    }
    if let Some(package) = offered()? {
        return Ok(package);
    }
    // The lists may never have been fetched, as in a fresh container.
    sh::apt(&["update", "-qq"]).context("cannot fetch the package lists")?;
    offered()?.with_context(|| {
        format!(
            "this distribution does not offer the package {PACKAGE}, which the guest kernel is \
             built from; Debian 13 has it, Debian 12 has it in bookworm-security (is the line \
             \"deb http://deb.debian.org/debian-security bookworm-security main\" in the apt \
             sources?)"
        )
    })
}

fn offered() -> Result<Option<Package>> {
    let mut command = Command::new("apt-cache");
    command.env("LC_ALL", "C").args(["show", "--no-all-versions", PACKAGE]);
    let out = command.output().context("cannot start apt-cache")?;
    // It fails when there is no such package, which is for the caller to explain.
    if !out.status.success() {
        return Ok(None);
    }
    Ok(parse_record(&String::from_utf8_lossy(&out.stdout)))
}

/// Version and SHA-256 of the first record of `apt-cache show`.
fn parse_record(text: &str) -> Option<Package> {
    let record = text.split("\n\n").next()?;
    let field = |name: &str| {
        record.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).map(str::trim)
    };
    let (version, sha256) = (field("Version")?, field("SHA256")?);
    let is_sha256 = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit());
    // The version becomes part of a file name and of an argument.
    let is_version = !version.is_empty()
        && version.bytes().all(|b| b.is_ascii_alphanumeric() || b".+-~:".contains(&b));
    (is_sha256 && is_version)
        .then(|| Package { version: version.to_owned(), sha256: sha256.to_owned() })
}

/// The package file in the cache; downloads it when it is not there or damaged.
pub(super) fn fetch(cache: &Path, package: &Package) -> Result<PathBuf> {
    let folder = cache.join("source");
    let deb = folder.join(format!("{}.deb", package.sha256));
    if deb.exists() && check_digest(&deb, &package.sha256).is_ok() {
        return Ok(deb);
    }
    eprintln!("downloading {PACKAGE} {} (150 MB)", package.version);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let download = tempfile::tempdir_in(&folder)
        .with_context(|| format!("cannot create a folder in {}", folder.display()))?;
    let fetch = || {
        let mut command = Command::new("apt-get");
        command
            // Without it apt, as root, warns that its own user cannot write here.
            .args(["-o", "APT::Sandbox::User=root", "-qq", "download"])
            .arg(format!("{PACKAGE}={}", package.version))
            .current_dir(download.path());
        sh::output(&mut command).map(drop)
    };
    fetch().with_context(|| {
        format!(
            "cannot download {PACKAGE} {}; if the mirror has a newer one by now, \
             `apt-get update` tells apt about it",
            package.version
        )
    })?;
    let file = fs::read_dir(download.path())?
        .filter_map(|file| Some(file.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .context("apt-get downloaded no package file")?;
    check_digest(&file, &package.sha256).context("the download is damaged")?;
    fs::rename(&file, &deb).with_context(|| format!("cannot create {}", deb.display()))?;
    Ok(deb)
}

/// Unpacks what the build needs below `work`; gives the root of the source tree.
pub(super) fn unpack(deb: &Path, work: &Path) -> Result<PathBuf> {
    eprintln!("unpacking the kernel source");
    let package = work.join("package");
    sh::output(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&package))?;
    let tarball = package.join("usr/src").join(format!("{PACKAGE}.tar.xz"));
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(work);
    for folder in NOT_BUILT {
        for kind in ["c", "h", "json", "rst", "yaml", "py", "S"] {
            tar.arg(format!("--exclude={PACKAGE}/{folder}/*.{kind}"));
        }
    }
    sh::output(tar.arg("-xJf").arg(&tarball)).context("cannot unpack the kernel source")?;
    fs::remove_dir_all(&package)?;
    let tree = work.join(PACKAGE);
    if !tree.join("Kconfig").is_file() {
        bail!("{} holds no kernel source in {PACKAGE}/", deb.display());
    }
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA256: &str = "e849faf31ca3555757f3a8877cb01af92122f744f75d1f3102734651c4e14703";

    #[test]
    fn the_first_record_counts() {
        let text = format!(
            "Package: linux-source-6.12\nVersion: 6.12.117-1~deb12u1\nDescription: a\n Version: 0\n\
             SHA256: {SHA256}\n\nPackage: linux-source-6.12\nVersion: 6.12.1-1\nSHA256: 00\n"
        );
        let package = parse_record(&text).unwrap();
        assert_eq!(package.version, "6.12.117-1~deb12u1");
        assert_eq!(package.sha256, SHA256);
    }

    #[test]
    fn incomplete_or_odd_records_are_refused() {
        for text in [
            String::new(),
            format!("SHA256: {SHA256}\n"),
            "Version: 6.12.1-1\n".into(),
            "Version: 6.12.1-1\nSHA256: 00\n".into(),
            format!("Version: ../../x\nSHA256: {SHA256}\n"),
            format!("Version: \nSHA256: {SHA256}\n"),
        ] {
            assert_eq!(parse_record(&text), None, "{text}");
        }
    }
}
