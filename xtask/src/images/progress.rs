//! What is being done: a line that changes on a terminal, a line for each step elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shows the steps of one job.
pub(crate) struct Progress {
    name: String,
    bar: ProgressBar,
    begun: Instant,
}

impl Progress {
    /// Begins a job.
    pub(crate) fn new(name: &str) -> Progress {
        let bar = ProgressBar::new_spinner().with_prefix(name.to_owned());
        bar.set_draw_target(ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix}: {msg} [{elapsed}]") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress { name: name.to_owned(), bar, begun: Instant::now() }
    }

    /// Begins a step.
    pub(crate) fn step(&self, what: impl Into<String>) {
        let what = what.into();
        if self.bar.is_hidden() {
            eprintln!("{}: {what}", self.name);
        } else {
            self.bar.set_message(what);
        }
    }

    /// Ends the job with a line that stays.
    pub(crate) fn done(&self, what: &str) {
        self.bar.finish_and_clear();
        let seconds = self.begun.elapsed().as_secs_f64();
        eprintln!("{}: {what} ({seconds:.0} s)", self.name);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
