//! Counters of a gateway, as text for Prometheus.
//!
//! Nothing here names a caller, a sandbox or what ran in it: every caller may read it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper ends of the ranges of the histogram of tool calls, in milliseconds.
const BOUNDS_MS: [u64; 8] = [10, 50, 250, 1_000, 5_000, 30_000, 120_000, 600_000];

/// How a tool call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    /// A result, whatever the program's exit status.
    Result,
    /// A tool error.
    Error,
    /// The client gave it up.
    Cancelled,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Result => "result",
            Self::Error => "error",
            Self::Cancelled => "cancelled",
        }
    }
}

#[derive(Debug, Default)]
struct Histogram {
    buckets: [u64; BOUNDS_MS.len()],
    sum_ms: u64,
    count: u64,
}

/// Counters since the start. Names of tools and statuses are the gateway's own, so there are few.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    calls: Mutex<BTreeMap<(&'static str, Outcome), Histogram>>,
    requests: Mutex<BTreeMap<u16, u64>>,
    pub(super) connections: AtomicU64,
    served: AtomicU64,
}

/// What is at a moment, as against what has been counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) sandboxes: usize,
    pub(super) kept: usize,
    pub(super) limit: usize,
    pub(super) in_flight: usize,
    pub(super) draining: bool,
    pub(super) artifacts: usize,
    pub(super) artifact_bytes: u64,
}

/// A poisoned lock means that another call panicked; a counter is whole at any time.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Metrics {
    /// A call of one of the public tools has ended.
    pub(super) fn call(&self, tool: &'static str, outcome: Outcome, took: Duration) {
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let mut calls = lock(&self.calls);
        let histogram = calls.entry((tool, outcome)).or_default();
        for (bucket, bound) in histogram.buckets.iter_mut().zip(BOUNDS_MS) {
            *bucket = bucket.saturating_add(u64::from(ms <= bound));
        }
        histogram.sum_ms = histogram.sum_ms.saturating_add(ms);
        histogram.count = histogram.count.saturating_add(1);
    }

    /// Bytes of artifacts have been given out.
    pub(super) fn served(&self, bytes: u64) {
        self.served.fetch_add(bytes, Ordering::Relaxed);
    }

    /// An HTTP request has been answered.
    pub(super) fn request(&self, status: u16) {
        let mut requests = lock(&self.requests);
        let count = requests.entry(status).or_default();
        *count = count.saturating_add(1);
    }

    /// The text format, version 0.0.4.
    pub(super) fn text(&self, now: Now) -> String {
        let mut text = String::new();
        let mut gauge = |name: &str, help: &str, value: u64| {
            // Writing to a String does not fail.
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}\n");
        };
        let number = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        gauge("casulo_sandboxes", "MicroVMs that run or boot.", number(now.sandboxes));
        gauge("casulo_sandboxes_kept", "Of these, kept ones.", number(now.kept));
        gauge("casulo_sandboxes_limit", "Most microVMs at once.", number(now.limit));
        let in_flight = number(now.in_flight);
        gauge("casulo_http_in_flight", "Requests that are being answered.", in_flight);
        gauge("casulo_draining", "1 after a signal to end.", u64::from(now.draining));
        let artifacts = number(now.artifacts);
        gauge("casulo_artifacts", "Files kept of sandboxes that have ended.", artifacts);
        gauge("casulo_artifact_bytes", "Bytes of these.", now.artifact_bytes);
        let served = self.served.load(Ordering::Relaxed);
        let _ = write!(
            text,
            "# HELP casulo_artifact_bytes_served_total Bytes of such files given out.\n\
             # TYPE casulo_artifact_bytes_served_total counter\n\
             casulo_artifact_bytes_served_total {served}\n"
        );
        let connections = self.connections.load(Ordering::Relaxed);
        let _ = write!(
            text,
            "# HELP casulo_http_connections_total Connections accepted.\n\
             # TYPE casulo_http_connections_total counter\n\
             casulo_http_connections_total {connections}\n\
             # HELP casulo_http_requests_total HTTP requests by status.\n\
             # TYPE casulo_http_requests_total counter\n"
        );
        for (status, count) in &*lock(&self.requests) {
            let _ = writeln!(text, "casulo_http_requests_total{{code=\"{status}\"}} {count}");
        }
        text.push_str(
            "# HELP casulo_tool_call_seconds Tool calls by tool and outcome.\n\
             # TYPE casulo_tool_call_seconds histogram\n",
        );
        for ((tool, outcome), histogram) in &*lock(&self.calls) {
            let labels = format!("tool=\"{tool}\",outcome=\"{}\"", outcome.name());
            let name = "casulo_tool_call_seconds";
            for (count, bound) in histogram.buckets.iter().zip(BOUNDS_MS) {
                let bound = Duration::from_millis(bound).as_secs_f64();
                let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
            }
            let count = histogram.count;
            let sum = Duration::from_millis(histogram.sum_ms).as_secs_f64();
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}");
            let _ = writeln!(text, "{name}_count{{{labels}}} {count}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_lines_of_text() {
        let metrics = Metrics::default();
        metrics.request(200);
        metrics.request(200);
        metrics.request(401);
        metrics.call("run_command", Outcome::Result, Duration::from_millis(300));
        metrics.call("run_command", Outcome::Result, Duration::from_millis(10));
        metrics.call("read_file", Outcome::Error, Duration::from_secs(601));
        let now = Now {
            sandboxes: 3,
            kept: 2,
            limit: 16,
            in_flight: 1,
            draining: false,
            artifacts: 4,
            artifact_bytes: 5,
        };
        metrics.served(6);
        metrics.served(1);
        let text = metrics.text(now);
        for line in [
            "casulo_sandboxes 3",
            "casulo_sandboxes_kept 2",
            "casulo_draining 0",
            "casulo_artifacts 4",
            "casulo_artifact_bytes 5",
            "casulo_artifact_bytes_served_total 7",
            "casulo_http_requests_total{code=\"200\"} 2",
            "casulo_http_requests_total{code=\"401\"} 1",
            "casulo_tool_call_seconds_bucket{tool=\"run_command\",outcome=\"result\",le=\"0.01\"} 1",
            "casulo_tool_call_seconds_bucket{tool=\"run_command\",outcome=\"result\",le=\"0.25\"} 1",
            "casulo_tool_call_seconds_bucket{tool=\"run_command\",outcome=\"result\",le=\"1\"} 2",
            "casulo_tool_call_seconds_sum{tool=\"run_command\",outcome=\"result\"} 0.31",
            "casulo_tool_call_seconds_bucket{tool=\"read_file\",outcome=\"error\",le=\"600\"} 0",
            "casulo_tool_call_seconds_bucket{tool=\"read_file\",outcome=\"error\",le=\"+Inf\"} 1",
            "casulo_tool_call_seconds_count{tool=\"read_file\",outcome=\"error\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in:\n{text}");
        }
        assert!(text.ends_with('\n'));
    }
}
