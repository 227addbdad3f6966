//! Process 1 of the guest: see the library.

use std::process::ExitCode;

use casulo_agent::boot::{self, BootArguments, Booted};
use casulo_agent::service;

fn main() -> ExitCode {
    casulo_protocol::abort_on_panic();
    if !rustix::process::getpid().is_init() {
        eprintln!("casulo-agent is process 1 of a Casulo guest and does nothing elsewhere.");
        return ExitCode::from(2);
    }
    let arguments = std::env::args().skip(1);
    let why = match BootArguments::parse(arguments).and_then(boot::boot).map(serve) {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => format!("cannot serve: {error}"),
        Err(error) => error.to_string(),
    };
    boot::give_up(&why)
}

fn serve(booted: Booted) -> std::io::Result<std::convert::Infallible> {
    service::run(booted)
}
