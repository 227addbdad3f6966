//! `cargo xtask bench vsock`: one guest kernel and one guest program, behind two VMMs.

use std::fs;

use anyhow::Result;

use self::inside::{CONTENDERS, MEASURES, Measured, Plan};
use super::rivals;
use super::stage::{Clock, Common, gather_all, print};
use super::table::{median, render};
use crate::{images, paths, sh};

pub(super) mod inside;

/// Memory of the emulated host in MiB.
const HOST_MEMORY_MIB: u32 = 2048;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of each figure, after one that is not counted
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Where KVM has to be emulated: count instructions in one processor instead of taking the time
    /// with two
    #[arg(long)]
    count: bool,
    #[command(flatten)]
    common: Common,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let stage = args.common.stage()?;
    let mut cargo = sh::cargo();
    cargo.current_dir(paths::root()).args(["build", "--release", "--quiet"]);
    sh::run(cargo.args(["--package", "casulo-vmm", "--example", "vsock_guest"]))?;
    let volume = stage.folder().join("guest.erofs");
    let program = fs::read(paths::binaries().join("examples/vsock_guest"))?;
    fs::write(&volume, images::boot_volume(program)?)?;
    let plan = Plan {
        vmm: stage.folder().join("casulo-vmm"),
        kernel: paths::casulo_home()?.join("kernel/vmlinux"),
        volume,
        firecracker: rivals::firecracker(&stage.cache).map_err(|error| format!("{error:#}")),
        runs: args.runs,
    };
    let clock = stage.clock(args.count);
    let mut command = stage.command("vsock-inside", &plan, clock, HOST_MEMORY_MIB)?;
    let measured: Vec<Measured> = gather_all(&mut command, |row: &Measured| {
        eprintln!("{}: {:?} ns", row.contender, row.times);
    })?;
    print(&measured, args.common.json, || Ok(describe(&measured, args.runs, clock)))
}

fn describe(measured: &[Measured], runs: u32, clock: Clock) -> String {
    let (second, what) = clock.second();
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
