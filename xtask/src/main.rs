//! What a developer or a new user runs: `cargo xtask build|test|demo|bench|fuzz|kernel|images|dist`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod bench;
mod build;
mod cache;
mod demo;
mod dist;
mod emulated;
mod fuzz;
mod images;
mod kernel;
mod npm;
mod paths;
mod pip;
mod progress;
mod sh;
mod test;

#[derive(Parser)]
#[command(about = "Build, test and try Casulo from its sources", name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Release binaries, kernel and images, ready for `target/release/casulo`
    Build(build::Args),
    /// Everything CI checks: format, lints, licences, unit tests, guest tests
    Test(test::Args),
    /// Set everything up and run the main job on a real file
    Demo(demo::Args),
    /// Measure Casulo and its rivals
    Bench(bench::Args),
    /// Random programs of a hostile guest against every parser of its bytes
    Fuzz(fuzz::Args),
    /// The guest kernel
    Kernel(kernel::Args),
    /// The guest images and the agent's boot volume
    Images(images::Args),
    /// QEMU, kernel and modules of the emulated host
    Emulated(emulated::Args),
    /// One tarball that runs from any folder
    Dist(dist::Args),
    /// A volume that boots a program of one's own, for tests of the VMM
    #[command(hide = true)]
    Volume(images::VolumeArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Build(args) => build::run(args),
        Command::Test(args) => test::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Fuzz(args) => fuzz::run(args),
        Command::Kernel(args) => kernel::run(args),
        Command::Images(args) => images::run(args),
        Command::Emulated(args) => emulated::run(args),
        Command::Dist(args) => dist::run(args),
        Command::Volume(args) => images::make_volume(&args),
    }
}
