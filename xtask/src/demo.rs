//! The main job on a real file, on a machine that has nothing yet.
//!
//! Builds whatever is missing, then lets `casulo run` do what a user would: a CSV goes in through
//! `--input`, Python computes in the microVM, a JSON report and an SVG chart come out through
//! `--output`.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{build, paths, sh};

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: Args) -> Result<()> {
    build::everything()?;
    let root = paths::root();
    let input = root.join("examples/report");
    let output = root.join("target/demo");
    if output.exists() {
        fs::remove_dir_all(&output)
            .with_context(|| format!("cannot clear {}", output.display()))?;
    }
    fs::create_dir_all(&output).with_context(|| format!("cannot make {}", output.display()))?;

    let mut casulo = Command::new(root.join("target/release/casulo"));
    casulo.args(["run", "--timings", "--input"]).arg(&input).arg("--output").arg(&output).args([
        "--",
        "python3",
        "/workspace/input/report.py",
    ]);
    eprintln!(
        "\n$ casulo run --timings --input examples/report --output target/demo \\\n    \
         -- python3 /workspace/input/report.py"
    );
    sh::run(&mut casulo)?;

    let report = output.join("report.json");
    let text = fs::read_to_string(&report)
        .with_context(|| format!("the task left no report at {}", report.display()))?;
    let report: serde_json::Value =
        serde_json::from_str(&text).context("report.json is no JSON")?;
    let rows = fs::read_to_string(input.join("readings.csv"))?.lines().count() - 1;
    let counted =
        ["readings", "missing"].iter().filter_map(|key| report.get(key)?.as_u64()).sum::<u64>();
    ensure!(
        u64::try_from(rows) == Ok(counted),
        "the report counts {counted} rows, the file holds {rows}"
    );
    let chart = fs::read_to_string(output.join("energy.svg")).context("the task left no chart")?;
    ensure!(
        chart.starts_with("<svg") && chart.trim_end().ends_with("</svg>"),
        "the chart is no SVG"
    );

    eprintln!("\n{rows} rows went in; out came:");
    for name in ["report.json", "energy.svg"] {
        let size = fs::metadata(output.join(name))?.len();
        eprintln!("  target/demo/{name}  {size} bytes");
    }
    Ok(())
}
