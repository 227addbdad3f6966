//! The `casulo` command.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
enum Cli {
    /// Runs a command in the emulated host
    #[command(hide = true)]
    EmulatedHost(casulo::emulated::command::Args),
}

fn main() -> ExitCode {
    if casulo::emulated::is_init() {
        casulo::emulated::init();
    }
    let home = std::env::var_os("CASULO_HOME").map(std::path::PathBuf::from).unwrap_or_else(|| {
        std::path::Path::new(&std::env::var_os("HOME").unwrap_or_default())
            .join(".local/share/casulo")
    });
    match Cli::parse() {
        Cli::EmulatedHost(args) => match casulo::emulated::command::run(args, &home) {
            Ok(status) => ExitCode::from(casulo::emulated::command::exit_code(status)),
            Err(error) => {
                eprintln!("casulo: {error}");
                ExitCode::from(125)
            }
        },
    }
}
