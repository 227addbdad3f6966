//! A server's process in a microVM of its own, its standard input and output as two streams.

use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::result::RunResult;
use casulo_protocol::spec::{RunSpec, SandboxSpec};
use tokio::io::DuplexStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::said::Said;
use crate::{Error, Execution, Files, Program, Runtime, Sandbox, Stdio};

/// Bytes in each direction that wait for the other side.
const PIPE: usize = 256 * 1024;
/// How long a server may take to end after the end of its input.
const FAREWELL: Duration = Duration::from_secs(3);
const FAREWELL_EMULATED: Duration = Duration::from_secs(20);

/// A running server. Dropping it ends its VM.
pub(super) struct Guest {
    sandbox: Arc<Sandbox>,
    run: JoinHandle<()>,
    kill: CancellationToken,
    emulated: bool,
}

/// The streams of a running server.
pub(super) struct Streams {
    pub(super) stdin: DuplexStream,
    pub(super) stdout: DuplexStream,
    /// Why it has ended, once it has.
    pub(super) end: oneshot::Receiver<String>,
}

impl Guest {
    /// Boots a VM and starts the server in it.
    ///
    /// # Errors
    /// The VM does not come up. A server that cannot be started is one that ends.
    pub(super) async fn start(
        runtime: &Runtime,
        sandbox: SandboxSpec,
        command: RunSpec,
        said: &Said,
    ) -> Result<(Self, Streams), Error> {
        let sandbox = Arc::new(runtime.sandbox(sandbox).await?);
        let (stdin, their_stdin) = tokio::io::duplex(PIPE);
        let (their_stdout, stdout) = tokio::io::duplex(PIPE);
        let (tell, end) = oneshot::channel();
        let stdio = Stdio {
            stdin: Some(Box::new(their_stdin)),
            stdout: Box::new(their_stdout),
            stderr: Box::new(said.stderr()),
            control: None,
        };
        let kill = CancellationToken::new();
        let run = tokio::spawn({
            let (sandbox, kill) = (Arc::clone(&sandbox), kill.clone());
            async move {
                let (how, program) = (Execution::default(), Program::Command);
                let run = sandbox.execute(&command, &program, stdio, how, kill.cancelled());
                let why = match run.await {
                    Ok(result) => end_of(&result),
                    Err(error) => error.to_string(),
                };
                // Nobody may wait for it any more.
                let _ = tell.send(why);
            }
        });
        let emulated = runtime.config().emulated;
        Ok((Self { sandbox, run, kill, emulated }, Streams { stdin, stdout, end }))
    }

    /// Waits a moment for the server, whose input must be closed, to end by itself; then ends it with
    /// its VM, and makes what it wrote safe to read.
    ///
    /// # Errors
    /// A writable folder could not be looked at.
    pub(super) async fn close(mut self) -> Result<(), Error> {
        let patience = if self.emulated { FAREWELL_EMULATED } else { FAREWELL };
        if tokio::time::timeout(patience, &mut self.run).await.is_err() {
            self.kill.cancel();
            // Bounded: a guest that does not obey is killed as a whole.
            let _ = (&mut self.run).await;
        }
        self.sandbox.close(Files::Ignore).await.map(drop)
    }
}

/// How a server ended, in words.
fn end_of(result: &RunResult) -> String {
    let mut text = match (result.exit_code, result.signal) {
        (Some(status), _) => format!("exit status {status}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "it was ended".to_owned(),
    };
    if result.oom {
        text.push_str("; the guest ran out of memory, give it more with --memory");
    }
    if !result.stderr.is_empty() {
        text = format!("{}; {text}", result.stderr.trim_end());
    }
    text
}
