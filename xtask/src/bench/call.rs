//! `cargo xtask bench call`: what a tool call costs from a client's request to its answer, over stdio and HTTP.

use anyhow::Result;

use self::inside::{Measured, Plan, WAYS, WHATS};
use super::stage::{Common, gather_all, print};
use super::table::{render, spread};
use crate::paths;

pub(super) mod inside;

/// Memory of the emulated host in MiB.
const HOST_MEMORY_MIB: u32 = 3072;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Calls of each kind, after some that are not counted
    #[arg(long, default_value_t = 11, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    #[command(flatten)]
    common: Common,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let stage = args.common.stage()?;
    let casulo = stage.folder().join("casulo");
    let plan = Plan { casulo, home: paths::casulo_home()?, runs: args.runs };
    let mut command = stage.command("call-inside", &plan, stage.clock(true), HOST_MEMORY_MIB)?;
    let measured: Vec<Measured> = gather_all(&mut command, |row: &Measured| {
        eprintln!("{} over {}: {:?} ns", row.what, row.way, row.times);
    })?;
    print(&measured, args.common.json, || Ok(describe(&measured, args.runs, stage.emulated)))
}

fn describe(measured: &[Measured], runs: u32, emulated: bool) -> String {
    let unit = if emulated {
        "vms (1 vms = 1,000,000 instructions of the whole host, in one emulated processor)"
    } else {
        "ms of wall-clock time"
    };
    let rows: Vec<Vec<String>> = WHATS
        .iter()
        .map(|(what, ..)| {
            let cell = |way: &&str| {
                let row = measured.iter().find(|row| row.what == *what && row.way == **way);
                let times = row.map(|row| row.times.as_slice()).unwrap_or_default();
                // Exact up to 104 days.
                spread(&times.iter().map(|time| *time as f64 / 1e6).collect::<Vec<_>>())
            };
            std::iter::once((*what).to_owned()).chain(WAYS.iter().map(cell)).collect()
        })
        .collect();
    let heading: Vec<&str> = std::iter::once("call").chain(WAYS).collect();
    format!(
        "\nRequest -> answer of one client, MCP 2026-07-28, in {unit}: median of {runs} calls and the \
         largest distance from it.\n\n{}",
        render(&heading, &rows)
    )
}
