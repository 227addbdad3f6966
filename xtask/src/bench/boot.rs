//! `cargo xtask bench boot`: gathers what is needed, has it measured, prints what came out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use casulo_protocol::image::Manifest;
use serde::Serialize;

use super::inside::{self, ALL, Line, MEMORY_MIB, Plan, Row};
use super::memory::Process;
use super::stage::{Common, gather, print};
use super::table::{median, render, spread};
use super::{measure, rivals};
use crate::paths;

/// Memory of the emulated host in MiB.
const HOST_MEMORY_MIB: u32 = 3072;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Runs of each contender, after one that is not counted
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    common: Common,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let stage = args.common.stage()?;
    rivals::busybox()?;
    let reason = |result: Result<PathBuf>| result.map_err(|error| format!("{error:#}"));
    let plan = Plan {
        programs: stage.folder().to_owned(),
        home: paths::casulo_home()?,
        firecracker: reason(rivals::firecracker(&stage.cache)),
        volume: reason(rivals::volume(&stage.cache)),
        microsandbox: reason(rivals::microsandbox(&stage.cache)),
        runs: args.runs,
        emulated: stage.emulated,
    };
    let clock = stage.clock(true);
    let mut command = stage.command("inside", &plan, clock, HOST_MEMORY_MIB)?;
    let report = collect(&mut command)?;
    print(&report, args.common.json, || {
        let text = describe(&report, args.runs, stage.emulated);
        Ok(format!("{text}\n{}", sizes(&plan.home, stage.folder())?))
    })
}

/// What was measured, as far as it went.
#[derive(Serialize)]
struct Report {
    rows: Vec<Row>,
    timings: Result<Vec<serde_json::Value>, String>,
}

/// Runs the measurement. One that stops in the middle leaves rows without figures.
fn collect(command: &mut Command) -> Result<Report> {
    let mut report = Report { rows: Vec::new(), timings: Err("not measured".to_owned()) };
    let failure = gather(command, |line| {
        match serde_json::from_str(line)? {
            Line::Row(row) => report.rows.push(row),
            Line::Timings(timings) => report.timings = timings,
        }
        Ok(())
    })?;
    if let Some(reason) = failure {
        ensure!(!report.rows.is_empty(), "nothing was measured: {reason}");
        let first = report.rows.len();
        report.rows.extend(ALL.iter().skip(first).map(|name| inside::missing(name, &reason)));
    }
    Ok(report)
}

fn milliseconds(nanoseconds: u64) -> f64 {
    // Exact up to 104 days.
    nanoseconds as f64 / 1e6
}

fn describe(report: &Report, runs: u32, emulated: bool) -> String {
    let unit = if emulated {
        "vms (1 vms = 1,000,000 instructions of the whole host, in one emulated processor)"
    } else {
        "ms of wall-clock time"
    };
    let mut text = format!(
        "\nCold boot: 1 vCPU, {MEMORY_MIB} MiB, median of {runs} runs and the largest distance from \
         it.\nTimes in {unit}.\nCasulo has both shares mounted and its image's overlay; Firecracker \
         has Casulo's kernel, a block device and a\nstatic init; microsandbox its own kernel, a root \
         folder with busybox and no network.\n\n"
    );
    let rows: Vec<Vec<String>> = report.rows.iter().map(figures).collect();
    let heading =
        ["contender", "start -> result", "start -> exit", "-> all gone", "VM exits", "page faults"];
    text.push_str(&render(&heading, &rows));
    text.push_str(
        "\nVM exits are of one more run each, counted by the tracepoint kvm:kvm_exit for the whole \
         host. Page faults are of\nthe command and of all that it started.\n",
    );
    for row in &report.rows {
        text.push_str(&remarks(row));
    }
    text.push_str(&memory(&report.rows));
    text.push_str(&phases(report));
    text
}

fn figures(row: &Row) -> Vec<String> {
    let Ok(runs) = &row.runs else {
        let mut cells = vec![row.name.clone(), "does not run".to_owned()];
        cells.extend(std::iter::repeat_n("-".to_owned(), 4));
        return cells;
    };
    let times = |pick: fn(&measure::Run) -> u64| {
        spread(&runs.iter().map(|run| milliseconds(pick(run))).collect::<Vec<_>>())
    };
    let faults: Vec<f64> = runs.iter().map(|run| run.faults as f64).collect();
    vec![
        row.name.clone(),
        times(|run| run.result),
        times(|run| run.exit),
        times(|run| run.gone),
        row.exits.as_ref().map_or_else(|_| "-".to_owned(), |exits| exits.total().to_string()),
        median(&faults).map_or_else(|| "-".to_owned(), |faults| format!("{faults:.0}")),
    ]
}

/// What there is to say about a row: exits by reason, or why there is no figure.
fn remarks(row: &Row) -> String {
    if let Err(reason) = &row.runs {
        return format!("* {}: {reason}\n", row.name);
    }
    match &row.exits {
        Err(reason) => format!("* {}: VM exits not counted: {reason}\n", row.name),
        Ok(exits) if exits.0.is_empty() => String::new(),
        Ok(exits) => {
            let list: Vec<String> =
                exits.0.iter().take(8).map(|(name, count)| format!("{name} {count}")).collect();
            format!("* {}: exits by reason: {}\n", row.name, list.join(", "))
        }
    }
}

fn memory(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut cells = Vec::new();
    for row in rows {
        match &row.memory {
            Ok(list) => cells.extend(list.iter().map(|process| memory_cells(&row.name, process))),
            Err(reason) if row.runs.is_ok() => {
                text.push_str(&format!("* {}: memory not measured: {reason}\n", row.name));
            }
            Err(_) => {}
        }
    }
    let heading =
        ["process, guest up", "guest memory", "beside it", "of it anonymous", "page tables"];
    format!(
        "\nMemory in KiB by /proc/PID/smaps. Guest memory is the mapping of {MEMORY_MIB} MiB or more; \
         what is beside it and not anonymous\nare pages of the program's file, which all processes of \
         the program share.\n\n{}{text}",
        render(&heading, &cells)
    )
}

fn memory_cells(contender: &str, process: &Process) -> Vec<String> {
    let contender = contender.split_once(':').map_or(contender, |(name, _)| name);
    let contender = contender.split(" -- ").next().unwrap_or_default();
    let mut cells = vec![format!("{contender}: {}", process.name)];
    let figures = [process.guest, process.resident, process.anonymous, process.tables];
    cells.extend(figures.iter().map(u64::to_string));
    cells
}

/// Casulo's phases and counters, in its own words.
fn phases(report: &Report) -> String {
    let list = match &report.timings {
        Ok(list) => list,
        Err(reason) => return format!("\nCasulo's phases are not known: {reason}\n"),
    };
    let values = |group: &str, key: &str| -> Vec<f64> {
        list.iter().filter_map(|run| run.get(group)?.get(key)?.as_f64()).collect()
    };
    let time = |key: &str| -> Vec<f64> {
        values("timings_us", key).iter().map(|us| us / 1000.0).collect()
    };
    let mut rows: Vec<Vec<String>> = [
        ("checks and files", "checks_and_files"),
        ("spawn of the VMM", "VMM_process"),
        ("VMM start, to the kernel's entry", "VMM_start"),
        ("kernel, to the agent's hello", "kernel"),
        ("agent, to ready", "agent_ready"),
        ("command /bin/true", "command"),
        ("request -> result", "total_to_result"),
        ("teardown, when waited for", "teardown"),
    ]
    .iter()
    .map(|(name, key)| vec![(*name).to_owned(), spread(&time(key))])
    .collect();
    let parts = ["VMM_start", "kernel", "agent_ready"].map(time);
    let [start, kernel, agent] = &parts;
    let ready: Vec<f64> = start
        .iter()
        .zip(kernel)
        .zip(agent)
        .map(|((start, kernel), agent)| start + kernel + agent)
        .collect();
    rows.insert(6, vec!["VMM spawned -> agent ready".to_owned(), spread(&ready)]);
    for (name, key) in [
        ("VM exits seen by the VMM", "exits"),
        ("of them MMIO", "mmio_exits"),
        ("of them ports", "pio_exits"),
        ("page faults of the VMM", "page_faults"),
        ("most resident of the VMM, KiB", "max_rss_kib"),
    ] {
        let value = median(&values("counters", key));
        let cell = value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
        rows.push(vec![name.to_owned(), cell]);
    }
    format!("\n{}", render(&["Casulo, by its own --timings", "median"], &rows))
}

fn sizes(home: &Path, programs: &Path) -> Result<String> {
    let size = |path: &Path| -> Result<u64> {
        let metadata =
            fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(metadata.len())
    };
    let mut rows = Vec::new();
    let mut add =
        |name: &str, bytes: u64| rows.push(vec![name.to_owned(), (bytes / 1024).to_string()]);
    add("casulo", size(&programs.join("casulo"))?);
    add("casulo-vmm", size(&programs.join("casulo-vmm"))?);
    add("casulo-agent", size(&paths::binaries().join("casulo-agent"))?);
    add("agent's boot volume", size(&home.join("agent/boot.erofs"))?);
    add("vmlinux", size(&home.join("kernel/vmlinux"))?);
    for name in ["base", "dev"] {
        let manifest = home.join("images/names").join(name).join("image.json");
        let Ok(text) = fs::read(&manifest) else { continue };
        let manifest: Manifest = serde_json::from_slice(&text)?;
        let layers = manifest.layers.len();
        let bytes = manifest.layers.iter().map(|layer| layer.size).sum();
        add(&format!("image {name}, layers: {layers}"), bytes);
    }
    Ok(render(&["file", "KiB"], &rows))
}
