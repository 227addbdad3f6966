//! A running microVM: runs commands, answers for its files, and is gone when it is dropped.

mod stream;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use casulo_protocol::agent::{
    CALLS_PATH, CommandResult, ExecOptions, ExecuteCode, FileContent, FileList, FileWritten, Keep,
    ListFiles, ReadFile, RunCommand, Session, WriteFile, tool,
};
use casulo_protocol::event::{Event, Phase};
use casulo_protocol::image::Manifest;
use casulo_protocol::result::{FileUse, HostKind, RunResult};
use casulo_protocol::spec::{OUTPUT_PATH, RunSpec};
use casulo_protocol::stream::Channel;
use casulo_protocol::vmm::{Counters, FileRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::AsyncRead;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::agent::exec::{Progress, Stdio};
use crate::agent::mcp::{CallError, Client};
use crate::agent::{Execution, Program, quote};
use crate::capture::Capture;
use crate::error::Error;
use crate::events::{Events, Log};
use crate::output::{self, Baseline, Output, Outputs};
use crate::runtime::random;
use crate::vm::control::Control;
use crate::vm::spawn::Process;

/// Time beyond a command's own limit, or after it was cancelled, after which the guest is taken for dead.
/// Its agent may need ten seconds: for processes that are slow to die, and for a stream that does not come.
const GRACE: Duration = Duration::from_secs(12);
const GRACE_EMULATED: Duration = Duration::from_secs(60);

/// Whether to look for changed files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Files {
    /// Leave [`RunResult::files`] empty.
    #[default]
    Ignore,
    /// List what changed in the output folder, with digests.
    List,
}

/// A call of one of the agent's tools that runs something.
enum AgentCall {
    Command(RunCommand),
    Code(ExecuteCode),
}

/// What a sandbox is put together from.
pub(crate) struct Parts {
    pub(crate) control: Control,
    pub(crate) process: Process,
    pub(crate) client: Client,
    /// The boot channel, which stays open for the life of the VM.
    pub(crate) channel: UnixStream,
    pub(crate) manifest: Manifest,
    /// Names and places in the guest of the shares.
    pub(crate) targets: BTreeMap<String, String>,
    pub(crate) outputs: Outputs,
    /// Whether the guest may write to any share.
    pub(crate) writable: bool,
    pub(crate) emulated: bool,
    pub(crate) log: Log,
}

/// A running microVM. Dropping it kills it; nothing of it is left.
///
/// What the guest wrote is safe to read once [`Self::close`] has returned: until then a link in a
/// writable share may lead anywhere. Dropping it instead makes the shares safe in the background, and
/// releases no artifacts.
#[derive(Debug)]
pub struct Sandbox {
    control: Control,
    process: Mutex<Process>,
    /// Becomes readable when the process has ended.
    ended: Arc<AsyncFd<OwnedFd>>,
    client: Client,
    _channel: UnixStream,
    manifest: Manifest,
    /// The output folder as the guest sees it.
    output: Option<OwnedFd>,
    targets: BTreeMap<String, String>,
    /// Until the sandbox is closed.
    outputs: Mutex<Option<Outputs>>,
    writable: bool,
    emulated: bool,
    killed: AtomicBool,
    log: Log,
}

impl Sandbox {
    pub(crate) fn new(parts: Parts) -> Self {
        let output = parts.outputs.output().and_then(|fd| fd.try_clone().ok());
        let ended = parts.process.watch();
        Self {
            control: parts.control,
            process: Mutex::new(parts.process),
            ended,
            client: parts.client,
            _channel: parts.channel,
            manifest: parts.manifest,
            output,
            targets: parts.targets,
            outputs: Mutex::new((!parts.outputs.is_empty()).then_some(parts.outputs)),
            writable: parts.writable,
            emulated: parts.emulated,
            killed: AtomicBool::new(false),
            log: parts.log,
        }
    }

    /// Runs a command with its input and output connected to `stdio`. Dropping the future cancels
    /// the command in the guest.
    ///
    /// # Errors
    /// The guest refused the request or was lost, or an output could not be written (a full disk; a
    /// reader that goes away, `BrokenPipe`, is no error). A command that fails, or cannot be found, is
    /// a result.
    pub async fn run(
        &self,
        spec: &RunSpec,
        stdio: Stdio,
        files: Files,
    ) -> Result<RunResult, Error> {
        let how = Execution { files, keep: None };
        self.execute(spec, &Program::Command, stdio, how, std::future::pending()).await
    }

    /// Runs a program as [`Self::run`] runs a command. When `cancel` is over before it has ended, it
    /// is killed with all its processes; a guest that does not say that it has done so in time is
    /// killed as a whole.
    ///
    /// # Errors
    /// As [`Self::run`], or it was cancelled.
    pub async fn execute(
        &self,
        spec: &RunSpec,
        program: &Program,
        stdio: Stdio,
        how: Execution,
        cancel: impl Future<Output = ()>,
    ) -> Result<RunResult, Error> {
        let before = self.before(how.files)?;
        let progress = Progress::default();
        let token = u64::from_le_bytes(random::<8>()?);
        let names = how.keep.as_ref().map(|keep| keep.name.clone());
        let request = self.call_of(spec, program, token, how.keep)?;
        self.log.push(Event::ExecStarted { at_us: self.log.now_us() });
        let answer = self.streamed(spec, &request, token, stdio, &progress, cancel).await?;
        if let Some((channel, e)) = progress.unwritten() {
            // The command may well have succeeded, but its caller does not have what it said.
            let name = if channel == Channel::Stderr { "error" } else { "output" };
            return Err(Error::io(format!("cannot write the command's standard {name}"), e));
        }
        let mut result = self.result(&answer);
        result.stdout_bytes = progress.stdout.load(Ordering::Relaxed);
        result.stderr_bytes = progress.stderr.load(Ordering::Relaxed);
        if let Some(name) = names {
            let file = |bytes: u64, output: &str| {
                (bytes > 0).then(|| format!("{CALLS_PATH}/{name}.{output}"))
            };
            result.stdout_file = file(answer.stdout_kept, "stdout");
            result.stderr_file = file(answer.stderr_kept, "stderr");
        }
        if self.writable {
            // A VM that has ended without saying is reported elsewhere.
            result.output_limit_hit = self.counters().await.is_some_and(|c| c.limit_hit);
        }
        if let (Some(before), Some(output)) = (before, &self.output) {
            (result.files, result.files_omitted) = output::changes(output, &before)
                .map_err(|e| Error::io("cannot list the output folder", e))?;
        }
        let (at_us, exit_code) = (self.log.now_us(), result.exit_code);
        self.log.push(Event::ExecEnded { at_us, exit_code });
        Ok(result)
    }

    /// Runs a command and keeps at most `limit` bytes of each of its outputs, half of them from the
    /// end.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_captured(
        &self,
        spec: &RunSpec,
        stdin: Option<Box<dyn AsyncRead + Send + Unpin>>,
        limit: usize,
        files: Files,
    ) -> Result<RunResult, Error> {
        let (stdout, stderr) = (Capture::new(limit), Capture::new(limit));
        let stdio = Stdio {
            stdin,
            stdout: Box::new(stdout.clone()),
            stderr: Box::new(stderr.clone()),
            control: None,
        };
        let mut result = self.run(spec, stdio, files).await?;
        let ((out, out_cut), (err, err_cut)) = (stdout.text(), stderr.text());
        // The reason why a program could not be started is already there.
        result.stdout = out;
        result.stderr.insert_str(0, &err);
        result.truncated = out_cut || err_cut;
        Ok(result)
    }

    /// Reads part of a file of the guest.
    ///
    /// # Errors
    /// The guest refused the request or was lost.
    pub async fn read_file(&self, request: ReadFile) -> Result<FileContent, Error> {
        self.bounded(tool::READ_FILE, &request).await
    }

    /// Writes a file of the guest.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub async fn write_file(&self, request: WriteFile) -> Result<FileWritten, Error> {
        self.bounded(tool::WRITE_FILE, &request).await
    }

    /// Lists a folder of the guest.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub async fn list_files(&self, request: ListFiles) -> Result<FileList, Error> {
        self.bounded(tool::LIST_FILES, &request).await
    }

    /// The image's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether the VM has not ended.
    pub fn is_alive(&self) -> bool {
        !self.killed.load(Ordering::Relaxed) && self.control.is_alive()
    }

    /// Events so far.
    pub fn events(&self) -> Vec<Event> {
        self.log.all()
    }

    /// All events, past and future.
    pub fn subscribe(&self) -> Events {
        self.log.subscribe()
    }

    /// What the VM has cost so far; `None` when it has ended without saying.
    pub async fn counters(&self) -> Option<Counters> {
        let counters = match self.control.last_counters() {
            Some(counters) => counters,
            None => tokio::time::timeout(GRACE, self.control.report()).await.ok()?.ok()?.1,
        };
        self.log.push(Event::Counters(counters));
        Some(counters)
    }

    /// Which files of the shares the guest has read and written so far; `None` when the VM has been
    /// killed, or ended without saying.
    pub async fn file_record(&self) -> Option<FileRecord> {
        tokio::time::timeout(self.grace(), self.control.files()).await.ok()?.ok()
    }

    /// Kills the VM. Does not wait for its end; calls that wait for the guest fail.
    pub fn kill(&self) {
        if !self.killed.swap(true, Ordering::Relaxed) {
            self.process.lock().unwrap_or_else(PoisonError::into_inner).kill();
            self.log.phase(Phase::Closed);
        }
    }

    /// Kills the VM, waits until its process is gone, makes what the guest wrote safe to read, and
    /// releases the artifacts. Tells what came out; the second time, nothing.
    ///
    /// # Errors
    /// A writable folder could not be looked at; what it holds may not be safe to read.
    pub async fn close(&self, files: Files) -> Result<Output, Error> {
        // Asked for while the VM is there to answer.
        self.record().await;
        let output = self.finish(files).await;
        // An error here means that the runtime ends.
        let _ = self.ended.readable().await;
        output
    }

    /// As [`Self::close`], but waits for the end of the process only when something could still be
    /// written.
    pub(crate) async fn finish(&self, files: Files) -> Result<Output, Error> {
        if files == Files::List {
            self.record().await;
        }
        self.kill();
        let outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(outputs) = outputs else { return Ok(Output::default()) };
        let failed = |e| Error::io("cannot look at what was written", e);
        // A write that has begun ends before the process does.
        let _ = self.ended.readable().await.map_err(failed)?;
        tokio::task::spawn_blocking(move || outputs.finish(files == Files::List))
            .await
            .map_err(|e| failed(std::io::Error::other(e)))?
    }

    /// Which files of the shares the guest has read and written so far, and how often it opened others for
    /// which the record had no room. `None` when the VM has ended without saying.
    pub async fn file_uses(&self) -> Option<(Vec<FileUse>, u64)> {
        if self.targets.is_empty() {
            return Some((Vec::new(), 0));
        }
        let record = tokio::time::timeout(self.grace(), self.control.files()).await.ok()?.ok()?;
        let uses = record.files.into_iter().map(|one| {
            let target = self.targets.get(&one.share).cloned().unwrap_or(one.share);
            let path = if one.path.is_empty() { target } else { format!("{target}/{}", one.path) };
            FileUse::new(path, one.read, one.written, one.changed)
        });
        Some((uses.collect(), record.left_out))
    }

    /// Tells which files were read and written, the first time that the sandbox is ended.
    async fn record(&self) {
        if self.killed.load(Ordering::Relaxed) {
            return;
        }
        if let Some((files, left_out)) = self.file_uses().await
            && !files.is_empty()
        {
            self.log.push(Event::Files { at_us: self.log.now_us(), files, left_out });
        }
    }

    fn grace(&self) -> Duration {
        if self.emulated { GRACE_EMULATED } else { GRACE }
    }

    fn before(&self, files: Files) -> Result<Option<Baseline>, Error> {
        match (files, &self.output) {
            (Files::List, Some(output)) => output::snapshot(output)
                .map(Some)
                .map_err(|e| Error::io("cannot list the output folder", e)),
            _ => Ok(None),
        }
    }

    fn request(&self, spec: &RunSpec) -> RunCommand {
        let image = &self.manifest;
        let mut env = image.env.clone();
        env.extend(spec.env.clone());
        let cwd = spec.workdir.clone().or_else(|| image.workdir.clone());
        RunCommand {
            argv: image.entrypoint.iter().chain(&spec.command).cloned().collect(),
            options: ExecOptions {
                env,
                cwd: cwd.unwrap_or_else(|| OUTPUT_PATH.to_owned()),
                user: spec.user.clone().or_else(|| image.user.clone()).unwrap_or_default(),
                timeout_ms: spec.timeout_ms.unwrap_or(0),
                terminal: spec.terminal,
                ..ExecOptions::default()
            },
        }
    }

    /// The agent's tool for a program, and its arguments.
    fn call_of(
        &self,
        spec: &RunSpec,
        program: &Program,
        token: u64,
        keep: Option<Keep>,
    ) -> Result<AgentCall, Error> {
        let mut command = self.request(spec);
        command.options.stream = Some(token);
        command.options.keep = keep;
        let code = |language: &String, code: &String, options: ExecOptions, session| {
            let (language, code) = (language.clone(), code.clone());
            AgentCall::Code(ExecuteCode { language, code, options, session })
        };
        Ok(match program {
            Program::Command if command.argv.is_empty() => {
                return Err(Error::Invalid("there is no command to run".into()));
            }
            Program::Command => AgentCall::Command(command),
            Program::Code { language, code: source } => {
                command.options.terminal = None;
                code(language, source, command.options, None)
            }
            Program::Session { language, code: source, stdin } => {
                command.options.terminal = None;
                command.options.stdin.clone_from(stdin);
                let session = Session {
                    cwd: spec.workdir.clone().unwrap_or_default(),
                    env: spec.env.clone(),
                };
                code(language, source, command.options, Some(session))
            }
        })
    }

    fn result(&self, answer: &CommandResult) -> RunResult {
        let mut result = RunResult::new();
        if !answer.timed_out {
            result.exit_code = answer.exit_code;
            result.signal = answer.signal;
        }
        result.timed_out = answer.timed_out;
        result.oom = answer.oom;
        result.duration_ms = answer.duration_ms;
        result.result.clone_from(&answer.result);
        result.state_lost = answer.state_lost;
        result.host = if self.emulated { HostKind::Emulated } else { HostKind::Native };
        if let Some(error) = &answer.start_error {
            result.stderr = quote(error);
        }
        result
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        tool: &'static str,
        arguments: &impl Serialize,
    ) -> Result<T, Error> {
        let call = self.client.call(tool, arguments);
        tokio::select! {
            biased;
            result = call => match result {
                Ok(answer) => Ok(answer),
                Err(CallError::Refused(text)) => Err(Error::Agent(text)),
                Err(CallError::Lost(text)) => Err(self.lost(text).await),
            },
            _ = self.control.end() => Err(self.lost("the VM ended".into()).await),
        }
    }

    /// A call that takes no longer than the guest needs to look at a file.
    async fn bounded<T: DeserializeOwned>(
        &self,
        tool: &'static str,
        arguments: &impl Serialize,
    ) -> Result<T, Error> {
        let limit = Duration::from_secs(30).saturating_add(self.grace());
        match tokio::time::timeout(limit, self.ask(tool, arguments)).await {
            Ok(result) => result,
            Err(_) => {
                // It ignores its agent, or the agent is not ours any more.
                self.kill();
                let reason = format!("{tool} took longer than {} seconds", limit.as_secs());
                Err(Error::GuestLost { reason, evidence: Box::default() })
            }
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let outputs = self.outputs.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(outputs) = outputs else { return };
        self.kill();
        let ended = Arc::clone(&self.ended);
        // Nobody should wait for that here. What goes wrong can be told to nobody.
        let cleaner = std::thread::Builder::new().name("casulo-cleaner".into());
        let _ = cleaner.spawn(move || {
            use rustix::event::{PollFd, PollFlags, poll};
            let mut fds = [PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN)];
            while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
            outputs.discard()
        });
    }
}
