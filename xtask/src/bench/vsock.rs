//! `cargo xtask bench vsock`: one guest kernel and one guest program, behind two VMMs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::inside::{CONTENDERS, MEASURES, Measured, Plan};
use super::rivals;
use super::table::{median, render};
use crate::{build, images, paths, sh};

pub(super) mod inside;

/// Memory of the emulated host in MiB.
const HOST_MEMORY: &str = "2048";

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of each figure, after one that is not counted
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Print everything that was measured as JSON, instead of a table
    #[arg(long)]
    json: bool,
    /// Where KVM has to be emulated: count instructions in one processor instead of taking the time
    /// with two
    #[arg(long)]
    count: bool,
    /// Measure what is there, without building anything but the guest's program
    #[arg(long)]
    no_build: bool,
}

pub(crate) fn run(args: Args) -> Result<()> {
    if !args.no_build {
        build::everything()?;
    }
    let mut cargo = Command::new("cargo");
    cargo.current_dir(paths::root()).args(["build", "--release", "--quiet"]);
    sh::run(cargo.args(["--package", "casulo-vmm", "--example", "vsock_guest"]))?;
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
    let program = fs::read(paths::binaries().join("examples/vsock_guest"))?;
    fs::write(&volume, images::boot_volume(program)?)?;
    let plan = Plan {
        vmm: work.path().join("casulo-vmm"),
        kernel: paths::casulo_home()?.join("kernel/vmlinux"),
        volume,
        firecracker: rivals::firecracker(&cache).map_err(|error| format!("{error:#}")),
        runs: args.runs,
    };
    let file = work.path().join("plan.json");
    fs::write(&file, serde_json::to_vec(&plan)?)?;

    let emulated = !build::kvm_works();
    let clock = match (emulated, args.count) {
        (true, true) => Clock::Counted,
        (true, false) => Clock::Emulated,
        (false, _) => Clock::Real,
    };
    let mut command = Command::new(if emulated { work.path().join("casulo") } else { me.clone() });
    if emulated {
        eprintln!("starting an emulated host; this takes some minutes");
        command.arg("emulated-host");
        if args.count {
            command.arg("--icount");
        }
        command.args(["--memory", HOST_MEMORY, "--"]).arg(&me).env("TMPDIR", "/dev/shm");
    }
    command.args(["bench", "vsock-inside"]).arg(&file).current_dir(&cache);
    let measured = collect(&mut command)?;
    let text = if args.json {
        serde_json::to_string_pretty(&measured)? + "\n"
    } else {
        describe(&measured, args.runs, clock)
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
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
        let row: Measured = serde_json::from_str(&line?).context("the report is broken")?;
        eprintln!("{}: {:?} ns", row.contender, row.times);
        measured.push(row);
    }
    let status = child.wait()?;
    ensure!(status.success(), "the measurement ended: {status}");
    Ok(measured)
}

fn describe(measured: &[Measured], runs: u32, clock: Clock) -> String {
    let (second, what) = match clock {
        Clock::Counted => ("vs", "a vs is 1,000,000,000 instructions of the whole host"),
        Clock::Emulated => ("s", "wall-clock time of an emulated host with two processors"),
        Clock::Real => ("s", "wall-clock time"),
    };
    let mut text = format!(
        "\nVsock: one connection, the same guest kernel and program, 1 vCPU, median of {runs} runs \
         ({what}).\n\n"
    );
    let mut notes = String::new();
    let rows: Vec<Vec<String>> = MEASURES
        .iter()
        .map(|measure| {
            let mut cells = vec![measure.name.to_owned()];
            let mut rates = Vec::new();
            let mut exits = Vec::new();
            for contender in CONTENDERS {
                let row = measured
                    .iter()
                    .find(|row| row.contender == contender && row.measure == measure.name);
                let times = match row.map(|row| &row.times) {
                    Some(Ok(times)) => times.clone(),
                    Some(Err(reason)) => {
                        notes.push_str(&format!("* {contender}, {}: {reason}\n", measure.name));
                        Vec::new()
                    }
                    None => Vec::new(),
                };
                let times: Vec<f64> = times.iter().map(|time| *time as f64 / 1e9).collect();
                let rate = median(&times).map(|time| measure.amount() / time);
                rates.push(rate);
                cells.push(rate.map_or_else(|| "-".into(), |rate| measure.format(rate, second)));
                let count = row.and_then(|row| row.exits.as_ref().ok());
                exits.push(count.map_or_else(
                    || "-".into(),
                    |count| format!("{:.1}", *count as f64 / measure.amount()),
                ));
            }
            cells.push(match rates.as_slice() {
                [Some(ours), Some(theirs)] => format!("{:.2}", ours / theirs),
                _ => "-".into(),
            });
            cells.extend(exits);
            cells
        })
        .collect();
    let heading = [
        "one connection",
        "Casulo",
        "Firecracker 1.12.1",
        "ratio",
        "VM exits, Casulo",
        "Firecracker",
    ];
    text.push_str(&render(&heading, &rows));
    text.push_str("\nVM exits are for each MiB or round trip, of one more run.\n");
    text.push_str(&notes);
    text
}
