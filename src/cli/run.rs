//! `casulo run`: one command in one microVM.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::time::Instant;

use casulo_protocol::error::TaskError;
use casulo_protocol::event::{Event, Phase};
use casulo_protocol::result::{Reason, Rejected, RunResult};
use casulo_protocol::spec::RunSpec;
use tokio::io::AsyncRead;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::cli::ends::Ends;
use crate::cli::host::{self, Choice, Connection};
use crate::cli::options::{EnvironmentOptions, SandboxOptions, milliseconds};
use crate::cli::stdio::Standard;
use crate::cli::{FAILED, complain, terminal};
use crate::vm::capacity;
use crate::{Control, Error, Files, Runtime, Sandbox, Stdio};

/// Bytes of each output that `--json` keeps.
const JSON_OUTPUT: usize = 1 << 20;

/// Options of `casulo run`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    sandbox: SandboxOptions,
    #[command(flatten)]
    command: EnvironmentOptions,
    /// Most seconds that the command may run [default: no limit]
    #[arg(long, value_parser = milliseconds, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Print on standard error where the time went
    #[arg(long)]
    timings: bool,
    /// Print one JSON object with the result, the outputs (up to 1 MiB each) and the changed files
    #[arg(long, conflicts_with = "terminal")]
    json: bool,
    /// Pass standard input on also when it is a terminal
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal; implies -i
    #[arg(short, long)]
    terminal: bool,
    /// The command and its arguments; options end here
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    argv: Vec<String>,
}

/// Runs it; gives the exit status.
pub(crate) fn run(args: &Args) -> u8 {
    if let Some(word) = unknown_option(&args.argv, std::env::args_os()) {
        return fail(
            args,
            &invalid(format!(
                "unknown option {word:?}; `casulo run --help` lists the options, and `--` ends them"
            )),
        );
    }
    let config = match host::config() {
        Ok(config) => config,
        Err(e) => return fail(args, &e.into()),
    };
    // Here too: an emulated host is made as large as the guest needs.
    if let Err(e) = capacity::check(args.sandbox.memory) {
        return fail(args, &e.into());
    }
    let (terminal, input) = (args.terminal, passes_input(args));
    let connection = Connection { terminal, input, ..Connection::default() };
    match host::choose(&args.sandbox, &config, connection) {
        Ok(Choice::Native) => {}
        Ok(Choice::Done(status)) => return status,
        Err(text) => return fail(args, &internal(text)),
    }
    // One thread: starting more costs more than a run can win by them.
    let tokio = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(tokio) => tokio,
        Err(e) => return fail(args, &internal(format!("cannot start: {e}"))),
    };
    match tokio.block_on(async { Runtime::open(config).map(|r| session(args, r)) }) {
        Ok(session) => tokio.block_on(session),
        Err(e) => fail(args, &e.into()),
    }
}

/// The command's first word when it looks like an option and no `--` stands before it: the parser takes
/// every word that it does not know as the begin of the command.
pub(crate) fn unknown_option(
    argv: &[String],
    line: impl ExactSizeIterator<Item = OsString>,
) -> Option<&String> {
    let word = argv.first().filter(|word| word.starts_with('-'))?;
    let before = line.len().checked_sub(argv.len())?.checked_sub(1)?;
    let separated = line.into_iter().nth(before).is_some_and(|word| word == "--");
    (!separated).then_some(word)
}

fn invalid(message: String) -> TaskError {
    use casulo_protocol::error::{ErrorClass, Retry};
    TaskError { class: ErrorClass::InvalidArgument, message, retry: Retry::No }
}

fn internal(message: String) -> TaskError {
    use casulo_protocol::error::{ErrorClass, Retry};
    TaskError { class: ErrorClass::Internal, message, retry: Retry::No }
}

/// Tells the error.
fn fail(args: &Args, error: &TaskError) -> u8 {
    complain(&error.message);
    if args.json {
        // One failure is told already.
        let _ = print_json(&serde_json::json!({ "error": error }));
    }
    FAILED
}

fn print_json(value: &impl serde::Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    let mut stdout = std::io::stdout();
    match stdout.write_all(&text).and_then(|()| stdout.flush()) {
        // A reader that is gone does not want it.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

async fn session(args: &Args, runtime: Runtime) -> u8 {
    let mut ends = match Ends::install() {
        Ok(ends) => ends,
        Err(e) => return fail(args, &internal(format!("cannot watch for signals: {e}"))),
    };
    let sandbox = tokio::select! {
        biased;
        // Dropping the other future kills the VM.
        status = ends.next() => return status,
        sandbox = runtime.sandbox(args.sandbox.spec()) => match sandbox {
            Ok(sandbox) => sandbox,
            Err(e) => return fail(args, &e.into()),
        },
    };
    let outcome = tokio::select! {
        biased;
        status = ends.next() => Outcome::Interrupted(status),
        result = task(args, &sandbox) => result.map_or_else(Outcome::Failed, |done| Outcome::Done(Box::new(done))),
    };
    // What was written is made safe to read however the task ended; a second signal ends that too.
    tokio::select! {
        biased;
        status = ends.next() => status,
        status = finish(args, sandbox, outcome) => status,
    }
}

/// How a task ended.
enum Outcome {
    Done(Box<RunResult>),
    Failed(Error),
    /// By a signal, with this exit status.
    Interrupted(u8),
}

async fn task(args: &Args, sandbox: &Sandbox) -> Result<RunResult, Error> {
    let mut spec = RunSpec::new(args.argv.iter().cloned());
    spec.env = args.command.environment().map_err(Error::Invalid)?;
    spec.user.clone_from(&args.command.user);
    spec.workdir.clone_from(&args.command.workdir);
    spec.timeout_ms = args.timeout;
    let stdin = input(args)?;
    let result = if args.json {
        sandbox.run_captured(&spec, stdin, JSON_OUTPUT, Files::Ignore).await?
    } else {
        streamed(args, &mut spec, stdin, sandbox).await?
    };
    if args.timings {
        // Asked for once the result is there, so that asking costs the command nothing.
        sandbox.counters().await;
    }
    Ok(result)
}

/// Ends the VM and tells how it went; gives the exit status.
async fn finish(args: &Args, sandbox: Sandbox, outcome: Outcome) -> u8 {
    let begin = Instant::now();
    let files = if args.json { Files::List } else { Files::Ignore };
    let output =
        if args.timings { sandbox.close(files).await } else { sandbox.finish(files).await };
    if args.timings && matches!(outcome, Outcome::Done(_)) {
        let teardown_us = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        print_timings(args, &sandbox.events(), teardown_us);
    }
    let sandbox_events = if args.json { sandbox.events() } else { Vec::new() };
    // The kernel needs a while to free the VM; nobody waits for that.
    std::mem::forget(sandbox);
    match (outcome, output) {
        (Outcome::Done(mut result), Ok(output)) => {
            output.add_to(&mut result);
            for event in sandbox_events {
                if let Event::Files { files, left_out, .. } = event {
                    (result.accessed, result.accessed_omitted) = (files, left_out);
                }
            }
            if !args.json {
                tell(&result);
            }
            let status = result.exit_status();
            if args.json
                && let Err(e) = print_json(&result)
            {
                return fail(args, &Error::io("cannot write the result", e).into());
            }
            status
        }
        (Outcome::Done(_), Err(e)) => fail(args, &e.into()),
        (other, output) => {
            match output {
                Ok(output) => tell_output(&output.rejected, output.rejected_omitted),
                Err(e) => complain(&e.to_string()),
            }
            match other {
                Outcome::Failed(e) => fail(args, &e.into()),
                Outcome::Interrupted(status) => status,
                Outcome::Done(_) => FAILED,
            }
        }
    }
}

/// What the user must know and the command did not say itself.
fn tell(result: &RunResult) {
    if !result.stderr.is_empty() {
        // Why the program could not be started.
        complain(&result.stderr);
    }
    if result.oom {
        complain("the guest ran out of memory; give it more with --memory");
    }
    if result.output_limit_hit {
        complain(
            "a limit of the output folder (--output-limit, --output-files), or its disk, was reached",
        );
    }
    tell_output(&result.rejected, result.rejected_omitted);
}

/// What was not let out.
fn tell_output(rejected: &[Rejected], omitted: u64) {
    const MOST: usize = 10;
    for entry in rejected.iter().take(MOST) {
        let why = match entry.reason {
            Reason::LinkOutside => {
                "a link that leads out of the share (--output-links all keeps it)"
            }
            Reason::Link => "a link",
            Reason::Special => "a FIFO, socket or device",
            Reason::Name => "control characters in its name",
            _ => "an artifact that cannot be put in its place",
        };
        let what = format!("{:?} in {}: {why}", entry.path, entry.share);
        let detail = entry.detail.as_deref().map(|d| format!(": {d}")).unwrap_or_default();
        complain(&match (&entry.still_there, entry.reason) {
            (Some(e), _) => format!("could not remove {what}: {e}"),
            (None, Reason::Place) => format!("did not release {what}{detail}"),
            (None, _) => format!("removed {what}{detail}"),
        });
    }
    let more = u64::try_from(rejected.len().saturating_sub(MOST)).unwrap_or(u64::MAX);
    let more = more.saturating_add(omitted);
    if more > 0 {
        complain(&format!("and {more} more; --json lists them"));
    }
}

type Input = Option<Box<dyn AsyncRead + Send + Unpin>>;

/// Standard input goes to the command unless it is a terminal that nobody asked for.
fn passes_input(args: &Args) -> bool {
    args.interactive || args.terminal || !std::io::stdin().is_terminal()
}

fn input(args: &Args) -> Result<Input, Error> {
    if !passes_input(args) {
        return Ok(None);
    }
    match Standard::new(std::io::stdin()) {
        Ok(input) => Ok(Some(Box::new(input))),
        Err(e) => Err(Error::io("cannot read standard input", e)),
    }
}

async fn streamed(
    args: &Args,
    spec: &mut RunSpec,
    stdin: Input,
    sandbox: &Sandbox,
) -> Result<RunResult, Error> {
    let open = |result: std::io::Result<Standard>| {
        result.map_err(|e| Error::io("cannot write to standard output or error", e))
    };
    let stdout = open(Standard::new(std::io::stdout()))?;
    let stderr = open(Standard::new(std::io::stderr()))?;
    let mut stdio =
        Stdio { stdin, stdout: Box::new(stdout), stderr: Box::new(stderr), control: None };
    if !args.terminal {
        return sandbox.run(spec, stdio, Files::Ignore).await;
    }
    let mut changed = signal(SignalKind::window_change())
        .map_err(|e| Error::io("cannot watch the terminal's size", e))?;
    spec.terminal = Some(terminal::size());
    let (tell, told) = mpsc::channel(4);
    stdio.control = Some(told);
    let resize = async {
        loop {
            changed.recv().await;
            if tell.send(Control::WindowSize(terminal::size())).await.is_err() {
                return std::future::pending::<()>().await;
            }
        }
    };
    let mut raw = terminal::Raw::enter();
    let result = tokio::select! {
        result = sandbox.run(spec, stdio, Files::Ignore) => result,
        () = resize => Err(Error::Invalid("unreachable".into())),
    };
    raw.leave();
    result
}

/// Milliseconds between the phases.
fn print_timings(args: &Args, events: &[Event], teardown_us: u64) {
    let at = |wanted: Phase| {
        events.iter().find_map(|e| match e {
            Event::Phase { phase, at_us } if *phase == wanted => Some(*at_us),
            _ => None,
        })
    };
    let result = events.iter().find_map(|e| match e {
        Event::ExecEnded { at_us, .. } => Some(*at_us),
        _ => None,
    });
    let rows = [
        ("checks and files", Some(0), at(Phase::Prepared)),
        ("VMM process", at(Phase::Prepared), at(Phase::VmmSpawned)),
        ("VMM start", at(Phase::VmmSpawned), at(Phase::KernelEntered)),
        ("kernel", at(Phase::KernelEntered), at(Phase::AgentUp)),
        ("agent ready", at(Phase::AgentUp), at(Phase::Ready)),
        ("command", at(Phase::Ready), result),
        ("total to result", Some(0), result),
    ];
    let mut list: Vec<(&str, u64)> = rows
        .iter()
        .filter_map(|(name, from, to)| Some((*name, (*to)?.saturating_sub((*from)?))))
        .collect();
    list.push(("teardown", teardown_us));
    let counters = events.iter().rev().find_map(|e| match e {
        Event::Counters(counters) => Some(*counters),
        _ => None,
    });
    if args.json {
        let map: serde_json::Map<String, serde_json::Value> =
            list.iter().map(|(name, us)| (name.replace(' ', "_"), (*us).into())).collect();
        let _ = writeln!(
            std::io::stderr(),
            "{}",
            serde_json::json!({ "timings_us": map, "counters": counters })
        );
        return;
    }
    for (name, us) in list {
        let (ms, rest) = (us / 1000, us % 1000);
        let _ = writeln!(std::io::stderr(), "casulo: {name:<18}{ms:>6}.{rest:03} ms");
    }
    if let Some(c) = counters {
        let _ = writeln!(
            std::io::stderr(),
            "casulo: {} VM exits ({} MMIO, {} ports), {} page faults, {} KiB resident",
            c.exits,
            c.mmio_exits,
            c.pio_exits,
            c.page_faults,
            c.max_rss_kib
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_like_an_option_is_a_command_only_after_dashes() {
        let line =
            |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>().into_iter();
        let argv = vec!["-x".to_owned(), "a".to_owned()];
        assert_eq!(unknown_option(&argv, line(&["casulo", "run", "--", "-x", "a"])), None);
        assert_eq!(unknown_option(&argv, line(&["casulo", "run", "-x", "a"])), Some(&argv[0]));
        let argv = vec!["ls".to_owned(), "-x".to_owned()];
        assert_eq!(unknown_option(&argv, line(&["casulo", "run", "ls", "-x"])), None);
    }
}
