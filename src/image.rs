//! Images, the guest kernel and the agent's boot volume on disk: found, checked, opened.
//!
//! Every file is compared with its SHA-256 once. That it matched is remembered together with the
//! file's inode, size, mtime and ctime, so any later change of the file, also one that restores its
//! size and mtime, has it read again. Size and the superblock's magic are checked at every open.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use casulo_protocol::agent;
use casulo_protocol::image::{FORMAT, MANIFEST, Manifest};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Magic number of an erofs superblock and its place in the file (`fs/erofs/erofs_fs.h` in Linux).
const EROFS_MAGIC: u32 = 0xE0F5_E1E2;
const EROFS_MAGIC_AT: u64 = 1024;
/// Most bytes of a manifest, `kernel.json` or `agent.json`.
const MAX_JSON: u64 = 4 << 20;
/// Most layers: a VM has 17 interrupt lines for devices (`VIRTIO_LINES` of `casulo-vmm`), of which boot volume,
/// scratch disk, entropy, sockets, balloon and shares take one each.
const MAX_LAYERS: usize = 11;
/// Most remembered states of one file: it may be seen through several file systems.
const MAX_REMEMBERED: usize = 8;

/// Why an image, a kernel or a boot volume cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Not the form of a name or digest.
    #[error("`{name}` is no image name: use letters, digits, `.`, `_` and `-`, or a digest")]
    Name {
        /// The name.
        name: String,
    },
    /// No such image.
    #[error("there is no image `{name}`; {}", known_images(.known))]
    Unknown {
        /// The name asked for.
        name: String,
        /// Names of all images.
        known: Vec<String>,
    },
    /// A file is not there.
    #[error("the {what} is missing: {} does not exist; {hint}", path.display())]
    Missing {
        /// What the file is.
        what: String,
        /// Where it was expected.
        path: PathBuf,
        /// What to do.
        hint: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read the {what} {}: {source}", path.display())]
    Read {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A manifest, `kernel.json` or `agent.json` has the wrong form.
    #[error("the {what} {} is not valid: {reason}", path.display())]
    Manifest {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file is shorter than its manifest says.
    #[error(
        "the {what} {} is truncated: {found} bytes instead of {expected}; build or fetch it again",
        path.display()
    )]
    Truncated {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
        /// Bytes that the manifest says.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A file is longer than its manifest says.
    #[error(
        "the {what} {} has {found} bytes instead of {expected}; build or fetch it again",
        path.display()
    )]
    TooLong {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
        /// Bytes that the manifest says.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// A file's content is not what its manifest says.
    #[error(
        "the {what} {} is damaged: its SHA-256 is {found}, expected {expected}; build or fetch it again",
        path.display()
    )]
    Digest {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
        /// Digest that the manifest says.
        expected: String,
        /// Digest of the file.
        found: String,
    },
    /// A layer or boot volume holds no erofs file system.
    #[error("the {what} {} has a bad superblock: it is no erofs file system", path.display())]
    Superblock {
        /// What the file is.
        what: String,
        /// The file.
        path: PathBuf,
    },
    /// The kernel is no ELF file for this machine.
    #[error("the guest kernel {} is no x86-64 ELF file (an uncompressed vmlinux is needed)", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
    },
    /// Made for another version of Casulo.
    #[error("{what} {found}, but this Casulo needs {wanted}; {hint}")]
    Version {
        /// What is too old or too new, up to its version.
        what: String,
        /// What is there.
        found: String,
        /// What is needed.
        wanted: String,
        /// What to do.
        hint: &'static str,
    },
}

fn known_images(names: &[String]) -> String {
    if names.is_empty() {
        format!("there are no images yet; {BUILD}")
    } else {
        format!("known images: {}", names.join(", "))
    }
}

const BUILD: &str = "`cargo xtask build` makes it, or set CASULO_HOME to a folder that has it";

/// Contents of `kernel.json`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct KernelInfo {
    /// Version, such as `6.12.48`.
    pub version: String,
    /// SHA-256 of `vmlinux`.
    pub sha256: String,
    /// Bytes of `vmlinux`.
    pub size: u64,
}

/// Contents of `agent.json`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct AgentInfo {
    /// Version of the agent protocol.
    pub protocol: u32,
    /// Version of the agent.
    pub version: String,
    /// SHA-256 of the boot volume.
    pub sha256: String,
    /// Bytes of the boot volume.
    pub size: u64,
}

/// An opened image.
#[derive(Debug)]
pub struct Image {
    /// SHA-256 of the manifest.
    pub digest: String,
    /// The manifest.
    pub manifest: Manifest,
    /// The layers' files, read-only, lowest first.
    pub(crate) layers: Vec<Candidate>,
}

/// A file whose size and magic are right and whose digest may still have to be checked.
#[derive(Debug)]
pub(crate) struct Candidate {
    what: String,
    path: PathBuf,
    file: File,
    sha256: String,
}

/// The files of a Casulo installation and the memory of which of them have been verified.
#[derive(Clone, Debug)]
pub struct Store {
    images: PathBuf,
    state: PathBuf,
}

/// An image's name and digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name.
    pub name: String,
    /// The digest it stands for.
    pub digest: String,
}

impl Store {
    /// A store over the folder of images and a folder for remembered state.
    pub fn new(images: impl Into<PathBuf>, state: impl Into<PathBuf>) -> Self {
        Self { images: images.into(), state: state.into() }
    }

    /// Names of all images, sorted.
    pub fn list(&self) -> Vec<Listed> {
        let Ok(entries) = std::fs::read_dir(self.images.join("names")) else { return Vec::new() };
        let mut all: Vec<Listed> = entries
            .flatten()
            .filter_map(|e| {
                let name = e.file_name().into_string().ok()?;
                Some(Listed { digest: self.resolve_name(&name)?, name })
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn resolve_name(&self, name: &str) -> Option<String> {
        let target = std::fs::read_link(self.images.join("names").join(name)).ok()?;
        let digest = target.file_name()?.to_str()?.to_owned();
        is_digest(&digest).then_some(digest)
    }

    /// Opens an image by name, digest, or the first 12 or more digits of a digest.
    ///
    /// # Errors
    /// There is no such image, or its manifest or a layer is missing, cut, damaged, or of another
    /// format.
    pub fn open(&self, name: &str) -> Result<Image, ImageError> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if name.is_empty() || name.len() > 128 || name.starts_with('.') || !name.bytes().all(plain)
        {
            return Err(ImageError::Name { name: name.chars().take(128).collect() });
        }
        let digest = self
            .resolve_name(name)
            .or_else(|| self.resolve_digest(name))
            .ok_or_else(|| self.unknown(name))?;
        let path = self.images.join(&digest).join(MANIFEST);
        let what = format!("manifest of image `{name}`");
        let bytes = read_json(&path, &what)?;
        let found = hex(&Sha256::digest(&bytes));
        if found != digest {
            return Err(ImageError::Digest { what, path, expected: digest, found });
        }
        let manifest = parse_manifest(&bytes, what, path)?;
        let layers = manifest
            .layers
            .iter()
            .enumerate()
            .map(|(i, layer)| {
                let what = format!("layer {} of image `{name}`", i.saturating_add(1));
                let path = self.images.join("layers").join(format!("{}.erofs", layer.sha256));
                let file = open_sized(&what, &path, layer.size)?;
                check_erofs(&what, &path, &file)?;
                Ok(Candidate { what, path, file, sha256: layer.sha256.clone() })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Image { digest, manifest, layers })
    }

    fn resolve_digest(&self, name: &str) -> Option<String> {
        if is_digest(name) {
            return self.images.join(name).join(MANIFEST).exists().then(|| name.to_owned());
        }
        if name.len() < 12 || !name.bytes().all(is_hex) {
            return None;
        }
        let mut found = std::fs::read_dir(&self.images).ok()?.flatten().filter_map(|e| {
            let digest = e.file_name().into_string().ok()?;
            (is_digest(&digest) && digest.starts_with(name)).then_some(digest)
        });
        let first = found.next()?;
        found.next().is_none().then_some(first)
    }

    fn unknown(&self, name: &str) -> ImageError {
        let known = self.list().into_iter().map(|l| l.name).collect();
        ImageError::Unknown { name: name.to_owned(), known }
    }

    /// Opens the guest kernel at `path`; `kernel.json` lies beside it.
    pub(crate) fn open_kernel(&self, path: &Path) -> Result<(KernelInfo, Candidate), ImageError> {
        let what = "guest kernel".to_owned();
        let json = path.with_file_name("kernel.json");
        let info: KernelInfo = parse(&json, "description of the guest kernel")?;
        check_digest_form(&info.sha256, &json)?;
        let file = open_sized(&what, path, info.size)?;
        let mut head = [0u8; 20];
        let elf = file.read_exact_at(&mut head, 0).is_ok()
            && head.starts_with(b"\x7fELF\x02\x01")
            && head.get(18..20) == Some(&[62, 0]);
        if !elf {
            return Err(ImageError::Elf { path: path.to_owned() });
        }
        Ok((info.clone(), Candidate { what, path: path.to_owned(), file, sha256: info.sha256 }))
    }

    /// Opens the agent's boot volume at `path`; `agent.json` lies beside it.
    pub(crate) fn open_agent(&self, path: &Path) -> Result<(AgentInfo, Candidate), ImageError> {
        let what = "agent's boot volume".to_owned();
        let json = path.with_file_name("agent.json");
        let info: AgentInfo = parse(&json, "description of the agent")?;
        check_digest_form(&info.sha256, &json)?;
        if info.protocol != agent::VERSION {
            return Err(ImageError::Version {
                what: "the guest agent speaks protocol".into(),
                found: info.protocol.to_string(),
                wanted: agent::VERSION.to_string(),
                hint: BUILD,
            });
        }
        let file = open_sized(&what, path, info.size)?;
        check_erofs(&what, path, &file)?;
        Ok((info.clone(), Candidate { what, path: path.to_owned(), file, sha256: info.sha256 }))
    }

    /// Whether the file was verified before and has not changed since.
    pub(crate) fn is_verified(&self, candidate: &Candidate) -> bool {
        let Ok(key) = state_key(&candidate.file) else { return false };
        std::fs::read_to_string(self.memory(candidate))
            .is_ok_and(|seen| seen.lines().any(|line| line == key))
    }

    /// Reads the whole file, compares its digest, and remembers that it matched. Takes seconds for
    /// a large file.
    pub(crate) fn verify(&self, candidate: &Candidate) -> Result<(), ImageError> {
        let read_error = |source| ImageError::Read {
            what: candidate.what.clone(),
            path: candidate.path.clone(),
            source,
        };
        let before = state_key(&candidate.file).map_err(read_error)?;
        let found = digest_of(&candidate.file).map_err(read_error)?;
        if found != candidate.sha256 {
            return Err(ImageError::Digest {
                what: candidate.what.clone(),
                path: candidate.path.clone(),
                expected: candidate.sha256.clone(),
                found,
            });
        }
        // Only a file that did not change while it was read is remembered. A store that cannot be
        // written costs time at the next start, nothing else.
        if state_key(&candidate.file).is_ok_and(|after| after == before) {
            let _ = self.remember(candidate, &before);
        }
        Ok(())
    }

    fn memory(&self, candidate: &Candidate) -> PathBuf {
        self.state.join("verified").join(&candidate.sha256)
    }

    fn remember(&self, candidate: &Candidate, key: &str) -> io::Result<()> {
        let path = self.memory(candidate);
        let folder = self.state.join("verified");
        std::fs::create_dir_all(&folder)?;
        let seen = std::fs::read_to_string(&path).unwrap_or_default();
        let kept = seen.lines().filter(|l| *l != key).take(MAX_REMEMBERED - 1);
        let text: String = std::iter::once(key).chain(kept).flat_map(|l| [l, "\n"]).collect();
        // Renamed into place, so that a reader never sees half of it.
        let temporary = folder.join(format!(".{}.{}", candidate.sha256, std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        io::Write::write_all(&mut options.open(&temporary)?, text.as_bytes())?;
        std::fs::rename(&temporary, &path).inspect_err(|_| {
            let _ = std::fs::remove_file(&temporary);
        })
    }
}

impl Candidate {
    /// The descriptor of the checked file.
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.file.into()
    }
}

fn parse_manifest(bytes: &[u8], what: String, path: PathBuf) -> Result<Manifest, ImageError> {
    /// The format is looked at first, so that a newer manifest is not called broken.
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let fail = |what: String, path: PathBuf, reason: String| {
        Err(ImageError::Manifest { what, path, reason })
    };
    let version = |what: &str, found: String, wanted: String| ImageError::Version {
        what: what.to_owned(),
        found,
        wanted,
        hint: "build the image again",
    };
    match serde_json::from_slice::<Head>(bytes) {
        Err(e) => return fail(what, path, e.to_string()),
        Ok(head) if head.format != FORMAT => {
            let what = format!("the {what} has format");
            return Err(version(&what, head.format.to_string(), FORMAT.to_string()));
        }
        Ok(_) => {}
    }
    let manifest: Manifest = match serde_json::from_slice(bytes) {
        Ok(manifest) => manifest,
        Err(e) => return fail(what, path, e.to_string()),
    };
    if manifest.agent_protocol != agent::VERSION {
        let found = manifest.agent_protocol.to_string();
        return Err(version("the image wants agent protocol", found, agent::VERSION.to_string()));
    }
    if manifest.architecture != "amd64" {
        return Err(version("the image is for", manifest.architecture, "amd64".into()));
    }
    if manifest.layers.is_empty() || manifest.layers.len() > MAX_LAYERS {
        let reason = format!("{} layers, but 1 to {MAX_LAYERS} are allowed", manifest.layers.len());
        return fail(what, path, reason);
    }
    if let Some(layer) = manifest.layers.iter().find(|l| !is_digest(&l.sha256)) {
        let reason = format!("`{}` is no SHA-256", layer.sha256.escape_debug());
        return fail(what, path, reason);
    }
    Ok(manifest)
}

/// Whether a kernel of version `have` satisfies `min` (`major.minor`).
pub(crate) fn check_kernel(min: &str, have: &str) -> Result<(), ImageError> {
    let pair = |text: &str| {
        let mut parts = text.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    };
    match (pair(min), pair(have)) {
        (Some(min), Some(have)) if have >= min => Ok(()),
        _ => Err(ImageError::Version {
            what: "the guest kernel has version".into(),
            found: have.to_owned(),
            wanted: format!("{min} or newer for this image"),
            hint: "build the kernel again",
        }),
    }
}

fn read_json(path: &Path, what: &str) -> Result<Vec<u8>, ImageError> {
    let file = open(what, path)?;
    let mut bytes = Vec::new();
    file.take(MAX_JSON.saturating_add(1)).read_to_end(&mut bytes).map_err(|source| {
        ImageError::Read { what: what.to_owned(), path: path.to_owned(), source }
    })?;
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_JSON {
        return Err(ImageError::Manifest {
            what: what.to_owned(),
            path: path.to_owned(),
            reason: format!("it is longer than {MAX_JSON} bytes"),
        });
    }
    Ok(bytes)
}

fn parse<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(&read_json(path, what)?).map_err(|e| ImageError::Manifest {
        what: what.to_owned(),
        path: path.to_owned(),
        reason: e.to_string(),
    })
}

fn open(what: &str, path: &Path) -> Result<File, ImageError> {
    match File::open(path) {
        Ok(file) => Ok(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(ImageError::Missing { what: what.to_owned(), path: path.to_owned(), hint: BUILD })
        }
        Err(source) => {
            Err(ImageError::Read { what: what.to_owned(), path: path.to_owned(), source })
        }
    }
}

fn open_sized(what: &str, path: &Path, size: u64) -> Result<File, ImageError> {
    let file = open(what, path)?;
    let what = what.to_owned();
    let path = path.to_owned();
    let metadata = match file.metadata() {
        Ok(metadata) if metadata.is_file() => metadata,
        Ok(_) => {
            let source = io::Error::other("it is no regular file");
            return Err(ImageError::Read { what, path, source });
        }
        Err(source) => return Err(ImageError::Read { what, path, source }),
    };
    let (expected, found) = (size, metadata.len());
    match found.cmp(&expected) {
        std::cmp::Ordering::Less => Err(ImageError::Truncated { what, path, expected, found }),
        std::cmp::Ordering::Greater => Err(ImageError::TooLong { what, path, expected, found }),
        std::cmp::Ordering::Equal => Ok(file),
    }
}

fn check_erofs(what: &str, path: &Path, file: &File) -> Result<(), ImageError> {
    let mut magic = [0u8; 4];
    match file.read_exact_at(&mut magic, EROFS_MAGIC_AT) {
        Ok(()) if u32::from_le_bytes(magic) == EROFS_MAGIC => Ok(()),
        _ => Err(ImageError::Superblock { what: what.to_owned(), path: path.to_owned() }),
    }
}

fn check_digest_form(digest: &str, path: &Path) -> Result<(), ImageError> {
    if is_digest(digest) {
        return Ok(());
    }
    Err(ImageError::Manifest {
        what: "description".to_owned(),
        path: path.to_owned(),
        reason: format!("`{}` is no SHA-256", digest.escape_debug()),
    })
}

/// What must stay the same for a file to count as unchanged. ctime cannot be set by a program.
fn state_key(file: &File) -> io::Result<String> {
    let m = file.metadata()?;
    Ok(format!(
        "{} {} {}.{:09} {}.{:09}",
        m.ino(),
        m.len(),
        m.mtime(),
        m.mtime_nsec(),
        m.ctime(),
        m.ctime_nsec()
    ))
}

/// SHA-256 of a whole file, in lower-case hex. Does not move the file's offset.
pub(crate) fn digest_of(file: &File) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut at = 0u64;
    loop {
        let n = match file.read_at(&mut buffer, at) {
            Ok(0) => return Ok(hex(&hasher.finalize())),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        hasher.update(buffer.get(..n).unwrap_or_default());
        at = at.saturating_add(u64::try_from(n).unwrap_or(u64::MAX));
    }
}

fn is_hex(b: u8) -> bool {
    b.is_ascii_digit() || (b'a'..=b'f').contains(&b)
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(is_hex)
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, b| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{b:02x}");
        text
    })
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
