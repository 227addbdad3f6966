//! What all benches do: copy the programs to a folder of their own, have the measurement run on a host
//! with KVM, real or emulated, and gather its lines.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::{build, paths};

/// How long a measurement may print nothing before it is given up.
const PATIENCE: Duration = Duration::from_secs(600);

/// Options of every bench.
#[derive(clap::Args)]
pub(super) struct Common {
    /// Print everything that was measured as JSON, instead of tables
    #[arg(long)]
    pub(super) json: bool,
    /// Measure what is there, without building anything
    #[arg(long)]
    no_build: bool,
}

impl Common {
    /// Builds what is to be measured, and makes it ready.
    ///
    /// # Errors
    /// It cannot be built or copied.
    pub(super) fn stage(&self) -> Result<Stage> {
        if !self.no_build {
            build::everything()?;
        }
        Stage::new()
    }
}

/// What a nanosecond of a measurement is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// One instruction of a single emulated processor.
    Counted,
    /// Of this machine, while it emulates.
    Emulated,
    /// Of this machine.
    Real,
}

impl Clock {
    /// A second, and what it is.
    pub(super) fn second(self) -> (&'static str, &'static str) {
        match self {
            Self::Counted => ("vs", "a vs is 1,000,000,000 instructions of the whole host"),
            Self::Emulated => ("s", "wall-clock time of an emulated host with two processors"),
            Self::Real => ("s", "wall-clock time"),
        }
    }
}

/// A folder with copies of the programs, so that a build meanwhile changes nothing.
pub(super) struct Stage {
    /// What is kept from one bench to the next, such as rivals.
    pub(super) cache: PathBuf,
    /// Whether KVM has to be emulated.
    pub(super) emulated: bool,
    work: TempDir,
}

impl Stage {
    pub(super) fn new() -> Result<Self> {
        let cache = paths::cache()?.join("bench");
        fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let work = tempfile::tempdir_in(&cache)?;
        for program in ["casulo", "casulo-vmm"] {
            let from = paths::binaries().join(program);
            fs::copy(&from, work.path().join(program))
                .with_context(|| format!("cannot copy {}", from.display()))?;
        }
        fs::copy(std::env::current_exe()?, work.path().join("xtask"))?;
        Ok(Self { cache, emulated: !build::kvm_works(), work })
    }

    /// The folder: `casulo`, `casulo-vmm`, `xtask`, and what the bench adds.
    pub(super) fn folder(&self) -> &Path {
        self.work.path()
    }

    /// What time it will be, if instructions are `counted` where KVM has to be emulated.
    pub(super) fn clock(&self, counted: bool) -> Clock {
        match (self.emulated, counted) {
            (true, true) => Clock::Counted,
            (true, false) => Clock::Emulated,
            (false, _) => Clock::Real,
        }
    }

    /// `xtask bench INSIDE` with this plan, in an emulated host of `memory_mib` if there has to be one.
    pub(super) fn command(
        &self,
        inside: &str,
        plan: &impl Serialize,
        clock: Clock,
        memory_mib: u32,
    ) -> Result<Command> {
        let file = self.folder().join("plan.json");
        fs::write(&file, serde_json::to_vec(plan)?)?;
        let me = self.folder().join("xtask");
        let mut command =
            Command::new(if self.emulated { self.folder().join("casulo") } else { me.clone() });
        if self.emulated {
            eprintln!("starting an emulated host; this takes some minutes");
            command.arg("emulated-host");
            if clock == Clock::Counted {
                command.arg("--icount");
            }
            command.args(["--memory", &memory_mib.to_string(), "--"]).arg(&me);
            command.env("TMPDIR", "/dev/shm");
        }
        command.args(["bench", inside]).arg(&file).current_dir(&self.cache);
        Ok(command)
    }
}

/// Runs a measurement, and calls `line` with each line that it prints. Returns why it stopped early, if it
/// did.
pub(super) fn gather(
    command: &mut Command,
    mut line: impl FnMut(&str) -> Result<()>,
) -> Result<Option<String>> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    let (tell, told) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    let failure = loop {
        match told.recv_timeout(PATIENCE) {
            Ok(text) => line(&text).context("the report is broken")?,
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.wait()?;
                break (!status.success()).then(|| format!("the measurement ended: {status}"));
            }
            Err(RecvTimeoutError::Timeout) => {
                // `casulo emulated-host` passes the first on, and heeds the second.
                let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                for pid in pid.into_iter().cycle().take(2) {
                    let _ = rustix::process::kill_process(pid, Signal::TERM);
                }
                child.wait()?;
                break Some(format!("nothing came for {} minutes", PATIENCE.as_secs() / 60));
            }
        }
    };
    // What it reads from has ended.
    let _ = reader.join();
    Ok(failure)
}

/// Runs a measurement that is of use only as a whole: each line is one figure, which `tell` sees at once.
pub(super) fn gather_all<T: DeserializeOwned>(
    command: &mut Command,
    mut tell: impl FnMut(&T),
) -> Result<Vec<T>> {
    let mut figures = Vec::new();
    let failure = gather(command, |line| {
        let figure = serde_json::from_str(line)?;
        tell(&figure);
        figures.push(figure);
        Ok(())
    })?;
    match failure {
        Some(reason) => bail!("{reason}"),
        None => Ok(figures),
    }
}

/// Prints a report: what was measured as JSON, or a text about it.
pub(super) fn print<T: Serialize>(
    report: &T,
    json: bool,
    describe: impl FnOnce() -> Result<String>,
) -> Result<()> {
    let text = if json { serde_json::to_string_pretty(report)? + "\n" } else { describe()? };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_come_one_by_one_and_a_failure_says_how_it_ended() {
        let mut lines = Vec::new();
        let mut keep = |line: &str| {
            lines.push(line.to_owned());
            Ok(())
        };
        assert_eq!(gather(&mut shell("echo a; echo b"), &mut keep).unwrap(), None);
        let failure = gather(&mut shell("echo c; exit 3"), &mut keep).unwrap().unwrap();
        assert!(failure.contains("exit status: 3"), "{failure}");
        assert_eq!(lines, ["a", "b", "c"]);
    }

    #[test]
    fn a_measurement_that_fails_half_way_gives_no_figures() {
        let sum = |script: &str| {
            gather_all::<u32>(&mut shell(script), |_| ()).map(|all| all.iter().sum::<u32>())
        };
        assert_eq!(sum("echo 1; echo 2").unwrap(), 3);
        assert!(sum("echo 1; exit 3").unwrap_err().to_string().contains("exit status: 3"));
    }

    #[test]
    fn a_line_that_is_no_report_is_an_error() {
        let refuse = |_: &str| anyhow::bail!("what is this?");
        assert!(gather(&mut shell("echo a"), refuse).is_err());
    }
}
