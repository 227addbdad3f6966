//! `cargo xtask bench fs`: one program that works with files, on the host, in a task, and behind
//! virtiofsd.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::inside::{CONTENDERS, Measured, Plan};
use self::workload::{MEASURES, Measure, Unit};
use super::table::{median, render};
use crate::{build, images, paths, sh};

pub(super) mod inside;
mod pvh;
pub(super) mod workload;

/// Memory of the emulated host in MiB.
const HOST_MEMORY: &str = "3072";
/// Where Debian's `qemu-system-common` has it.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of each measure, after one that is not counted
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Print everything that was measured as JSON, instead of a table
    #[arg(long)]
    json: bool,
    /// Take the time of the machine instead of counting instructions, where KVM has to be emulated
    #[arg(long)]
    wall: bool,
    /// Only contenders with this in their names
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Measure what is there, without building anything
    #[arg(long)]
    no_build: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let cache = paths::cache()?.join("bench");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    // Copies, so that a build meanwhile changes nothing.
    let work = tempfile::tempdir_in(&cache)?;
    for program in ["casulo", "casulo-vmm"] {
        let from = paths::binaries().join(program);
        fs::copy(&from, work.path().join(program))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    let me = work.path().join("xtask");
    fs::copy(std::env::current_exe()?, &me)?;
    let volume = work.path().join("guest.erofs");
    fs::write(&volume, images::boot_volume(fs::read(&me)?)?)?;
    let emulated = !build::kvm_works();
    let plan = Plan {
        programs: work.path().to_owned(),
        home: paths::casulo_home()?,
        volume,
        virtiofsd: virtiofsd().map_err(|error| format!("{error:#}")),
        runs: args.runs,
        emulated,
        only: args.only.clone(),
    };
    let file = work.path().join("plan.json");
    fs::write(&file, serde_json::to_vec(&plan)?)?;
    let clock = match (emulated, args.wall) {
        (true, false) => Clock::Counted,
        (true, true) => Clock::Emulated,
        (false, _) => Clock::Real,
    };
    let mut command = Command::new(if emulated { work.path().join("casulo") } else { me.clone() });
    if emulated {
        eprintln!("starting an emulated host; this takes some minutes");
        command.arg("emulated-host");
        if !args.wall {
            command.arg("--icount");
        }
        command.args(["--memory", HOST_MEMORY, "--"]).arg(&me).env("TMPDIR", "/dev/shm");
    }
    command.args(["bench", "fs-inside"]).arg(&file).current_dir(&cache);
    let measured = collect(&mut command)?;
    let text = if args.json {
        serde_json::to_string_pretty(&measured)? + "\n"
    } else {
        describe(&measured, args.runs, clock)
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Debian 12's virtiofsd, the C version of QEMU 7.2, and QEMU itself.
fn virtiofsd() -> Result<PathBuf> {
    sh::need(&[
        ("qemu-system-x86_64", "qemu-system-x86"),
        (VIRTIOFSD, "qemu-system-common"),
        ("as", "binutils"),
    ])?;
    Ok(PathBuf::from(VIRTIOFSD))
}

/// What a nanosecond is.
#[derive(Clone, Copy)]
enum Clock {
    /// One instruction of a single emulated processor.
    Counted,
    /// Of this machine, while it emulates.
    Emulated,
    /// Of this machine.
    Real,
}

fn collect(command: &mut Command) -> Result<Vec<Measured>> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut measured = Vec::new();
    for line in BufReader::new(stdout).lines() {
        measured.push(serde_json::from_str(&line?).context("the report is broken")?);
    }
    let status = child.wait()?;
    ensure!(status.success(), "the measurement ended: {status}");
    Ok(measured)
}

/// Amount in a second; a figure that is larger is better.
fn rate(measured: &[Measured], contender: &str, index: usize, measure: &Measure) -> Option<f64> {
    let of = measured.iter().find(|m| m.contender == contender)?;
    let line = of.lines.as_ref().ok()?.iter().find(|line| line.measure == index)?;
    let seconds: Vec<f64> =
        line.ticks.as_ref().ok()?.iter().map(|ticks| *ticks as f64 / of.frequency).collect();
    median(&seconds).map(|seconds| measure.amount / seconds)
}

fn describe(measured: &[Measured], runs: u32, clock: Clock) -> String {
    let (second, what) = match clock {
        Clock::Counted => ("vs", "a vs is 1,000,000,000 instructions of the whole host"),
        Clock::Emulated => ("s", "wall-clock time of an emulated host with two processors"),
        Clock::Real => ("s", "wall-clock time"),
    };
    let mut text = format!(
        "\nFiles of a share on a tmpfs: the same program and guest kernel, 1 vCPU, median of {runs} \
         runs ({what}). virtiofsd is that of QEMU 7.2 under its microvm machine, once with its \
         default pool of 64 threads and once without one.\n\n"
    );
    let mut notes = String::new();
    for of in measured {
        let lines = match &of.lines {
            Ok(lines) => lines,
            Err(reason) => {
                notes.push_str(&format!("* {}: {reason}\n", of.contender));
                continue;
            }
        };
        for line in lines {
            if let (Err(reason), Some(measure)) = (&line.ticks, MEASURES.get(line.measure)) {
                notes.push_str(&format!("* {}, {}: {reason}\n", of.contender, measure.name));
            }
        }
    }
    let rows: Vec<Vec<String>> = MEASURES
        .iter()
        .enumerate()
        .map(|(index, measure)| {
            let rates: Vec<Option<f64>> =
                CONTENDERS.iter().map(|c| rate(measured, c.name, index, measure)).collect();
            let mut cells = vec![measure.name.to_owned()];
            cells.extend(rates.iter().map(|rate| match (rate, measure.unit) {
                (None, _) => "-".to_owned(),
                (Some(rate), Unit::Mebibytes) => format!("{rate:.0} MiB/{second}"),
                (Some(rate), Unit::Operations) => format!("{:.1} µ{second}", 1e6 / rate),
            }));
            // Beside the better of the two.
            let best = rates.iter().skip(3).flatten().copied().reduce(f64::max);
            cells.push(match (rates.get(1).copied().flatten(), best) {
                (Some(ours), Some(theirs)) => format!("{:.2}", ours / theirs),
                _ => "-".to_owned(),
            });
            cells
        })
        .collect();
    let mut heading = vec!["measure"];
    heading.extend(CONTENDERS.iter().map(|c| c.name));
    heading.push("Casulo : best virtiofsd");
    text.push_str(&render(&heading, &rows));
    text.push_str(&notes);
    text
}
