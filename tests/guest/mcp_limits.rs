//! Limits, bad input and hostile guests through `casulo mcp`: an error or a bounded wait each time, and
//! the next call works.

use std::fs;
use std::time::Duration;

use serde_json::json;

use crate::broken::BrokenHome;
use crate::client::Client;
use crate::support::{Leftovers, casulo, home, vmm_of};

#[test]
fn sandboxes_are_limited_named_and_end_by_themselves() {
    let before = Leftovers::now();
    let mut client = Client::start(&["--max-sandboxes", "2", "--idle-timeout", "60"]);
    let named = json!({"name": "work"});
    let first = client.good("create_sandbox", named.clone());
    let again = client.good("create_sandbox", named.clone());
    assert_eq!((&first["created"], &again["created"]), (&json!(true), &json!(false)));
    assert_eq!(first["sandbox_id"], again["sandbox_id"]);
    let second = client.sandbox();
    let error = client.bad("create_sandbox", json!({"name": "more"}), "capacity");
    let first = first["sandbox_id"].as_str().unwrap().to_owned();
    assert!(error.contains(&first) && error.contains(&second), "{error}");

    // What came out is told with sizes and digests.
    client.bash(&second, "printf hello > a.txt");
    let gone = client.good("destroy_sandbox", json!({"sandbox_id": second}));
    assert_eq!(gone["destroyed"], true, "{gone}");
    client.bad("destroy_sandbox", json!({"sandbox_id": second}), "sandbox_not_found");
    // Its place is free, and the idle one ends without anybody's doing.
    client.good("run_command", json!({"command": "true"}));
    std::thread::sleep(Duration::from_secs(75));
    client.bad("list_files", json!({"sandbox_id": first}), "sandbox_not_found");
    assert_eq!(client.good("create_sandbox", named)["created"], true);
    client.end();
    before.assert_unchanged();
}

#[test]
fn a_sandbox_ends_at_its_age_whatever_runs_in_it() {
    let before = Leftovers::now();
    let mut client = Client::start(&["--max-life", "20"]);
    let sandbox = client.sandbox();
    let run = json!({"sandbox_id": sandbox, "command": "sleep 1000", "timeout_seconds": 600});
    client.bad("run_command", run.clone(), "guest_lost");
    client.bad("run_command", run, "sandbox_not_found");
    client.good("run_command", json!({"command": "true"}));
    client.end();
    before.assert_unchanged();
}

/// Starts what does not end by itself in a sandbox, and gives the call once it runs.
fn endless(
    client: &mut Client,
    sandbox: &str,
    tool: &str,
    mut arguments: serde_json::Value,
) -> u64 {
    arguments["sandbox_id"] = sandbox.into();
    arguments["timeout_seconds"] = 600.into();
    let call = client.begin(tool, arguments);
    while client.bash(sandbox, "cat started; rm -f started")["stdout"] != "yes\n" {}
    call
}

#[test]
fn what_a_cancelled_call_held_is_free_for_the_next() {
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let shell = json!({"command": "echo yes > started; sleep 54321 & exec sleep 54321"});
    let code = "import time; open('started', 'w').write('yes\\n'); time.sleep(54321)";
    let python = json!({"language": "python", "code": code});
    for (tool, arguments) in [("run_command", shell), ("execute_code", python)] {
        let call = endless(&mut client, &sandbox, tool, arguments);
        client.say(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": call}}));
        while client.bash(&sandbox, "pgrep -fx 'sleep 54321'")["exit_code"] == 0 {}
        // The interpreter takes the next call.
        assert_eq!(client.python(&sandbox, "6 * 7")["result"], "42");
        assert!(client.others().is_empty(), "a cancelled call has no answer");
    }
    client.end();
}

#[test]
fn a_client_that_dies_in_a_call_leaves_nothing() {
    let before = Leftovers::now();
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let command = json!({"command": "echo yes > started; exec sleep 54321"});
    endless(&mut client, &sandbox, "run_command", command);
    client.begin("run_command", json!({"command": "sleep 54321", "timeout_seconds": 600}));
    // A client that has gone has closed its end.
    client.end();
    before.assert_unchanged();
}

#[test]
fn progress_carries_the_output_and_a_hundred_calls_are_answered() {
    let mut client = Client::start(&["--max-sandboxes", "3"]);
    let sandbox = client.sandbox();
    let arguments = json!({
        "command": "for n in 1 2 3 4; do echo line $n; sleep 1; done", "sandbox_id": sandbox,
    });
    let id = client.request(
        "tools/call",
        json!({"name": "run_command", "arguments": arguments, "_meta": {"progressToken": "t"}}),
    );
    assert!(!client.result(id).0);
    let told: Vec<_> = client
        .others()
        .into_iter()
        .filter(|message| message["method"] == "notifications/progress")
        .collect();
    assert!(told.len() >= 2, "{told:?}");
    let mut last = 0.0;
    let mut text = String::new();
    for one in &told {
        assert_eq!(one["params"]["progressToken"], "t");
        let progress = one["params"]["progress"].as_f64().unwrap();
        assert!(progress > last);
        last = progress;
        text.push_str(one["params"]["message"].as_str().unwrap());
    }
    assert!(text.starts_with("line 1\n"), "{text}");

    let ids: Vec<(u32, u64)> = (0..100)
        .map(|n| {
            let command = format!("echo {n}");
            (n, client.begin("run_command", json!({"command": command, "sandbox_id": sandbox})))
        })
        .collect();
    let mut results = 0;
    for (n, id) in ids.into_iter().rev() {
        let (error, result) = client.result(id);
        // A slow machine may keep some waiting for too long; they are told.
        if error {
            assert_eq!(result["class"], "capacity", "{result}");
            continue;
        }
        results += 1;
        assert_eq!(result["stdout"], format!("{n}\n"), "{result}");
    }
    assert!(results >= 32, "{results}");
    assert_eq!(client.bash(&sandbox, "echo next")["stdout"], "next\n");
    client.end();
}

#[test]
fn bad_lines_get_errors_and_the_next_call_works() {
    let mut client = Client::start(&[]);
    let mut huge = vec![b'a'; 20_000_000];
    huge.push(b'\n');
    for (bytes, code) in [
        (&b"no json at all\n"[..], -32700),
        (b"\xff\xfe\n", -32700),
        (b"[1,2]\n", -32600),
        (&huge, -32600),
    ] {
        client.write(bytes);
        let error = client.hear("error", |message| message.get("error").is_some());
        assert_eq!(error["error"]["code"], code);
    }
    let deep = format!("{}{}\n", "[".repeat(1_000_000), "]".repeat(1_000_000));
    client.write(deep.as_bytes());
    client.hear("error", |message| message["error"]["code"] == -32700);
    for arguments in [
        json!({"command": 1}),
        json!({"command": ["ls"]}),
        json!({"command": "true", "env": []}),
        json!({"command": "true", "timeout_seconds": -1}),
        json!({"command": "true", "timeout_seconds": 601}),
        json!({"command": "a\0b"}),
        json!({"command": "true", "max_output_bytes": 262_145}),
        json!({}),
    ] {
        client.bad("run_command", arguments, "invalid_argument");
    }
    let unknown = client.request("tools/call", json!({"name": "sudo", "arguments": {}}));
    assert_eq!(client.answer(unknown)["error"]["code"], -32602);
    let long = json!({"name": "\u{202e}".repeat(100_000), "arguments": {}});
    let unknown = client.request("tools/call", long);
    let error = client.answer(unknown)["error"]["message"].as_str().unwrap().to_owned();
    assert!(error.len() < 1500 && error.is_ascii(), "{} bytes", error.len());
    let unknown = client.request("no/such/method", json!({}));
    assert_eq!(client.answer(unknown)["error"]["code"], -32601);
    let result = client.good("run_command", json!({"command": "echo fine"}));
    assert_eq!(result["stdout"], "fine\n");
    // What is written to a terminal or hides in the text is seen.
    let command = r"printf 'a\033[31mb\033[0m\0c\342\200\256d\377\n'";
    let safe = client.good("run_command", json!({"command": command}));
    assert_eq!(safe["stdout"], "ab\\u{0}c\\u{202e}d\u{fffd}\n");
    let raw = client.good("run_command", json!({"command": command, "raw": true}));
    assert_eq!(raw["stdout"], "a\u{1b}[31mb\u{1b}[0m\0c\u{202e}d\u{fffd}\n");
    client.end();
}

#[test]
fn a_client_that_never_reads_ends_when_it_is_told_to() {
    let before = Leftovers::now();
    let mut command = casulo(["mcp", "--host", "native"]);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        use std::io::Write as _;
        let line = b"nonsense\n".repeat(1000);
        // Stops for ever once nobody reads, until the other end goes.
        while stdin.write_all(&line).is_ok() {}
    });
    std::thread::sleep(Duration::from_secs(3));
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kib < 100_000, "it holds {kib} KiB");
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    crate::support::wait(&mut child);
    writer.join().unwrap();
    before.assert_unchanged();
}

/// An agent in which `from`, which must be there, has become `to`, of the same length.
fn patched(changes: &[(&[u8], &[u8])]) -> BrokenHome {
    let broken = BrokenHome::new();
    let mut volume = fs::read(home().join("agent/boot.erofs")).unwrap();
    for (from, to) in changes {
        assert_eq!(from.len(), to.len());
        let places: Vec<usize> = volume
            .windows(from.len())
            .enumerate()
            .filter_map(|(at, bytes)| (bytes == *from).then_some(at))
            .collect();
        assert!(!places.is_empty(), "{} is not in the agent", String::from_utf8_lossy(from));
        for at in places {
            volume[at..][..to.len()].copy_from_slice(to);
        }
    }
    broken.replace("agent/boot.erofs", "agent/agent.json", &volume);
    broken
}

fn client_of(home: &BrokenHome) -> Client {
    let mut command = casulo(["mcp", "--host", "native"]);
    command.env("CASULO_HOME", home.folder.path());
    Client::of(command)
}

#[test]
fn an_agent_whose_answers_make_no_sense_loses_its_guest_and_nothing_else() {
    let before = Leftovers::now();
    // The fields of its results have other names.
    let home = patched(&[(b"structuredContent", b"structuredC0ntent")]);
    let mut client = client_of(&home);
    client.bad("run_command", json!({"command": "true"}), "guest_lost");
    let sandbox = client.sandbox();
    client.bad(
        "write_file",
        json!({"sandbox_id": sandbox, "path": "a", "content": "b"}),
        "guest_lost",
    );
    client.good("destroy_sandbox", json!({"sandbox_id": sandbox}));
    client.end();
    drop(home);
    before.assert_unchanged();
}

#[test]
fn a_guest_that_ignores_its_agent_is_discarded_as_a_whole() {
    let before = Leftovers::now();
    // It hears nothing that is said to it, and says nothing that can be understood.
    let home = patched(&[(b"jsonrpc", b"jsonrpd")]);
    let mut client = client_of(&home);
    let sandbox = client.sandbox();
    let run = json!({"sandbox_id": sandbox, "command": "true", "timeout_seconds": 1});
    client.bad("run_command", run.clone(), "guest_lost");
    client.bad("run_command", run, "sandbox_not_found");
    client.end();
    drop(home);
    before.assert_unchanged();
}

#[test]
fn a_guest_that_dies_in_a_call_is_lost_and_the_next_one_works() {
    let before = Leftovers::now();
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let id = client.begin("run_command", json!({"sandbox_id": sandbox, "command": "sleep 1000"}));
    std::thread::sleep(Duration::from_secs(2));
    for vmm in vmm_of(client.child.id()) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(vmm).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    let (error, result) = client.result(id);
    assert!(error && result["class"] == "guest_lost", "{result}");
    let run = json!({"sandbox_id": sandbox, "command": "true"});
    client.bad("run_command", run, "sandbox_not_found");
    let next = client.sandbox();
    assert_eq!(client.bash(&next, "echo next")["stdout"], "next\n");
    client.end();
    before.assert_unchanged();
}
