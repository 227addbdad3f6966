//! One tarball that runs from any folder.
//!
//! `casulo` finds `share/casulo` beside the folder that it is in. The same inputs give the same
//! bytes: entries are sorted, times and owners are zero.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use casulo_protocol::image;
use sha2::{Digest, Sha256};

use crate::{build, paths};

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The image in the tarball.
const IMAGE: &str = "base";
const MANIFEST: &str = "MANIFEST.sha256";
const README: &str = "\
Casulo runs code that nobody has reviewed in a Linux microVM that exists for one task.

    bin/casulo run -- python3 -c 'print(6*7)'
    bin/casulo doctor       says what is missing here, and how to get it

Nothing has to be installed: bin/ and share/ stay beside each other, wherever they are. You need an
x86-64 Linux with /dev/kvm and the permission to open it (`bin/casulo doctor` names the group).
Without KVM, and with qemu-system-x86_64 in PATH, tasks run in an emulated host: slow, for
development only.

share/casulo holds the guest kernel, the guest agent's boot volume, the image `base`, and the kernel
and modules of the emulated host. `sha256sum -c MANIFEST.sha256` checks every file.
";

pub(crate) fn run(_args: Args) -> Result<()> {
    build::everything()?;
    let name = format!("casulo-{}-x86_64-linux", env!("CARGO_PKG_VERSION"));
    let folder = paths::root().join("dist");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let tarball = folder.join(format!("{name}.tar.gz"));
    let entries = collect(&paths::root().join("target/release"), &paths::casulo_home()?)?;
    let temporary = tempfile::NamedTempFile::new_in(&folder)?;
    write(&entries, &name, temporary.as_file())?;
    readable(temporary.path())?;
    temporary.persist(&tarball)?;
    let size = fs::metadata(&tarball)?.len();
    eprintln!("{}: {} MiB, {} files", tarball.display(), size >> 20, entries.len());
    Ok(())
}

fn readable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o644))?)
}

/// What an entry of the tarball is made of.
#[derive(Debug, PartialEq)]
enum Content {
    /// A file of this machine, and whether it is a program.
    File(PathBuf, bool),
    /// Text made here.
    Text(String),
    /// A symbolic link.
    Link(PathBuf),
}

/// A path in the tarball and what is there.
type Entry = (String, Content);

/// Everything but the manifest, sorted by path.
fn collect(binaries: &Path, home: &Path) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = vec![("README".to_owned(), Content::Text(README.to_owned()))];
    entries.push(("LICENSE".to_owned(), Content::File(paths::root().join("LICENSE"), false)));
    for program in ["casulo", "casulo-vmm"] {
        let file = Content::File(binaries.join(program), true);
        entries.push((format!("bin/{program}"), file));
    }
    let mut share = |path: &str| {
        let file = Content::File(home.join(path), false);
        entries.push((format!("share/casulo/{path}"), file));
    };
    for path in [
        "kernel/vmlinux",
        "kernel/kernel.json",
        "agent/boot.erofs",
        "agent/agent.json",
        "emulated/vmlinuz",
        "emulated/modules.cpio",
        "emulated/emulated.json",
    ] {
        share(path);
    }
    let link = fs::read_link(home.join("images/names").join(IMAGE))
        .with_context(|| format!("the image {IMAGE} is not in {}", home.display()))?;
    let digest = link.file_name().context("the image's link leads nowhere")?.to_string_lossy();
    let json = format!("images/{digest}/{}", image::MANIFEST);
    let manifest: image::Manifest = serde_json::from_slice(
        &fs::read(home.join(&json)).with_context(|| format!("the image {IMAGE} has no {json}"))?,
    )?;
    share(&json);
    for layer in &manifest.layers {
        share(&format!("images/layers/{}.erofs", layer.sha256));
    }
    entries.push((format!("share/casulo/images/names/{IMAGE}"), Content::Link(link)));
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    // The emulated host is left out where it could not be made.
    if !home.join("emulated/emulated.json").exists() {
        entries.retain(|(path, _)| !path.starts_with("share/casulo/emulated/"));
    }
    Ok(entries)
}

/// Writes the tarball, the manifest of hashes first.
fn write(entries: &[Entry], folder: &str, out: &File) -> Result<()> {
    let mut gzip = Command::new("gzip")
        .arg("-9n")
        .stdin(Stdio::piped())
        .stdout(out.try_clone()?)
        .spawn()
        .context("cannot start gzip")?;
    let pipe = gzip.stdin.take().context("gzip has no standard input")?;
    let mut archive = tar::Builder::new(BufWriter::new(pipe));
    archive.mode(tar::HeaderMode::Deterministic);
    append(&mut archive, folder, MANIFEST, 0o644, manifest(entries)?.as_bytes())?;
    for (path, content) in entries {
        match content {
            Content::File(file, program) => {
                let bytes =
                    fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
                let mode = if *program { 0o755 } else { 0o644 };
                append(&mut archive, folder, path, mode, &bytes)?;
            }
            Content::Text(text) => append(&mut archive, folder, path, 0o644, text.as_bytes())?,
            Content::Link(target) => {
                let mut header = tar::Header::new_gnu();
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                header.set_mode(0o777);
                header.set_mtime(0);
                archive.append_link(&mut header, format!("{folder}/{path}"), target)?;
            }
        }
    }
    archive.into_inner()?.flush()?;
    let status = gzip.wait()?;
    ensure!(status.success(), "gzip failed: {status}");
    Ok(())
}

fn append(
    archive: &mut tar::Builder<impl Write>,
    folder: &str,
    path: &str,
    mode: u32,
    bytes: &[u8],
) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes.len() as u64);
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    archive.append_data(&mut header, format!("{folder}/{path}"), bytes)?;
    Ok(())
}

/// Lines as `sha256sum` writes them.
fn manifest(entries: &[Entry]) -> Result<String> {
    let mut lines = String::new();
    for (path, content) in entries {
        let mut hash = Sha256::new();
        match content {
            Content::File(file, _) => {
                let mut file =
                    File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
                std::io::copy(&mut file, &mut hash)?;
            }
            Content::Text(text) => hash.update(text),
            Content::Link(_) => continue,
        }
        let sum: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        lines.push_str(&format!("{sum}  {path}\n"));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unpacks with the machine's own tar, and checks with its sha256sum.
    #[test]
    fn what_is_packed_is_unpacked_and_its_manifest_holds() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        fs::write(&program, "#!/bin/sh\necho ran\n").unwrap();
        let entries: Vec<Entry> = vec![
            ("bin/program".to_owned(), Content::File(program, true)),
            ("link".to_owned(), Content::Link("bin/program".into())),
            ("text".to_owned(), Content::Text("words\n".to_owned())),
        ];
        let pack = |name: &str| {
            let path = dir.path().join(name);
            write(&entries, "top", &File::create(&path).unwrap()).unwrap();
            path
        };
        let (one, two) = (pack("1.tar.gz"), pack("2.tar.gz"));
        assert_eq!(fs::read(&one).unwrap(), fs::read(&two).unwrap());

        let script = format!(
            "tar -xzf {} && cd top && sha256sum --quiet -c {MANIFEST} && ./link && cat text",
            one.display()
        );
        let mut command = Command::new("sh");
        let out = command.current_dir(dir.path()).args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), "ran\nwords\n", "{out:?}");
    }
}
