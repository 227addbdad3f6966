//! Casulo inside another program: ten sandboxes at once, one of which crashes its guest.
//!
//! Nine tasks compute something and give their answers; the tenth brings its own kernel down. The
//! crash is a typed error of that one sandbox; the other nine do not notice.
//!
//! Needs what `cargo xtask build` makes: `casulo-vmm` (first argument) and a home folder with the
//! kernel, the agent and the image `base` (second argument).

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example talks")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use casulo::protocol::spec::{RunSpec, SandboxSpec};
use casulo::{Error, Files, Runtime, RuntimeConfig};

const SANDBOXES: u32 = 10;
/// The one that crashes.
const CRASHES: u32 = 6;
/// Resets the machine under its own feet, without asking process 1: only root may.
const CRASH: &str = "import ctypes; ctypes.CDLL(None).reboot(0x1234567)";

async fn task(runtime: Arc<Runtime>, number: u32) -> Result<String, Error> {
    let mut spec = SandboxSpec::default();
    spec.memory_mib = 128;
    let sandbox = runtime.sandbox(spec).await?;
    let code = match number {
        CRASHES => CRASH.to_owned(),
        n => format!("print(sum(i * {n} for i in range(1000)))"),
    };
    let mut command = RunSpec::new(["python3".to_owned(), "-c".to_owned(), code]);
    command.user = Some("root".to_owned());
    let result = sandbox.run_captured(&command, None, 64 * 1024, Files::Ignore).await?;
    sandbox.close(Files::Ignore).await?;
    Ok(result.stdout)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(vmm), Some(home)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: embed CASULO-VMM CASULO-HOME");
        return ExitCode::FAILURE;
    };
    let mut config = RuntimeConfig::in_home(&home, vmm);
    config.emulated = casulo::emulated::is_emulated();
    let runtime = match Runtime::open(config) {
        Ok(runtime) => Arc::new(runtime),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let tasks: Vec<_> =
        (0..SANDBOXES).map(|n| tokio::spawn(task(Arc::clone(&runtime), n))).collect();
    let (mut answers, mut crashes) = (0, 0);
    for (n, task) in (0..).zip(tasks) {
        match task.await {
            Ok(Ok(answer)) if answer.trim() == (499_500 * n).to_string() => {
                println!("sandbox {n}: {}", answer.trim());
                answers += 1;
            }
            Ok(Ok(answer)) => println!("sandbox {n}: wrong answer {answer:?}"),
            Ok(Err(error @ Error::GuestLost { .. })) => {
                println!("sandbox {n}: {:?}: {error}", error.class());
                crashes += 1;
            }
            Ok(Err(error)) => println!("sandbox {n}: unexpected error: {error}"),
            Err(error) => println!("sandbox {n}: {error}"),
        }
    }
    println!("{answers} answers, {crashes} lost guests");
    if (answers, crashes) == (9, 1) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
