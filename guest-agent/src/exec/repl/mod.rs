//! Resident interpreters: one for each language and user, in which variables live from call to call.
//!
//! An interpreter runs a small driver (the files beside this one). The agent writes the source and
//! the input of a call to files that only it can change, names the call on a socket, and gets one
//! line back when the source has run. Output comes through the same two pipes for the life of the
//! interpreter; what is in them when the line comes belongs to the call. What goes on in the
//! background writes into the output of the next call.
//!
//! What the driver says is the workload's word: it can be wrong about itself, and about nothing else.
//! A call that is cancelled or too slow ends the interpreter with all its processes.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use casulo_protocol::agent::{CommandResult, ExecOptions, ExecuteCode, Session};
use casulo_protocol::stream::Channel;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;

use super::command::Command;
use super::fd::Fd;
use super::process::{Ended, Running};
use super::pump::{self, Request};
use super::session::{farewell, not_started, pipes, say_farewell};
use super::{Engine, ExecError, keep, system};
use crate::streams::Stream;

/// Longest answer of a driver in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Most interpreters.
const MAX_REPLS: usize = 8;
/// How long a call waits for the one before it, which the host may just have cancelled.
const TURN: Duration = Duration::from_secs(3);

/// An interpreter that Casulo has a driver for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Language {
    Python,
    Bash,
    Javascript,
}

impl Language {
    fn parse(name: &str) -> Option<Self> {
        [Self::Python, Self::Bash, Self::Javascript].into_iter().find(|l| l.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Bash => "bash",
            Self::Javascript => "javascript",
        }
    }

    fn argv(self, control: i32, folder: &Path) -> Vec<String> {
        let words: &[&str] = match self {
            Self::Python => &["python3", "-c", include_str!("driver.py")],
            Self::Bash => {
                &["bash", "--noprofile", "--norc", "-c", include_str!("driver.bash"), "bash"]
            }
            Self::Javascript => &["node", "-e", include_str!("driver.js")],
        };
        let rest = [control.to_string(), folder.display().to_string()];
        words.iter().map(|w| (*w).to_owned()).chain(rest).collect()
    }
}

/// All interpreters.
#[derive(Debug)]
pub(super) struct Repls {
    folder: PathBuf,
    next: AtomicU64,
    slots: Mutex<HashMap<Key, SharedSlot>>,
}

/// Language and user.
type Key = (Language, String);
/// Locked while a call runs.
type SharedSlot = Arc<tokio::sync::Mutex<Slot>>;

#[derive(Debug, Default)]
struct Slot {
    live: Option<Live>,
    /// An interpreter was killed and nobody has been told.
    lost: bool,
}

/// A running interpreter. Dropping it kills it.
struct Live {
    running: Running,
    command: Command,
    stdout: OwnedFd,
    stderr: OwnedFd,
    control: Fd,
    folder: PathBuf,
    calls: u64,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Live").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// What a driver says at the end of a call.
#[derive(Debug, Deserialize)]
struct Answer {
    call: u64,
    exit: i32,
    #[serde(default)]
    result: Option<String>,
}

/// How a call ended.
enum Done {
    Answered(Answer),
    Ended(Ended),
    TimedOut,
}

impl Repls {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, next: AtomicU64::new(1), slots: Mutex::default() }
    }

    fn slot(&self, key: Key) -> Option<SharedSlot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= MAX_REPLS && !slots.contains_key(&key) {
            return None;
        }
        Some(Arc::clone(slots.entry(key).or_default()))
    }
}

/// Runs one call.
pub(super) async fn run(
    engine: &Engine,
    code: ExecuteCode,
    stream: Stream,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<CommandResult, ExecError> {
    let ExecuteCode { language, code, options, session } = code;
    let language = Language::parse(&language)
        .ok_or(ExecError::Invalid("the language must be python, bash or javascript"))?;
    let key = (language, options.user.clone());
    let slot = engine.inner.repls.slot(key).ok_or(ExecError::Busy)?;
    let Ok(mut slot) = tokio::time::timeout(TURN, slot.lock()).await else {
        return Err(ExecError::InterpreterBusy(language.name()));
    };
    let lost = std::mem::take(&mut slot.lost);
    // An interpreter may have ended between two calls.
    let gone = slot.live.as_ref().is_some_and(|live| live.running.has_ended());
    if gone {
        slot.live = None;
    }
    let state_lost = lost || gone;
    let live = match slot.live.take() {
        Some(live) => live,
        None => match start(engine, language, &options)? {
            Ok(live) => live,
            Err(result) => {
                let (_, out) = tokio::io::split(stream.io);
                let out = tokio::sync::Mutex::new(out);
                let code = result.exit_code.unwrap_or(126);
                farewell(&out, &[Channel::Stdout, Channel::Stderr], code).await;
                return Ok(result);
            }
        },
    };
    // Until the call has ended well.
    slot.lost = true;
    let session = session.unwrap_or_default();
    let (live, mut result) =
        call(engine, live, language, &code, session, &options, stream, cancelled).await?;
    // Told now, or there is nothing to tell.
    slot.lost = false;
    result.state_lost |= state_lost;
    slot.live = live;
    Ok(result)
}

/// Starts an interpreter; the inner error is a result.
fn start(
    engine: &Engine,
    language: Language,
    options: &ExecOptions,
) -> Result<Result<Live, CommandResult>, ExecError> {
    let repls = &engine.inner.repls;
    let number = repls.next.fetch_add(1, Ordering::Relaxed);
    let folder = repls.folder.join(format!("repl-{number}"));
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|e| system("make a socket")(e.into()))?;
    let argv = language.argv(theirs.as_raw_fd(), &folder);
    let prepared = engine
        .user(&options.user)
        .and_then(|user| Command::new(&argv, options, &user).map(|command| (user, command)));
    let (user, command) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Ok(Err(not_started(error))),
    };
    keep::make_folder(&repls.folder)
        .and_then(|()| keep::make_folder(&folder))
        .map_err(system("make a folder for an interpreter"))?;
    let (pipes, stdio) = pipes(true).map_err(system("make a pipe"))?;
    // Each call has an input of its own; this one is at its end.
    drop(pipes.stdin);
    let running = match Running::start(engine, &command, &user, stdio, Some(&theirs))? {
        Ok(running) => running,
        Err(error) => return Ok(Err(not_started(error))),
    };
    let control = Fd::new(ours).map_err(system("watch a socket"))?;
    let (stdout, stderr) = (pipes.stdout, pipes.stderr);
    Ok(Ok(Live { running, command, stdout, stderr, control, folder, calls: 0 }))
}

impl Live {
    /// Lays the files of a call down and names it.
    async fn order(
        &mut self,
        language: Language,
        code: &str,
        session: Session,
        stdin: &str,
    ) -> io::Result<()> {
        let old = self.calls;
        self.calls += 1;
        let number = self.calls;
        let file = |kind: &str, call: u64| self.folder.join(format!("{kind}-{call}"));
        for kind in ["code", "stdin", "setup"] {
            // Whoever has it open keeps it.
            let _ = std::fs::remove_file(file(kind, old));
        }
        let mut files = vec![("code", code.to_owned()), ("stdin", stdin.to_owned())];
        let mut line = if language == Language::Bash {
            files.push(("setup", setup(&session)));
            number.to_string()
        } else {
            let order = serde_json::json!({
                "call": number, "cwd": session.cwd, "env": session.env,
            });
            order.to_string()
        };
        for (kind, text) in files {
            let path = file(kind, number);
            keep::create(&self.folder, &path)?.write_all(text.as_bytes())?;
        }
        line.push('\n');
        self.control.write_all(line.as_bytes()).await
    }

    /// Waits for the line of the driver.
    async fn answer(&self) -> io::Result<Answer> {
        let mut line = Vec::new();
        let mut buffer = vec![0; 4096];
        loop {
            let length = self.control.read(&mut buffer).await?;
            let new = buffer.get(..length).unwrap_or_default();
            if length == 0 || line.len() > MAX_ANSWER {
                return Err(io::ErrorKind::InvalidData.into());
            }
            line.extend_from_slice(new);
            if line.ends_with(b"\n") {
                break;
            }
        }
        let answer: Answer = serde_json::from_slice(&line).map_err(io::Error::other)?;
        if answer.call == self.calls { Ok(answer) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Waits for the end of a call in whichever way it comes.
    async fn done(&self, timeout_ms: u64) -> io::Result<Done> {
        let answer = async {
            match self.answer().await {
                Ok(answer) => answer,
                // A driver that talks nonsense will not answer; its end or the time tells.
                Err(_) => std::future::pending().await,
            }
        };
        let timer = async {
            match timeout_ms {
                0 => std::future::pending().await,
                ms => tokio::time::sleep(Duration::from_millis(ms)).await,
            }
        };
        tokio::select! {
            biased;
            answer = answer => Ok(Done::Answered(answer)),
            ended = self.running.ended(&self.command, 0) => Ok(Done::Ended(ended?)),
            () = timer => Ok(Done::TimedOut),
        }
    }
}

/// The commands of bash that bring about what a session wants.
fn setup(session: &Session) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let mut lines = String::from("true");
    if !session.cwd.is_empty() {
        lines.push_str(&format!(" && cd -- {}", quoted(&session.cwd)));
    }
    for (name, value) in &session.env {
        lines.push_str(&format!(" && export {}", quoted(&format!("{name}={value}"))));
    }
    lines.push('\n');
    lines
}

/// Another descriptor of the same pipe.
fn watch_copy(fd: &OwnedFd) -> io::Result<Fd> {
    Fd::new(rustix::io::fcntl_dupfd_cloexec(fd, 3)?)
}

#[expect(clippy::too_many_arguments, reason = "a call is what comes together here")]
async fn call(
    engine: &Engine,
    mut live: Live,
    language: Language,
    code: &str,
    session: Session,
    options: &ExecOptions,
    stream: Stream,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<(Option<Live>, CommandResult), ExecError> {
    let began = Instant::now();
    let (from, out) = tokio::io::split(stream.io);
    let out = &tokio::sync::Mutex::new(out);
    let keep = options.keep.as_ref();
    let mut kept_out = engine.inner.calls.keep(keep, "stdout");
    let mut kept_err = engine.inner.calls.keep(keep, "stderr");
    let (finish, finished) = watch::channel(false);
    let (no_stdout, unwanted_stdout) = watch::channel(false);
    let (no_stderr, unwanted_stderr) = watch::channel(false);
    let ooms = live.running.oom_kills();

    let work = async {
        let copy = |fd| watch_copy(fd).map_err(system("watch a pipe"));
        let (stdout, stderr) = (copy(&live.stdout)?, copy(&live.stderr)?);
        let ordered = live.order(language, code, session, &options.stdin).await;
        // One that has ended takes no orders; that is seen below.
        if let Err(error) = ordered
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            return Err(system("give an interpreter its source")(error));
        }
        let outputs = async {
            let (f1, f2) = (finished.clone(), finished);
            let (o, e) = (&mut kept_out, &mut kept_err);
            tokio::try_join!(
                pump::output(stdout, Channel::Stdout, out, o, f1, unwanted_stdout),
                pump::output(stderr, Channel::Stderr, out, e, f2, unwanted_stderr),
            )
            .map_err(system("send the output of a call"))
        };
        let life = async {
            let done = live.done(options.timeout_ms).await;
            let done = done.map_err(system("wait for an interpreter"))?;
            let age = began.elapsed();
            match done {
                Done::Answered(_) => {}
                Done::Ended(_) => {
                    live.running.clear().await.map_err(system("kill the rest of a call"))?;
                }
                Done::TimedOut => {
                    live.running.kill().await.map_err(system("kill an interpreter"))?;
                }
            }
            finish.send_replace(true);
            Ok((done, age))
        };
        tokio::try_join!(life, outputs).map(|(done, _)| done)
    };
    let (to_stdin, _queue) = pump::stdin_queue();
    let requests = |request| match request {
        Request::Unwanted(Channel::Stderr) => drop(no_stderr.send_replace(true)),
        Request::Unwanted(_) => drop(no_stdout.send_replace(true)),
        // There is no terminal, and no foreground.
        Request::WindowSize(..) | Request::Signal(_) => {}
    };
    let listen = pump::input(from, stream.decoder, to_stdin, requests);
    let done = tokio::select! {
        biased;
        () = cancelled => None,
        done = work => Some(done),
        _ = listen => None,
    };
    let (done, age) = match done {
        Some(Ok(done)) => done,
        other => {
            let killed = live.running.kill().await;
            killed.map_err(system("kill a cancelled interpreter"))?;
            return Err(other.and_then(Result::err).unwrap_or(ExecError::Cancelled));
        }
    };
    let mut result = CommandResult {
        oom: live.running.oom_kills() > ooms,
        duration_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        stdout_kept: kept_out.finish(),
        stderr_kept: kept_err.finish(),
        ..CommandResult::default()
    };
    let mut status = 0;
    let mut ended = true;
    match done {
        Done::Answered(answer) => {
            let code = answer.exit & 0xff;
            status = code.unsigned_abs() << 8;
            result.exit_code = Some(code);
            result.result = answer.result;
            ended = false;
        }
        Done::Ended(Ended::Exited(wait)) => {
            status = wait;
            match i32::try_from(wait & 0x7f).unwrap_or(0) {
                0 => result.exit_code = i32::try_from((wait >> 8) & 0xff).ok(),
                signal => result.signal = Some(signal),
            }
        }
        Done::Ended(Ended::NotStarted(error)) => result = not_started(error),
        Done::Ended(Ended::TimedOut) | Done::TimedOut => result.timed_out = true,
    }
    // One that never started had no state.
    result.state_lost = ended && result.start_error.is_none();
    say_farewell(out, &[], status).await;
    Ok(((!ended).then_some(live), result))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setup_of_bash_is_quoted() {
        let session = Session {
            cwd: "/a b/$(x)'".into(),
            env: [("A".to_owned(), "1;'2'".to_owned())].into(),
        };
        assert_eq!(setup(&session), "true && cd -- '/a b/$(x)'\\''' && export 'A=1;'\\''2'\\'''\n");
        assert_eq!(setup(&Session::default()), "true\n");
    }
}
