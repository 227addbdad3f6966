//! Other people's MCP servers in a sandbox of a running `casulo serve`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;

use crate::client::Client;
use crate::http::{Server, token};
use crate::support::{casulo, wait, wait_for};
use crate::wrap::{ask, call, fresh_home, names, refused};

/// `casulo wrap --sandbox` for a caller of `server`.
fn wrap(server: &Server, caller: &str, home: &Path, sandbox: &str, args: &[&str]) -> Command {
    let mut command = casulo(["wrap", "--sandbox", sandbox, "--connect", &server.url]);
    command.arg("--token-file").arg(&server.tokens).args(["--caller", caller]);
    command.args(args).env("CASULO_HOME", home);
    command
}

/// A sandbox with the hostile server in its output folder.
fn sandbox(client: &mut Client) -> String {
    let sandbox = client.sandbox();
    let source = include_str!("hostile_server.py");
    let file = json!({"sandbox_id": sandbox, "path": "server.py", "content": source});
    client.good("write_file", file);
    sandbox
}

const PYTHON: [&str; 3] = ["--", "python3", "server.py"];

/// How many of the hostile server run in the sandbox.
fn running(client: &mut Client, sandbox: &str) -> String {
    // The pattern is not to find the shell that has it in its command line.
    let counted = client.bash(sandbox, "pgrep -fc '^python3 server[.]py'");
    counted["stdout"].as_str().unwrap().trim().to_owned()
}

#[track_caller]
fn until_none(client: &mut Client, sandbox: &str) {
    wait_for("the end of the server", || (running(client, sandbox) == "0").then_some(()));
}

/// What a command says that does not come to serve.
fn failure(mut command: Command) -> String {
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = wait(&mut child);
    let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(125), "{said}");
    said
}

#[test]
fn a_wrapped_server_in_a_kept_sandbox_is_one_of_its_processes() {
    let (server, home) = (Server::start("127.0.0.1:0"), fresh_home());
    let mut ana = server.client("ana");
    let sandbox = sandbox(&mut ana);
    let start = |more: &[&str]| {
        let args = [more, &PYTHON].concat();
        Client::of(wrap(&server, "ana", home.path(), &sandbox, &args))
    };
    let mut client = start(&["--max-result", "8M", "--env", "A=b"]);
    let info = ask(&mut client, "server/discover", json!({})).unwrap();
    assert_eq!(info["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "hostile");
    let list = ask(&mut client, "tools/list", json!({})).unwrap();
    assert!(names(&list).contains(&"echo") && !names(&list).contains(&"loop"));
    assert_eq!(call(&mut client, "echo", json!({"text": "é"}))["content"][0]["text"], "é");
    assert_eq!(running(&mut ana, &sandbox), "1");
    let environment =
        ana.bash(&sandbox, "tr '\\0' '\\n' < /proc/$(pgrep -f '^python3 server[.]py')/environ");
    assert!(environment["stdout"].as_str().unwrap().lines().any(|line| line == "A=b"));

    // Nothing is cut on the way, and what is too much is refused as from a microVM of its own.
    let big = call(&mut client, "big", json!({}));
    assert_eq!(big["content"][0]["text"].as_str().unwrap().len(), 1_000_000);
    let (_, message) = refused(&mut client, "huge", json!({}));
    assert!(message.contains("more than 8388608 bytes"), "{message}");
    let flood = call(&mut client, "flood", json!({}));
    assert_eq!(flood["content"][0]["text"], "done");
    let asked = call(&mut client, "sample", json!({}));
    assert!(asked["content"][0]["text"].as_str().unwrap().contains("-32601"), "{asked}");

    // Another caller's sandbox is as good as none.
    let bobs = failure(wrap(&server, "bob", home.path(), &sandbox, &PYTHON));
    assert!(bobs.contains("no such sandbox"), "{bobs}");

    // The server ends when its client closes standard input, and the sandbox does not.
    client.end();
    until_none(&mut ana, &sandbox);
    // Also when there is nobody to say so.
    let mut client = start(&[]);
    call(&mut client, "echo", json!({"text": "x"}));
    client.child.kill().unwrap();
    drop(client);
    until_none(&mut ana, &sandbox);

    // It counts among the processes of the sandbox.
    let mut client = start(&[]);
    call(&mut client, "echo", json!({"text": "x"}));
    let sleep = json!({"sandbox_id": sandbox, "command": "sleep 1000"});
    for _ in 0..15 {
        ana.good("start_process", sleep.clone());
    }
    let full = ana.bad("start_process", sleep.clone(), "capacity");
    assert!(full.contains("16 processes"), "{full}");
    let second = failure(wrap(&server, "ana", home.path(), &sandbox, &PYTHON));
    assert!(second.contains("429") && second.contains("16 processes"), "{second}");
    client.end();
    until_none(&mut ana, &sandbox);
    ana.good("start_process", sleep);
    ana.good("stop_process", json!({"sandbox_id": sandbox, "process_id": "p1", "signal": "KILL"}));

    // A program that is not there.
    let args = ["--", "/no/such/program"];
    let none = failure(wrap(&server, "ana", home.path(), &sandbox, &args));
    let why = none.lines().find(|line| line.contains("cannot start the server")).unwrap();
    assert!(why.contains("/no/such/program") && why.contains("exit status 127"), "{none}");

    // A client that goes away before there is an answer.
    let args = ["--", "sleep", "1234"];
    let mut command = wrap(&server, "ana", home.path(), &sandbox, &args);
    assert!(wait(&mut command.stdin(Stdio::null()).spawn().unwrap()).success());
    wait_for("the end of the start", || {
        let counted = ana.bash(&sandbox, "pgrep -fc '^sleep 1234'");
        (counted["stdout"] == "0\n").then_some(())
    });

    // The end of the sandbox is the server's.
    let mut client = start(&[]);
    call(&mut client, "echo", json!({"text": "x"}));
    ana.good("destroy_sandbox", json!({"sandbox_id": sandbox}));
    let (class, message) = refused(&mut client, "echo", json!({"text": "x"}));
    assert!(class == "guest_lost" && message.contains("has ended"), "{message}");
    client.end();
    let gone = failure(wrap(&server, "ana", home.path(), &sandbox, &PYTHON));
    assert!(gone.contains("no such sandbox"), "{gone}");
    ana.end();
    server.end();
}

#[test]
fn a_sandbox_with_a_wrapped_server_is_not_idle_and_the_end_of_casulo_serve_waits_for_none() {
    let (socket, home) = (crate::support::folder(), fresh_home());
    let listen = format!("unix:{}", socket.path().join("s").display());
    let server = Server::with(&listen, &["--idle-timeout", "5", "--drain", "1000"]);
    let mut ana = server.client("ana");
    let sandbox = sandbox(&mut ana);
    let mut client = Client::of(wrap(&server, "ana", home.path(), &sandbox, &PYTHON));
    call(&mut client, "echo", json!({"text": "x"}));
    // Idle sandboxes are looked for every five seconds.
    std::thread::sleep(Duration::from_secs(12));
    call(&mut client, "echo", json!({"text": "y"}));
    assert_eq!(running(&mut ana, &sandbox), "1");
    let mut second = Client::of(wrap(&server, "ana", home.path(), &sandbox, &PYTHON));
    call(&mut second, "echo", json!({"text": "x"}));
    second.end();
    ana.end();
    server.end();
    let (class, _) = refused(&mut client, "echo", json!({"text": "z"}));
    assert_eq!(class, "guest_lost");
    client.end();
}

/// A connection that is the streams of `command`; `more` is sent at once behind the request.
fn attached(server: &Server, sandbox: &str, command: &str, more: &[u8]) -> TcpStream {
    let address = server.url.strip_prefix("http://").unwrap().strip_suffix("/mcp").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let body = json!({"command": ["bash", "-c", command]}).to_string();
    let head = format!(
        "POST /v1/sandboxes/{sandbox}/exec HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\
         Connection: upgrade\r\nUpgrade: casulo-stream\r\nContent-Length: {}\r\n\r\n{body}",
        token("ana"),
        body.len()
    );
    stream.write_all(&[head.as_bytes(), more].concat()).unwrap();
    stream
}

/// Frames as `casulo_protocol::stream` has them: kind, channel, payload.
fn frame(kind: u8, channel: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
    [&[kind, channel, 0, 0], &length[..], payload].concat()
}

#[test]
fn a_command_over_http_that_is_given_up_ends_alone_whenever_that_is() {
    // With the patience of a machine with KVM of its own, which is shorter.
    let mut plain = casulo(["serve"]);
    plain.env_remove("CASULO_EMULATED");
    let server = Server::of(plain, "127.0.0.1:0", &["--boot-timeout", "120"]);
    let mut ana = server.client("ana");
    let sandbox = ana.sandbox();
    let run = json!({"sandbox_id": sandbox, "command": "sleep 4321"});
    let process = ana.good("start_process", run)["process_id"].clone();
    let open = frame(1, 0, &[0; 8]);

    // Before it has begun: at once, with nonsense, and with all kinds of haste.
    let mut answer = Vec::new();
    let _ = attached(&server, &sandbox, "sleep 1111", &[0xee; 64]).read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 101") && answer.contains("is broken"), "{answer}");
    for ms in [0, 1, 3, 10, 30, 100, 300] {
        let stream = attached(&server, &sandbox, "sleep 1111", &open);
        std::thread::sleep(Duration::from_millis(ms));
        drop(stream);
    }
    // With more input than it takes, in its pipe and on the way.
    let input = [open.clone(), frame(2, 0, &[b'x'; 200_000]).repeat(40)].concat();
    let mut stream = attached(&server, &sandbox, "sleep 1111", &[]);
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    let _ = stream.write_all(&input);
    drop(stream);
    // The same with the process tools.
    let run = json!({"sandbox_id": sandbox, "command": "sleep 1111"});
    let stuffed = ana.good("start_process", run)["process_id"].clone();
    let feed = json!({"sandbox_id": sandbox, "process_id": stuffed, "stdin": "x".repeat(65_000)});
    while !ana.call("poll_process", feed.clone()).0 {}
    let stop = json!({"sandbox_id": sandbox, "process_id": stuffed, "signal": "KILL"});
    ana.good("stop_process", stop);

    wait_for("the end of the commands", || {
        let counted = ana.bash(&sandbox, "pgrep -fc '^sleep 1111'");
        (counted["stdout"] == "0\n").then_some(())
    });
    let poll = json!({"sandbox_id": sandbox, "process_id": process, "wait_seconds": 0});
    assert_eq!(ana.good("poll_process", poll)["running"], true);
    // Every place among the processes has come back.
    for _ in 0..15 {
        ana.good("start_process", json!({"sandbox_id": sandbox, "command": "sleep 4321"}));
    }
    ana.end();
    server.end();
}
