//! The VMM process: spawned with one descriptor, watched through a pidfd, killed on drop.
//!
//! The VMM gets its control socket as standard input and everything else over that socket. Its
//! environment is empty. It is a process group of its own, so that Ctrl-C in a terminal reaches only
//! the caller, who decides.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Pid, PidfdFlags};
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use super::watched;
use crate::error::Error;

/// Most bytes kept of what the VMM writes to standard error.
const LAST_WORDS: usize = 8 * 1024;

/// A running VMM. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Process {
    child: Option<Child>,
    pidfd: Arc<AsyncFd<OwnedFd>>,
    last_words: Arc<Mutex<Vec<u8>>>,
}

impl Process {
    /// Starts the program at `path`. Must be called inside a tokio runtime.
    pub(crate) fn spawn(path: &Path, control: OwnedFd) -> Result<Self, Error> {
        let failed = |source: io::Error| Error::Spawn { path: path.to_owned(), source };
        let mut command = Command::new(path);
        command
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(control))
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        // From here on a failure must not leave the child behind.
        let kill = |child: &mut Child, e: io::Error| {
            let _ = child.kill();
            let _ = child.wait();
            failed(e)
        };
        let pidfd = match open_pidfd(&child) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(e) => return Err(kill(&mut child, e)),
        };
        let last_words = Arc::new(Mutex::new(Vec::new()));
        if let Some(stderr) = child.stderr.take() {
            match pipe::Receiver::from_owned_fd(stderr.into()) {
                Ok(pipe) => drop(tokio::spawn(collect(pipe, Arc::clone(&last_words)))),
                Err(e) => return Err(kill(&mut child, e)),
            }
        }
        Ok(Self { child: Some(child), pidfd, last_words })
    }

    /// Waits until the process has ended.
    pub(crate) async fn ended(&self) {
        // A pidfd becomes readable when the process ends; an error here means the runtime ends.
        let _ = self.pidfd.readable().await;
    }

    /// A descriptor that becomes readable when the process ends.
    pub(crate) fn watch(&self) -> Arc<AsyncFd<OwnedFd>> {
        Arc::clone(&self.pidfd)
    }

    /// Kills the process. Does not wait for its end.
    pub(crate) fn kill(&self) {
        // It may have ended already.
        let _ =
            rustix::process::pidfd_send_signal(self.pidfd.as_ref(), rustix::process::Signal::KILL);
    }

    /// What the process wrote to standard error, its end, as text.
    pub(crate) fn last_words(&self) -> String {
        let words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&words).trim().to_owned()
    }

    /// How the process ended, in words, if it has.
    pub(crate) fn fate(&mut self) -> Option<String> {
        let status = self.child.as_mut()?.try_wait().ok()??;
        Some(status.to_string())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let Some(mut child) = self.child.take() else { return };
        if matches!(child.try_wait(), Ok(None)) {
            // The kernel needs milliseconds to free a VM; nobody should wait for that here.
            let reaper = std::thread::Builder::new().name("casulo-reaper".into());
            let _ = reaper.spawn(move || child.wait());
        }
    }
}

fn open_pidfd(child: &Child) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("the process has no id"))?;
    // The child is not reaped before `child` is waited for, so the id is still its own.
    watched(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

async fn collect(mut pipe: pipe::Receiver, words: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0u8; 4096];
    while let Ok(n) = pipe.read(&mut buffer).await {
        if n == 0 {
            return;
        }
        let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
        words.extend_from_slice(buffer.get(..n).unwrap_or_default());
        let excess = words.len().saturating_sub(LAST_WORDS);
        words.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn socket() -> (OwnedFd, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[tokio::test]
    async fn kill_ends_it_and_last_words_are_kept() {
        let (_ours, theirs) = socket();
        // `cat` reads the control socket, which stays silent.
        let mut process = Process::spawn(Path::new("/bin/cat"), theirs).unwrap();
        assert!(process.fate().is_none());
        process.kill();
        tokio::time::timeout(Duration::from_secs(5), process.ended()).await.unwrap();
        assert!(process.fate().unwrap().contains("signal: 9"));
    }

    #[tokio::test]
    async fn ends_when_the_control_socket_closes() {
        let (ours, theirs) = socket();
        let process = Process::spawn(Path::new("/bin/cat"), theirs).unwrap();
        drop(ours);
        tokio::time::timeout(Duration::from_secs(5), process.ended()).await.unwrap();
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let (_ours, theirs) = socket();
        let error = Process::spawn(Path::new("/no/such/vmm"), theirs).unwrap_err();
        assert!(error.to_string().contains("/no/such/vmm"), "{error}");
    }
}
