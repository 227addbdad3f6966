//! A server's process, its standard input and output as two streams: in a microVM of its own, or in a
//! sandbox of a `casulo serve`.

use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::result::RunResult;
use casulo_protocol::spec::RunSpec;
use tokio::io::DuplexStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Place;
#[cfg(feature = "http")]
use super::said::LastWords;
use super::said::Said;
use crate::{Error, Execution, Files, Program, Runtime, Sandbox, Stdio};

/// Bytes in each direction that wait for the other side.
const PIPE: usize = 256 * 1024;
/// How long a server may take to end after the end of its input.
const FAREWELL: Duration = Duration::from_secs(3);
const FAREWELL_EMULATED: Duration = Duration::from_secs(20);

/// A running server. Dropping it ends it.
pub(super) struct Guest {
    /// Its own VM, if it has one.
    sandbox: Option<Arc<Sandbox>>,
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
    /// Starts the server.
    ///
    /// # Errors
    /// There is no VM for it. A server that cannot be started is one that ends.
    pub(super) async fn start(
        runtime: &Runtime,
        place: Place,
        command: RunSpec,
        said: &Said,
    ) -> Result<(Self, Streams), String> {
        let (stdin, their_stdin) = tokio::io::duplex(PIPE);
        let (their_stdout, stdout) = tokio::io::duplex(PIPE);
        let (tell, end) = oneshot::channel();
        let stdio = |stderr| Stdio {
            stdin: Some(Box::new(their_stdin)),
            stdout: Box::new(their_stdout),
            stderr: Box::new(stderr),
            control: None,
        };
        let kill = CancellationToken::new();
        let guest = match place {
            Place::Own(spec) => {
                let sandbox = runtime.sandbox(*spec).await.map_err(|error| error.to_string())?;
                let (sandbox, stdio) = (Arc::new(sandbox), stdio(said.stderr()));
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
                Self { sandbox: Some(sandbox), run, kill, emulated }
            }
            #[cfg(feature = "http")]
            Place::Kept { endpoint, id } => {
                let stream = crate::bridge::exec::start(&endpoint, &id, &command).await?;
                let emulated = stream.emulated;
                let words = LastWords::default();
                let stdio = stdio(said.stderr().keeping(words.clone()));
                let run = tokio::spawn({
                    let kill = kill.clone();
                    async move {
                        let run = kept::carry(stream.connection, stdio, &words);
                        // The end of the connection is that of the server.
                        let why = kill.run_until_cancelled(run).await;
                        let _ = tell.send(why.unwrap_or_else(|| "it was ended".to_owned()));
                    }
                });
                Self { sandbox: None, run, kill, emulated }
            }
        };
        Ok((guest, Streams { stdin, stdout, end }))
    }

    /// Whether it is on an emulated host, where everything takes longer.
    pub(super) fn emulated(&self) -> bool {
        self.emulated
    }

    /// Kills the server, without waiting for its end.
    pub(super) fn kill(&self) {
        self.kill.cancel();
    }

    /// Waits a moment for the server, whose input must be closed, to end by itself; then ends it, with
    /// its VM if that is its own, and makes what it wrote there safe to read.
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
        match &self.sandbox {
            Some(sandbox) => sandbox.close(Files::Ignore).await.map(drop),
            None => Ok(()),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill.cancel();
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

/// In a sandbox of a `casulo serve`.
#[cfg(feature = "http")]
mod kept {
    use tokio::io::{AsyncRead, AsyncWrite};

    use super::LastWords;
    use crate::Stdio;
    use crate::agent::exec::{Progress, pump};

    /// Carries the streams to their end; how the server ended, in words.
    pub(super) async fn carry(
        connection: impl AsyncRead + AsyncWrite + Send,
        stdio: Stdio,
        words: &LastWords,
    ) -> String {
        // The token is for a guest that has many streams.
        let end = pump(connection, 0, stdio, &Progress::default()).await;
        // Standard error has been heard to its end by now.
        match (end, words.take()) {
            // As of `waitpid` (Linux, `include/linux/wait.h`).
            (Ok(Some(status)), words) => {
                let how = match (status & 0x7f, (status >> 8) & 0xff) {
                    (0, code) => format!("exit status {code}"),
                    (signal, _) => format!("signal {signal}"),
                };
                words.map_or_else(|| how.clone(), |words| format!("{words}; {how}"))
            }
            (Ok(None), Some(words)) => words,
            (Ok(None), None) => "its sandbox, or the connection to it, has ended".to_owned(),
            (Err(error), _) => format!("the connection to its sandbox broke: {error}"),
        }
    }
}
