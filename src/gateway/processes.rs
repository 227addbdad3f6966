//! `start_process`, `poll_process` and `stop_process`: work that is longer than a client waits.
//!
//! A process is a command whose stream the gateway reads into a ring of bounded size, whether or not
//! somebody polls, so that it never stands still for want of a reader. What the ring has lost is in
//! files of the sandbox once the process has ended.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use casulo_protocol::agent::{Keep, WindowSize};
use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::{HostKind, RunResult};
use casulo_protocol::spec::RunSpec;
use rmcp::model::CallToolResult;
use tokio::io::{AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::render::{self, Budget};
use super::run::call_name;
#[cfg(feature = "http")]
use super::sandboxes::Call;
use super::sandboxes::Held;
use super::server::{Context, Server, capacity, invalid};
use super::tools::args::{PollProcessArgs, Signal, StartProcessArgs, StopProcessArgs};
use super::tools::results::ProcessResult;
use crate::{Control, Error, Execution, Files, Program, Sandbox, Stdio};

/// Output of one process that is held.
const RING: usize = 256 * 1024;
/// Input that waits for a process.
const INPUT: usize = 128 * 1024;
/// Processes of one sandbox that run at once.
pub(super) const MAX_RUNNING: usize = 16;
/// Ended processes of one sandbox that are remembered.
const MAX_ENDED: usize = 16;
/// How long output may settle once some has come: a line is worth more than its first character.
const SETTLE: Duration = Duration::from_millis(50);
/// How long input and signals may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// An output up to this gets no file.
const KEEP_AFTER: u64 = 64 * 1024;
/// The terminal of a process that has one.
const TERMINAL: WindowSize = WindowSize { rows: 24, columns: 80 };

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The newest output, by offset from the start.
#[derive(Debug, Default)]
struct Ring {
    data: VecDeque<u8>,
    total: u64,
}

impl Ring {
    fn push(&mut self, data: &[u8]) {
        self.total = self.total.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        self.data.extend(data.get(data.len().saturating_sub(RING)..).unwrap_or_default());
        let over = self.data.len().saturating_sub(RING);
        self.data.drain(..over);
    }

    /// What is held from `cursor` on, and the offset of its first byte.
    fn from(&self, cursor: u64) -> (Vec<u8>, u64) {
        let held = u64::try_from(self.data.len()).unwrap_or(u64::MAX);
        let first = self.total.saturating_sub(held);
        let start = cursor.clamp(first, self.total);
        let skip = usize::try_from(start.saturating_sub(first)).unwrap_or(usize::MAX);
        (self.data.iter().skip(skip).copied().collect(), start)
    }
}

/// What a process and those who poll it share.
#[derive(Debug, Default)]
struct Shared {
    ring: Mutex<Ring>,
    end: Mutex<Option<(Result<RunResult, String>, Duration)>>,
    news: Notify,
}

impl Shared {
    fn total(&self) -> u64 {
        lock(&self.ring).total
    }

    fn ended(&self) -> bool {
        lock(&self.end).is_some()
    }

    /// Waits for output beyond `cursor`, or the end.
    async fn news(&self, cursor: u64) {
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            // Registered before the look, so that nothing is missed in between.
            news.as_mut().enable();
            if self.ended() || self.total() > cursor {
                return;
            }
            news.await;
        }
    }
}

/// Both outputs of a process, in the order in which they come.
struct Sink(Arc<Shared>);

impl AsyncWrite for Sink {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0.ring).push(data);
        self.0.news.notify_waiters();
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A process.
#[derive(Debug)]
pub(super) struct Process {
    id: String,
    began: Instant,
    shared: Arc<Shared>,
    input: tokio::sync::Mutex<Option<DuplexStream>>,
    control: mpsc::Sender<Control>,
    kill: CancellationToken,
}

/// The processes of one sandbox.
#[derive(Debug, Default)]
pub(super) struct Processes {
    next: u32,
    all: BTreeMap<u32, Arc<Process>>,
    /// Commands whose streams are somebody's connection.
    attached: usize,
}

impl Processes {
    /// Makes room for one more, and its number.
    fn reserve(&mut self) -> Result<u32, TaskError> {
        let ended: Vec<u32> =
            self.all.iter().filter(|(_, p)| p.shared.ended()).map(|(n, _)| *n).collect();
        for number in ended.iter().take(ended.len().saturating_sub(MAX_ENDED.saturating_sub(1))) {
            self.all.remove(number);
        }
        self.room()?;
        self.next = self.next.saturating_add(1);
        Ok(self.next)
    }

    fn room(&self) -> Result<(), TaskError> {
        let polled = self.all.values().filter(|p| !p.shared.ended()).count();
        if polled.saturating_add(self.attached) >= MAX_RUNNING {
            return Err(capacity(format!(
                "{MAX_RUNNING} processes run in this sandbox already, those of `casulo wrap --sandbox` \
                 included; stop one with stop_process"
            )));
        }
        Ok(())
    }

    fn get(&self, id: &str) -> Result<Arc<Process>, TaskError> {
        let number = id.strip_prefix('p').and_then(|n| n.parse().ok());
        number.and_then(|n: u32| self.all.get(&n)).map(Arc::clone).ok_or_else(|| {
            invalid(format!(
                "no process {id} in this sandbox: it was never started, or it ended so long ago \
                 that it is forgotten"
            ))
        })
    }
}

/// A command in a kept sandbox whose streams are somebody's connection: one of the processes that run
/// there, and a call, so that the sandbox is not idle meanwhile.
#[cfg(feature = "http")]
pub(super) struct Attached(Call);

#[cfg(feature = "http")]
impl Attached {
    /// One more, if there is room.
    pub(super) fn new(call: Call) -> Result<Self, TaskError> {
        let mut processes = lock(&call.processes);
        processes.room()?;
        processes.attached = processes.attached.saturating_add(1);
        drop(processes);
        Ok(Self(call))
    }

    /// Where it runs.
    pub(super) fn sandbox(&self) -> &Sandbox {
        &self.0.sandbox
    }
}

#[cfg(feature = "http")]
impl Drop for Attached {
    fn drop(&mut self) {
        let mut processes = lock(&self.0.processes);
        processes.attached = processes.attached.saturating_sub(1);
    }
}

impl Process {
    /// Starts a command in `sandbox`. Must be called inside tokio.
    fn start(number: u32, sandbox: Arc<Sandbox>, args: StartProcessArgs) -> Self {
        let mut spec = RunSpec::new(["bash", "-c", &args.command]);
        spec.env = args.env.0;
        spec.workdir = args.cwd.wanted();
        spec.terminal = args.pty.then_some(TERMINAL);
        let shared = Arc::new(Shared::default());
        let (input, stdin) = tokio::io::duplex(INPUT);
        let (control, orders) = mpsc::channel(4);
        let stdio = Stdio {
            stdin: Some(Box::new(stdin)),
            stdout: Box::new(Sink(Arc::clone(&shared))),
            stderr: Box::new(Sink(Arc::clone(&shared))),
            control: Some(orders),
        };
        let kill = CancellationToken::new();
        let began = Instant::now();
        tokio::spawn({
            let (shared, kill) = (Arc::clone(&shared), kill.clone());
            async move {
                let keep = Some(Keep { name: call_name(), after: KEEP_AFTER });
                let how = Execution { files: Files::Ignore, keep };
                let run =
                    sandbox.execute(&spec, &Program::Command, stdio, how, kill.cancelled()).await;
                let result = run.or_else(|error| match error {
                    Error::Cancelled => {
                        let mut result = RunResult::new();
                        result.signal = Some(9);
                        Ok(result)
                    }
                    error => Err(error.to_string()),
                });
                *lock(&shared.end) = Some((result, began.elapsed()));
                shared.news.notify_waiters();
            }
        });
        let input = tokio::sync::Mutex::new(Some(input));
        Self { id: format!("p{number}"), began, shared, input, control, kill }
    }

    /// Writes to its standard input.
    async fn feed(&self, text: &str, close: bool) -> Result<(), TaskError> {
        if text.is_empty() && !close {
            return Ok(());
        }
        let mut input = self.input.lock().await;
        let closed = || invalid(format!("the standard input of {} is closed", self.id));
        let Some(pipe) = &mut *input else { return Err(closed()) };
        let mut written = 0usize;
        let write = async {
            while let Some(rest) = text.as_bytes().get(written..).filter(|rest| !rest.is_empty()) {
                match pipe.write(rest).await {
                    Ok(n) => written = written.saturating_add(n),
                    Err(_) => return Err(closed()),
                }
            }
            Ok(())
        };
        match tokio::time::timeout(PATIENCE, write).await {
            Ok(result) => result?,
            Err(_) => {
                return Err(TaskError {
                    class: ErrorClass::Capacity,
                    message: format!(
                        "{} does not read its input: {written} of {} bytes were taken",
                        self.id,
                        text.len()
                    ),
                    retry: Retry::Unknown,
                });
            }
        }
        if close {
            *input = None;
        }
        Ok(())
    }

    fn result(
        &self,
        cursor: u64,
        sandbox_id: &str,
        host: HostKind,
        budget: Budget,
    ) -> ProcessResult {
        let end = lock(&self.shared.end).clone();
        let (held, start) = lock(&self.shared.ring).from(cursor);
        let mut result = ProcessResult {
            process_id: self.id.clone(),
            running: end.is_none(),
            exit_code: None,
            signal: None,
            oom: false,
            output: String::new(),
            next_cursor: start,
            output_bytes: self.shared.total(),
            skipped_bytes: start.saturating_sub(cursor),
            duration_ms: 0,
            output_files: Vec::new(),
            note: None,
            sandbox_id: sandbox_id.to_owned(),
            host,
        };
        let mut age = self.began.elapsed();
        if let Some((end, took)) = end {
            age = took;
            match end {
                Ok(run) => {
                    (result.exit_code, result.signal) = (run.exit_code, run.signal);
                    result.oom = run.oom;
                    result.output_files.extend(run.stdout_file);
                    result.output_files.extend(run.stderr_file);
                    // Why it could not be started.
                    if !run.stderr.is_empty() {
                        result.note = Some(crate::text::safe(&run.stderr));
                    }
                }
                Err(why) => result.note = Some(crate::text::safe(&why)),
            }
        }
        result.duration_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let rest = serde_json::to_string(&result).map_or(0, |json| json.len());
        // The numbers may grow by some digits.
        let room = budget.bytes().saturating_sub(rest).saturating_sub(64);
        let (output, taken) = render::prefix(&held, room, budget.raw());
        result.output = output;
        result.next_cursor = start.saturating_add(u64::try_from(taken).unwrap_or(u64::MAX));
        result
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill.cancel();
    }
}

impl Server {
    pub(super) async fn start_process(
        &self,
        args: StartProcessArgs,
        _context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(super::limits::DEFAULT_OUTPUT_BYTES, false)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let sandbox_id = args.sandbox_id.clone();
        let process = {
            let mut processes = lock(&call.processes);
            let number = processes.reserve()?;
            let process = Arc::new(Process::start(number, Arc::clone(&call.sandbox), args));
            processes.all.insert(number, Arc::clone(&process));
            process
        };
        render::both(&process.result(0, &sandbox_id, self.host, budget))
    }

    pub(super) async fn poll_process(
        &self,
        args: PollProcessArgs,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(args.max_output_bytes, args.raw)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let process = find(&call, &args.process_id)?;
        context
            .or_cancelled(async {
                process.feed(&args.stdin, args.close_stdin).await?;
                let wait = Duration::from_secs(args.wait_seconds.into());
                let news = process.shared.news(args.cursor);
                if tokio::time::timeout(wait, news).await.is_ok() && !process.shared.ended() {
                    tokio::time::sleep(SETTLE).await;
                }
                Ok(())
            })
            .await?;
        render::both(&process.result(args.cursor, &args.sandbox_id, self.host, budget))
    }

    pub(super) async fn stop_process(
        &self,
        args: StopProcessArgs,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(super::limits::DEFAULT_OUTPUT_BYTES, false)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let process = find(&call, &args.process_id)?;
        match number(args.signal) {
            None => process.kill.cancel(),
            Some(signal) => {
                // A process that has ended takes no orders.
                let send = process.control.send(Control::Signal(signal));
                let _ = tokio::time::timeout(PATIENCE, send).await;
            }
        }
        // Most end at once.
        let ended = process.shared.news(u64::MAX);
        context
            .or_cancelled(async { Ok(tokio::time::timeout(PATIENCE, ended).await.is_ok()) })
            .await?;
        let cursor = process.shared.total().saturating_sub(4096);
        let mut result = process.result(cursor, &args.sandbox_id, self.host, budget);
        // What was before is not lost, only not asked for.
        result.skipped_bytes = 0;
        render::both(&result)
    }
}

fn find(held: &Held, id: &str) -> Result<Arc<Process>, TaskError> {
    lock(&held.processes).get(id)
}

/// Linux's number of a signal; `None`: it ends everything.
fn number(signal: Signal) -> Option<u32> {
    match signal {
        Signal::Kill => None,
        Signal::Hup => Some(1),
        Signal::Int => Some(2),
        Signal::Quit => Some(3),
        Signal::Usr1 => Some(10),
        Signal::Usr2 => Some(12),
        Signal::Term => Some(15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        let (input, _) = tokio::io::duplex(16);
        Process {
            id: "p1".into(),
            began: Instant::now(),
            shared: Arc::default(),
            input: tokio::sync::Mutex::new(Some(input)),
            control: mpsc::channel(1).0,
            kill: CancellationToken::new(),
        }
    }

    #[test]
    fn the_ring_holds_the_newest_output() {
        let mut ring = Ring::default();
        ring.push(b"hello ");
        ring.push(b"world");
        assert_eq!(ring.from(0), (b"hello world".to_vec(), 0));
        assert_eq!(ring.from(6), (b"world".to_vec(), 6));
        assert_eq!(ring.from(11), (vec![], 11));
        assert_eq!(ring.from(u64::MAX), (vec![], 11));
        ring.push(&vec![b'x'; RING - 1]);
        assert_eq!(ring.data.len(), RING);
        let (held, start) = ring.from(0);
        assert_eq!((held.len(), start, held[0]), (RING, 10, b'd'));
        ring.push(&vec![b'y'; 3 * RING]);
        assert_eq!((ring.data.len(), ring.total), (RING, 11 + 4 * RING as u64 - 1));
    }

    #[test]
    fn a_cursor_reads_everything_once_however_small_the_result() {
        let process = process();
        let text: String = (0..2000).map(|n| format!("line {n} é\n")).collect();
        lock(&process.shared.ring).push(text.as_bytes());
        let (mut all, mut cursor) = (String::new(), 0);
        let budget = Budget::new(2048, false);
        while all.len() < text.len() {
            let result = process.result(cursor, "sb", HostKind::Native, budget);
            assert!(budget.fits(&result) && result.next_cursor > cursor && result.running);
            assert_eq!(result.skipped_bytes, 0);
            all.push_str(&result.output);
            cursor = result.next_cursor;
        }
        assert_eq!(all, text);
        lock(&process.shared.ring).push(&vec![b'x'; 2 * RING]);
        let late = process.result(cursor, "sb", HostKind::Native, budget);
        assert_eq!(late.skipped_bytes, RING as u64);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_with_output_with_the_end_or_with_time() {
        let process = process();
        let wait = |cursor| {
            let shared = Arc::clone(&process.shared);
            tokio::spawn(async move {
                tokio::time::timeout(Duration::from_secs(50), shared.news(cursor)).await.is_ok()
            })
        };
        assert!(!wait(0).await.unwrap(), "nothing came");
        let waiting = wait(0);
        tokio::task::yield_now().await;
        Sink(Arc::clone(&process.shared)).write_all(b"a").await.unwrap();
        assert!(waiting.await.unwrap());
        assert!(wait(0).await.unwrap(), "it is there already");
        let waiting = wait(1);
        tokio::task::yield_now().await;
        *lock(&process.shared.end) = Some((Ok(RunResult::new()), Duration::ZERO));
        process.shared.news.notify_waiters();
        assert!(waiting.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn input_that_is_not_read_is_counted_and_closed_input_is_an_error() {
        let (input, output) = tokio::io::duplex(16);
        let process = process();
        *process.input.lock().await = Some(input);
        process.feed("1234567890", false).await.unwrap();
        let error = process.feed("1234567890", false).await.unwrap_err();
        assert!(error.message.contains("6 of 10 bytes"), "{}", error.message);
        drop(output);
        assert!(process.feed("x", false).await.unwrap_err().message.contains("closed"));
        let process = self::process();
        process.feed("", true).await.unwrap();
        assert!(process.feed("x", false).await.unwrap_err().message.contains("closed"));
    }

    #[tokio::test]
    async fn running_processes_are_limited_and_ended_ones_forgotten() {
        let mut processes = Processes::default();
        for _ in 0..MAX_RUNNING {
            let number = processes.reserve().unwrap();
            processes.all.insert(number, Arc::new(process()));
        }
        let error = processes.reserve().unwrap_err();
        assert_eq!(error.class, ErrorClass::Capacity);
        for process in processes.all.values() {
            *lock(&process.shared.end) = Some((Err("gone".into()), Duration::ZERO));
        }
        for _ in 0..40 {
            let number = processes.reserve().unwrap();
            let process = process();
            *lock(&process.shared.end) = Some((Err("gone".into()), Duration::ZERO));
            processes.all.insert(number, Arc::new(process));
        }
        assert_eq!(processes.all.len(), MAX_ENDED);
        assert!(processes.get("p1").is_err() && processes.get("p56").is_ok());
        for bad in ["", "p", "q1", "p-1", "p99999999999"] {
            assert!(processes.get(bad).is_err());
        }
    }
}
