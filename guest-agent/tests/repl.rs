//! Resident interpreters on this machine: what lives from call to call, and what ends them.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use casulo_agent::exec::ExecError;
use casulo_protocol::agent::{CommandResult, ExecuteCode, Keep, Session};
use casulo_protocol::stream::Frame;
use common::{Guest, Heard, guest};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;

/// One call and what the host sees of it.
struct Call {
    heard: Heard,
    result: CommandResult,
}

impl Call {
    fn stdout(&self) -> &str {
        std::str::from_utf8(&self.heard.stdout).unwrap()
    }

    fn stderr(&self) -> &str {
        std::str::from_utf8(&self.heard.stderr).unwrap()
    }
}

async fn start(
    guest: &Guest,
    language: &str,
    code: &str,
    change: impl FnOnce(&mut ExecuteCode),
) -> common::Session {
    let (mut host, theirs) = UnixStream::pair().unwrap();
    let streams = guest.streams.clone();
    tokio::spawn(async move { streams.accept(theirs).await });
    let mut open = Vec::new();
    Frame::Open(5).encode(&mut open);
    host.write_all(&open).await.unwrap();
    let mut request = ExecuteCode {
        language: language.into(),
        code: code.into(),
        options: guest.options(),
        session: Some(Session::default()),
    };
    request.options.stream = Some(5);
    request.options.timeout_ms = 30_000;
    change(&mut request);
    let engine = guest.engine.clone();
    let result =
        tokio::spawn(async move { engine.run_session(request, std::future::pending()).await });
    common::Session { host, decoder: Default::default(), result }
}

async fn with(
    guest: &Guest,
    language: &str,
    code: &str,
    change: impl FnOnce(&mut ExecuteCode),
) -> Call {
    let (heard, result) = start(guest, language, code, change).await.finish().await;
    Call { heard, result }
}

async fn call(guest: &Guest, language: &str, code: &str) -> Call {
    with(guest, language, code, |_| {}).await
}

#[tokio::test]
async fn python_keeps_variables_and_gives_the_last_expression() {
    let guest = guest();
    let first = call(&guest, "python", "import os\nx = 40\nprint('hi')\nx + 2").await;
    assert_eq!((first.stdout(), first.stderr()), ("hi\n", ""));
    assert_eq!(first.result.result.as_deref(), Some("42"));
    assert_eq!((first.result.exit_code, first.result.state_lost), (Some(0), false));
    let second = call(&guest, "python", "x += 1\nx").await;
    assert_eq!(second.result.result.as_deref(), Some("41"));
    // The last value that was given has a name, and a statement has no value.
    assert_eq!(call(&guest, "python", "y = _").await.result.result, None);
    assert_eq!(
        call(&guest, "python", "y, None").await.result.result.as_deref(),
        Some("(41, None)")
    );
    assert_eq!(call(&guest, "python", "None").await.result.result, None);
    // A function sees what is defined after it, as in a file.
    let main = call(&guest, "python", "def f(): return g()\ndef g(): return 7\nf()").await;
    assert_eq!(main.result.result.as_deref(), Some("7"));
}

#[tokio::test]
async fn an_exception_or_an_exit_is_a_status_and_the_state_stays() {
    let guest = guest();
    call(&guest, "python", "x = 1").await;
    let error = call(&guest, "python", "def f():\n    return 1 / 0\nf()").await;
    assert_eq!((error.result.exit_code, error.result.state_lost), (Some(1), false));
    let trace = error.stderr();
    assert!(trace.contains("return 1 / 0") && trace.contains("ZeroDivisionError"), "{trace}");
    assert!(!trace.contains("_casulo"), "the driver is no part of it: {trace}");
    let syntax = call(&guest, "python", "x = = 2").await;
    assert!(syntax.stderr().contains("SyntaxError"), "{}", syntax.stderr());
    assert_eq!(call(&guest, "python", "import sys; sys.exit(3)").await.result.exit_code, Some(3));
    let said = call(&guest, "python", "raise SystemExit('why')").await;
    assert_eq!((said.stderr(), said.result.exit_code), ("why\n", Some(1)));
    let odd =
        call(&guest, "python", "class A:\n  def __repr__(s): raise ValueError('no')\nA()").await;
    assert_eq!(odd.result.exit_code, Some(1));
    assert_eq!(
        call(&guest, "python", "'\\ud800'").await.result.result.as_deref(),
        Some("'\\ud800'")
    );
    assert_eq!(call(&guest, "python", "x").await.result.result.as_deref(), Some("1"));
}

#[tokio::test]
async fn each_call_has_its_own_input_folder_and_variables() {
    let guest = guest();
    std::fs::create_dir(guest.folder.path().join("sub dir")).unwrap();
    let sub = guest.folder.path().join("sub dir").to_str().unwrap().to_owned();
    for (language, read) in [
        (
            "python",
            "import os, sys\nprint(input(), os.environ.get('K'), os.path.basename(os.getcwd()))",
        ),
        ("bash", "read -r line; echo \"$line $K ${PWD##*/}\""),
    ] {
        let all = with(&guest, language, read, |request| {
            request.options.stdin = "one\ntwo\n".into();
            let env = [("K".to_owned(), "v'1".to_owned())].into();
            request.session = Some(Session { cwd: sub.clone(), env });
        })
        .await;
        assert_eq!((all.stdout(), all.stderr()), ("one v'1 sub dir\n", ""), "{language}");
        // What a call has entered and exported stays; its input does not.
        let next = with(&guest, language, read, |r| r.options.stdin = "three".into()).await;
        assert_eq!(next.stdout(), "three v'1 sub dir\n", "{language}");
        let none = call(&guest, language, read).await;
        assert!(!none.stdout().contains("two"), "{language}");
        // Programs that it starts read the same input.
        let cat = if language == "python" { "import os; os.system('cat')" } else { "cat" };
        let cat = with(&guest, language, cat, |r| r.options.stdin = "for cat".into()).await;
        assert_eq!(cat.stdout(), "for cat", "{language}");
        let nowhere = with(&guest, language, "echo = 1", |request| {
            request.session = Some(Session { cwd: "/nowhere".into(), ..Session::default() });
        })
        .await;
        assert_eq!(nowhere.result.exit_code, Some(1), "{language}");
        assert!(nowhere.stderr().contains("/nowhere"), "{}", nowhere.stderr());
    }
}

#[tokio::test]
async fn bash_keeps_variables_functions_and_its_folder() {
    let guest = guest();
    let first = call(&guest, "bash", "x='a b'; f() { echo \"f $1\"; }; cd /; false").await;
    assert_eq!((first.result.exit_code, first.result.state_lost), (Some(1), false));
    assert_eq!(call(&guest, "bash", "f \"$x\"; pwd").await.stdout(), "f a b\n/\n");
    let broken = call(&guest, "bash", "if then").await;
    assert!(broken.stderr().contains("syntax error"), "{}", broken.stderr());
    // A call may stop at its first failure; the next one does not have to.
    assert_eq!(call(&guest, "bash", "set -eu; true").await.result.exit_code, Some(0));
    assert_eq!(call(&guest, "bash", "false; echo on $unset").await.stdout(), "on\n");
    assert_eq!(call(&guest, "bash", "echo $x").await.stdout(), "a b\n");
}

#[tokio::test]
async fn javascript_keeps_variables_and_waits_for_promises() {
    if !std::path::Path::new("/usr/bin/node").exists() {
        return;
    }
    let guest = guest();
    let first = call(&guest, "javascript", "const x = 6; console.log('hi'); x * 7").await;
    assert_eq!((first.stdout(), first.result.result.as_deref()), ("hi\n", Some("42")));
    let later = call(&guest, "javascript", "new Promise(r => setTimeout(() => r([x]), 10))").await;
    assert_eq!(later.result.result.as_deref(), Some("[ 6 ]"));
    let error = call(&guest, "javascript", "null.f()").await;
    assert_eq!(error.result.exit_code, Some(1));
    assert!(error.stderr().contains("TypeError"), "{}", error.stderr());
    let path = call(&guest, "javascript", "require('path').basename('/a/b')").await;
    assert_eq!(path.result.result.as_deref(), Some("'b'"));
    let end = call(&guest, "javascript", "process.exit(4)").await;
    assert_eq!((end.result.exit_code, end.result.state_lost), (Some(4), true));
}

#[tokio::test]
async fn an_interpreter_that_ends_or_is_too_slow_loses_its_state_and_says_so() {
    let guest = guest();
    for (language, set, get, end, hang) in [
        (
            "python",
            "x = 1",
            "print('x' in globals())",
            "import os; os._exit(7)",
            "while True: pass",
        ),
        ("bash", "x=1", "echo ${x+set}", "exit 7", "while :; do :; done"),
    ] {
        call(&guest, language, set).await;
        let ended = call(&guest, language, end).await;
        assert_eq!(
            (ended.result.exit_code, ended.result.state_lost),
            (Some(7), true),
            "{language}"
        );
        let fresh = call(&guest, language, get).await;
        assert!(["False\n", "\n"].contains(&fresh.stdout()), "{language}");
        assert!(!fresh.result.state_lost, "told already");
        call(&guest, language, set).await;
        let slow = with(&guest, language, hang, |r| r.options.timeout_ms = 300).await;
        assert!(slow.result.timed_out && slow.result.state_lost, "{language}");
        assert_eq!(slow.result.exit_code, None);
        assert_eq!(call(&guest, language, get).await.stdout(), fresh.stdout(), "{language}");
        let killed = call(
            &guest,
            language,
            match language {
                "python" => "import os; os.kill(os.getpid(), 9)",
                _ => "kill -9 $$",
            },
        )
        .await;
        assert_eq!((killed.result.signal, killed.result.state_lost), (Some(9), true), "{language}");
    }
}

#[tokio::test]
async fn a_cancelled_call_kills_its_interpreter_and_the_next_call_is_told() {
    let guest = guest();
    call(&guest, "python", "x = 1").await;
    let mut session =
        start(&guest, "python", "print('on', flush=True)\nwhile True: pass", |_| {}).await;
    let mut heard = Heard::default();
    session.hear(&mut heard, |h| h.stdout == b"on\n").await;
    drop(session.host);
    assert!(matches!(session.result.await.unwrap(), Err(ExecError::Cancelled)));
    let next = call(&guest, "python", "'x' in globals()").await;
    assert_eq!(next.result.result.as_deref(), Some("False"));
    assert!(next.result.state_lost);
    assert!(!call(&guest, "python", "1").await.result.state_lost);
}

#[tokio::test]
async fn what_runs_in_the_background_neither_holds_a_call_nor_floods_it() {
    let guest = guest();
    let flood = call(&guest, "bash", "yes & sleep 0.1; echo $! >pid").await;
    assert_eq!(flood.result.exit_code, Some(0));
    let next = call(&guest, "bash", "kill $(cat pid); wait; echo done").await;
    assert!(next.stdout().ends_with("done\n"));
    let child = call(&guest, "python", "import os\nif os.fork() == 0: print('child')\n").await;
    assert_eq!(child.result.exit_code, Some(0));
    assert_eq!(call(&guest, "python", "1 + 1").await.result.result.as_deref(), Some("2"));
}

#[tokio::test]
async fn a_driver_that_lies_or_closes_its_socket_harms_itself_alone() {
    let guest = guest();
    let close = "exec {__casulo_fd}>&-; sleep 60";
    let closed = with(&guest, "bash", close, |r| r.options.timeout_ms = 500).await;
    assert!(closed.result.timed_out && closed.result.state_lost);
    let lie = "for n in 1 2 3; do echo '{\"call\":99,\"exit\":0}' >&$__casulo_fd; done; sleep 60";
    let lied = with(&guest, "bash", lie, |r| r.options.timeout_ms = 500).await;
    assert!(lied.result.timed_out && lied.result.state_lost);
    let long = "head -c 3000000 /dev/zero >&$__casulo_fd; sleep 60";
    let long = with(&guest, "bash", long, |r| r.options.timeout_ms = 2000).await;
    assert!(long.result.timed_out && long.result.state_lost);
    assert_eq!(call(&guest, "bash", "echo fine").await.stdout(), "fine\n");
}

#[tokio::test]
async fn a_language_without_interpreter_or_driver_is_named() {
    let guest = guest();
    let none = with(&guest, "python", "1", |request| {
        request.options.env.insert("PATH".into(), "/nowhere".into());
    })
    .await;
    assert_eq!(none.result.exit_code, Some(127));
    assert!(none.result.start_error.unwrap().contains("python3"));
    let session = start(&guest, "perl", "1", |_| {}).await;
    assert!(matches!(session.result.await.unwrap(), Err(ExecError::Invalid(_))));
}

#[tokio::test]
async fn the_whole_output_is_in_a_file() {
    let guest = guest();
    for language in ["python", "bash"] {
        let code = match language {
            "python" => "print('x' * 100_000, end='')",
            _ => "head -c 100000 /dev/zero | tr '\\0' x",
        };
        let keep = Keep { name: format!("{language}-1"), after: 1000 };
        let call = with(&guest, language, code, |r| r.options.keep = Some(keep)).await;
        assert_eq!((call.result.stdout_kept, call.result.stderr_kept), (100_000, 0));
        let file = guest.folder.path().join(format!("calls/{language}-1.stdout"));
        assert_eq!(std::fs::read(file).unwrap(), call.heard.stdout);
    }
}
