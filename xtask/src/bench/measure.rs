//! One run of one program: when it gave its result, when it ended, when all it started was gone.
//!
//! This process adopts whatever outlives its parent (a VMM that nobody waits for), so that its page
//! faults are counted and its end is seen.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, WaitOptions};
use serde::{Deserialize, Serialize};

/// How long one run may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// What one run took, in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Run {
    /// Until the expected output was read; until the end where none is expected.
    pub(super) result: u64,
    /// Until the process had ended.
    pub(super) exit: u64,
    /// Until everything that it had started had ended.
    pub(super) gone: u64,
    /// Minor and major page faults of it and of everything that it started.
    pub(super) faults: u64,
}

/// Starts programs and waits for them.
pub(super) struct Measure {
    adopts: bool,
}

impl Measure {
    /// Makes this process the parent of everything that outlives its own parent. Only for a process
    /// that starts nothing in another way: it waits for whatever ends.
    pub(super) fn adopting() -> Result<Self> {
        let me = rustix::process::getpid();
        rustix::process::set_child_subreaper(Some(me)).context("cannot adopt orphans")?;
        Ok(Self { adopts: true })
    }

    /// Runs a command once. With `marker`, the result is there when that was written to stdout.
    pub(super) fn once(
        &self,
        command: &mut Command,
        marker: Option<&str>,
        errors: &Path,
    ) -> Result<Run> {
        let stderr = File::create(errors)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).process_group(0);
        let (tell, told) = mpsc::channel::<Option<Pid>>();
        let guard = std::thread::spawn(move || watch(&told));
        let before = faults()?;
        let begin = Instant::now();
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let _ = tell.send(pid);
        let mut stdout = child.stdout.take().context("no standard output")?;
        let found = read_until(&mut stdout, marker);
        let result = begin.elapsed();
        let status = child.wait()?;
        let exit = begin.elapsed();
        drop(tell);
        let orphans = self.orphans_end(begin);
        let gone = begin.elapsed();
        // It ends when it hears no more, and has nothing to say.
        let timed_out = guard.join().unwrap_or(false);
        orphans?;
        let seen = found?;
        let failure = if timed_out {
            Some(format!("did not end within {} s", DEADLINE.as_secs()))
        } else if seen.is_some() {
            Some("ended without the expected output".to_owned())
        } else {
            (!status.success()).then(|| status.to_string())
        };
        if let Some(failure) = failure {
            bail!("{failure}{}", words(seen.as_deref().unwrap_or_default(), errors));
        }
        let nanoseconds = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Ok(Run {
            result: nanoseconds(if marker.is_some() { result } else { exit }),
            exit: nanoseconds(exit),
            gone: nanoseconds(gone),
            faults: faults()?.saturating_sub(before),
        })
    }

    /// Starts a command whose guest stays, does something when the marker has come, and ends it.
    pub(super) fn hold(
        &self,
        command: &mut Command,
        marker: &str,
        errors: &Path,
        what: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let stderr = File::create(errors)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        let begin = Instant::now();
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut stdout = child.stdout.take().context("no standard output")?;
        let seen = read_until(&mut stdout, Some(marker))?;
        let done = if seen.is_none() { what() } else { Ok(()) };
        let _ = child.kill();
        child.wait()?;
        self.orphans_end(begin)?;
        if let Some(seen) = seen {
            bail!("ended without the expected output{}", words(&seen, errors));
        }
        done
    }

    /// Waits until all that was adopted has ended.
    fn orphans_end(&self, begin: Instant) -> Result<()> {
        if !self.adopts {
            return Ok(());
        }
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Err(rustix::io::Errno::CHILD) => return Ok(()),
                Ok(Some(_)) => {}
                Ok(None) => {
                    ensure!(begin.elapsed() < DEADLINE, "left a process behind that does not end");
                    // Short beside what is measured, and leaves a single processor to the others.
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => return Err(error).context("cannot wait for orphans"),
            }
        }
    }
}

/// Kills the command's process group when nothing is heard for too long; gives whether it did.
fn watch(told: &mpsc::Receiver<Option<Pid>>) -> bool {
    let Ok(Some(pid)) = told.recv() else { return false };
    if told.recv_timeout(DEADLINE) == Err(RecvTimeoutError::Timeout) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        return true;
    }
    false
}

/// Reads until the marker has come; without it, or when it does not come, until the end. Gives what
/// came instead of the marker.
fn read_until(from: &mut impl Read, marker: Option<&str>) -> Result<Option<Vec<u8>>> {
    let mut seen = Vec::new();
    let mut buffer = [0u8; 4096];
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return Ok(marker.is_some().then_some(seen));
        }
        seen.extend_from_slice(buffer.get(..n).unwrap_or_default());
        let Some(marker) = marker else { continue };
        if seen.windows(marker.len()).any(|window| window == marker.as_bytes()) {
            return Ok(None);
        }
    }
}

/// What the program said, in an error message: the last lines of both its outputs.
fn words(stdout: &[u8], errors: &Path) -> String {
    let stderr = fs::read(errors).unwrap_or_default();
    let mut text = String::new();
    for bytes in [stdout, &stderr] {
        let said = String::from_utf8_lossy(bytes);
        let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        for line in lines.get(lines.len().saturating_sub(3)..).unwrap_or_default() {
            text.push_str(": ");
            text.push_str(line);
        }
    }
    text
}

/// Page faults of all children that have been waited for.
fn faults() -> Result<u64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The second field may hold anything, and ends with the last parenthesis. Behind it come state,
    // five numbers, flags, minflt, cminflt, majflt, cmajflt.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let number = |index: usize| fields.get(index).and_then(|f| f.parse::<u64>().ok());
    number(8).zip(number(10)).map(|(minor, major)| minor + major).context("no page faults in stat")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, marker: Option<&str>) -> Result<Run> {
        let dir = tempfile::tempdir().unwrap();
        // Other tests have children of their own.
        let measure = Measure { adopts: false };
        measure.once(Command::new("sh").args(["-c", script]), marker, &dir.path().join("stderr"))
    }

    #[test]
    fn result_comes_before_exit() {
        let run = shell("echo x; sleep 0.05", Some("x\n")).unwrap();
        assert!(run.exit - run.result > 40_000_000, "{run:?}");
        assert!(run.gone >= run.exit && run.faults > 0, "{run:?}");
    }

    #[test]
    fn without_a_marker_the_end_is_the_result() {
        let run = shell("sleep 0.02", None).unwrap();
        assert!(run.result == run.exit && run.exit >= 20_000_000, "{run:?}");
    }

    #[test]
    fn failures_are_told_with_the_last_words() {
        let error = shell("echo a; echo why >&2; exit 3", None).unwrap_err().to_string();
        assert!(error.contains("status: 3") && error.ends_with(": why"), "{error}");
        let error = shell("echo other", Some("x\n")).unwrap_err().to_string();
        assert_eq!(error, "ended without the expected output: other");
    }
}
