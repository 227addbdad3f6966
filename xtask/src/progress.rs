//! Runs a long build and shows how far it is.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

/// What is built.
pub(crate) struct Build {
    /// In a word, for the bar and for errors.
    pub(crate) name: &'static str,
    /// About how many steps it has. Only the bar depends on it.
    pub(crate) steps: u64,
    /// Whether a line of its output says that a step is being done.
    pub(crate) is_step: fn(&str) -> bool,
}

/// How often a line is printed where no bar can be shown.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// How many of the last lines an error shows.
const TAIL: usize = 25;

impl Build {
    /// Runs the build; all it prints goes to `log`, and the end of it into the error when it fails.
    pub(crate) fn run(&self, command: &mut Command, log: &Path) -> Result<()> {
        let started = Instant::now();
        let mut log_file =
            fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let (reader, writer) = std::io::pipe().context("cannot create a pipe")?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("cannot copy a pipe")?)
            .stderr(writer)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        // The command holds the pipe's writing ends; without this the reader never sees the end.
        command.stdout(Stdio::null()).stderr(Stdio::null());

        let mut report = Report::new(self, started);
        let mut tail = VecDeque::new();
        for line in BufReader::new(reader).split(b'\n') {
            let line = line.context("cannot read what the build prints")?;
            let line = String::from_utf8_lossy(&line).into_owned();
            writeln!(log_file, "{line}")
                .with_context(|| format!("cannot write {}", log.display()))?;
            if (self.is_step)(&line) {
                report.step(&line);
            }
            tail.push_back(line);
            if tail.len() > TAIL {
                tail.pop_front();
            }
        }
        let status = child.wait().context("cannot wait for the build")?;
        report.end();
        if !status.success() {
            let tail: Vec<String> = tail.into();
            bail!(
                "the build of {} failed ({status}); all of its output is in {}, the end of it:\n{}",
                self.name,
                log.display(),
                tail.join("\n")
            );
        }
        eprintln!("{} built in {} s", self.name, started.elapsed().as_secs());
        Ok(())
    }
}

/// A bar on a terminal, a line now and then elsewhere.
struct Report {
    name: &'static str,
    expected: u64,
    bar: Option<ProgressBar>,
    steps: u64,
    started: Instant,
    printed: Instant,
}

impl Report {
    fn new(build: &Build, started: Instant) -> Report {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(build.steps);
            if let Ok(style) =
                ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {elapsed} {wide_msg}")
            {
                bar.set_style(style);
            }
            bar.set_prefix(build.name);
            bar
        });
        Report { name: build.name, expected: build.steps, bar, steps: 0, started, printed: started }
    }

    fn step(&mut self, line: &str) {
        self.steps = self.steps.saturating_add(1);
        if let Some(bar) = &self.bar {
            bar.set_length(self.expected.max(self.steps));
            bar.set_position(self.steps);
            bar.set_message(line.split_whitespace().last().unwrap_or_default().to_owned());
        } else if self.printed.elapsed() >= LINE_EVERY {
            self.printed = Instant::now();
            eprintln!(
                "{}: {} of about {} steps, {} s",
                self.name,
                self.steps,
                self.expected.max(self.steps),
                self.started.elapsed().as_secs()
            );
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILD: Build = Build { name: "test", steps: 2, is_step: |line| line.starts_with("  ") };

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_reach_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        BUILD.run(&mut shell("echo '  CC a.o'; echo warning >&2"), &log).unwrap();
        let text = fs::read_to_string(&log).unwrap();
        assert!(text.contains("  CC a.o\n") && text.contains("warning\n"), "{text}");
    }

    #[test]
    fn a_failure_shows_the_end_of_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let script = "seq 1000 1040; echo no space left >&2; exit 2";
        let error = BUILD.run(&mut shell(script), &log).unwrap_err().to_string();
        assert!(error.contains("no space left") && error.contains("1040"), "{error}");
        assert!(!error.contains("1000\n"), "{error}");
        assert!(error.contains(&log.display().to_string()), "{error}");
    }
}
