//! Measures Casulo beside its rivals.
//!
//! Where KVM cannot run guests, everything is measured in one emulated host that counts
//! instructions: there an instruction takes a nanosecond, so that figures agree from run to run
//! whatever else the machine does. Where KVM works, it is wall-clock time.

use anyhow::Result;
use clap::Subcommand;

mod boot;
mod call;
mod fs;
mod inside;
mod measure;
mod memory;
mod rivals;
mod stage;
mod table;
mod trace;
mod vsock;

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// From the start of the command to its result and to its end, cold, beside Firecracker and
    /// microsandbox
    Boot(boot::Args),
    /// Throughput and round trips of vsock connections, beside Firecracker
    Vsock(vsock::Args),
    /// Files of a share, beside virtiofsd and beside the host itself
    Fs(fs::Args),
    /// From a client's request to the answer, over stdio and HTTP
    Call(call::Args),
    /// The part of `call` that runs beside the microVMs
    #[command(hide = true)]
    CallInside(call::inside::Args),
    /// The part of `fs` that runs beside the microVMs
    #[command(hide = true)]
    FsInside(fs::inside::Args),
    /// The part of `fs` that runs in the microVMs
    #[command(hide = true)]
    FsWorkload(fs::workload::Args),
    /// The part of `vsock` that runs beside the microVMs
    #[command(hide = true)]
    VsockInside(vsock::inside::Args),
    /// The part of `boot` that runs beside the microVMs
    #[command(hide = true)]
    Inside(inside::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.what {
        What::Boot(args) => boot::run(args),
        What::Call(args) => call::run(args),
        What::CallInside(args) => call::inside::run(args),
        What::Inside(args) => inside::run(args),
        What::Fs(args) => fs::run(args),
        What::FsInside(args) => fs::inside::run(args),
        What::FsWorkload(args) => fs::workload::run(args),
        What::Vsock(args) => vsock::run(args),
        What::VsockInside(args) => vsock::inside::run(args),
    }
}
