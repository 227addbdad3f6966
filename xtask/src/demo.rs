//! The main job on a real file, on a machine that has nothing yet.

use anyhow::{Result, bail};

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: Args) -> Result<()> {
    bail!("not there yet")
}
