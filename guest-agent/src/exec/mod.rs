//! Runs commands.
//!
//! One run is three things at once: the process and its cgroup, the pumps of its output, and what
//! the host says meanwhile. It ends in this order: the main process ends or is killed; the rest of
//! its cgroup is killed, so that no pipe stays open; what the pipes still hold is sent; the exit
//! frame is sent; the writable shares are flushed; the result is returned. Cancelling (by the call
//! or by closing the stream) kills the cgroup at any point of it.

pub mod capture;
pub mod cgroup;
pub mod command;
pub mod fd;
pub mod keep;
mod process;
pub mod pump;
pub mod repl;
pub mod seccomp;
mod session;
pub mod spawn;
pub mod terminal;
pub mod user;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use casulo_protocol::agent::{CommandResult, ExecOptions, ExecuteCode};
use seccompiler::BpfProgram;
use tokio::sync::Semaphore;

use self::cgroup::Cgroups;
use self::command::StartError;
use self::keep::Calls;
use self::repl::Repls;
use self::user::User;
use crate::reaper::Reaper;
use crate::shares::Shares;
use crate::streams::{Stream, StreamError, Streams};

/// Most commands at once.
const MAX_RUNNING: usize = 64;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The options contradict each other.
    #[error("{0}")]
    Invalid(&'static str),
    /// The stream of the command did not come.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The caller does not want it any more.
    #[error("the command was cancelled and all its processes were killed")]
    Cancelled,
    /// Too many commands run.
    #[error("{MAX_RUNNING} commands run already; wait until one has ended")]
    Busy,
    /// Another call runs in the interpreter.
    #[error("another call runs in the resident {0} interpreter; wait until it has ended")]
    InterpreterBusy(&'static str),
    /// The guest's kernel refused something.
    #[error("cannot {what}: {error}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// Why it failed.
        error: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ExecError {
    move |error| ExecError::System { what, error }
}

/// Runs commands in one root file system.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    root: PathBuf,
    cgroups: Option<Cgroups>,
    filter: BpfProgram,
    reaper: Reaper,
    streams: Streams,
    shares: Shares,
    running: Semaphore,
    calls: Calls,
    repls: Repls,
}

/// One command to run.
#[derive(Debug)]
pub struct Task {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// How.
    pub options: ExecOptions,
    /// A descriptor that the command inherits under its own number.
    pub extra: Option<OwnedFd>,
}

impl Engine {
    /// An engine whose users are those of the root file system `root`. Without `cgroups` only the
    /// process group of a command can be killed, and nothing is limited: for tests. `calls` is the
    /// folder for what calls leave (see [`keep`] and [`repl`]), made when it is needed.
    ///
    /// # Errors
    /// The seccomp filter cannot be compiled.
    pub fn new(
        root: PathBuf,
        cgroups: Option<Cgroups>,
        reaper: Reaper,
        streams: Streams,
        shares: Shares,
        calls: PathBuf,
    ) -> io::Result<Self> {
        let filter = seccomp::compile()?;
        let running = Semaphore::new(MAX_RUNNING);
        let repls = Repls::new(calls.clone());
        let calls = Calls::new(calls);
        Ok(Self {
            inner: Arc::new(Inner {
                root,
                cgroups,
                filter,
                reaper,
                streams,
                shares,
                running,
                calls,
                repls,
            }),
        })
    }

    /// The root file system.
    pub fn root(&self) -> &std::path::Path {
        &self.inner.root
    }

    /// Runs a command to its end, or until `cancelled` completes.
    ///
    /// # Errors
    /// Cancelled, or something of the agent's own failed. A program that cannot be started or that
    /// fails is a result.
    pub async fn run(
        &self,
        task: Task,
        cancelled: impl Future<Output = ()>,
    ) -> Result<CommandResult, ExecError> {
        let Ok(_permit) = self.inner.running.try_acquire() else { return Err(ExecError::Busy) };
        if task.options.terminal.is_some() && task.options.stream.is_none() {
            return Err(ExecError::Invalid("a terminal needs a stream"));
        }
        let mut cancelled = std::pin::pin!(cancelled);
        let stream = self.stream(&task.options, cancelled.as_mut()).await?;
        let result = session::run(self, task, stream, cancelled).await;
        self.inner.shares.sync().await;
        result
    }

    /// Runs source text in the resident interpreter of its language to its end, or until `cancelled`
    /// completes; then the interpreter is killed.
    ///
    /// # Errors
    /// As [`Self::run`], or the interpreter is busy.
    pub async fn run_session(
        &self,
        code: ExecuteCode,
        cancelled: impl Future<Output = ()>,
    ) -> Result<CommandResult, ExecError> {
        let Ok(_permit) = self.inner.running.try_acquire() else { return Err(ExecError::Busy) };
        let mut cancelled = std::pin::pin!(cancelled);
        let stream = self.stream(&code.options, cancelled.as_mut()).await?;
        let stream = stream.ok_or(ExecError::Invalid("a resident interpreter needs a stream"))?;
        let result = repl::run(self, code, stream, cancelled).await;
        self.inner.shares.sync().await;
        result
    }

    async fn stream(
        &self,
        options: &ExecOptions,
        cancelled: std::pin::Pin<&mut impl Future<Output = ()>>,
    ) -> Result<Option<Stream>, ExecError> {
        let Some(token) = options.stream else { return Ok(None) };
        tokio::select! {
            stream = self.inner.streams.take(token) => Ok(Some(stream?)),
            () = cancelled => {
                self.inner.streams.abandon(token);
                Err(ExecError::Cancelled)
            }
        }
    }

    fn user(&self, spec: &str) -> Result<User, StartError> {
        user::lookup(spec, &self.inner.root).map_err(|e| StartError::cannot_run(e.to_string()))
    }
}
