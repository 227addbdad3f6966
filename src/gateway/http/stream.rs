//! A command's streams over a connection, in the frames of [`casulo_protocol::stream`]: the caller has
//! the part of the host there, and this side the part of the guest.
//!
//! The caller may close the connection at any time, which kills the command. A stream that ends without
//! [`Frame::Exit`] is that of a command that did not end by itself; the last of standard error says why.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use casulo_protocol::agent::WindowSize;
use casulo_protocol::result::RunResult;
use casulo_protocol::stream::{Channel, Decoder, Frame};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{Control, Error, Stdio};

/// Bytes of each stream that wait for its reader.
const PIPE: usize = 256 * 1024;
/// Bytes of one read.
const CHUNK: usize = 64 * 1024;
/// How long the caller may take to close its side when all is said. A connection that is closed with input
/// unread takes back what is still on its way to the caller (RFC 1122, section 4.2.2.13).
const LINGER: Duration = Duration::from_secs(5);

/// Runs a command with the streams of `connection`, to the end of either. `run` starts it, and kills it
/// when the token says so. `closed` is over when the caller has closed the connection, whatever it has sent
/// before. A caller whose input the command does not take for the time of `patience` is cut off too, and
/// so is one that has not taken the rest of the output for so long after the command's end.
pub(super) async fn carry<S, R, F>(
    connection: S,
    patience: Duration,
    closed: impl Future<Output = ()>,
    stop: &CancellationToken,
    run: R,
) where
    S: AsyncRead + AsyncWrite + Send,
    R: FnOnce(Stdio, CancellationToken) -> F,
    F: Future<Output = Result<RunResult, Error>>,
{
    let (mut read, write) = tokio::io::split(connection);
    let (input, stdin) = tokio::io::duplex(PIPE);
    let (stdout, out) = tokio::io::duplex(PIPE);
    let (stderr, err) = tokio::io::duplex(PIPE);
    let (orders, control) = mpsc::channel(4);
    let stdio = Stdio {
        stdin: Some(Box::new(stdin)),
        stdout: Box::new(stdout),
        stderr: Box::new(stderr),
        control: Some(control),
    };
    let kill = stop.child_token();
    let why = OnceLock::new();
    let unread = Unread::default();
    let ended = CancellationToken::new();
    let outgoing = async {
        let sent = tokio::select! {
            sent = outgoing(write, out, err, &unread) => sent,
            () = async { ended.cancelled().await; tokio::time::sleep(patience).await } => {
                Err(io::ErrorKind::TimedOut.into())
            }
        };
        if sent.is_err() {
            kill.cancel();
        }
        sent
    };
    let run = run(stdio, kill.clone());
    let run = async {
        let end = run.await;
        ended.cancel();
        end
    };
    let served = async {
        let (end, sent) = tokio::join!(run, outgoing);
        if let Ok(write) = sent {
            let why = why.get().cloned();
            let why = why.or_else(|| stop.is_cancelled().then(|| "the server ends".to_owned()));
            // A caller that has gone misses nothing.
            let _ = tokio::time::timeout(patience, last_words(write, end, why)).await;
        }
    };
    let incoming = async {
        if let Over::Because(reason) = incoming(&mut read, input, orders, &unread, patience).await {
            let _ = why.set(reason);
            kill.cancel();
            let mut rest = vec![0u8; CHUNK];
            while read.read(&mut rest).await.is_ok_and(|n| n > 0) {}
        }
    };
    let gone = async {
        tokio::select! {
            () = incoming => {}
            () = closed => {}
        }
        // Nobody is there to be written to.
        unread.gone.cancel();
        kill.cancel();
    };
    tokio::pin!(served, gone);
    tokio::select! {
        () = &mut served => drop(tokio::time::timeout(LINGER, gone).await),
        () = &mut gone => served.await,
    }
}

/// What the caller does not read any more.
#[derive(Default)]
struct Unread {
    stdout: CancellationToken,
    stderr: CancellationToken,
    gone: CancellationToken,
}

/// Why nothing more comes from the caller.
enum Over {
    /// It has closed the connection.
    Gone,
    /// It has broken the format, or cannot be listened to.
    Because(String),
}

async fn incoming<R: AsyncRead + Unpin>(
    read: &mut R,
    input: DuplexStream,
    orders: mpsc::Sender<Control>,
    unread: &Unread,
    patience: Duration,
) -> Over {
    let mut input = Some(input);
    let (mut decoder, mut opened, mut ended) = (Decoder::new(), false, false);
    let mut buffer = vec![0u8; CHUNK];
    let broken = |what: &str| Over::Because(format!("the stream is broken: {what}"));
    loop {
        let n = match read.read(&mut buffer).await {
            Ok(0) | Err(_) => return Over::Gone,
            Ok(n) => n,
        };
        decoder.feed(buffer.get(..n).unwrap_or_default());
        loop {
            let frame = match decoder.next_frame() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => return broken(&error.to_string()),
            };
            let order = match frame {
                Frame::Open(_) if !opened => {
                    opened = true;
                    continue;
                }
                _ if !opened => return broken("it does not begin with an open frame"),
                Frame::Data(Channel::Stdin, _) | Frame::End(Channel::Stdin) if ended => {
                    return broken("input after its end");
                }
                Frame::Data(Channel::Stdin, data) => {
                    match feed(&mut input, &data, patience).await {
                        Ok(()) => continue,
                        Err(why) => return Over::Because(why),
                    }
                }
                Frame::End(Channel::Stdin) | Frame::Reset(Channel::Stdin) => {
                    (input, ended) = (None, true);
                    continue;
                }
                Frame::Reset(Channel::Stdout) => {
                    unread.stdout.cancel();
                    continue;
                }
                Frame::Reset(Channel::Stderr) => {
                    unread.stderr.cancel();
                    continue;
                }
                Frame::WindowSize(rows, columns) => {
                    Control::WindowSize(WindowSize { rows, columns })
                }
                Frame::Signal(signal) => Control::Signal(signal),
                _ => return broken("a frame that only the command's side may send"),
            };
            // A command that has ended takes no orders; one that takes none loses those that wait.
            let _ = orders.try_send(order);
        }
    }
}

/// Writes input to the command; its pipe is gone once it does not read it any more.
async fn feed(
    input: &mut Option<DuplexStream>,
    mut data: &[u8],
    patience: Duration,
) -> Result<(), String> {
    while let Some(pipe) = input.as_mut().filter(|_| !data.is_empty()) {
        match tokio::time::timeout(patience, pipe.write(data)).await {
            Ok(Ok(n)) if n > 0 => data = data.get(n..).unwrap_or_default(),
            Ok(_) => *input = None,
            Err(_) => {
                let seconds = patience.as_secs();
                return Err(format!("the command has not taken its input for {seconds} seconds"));
            }
        }
    }
    Ok(())
}

/// Sends both outputs to their ends; standard error stays open for the last words.
async fn outgoing<W: AsyncWrite + Unpin>(
    mut write: W,
    out: DuplexStream,
    err: DuplexStream,
    unread: &Unread,
) -> io::Result<W> {
    let (mut out, mut err) = (Some(out), Some(err));
    let mut buffers = [vec![0u8; CHUNK], vec![0u8; CHUNK]];
    let [for_out, for_err] = &mut buffers;
    let mut packet = Vec::with_capacity(CHUNK);
    while out.is_some() || err.is_some() {
        packet.clear();
        tokio::select! {
            biased;
            () = unread.gone.cancelled() => return Err(io::ErrorKind::BrokenPipe.into()),
            () = unread.stdout.cancelled(), if out.is_some() => out = None,
            () = unread.stderr.cancelled(), if err.is_some() => err = None,
            n = some(&mut out, for_out), if out.is_some() => {
                match for_out.get(..n).filter(|data| !data.is_empty()) {
                    Some(data) => Frame::Data(Channel::Stdout, data.to_vec()).encode(&mut packet),
                    None => {
                        out = None;
                        Frame::End(Channel::Stdout).encode(&mut packet);
                    }
                }
            }
            n = some(&mut err, for_err), if err.is_some() => {
                match for_err.get(..n).filter(|data| !data.is_empty()) {
                    Some(data) => Frame::Data(Channel::Stderr, data.to_vec()).encode(&mut packet),
                    None => err = None,
                }
            }
        }
        tokio::select! {
            biased;
            () = unread.gone.cancelled() => return Err(io::ErrorKind::BrokenPipe.into()),
            sent = send(&mut write, &packet) => sent?,
        }
    }
    Ok(write)
}

/// Bytes read; none at the end.
async fn some(pipe: &mut Option<DuplexStream>, buffer: &mut [u8]) -> usize {
    match pipe {
        // A pipe within this process does not fail.
        Some(pipe) => pipe.read(buffer).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}

async fn send<W: AsyncWrite + Unpin>(write: &mut W, packet: &[u8]) -> io::Result<()> {
    write.write_all(packet).await?;
    write.flush().await
}

/// How it ended. `why` is why we ended it.
async fn last_words<W: AsyncWrite + Unpin>(
    mut write: W,
    end: Result<RunResult, Error>,
    why: Option<String>,
) -> io::Result<()> {
    let (note, status) = match end {
        Err(Error::Cancelled) => (why.unwrap_or_else(|| "it was ended".to_owned()), None),
        Err(error) => (error.to_string(), None),
        Ok(result) => {
            let oom = if result.oom { "the guest ran out of memory" } else { "" };
            let note = if result.stderr.is_empty() { oom } else { result.stderr.trim_end() };
            (note.to_owned(), wait_status(&result))
        }
    };
    let mut packet = Vec::new();
    if !note.is_empty() {
        Frame::Data(Channel::Stderr, format!("casulo: {note}\n").into_bytes()).encode(&mut packet);
    }
    Frame::End(Channel::Stderr).encode(&mut packet);
    if let Some(status) = status {
        Frame::Exit(status).encode(&mut packet);
    }
    send(&mut write, &packet).await?;
    write.shutdown().await
}

/// As of `waitpid` (Linux, `include/linux/wait.h`): the signal in the low seven bits, else the exit
/// status in the next byte.
fn wait_status(result: &RunResult) -> Option<u32> {
    match (result.exit_code, result.signal) {
        (Some(code), _) => u32::try_from(code & 0xff).ok().map(|code| code << 8),
        (None, Some(signal)) => u32::try_from(signal & 0x7f).ok(),
        (None, None) => None,
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
