use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::DuplexStream;

use super::*;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl AsyncWrite for Sink {
    fn poll_write(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        data: &[u8],
    ) -> std::task::Poll<io::Result<usize>> {
        self.0.lock().unwrap().extend_from_slice(data);
        std::task::Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }
}

/// A file on a full disk.
struct Full;

impl AsyncWrite for Full {
    fn poll_write(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        _: &[u8],
    ) -> std::task::Poll<io::Result<usize>> {
        std::task::Poll::Ready(Err(io::ErrorKind::StorageFull.into()))
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }
}

/// The guest's end of a stream.
struct Guest {
    stream: DuplexStream,
    decoder: Decoder,
}

impl Guest {
    async fn send(&mut self, frames: &[Frame]) {
        let mut bytes = Vec::new();
        frames.iter().for_each(|f| f.encode(&mut bytes));
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn next(&mut self) -> Frame {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return frame;
            }
            let mut buffer = [0; 1000];
            let n = self.stream.read(&mut buffer).await.unwrap();
            assert!(n > 0);
            self.decoder.feed(&buffer[..n]);
        }
    }
}

struct Run {
    guest: Guest,
    result: tokio::task::JoinHandle<io::Result<Option<u32>>>,
    progress: Arc<Progress>,
}

fn start(stdio: Stdio) -> Run {
    let (ours, theirs) = tokio::io::duplex(4096);
    let progress = Arc::new(Progress::default());
    let shared = Arc::clone(&progress);
    let result = tokio::spawn(async move { pump(ours, 5, stdio, &shared).await });
    Run { guest: Guest { stream: theirs, decoder: Decoder::new() }, result, progress }
}

#[tokio::test]
async fn carries_both_outputs_apart_and_in_order() {
    let (out, err) = (Sink::default(), Sink::default());
    let stdio =
        Stdio { stdout: Box::new(out.clone()), stderr: Box::new(err.clone()), ..Stdio::null() };
    let mut run = start(stdio);
    assert_eq!(run.guest.next().await, Frame::Open(5));
    assert_eq!(run.guest.next().await, Frame::End(Channel::Stdin));
    for n in 0..100u8 {
        run.guest.send(&[Frame::Data(Channel::Stdout, vec![n; 1000])]).await;
        run.guest.send(&[Frame::Data(Channel::Stderr, vec![n])]).await;
    }
    let ends = [Frame::End(Channel::Stdout), Frame::End(Channel::Stderr), Frame::Exit(256)];
    run.guest.send(&ends).await;
    assert_eq!(run.result.await.unwrap().unwrap(), Some(256));
    let wanted: Vec<u8> = (0..100).flat_map(|n| vec![n; 1000]).collect();
    assert_eq!(*out.0.lock().unwrap(), wanted);
    assert_eq!(*err.0.lock().unwrap(), (0..100).collect::<Vec<u8>>());
    assert_eq!(run.progress.bytes(), 100_100);
}

#[tokio::test]
async fn input_and_orders_go_in() {
    let (control_in, control) = mpsc::channel(4);
    let input: &[u8] = b"hello";
    let stdio = Stdio { stdin: Some(Box::new(input)), control: Some(control), ..Stdio::null() };
    let mut run = start(stdio);
    assert_eq!(run.guest.next().await, Frame::Open(5));
    assert_eq!(run.guest.next().await, Frame::Data(Channel::Stdin, b"hello".to_vec()));
    assert_eq!(run.guest.next().await, Frame::End(Channel::Stdin));
    control_in.send(Control::WindowSize(WindowSize { rows: 3, columns: 4 })).await.unwrap();
    assert_eq!(run.guest.next().await, Frame::WindowSize(3, 4));
    control_in.send(Control::Signal(2)).await.unwrap();
    assert_eq!(run.guest.next().await, Frame::Signal(2));
    run.guest.send(&[Frame::Exit(0)]).await;
    assert_eq!(run.result.await.unwrap().unwrap(), Some(0));
}

#[tokio::test]
async fn an_output_that_nobody_reads_is_reset_and_the_rest_goes_on() {
    let (reader, writer) = tokio::io::duplex(64);
    drop(reader);
    let err = Sink::default();
    let stdio = Stdio { stdout: Box::new(writer), stderr: Box::new(err.clone()), ..Stdio::null() };
    let mut run = start(stdio);
    run.guest.next().await;
    run.guest.next().await;
    run.guest.send(&[Frame::Data(Channel::Stdout, vec![1; 100])]).await;
    assert_eq!(run.guest.next().await, Frame::Reset(Channel::Stdout));
    run.guest.send(&[Frame::Data(Channel::Stdout, vec![1; 100])]).await;
    run.guest.send(&[Frame::Data(Channel::Stderr, b"e".to_vec()), Frame::Exit(13)]).await;
    assert_eq!(run.result.await.unwrap().unwrap(), Some(13));
    assert_eq!(*err.0.lock().unwrap(), b"e");
    assert!(run.progress.unwritten().is_none(), "a reader that goes away is no failure");
}

#[tokio::test]
async fn an_output_that_cannot_be_written_is_remembered() {
    let stdio = Stdio { stdout: Box::new(Full), ..Stdio::null() };
    let mut run = start(stdio);
    run.guest.next().await;
    run.guest.next().await;
    run.guest.send(&[Frame::Data(Channel::Stdout, vec![1; 100])]).await;
    assert_eq!(run.guest.next().await, Frame::Reset(Channel::Stdout));
    run.guest.send(&[Frame::End(Channel::Stdout), Frame::Exit(0)]).await;
    assert_eq!(run.result.await.unwrap().unwrap(), Some(0));
    let (channel, error) = run.progress.unwritten().unwrap();
    assert_eq!((channel, error.kind()), (Channel::Stdout, io::ErrorKind::StorageFull));
}

#[tokio::test]
async fn a_slow_reader_holds_the_guest_back() {
    let (mut reader, writer) = tokio::io::duplex(100);
    let stdio = Stdio { stdout: Box::new(writer), ..Stdio::null() };
    let mut run = start(stdio);
    run.guest.next().await;
    run.guest.next().await;
    let flood = async {
        for _ in 0..1000 {
            run.guest.send(&[Frame::Data(Channel::Stdout, vec![0; 1000])]).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_millis(100), flood).await.is_err());
    assert!(run.progress.blocked.load(Ordering::Relaxed));
    assert!(run.progress.bytes() < 200_000);
    let mut some = [0; 10];
    reader.read_exact(&mut some).await.unwrap();
}

#[tokio::test]
async fn hostile_streams_are_errors() {
    let wrong: [Vec<Frame>; 5] = [
        vec![Frame::Open(1)],
        vec![Frame::Data(Channel::Stdin, vec![1])],
        vec![Frame::Signal(9)],
        vec![Frame::End(Channel::Stdin)],
        vec![Frame::End(Channel::Stdout), Frame::Data(Channel::Stdout, vec![1])],
    ];
    for frames in wrong {
        let mut run = start(Stdio::null());
        run.guest.send(&frames).await;
        assert!(run.result.await.unwrap().is_err(), "{frames:?}");
    }
    let mut run = start(Stdio::null());
    run.guest.stream.write_all(&[2, 1, 0, 0, 0xff, 0xff, 0xff, 0xff]).await.unwrap();
    assert!(run.result.await.unwrap().is_err());
}

#[tokio::test]
async fn a_stream_that_closes_without_a_status_has_none() {
    let run = start(Stdio::null());
    drop(run.guest);
    assert_eq!(run.result.await.unwrap().unwrap(), None);
}

#[tokio::test]
async fn a_command_that_stops_reading_stops_the_input() {
    let (_writer, reader) = tokio::io::duplex(64);
    let mut run = start(Stdio { stdin: Some(Box::new(reader)), ..Stdio::null() });
    assert_eq!(run.guest.next().await, Frame::Open(5));
    run.guest.send(&[Frame::Reset(Channel::Stdin), Frame::Exit(0)]).await;
    assert_eq!(run.result.await.unwrap().unwrap(), Some(0));
}
