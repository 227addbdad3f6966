//! `casulo-vmm`: see the library. It takes no arguments; `casulo` starts it with a control socket.

use std::process::ExitCode;
use std::time::Instant;

use casulo_vmm::control::{Control, ControlError};
use casulo_vmm::{jail, self_test, vmm};

/// The program was started in a wrong way.
const EXIT_USAGE: u8 = 2;
/// The VM could not go on for a reason that the parent could not be told.
const EXIT_FAILURE: u8 = 1;

fn main() -> ExitCode {
    let began = Instant::now();
    casulo_protocol::abort_on_panic();
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--version") => {
            use std::io::Write;
            let version = env!("CARGO_PKG_VERSION");
            let protocol = casulo_protocol::vmm::VERSION;
            let line = format!("casulo-vmm {version} (protocol {protocol})\n");
            return match std::io::stdout().write_all(line.as_bytes()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::from(EXIT_FAILURE),
            };
        }
        // `/dev/kvm` is the standard input.
        Some("--self-test") => {
            let kvm = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned();
            return match kvm.map_err(|e| e.to_string()).and_then(self_test::run) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("{error}");
                    ExitCode::from(EXIT_FAILURE)
                }
            };
        }
        Some(_) => {
            eprintln!("casulo-vmm takes no arguments but --version and --self-test; use casulo");
            return ExitCode::from(EXIT_USAGE);
        }
    }
    // One heap for all threads: a VMM holds little, and each further heap is address space and pages.
    // SAFETY: no other thread runs yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let mut control = match Control::inherited() {
        Ok(control) => control,
        Err(error) => return end(&error, EXIT_USAGE),
    };
    if let Err(error) = jail::close_inherited().and_then(|()| jail::drop_privileges()) {
        return end(&error, EXIT_FAILURE);
    }
    match vmm::run(&mut control, began) {
        // The parent is gone: there is nobody to tell, and nothing to keep.
        Ok(()) | Err(ControlError::Closed) => ExitCode::SUCCESS,
        Err(error) => end(&error, EXIT_FAILURE),
    }
}

fn end(error: &dyn std::error::Error, code: u8) -> ExitCode {
    eprintln!("casulo-vmm: {error}");
    ExitCode::from(code)
}
