//! Running other programs, with errors that say what failed and what it printed.

use std::ffi::OsStr;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Cargo, without what the cargo that runs this program says about its package: build scripts look at that,
/// and would run again each time that cargo is called by hand and from here in turn.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new("cargo");
    for (name, _) in std::env::vars_os() {
        let about = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| about.iter().any(|begin| name.starts_with(begin))) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs a command with its output on this terminal.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// Like [`run`]; what does not end within `limit` is killed, and that is an error. Use it for what may stand
/// still, so that the rest of a long run still happens and is seen.
pub(crate) fn run_within(command: &mut Command, limit: Duration) -> Result<()> {
    let status = wait(command, limit)?;
    succeeded(command, status)
}

/// Like [`run_within`], with what the command printed on its standard output.
pub(crate) fn output_within(command: &mut Command, limit: Duration) -> Result<String> {
    let (status, printed) = ended_within(command, limit)?;
    succeeded(command, status)?;
    Ok(printed)
}

/// Like [`output_within`], for a command that may fail.
pub(crate) fn ended_within(command: &mut Command, limit: Duration) -> Result<(ExitStatus, String)> {
    // A file, not a pipe: nobody has to read while the command runs.
    let mut printed = tempfile::tempfile().context("cannot make a temporary file")?;
    let status = wait(command.stdout(printed.try_clone()?), limit)?;
    let mut text = Vec::new();
    printed.rewind()?;
    printed.read_to_end(&mut text)?;
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

fn succeeded(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

fn wait(command: &mut Command, limit: Duration) -> Result<ExitStatus> {
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            bail!("{command:?} was still running after {} s, and was killed", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command quietly and gives its standard output; an error holds the end of its stderr.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let out = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    if !out.status.success() {
        let stderr = String::from_utf8_lossy(&out.stderr);
        let lines: Vec<&str> = stderr.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(15)..).unwrap_or_default().join("\n");
        bail!("{command:?} failed: {}\n{tail}", out.status);
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Whether a program is in `PATH` (the sbin folders included, which users' paths lack on Debian).
pub(crate) fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|dir| dir.join(program).is_file())
}

/// Installs Debian packages whose `(program or file, package)` is missing; sudo when not root.
///
/// An entry that begins with `/` is a file, any other a program.
pub(crate) fn need(wanted: &[(&str, &str)]) -> Result<()> {
    let mut missing: Vec<&str> = wanted
        .iter()
        .filter(
            |(what, _)| {
                if what.starts_with('/') { !Path::new(what).exists() } else { !has(what) }
            },
        )
        .map(|(_, package)| *package)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing Debian packages: {}", missing.join(" "));
    apt(&["update", "-qq"])?;
    let mut args = vec!["install", "-y", "-qq", "--no-install-recommends"];
    args.extend(&missing);
    apt(&args).with_context(|| {
        format!("cannot install {}; install them by hand and try again", missing.join(" "))
    })
}

/// Runs apt-get quietly; sudo when not root.
pub(crate) fn apt<S: AsRef<OsStr>>(args: &[S]) -> Result<()> {
    let root = output(Command::new("id").arg("-u"))?.trim() == "0";
    let mut command = if root { Command::new("apt-get") } else { Command::new("sudo") };
    if !root {
        command.arg("apt-get");
    }
    command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
    output(&mut command).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_still_is_killed_and_named() {
        let error = run_within(Command::new("sleep").arg("3600"), Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("\"3600\" was still running after 0 s"), "{error}");
    }

    #[test]
    fn what_ends_in_time_is_judged_by_its_status() {
        let limit = Duration::from_secs(600);
        run_within(&mut Command::new("true"), limit).unwrap();
        let error = run_within(&mut Command::new("false"), limit).unwrap_err();
        assert!(error.to_string().contains("exit status: 1"), "{error}");
        let (status, printed) =
            ended_within(Command::new("sh").args(["-c", "echo said; exit 5"]), limit).unwrap();
        assert_eq!((status.code(), printed.as_str()), (Some(5), "said\n"));
    }
}
