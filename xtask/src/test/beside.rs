//! A step that runs in a process of its own while another one does: one emulated host keeps one processor busy.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A running step. Dropping it ends it.
pub(super) struct Beside {
    child: Child,
    printed: File,
    started: Instant,
    limit: Duration,
}

impl Beside {
    /// Starts it; what it prints is kept.
    pub(super) fn start(command: &mut Command, limit: Duration) -> Result<Self> {
        let printed = tempfile::tempfile().context("cannot make a temporary file")?;
        let child = command
            .stdout(printed.try_clone()?)
            .stderr(printed.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Self { child, printed, started: Instant::now(), limit })
    }

    /// Waits for its end, and prints what it printed.
    pub(super) fn end(mut self) -> Result<()> {
        let status = loop {
            match self.child.try_wait()? {
                None if self.started.elapsed() < self.limit => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                status => break status,
            }
        };
        let mut printed = Vec::new();
        self.printed.rewind()?;
        self.printed.read_to_end(&mut printed)?;
        eprint!("{}", String::from_utf8_lossy(&printed));
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("it ended with {status}"),
            None => bail!("it was still running after {} s, and was killed", self.limit.as_secs()),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<()> {
        Beside::start(Command::new("sh").args(["-c", script]), limit)?.end()
    }

    #[test]
    fn its_end_is_that_of_the_step() {
        let limit = Duration::from_secs(600);
        shell("true", limit).unwrap();
        assert!(shell("exit 3", limit).unwrap_err().to_string().contains("exit status: 3"));
        let late = shell("exec sleep 3600", Duration::ZERO).unwrap_err();
        assert!(late.to_string().contains("still running"), "{late}");
    }
}
