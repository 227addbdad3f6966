//! One run, from descriptors to result.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use casulo_protocol::agent::{Captured, CommandResult};
use casulo_protocol::stream::{Channel, Frame};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Mutex, watch};

use super::capture::Capture;
use super::command::{Command, StartError};
use super::fd::Fd;
use super::process::{Ended, Running};
use super::pump::{self, PIPE_SIZE, Request, Sender};
use super::spawn::Stdio;
use super::user::User;
use super::{Engine, ExecError, Task, system, terminal};
use crate::streams::Stream;

/// How long the host may take to read the last frames before the result is sent all the same.
const FAREWELL: Duration = Duration::from_secs(30);

/// Runs `task`, with `stream` if it wants one.
pub(super) async fn run(
    engine: &Engine,
    task: Task,
    stream: Option<Stream>,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<CommandResult, ExecError> {
    let prepared = engine.user(&task.options.user).and_then(|user| {
        Command::new(&task.argv, &task.options, &user).map(|command| (user, command))
    });
    match (prepared, stream) {
        (Err(error), None) => Ok(not_started(error)),
        (Err(error), Some(stream)) => {
            let (_, out) = tokio::io::split(stream.io);
            farewell(&Mutex::new(out), &[Channel::Stdout, Channel::Stderr], error.exit_code).await;
            Ok(not_started(error))
        }
        (Ok((user, command)), None) => captured(engine, task, &user, &command, cancelled).await,
        (Ok((user, command)), Some(stream)) => {
            streamed(engine, task, &user, &command, stream, cancelled).await
        }
    }
}

pub(super) fn not_started(error: StartError) -> CommandResult {
    CommandResult {
        exit_code: Some(error.exit_code),
        start_error: Some(error.message),
        ..CommandResult::default()
    }
}

/// Ends channels and says that the command exited with `code`.
pub(super) async fn farewell<W: AsyncWrite + Unpin>(out: &Sender<W>, ends: &[Channel], code: i32) {
    say_farewell(out, ends, (code.unsigned_abs() & 0xff) << 8).await;
}

pub(super) async fn say_farewell<W: AsyncWrite + Unpin>(
    out: &Sender<W>,
    ends: &[Channel],
    status: u32,
) {
    let mut bytes = Vec::new();
    for channel in ends {
        Frame::End(*channel).encode(&mut bytes);
    }
    Frame::Exit(status).encode(&mut bytes);
    // A host that is gone or does not read has no use for it; the result follows by the call.
    let _ = tokio::time::timeout(FAREWELL, async {
        let mut out = out.lock().await;
        out.write_all(&bytes).await?;
        out.flush().await?;
        out.shutdown().await
    })
    .await;
}

/// Our side and the command's side of its standard streams.
pub(super) struct Pipes {
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

pub(super) fn pipes(large: bool) -> io::Result<(Pipes, Stdio)> {
    let make = || {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        if large {
            // A smaller pipe works too.
            let _ = fcntl_setpipe_size(&write, PIPE_SIZE);
        }
        io::Result::Ok((read, write))
    };
    let (stdin, our_stdin) = make()?;
    let (our_stdout, stdout) = make()?;
    let (our_stderr, stderr) = make()?;
    Ok((
        Pipes { stdin: our_stdin, stdout: our_stdout, stderr: our_stderr },
        Stdio::Pipes { stdin, stdout, stderr },
    ))
}

/// Waits for the end of the process, clears away the rest, and only then lets the pumps finish.
async fn lifecycle(
    running: &Running,
    command: &Command,
    timeout_ms: u64,
    over: &AtomicBool,
    finish: watch::Sender<bool>,
) -> Result<(Ended, CommandResult, u32), ExecError> {
    let ended = running.ended(command, timeout_ms).await.map_err(system("wait for a process"))?;
    let duration = running.age();
    over.store(true, Ordering::Relaxed);
    let status = match &ended {
        Ended::Exited(status) => {
            running.clear().await.map_err(system("kill the rest of a command"))?;
            *status
        }
        Ended::NotStarted(error) => (error.exit_code.unsigned_abs() & 0xff) << 8,
        Ended::TimedOut => running.kill().await.map_err(system("kill a command"))?,
    };
    finish.send_replace(true);
    let mut result = CommandResult {
        oom: running.oom(),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        ..CommandResult::default()
    };
    match &ended {
        Ended::Exited(status) => {
            let signal = i32::try_from(status & 0x7f).unwrap_or(0);
            if signal == 0 {
                result.exit_code = i32::try_from((status >> 8) & 0xff).ok();
            } else {
                result.signal = Some(signal);
            }
        }
        Ended::NotStarted(error) => {
            result.exit_code = Some(error.exit_code);
            result.start_error = Some(error.message.clone());
        }
        Ended::TimedOut => result.timed_out = true,
    }
    Ok((ended, result, status))
}

/// Kills a command that nobody waits for.
async fn abandon(running: &Running) -> ExecError {
    match running.kill().await {
        Ok(_) => ExecError::Cancelled,
        Err(error) => ExecError::System { what: "kill a cancelled command", error },
    }
}

async fn captured(
    engine: &Engine,
    task: Task,
    user: &User,
    command: &Command,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<CommandResult, ExecError> {
    let Task { options, extra, .. } = task;
    let (ours, theirs) = pipes(false).map_err(system("make a pipe"))?;
    let running = match Running::start(engine, command, user, theirs, extra.as_ref())? {
        Ok(running) => running,
        Err(error) => return Ok(not_started(error)),
    };
    drop(extra);
    let watch = |fd| Fd::new(fd).map_err(system("watch a pipe"));
    let (stdin, stdout, stderr) = (watch(ours.stdin)?, watch(ours.stdout)?, watch(ours.stderr)?);

    let (finish, finished) = watch::channel(false);
    let over = AtomicBool::new(false);
    let (mut out, mut err) = (Capture::new(options.max_output), Capture::new(options.max_output));
    let work = async {
        let outputs = async {
            tokio::try_join!(
                pump::capture(stdout, &mut out, finished.clone()),
                pump::capture(stderr, &mut err, finished.clone()),
            )
            .map_err(system("read the output of a command"))
        };
        let life = lifecycle(&running, command, options.timeout_ms, &over, finish);
        tokio::try_join!(life, outputs)
    };
    let feed = async {
        // A command need not read its input.
        let _ = stdin.write_all(options.stdin.as_bytes()).await;
        drop(stdin);
        std::future::pending::<()>().await;
    };
    let done = tokio::select! {
        biased;
        () = cancelled => None,
        done = work => Some(done),
        () = feed => None,
    };
    match done {
        None => Err(abandon(&running).await),
        Some(Err(error)) => {
            abandon(&running).await;
            Err(error)
        }
        Some(Ok(((ended, mut result, _), _))) => {
            let started = !matches!(ended, Ended::NotStarted(_));
            let finish = |c: Capture| if started { c.finish() } else { Captured::default() };
            (result.stdout, result.stderr) = (finish(out), finish(err));
            Ok(result)
        }
    }
}

async fn streamed(
    engine: &Engine,
    task: Task,
    user: &User,
    command: &Command,
    stream: Stream,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<CommandResult, ExecError> {
    let Task { options, extra, .. } = task;
    let (from, out) = tokio::io::split(stream.io);
    let out = &Mutex::new(out);

    // A terminal is both the input and the output; a copy of the descriptor for each direction.
    let (stdin, stdout, stderr, terminal, theirs) = match options.terminal {
        None => {
            let (ours, theirs) = pipes(true).map_err(system("make a pipe"))?;
            (Some(ours.stdin), ours.stdout, Some(ours.stderr), None, theirs)
        }
        Some(size) => {
            let (master, slave) = terminal::open(size, user).map_err(system("make a terminal"))?;
            let keys = rustix::io::fcntl_dupfd_cloexec(&master, 3).map_err(io::Error::from);
            let keys = Fd::new(keys.map_err(system("make a terminal"))?);
            let keys = keys.map_err(system("make a terminal"))?;
            (None, master, None, Some(keys), Stdio::Terminal(slave))
        }
    };
    let running = match Running::start(engine, command, user, theirs, extra.as_ref())? {
        Ok(running) => running,
        Err(error) => {
            farewell(out, &[Channel::Stdout, Channel::Stderr], error.exit_code).await;
            return Ok(not_started(error));
        }
    };
    drop(extra);
    let watch = |fd| Fd::new(fd).map_err(system("watch a pipe"));
    let stdin = stdin.map(watch).transpose()?;
    let stdout = watch(stdout)?;
    let stderr = stderr.map(watch).transpose()?;

    let (finish, finished) = watch::channel(false);
    let keep = options.keep.as_ref();
    let mut kept_out = engine.inner.calls.keep(keep, "stdout");
    let mut kept_err = engine.inner.calls.keep(keep, "stderr");
    let (no_stdout, unwanted_stdout) = watch::channel(false);
    let (no_stderr, unwanted_stderr) = watch::channel(false);
    let over = AtomicBool::new(false);

    let work = async {
        let outputs = async {
            let errors = async {
                match stderr {
                    Some(fd) => {
                        let finished = finished.clone();
                        let kept = &mut kept_err;
                        pump::output(fd, Channel::Stderr, out, kept, finished, unwanted_stderr)
                            .await
                    }
                    None => pump::send(out, &Frame::End(Channel::Stderr)).await,
                }
            };
            let finished = finished.clone();
            let kept = &mut kept_out;
            let plain = pump::output(stdout, Channel::Stdout, out, kept, finished, unwanted_stdout);
            tokio::try_join!(plain, errors).map_err(system("send the output of a command"))
        };
        let life = lifecycle(&running, command, options.timeout_ms, &over, finish);
        tokio::try_join!(life, outputs)
    };
    let (to_stdin, queue) = pump::stdin_queue();
    let feed = async {
        let result = match (stdin, &terminal) {
            (Some(fd), _) => pump::stdin(fd, queue).await,
            (None, Some(terminal)) => pump::keys(terminal, queue).await,
            (None, None) => Ok(()),
        };
        if result.is_err() && pump::send(out, &Frame::Reset(Channel::Stdin)).await.is_err() {
            return;
        }
        std::future::pending::<()>().await;
    };
    let requests = |request| match request {
        Request::WindowSize(rows, columns) => {
            if let Some(terminal) = &terminal {
                let _ = terminal::resize(terminal, rows, columns);
            }
        }
        Request::Signal(signal) => {
            // After the end the number may be another's.
            if !over.load(Ordering::Relaxed) {
                terminal::signal_foreground(terminal.as_ref(), running.pid(), signal);
            }
        }
        Request::Unwanted(Channel::Stderr) => drop(no_stderr.send_replace(true)),
        Request::Unwanted(_) => drop(no_stdout.send_replace(true)),
    };
    let listen = pump::input(from, stream.decoder, to_stdin, requests);
    let done = tokio::select! {
        biased;
        () = cancelled => None,
        done = work => Some(done),
        // Both end only when the host is gone or breaks the format.
        _ = listen => None,
        () = feed => None,
    };
    match done {
        None => Err(abandon(&running).await),
        Some(Err(error)) => {
            abandon(&running).await;
            Err(error)
        }
        Some(Ok(((_, mut result, status), _))) => {
            (result.stdout_kept, result.stderr_kept) = (kept_out.finish(), kept_err.finish());
            say_farewell(out, &[], status).await;
            Ok(result)
        }
    }
}
