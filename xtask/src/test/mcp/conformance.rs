//! The official conformance suite: all that a revision requires, of Casulo's server stack with the suite's
//! fixtures (`examples/conformance`), and what applies to the product, of `casulo serve` as it is.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use super::server::{Server, served};
use super::{LIMIT, scripts};
use crate::npm::Packages;
use crate::{paths, sh};

/// Scenarios of a revision that need no fixtures.
const PRODUCT: [(&str, &[&str]); 2] = [
    (
        "2025-11-25",
        &[
            "server-initialize",
            "server-session-lifecycle",
            "ping",
            "tools-list",
            "server-sse-multiple-streams",
            "dns-rebinding-protection",
        ],
    ),
    (
        "2026-07-28",
        &[
            "server-stateless",
            "tools-list",
            "server-sse-multiple-streams",
            "sep-2164-resource-not-found",
            "dns-rebinding-protection",
            "caching",
            "http-header-validation",
            "input-required-result-unsupported-methods",
        ],
    ),
];

/// The server of the fixtures, killed when dropped.
struct Fixtures(Child);

impl Drop for Fixtures {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs both; what fails and is not in `tests/mcp/conformance.yml` with a reason is an error, and so is
/// what stands there and passes.
pub(super) fn run(npm: &Packages, casulo: &Path) -> Result<()> {
    let results = tempfile::tempdir()?;
    let suite = |url: &str| {
        let mut suite = npm.program("@modelcontextprotocol/conformance/dist/index.js");
        suite.args(["server", "--url", url, "-o"]).arg(results.path());
        suite
    };
    let mut child = Command::new(paths::binaries().join("examples/conformance"))
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start the server of the conformance fixtures")?;
    let mut lines = BufReader::new(child.stderr.take().context("it has no stderr")?).lines();
    let _fixtures = Fixtures(child);
    let url = lines.find_map(|line| served(&line.ok()?));
    let url = url.context("the server of the conformance fixtures ended")?;
    for (revision, _) in PRODUCT {
        let mut command = suite(&url);
        command.args(["--requirements", revision]);
        judged(&mut command, &format!("conformance with {revision}, required of a server"))?;
    }
    // It cannot send a token.
    let product = Server::without_token(casulo)?;
    for (revision, scenarios) in PRODUCT {
        for scenario in scenarios {
            let mut command = suite(product.url());
            command.args(["--scenario", scenario, "--spec-version", revision]);
            command.arg("--expected-failures").arg(scripts().join("conformance.yml"));
            judged(&mut command, &format!("conformance with {revision}: {scenario}"))?;
        }
    }
    product.stop()
}

/// Runs the suite, and tells what it summed up, or everything when it failed.
fn judged(command: &mut Command, what: &str) -> Result<()> {
    let (status, printed) = sh::ended_within(command, LIMIT).with_context(|| what.to_owned())?;
    if !status.success() {
        eprintln!("{printed}");
        bail!("{what}: {status}");
    }
    match printed.lines().find(|line| line.starts_with("Passed:")) {
        Some(checks) => eprintln!("{what}: {checks}"),
        None => eprintln!("{what}: {} scenarios pass", scored(&printed)),
    }
    Ok(())
}

/// Scenarios that pass and count.
fn scored(printed: &str) -> usize {
    let all = printed.lines().filter(|line| line.starts_with('✓')).count();
    // What was added later, is an extension or pending is summed up again.
    let other = printed.lines().filter(|line| line.starts_with("  ✓")).count();
    all.saturating_sub(other)
}

#[cfg(test)]
mod tests {
    use super::scored;

    #[test]
    fn what_does_not_count_is_not_counted() {
        let printed = "=== SUMMARY ===\n✓ ping: 2 passed\n✓ late: 1 passed\n✗ other: 1 failed\n\n\
                       Not scored:\n  ✓ late (added-after-release)\n  ✗ other (pending)\n";
        assert_eq!(scored(printed), 1);
    }
}
