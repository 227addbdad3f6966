//! The bulk stream of a command: standard input and signals go in, standard output and error come
//! out, unchanged and uncapped, at the speed of the slower side.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use casulo_protocol::agent::WindowSize;
use casulo_protocol::stream::{Channel, Decoder, Frame};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

/// Bytes of one read from the stream or from standard input.
const CHUNK: usize = 64 * 1024;

/// What a command is connected to.
pub struct Stdio {
    /// Standard input; `None`: empty.
    pub stdin: Option<Box<dyn AsyncRead + Send + Unpin>>,
    /// Standard output, and the output of a terminal.
    pub stdout: Box<dyn AsyncWrite + Send + Unpin>,
    /// Standard error.
    pub stderr: Box<dyn AsyncWrite + Send + Unpin>,
    /// Signals and window sizes to pass on.
    pub control: Option<mpsc::Receiver<Control>>,
}

impl std::fmt::Debug for Stdio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stdio").field("stdin", &self.stdin.is_some()).finish_non_exhaustive()
    }
}

impl Stdio {
    /// No input, and output that is thrown away.
    pub fn null() -> Self {
        Self {
            stdin: None,
            stdout: Box::new(tokio::io::sink()),
            stderr: Box::new(tokio::io::sink()),
            control: None,
        }
    }
}

/// Something to tell a running command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Its terminal has a new size.
    WindowSize(WindowSize),
    /// Send a signal to its foreground processes.
    Signal(u32),
}

/// How far a stream has come; shared with whoever watches its time.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes of standard output so far.
    pub(crate) stdout: AtomicU64,
    /// Bytes of standard error so far.
    pub(crate) stderr: AtomicU64,
    /// Whether the stream waits for the host's side to take output, not for the guest.
    pub(crate) blocked: AtomicBool,
    /// Why output could not be written: its first failure, but for a reader that went away.
    unwritten: Mutex<Option<(Channel, io::Error)>>,
    /// Whether nobody wants the output any more.
    discarded: AtomicBool,
    told: Notify,
}

impl Progress {
    /// Bytes of both.
    pub(crate) fn bytes(&self) -> u64 {
        let (out, err) = (&self.stdout, &self.stderr);
        out.load(Ordering::Relaxed).saturating_add(err.load(Ordering::Relaxed))
    }

    /// Takes the reason why output was lost, if it was.
    pub(crate) fn unwritten(&self) -> Option<(Channel, io::Error)> {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Output that comes from now on, and what waits to be written, is thrown away.
    pub(crate) fn discard(&self) {
        self.discarded.store(true, Ordering::Release);
        self.told.notify_waiters();
    }

    /// Until output is thrown away.
    async fn unwanted(&self) {
        let told = self.told.notified();
        tokio::pin!(told);
        // Registered before the look, so that nothing is missed in between.
        told.as_mut().enable();
        if !self.discarded.load(Ordering::Acquire) {
            told.await;
        }
    }

    /// Output of `channel` could not be written.
    fn lost(&self, channel: Channel, error: io::Error) {
        // A reader that closes its end has what it wanted, and a command would be told by SIGPIPE.
        if error.kind() != io::ErrorKind::BrokenPipe {
            let mut first = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert((channel, error));
        }
    }
}

/// Carries a stream to its end: the command's wait status, or `None` when the guest closed the
/// stream without one.
///
/// # Errors
/// The guest broke the format.
pub(crate) async fn pump<S>(
    stream: S,
    token: u64,
    stdio: Stdio,
    progress: &Progress,
) -> io::Result<Option<u32>>
where
    S: AsyncRead + AsyncWrite + Send,
{
    let (read, write) = tokio::io::split(stream);
    // At most one reset for each output and one end for the input.
    let (told, tell) = mpsc::channel(4);
    let outgoing = outgoing(write, token, stdio.stdin, stdio.control, tell);
    let incoming = incoming(read, stdio.stdout, stdio.stderr, told, progress);
    tokio::pin!(outgoing, incoming);
    tokio::select! {
        biased;
        result = &mut incoming => return result,
        () = &mut outgoing => {}
    }
    incoming.await
}

/// What the receiving half tells the sending half.
enum Notice {
    /// Nobody reads this output any more.
    Reset(Channel),
    /// The command does not read its input any more.
    StopInput,
}

async fn outgoing<W: AsyncWrite + Unpin>(
    mut write: W,
    token: u64,
    mut stdin: Option<Box<dyn AsyncRead + Send + Unpin>>,
    mut control: Option<mpsc::Receiver<Control>>,
    mut notices: mpsc::Receiver<Notice>,
) {
    let mut packet = Vec::with_capacity(CHUNK + 64);
    Frame::Open(token).encode(&mut packet);
    if stdin.is_none() {
        Frame::End(Channel::Stdin).encode(&mut packet);
    }
    let mut buffer = vec![0u8; if stdin.is_some() { CHUNK } else { 0 }];
    let mut noticing = true;
    loop {
        // A guest that closed its end is noticed by the receiving half.
        if write.write_all(&packet).await.is_err() || write.flush().await.is_err() {
            return;
        }
        packet.clear();
        if stdin.is_none() && control.is_none() && !noticing {
            return;
        }
        tokio::select! {
            notice = notices.recv(), if noticing => match notice {
                Some(Notice::Reset(channel)) => Frame::Reset(channel).encode(&mut packet),
                Some(Notice::StopInput) => stdin = None,
                None => noticing = false,
            },
            order = next(&mut control) => match order {
                Some(Control::WindowSize(w)) => {
                    Frame::WindowSize(w.rows, w.columns).encode(&mut packet);
                }
                Some(Control::Signal(signal)) => Frame::Signal(signal).encode(&mut packet),
                None => control = None,
            },
            result = read(&mut stdin, &mut buffer) => match result {
                Ok(n) if n > 0 => {
                    let data = buffer.get(..n).unwrap_or_default().to_vec();
                    Frame::Data(Channel::Stdin, data).encode(&mut packet);
                }
                // An input that cannot be read any more has ended as far as the command can tell.
                Ok(_) | Err(_) => {
                    stdin = None;
                    Frame::End(Channel::Stdin).encode(&mut packet);
                }
            },
        }
    }
}

async fn next(control: &mut Option<mpsc::Receiver<Control>>) -> Option<Control> {
    match control {
        Some(control) => control.recv().await,
        None => std::future::pending().await,
    }
}

async fn read(
    stdin: &mut Option<Box<dyn AsyncRead + Send + Unpin>>,
    buffer: &mut [u8],
) -> io::Result<usize> {
    match stdin {
        Some(stdin) => stdin.read(buffer).await,
        None => std::future::pending().await,
    }
}

/// One output on the host's side.
struct Output {
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    ended: bool,
}

impl Output {
    fn new(writer: Box<dyn AsyncWrite + Send + Unpin>) -> Self {
        Self { writer: Some(writer), ended: false }
    }

    /// Writes; the error that ends the output is told once.
    async fn write(&mut self, data: &[u8]) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let result = writer.write_all(data).await;
        if result.is_err() {
            self.writer = None;
        }
        result
    }

    /// As [`Self::write`].
    async fn flush(&mut self) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let result = writer.flush().await;
        if result.is_err() {
            self.writer = None;
        }
        result
    }
}

async fn incoming<R: AsyncRead + Unpin>(
    mut read: R,
    stdout: Box<dyn AsyncWrite + Send + Unpin>,
    stderr: Box<dyn AsyncWrite + Send + Unpin>,
    notices: mpsc::Sender<Notice>,
    progress: &Progress,
) -> io::Result<Option<u32>> {
    let (mut stdout, mut stderr) = (Output::new(stdout), Output::new(stderr));
    let mut decoder = Decoder::new();
    let mut buffer = vec![0u8; CHUNK];
    let status = 'stream: loop {
        let n = match read.read(&mut buffer).await {
            Ok(0) => break None,
            Ok(n) => n,
            // The VM was killed with bytes on the way.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => break None,
            Err(e) => return Err(e),
        };
        decoder.feed(buffer.get(..n).unwrap_or_default());
        progress.blocked.store(true, Ordering::Relaxed);
        while let Some(frame) = decoder.next_frame().map_err(io::Error::other)? {
            let (channel, data) = match frame {
                Frame::Data(channel @ (Channel::Stdout | Channel::Stderr), data) => (channel, data),
                Frame::End(Channel::Stdout) | Frame::Reset(Channel::Stdout) => {
                    stdout.ended = true;
                    continue;
                }
                Frame::End(Channel::Stderr) | Frame::Reset(Channel::Stderr) => {
                    stderr.ended = true;
                    continue;
                }
                Frame::Reset(Channel::Stdin) => {
                    let _ = notices.try_send(Notice::StopInput);
                    continue;
                }
                Frame::Exit(status) => break 'stream Some(status),
                other => {
                    return Err(io::Error::other(format!("unexpected {}", name(&other))));
                }
            };
            let (output, count) = match channel {
                Channel::Stderr => (&mut stderr, &progress.stderr),
                _ => (&mut stdout, &progress.stdout),
            };
            if output.ended {
                return Err(io::Error::other("data after the end of an output"));
            }
            count.fetch_add(u64::try_from(data.len()).unwrap_or(u64::MAX), Ordering::Relaxed);
            let written = tokio::select! {
                biased;
                () = progress.unwanted() => {
                    output.writer = None;
                    Ok(())
                }
                written = output.write(&data) => written,
            };
            if let Err(error) = written {
                progress.lost(channel, error);
                let _ = notices.try_send(Notice::Reset(channel));
            }
        }
        // What was written shows at once, unless more is already there.
        if n < CHUNK {
            let flushed = tokio::select! {
                biased;
                () = progress.unwanted() => Vec::new(),
                flushed = flush(&mut stdout, &mut stderr, progress) => flushed,
            };
            for channel in flushed {
                let _ = notices.try_send(Notice::Reset(channel));
            }
        }
        progress.blocked.store(false, Ordering::Relaxed);
    };
    tokio::select! {
        biased;
        () = progress.unwanted() => {}
        _ = flush(&mut stdout, &mut stderr, progress) => {}
    }
    Ok(status)
}

/// Flushes both outputs; gives those that failed just now.
async fn flush(stdout: &mut Output, stderr: &mut Output, progress: &Progress) -> Vec<Channel> {
    let mut failed = Vec::new();
    for (channel, output) in [(Channel::Stdout, stdout), (Channel::Stderr, stderr)] {
        if let Err(error) = output.flush().await {
            progress.lost(channel, error);
            failed.push(channel);
        }
    }
    failed
}

fn name(frame: &Frame) -> &'static str {
    match frame {
        Frame::Open(_) => "open frame",
        Frame::Data(..) | Frame::End(_) | Frame::Reset(_) => "frame for standard input",
        Frame::WindowSize(..) | Frame::Signal(_) => "order from the guest",
        Frame::Exit(_) => "exit frame",
    }
}

#[cfg(test)]
#[path = "exec_tests.rs"]
mod tests;
