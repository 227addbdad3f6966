//! The public tools through `casulo mcp`, with real guests.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::client::Client;
use crate::support::Leftovers;

#[test]
fn interpreters_keep_their_state_and_say_when_it_is_lost() {
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let first = client.python(&sandbox, "import os\nx = 40\nprint('hi')\nx + 2");
    assert_eq!((&first["stdout"], &first["result"]), (&json!("hi\n"), &json!("42")), "{first}");
    assert_eq!((&first["exit_code"], &first["sandbox"]), (&json!(0), &json!("kept")));
    assert_eq!(client.python(&sandbox, "x += 1; x")["result"], "41");
    let python = |more: serde_json::Value| {
        let mut all = json!({"language": "python", "sandbox_id": sandbox});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let input = python(json!({
        "code": "[input(), os.environ['K'], os.getcwd()]", "stdin": "in\n", "env": {"K": "v"},
        "cwd": "/tmp",
    }));
    assert_eq!(client.good("execute_code", input)["result"], "['in', 'v', '/tmp']");
    let figure = client.python(&sandbox, "open('/workspace/output/figure.png', 'wb').write(b'x')");
    assert_eq!(figure["result"], "1");

    let bash = json!({"language": "bash", "sandbox_id": sandbox, "code": "y=1; cd /usr"});
    client.good("execute_code", bash);
    let bash = json!({"language": "bash", "sandbox_id": sandbox, "code": "echo $y $PWD"});
    assert_eq!(client.good("execute_code", bash)["stdout"], "1 /usr\n");

    // Too slow: the state is lost, and the result says so.
    let slow = client
        .good("execute_code", python(json!({"code": "while True: pass", "timeout_seconds": 1})));
    assert_eq!((&slow["timed_out"], &slow["state_lost"]), (&json!(true), &json!(true)), "{slow}");
    assert_eq!(client.python(&sandbox, "'x' in globals()")["result"], "False");

    // Cancelled: no answer comes; the next call says that the state is lost.
    client.python(&sandbox, "x = 1");
    let id = client.begin("execute_code", python(json!({"code": "while True: pass"})));
    client.bash(&sandbox, "sleep 1");
    client.say(&json!({
        "jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id},
    }));
    let after = client.python(&sandbox, "'x' in globals()");
    assert_eq!(
        (&after["result"], &after["state_lost"]),
        (&json!("False"), &json!(true)),
        "{after}"
    );
    let processes = client.bash(&sandbox, "ps ax 2>/dev/null || ls /proc; true");
    assert_eq!(processes["exit_code"], 0);
    client.end();
}

#[test]
fn processes_are_fed_polled_and_stopped() {
    let before = Leftovers::now();
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let start =
        |command: &str, pty: bool| json!({"sandbox_id": sandbox, "command": command, "pty": pty});
    let cat = client.good("start_process", start("echo ready; cat; echo end", false));
    assert_eq!(cat["running"], true, "{cat}");
    let poll = |id: &serde_json::Value, cursor: u64, more: serde_json::Value| {
        let mut all =
            json!({"sandbox_id": sandbox, "process_id": id, "cursor": cursor, "wait_seconds": 50});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let id = &cat["process_id"];
    let ready = client.good("poll_process", poll(id, 0, json!({})));
    assert_eq!(ready["output"], "ready\n", "{ready}");
    let echo = client.good("poll_process", poll(id, 6, json!({"stdin": "one\n"})));
    assert_eq!((&echo["output"], &echo["next_cursor"]), (&json!("one\n"), &json!(10)));
    let end = client.good("poll_process", poll(id, 10, json!({"close_stdin": true})));
    let end = if end["running"] == true {
        client.good("poll_process", poll(id, 14, json!({})))
    } else {
        end
    };
    assert_eq!((&end["running"], &end["exit_code"]), (&json!(false), &json!(0)), "{end}");
    let all = client.good("poll_process", poll(id, 0, json!({})));
    assert_eq!(all["output"], "ready\none\nend\n");

    // A terminal: Python's own prompt works.
    let python =
        client.good("start_process", start("test -t 0 && stty size && exec python3 -q", true));
    let id = &python["process_id"];
    let mut cursor = 0;
    let mut seen = String::new();
    let mut input = "print(6 * 7)\nexit(3)\n";
    let ended = loop {
        let more = client.good("poll_process", poll(id, cursor, json!({"stdin": input})));
        seen.push_str(more["output"].as_str().unwrap());
        cursor = more["next_cursor"].as_u64().unwrap();
        input = "";
        if more["running"] == false {
            break more;
        }
    };
    assert!(seen.contains("24 80") && seen.contains("42"), "{seen}");
    assert_eq!(ended["exit_code"], 3);

    // Signals go to it, and KILL ends all that it has started.
    let trap = "trap 'echo told; exit 9' TERM; echo on; while :; do sleep 0.1; done";
    let trap = client.good("start_process", start(trap, false));
    let id = &trap["process_id"];
    client.good("poll_process", poll(id, 0, json!({})));
    let stopped = client.good("stop_process", json!({"sandbox_id": sandbox, "process_id": id}));
    assert_eq!(
        (&stopped["running"], &stopped["exit_code"]),
        (&json!(false), &json!(9)),
        "{stopped}"
    );
    assert!(stopped["output"].as_str().unwrap().ends_with("told\n"));
    let stubborn = "trap '' TERM; setsid sleep 1000 & echo on; wait; sleep 1000";
    let stubborn = client.good("start_process", start(stubborn, false));
    let id = &stubborn["process_id"];
    client.good("poll_process", poll(id, 0, json!({})));
    let killed = client
        .good("stop_process", json!({"sandbox_id": sandbox, "process_id": id, "signal": "KILL"}));
    assert_eq!((&killed["running"], &killed["signal"]), (&json!(false), &json!(9)), "{killed}");
    let left = client.bash(&sandbox, "cat /proc/[0-9]*/comm | grep -c sleep");
    assert_eq!(left["stdout"], "0\n", "{left}");

    client.bad(
        "poll_process",
        json!({"sandbox_id": sandbox, "process_id": "p99"}),
        "invalid_argument",
    );
    client.good("destroy_sandbox", json!({"sandbox_id": sandbox}));
    client.bad(
        "poll_process",
        json!({"sandbox_id": sandbox, "process_id": id}),
        "sandbox_not_found",
    );
    client.end();
    before.assert_unchanged();
}

#[test]
fn a_long_output_is_cut_and_kept_in_a_file() {
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let long = client.bash(&sandbox, "seq 200000; seq 200000 >&2");
    assert_eq!((&long["truncated"], &long["stdout_bytes"]), (&json!(true), &json!(1_288_895)));
    assert!(long.to_string().len() <= 24 * 1024);
    let stdout = long["stdout"].as_str().unwrap();
    assert!(stdout.starts_with("1\n2\n") && stdout.ends_with("\n199999\n200000\n"), "{stdout}");
    // read_file pages through all of it.
    for file in ["stdout_file", "stderr_file"] {
        let (mut all, mut offset, mut pages) = (Vec::new(), 0, 0);
        loop {
            let page = client.good(
                "read_file",
                json!({
                    "sandbox_id": sandbox, "path": long[file], "offset": offset, "limit": 1_048_576,
                    "encoding": "base64", "max_output_bytes": 262_144,
                }),
            );
            all.extend(STANDARD.decode(page["content"].as_str().unwrap()).unwrap());
            offset = page["next_offset"].as_u64().unwrap();
            pages += 1;
            if page["end"] == true {
                break;
            }
        }
        let wanted: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
        assert!(all == wanted.as_bytes() && pages > 3, "{file}: {} bytes", all.len());
    }
    // The workload may read it, and not change it.
    let change =
        format!("echo x >>{}; rm -f {0}; wc -l <{0}", long["stdout_file"].as_str().unwrap());
    assert_eq!(client.bash(&sandbox, &change)["stdout"], "200000\n");
    let fresh = client.good("run_command", json!({"command": "seq 200000"}));
    assert_eq!(fresh["note"], "truncated; repeat with a sandbox_id or write to /workspace/output",);
    let small = json!({"command": "seq 2000", "max_output_bytes": 2048});
    assert!(client.good("run_command", small).to_string().len() <= 2048);
    client.end();
}

#[test]
fn files_go_in_and_out_in_every_form() {
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let of = |more: serde_json::Value| {
        let mut all = json!({"sandbox_id": sandbox});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    client.good(
        "write_file",
        of(json!({"path": "d/s", "content": "#!/bin/sh\necho ran\n", "mode": "755"})),
    );
    assert_eq!(client.bash(&sandbox, "d/s; stat -c %a d/s")["stdout"], "ran\n755\n");
    let bytes = STANDARD.encode([0u8, 1, 0xff, b'a']);
    client.good("write_file", of(json!({"path": "b", "content": bytes, "encoding": "base64"})));
    client.good("write_file", of(json!({"path": "b", "content": "é", "append": true})));
    let read =
        client.good("read_file", of(json!({"path": "b", "encoding": "base64", "offset": 2})));
    assert_eq!(STANDARD.decode(read["content"].as_str().unwrap()).unwrap(), b"\xffa\xc3\xa9");
    assert_eq!(
        (&read["size"], &read["next_offset"], &read["end"]),
        (&json!(6), &json!(6), &json!(true))
    );
    let text = client.good("read_file", of(json!({"path": "b"})));
    assert_eq!(text["content"], "\\u{0}\\u{1}\u{fffd}aé");

    // An image is an image.
    let png = [b"\x89PNG\r\n\x1a\n".as_slice(), &[7; 5000]].concat();
    client.good(
        "write_file",
        of(json!({"path": "p", "content": STANDARD.encode(&png), "encoding": "base64"})),
    );
    let image = client.good("read_file", of(json!({"path": "p", "limit": 1})));
    let content = &image["content"][0];
    assert_eq!((&content["type"], &content["mimeType"]), (&json!("image"), &json!("image/png")));
    assert_eq!(STANDARD.decode(content["data"].as_str().unwrap()).unwrap(), png);
    client.bash(&sandbox, "truncate -s 1048577 p");
    client.bad("read_file", of(json!({"path": "p"})), "invalid_argument");
    client.bash(&sandbox, "truncate -s 1048576 p");
    assert_eq!(client.good("read_file", of(json!({"path": "p"})))["content"][0]["type"], "image");

    // A path is a name, and nothing else.
    let odd = "$(id); `id` | ../é \u{202e}x";
    client.good("write_file", of(json!({"path": format!("x/{odd}"), "content": "1"})));
    let listed = client.good("list_files", of(json!({"path": "x", "recursive": true})));
    let shown = "$(id); `id` | ../é \\u{202e}x";
    assert_eq!(listed["entries"][1]["path"], shown, "{listed}");
    for path in ["/proc/self/mem", "/dev/zero", "/nowhere", "d"] {
        client.bad("read_file", of(json!({"path": path})), "invalid_argument");
    }
    client.end();
}
