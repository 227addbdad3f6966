//! The guest tests, in emulated hosts where there is no KVM.
//!
//! An emulated host keeps one processor busy, so that two share the tests where there is memory for both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::beside::Beside;
use super::cargo;
use crate::{build, paths, sh};

/// The few: each goes through a good part of the whole.
const SMOKE: [&str; 4] = [
    "a_program_prints_exactly_its_bytes",
    "output_is_on_the_host_with_the_callers_owner",
    "timeout_is_124_with_the_output_so_far",
    "after_sigkill_nothing_is_left",
];
/// Longest time of all guest tests. They take a fraction of it; one that stands still must not keep the others'
/// results from being seen.
const LIMIT: Duration = Duration::from_secs(55 * 60);
/// Memory of an emulated host, in MiB: guests, and what tests write to file systems in memory. Only what is
/// touched counts; the larger one is for guests of 8 GiB, which only the tests of [`LARGE`] have.
const MEMORY: [u32; 2] = [4096, 9728];
const LARGE: &str = "memory::";
/// Memory of this machine, in MiB, for the larger one, and for several emulated hosts at once.
const ENOUGH: u64 = 12 * 1024;
const TOGETHER: u64 = 18 * 1024;

/// Which guest tests to run.
pub(super) enum Which<'a> {
    All,
    /// One look at every part.
    Few,
    /// Those whose name contains this.
    Named(&'a str),
}

/// Whether there is memory for several emulated hosts, if they are needed.
pub(super) fn together() -> bool {
    !build::kvm_works() && memory_here() >= TOGETHER
}

/// Runs guest tests.
pub(super) fn run(which: Which) -> Result<()> {
    let tests = binary()?;
    let large = if memory_here() >= ENOUGH { MEMORY[1] } else { MEMORY[0] };
    match which {
        Which::Few => sh::run_within(command(&tests, large).args(SMOKE), LIMIT),
        Which::Named(name) => sh::run_within(command(&tests, large).arg(name), LIMIT),
        Which::All if !together() => sh::run_within(&mut command(&tests, large), LIMIT),
        Which::All => {
            let list = sh::output(Command::new(&tests).args(["--list", "--format", "terse"]))?;
            let [first, second] = halves(&list);
            ensure!(!second.is_empty(), "there are no guest tests");
            let mut other = command(&tests, MEMORY[0]);
            let other = Beside::start(other.arg("--exact").args(second), LIMIT)?;
            let result = sh::run_within(command(&tests, large).arg("--exact").args(first), LIMIT);
            eprintln!("\n-- in the other emulated host:");
            other.end().and(result)
        }
    }
}

/// The program of the tests, in an emulated host with `memory` MiB where there is no KVM.
fn command(tests: &Path, memory: u32) -> Command {
    let mut command = if build::kvm_works() {
        Command::new(tests)
    } else {
        let mut command = Command::new(paths::binaries().join("casulo"));
        command.args(["emulated-host", "--memory", &memory.to_string(), "--"]).arg(tests);
        // Shares need a file system with everything: 9p lacks much.
        command.env("TMPDIR", "/dev/shm");
        command
    };
    command.current_dir(paths::root()).arg("--test-threads=1");
    command
}

/// Names of the tests, as the program lists them, for two hosts; the first has more memory. Tests of one file
/// take about as long as each other, so that they go to both in turn.
fn halves(list: &str) -> [Vec<&str>; 2] {
    let mut halves = [Vec::new(), Vec::new()];
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let (large, others): (Vec<_>, Vec<_>) = names.partition(|name| name.starts_with(LARGE));
    for (n, name) in others.into_iter().enumerate() {
        halves[n % 2].push(name);
    }
    halves[0].extend(large);
    halves
}

/// Memory of this machine, in MiB.
fn memory_here() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into()) >> 20
}

/// The program of the guest tests, from cargo's messages: its name has a hash in it.
fn binary() -> Result<PathBuf> {
    let build = ["test", "--release", "--workspace", "--test", "guest", "--no-run"];
    let messages = sh::output(cargo().args(build).args(["--quiet", "--message-format", "json"]))?;
    find_executable(&messages).context("cargo does not say where it put the guest tests")
}

fn find_executable(messages: &str) -> Option<PathBuf> {
    messages.lines().find_map(|line| {
        let message: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).ok()?;
        let is_guest = message.get("target")?.get("name")? == "guest";
        let executable = message.get("executable")?.as_str()?;
        is_guest.then(|| Path::new(executable).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_tests_are_found_among_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"casulo"},"executable":"/a"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"guest"},"executable":null}"#,
            "\nnoise\n",
            r#"{"reason":"compiler-artifact","target":{"name":"guest"},"executable":"/b/guest-1"}"#,
            "\n",
        );
        assert_eq!(find_executable(messages), Some("/b/guest-1".into()));
        assert_eq!(find_executable(""), None);
    }

    #[test]
    fn every_test_runs_in_one_of_two_hosts_and_the_large_in_the_first() {
        let [first, second] =
            halves("a: test\nb: test\nmemory::c: test\nd: test\nmemory::e: test\n");
        assert_eq!(first, ["a", "d", "memory::c", "memory::e"]);
        assert_eq!(second, ["b"]);
    }
}
