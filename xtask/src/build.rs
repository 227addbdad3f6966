//! Builds binaries, kernel and images and installs them into CASULO_HOME.

use anyhow::{Result, bail};

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: Args) -> Result<()> {
    bail!("not there yet")
}
