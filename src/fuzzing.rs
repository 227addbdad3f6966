//! Doors for the fuzz targets (`fuzz/`) to what parses bytes from a guest. Built with `--cfg fuzzing` only.

use std::os::fd::OwnedFd;

use casulo_protocol::agent::{
    CommandResult, FileContent, FileList, FileWritten, Personalise, VERSION, WriteFile, tool,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use crate::agent::exec::{self, Progress, Stdio};
use crate::agent::mcp::{CallError, Client};
use crate::agent::{boot, quote};
use crate::vm::control::{Control, End};

/// The boot channel: the agent's greeting, and its answer to the host's orders.
pub async fn boot<S: AsyncRead + AsyncWrite + Unpin>(mut channel: S) {
    let orders = Personalise {
        protocol: VERSION,
        entropy: "00".into(),
        clock_ns: 1,
        hostname: "casulo".into(),
        mounts: Vec::new(),
        max_processes: 1,
        max_memory: None,
    };
    let told = match boot::hello(&mut channel).await {
        Ok(_) => boot::personalise(&mut channel, &orders).await,
        Err(error) => Err(error),
    };
    if let Err(error) = told {
        fit_to_print(&error.to_string());
    }
}

/// The bulk stream of a command; its output is thrown away.
pub async fn stream<S: AsyncRead + AsyncWrite + Send>(stream: S) {
    let ended = exec::pump(stream, 1, Stdio::null(), &Progress::default()).await;
    if let Err(error) = ended {
        fit_to_print(&error.to_string());
    }
}

/// Calls of the agent's tools, each kind of answer once.
pub async fn calls(stream: UnixStream) {
    let client = Client::new(stream);
    let call = WriteFile::default();
    told(client.call::<FileWritten>(tool::WRITE_FILE, &call).await);
    told(client.call::<CommandResult>(tool::RUN_COMMAND, &call).await);
    told(client.call::<FileContent>(tool::READ_FILE, &call).await);
    told(client.call::<FileList>(tool::LIST_FILES, &call).await);
}

/// A wrapped server: its handshake, its lists, and a call of each of its tools.
#[cfg(feature = "wrap")]
pub async fn wrapped(stream: UnixStream) {
    for sentence in crate::wrap::fuzzing::talk(stream).await {
        fit_to_print(&sentence);
    }
}

fn told<T>(result: Result<T, CallError>) {
    match result {
        Ok(_) => {}
        Err(CallError::Refused(text) | CallError::Lost(text)) => fit_to_print(&text),
    }
}

/// What the guest says reaches a terminal only as [`quote`] leaves it.
fn fit_to_print(text: &str) {
    assert!(!text.chars().any(|c| c.is_control() && c != '\n' && c != '\t'), "{text:?}");
    assert!(text.len() < 20_000, "{} bytes", text.len());
    assert!(quote(text).chars().count() <= 2000);
}

/// A control socket whose other end a guest has taken over.
pub struct Vmm(Control);

impl Vmm {
    /// The socket, and the VMM's end of it.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> std::io::Result<(Self, OwnedFd)> {
        let (control, theirs, _) = Control::new()?;
        Ok((Self(control), theirs))
    }

    /// Waits for the end that the messages lead to: the VMM's end of the socket must be closed.
    pub async fn end(self) {
        let _ = self.0.started().await;
        // What the other ends say is quoted where it is told.
        if let End::Lost { reason } = self.0.end().await {
            fit_to_print(&reason);
        }
    }
}
