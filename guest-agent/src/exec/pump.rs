//! Bytes between a command and the host: frames on a stream, or head and tail in memory.
//!
//! Every buffer is bounded, and a pump reads only when what it read before is on its way, so that
//! back-pressure goes from the host's reader through to the command.

use std::io;

use casulo_protocol::stream::{Channel, Decoder, Frame, HEADER, MAX_PAYLOAD, data_header};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Mutex, mpsc, watch};

use super::capture::Capture;
use super::fd::Fd;
use super::keep::Kept;

/// Size of the pipes of a streamed command in bytes: fewer wake-ups for bulk output.
pub const PIPE_SIZE: usize = 1 << 20;
/// Chunks of standard input that wait for the command; each is at most one frame.
const STDIN_QUEUE: usize = 2;

/// The guest's side of a stream, shared by those who send frames.
pub type Sender<W> = Mutex<W>;

/// Sends one frame.
///
/// # Errors
/// The host is gone.
pub async fn send<W: AsyncWrite + Unpin>(out: &Sender<W>, frame: &Frame) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    out.lock().await.write_all(&bytes).await
}

/// Sends what the command writes to `fd` and keeps it, then sends the end of `channel`. Stops early,
/// closing the descriptor so that the command learns of it, when `unwanted` becomes true.
///
/// Once `finished`, it takes no more than a pipe can hold: what was written before is within that,
/// and a process of a resident interpreter may go on writing for ever.
///
/// # Errors
/// The host is gone, or the descriptor fails.
pub async fn output<W: AsyncWrite + Unpin>(
    fd: Fd,
    channel: Channel,
    out: &Sender<W>,
    kept: &mut Kept,
    mut finished: watch::Receiver<bool>,
    mut unwanted: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; HEADER + MAX_PAYLOAD];
    let mut late = 0;
    while let Some(payload) = buffer.get_mut(HEADER..) {
        if late >= PIPE_SIZE {
            break;
        }
        let was_finished = *finished.borrow();
        let length = tokio::select! {
            biased;
            Ok(_) = unwanted.wait_for(|u| *u) => 0,
            length = fd.read_until(payload, &mut finished) => length?,
        };
        if length == 0 {
            break;
        }
        if was_finished {
            late += length;
        }
        kept.push(payload.get(..length).unwrap_or_default());
        let head = data_header(channel, length).map_err(io::Error::other)?;
        if let Some(start) = buffer.first_chunk_mut::<HEADER>() {
            *start = head;
        }
        let frame = buffer.get(..HEADER + length).unwrap_or_default();
        out.lock().await.write_all(frame).await?;
    }
    drop(fd);
    send(out, &Frame::End(channel)).await
}

/// Keeps head and tail of what the command writes to `fd`.
///
/// # Errors
/// The descriptor fails.
pub async fn capture(
    fd: Fd,
    capture: &mut Capture,
    mut finished: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = fd.read_until(&mut buffer, &mut finished).await?;
        if length == 0 {
            return Ok(());
        }
        capture.push(buffer.get(..length).unwrap_or_default());
    }
}

/// What the host says on a stream, beside standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// New size of the terminal: rows, columns.
    WindowSize(u16, u16),
    /// Send this signal to the foreground.
    Signal(u32),
    /// The host does not want this channel any more.
    Unwanted(Channel),
}

/// Reads frames until the host closes the stream: standard input goes to `stdin` in order, and
/// `request` gets the rest. When the command takes no more input, what comes for it is dropped.
///
/// # Errors
/// The connection failed, or the host broke the format. In either case, and after `Ok` too, nobody
/// waits for the command any more.
pub async fn input<R: AsyncRead + Unpin>(
    mut from: R,
    mut decoder: Decoder,
    stdin: mpsc::Sender<Vec<u8>>,
    mut request: impl FnMut(Request),
) -> io::Result<()> {
    let mut stdin = Some(stdin);
    let mut buffer = vec![0; 64 * 1024];
    loop {
        while let Some(frame) = decoder.next_frame().map_err(io::Error::other)? {
            match frame {
                Frame::Data(Channel::Stdin, data) => match &stdin {
                    // An error means that the command closed its input; dropping is right then.
                    Some(to) => drop(to.send(data).await),
                    None => return Err(io::Error::other("input after its end")),
                },
                Frame::End(Channel::Stdin) | Frame::Reset(Channel::Stdin) => stdin = None,
                Frame::Reset(channel) => request(Request::Unwanted(channel)),
                Frame::WindowSize(rows, columns) => request(Request::WindowSize(rows, columns)),
                Frame::Signal(signal) => request(Request::Signal(signal)),
                Frame::Open(_) | Frame::Data(..) | Frame::End(_) | Frame::Exit(_) => {
                    return Err(io::Error::other("a frame that only the guest sends"));
                }
            }
        }
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        decoder.feed(buffer.get(..length).unwrap_or_default());
    }
}

/// A queue for [`input`] and [`stdin`].
pub fn stdin_queue() -> (mpsc::Sender<Vec<u8>>, mpsc::Receiver<Vec<u8>>) {
    mpsc::channel(STDIN_QUEUE)
}

/// Writes the queue to the command's standard input and closes it at the end.
///
/// # Errors
/// The command has closed it.
pub async fn stdin(fd: Fd, mut queue: mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    while let Some(data) = queue.recv().await {
        fd.write_all(&data).await?;
    }
    Ok(())
}

/// Writes the queue to a terminal. Its end is the character for it: a terminal has no half-close.
///
/// # Errors
/// The terminal is gone.
pub async fn keys(terminal: &Fd, mut queue: mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    const END_OF_TRANSMISSION: &[u8] = &[4];
    while let Some(data) = queue.recv().await {
        terminal.write_all(&data).await?;
    }
    terminal.write_all(END_OF_TRANSMISSION).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe() -> (Fd, Fd) {
        let (read, write) = rustix::pipe::pipe().unwrap();
        (Fd::new(read).unwrap(), Fd::new(write).unwrap())
    }

    fn never() -> watch::Receiver<bool> {
        // The sender may go: a closed channel does not wake `wait_for` with a value.
        let (sender, receiver) = watch::channel(false);
        std::mem::forget(sender);
        receiver
    }

    fn frames(bytes: &[u8]) -> Vec<Frame> {
        let mut decoder = Decoder::new();
        decoder.feed(bytes);
        let mut frames = Vec::new();
        while let Some(frame) = decoder.next_frame().unwrap() {
            frames.push(frame);
        }
        frames
    }

    #[tokio::test]
    async fn output_is_framed_in_order_and_ended() {
        let (read, write) = pipe();
        let (mut host, guest) = tokio::io::duplex(100);
        let out = Mutex::new(guest);
        let sent: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
        let expected = sent.clone();
        let pump = async move {
            output(read, Channel::Stdout, &out, &mut Kept::none(), never(), never()).await.unwrap();
        };
        let feed = async move { write.write_all(&sent).await.unwrap() };
        let take = async move {
            let mut all = Vec::new();
            host.read_to_end(&mut all).await.unwrap();
            all
        };
        let ((), (), all) = tokio::join!(pump, feed, take);
        let mut frames = frames(&all);
        assert_eq!(frames.pop(), Some(Frame::End(Channel::Stdout)));
        let mut joined = Vec::new();
        for frame in frames {
            let Frame::Data(Channel::Stdout, data) = frame else { panic!("{frame:?}") };
            joined.extend(data);
        }
        assert!(joined == expected);
    }

    #[tokio::test]
    async fn once_finished_an_open_pipe_ends_when_it_is_empty() {
        let (read, write) = pipe();
        write.write_all(b"rest").await.unwrap();
        let (finish, finished) = watch::channel(false);
        let mut kept = Capture::new(100);
        let pump = capture(read, &mut kept, finished);
        let later = async {
            tokio::task::yield_now().await;
            finish.send(true).unwrap();
        };
        let (result, ()) = tokio::join!(pump, later);
        result.unwrap();
        drop(write);
        assert_eq!(kept.finish().bytes, 4);
    }

    #[tokio::test]
    async fn an_unwanted_channel_is_closed() {
        let (read, write) = pipe();
        let (unwant, unwanted) = watch::channel(false);
        let (_host, guest) = tokio::io::duplex(100);
        let out = Mutex::new(guest);
        let mut kept = Kept::none();
        let pump = output(read, Channel::Stderr, &out, &mut kept, never(), unwanted);
        let later = async { unwant.send(true).unwrap() };
        let (result, ()) = tokio::join!(pump, later);
        result.unwrap();
        let error = write.write_all(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn input_is_told_apart_and_foreign_frames_are_errors() {
        let mut bytes = Vec::new();
        for frame in [
            Frame::Data(Channel::Stdin, b"hello".to_vec()),
            Frame::WindowSize(5, 6),
            Frame::End(Channel::Stdin),
            Frame::Signal(2),
            Frame::Reset(Channel::Stdout),
        ] {
            frame.encode(&mut bytes);
        }
        let (to, mut queue) = stdin_queue();
        let mut requests = Vec::new();
        input(bytes.as_slice(), Decoder::new(), to, |r| requests.push(r)).await.unwrap();
        assert_eq!(queue.recv().await, Some(b"hello".to_vec()));
        assert_eq!(queue.recv().await, None);
        assert_eq!(
            requests,
            [Request::WindowSize(5, 6), Request::Signal(2), Request::Unwanted(Channel::Stdout)]
        );
        for foreign in [
            Frame::Open(1),
            Frame::Exit(0),
            Frame::Data(Channel::Stdout, vec![1]),
            Frame::End(Channel::Stderr),
        ] {
            let mut bytes = Vec::new();
            foreign.encode(&mut bytes);
            let (to, _queue) = stdin_queue();
            assert!(input(bytes.as_slice(), Decoder::new(), to, |_| ()).await.is_err());
        }
    }
}
