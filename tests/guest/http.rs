//! `casulo serve` with several callers, and clients of it that come and go.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::client::Client;
use crate::support::{Leftovers, casulo, folder, wait};

/// A server with the callers `ana` and `bob`.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) url: String,
    pub(crate) tokens: PathBuf,
    _folder: tempfile::TempDir,
}

pub(crate) fn token(name: &str) -> String {
    format!("{name:x<40}")
}

impl Server {
    pub(crate) fn start(listen: &str) -> Self {
        Self::with(listen, &[])
    }

    pub(crate) fn with(listen: &str, more: &[&str]) -> Self {
        Self::of(casulo(["serve"]), listen, more)
    }

    /// The server that `command` starts.
    pub(crate) fn of(mut command: Command, listen: &str, more: &[&str]) -> Self {
        let folder = folder();
        let tokens = folder.path().join("tokens");
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&tokens).unwrap();
        for name in ["ana", "bob"] {
            writeln!(file, "{name} {}", token(name)).unwrap();
        }
        command.args(["--host", "native", "--listen", listen]);
        command.args(more).arg("--token-file").arg(&tokens);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let url = lines.find_map(|line| {
            let line = line.unwrap();
            line.split_once("serving MCP at ").map(|(_, url)| url.to_owned())
        });
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|l| eprintln!("{l}")));
        Self { child, url: url.unwrap(), tokens, _folder: folder }
    }

    pub(crate) fn client(&self, caller: &str) -> Client {
        let mut command = casulo(["mcp", "--connect", &self.url, "--caller", caller]);
        command.arg("--token-file").arg(&self.tokens);
        Client::of(command)
    }

    /// SIGTERM, and an orderly end.
    pub(crate) fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(wait(&mut self.child).success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn http_callers_do_not_see_each_others_sandboxes_which_outlive_their_clients() {
    let server = Server::start("127.0.0.1:0");
    // As many descriptors as it may have.
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.child.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().collect();
    assert_eq!(files[3], files[4]);
    let (mut ana, mut bob) = (server.client("ana"), server.client("bob"));
    let sandbox = ana.sandbox();
    ana.bash(&sandbox, "echo secret > note");
    let unknown = format!("sb_{}", "0".repeat(32));
    let read = |id: &str| json!({"sandbox_id": id, "path": "note"});
    let mut errors = Vec::new();
    for id in [&unknown, &sandbox] {
        errors.push(bob.bad("read_file", read(id), "sandbox_not_found"));
        let destroy = json!({"sandbox_id": id});
        errors.push(bob.bad("destroy_sandbox", destroy, "sandbox_not_found"));
    }
    // The client restarts.
    ana.end();
    let mut ana = server.client("ana");
    assert_eq!(ana.good("read_file", read(&sandbox))["content"], "secret\n");
    ana.good("destroy_sandbox", json!({"sandbox_id": sandbox}));
    errors.push(ana.bad("read_file", read(&sandbox), "sandbox_not_found"));
    errors.dedup();
    assert_eq!(errors.len(), 1, "one and the same error: {errors:?}");
    ana.end();
    bob.end();
    server.end();
}

#[test]
fn http_a_cancelled_call_is_killed_in_the_guest_and_the_server_ends_with_sandboxes_open() {
    let folder = folder();
    let socket = format!("unix:{}", folder.path().join("socket").display());
    let server = Server::start(&socket);
    let mut ana = server.client("ana");
    let sandbox = ana.sandbox();
    let sleep = json!({"command": "echo > started; exec sleep 12345", "sandbox_id": sandbox,
        "timeout_seconds": 600});
    let call = ana.begin("run_command", sleep);
    let count = "cat started; pgrep -fxc 'sleep 12345'";
    let sleeping = |ana: &mut Client| ana.bash(&sandbox, count)["stdout"] == "\n1\n";
    while !sleeping(&mut ana) {}
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
        "params": {"requestId": call}});
    ana.say(&cancel);
    while sleeping(&mut ana) {}
    assert!(ana.others().is_empty(), "a cancelled call has no answer");
    server.end();
    assert!(!folder.path().join("socket").exists());
}

#[test]
fn http_a_caller_who_takes_all_it_can_get_starves_nobody() {
    let limits = ["--memory", "256", "--max-sandboxes", "4", "--max-calls", "2"];
    let rate = ["--max-calls-per-minute", "20"];
    let server = Server::with("127.0.0.1:0", &[&limits[..], &rate].concat());
    let (mut ana, mut bob) = (server.client("ana"), server.client("bob"));

    // Half of all sandboxes are one caller's at most.
    let sandboxes = [ana.sandbox(), ana.sandbox()];
    let error = ana.bad("create_sandbox", json!({}), "capacity");
    assert!(sandboxes.iter().all(|id| error.contains(id)), "{error}");
    let bobs = bob.sandbox();
    bob.sandbox();
    let error = bob.bad("create_sandbox", json!({}), "capacity");
    assert!(error.contains(&bobs), "{error}");
    assert!(!sandboxes.iter().any(|id| error.contains(id)), "others' ids are told: {error}");

    // So are half of all calls. The last of these starts when the others have ended.
    let wait = json!({"sandbox_id": sandboxes[0], "command": "sleep 3"});
    let waiting: Vec<u64> = (0..5).map(|_| ana.begin("run_command", wait.clone())).collect();
    assert_eq!(bob.bash(&bobs, "echo served")["stdout"], "served\n");
    let answered = ana.others();
    assert!(answered.len() < waiting.len(), "bob had to wait until ana had all: {answered:?}");
    let seen = |id: &u64| answered.iter().any(|message| message["id"] == *id);
    for id in waiting.iter().filter(|id| !seen(id)) {
        assert!(!ana.result(*id).0);
    }

    // Whoever calls too often is told when to come again; the others are not.
    let list = json!({"sandbox_id": sandboxes[1]});
    let refused = (0..60).map(|_| ana.call("list_files", list.clone())).find(|(error, _)| *error);
    let (_, error) = refused.expect("sixty calls and more in a minute");
    assert_eq!(error["class"], "capacity", "{error}");
    assert_eq!(bob.bash(&bobs, "echo again")["stdout"], "again\n");
    // What frees something is never refused.
    ana.good("destroy_sandbox", json!({"sandbox_id": sandboxes[1]}));
    ana.end();
    bob.end();
    server.end();
}

#[test]
fn mcp_keep_calls_without_a_sandbox_share_one() {
    let mut client = Client::start(&["--keep"]);
    let python = |code: &str| json!({"language": "python", "code": code});
    let first = client.good("execute_code", python("x = 6"));
    assert_eq!(first["sandbox"], "kept");
    assert_eq!(client.good("execute_code", python("x * 7"))["result"], "42");
    client.good("run_command", json!({"command": "echo hi > file"}));
    let file = json!({"sandbox_id": first["sandbox_id"], "path": "file"});
    assert_eq!(client.good("read_file", file)["content"], "hi\n");
    client.end();
}

/// The servers that the documents tell clients to use, by document and number.
fn snippets() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for name in ["docs/mcp.md", "docs/wrap.md", "README.md"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
        let text = std::fs::read_to_string(path).unwrap();
        for (n, block) in text.split("```json\n").skip(1).enumerate() {
            let block = block.split("```").next().unwrap();
            let place = format!("{name}, snippet {}", n + 1);
            let json: Value =
                serde_json::from_str(block).unwrap_or_else(|e| panic!("{place}: {e}"));
            let servers = json.get("mcpServers").or(json.get("servers"));
            let server = servers.and_then(|servers| servers.as_object()?.values().next());
            found.push((place, server.unwrap_or(&json).clone()));
        }
    }
    found
}

#[test]
fn the_snippets_for_clients_start() {
    let server = Server::start("127.0.0.1:7420");
    let project = folder();
    let (mut commands, mut urls) = (0, 0);
    for (place, snippet) in snippets() {
        eprintln!("{place}");
        let command = if snippet.get("command").is_some() {
            commands += 1;
            assert_eq!(snippet["command"], "/path/to/casulo", "{place}");
            let args = snippet["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
            let project = project.path().to_str().unwrap();
            casulo(args.map(|arg| if arg == "/path/to/project" { project } else { arg }))
        } else {
            urls += 1;
            let header = snippet["headers"]["Authorization"].as_str().unwrap();
            let token_name = header.strip_prefix("Bearer ").unwrap();
            // However the client writes a variable of the environment, or what it asks for.
            assert!(token_name.contains("CASULO_TOKEN") || token_name.contains("casulo-token"));
            let mut command = casulo(["mcp", "--connect", snippet["url"].as_str().unwrap()]);
            command.env("CASULO_TOKEN", token("ana"));
            command
        };
        let mut client = Client::of(command);
        let list = client.request("tools/list", json!({}));
        let answer = client.answer(list);
        assert!(answer["result"]["tools"].is_array(), "{place}: {answer}");
        client.end();
    }
    assert!(commands >= 6 && urls >= 3, "{commands} {urls}");
    server.end();
}

#[test]
fn http_a_server_ends_with_its_terminal_unless_it_was_told_to_ignore_that() {
    use rustix::process::{Pid, Signal, kill_process};
    let before = Leftovers::now();
    for (how, goes_on) in [("--default-signal=HUP", false), ("--ignore-signal=HUP", true)] {
        let plain = casulo(["serve"]);
        let mut command = Command::new("env");
        command.arg(how).arg(plain.get_program()).args(plain.get_args()).stdin(Stdio::null());
        for (name, value) in plain.get_envs() {
            command.env(name, value.unwrap());
        }
        let mut server = Server::of(command, "127.0.0.1:0", &[]);
        let mut ana = server.client("ana");
        ana.sandbox();
        kill_process(Pid::from_child(&server.child), Signal::HUP).unwrap();
        if goes_on {
            ana.sandbox();
            ana.end();
            server.end();
        } else {
            assert!(wait(&mut server.child).success());
        }
    }
    before.assert_unchanged();
}
