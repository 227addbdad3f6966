//! Prepares the emulated host: a stock Debian kernel, its modules, and QEMU (see [`qemu`]).
//!
//! Debian's kernel package is fetched with apt (no root needed), its
//! kernel is taken as it is, and the modules that the emulated host needs are put, decompressed and
//! in the order in which they must be loaded, into one cpio archive. `casulo` adds the second half
//! of the initial file system when it starts the machine.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{paths, sh};

#[path = "../../src/emulated/cpio.rs"]
mod cpio;
mod qemu;

/// Options.
#[derive(clap::Args, Default)]
pub(crate) struct Args {}

/// Modules by name; what they depend on is found in the modules themselves. A name that the kernel
/// has built in, or does not know, is passed over.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "kvm-amd",
    "virtio_rng",
    "virtio_blk",
    "virtio_net",
    "loop",
    "crc32c_generic",
    "ext4",
    "erofs",
    "squashfs",
    "fuse",
    "tun",
    "vhost_vsock",
];
/// Those without which the emulated host cannot work.
const INDISPENSABLE: &[&str] =
    &["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "kvm-amd", "ext4"];

/// What is said about the files beside it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Description {
    /// Release of the kernel, as `uname -r` gives it.
    version: String,
    /// Debian package that it came from.
    package: String,
    vmlinuz_sha256: String,
    modules_sha256: String,
    qemu_sha256: String,
    /// Number of the recipe: another one means that the files must be made again.
    recipe: u32,
}

/// Changes with whatever this file puts into the archive.
const RECIPE: u32 = 3;

pub(crate) fn run(_args: Args) -> Result<()> {
    prepare().map(drop)
}

/// Installs the files of the emulated host, building QEMU if need be; gives their folder. Does nothing
/// when all is there.
pub(crate) fn prepare() -> Result<PathBuf> {
    sh::need(&[
        // Option ROMs of the emulated machine, and its firmware.
        ("/usr/share/qemu/linuxboot_dma.bin", "qemu-system-data"),
        ("/usr/share/seabios/bios-256k.bin", "seabios"),
        ("xz", "xz-utils"),
    ])?;
    let target = paths::casulo_home()?.join("emulated");
    let cache = paths::cache()?.join("emulated");
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let qemu = qemu::ensure(&cache)?;
    let qemu_sha256 = sha256(&qemu)?;
    if is_current(&target, &qemu_sha256) {
        return Ok(target);
    }
    let (package, archive) = fetch(&cache)?;
    eprintln!("emulated host: unpacking {package}");
    let unpacked = tempfile::tempdir_in(&cache)?;
    sh::output(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(unpacked.path()))?;
    let release = only_entry(&unpacked.path().join("lib/modules"))
        .or_else(|_| only_entry(&unpacked.path().join("usr/lib/modules")))?;
    let version = name_of(&release);

    let parent = target.parent().context("CASULO_HOME has no parent folder")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let staged = tempfile::Builder::new().prefix(".emulated-").tempdir_in(parent)?;
    let vmlinuz = staged.path().join("vmlinuz");
    fs::copy(unpacked.path().join("boot").join(format!("vmlinuz-{version}")), &vmlinuz)
        .with_context(|| format!("{package} holds no boot/vmlinuz-{version}"))?;
    let modules = staged.path().join("modules.cpio");
    let count = write_modules(&release, &modules)?;
    let program = staged.path().join(qemu::PROGRAM);
    fs::copy(&qemu, &program).with_context(|| format!("cannot copy {}", qemu.display()))?;
    let description = Description {
        version,
        package,
        vmlinuz_sha256: sha256(&vmlinuz)?,
        modules_sha256: sha256(&modules)?,
        qemu_sha256,
        recipe: RECIPE,
    };
    fs::write(
        staged.path().join("emulated.json"),
        serde_json::to_string_pretty(&description)? + "\n",
    )?;
    make_readable(staged.path())?;
    if target.exists() {
        fs::remove_dir_all(&target)
            .with_context(|| format!("cannot replace {}", target.display()))?;
    }
    fs::rename(staged.keep(), &target)
        .with_context(|| format!("cannot install into {}", target.display()))?;
    let _ = fs::remove_file(archive);
    eprintln!(
        "emulated host: QEMU, Linux {} and {count} modules in {}",
        description.version,
        target.display()
    );
    Ok(target)
}

fn is_current(target: &Path, qemu: &str) -> bool {
    let description = fs::read(target.join("emulated.json"))
        .ok()
        .and_then(|text| serde_json::from_slice::<Description>(&text).ok());
    description.is_some_and(|d| {
        d.recipe == RECIPE
            && d.qemu_sha256 == qemu
            && sha256(&target.join(qemu::PROGRAM)).is_ok_and(|sum| sum == d.qemu_sha256)
            && sha256(&target.join("vmlinuz")).is_ok_and(|sum| sum == d.vmlinuz_sha256)
            && sha256(&target.join("modules.cpio")).is_ok_and(|sum| sum == d.modules_sha256)
    })
}

/// Temporary folders are private; `CASULO_HOME` may serve several users.
fn make_readable(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Downloads the newest kernel package; gives its name and file.
///
/// First with the package lists that the machine has, then with lists of our own: they may be
/// missing or too old, and renewing the machine's would take root.
fn fetch(cache: &Path) -> Result<(String, PathBuf)> {
    eprintln!("emulated host: fetching Debian's kernel package (about 100 MB)");
    if let Ok(found) = download(cache, &[]) {
        return Ok(found);
    }
    let own = cache.join("apt");
    for dir in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(own.join(dir))?;
    }
    let options = [
        format!("Dir::State::Lists={}", own.join("lists").display()),
        format!("Dir::Cache={}", own.display()),
        "APT::Sandbox::User=".to_owned(),
        "APT::Update::Post-Invoke::=".to_owned(),
    ];
    sh::output(apt("apt-get", &options).args(["update", "-qq"]))
        .context("cannot fetch Debian's package lists")?;
    download(cache, &options)
}

fn apt(program: &str, options: &[String]) -> Command {
    let mut command = Command::new(program);
    for option in options {
        command.arg("-o").arg(option);
    }
    command
}

fn download(cache: &Path, options: &[String]) -> Result<(String, PathBuf)> {
    let names = sh::output(apt("apt-cache", options).args(["pkgnames", "linux-image-6.12."]))?;
    let package = newest(&names).context(
        "this distribution offers no package linux-image-6.12.*+deb12-amd64-unsigned; the emulated \
         host needs Debian 12 with its security updates among the package sources",
    )?;
    let dir = tempfile::tempdir_in(cache)?;
    sh::output(apt("apt-get", options).args(["download", "-qq", &package]).current_dir(&dir))
        .with_context(|| format!("cannot download {package}"))?;
    let file = only_entry(dir.path())?;
    let kept = cache.join(name_of(&file));
    fs::rename(&file, &kept)?;
    Ok((package, kept))
}

/// The newest package of the plain kernel among these names.
fn newest(names: &str) -> Option<String> {
    names
        .lines()
        .filter_map(|name| {
            let version =
                name.strip_prefix("linux-image-6.12.")?.strip_suffix("+deb12-amd64-unsigned")?;
            let numbers: Option<Vec<u32>> = version.split('.').map(|n| n.parse().ok()).collect();
            Some((numbers?, name))
        })
        .max()
        .map(|(_, name)| name.to_owned())
}

fn only_entry(dir: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(dir)
        .with_context(|| format!("cannot read {}", dir.display()))?
        .map(|e| e.map(|e| e.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    match (entries.pop(), entries.is_empty()) {
        (Some(entry), true) => Ok(entry),
        _ => bail!("{} does not hold exactly one entry", dir.display()),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn sha256(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    std::io::copy(&mut fs::File::open(path)?, &mut hash)?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes `modules/NNN-name.ko`, so that the order of the names is the order of loading.
fn write_modules(release: &Path, out: &Path) -> Result<usize> {
    let listing = sh::output(Command::new("find").arg(release).args(["-name", "*.ko*"]))?;
    let files: Vec<&str> = listing.lines().collect();
    let load = |name: &str| -> Result<Option<Vec<u8>>> {
        match files.iter().find(|f| module_name(f) == name) {
            Some(file) => read_module(Path::new(file)).map(Some),
            None => Ok(None),
        }
    };
    let order = load_order(MODULES, load)?;
    for needed in INDISPENSABLE {
        let name = needed.replace('-', "_");
        let builtin = fs::read_to_string(release.join("modules.builtin"))
            .is_ok_and(|text| text.lines().any(|l| module_name(l) == name));
        if !builtin && !order.iter().any(|(n, _)| *n == name) {
            bail!("Debian's kernel package has no module {needed}");
        }
    }
    let mut archive = cpio::Archive::new(Vec::new());
    archive.directory("modules", 0o755)?;
    for (index, (name, content)) in order.iter().enumerate() {
        let file = format!("modules/{index:03}-{name}.ko");
        archive.file(&file, 0o644, content.len() as u64, content.as_slice())?;
    }
    fs::write(out, archive.finish()?)?;
    Ok(order.len())
}

/// `kernel/arch/x86/kvm/kvm-amd.ko.xz` is the module `kvm_amd`.
fn module_name(file: &str) -> String {
    let base = file.rsplit('/').next().unwrap_or(file);
    base.split(".ko").next().unwrap_or(base).replace('-', "_")
}

fn read_module(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_none_or(|e| e != "xz") {
        return Ok(fs::read(file)?);
    }
    let out = Command::new("xz").arg("-dc").arg(file).stderr(Stdio::inherit()).output()?;
    if !out.status.success() {
        bail!("cannot decompress {}: {}", file.display(), out.status);
    }
    Ok(out.stdout)
}

/// The wanted modules and all that they depend on, each after its dependencies.
fn load_order(
    wanted: &[&str],
    load: impl Fn(&str) -> Result<Option<Vec<u8>>>,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut order = Vec::new();
    let mut seen = HashSet::new();
    // Depth first with an explicit stack: a module is pushed again below its dependencies.
    let mut stack: Vec<(String, Option<Vec<u8>>)> =
        wanted.iter().rev().map(|name| (name.replace('-', "_"), None)).collect();
    while let Some((name, content)) = stack.pop() {
        match content {
            Some(content) => order.push((name, content)),
            None if !seen.insert(name.clone()) => {}
            None => {
                let Some(mut content) = load(&name)? else { continue };
                content.truncate(unsigned_length(&content));
                let dependencies = dependencies(&content);
                stack.push((name, Some(content)));
                stack.extend(dependencies.into_iter().rev().map(|d| (d, None)));
            }
        }
    }
    Ok(order)
}

/// Length of a module without the signature at its end.
///
/// Debian's kernel loads modules without one, and under emulation the check of 30 signatures takes
/// longer than all else that the modules do. The trailer is `struct module_signature` (12 bytes, of
/// which the last four are the signature's length, big endian) and a magic string.
fn unsigned_length(module: &[u8]) -> usize {
    const MAGIC: &[u8] = b"~Module signature appended~\n";
    let trailer = module.strip_suffix(MAGIC).and_then(|rest| rest.split_last_chunk::<12>());
    let Some((rest, [.., a, b, c, d])) = trailer else { return module.len() };
    let signature = usize::try_from(u32::from_be_bytes([*a, *b, *c, *d])).unwrap_or(usize::MAX);
    rest.len().checked_sub(signature).unwrap_or(module.len())
}

/// What a module says in its `.modinfo`: entries `key=value`, each ended by a zero byte.
///
/// `depends` are symbols that it uses; `softdep=pre:` are modules that it asks for when it runs.
fn dependencies(module: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    for entry in module.split(|b| *b == 0) {
        let Ok(entry) = std::str::from_utf8(entry) else { continue };
        if let Some(list) = entry.strip_prefix("depends=") {
            names.extend(list.split(',').map(str::to_owned));
        } else if let Some(list) = entry.strip_prefix("softdep=pre: ") {
            let before = list.split("post:").next().unwrap_or_default();
            names.extend(before.split_whitespace().map(str::to_owned));
        }
    }
    names.retain(|name| !name.is_empty());
    names.iter().map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(name: &str) -> Result<Option<Vec<u8>>> {
        let text: &[u8] = match name {
            "ext4" => b"\x7fELF\0softdep=pre: crc32c\0depends=jbd2,mbcache\0",
            "jbd2" => b"\0depends=crc16\0",
            "kvm_amd" => b"\0depends=kvm,ccp\0",
            "kvm" => b"\0depends=irqbypass\0",
            "mbcache" | "crc16" | "ccp" | "irqbypass" | "overlay" => b"\0depends=\0",
            _ => return Ok(None),
        };
        Ok(Some(text.to_vec()))
    }

    #[test]
    fn a_module_comes_after_what_it_depends_on() {
        let order = load_order(&["kvm-amd", "ext4", "unknown", "overlay", "ext4"], fake).unwrap();
        let names: Vec<&str> = order.iter().map(|(n, _)| n.as_str()).collect();
        let expected =
            ["irqbypass", "kvm", "ccp", "kvm_amd", "crc16", "jbd2", "mbcache", "ext4", "overlay"];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_signature_is_cut_off() {
        let mut module = b"ELF and so on".to_vec();
        let length = module.len();
        assert_eq!(unsigned_length(&module), length);
        module.extend([9; 300]);
        module.extend([0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 44]);
        module.extend(b"~Module signature appended~\n");
        assert_eq!(unsigned_length(&module), length);
        // A length beyond the file is none.
        let short = [&[0, 0, 2, 0, 0, 0, 0, 0, 255, 0, 0, 0], module.get(325..).unwrap()].concat();
        assert_eq!(unsigned_length(&short), short.len());
    }

    #[test]
    fn a_circle_ends() {
        let load = |name: &str| {
            Ok(Some(format!("\0depends={}\0", if name == "a" { "b" } else { "a" }).into_bytes()))
        };
        assert_eq!(load_order(&["a"], load).unwrap().len(), 2);
    }

    #[test]
    fn the_newest_plain_kernel_is_chosen_by_number() {
        let names = "linux-image-6.12.99+deb12-amd64-unsigned\n\
                     linux-image-6.12.117+deb12-rt-amd64-unsigned\n\
                     linux-image-6.12.111+deb12-amd64-unsigned\n\
                     linux-image-6.12.117+deb12-amd64-dbg\n";
        assert_eq!(newest(names).as_deref(), Some("linux-image-6.12.111+deb12-amd64-unsigned"));
        assert_eq!(newest("linux-image-6.1.0-1-amd64-unsigned\n"), None);
    }

    #[test]
    fn module_names_are_those_of_the_kernel() {
        assert_eq!(module_name("kernel/arch/x86/kvm/kvm-amd.ko.xz"), "kvm_amd");
        assert_eq!(module_name("fs/9p/9p.ko"), "9p");
    }
}
