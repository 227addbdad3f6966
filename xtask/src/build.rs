//! Builds binaries, kernel and images and installs them into CASULO_HOME.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::{emulated, images, kernel, paths, sh};

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: Args) -> Result<()> {
    everything()
}

/// The programs that a user runs; the agent is in the boot volume.
const PROGRAMS: [&str; 2] = ["casulo", "casulo-vmm"];
/// What of `CASULO_HOME` the build makes, in the words of the first message.
const PARTS: [(&str, &str); 4] = [
    ("kernel/kernel.json", "guest kernel"),
    ("agent/agent.json", "guest agent"),
    ("images/names/dev", "guest images"),
    ("emulated/emulated.json", "emulated host"),
];

/// Makes whatever is missing or out of date; afterwards `target/release/casulo` works.
pub(crate) fn everything() -> Result<()> {
    let started = Instant::now();
    announce()?;
    binaries()?;
    files()?;
    eprintln!(
        "ready after {} s: {}",
        started.elapsed().as_secs(),
        paths::root().join("target/release/casulo").display()
    );
    Ok(())
}

/// Everything in `CASULO_HOME`. Needs the binaries, if only to know whether KVM works.
pub(crate) fn files() -> Result<()> {
    kernel::ensure().context("the guest kernel")?;
    images::run(images::Args::default())?;
    // Who has KVM does not need it, and may have another distribution.
    if kvm_works() {
        eprintln!(
            "the emulated host is left out, as KVM works here (`cargo xtask emulated` makes it)"
        );
        return Ok(());
    }
    emulated::prepare().map(drop).context("the emulated host")
}

/// Says what is going to happen, unless nothing much is.
fn announce() -> Result<()> {
    let home = paths::casulo_home()?;
    let missing: Vec<&str> =
        PARTS.iter().filter(|(file, _)| !home.join(file).exists()).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!(
        "To be made: {}. From nothing this takes about 15 minutes on 2 processors, 1 GB of downloads \
         and 6 GB of disk ({} and {}).",
        missing.join(", "),
        paths::root().join("target").display(),
        paths::cache()?.display(),
    );
    Ok(())
}

/// Compiles the programs and puts them into `target/release`.
fn binaries() -> Result<()> {
    sh::need(&[("gcc", "gcc"), ("/usr/include/stdio.h", "libc6-dev")])?;
    let mut cargo = sh::cargo();
    cargo.current_dir(paths::root()).args(["build", "--release"]);
    for program in PROGRAMS {
        cargo.args(["--package", program]);
    }
    sh::run(&mut cargo)?;
    link()
}

/// The target is named in `.cargo/config.toml`, so cargo uses a folder below the one that people
/// look in.
pub(crate) fn link() -> Result<()> {
    let release = paths::root().join("target/release");
    fs::create_dir_all(&release).with_context(|| format!("cannot make {}", release.display()))?;
    for program in PROGRAMS {
        place(&paths::binaries().join(program), &release.join(program))?;
    }
    Ok(())
}

/// Makes `to` the same file as `from`, in one step.
fn place(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("cannot put {} at {}", from.display(), to.display());
    let temporary = to.with_extension(format!("{}.new", std::process::id()));
    if fs::hard_link(from, &temporary).is_err() {
        fs::copy(from, &temporary).with_context(context)?;
    }
    // Renaming one name of a file to another name of the same file does nothing, not even remove
    // the first.
    let renamed = fs::rename(&temporary, to).with_context(context);
    let _ = fs::remove_file(&temporary);
    renamed
}

/// Whether this machine's KVM runs guest kernels.
pub(crate) fn kvm_works() -> bool {
    let Ok(kvm) = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") else {
        return false;
    };
    Command::new(paths::binaries().join("casulo-vmm"))
        .arg("--self-test")
        .stdin(Stdio::from(kvm))
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_placed_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::write(&from, "1").unwrap();
        place(&from, &to).unwrap();
        place(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "1");
        fs::remove_file(&from).unwrap();
        fs::write(&from, "2").unwrap();
        place(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "2");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
