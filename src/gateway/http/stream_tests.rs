//! Both ends of a stream: `carry` with a command within this process, and `pump` as its caller.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::DuplexStream;
use tokio::task::JoinHandle;

use super::*;
use crate::agent::exec::{Progress, pump};
use crate::capture::Capture;

const PATIENCE: Duration = Duration::from_secs(60);

/// The caller's end of a stream whose command is `run`.
fn serve<R, F>(run: R) -> (DuplexStream, JoinHandle<()>)
where
    R: FnOnce(Stdio, CancellationToken) -> F + Send + 'static,
    F: Future<Output = Result<RunResult, Error>> + Send,
{
    let (ours, theirs) = tokio::io::duplex(1024);
    let stop = CancellationToken::new();
    (
        ours,
        tokio::spawn(
            async move { carry(theirs, PATIENCE, std::future::pending(), &stop, run).await },
        ),
    )
}

fn ended(code: i32) -> RunResult {
    let mut result = RunResult::new();
    result.exit_code = Some(code);
    result
}

/// Copies its input to both outputs.
async fn tee(mut stdio: Stdio) -> Result<RunResult, Error> {
    let mut input = stdio.stdin.take().unwrap();
    let mut buffer = vec![0u8; 10_000];
    loop {
        let n = input.read(&mut buffer).await.unwrap();
        if n == 0 {
            return Ok(ended(3));
        }
        stdio.stdout.write_all(&buffer[..n]).await.unwrap();
        stdio.stderr.write_all(&buffer[..n]).await.unwrap();
    }
}

/// Until it is killed.
async fn wait(stdio: Stdio, kill: CancellationToken) -> Result<RunResult, Error> {
    kill.cancelled().await;
    drop(stdio);
    Err(Error::Cancelled)
}

/// Everything that comes, as frames.
async fn frames(stream: &mut DuplexStream) -> Vec<Frame> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let mut decoder = Decoder::new();
    decoder.feed(&bytes);
    std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
}

async fn send(stream: &mut DuplexStream, frames: &[Frame]) {
    let mut packet = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut packet));
    stream.write_all(&packet).await.unwrap();
}

#[tokio::test]
async fn input_and_both_outputs_pass_whole_and_the_status_comes_last() {
    let (stream, served) = serve(|stdio, _| tee(stdio));
    let data: Vec<u8> = (0..3_000_000u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let (stdout, stderr) = (Capture::new(usize::MAX), Capture::new(usize::MAX));
    let stdio = Stdio {
        stdin: Some(Box::new(std::io::Cursor::new(data.clone()))),
        stdout: Box::new(stdout.clone()),
        stderr: Box::new(stderr.clone()),
        control: None,
    };
    let progress = Progress::default();
    assert_eq!(pump(stream, 0, stdio, &progress).await.unwrap(), Some(3 << 8));
    served.await.unwrap();
    for output in [stdout, stderr] {
        let (head, tail, _) = output.parts();
        assert!([head, tail].concat() == data);
    }
}

#[tokio::test]
async fn signals_and_sizes_reach_the_command() {
    let got = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&got);
    let (mut stream, served) = serve(move |mut stdio, _| async move {
        let mut control = stdio.control.take().unwrap();
        while let Some(order) = control.recv().await {
            into.lock().unwrap().push(order);
            if order == Control::Signal(15) {
                break;
            }
        }
        let mut result = RunResult::new();
        result.signal = Some(15);
        Ok(result)
    });
    send(&mut stream, &[Frame::Open(9), Frame::WindowSize(24, 80), Frame::Signal(15)]).await;
    let size = WindowSize { rows: 24, columns: 80 };
    let wanted = [Frame::End(Channel::Stdout), Frame::End(Channel::Stderr), Frame::Exit(15)];
    assert_eq!(frames(&mut stream).await, wanted);
    served.await.unwrap();
    assert_eq!(*got.lock().unwrap(), [Control::WindowSize(size), Control::Signal(15)]);
}

#[tokio::test]
async fn a_caller_that_goes_away_kills_the_command() {
    for begun in [false, true] {
        let killed = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&killed);
        let (mut stream, served) = serve(move |mut stdio, kill| async move {
            // It has more to say than anybody will ever read.
            let flood = async { while stdio.stdout.write_all(&[b'x'; 10_000]).await.is_ok() {} };
            tokio::join!(flood, kill.cancelled());
            tell.store(true, Ordering::Relaxed);
            Err(Error::Cancelled)
        });
        if begun {
            send(&mut stream, &[Frame::Open(0), Frame::Data(Channel::Stdin, b"x".to_vec())]).await;
        }
        drop(stream);
        served.await.unwrap();
        assert!(killed.load(Ordering::Relaxed));
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_that_takes_no_input_is_killed_and_the_caller_is_told() {
    let (stream, served) = serve(wait);
    let (mut read, mut write) = tokio::io::split(stream);
    let mut packet = Vec::new();
    Frame::Open(0).encode(&mut packet);
    Frame::Data(Channel::Stdin, vec![b'x'; 2 * PIPE]).encode(&mut packet);
    let writer = tokio::spawn(async move { write.write_all(&packet).await });
    let mut bytes = Vec::new();
    read.read_to_end(&mut bytes).await.unwrap();
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("not taken its input for 60 seconds"), "{text}");
    served.await.unwrap();
    writer.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_caller_that_breaks_the_format_is_cut_off_and_told() {
    for (bytes, wanted) in [
        (vec![0xff, 0, 0, 0, 0, 0, 0, 0], "kind"),
        (vec![1, 0, 1, 0, 8, 0, 0, 0], "reserved"),
        (vec![2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], "payload"),
    ] {
        let (mut stream, served) = serve(wait);
        stream.write_all(&bytes).await.unwrap();
        let text = format!("{:?}", text_of(&frames(&mut stream).await));
        assert!(text.contains("the stream is broken") && text.contains(wanted), "{text}");
        served.await.unwrap();
    }
    let data = |channel| Frame::Data(channel, b"x".to_vec());
    for wrong in [
        vec![data(Channel::Stdin)],
        vec![Frame::Open(0), Frame::Open(0)],
        vec![Frame::Open(0), data(Channel::Stdout)],
        vec![Frame::Open(0), Frame::Exit(0)],
        vec![Frame::Open(0), Frame::End(Channel::Stdin), data(Channel::Stdin)],
        vec![Frame::Open(0), Frame::End(Channel::Stdout)],
    ] {
        let (mut stream, served) = serve(wait);
        send(&mut stream, &wrong).await;
        let got = frames(&mut stream).await;
        assert!(text_of(&got).contains("the stream is broken"), "{wrong:?}: {got:?}");
        assert!(!got.iter().any(|frame| matches!(frame, Frame::Exit(_))));
        served.await.unwrap();
    }
}

/// Standard error.
fn text_of(frames: &[Frame]) -> String {
    let parts = frames.iter().filter_map(|frame| match frame {
        Frame::Data(Channel::Stderr, data) => Some(String::from_utf8_lossy(data)),
        _ => None,
    });
    parts.collect()
}

#[tokio::test]
async fn why_a_command_did_not_start_or_a_guest_was_lost_is_told() {
    let (mut stream, _) = serve(|_, _| async {
        let mut result = ended(127);
        result.stderr = "cannot run \"x\": not found\n".to_owned();
        Ok(result)
    });
    let got = frames(&mut stream).await;
    assert_eq!(text_of(&got), "casulo: cannot run \"x\": not found\n");
    assert_eq!(got.last(), Some(&Frame::Exit(127 << 8)));

    let (mut stream, _) = serve(|_, _| async {
        Err(Error::GuestLost { reason: "the VM ended".to_owned(), evidence: Box::default() })
    });
    let got = frames(&mut stream).await;
    assert!(text_of(&got).contains("the VM ended"), "{got:?}");
    assert_eq!(got.last(), Some(&Frame::End(Channel::Stderr)));
}

#[tokio::test]
async fn an_output_that_nobody_reads_does_not_stop_the_other() {
    let (mut stream, served) = serve(|mut stdio, _| async move {
        // The reset comes at some time, after which writing fails.
        while stdio.stdout.write_all(&[b'x'; 100]).await.is_ok() {}
        stdio.stderr.write_all(b"done").await.unwrap();
        Ok(ended(0))
    });
    let (mut read, mut write) = tokio::io::split(&mut stream);
    let mut packet = Vec::new();
    Frame::Open(0).encode(&mut packet);
    Frame::Reset(Channel::Stdout).encode(&mut packet);
    write.write_all(&packet).await.unwrap();
    let mut bytes = Vec::new();
    read.read_to_end(&mut bytes).await.unwrap();
    let mut decoder = Decoder::new();
    decoder.feed(&bytes);
    let got: Vec<Frame> = std::iter::from_fn(|| decoder.next_frame().unwrap()).collect();
    assert_eq!(text_of(&got), "done");
    assert_eq!(got.last(), Some(&Frame::Exit(0)));
    served.await.unwrap();
}

#[tokio::test]
async fn a_server_that_ends_says_so() {
    let (mut ours, theirs) = tokio::io::duplex(1024);
    let stop = CancellationToken::new();
    let ending = stop.clone();
    let served = tokio::spawn(async move {
        carry(theirs, PATIENCE, std::future::pending(), &ending, wait).await
    });
    send(&mut ours, &[Frame::Open(0)]).await;
    stop.cancel();
    assert_eq!(text_of(&frames(&mut ours).await), "casulo: the server ends\n");
    served.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_command_that_takes_its_input_slowly_is_left_to_it() {
    let (mut stream, served) = serve(|mut stdio, _| async move {
        let mut input = stdio.stdin.take().unwrap();
        let mut buffer = vec![0u8; 4096];
        while input.read(&mut buffer).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(ended(0))
    });
    // A frame takes longer than the patience.
    let data = Frame::Data(Channel::Stdin, vec![0; 256 * 1024]);
    let frames = [Frame::Open(0), data.clone(), data.clone(), data, Frame::End(Channel::Stdin)];
    send(&mut stream, &frames).await;
    assert_eq!(self::frames(&mut stream).await.last(), Some(&Frame::Exit(0)));
    served.await.unwrap();
}

#[tokio::test]
async fn a_caller_that_is_known_to_be_gone_need_not_be_read_to_the_end() {
    let (mut ours, theirs) = tokio::io::duplex(1 << 20);
    let (stop, closed) = (CancellationToken::new(), CancellationToken::new());
    let told = closed.clone();
    let served = tokio::spawn(async move {
        carry(theirs, PATIENCE, told.cancelled_owned(), &stop, wait).await;
    });
    // More than the command ever takes.
    send(&mut ours, &[Frame::Open(0), Frame::Data(Channel::Stdin, vec![0; 2 * PIPE])]).await;
    closed.cancel();
    served.await.unwrap();
}

#[tokio::test]
async fn the_end_is_heard_by_a_caller_that_still_sends() {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let stop = CancellationToken::new();
    let run = |mut stdio: Stdio, _| async move {
        stdio.stdout.write_all(&vec![b'x'; 1 << 20]).await.unwrap();
        stdio.stderr.write_all(b"THE END").await.unwrap();
        Ok(ended(7))
    };
    let served = tokio::spawn(async move {
        carry(theirs, PATIENCE, std::future::pending(), &stop, run).await;
    });
    let (mut read, mut write) = ours.into_split();
    let sender = tokio::spawn(async move {
        let mut packet = Vec::new();
        Frame::Open(0).encode(&mut packet);
        Frame::Data(Channel::Stdin, vec![0; 8 << 20]).encode(&mut packet);
        // To the end of the command, and beyond it.
        let _ = write.write_all(&packet).await;
        write
    });
    let (mut decoder, mut buffer) = (Decoder::new(), vec![0u8; 100_000]);
    let (mut bytes, mut rest) = (0, Vec::new());
    while rest.last() != Some(&Frame::Exit(7 << 8)) {
        let n = read.read(&mut buffer).await.unwrap();
        assert!(n > 0, "{rest:?}");
        decoder.feed(&buffer[..n]);
        while let Some(frame) = decoder.next_frame().unwrap() {
            match frame {
                Frame::Data(Channel::Stdout, data) => bytes += data.len(),
                other => rest.push(other),
            }
        }
    }
    assert_eq!((bytes, text_of(&rest).as_str()), (1 << 20, "THE END"));
    drop((sender.await.unwrap(), read));
    served.await.unwrap();
}
