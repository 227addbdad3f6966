//! The options that `casulo run` and `casulo mcp` share, and what they mean.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use casulo_protocol::spec::{
    DEFAULT_MAX_PROCESSES, DEFAULT_MEMORY_MIB, OutputLinks, SandboxSpec, ShareSpec,
};
use clap::{Args, ValueEnum};

/// Options of the microVM.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Options of the microVM")]
pub(crate) struct SandboxOptions {
    /// Image, by name or digest (`casulo image list`)
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub(crate) image: String,
    /// Number of virtual CPUs, 1 to 32
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) cpus: u8,
    /// Memory in MiB
    #[arg(long, default_value_t = DEFAULT_MEMORY_MIB, value_name = "MIB")]
    pub(crate) memory: u32,
    /// File or folder to show read-only under /workspace/input; a file keeps its name
    #[arg(long, value_name = "PATH")]
    pub(crate) input: Option<PathBuf>,
    /// Folder to show writable at /workspace/output, made if it does not exist; without, output is
    /// lost
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// Most bytes that may be added to the output folder; K, M, G for KiB, MiB, GiB
    #[arg(long, default_value = "1G", value_parser = bytes, value_name = "BYTES")]
    pub(crate) output_limit: u64,
    /// Most files, folders and links that may be added to the output folder
    #[arg(long, value_name = "N")]
    pub(crate) output_files: Option<u64>,
    /// Look again at what the host changes in read-only shares while the task runs; slower
    #[arg(long)]
    pub(crate) input_live: bool,
    /// Show and keep extended attributes (user.*) of files in shares
    #[arg(long)]
    pub(crate) share_xattr: bool,
    /// Which symbolic links may stay in the output folder and other writable shares; `inside`: those
    /// that do not lead out of it
    #[arg(long, value_enum, default_value_t = Links::Inside, value_name = "WHICH")]
    pub(crate) output_links: Links,
    /// Release only regular files that match into the output folder, which the guest then does not
    /// see; `*.csv`, `plots/**`; may be repeated
    #[arg(long, value_name = "GLOB", requires = "output")]
    pub(crate) artifact: Vec<String>,
    /// One more file or folder and its place in the guest, read-only unless `:rw`; may be repeated
    #[arg(long, value_parser = share, value_name = "HOST:GUEST[:ro|rw]")]
    pub(crate) share: Vec<ShareSpec>,
    /// Share a folder also when it holds credentials
    #[arg(long)]
    pub(crate) share_sensitive: bool,
    /// Put the writable layer on a disk of this size in MiB instead of in the guest's memory
    #[arg(long, value_name = "MIB")]
    pub(crate) scratch: Option<u32>,
    /// Most processes in the guest
    #[arg(long, default_value_t = DEFAULT_MAX_PROCESSES, value_name = "N")]
    pub(crate) max_processes: u32,
    /// Most seconds until the guest is ready [default: 10, emulated 120]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) boot_timeout: Option<u32>,
    /// Boot instead of using a template
    #[arg(long)]
    pub(crate) cold: bool,
    /// What the microVM runs on
    #[arg(long, value_enum, default_value_t = Host::Auto)]
    pub(crate) host: Host,
}

/// What a microVM runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Host {
    /// KVM if it works here, else the emulated host
    Auto,
    /// This machine's KVM
    Native,
    /// An emulated machine: slow, for development, no boundary against hostile code
    Emulated,
}

/// Which symbolic links may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Links {
    /// Those that stay inside their share
    Inside,
    /// All, wherever they lead
    All,
    /// None
    None,
}

impl SandboxOptions {
    /// The request that these options make.
    pub(crate) fn spec(&self) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        spec.image.clone_from(&self.image);
        spec.cpus = self.cpus;
        spec.memory_mib = self.memory;
        spec.input.clone_from(&self.input);
        spec.output.clone_from(&self.output);
        spec.output_limit = self.output_limit;
        spec.output_files = self.output_files;
        spec.input_live = self.input_live;
        spec.share_xattr = self.share_xattr;
        spec.output_links = match self.output_links {
            Links::Inside => OutputLinks::Inside,
            Links::All => OutputLinks::All,
            Links::None => OutputLinks::None,
        };
        spec.artifacts.clone_from(&self.artifact);
        spec.shares.clone_from(&self.share);
        spec.share_sensitive = self.share_sensitive;
        spec.scratch_mib = self.scratch;
        spec.max_processes = self.max_processes;
        spec.boot_timeout_seconds = self.boot_timeout;
        spec.cold = self.cold;
        spec
    }
}

/// What a command finds around it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Options of the command")]
pub(crate) struct EnvironmentOptions {
    /// Environment variable for the command; without a value, the one of the caller; may be repeated
    #[arg(long, value_name = "K[=V]")]
    pub(crate) env: Vec<String>,
    /// File with one K[=V] in each line; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) env_file: Vec<PathBuf>,
    /// User in the guest, by name or number [default: the image's, else 1000]
    #[arg(long, value_name = "NAME|UID")]
    pub(crate) user: Option<String>,
    /// Working folder in the guest [default: the image's, else /workspace/output]
    #[arg(long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
}

impl EnvironmentOptions {
    /// The environment: files first, in order, then `--env`.
    pub(crate) fn environment(&self) -> Result<BTreeMap<String, String>, String> {
        let mut env = BTreeMap::new();
        for file in &self.env_file {
            let text = std::fs::read_to_string(file)
                .map_err(|e| format!("cannot read the environment file {}: {e}", file.display()))?;
            for (n, line) in text.lines().enumerate() {
                let line = line.trim();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                let place = format!("{}, line {}", file.display(), n.saturating_add(1));
                variable(line, &place, &mut env)?;
            }
        }
        for entry in &self.env {
            variable(entry, "--env", &mut env)?;
        }
        Ok(env)
    }
}

fn variable(entry: &str, place: &str, env: &mut BTreeMap<String, String>) -> Result<(), String> {
    let (name, value) = match entry.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (entry, None),
    };
    if name.is_empty() || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(format!("{place}: `{}` is no K or K=V", entry.escape_debug()));
    }
    let value = match value {
        Some(value) => value,
        None => match std::env::var(name) {
            Ok(value) => value,
            // As with other tools: what the caller does not have is not passed on.
            Err(std::env::VarError::NotPresent) => return Ok(()),
            Err(e) => return Err(format!("{place}: {name}: {e}")),
        },
    };
    env.insert(name.to_owned(), value);
    Ok(())
}

/// `123`, `64K`, `10M`, `2G`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (text.get(..at).unwrap_or_default(), 10),
        Some((at, 'm' | 'M')) => (text.get(..at).unwrap_or_default(), 20),
        Some((at, 'g' | 'G')) => (text.get(..at).unwrap_or_default(), 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "use a number, or one with K, M or G")?;
    number.checked_mul(1 << shift).ok_or_else(|| "it is too large".to_owned())
}

/// Seconds, with a fraction if need be, as milliseconds.
pub(crate) fn milliseconds(text: &str) -> Result<u64, String> {
    let seconds: f64 = text.parse().map_err(|_| "use a number of seconds")?;
    let duration = std::time::Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())?;
    match u64::try_from(duration.as_millis()) {
        Ok(0) => Err("it must be at least 0.001".to_owned()),
        Ok(ms) if ms <= 1000 * 86_400 * 366 => Ok(ms),
        _ => Err("it is longer than a year".to_owned()),
    }
}

fn share(text: &str) -> Result<ShareSpec, String> {
    let (rest, writable) = match text.rsplit_once(':') {
        Some((rest, "ro")) => (rest, false),
        Some((rest, "rw")) => (rest, true),
        _ => (text, false),
    };
    match rest.rsplit_once(':') {
        Some((host, guest)) if !host.is_empty() && !guest.is_empty() => {
            Ok(ShareSpec { host: Path::new(host).to_owned(), guest: guest.to_owned(), writable })
        }
        _ => Err("use HOST:GUEST, HOST:GUEST:ro or HOST:GUEST:rw".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes("5"), Ok(5));
        assert_eq!(bytes("2K"), Ok(2048));
        assert_eq!(bytes("1G"), Ok(1 << 30));
        for bad in ["", "K", "1T", "-1", "99999999999G", "1é"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(milliseconds("2"), Ok(2000));
        assert_eq!(milliseconds("0.25"), Ok(250));
        for bad in ["0", "-1", "nan", "inf", "x", "1e300", "0.0001"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares() {
        let s = share("/a:b:/c:rw").unwrap();
        assert_eq!((s.host, s.guest.as_str(), s.writable), ("/a:b".into(), "/c", true));
        assert!(!share("/a:/c").unwrap().writable);
        for bad in ["", "/a", ":/c", "/a:", "/a:rw"] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn environments() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("env");
        std::fs::write(&file, "# comment\n\nA=1\nB=x=y \nPATH\n").unwrap();
        let options = EnvironmentOptions {
            env: vec!["A=2".into(), "NO_SUCH_VARIABLE".into(), "E=".into()],
            env_file: vec![file],
            ..EnvironmentOptions::default()
        };
        let env = options.environment().unwrap();
        assert_eq!(env.get("A").map(String::as_str), Some("2"));
        assert_eq!(env.get("B").map(String::as_str), Some("x=y"));
        assert_eq!(env.get("E").map(String::as_str), Some(""));
        assert_eq!(env.get("PATH").cloned(), std::env::var("PATH").ok());
        assert_eq!(env.len(), 4);
        let bad = EnvironmentOptions { env: vec!["=x".into()], ..EnvironmentOptions::default() };
        assert!(bad.environment().is_err());
    }
}
