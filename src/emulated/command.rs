//! The hidden command `casulo emulated-host`: any command in the emulated host.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use super::{EmulatedError, Job, Machine};

/// Options of `casulo emulated-host`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Count instructions: 1 instruction is 1 nanosecond of the machine's clock, on 1 processor
    #[arg(long)]
    icount: bool,
    /// Memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 3072, value_parser = clap::value_parser!(u32).range(256..))]
    memory: u32,
    /// Processors
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// A folder that the command may write, beside the current one and CASULO_HOME; may be repeated
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Give the command a terminal
    #[arg(short = 't', long)]
    terminal: bool,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

/// Runs the command; `home` is `CASULO_HOME`.
///
/// # Errors
/// The machine does not start, or ends before the command.
pub fn run(args: Args, home: &Path) -> Result<ExitStatus, EmulatedError> {
    let mut job = super::system("find the current folder", Job::new(args.command))?;
    job.terminal = args.terminal;
    job.writable.extend(args.writable);
    if home.is_dir() {
        job.writable.push(home.to_path_buf());
    }
    let mut machine = Machine::new(home);
    machine.icount = args.icount;
    machine.memory_mib = args.memory;
    machine.cpus = args.cpus;
    super::run(&job, &machine)
}

/// The exit code of a shell for this status: the code itself, or 128 + the signal.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code & 0xff).unwrap_or(u8::MAX)
}
