//! A started process and its cgroup.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::time::Instant;

use super::cgroup::CommandGroup;
use super::command::{Command, StartError};
use super::fd::Fd;
use super::spawn::{self, Setting, Stdio};
use super::user::User;
use super::{Engine, ExecError, system};
use crate::reaper::Own;

/// How long killed processes may take to go.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// A process of ours, from the clone until nothing of its cgroup is left.
pub(super) struct Running {
    pid: Pid,
    own: Own,
    failure: Fd,
    group: Option<CommandGroup>,
    began: Instant,
}

/// How a process came to its end.
#[derive(Debug)]
pub(super) enum Ended {
    /// By itself, with this wait status.
    Exited(u32),
    /// It never ran.
    NotStarted(StartError),
    /// It runs still, but its time is over.
    TimedOut,
}

impl Running {
    /// Starts a process. The inner error is the command's own.
    pub(super) fn start(
        engine: &Engine,
        command: &Command,
        user: &User,
        stdio: Stdio,
        extra: Option<&OwnedFd>,
    ) -> Result<Result<Self, StartError>, ExecError> {
        let inner = &engine.inner;
        let group = match &inner.cgroups {
            Some(cgroups) => Some(cgroups.create().map_err(system("make a cgroup"))?),
            None => None,
        };
        let setting = Setting {
            user,
            filter: &inner.filter,
            cgroup: group.as_ref().map(AsFd::as_fd),
            extra: extra.map(AsFd::as_fd),
        };
        let began = Instant::now();
        let spawned = match spawn::spawn(command, &setting, stdio) {
            Ok(spawned) => spawned,
            Err(error) => {
                let why = if error.kind() == io::ErrorKind::WouldBlock {
                    "the limit of processes is met".to_owned()
                } else {
                    error.to_string()
                };
                return Ok(Err(StartError::cannot_run(format!("cannot start a process: {why}"))));
            }
        };
        let watched = inner.reaper.own(spawned.pid, spawned.pidfd);
        let own = watched.map_err(system("watch a process"))?;
        let failure = Fd::new(spawned.failure).map_err(system("watch a process"))?;
        Ok(Ok(Self { pid: spawned.pid, own, failure, group, began }))
    }

    /// Process id, session and process group.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Time since the start.
    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Waits until the main process has ended, or `timeout_ms` after its start (0: no limit).
    pub(super) async fn ended(&self, command: &Command, timeout_ms: u64) -> io::Result<Ended> {
        let life = async {
            let mut report = Vec::new();
            let mut buffer = [0; 16];
            loop {
                match self.failure.read(&mut buffer).await? {
                    0 => break,
                    n => report.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                }
            }
            let status = self.own.wait().await?;
            Ok(match spawn::failure(&report, command) {
                Some(error) => Ended::NotStarted(error),
                None => Ended::Exited(status),
            })
        };
        if timeout_ms == 0 {
            return life.await;
        }
        match self.began.checked_add(Duration::from_millis(timeout_ms)) {
            None => life.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline, life).await.unwrap_or(Ok(Ended::TimedOut))
            }
        }
    }

    /// Kills the main process, if it has not ended, and the rest; gives the wait status.
    pub(super) async fn kill(&self) -> io::Result<u32> {
        match &self.group {
            Some(group) => group.kill()?,
            None => {
                // It may not have made its process group yet.
                self.own.kill();
                self.kill_process_group();
            }
        }
        let status = self.own.wait().await?;
        self.clear().await?;
        Ok(status)
    }

    /// Kills what the main process has left behind.
    pub(super) async fn clear(&self) -> io::Result<()> {
        match &self.group {
            Some(group) => group.clear(KILL_PATIENCE).await,
            None => {
                self.kill_process_group();
                Ok(())
            }
        }
    }

    fn kill_process_group(&self) {
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
    }

    /// Whether a process of it was killed for want of memory.
    pub(super) fn oom(&self) -> bool {
        self.oom_kills() > 0
    }

    /// How many processes of it were killed for want of memory.
    pub(super) fn oom_kills(&self) -> u64 {
        self.group.as_ref().and_then(|g| g.oom_kills().ok()).unwrap_or(0)
    }

    /// Whether the main process has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.own.try_wait().is_ok_and(|status| status.is_some())
    }
}
