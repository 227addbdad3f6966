//! `cargo xtask bench fs`: one program that works with files, on the host, in a task, and behind
//! virtiofsd.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use self::inside::{CONTENDERS, Measured, Plan};
use self::workload::{MEASURES, Measure, Unit};
use super::stage::{Clock, Common, gather_all, print};
use super::table::{median, render};
use crate::{images, paths, sh};

mod confine;
pub(super) mod inside;
mod pvh;
pub(super) mod workload;

/// Memory of the emulated host in MiB.
const HOST_MEMORY_MIB: u32 = 3072;
/// Where Debian's `qemu-system-common` has it.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of each measure, after one that is not counted
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Take the time of the machine instead of counting instructions, where KVM has to be emulated
    #[arg(long)]
    wall: bool,
    /// Only contenders with this in their names
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Only measures with this in their names
    #[arg(long, value_name = "NAME")]
    measure: Option<String>,
    #[command(flatten)]
    common: Common,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let stage = args.common.stage()?;
    let volume = stage.folder().join("guest.erofs");
    fs::write(&volume, images::boot_volume(fs::read(stage.folder().join("xtask"))?)?)?;
    let plan = Plan {
        programs: stage.folder().to_owned(),
        home: paths::casulo_home()?,
        volume,
        virtiofsd: virtiofsd().map_err(|error| format!("{error:#}")),
        runs: args.runs,
        emulated: stage.emulated,
        only: args.only.clone(),
        measures: chosen(args.measure.as_deref())?,
    };
    let clock = stage.clock(!args.wall);
    let mut command = stage.command("fs-inside", &plan, clock, HOST_MEMORY_MIB)?;
    let measured: Vec<Measured> = gather_all(&mut command, |_| ())?;
    print(&measured, args.common.json, || Ok(describe(&measured, &plan.measures, args.runs, clock)))
}

/// Numbers of the measures with `name` in their names; all of them is none.
fn chosen(name: Option<&str>) -> Result<Vec<usize>> {
    let Some(name) = name else { return Ok(Vec::new()) };
    let all = MEASURES.iter().enumerate();
    let numbers: Vec<usize> =
        all.filter(|(_, measure)| measure.name.contains(name)).map(|(index, _)| index).collect();
    anyhow::ensure!(!numbers.is_empty(), "no measure has {name:?} in its name");
    Ok(numbers)
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

/// Amount in a second; a figure that is larger is better.
fn rate(measured: &[Measured], contender: &str, index: usize, measure: &Measure) -> Option<f64> {
    let of = measured.iter().find(|m| m.contender == contender)?;
    let line = of.lines.as_ref().ok()?.iter().find(|line| line.measure == index)?;
    let seconds: Vec<f64> =
        line.ticks.as_ref().ok()?.iter().map(|ticks| *ticks as f64 / of.frequency).collect();
    median(&seconds).map(|seconds| measure.amount / seconds)
}

fn describe(measured: &[Measured], chosen: &[usize], runs: u32, clock: Clock) -> String {
    let (second, what) = clock.second();
    let mut text = format!(
        "\nFiles of a share on a tmpfs: the same program and guest kernel, 1 vCPU, median of {runs} \
         runs ({what}). virtiofsd is that of QEMU 7.2 under its microvm machine, with its default of no \
         thread pool; there the program is process 1, behind the same control groups and seccomp filter \
         as a command of Casulo's.\n\n"
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
        .filter(|(index, _)| chosen.is_empty() || chosen.contains(index))
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
