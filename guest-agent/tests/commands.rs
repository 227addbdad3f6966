//! Commands, from argument list to result.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use casulo_agent::exec::{ExecError, Task};
use casulo_protocol::agent::WindowSize;
use casulo_protocol::stream::{Channel, Frame};
use common::{Heard, bytes, guest, text};

#[tokio::test]
async fn output_status_and_input_of_a_command() {
    let guest = guest();
    let result = guest.sh("printf out; printf err >&2; exit 3").await;
    assert_eq!((text(&result.stdout), text(&result.stderr)), ("out".into(), "err".into()));
    assert_eq!((result.exit_code, result.signal), (Some(3), None));
    assert!(!result.timed_out && !result.oom && result.start_error.is_none());

    let result = guest.sh("kill -9 $$").await;
    assert_eq!((result.exit_code, result.signal), (None, Some(9)));

    let mut options = guest.options();
    options.stdin = "x".repeat(300_000);
    let result = guest.run(&["wc", "-c"], options.clone()).await.unwrap();
    assert_eq!(text(&result.stdout).trim(), "300000");
    // One that does not read it.
    let result = guest.run(&["true"], options).await.unwrap();
    assert_eq!(result.exit_code, Some(0));
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let guest = guest();
    let result = guest.run(&["no-such-program"], guest.options()).await.unwrap();
    assert_eq!(result.exit_code, Some(127));
    assert!(result.start_error.unwrap().contains("not found"));

    for (path, code) in [("/etc/passwd", 126), ("/etc", 126), ("./nothing", 127)] {
        let result = guest.run(&[path], guest.options()).await.unwrap();
        assert_eq!(result.exit_code, Some(code), "{path}");
        assert!(result.start_error.is_some(), "{path}");
    }
    let mut options = guest.options();
    options.cwd = "/no/such/folder".into();
    let result = guest.run(&["true"], options).await.unwrap();
    assert_eq!(result.exit_code, Some(126));
    assert!(result.start_error.unwrap().contains("/no/such/folder"));

    let mut options = guest.options();
    options.user = "no-such-user".into();
    let result = guest.run(&["true"], options).await.unwrap();
    assert!(result.start_error.unwrap().contains("no-such-user"));

    let long = "x".repeat(200_000);
    let result = guest.run(&["echo", &long], guest.options()).await.unwrap();
    assert!(result.start_error.unwrap().contains("too long"));
}

#[tokio::test]
async fn a_script_without_an_interpreter_line_goes_to_sh() {
    use std::os::unix::fs::PermissionsExt as _;
    let guest = guest();
    let script = guest.folder.path().join("script");
    std::fs::write(&script, "echo \"$1-$0\"\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let result = guest.run(&["./script", "a"], guest.options()).await.unwrap();
    assert_eq!(text(&result.stdout), "a-./script\n");
    let mut options = guest.options();
    options.env.insert("PATH".into(), "/nothing::/bin".into());
    let result = guest.run(&["script", "b"], options).await.unwrap();
    assert_eq!(text(&result.stdout), "b-./script\n");
}

#[tokio::test]
async fn the_process_has_no_privileges_and_plain_signals() {
    // SAFETY: no test of this program uses the signal.
    unsafe { libc::signal(libc::SIGUSR2, libc::SIG_IGN) };
    let guest = guest();
    let result = guest
        .sh("grep -E '^(NoNewPrivs|Seccomp|SigBlk|SigIgn|CapEff|CapPrm|Groups):' /proc/self/status; \
             ls /proc/self/fd | tr '\\n' ' '; pwd; env | sort")
        .await;
    let out = text(&result.stdout).replace('\t', " ");
    for line in ["NoNewPrivs: 1", "Seccomp: 2", "CapEff: 0000000000000000"] {
        assert!(out.contains(line), "{line}: {out}");
    }
    assert!(out.contains("SigBlk: 0000000000000000"), "{out}");
    let ignored = out.lines().find_map(|l| l.strip_prefix("SigIgn: ")).unwrap();
    let standard = (1 << libc::SIGSYS) - 1;
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & standard, 0, "{out}");
    assert!(out.contains("0 1 2 3 "), "{out}");
    assert!(!out.contains("CARGO"), "the environment of the agent shows: {out}");
}

#[tokio::test]
async fn the_workload_has_no_vsock() {
    let guest = guest();
    let script = "import socket,errno\n\
        for f in (socket.AF_VSOCK, socket.AF_INET):\n \
        try: socket.socket(f, socket.SOCK_STREAM); print('open')\n \
        except OSError as e: print(errno.errorcode[e.errno])\n";
    let result = guest.run(&["python3", "-c", script], guest.options()).await.unwrap();
    assert_eq!(text(&result.stdout), "EAFNOSUPPORT\nopen\n");
}

#[tokio::test]
async fn the_time_limit_kills_everything_and_keeps_the_output() {
    let guest = guest();
    let mut options = guest.options();
    options.timeout_ms = 300;
    let began = Instant::now();
    let script = "echo before; sleep 50 & sleep 60; echo after";
    let result = guest.run(&["sh", "-c", script], options).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(20));
    assert!(result.timed_out);
    assert_eq!((result.exit_code, result.signal), (None, None));
    assert_eq!(text(&result.stdout), "before\n");
    assert!(result.duration_ms >= 300);
}

#[tokio::test]
async fn what_runs_on_in_the_background_does_not_hold_the_result() {
    let guest = guest();
    let began = Instant::now();
    let result = guest.sh("sleep 100 & echo hi").await;
    assert_eq!(text(&result.stdout), "hi\n");
    // Out of reach without a cgroup, but its pipes do not matter once the command is over.
    let result = guest.sh("setsid sleep 5 & echo ho").await;
    assert_eq!(text(&result.stdout), "ho\n");
    assert!(began.elapsed() < Duration::from_secs(4));
}

#[tokio::test]
async fn long_output_is_cut_in_the_middle() {
    let guest = guest();
    let mut options = guest.options();
    options.max_output = 1000;
    let result = guest.run(&["seq", "100000"], options).await.unwrap();
    assert_eq!(result.stdout.bytes, 588_895);
    let kept = text(&result.stdout);
    assert_eq!(kept.len(), 1000);
    assert!(kept.starts_with("1\n2\n") && kept.ends_with("99999\n100000\n"));
    assert!(bytes(&result.stderr).is_empty());
}

#[tokio::test]
async fn cancelling_kills_the_command() {
    let guest = guest();
    let task = Task {
        argv: vec!["sh".into(), "-c".into(), "echo $$ >pid; sleep 100".into()],
        options: guest.options(),
        extra: None,
    };
    let later = tokio::time::sleep(Duration::from_millis(300));
    let result = guest.engine.run(task, later).await;
    assert!(matches!(result, Err(ExecError::Cancelled)), "{result:?}");
    let pid = std::fs::read_to_string(guest.folder.path().join("pid")).unwrap();
    assert!(!std::path::Path::new("/proc").join(pid.trim()).exists());
}

#[tokio::test]
async fn a_stream_carries_bulk_both_ways_in_order() {
    let guest = guest();
    let session = guest.stream("cat; echo done >&2; exit 5", |_| ()).await;
    let data: Vec<u8> = (0..5_000_000_u32).map(|n| (n * 7 / 3) as u8).collect();
    let (host_read, mut host_write) = session.host.into_split();
    let sent = data.clone();
    let feed = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt as _;
        let mut bytes = Vec::new();
        Frame::Data(Channel::Stdin, sent).encode(&mut bytes);
        Frame::End(Channel::Stdin).encode(&mut bytes);
        host_write.write_all(&bytes).await.unwrap();
        host_write
    });
    let mut decoder = session.decoder;
    let (mut heard, mut from) = (Heard::default(), host_read);
    while heard.exit.is_none() {
        use tokio::io::AsyncReadExt as _;
        let mut buffer = vec![0; 65536];
        let n = from.read(&mut buffer).await.unwrap();
        assert!(n > 0);
        decoder.feed(&buffer[..n]);
        while let Some(frame) = decoder.next_frame().unwrap() {
            match frame {
                Frame::Data(Channel::Stdout, d) => heard.stdout.extend(d),
                Frame::Data(Channel::Stderr, d) => heard.stderr.extend(d),
                Frame::End(c) => heard.ends.push(c),
                Frame::Exit(status) => heard.exit = Some(status),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(heard.stdout == data);
    assert_eq!(heard.stderr, b"done\n");
    assert_eq!(heard.exit, Some(5 << 8));
    heard.ends.sort_by_key(|c| *c as u8);
    assert_eq!(heard.ends, [Channel::Stdout, Channel::Stderr]);
    let result = session.result.await.unwrap().unwrap();
    assert_eq!(result.exit_code, Some(5));
    assert_eq!(result.stdout.bytes, 0);
    drop(feed.await.unwrap());
}

#[tokio::test]
async fn a_command_that_cannot_start_ends_its_stream_too() {
    let guest = guest();
    let session = guest.stream("true", |o| o.cwd = "/no/such/folder".into()).await;
    let (heard, result) = session.finish().await;
    assert_eq!(heard.exit, Some(126 << 8));
    assert_eq!(heard.ends, [Channel::Stdout, Channel::Stderr]);
    assert!(result.start_error.is_some());
    let session = guest.stream("true", |o| o.user = "nobody-here".into()).await;
    let (heard, result) = session.finish().await;
    assert_eq!(heard.exit, Some(126 << 8));
    assert!(result.start_error.is_some());
}

#[tokio::test]
async fn signals_reach_the_command() {
    let guest = guest();
    let script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done";
    let mut session = guest.stream(script, |_| ()).await;
    let mut heard = Heard::default();
    session.hear(&mut heard, |h| h.stdout == b"ready\n").await;
    session.say(&Frame::Signal(9999)).await;
    session.say(&Frame::Signal(0)).await;
    session.say(&Frame::Signal(2)).await;
    session.hear(&mut heard, |_| false).await;
    assert_eq!(heard.stdout, b"ready\ncaught\n");
    assert_eq!(heard.exit, Some(9 << 8));
    assert_eq!(session.result.await.unwrap().unwrap().exit_code, Some(9));
}

#[tokio::test]
async fn a_reader_that_goes_away_is_noticed_on_both_sides() {
    let guest = guest();
    let mut session = guest.stream("exec yes", |_| ()).await;
    let mut heard = Heard::default();
    session.hear(&mut heard, |h| h.stdout.len() > 100_000).await;
    session.say(&Frame::Reset(Channel::Stdout)).await;
    session.hear(&mut heard, |_| false).await;
    assert_eq!(heard.exit, Some(13), "SIGPIPE");

    let mut session = guest.stream("exec 0<&-; echo closed; sleep 1", |_| ()).await;
    let mut heard = Heard::default();
    session.hear(&mut heard, |h| h.stdout == b"closed\n").await;
    session.say(&Frame::Data(Channel::Stdin, vec![1; 1000])).await;
    session.hear(&mut heard, |_| false).await;
    assert_eq!(heard.resets, [Channel::Stdin]);
    assert_eq!(heard.exit, Some(0));
}

#[tokio::test]
async fn closing_the_stream_cancels_the_command() {
    let guest = guest();
    let mut session = guest.stream("echo $$; sleep 100", |_| ()).await;
    let mut heard = Heard::default();
    session.hear(&mut heard, |h| h.stdout.ends_with(b"\n")).await;
    drop(session.host);
    let result = session.result.await.unwrap();
    assert!(matches!(result, Err(ExecError::Cancelled)), "{result:?}");
    let pid = String::from_utf8(heard.stdout).unwrap();
    assert!(!std::path::Path::new("/proc").join(pid.trim()).exists());

    // A host that breaks the format is no better than one that is gone.
    let mut session = guest.stream("sleep 100", |_| ()).await;
    session.say(&Frame::Exit(0)).await;
    assert!(matches!(session.result.await.unwrap(), Err(ExecError::Cancelled)));
}

#[tokio::test]
async fn a_timeout_on_a_stream_gives_the_output_so_far() {
    let guest = guest();
    let session = guest.stream("echo early; sleep 100", |o| o.timeout_ms = 300).await;
    let (heard, result) = session.finish().await;
    assert_eq!(heard.stdout, b"early\n");
    assert_eq!(heard.exit, Some(9));
    assert!(result.timed_out);
}

#[tokio::test]
async fn a_terminal_has_a_size_that_changes_and_controls_its_processes() {
    let guest = guest();
    let script = "stty -echo; tty >/dev/null && echo tty; stty size; \
                  trap 'stty size' WINCH; trap 'echo int; exit 4' INT; echo ready; \
                  while :; do sleep 0.05; done";
    let size = WindowSize { rows: 30, columns: 90 };
    let mut session = guest.stream(script, |o| o.terminal = Some(size)).await;
    let mut heard = Heard::default();
    let shows =
        |text: &'static str| move |h: &Heard| String::from_utf8_lossy(&h.stdout).contains(text);
    session.hear(&mut heard, shows("ready")).await;
    assert!(shows("tty\r\n30 90\r\n")(&heard), "{heard:?}");
    session.say(&Frame::WindowSize(40, 120)).await;
    session.hear(&mut heard, shows("40 120")).await;
    // The key, not the frame.
    session.say(&Frame::Data(Channel::Stdin, vec![3])).await;
    session.hear(&mut heard, |_| false).await;
    assert!(shows("int")(&heard));
    assert_eq!(heard.exit, Some(4 << 8));
    assert_eq!(heard.ends.len(), 2);
    assert!(heard.stderr.is_empty());
}

#[tokio::test]
async fn the_end_of_input_is_told_to_a_terminal() {
    let guest = guest();
    let size = WindowSize { rows: 24, columns: 80 };
    let mut session = guest.stream("cat; echo over", |o| o.terminal = Some(size)).await;
    session.say(&Frame::Data(Channel::Stdin, b"line\n".to_vec())).await;
    session.say(&Frame::End(Channel::Stdin)).await;
    let (heard, result) = session.finish().await;
    assert!(String::from_utf8_lossy(&heard.stdout).ends_with("over\r\n"), "{heard:?}");
    assert_eq!(result.exit_code, Some(0));
}

#[tokio::test]
async fn a_terminal_needs_a_stream() {
    let guest = guest();
    let mut options = guest.options();
    options.terminal = Some(WindowSize { rows: 24, columns: 80 });
    assert!(matches!(guest.run(&["true"], options).await, Err(ExecError::Invalid(_))));
}
