//! Fuzzing: random programs of a hostile guest against every parser of its bytes (docs/fuzzing.md).
//!
//! The targets are in `fuzz/`, a workspace of its own. They are built once with cargo-fuzz, on the stable
//! toolchain, and then run directly. Inputs that reach something new go to the cache; the checkout's own
//! corpus changes only with `--keep`.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use crate::{paths, sh};

/// Version of cargo-fuzz.
const CARGO_FUZZ: &str = "0.13.2";
/// Most memory of a target in MiB. Its own limit on the growth of one input is much lower.
const MEMORY: u32 = 512;
/// Most seconds for one input.
const TIMEOUT: u32 = 20;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Names of targets; none: all
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Targets to run at the same time; default: one for each CPU
    #[arg(long)]
    jobs: Option<usize>,
    /// Afterwards add to the checkout's corpus what reached new code, as few and small inputs as possible
    #[arg(long)]
    keep: bool,
    /// Run one input, such as that of a crash, and show all output
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seconds", "keep", "jobs"])]
    input: Option<PathBuf>,
}

impl Args {
    /// All targets for so many seconds.
    pub(crate) fn all(seconds: u32) -> Self {
        Self { targets: Vec::new(), seconds, jobs: None, keep: false, input: None }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let all = targets()?;
    if let Some(unknown) = args.targets.iter().find(|name| !all.contains(name)) {
        bail!("there is no fuzz target {unknown}; the targets are {}", all.join(", "));
    }
    let chosen = if args.targets.is_empty() { all } else { args.targets.clone() };
    build(&chosen)?;
    if let Some(input) = &args.input {
        let [target] = chosen.as_slice() else { bail!("name the one target of this input") };
        return sh::run(command(target)?.arg(input));
    }

    let jobs =
        args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into));
    let queue = Mutex::new(VecDeque::from(chosen.clone()));
    let failures = Mutex::new(Vec::new());
    let lock = |failure| failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                while let Some(target) = next() {
                    if let Err(error) = fuzz(&target, args.seconds) {
                        eprintln!("  {target}: {error:#}");
                        lock(target);
                    }
                }
            });
        }
    });
    let failed = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    if !failed.is_empty() {
        bail!("fuzzing found something in: {}", failed.join(", "));
    }
    if args.keep {
        for target in &chosen {
            keep(target)?;
        }
    }
    Ok(())
}

/// The `fuzz` folder of the checkout.
fn folder() -> PathBuf {
    paths::root().join("fuzz")
}

/// Names of all targets, from the manifest.
fn targets() -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Target {
        name: String,
    }
    #[derive(serde::Deserialize)]
    struct Manifest {
        bin: Vec<Target>,
    }
    let path = folder().join("Cargo.toml");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: Manifest = toml::from_str(&text).context("fuzz/Cargo.toml")?;
    Ok(manifest.bin.into_iter().map(|target| target.name).collect())
}

/// Builds targets with coverage counters, debug assertions and overflow checks.
fn build(targets: &[String]) -> Result<()> {
    sh::need(&[("g++", "g++")])?;
    let path = cargo_fuzz()?;
    let mut command = sh::cargo();
    command.current_dir(paths::root()).env("PATH", path);
    // No sanitizer: those need a nightly toolchain.
    command.args(["fuzz", "build", "--sanitizer", "none"]);
    if let [target] = targets {
        command.arg(target);
    }
    sh::run(&mut command)
}

/// A `PATH` with cargo-fuzz in it; it is compiled if there is none.
fn cargo_fuzz() -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if sh::has("cargo-fuzz") {
        return Ok(path);
    }
    let folder = paths::cache()?.join(format!("cargo-fuzz-{CARGO_FUZZ}"));
    let programs = folder.join("bin");
    if !programs.join("cargo-fuzz").exists() {
        eprintln!("compiling cargo-fuzz");
        let mut install = sh::cargo();
        install.args(["install", "--quiet", "--locked", "--root"]).arg(&folder);
        // Outside of the checkout, whose configuration is for static binaries.
        install.args(["cargo-fuzz", "--version", CARGO_FUZZ]).current_dir(std::env::temp_dir());
        sh::run(&mut install).context("cannot get cargo-fuzz")?;
    }
    std::env::join_paths(std::iter::once(programs).chain(std::env::split_paths(&path)))
        .context("PATH cannot be extended")
}

/// The command that runs a target, with limits.
fn command(target: &str) -> Result<Command> {
    let built = folder().join("target/x86_64-unknown-linux-gnu/release").join(target);
    let artifacts = folder().join("artifacts").join(target);
    fs::create_dir_all(&artifacts)
        .with_context(|| format!("cannot make {}", artifacts.display()))?;
    let mut command = Command::new(built);
    command.current_dir(folder());
    if Path::new("/dev/shm").is_dir() {
        // Shares of the fs target: a file system with everything, in memory.
        command.env("TMPDIR", "/dev/shm");
    }
    command.arg(format!("-rss_limit_mb={MEMORY}")).arg(format!("-timeout={TIMEOUT}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    Ok(command)
}

/// Where the inputs of a target are that the checkout does not have.
fn grown(target: &str) -> Result<PathBuf> {
    let grown = paths::cache()?.join("fuzz").join(target);
    fs::create_dir_all(&grown).with_context(|| format!("cannot make {}", grown.display()))?;
    Ok(grown)
}

/// The checkout's inputs of a target: a line of hex for each, so that a change of them can be read.
fn corpus(target: &str) -> PathBuf {
    folder().join("corpus").join(format!("{target}.hex"))
}

/// The checkout's inputs as files, as the target wants them; none for a new target.
fn unpacked(target: &str) -> Result<tempfile::TempDir> {
    let path = corpus(target);
    let text = if path.exists() { fs::read_to_string(&path) } else { Ok(String::new()) };
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    let folder = tempfile::tempdir()?;
    for (number, line) in text.lines().enumerate() {
        let input = from_hex(line)
            .with_context(|| format!("{}: line {} is no hex", path.display(), number + 1))?;
        fs::write(folder.path().join(number.to_string()), input)?;
    }
    Ok(folder)
}

fn from_hex(line: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u32>> = line.chars().map(|digit| digit.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
    digits
        .chunks_exact(2)
        .map(|pair| u8::try_from(pair.iter().fold(0, |byte, digit| byte * 16 + digit)).ok())
        .collect()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs a target for a time and prints a line about it.
fn fuzz(target: &str, seconds: u32) -> Result<()> {
    let mut command = command(target)?;
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    // Programs of a few dozen steps; the shortest first, but not for long.
    command.args(["-max_len=1024", "-len_control=10"]);
    let unpacked = unpacked(target)?;
    command.arg(grown(target)?).arg(unpacked.path());
    let out = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start the fuzz target {target}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    let seen = Seen::parse(&said);
    let crash = said.lines().find_map(|line| line.split_once("Test unit written to "));
    if let Some((_, path)) = crash {
        bail!(
            "{}\n    input: {path}\n    again: cargo xtask fuzz {target} --input {path}",
            reason(&said)
        );
    }
    if !out.status.success() {
        bail!("ended with {}\n{}", out.status, tail(&said));
    }
    if seen.executions == 0 {
        bail!("ran no input\n{}", tail(&said));
    }
    eprintln!(
        "  {target:<10} {:>9} inputs in {seconds} s, {:>5} edges, {:>6} features, nothing found",
        seen.executions, seen.edges, seen.features
    );
    Ok(())
}

fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    lines.get(lines.len().saturating_sub(15)..).unwrap_or_default().join("\n")
}

/// What a crash says of itself: the panic's message, or libFuzzer's verdict.
fn reason(said: &str) -> String {
    let mut lines = said.lines();
    if let Some(place) =
        lines.find(|line| line.starts_with("thread '") && line.contains("panicked"))
    {
        return format!("{place} {}", lines.next().unwrap_or_default());
    }
    let verdict = said
        .lines()
        .find(|line| line.starts_with("memory allocation of") || line.contains("ERROR: libFuzzer"));
    verdict.map_or_else(|| tail(said), str::to_owned)
}

/// libFuzzer's figures.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    executions: u64,
    edges: u64,
    features: u64,
}

impl Seen {
    fn parse(said: &str) -> Self {
        let number = |line: &str, name: &str| {
            let rest = line.split_once(name)?.1.trim_start();
            rest.split_whitespace().next()?.parse().ok()
        };
        let last = |name: &str| said.lines().rev().find_map(|line| number(line, name));
        Self {
            executions: last("stat::number_of_executed_units:").unwrap_or(0),
            edges: last(" cov: ").unwrap_or(0),
            features: last(" ft: ").unwrap_or(0),
        }
    }
}

/// Replaces the checkout's corpus by the fewest inputs that reach the same code, new ones included.
fn keep(target: &str) -> Result<()> {
    let (old, new) = (unpacked(target)?, tempfile::tempdir()?);
    let mut command = command(target)?;
    // Edges, not how often each was taken: a tenth of the inputs.
    command.args(["-merge=1", "-use_counters=0", "-max_len=1024"]);
    command.arg(new.path()).arg(old.path()).arg(grown(target)?);
    sh::output(&mut command).with_context(|| format!("cannot minimise the corpus of {target}"))?;
    let mut lines = Vec::new();
    for entry in fs::read_dir(new.path())? {
        lines.push(to_hex(&fs::read(entry?.path())?));
    }
    // The shortest first, as the target runs them.
    lines.sort_by_key(|line| (line.len(), line.clone()));
    let path = corpus(target);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("  {target:<10} {} inputs in {}", lines.len(), path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_the_last_that_the_target_says() {
        let said = "#2\tINITED cov: 10 ft: 11 corp: 1/1b\n\
                    #9\tNEW    cov: 300 ft: 1234 corp: 2/20b lim: 4\n\
                    stat::number_of_executed_units: 77\n";
        assert_eq!(Seen::parse(said), Seen { executions: 77, edges: 300, features: 1234 });
        assert_eq!(Seen::parse("cannot start"), Seen::default());
    }

    #[test]
    fn a_crash_is_told_by_its_panic_or_by_the_verdict() {
        let memory =
            "x\nmemory allocation of 9 bytes failed\n==1== ERROR: libFuzzer: deadly signal";
        assert_eq!(reason(memory), "memory allocation of 9 bytes failed");
        let panic = "noise\nthread '<unnamed>' (7) panicked at a.rs:1:2:\nthe worker spins\nmore";
        assert!(reason(panic).ends_with("a.rs:1:2: the worker spins"));
        let verdict = "==1== ERROR: libFuzzer: timeout after 20 seconds\nstack";
        assert_eq!(reason(verdict), "==1== ERROR: libFuzzer: timeout after 20 seconds");
    }

    #[test]
    fn inputs_survive_the_corpus_file() {
        assert_eq!(from_hex(&to_hex(&[0, 9, 0xa0, 0xff])), Some(vec![0, 9, 0xa0, 0xff]));
        assert_eq!(from_hex(""), Some(Vec::new()));
        assert_eq!(from_hex("abc"), None);
        assert_eq!(from_hex("zz"), None);
    }

    #[test]
    fn every_target_has_its_source_and_a_corpus() {
        let targets = targets().unwrap();
        assert!(targets.contains(&"transport".to_owned()));
        for target in targets {
            let source = folder().join("fuzz_targets").join(format!("{target}.rs"));
            assert!(source.exists(), "{}", source.display());
            let inputs = unpacked(&target).unwrap();
            assert!(fs::read_dir(inputs.path()).unwrap().count() > 10, "{target}");
        }
    }
}
