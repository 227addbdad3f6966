//! A `casulo serve` for clients that nobody here wrote.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{build, paths};

/// A running server on a port of its own.
pub(crate) struct Server {
    child: Child,
    url: String,
    token: String,
    _folder: tempfile::TempDir,
}

impl Server {
    /// Starts one, in the emulated host where there is no KVM, and waits until it says that it
    /// serves.
    pub(crate) fn start(casulo: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (file, token) = (folder.path().join("tokens"), "f".repeat(64));
        paths::write_private(&file, &format!("client {token}\n"))?;
        Self::with(casulo, token, folder, &["--token-file".as_ref(), file.as_ref()])
    }

    /// One that lets everybody on this machine call.
    pub(crate) fn without_token(casulo: &Path) -> Result<Self> {
        Self::with(casulo, String::new(), tempfile::tempdir()?, &["--no-token".as_ref()])
    }

    fn with(
        casulo: &Path,
        token: String,
        folder: tempfile::TempDir,
        arguments: &[&OsStr],
    ) -> Result<Self> {
        // Free a moment ago; the emulated host cannot tell which one it took.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let host = if build::kvm_works() { "native" } else { "emulated" };
        let mut child = Command::new(casulo)
            .args(["serve", "--host", host, "--listen", &format!("127.0.0.1:{port}")])
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start casulo serve")?;
        let stderr = child.stderr.take().context("casulo serve has no stderr")?;
        let mut lines = BufReader::new(stderr).lines();
        for line in lines.by_ref() {
            let line = line?;
            eprintln!("{line}");
            if let Some(url) = served(&line) {
                std::thread::spawn(move || {
                    lines.map_while(Result::ok).for_each(|l| eprintln!("{l}"))
                });
                return Ok(Self { child, url, token, _folder: folder });
            }
        }
        let status = child.wait()?;
        bail!("casulo serve ended with {status}")
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Ends it as a service manager does.
    pub(crate) fn stop(mut self) -> Result<()> {
        terminate(&self.child)?;
        let status = self.child.wait()?;
        if !status.success() {
            bail!("after SIGTERM casulo serve ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended already. A kill would leave the guests to the kernel,
        // which is good enough after a failed test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address in a line that says that a server serves.
pub(super) fn served(line: &str) -> Option<String> {
    let (_, url) = line.split_once("serving MCP at ")?;
    url.split([';', ' ']).next().map(str::to_owned)
}

fn terminate(child: &Child) -> Result<()> {
    let pid = i32::try_from(child.id())?;
    let pid = rustix::process::Pid::from_raw(pid).context("a child has a process id")?;
    Ok(rustix::process::kill_process(pid, rustix::process::Signal::TERM)?)
}
