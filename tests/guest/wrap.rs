//! Other people's MCP servers behind `casulo wrap`: the reference server for files, and one that does
//! whatever it can to the client.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::client::Client;
use crate::support::{Leftovers, casulo, folder, home, open_folder, wait, wait_for};

/// A `CASULO_HOME` with nothing accepted in it yet.
pub(crate) fn fresh_home() -> tempfile::TempDir {
    let fresh = open_folder();
    for part in ["agent", "images", "kernel", "state"] {
        symlink(home().join(part), fresh.path().join(part)).unwrap();
    }
    fresh
}

/// `casulo wrap` with `args`.
fn wrap(home: &Path, args: &[&str]) -> Command {
    let mut command = casulo(["wrap", "--host", "native"]);
    command.args(args).env("CASULO_HOME", home);
    command
}

/// The hostile server in a folder of its own.
fn hostile() -> (tempfile::TempDir, String) {
    server(include_str!("hostile_server.py"))
}

/// A server in a folder of its own.
fn server(source: &str) -> (tempfile::TempDir, String) {
    let folder = open_folder();
    let file = folder.path().join("server.py");
    fs::write(&file, source).unwrap();
    let file = file.to_str().unwrap().to_owned();
    (folder, file)
}

const PYTHON: [&str; 3] = ["--", "python3", "/workspace/input/server.py"];

/// The result of a request, or its error.
#[track_caller]
pub(crate) fn ask(client: &mut Client, method: &str, params: Value) -> Result<Value, Value> {
    let id = client.request(method, params);
    let answer = client.answer(id);
    match answer.get("error") {
        Some(error) => Err(error.clone()),
        None => {
            assert_eq!(answer["result"]["resultType"], "complete", "{method}: {answer}");
            Ok(answer["result"].clone())
        }
    }
}

#[track_caller]
pub(crate) fn call(client: &mut Client, tool: &str, arguments: Value) -> Value {
    ask(client, "tools/call", json!({"name": tool, "arguments": arguments})).unwrap()
}

/// An error of Casulo's own: its class and message.
#[track_caller]
pub(crate) fn refused(client: &mut Client, tool: &str, arguments: Value) -> (String, String) {
    let result = call(client, tool, arguments);
    assert_eq!(result["isError"], true, "{result}");
    let error: Value =
        serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
    (error["class"].as_str().unwrap().to_owned(), error["message"].as_str().unwrap().to_owned())
}

pub(crate) fn names(list: &Value) -> Vec<&str> {
    list["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect()
}

#[test]
fn the_reference_server_for_files_works_on_the_share_and_nowhere_else() {
    let before = Leftovers::now();
    let (home, folder) = (fresh_home(), folder());
    let canary = "canary-2f9c41d07be6";
    let secret = folder.path().join("secret");
    fs::write(&secret, canary).unwrap();
    let output = folder.path().join("out");
    fs::create_dir(&output).unwrap();
    fs::write(output.join("given.txt"), "from the host").unwrap();
    symlink(&secret, output.join("absolute")).unwrap();
    symlink("../secret", output.join("relative")).unwrap();
    symlink("..", output.join("above")).unwrap();
    let out = output.to_str().unwrap();
    let args =
        ["--image", "node", "--output", out, "--timeout", "300", "--", "mcp-server-filesystem"];
    let mut client = Client::of(wrap(home.path(), &[&args[..], &["/workspace/output"]].concat()));
    let mut said = String::new();

    // The newest revision, of which the server knows nothing.
    let info = ask(&mut client, "server/discover", json!({})).unwrap();
    let name = &info["_meta"]["io.modelcontextprotocol/serverInfo"]["name"];
    assert_eq!(name, "secure-filesystem-server", "{info}");
    let list = ask(&mut client, "tools/list", json!({})).unwrap();
    let names = names(&list);
    for tool in ["read_text_file", "write_file", "edit_file", "list_directory", "move_file"] {
        assert!(names.contains(&tool), "{names:?}");
    }
    let place = |name: &str| format!("/workspace/output/{name}");
    let mut good = |client: &mut Client, tool: &str, arguments: Value| {
        let result = call(client, tool, arguments);
        assert_ne!(result["isError"], true, "{tool}: {result}");
        said.push_str(&result.to_string());
        result["content"][0]["text"].as_str().unwrap().to_owned()
    };
    let read = good(&mut client, "read_text_file", json!({"path": place("given.txt")}));
    assert_eq!(read, "from the host");
    good(&mut client, "create_directory", json!({"path": place("d")}));
    good(&mut client, "write_file", json!({"path": place("d/new.txt"), "content": "one\ntwo\n"}));
    let edits = json!([{"oldText": "two", "newText": "three"}]);
    good(&mut client, "edit_file", json!({"path": place("d/new.txt"), "edits": edits}));
    assert_eq!(fs::read_to_string(output.join("d/new.txt")).unwrap(), "one\nthree\n");
    let moved = json!({"source": place("d/new.txt"), "destination": place("moved.txt")});
    good(&mut client, "move_file", moved);
    assert!(output.join("moved.txt").exists());
    let listed = good(&mut client, "list_directory", json!({"path": "/workspace/output"}));
    assert!(listed.contains("[DIR] d") && listed.contains("[FILE] moved.txt"), "{listed}");
    let found = good(
        &mut client,
        "search_files",
        json!({"path": "/workspace/output", "pattern": "**/*.txt"}),
    );
    assert!(found.contains("/workspace/output/moved.txt"), "{found}");

    // Ways out, through the server's own checks or past them into a guest that has nothing there.
    let secret = secret.to_str().unwrap().to_owned();
    for path in [
        "/workspace/output/../../etc/passwd",
        "/workspace/output/../../../../../../../../dev/shm",
        "/etc/passwd",
        "/proc/self/environ",
        "/workspace/outputs",
        secret.as_str(),
        &place("absolute"),
        &place("relative"),
        &place("above/secret"),
    ] {
        for (tool, arguments) in [
            ("read_text_file", json!({"path": path})),
            ("write_file", json!({"path": path, "content": "x"})),
        ] {
            let result = call(&mut client, tool, arguments);
            assert_eq!(result["isError"], true, "{tool} {path}: {result}");
            said.push_str(&result.to_string());
        }
    }
    assert!(!said.contains(canary), "a file of the host was read");
    assert_eq!(fs::read_to_string(&secret).unwrap(), canary);

    // What does not fit the server's own schema does not reach it.
    for arguments in [json!({"path": 7}), json!({}), json!({"path": ["a"]})] {
        let (class, message) = refused(&mut client, "read_text_file", arguments);
        assert_eq!(class, "invalid_argument", "{message}");
    }
    client.end();

    // The older revision, and what was accepted before.
    let args = [
        "--image",
        "node",
        "--output",
        out,
        "--tools",
        "read_*,list_directory",
        "--timeout",
        "300",
    ];
    let mut args = args.to_vec();
    args.extend(["--", "mcp-server-filesystem", "/workspace/output"]);
    let mut client = Client::of(wrap(home.path(), &args));
    let us = json!({"name": "test", "version": "1"});
    let hello = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": us});
    client.say(&json!({"jsonrpc": "2.0", "id": "i", "method": "initialize", "params": hello}));
    let info = client.hear("initialize", |message| message["id"] == "i");
    assert_eq!(info["result"]["serverInfo"]["name"], "secure-filesystem-server", "{info}");
    assert_eq!(info["result"]["protocolVersion"], "2025-11-25");
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    client.say(&json!({"jsonrpc": "2.0", "id": "l", "method": "tools/list"}));
    let list = client.hear("tools", |message| message["id"] == "l");
    let names = self::names(&list["result"]);
    assert!(names.contains(&"read_text_file") && !names.contains(&"write_file"), "{names:?}");
    for (tool, good) in [("read_text_file", true), ("write_file", false)] {
        let arguments = json!({"path": place("moved.txt"), "content": "x"});
        let params = json!({"name": tool, "arguments": arguments});
        client
            .say(&json!({"jsonrpc": "2.0", "id": tool, "method": "tools/call", "params": params}));
        let answer = client.hear(tool, |message| message["id"] == tool);
        assert_eq!(answer["error"]["code"] == -32602, !good, "{answer}");
    }
    client.end();
    assert_eq!(fs::read_to_string(output.join("moved.txt")).unwrap(), "one\nthree\n");
    drop((home, folder));
    before.assert_unchanged();
}

#[test]
fn what_a_hostile_server_says_is_bounded_and_what_it_asks_is_refused() {
    let (home, (_folder, server)) = (fresh_home(), hostile());
    let args = [&["--input", &server, "--timeout", "40"][..], &PYTHON].concat();
    let mut command = wrap(home.path(), &args);
    command.stderr(Stdio::piped());
    let mut client = Client::of(command);
    let stderr = client.child.stderr.take().unwrap();
    let stderr = std::thread::spawn(move || std::io::read_to_string(stderr).unwrap());

    let info = ask(&mut client, "server/discover", json!({})).unwrap();
    assert_eq!(info["instructions"], "Be good");
    assert_eq!(info["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "hostile");
    let list = ask(&mut client, "tools/list", json!({})).unwrap();
    let all = list.to_string();
    assert!(!all.chars().any(|c| c.is_control() || ('\u{e0000}'..='\u{e0fff}').contains(&c)));
    let hidden = list["tools"].as_array().unwrap().iter().find(|t| t["name"] == "hidden").unwrap();
    assert_eq!((&hidden["title"], &hidden["description"]), (&json!("T"), &json!("Harmless")));
    assert_eq!(hidden["inputSchema"]["properties"]["x"]["description"], "x");
    let names = names(&list);
    assert!(
        names.contains(&"echo")
            && names.contains(&"tree")
            && !names.contains(&"loop")
            && !names.contains(&"bad name")
    );
    let (class, message) = refused(&mut client, "loop", json!({}));
    assert!(class == "denied" && message.contains("refers to itself"), "{message}");
    assert_eq!(ask(&mut client, "tools/call", json!({"name": "x"})).unwrap_err()["code"], -32602);

    // Arguments are checked before the server sees them.
    for bad in
        [json!({}), json!({"text": 1}), json!({"text": "longer"}), json!({"text": "a", "b": 1})]
    {
        let (class, message) = refused(&mut client, "echo", bad);
        assert_eq!(class, "invalid_argument", "{message}");
    }
    let tree = |levels: usize, leaf: Value| {
        (1..levels).fold(leaf, |child, _| json!({"name": "n", "children": [child]}))
    };
    for levels in [1, 3, 8] {
        let (class, message) =
            refused(&mut client, "tree", json!({"tree": tree(levels, json!({"name": 1}))}));
        let place = format!("/tree{}/name", "/children/0".repeat(levels - 1));
        assert!(class == "invalid_argument" && message.contains(&place), "{message}");
    }
    let echo = call(&mut client, "echo", json!({"text": "a\u{200b}"}));
    assert_eq!(echo["content"][0]["text"], "a\\u{200b}");
    assert_eq!(echo["structuredContent"]["calls"], 1, "the others did not reach it: {echo}");

    for levels in [1, 3, 50] {
        let deep = call(&mut client, "tree", json!({"tree": tree(levels, json!({"name": "n"}))}));
        assert_eq!(deep["content"][0]["text"], format!("{levels} levels"), "{deep}");
    }

    let asked = call(&mut client, "sample", json!({}));
    let answers: Value =
        serde_json::from_str(asked["content"][0]["text"].as_str().unwrap()).unwrap();
    for n in 0..3 {
        assert_eq!(answers[n]["error"]["code"], -32601, "{answers}");
    }
    assert_eq!(answers[3]["result"], json!({}));

    for (tool, wanted) in [("huge", "more than 8388608 bytes"), ("broken", "no JSON")] {
        let (class, message) = refused(&mut client, tool, json!({}));
        assert!(class == "internal" && message.contains(wanted), "{tool}: {message}");
    }
    let (_, message) = refused(&mut client, "big", json!({}));
    assert!(message.contains("--max-result"), "{message}");
    for (tool, wanted) in [("wrong", "right"), ("flood", "done")] {
        let result = call(&mut client, tool, json!({}));
        assert_eq!(result["content"][0]["text"], wanted, "{tool}: {result}");
    }

    // Progress and cancellation pass.
    let meta = json!({"progressToken": "p"});
    let id =
        client.request("tools/call", json!({"name": "progress", "arguments": {}, "_meta": meta}));
    assert_eq!(client.answer(id)["result"]["content"][0]["text"], "done");
    let told = client.others();
    let of = |wanted: u64| {
        told.iter().find(|message| message["params"]["progress"].as_f64() == Some(wanted as f64))
    };
    assert_eq!(of(2).unwrap()["params"]["progressToken"], "p", "{told:?}");
    assert_eq!(of(2).unwrap()["params"]["message"], "step\\u{202e} 2");
    assert!(told.iter().all(|message| message["method"] == "notifications/progress"), "{told:?}");
    let id = client.begin("wait", json!({}));
    // A later request is answered only after the server has this one.
    call(&mut client, "wrong", json!({}));
    let cancel = json!({"requestId": id});
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancel}));
    call(&mut client, "wrong", json!({}));
    let echo = call(&mut client, "echo", json!({"text": "b"}));
    let cancelled = echo["structuredContent"]["cancelled"].as_array().unwrap();
    assert!(!cancelled.is_empty(), "{echo}");

    // Resources and prompts pass too.
    let resources = ask(&mut client, "resources/list", json!({})).unwrap();
    assert_eq!(resources["resources"], json!([{"uri": "demo://a", "name": "A"}]));
    let templates = ask(&mut client, "resources/templates/list", json!({})).unwrap();
    assert_eq!(templates["resourceTemplates"][0]["uriTemplate"], "demo://{x}");
    let read = ask(&mut client, "resources/read", json!({"uri": "demo://a"})).unwrap();
    assert_eq!(read["contents"][0]["text"], "of demo://a");
    let prompts = ask(&mut client, "prompts/list", json!({})).unwrap();
    assert_eq!(prompts["prompts"][0]["description"], "d");
    let params = json!({"name": "say", "arguments": {"x": "hi"}});
    let prompt = ask(&mut client, "prompts/get", params).unwrap();
    assert_eq!(prompt["messages"][0]["content"]["text"], "say hi");

    // A server that hangs costs its time limit, and the next call as well: it hears nothing any more.
    let (class, message) = refused(&mut client, "hang", json!({}));
    assert!(class == "internal" && message.contains("within 40 seconds"), "{message}");
    client.end();
    let stderr = stderr.join().unwrap();
    assert!(
        stderr.contains("refused the server's request sampling/createMessage"),
        "{stderr:.2000}"
    );
    assert!(stderr.contains("the tool loop is refused"), "{stderr:.2000}");
    assert!(stderr.len() < 1 << 20, "{} bytes", stderr.len());
    assert!(!stderr.contains('\u{1b}'));
}

#[test]
fn a_server_of_the_newest_revision_alone_serves_clients_of_both() {
    let (home, (_folder, server)) = (fresh_home(), server(include_str!("modern_server.py")));
    let args = [&["--input", &server][..], &PYTHON].concat();
    let mut client = Client::of(wrap(home.path(), &args));
    let info = ask(&mut client, "server/discover", json!({})).unwrap();
    assert_eq!(info["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "modern");
    assert_eq!(info["instructions"], "Only new");
    assert_eq!(names(&ask(&mut client, "tools/list", json!({})).unwrap()), ["add", "ask"]);
    let sum = call(&mut client, "add", json!({"a": 2, "b": 3}));
    assert_eq!(sum["content"][0]["text"], "5");
    assert_eq!(refused(&mut client, "add", json!({"a": 2})).0, "invalid_argument");
    // What this revision has for a server's questions is refused as the questions themselves are.
    let (class, message) = refused(&mut client, "ask", json!({}));
    assert!(class == "internal" && message.contains("input_required"), "{message}");
    assert!(!message.contains("password"), "{message}");
    client.end();

    let mut client = Client::of(wrap(home.path(), &args));
    let us = json!({"name": "test", "version": "1"});
    let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": us});
    client.say(&json!({"jsonrpc": "2.0", "id": "i", "method": "initialize", "params": hello}));
    let info = client.hear("initialize", |message| message["id"] == "i");
    assert_eq!(info["result"]["protocolVersion"], "2025-06-18", "{info}");
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    let params = json!({"name": "add", "arguments": {"a": 20, "b": 3}});
    client.say(&json!({"jsonrpc": "2.0", "id": "c", "method": "tools/call", "params": params}));
    let sum = client.hear("a sum", |message| message["id"] == "c");
    assert_eq!(sum["result"]["content"][0]["text"], "23", "{sum}");
    client.end();
}

#[test]
fn tools_that_change_are_refused_until_they_are_accepted() {
    let (home, (_folder, server)) = (fresh_home(), hostile());
    let start = |options: &[&str]| {
        Client::of(wrap(home.path(), &[options, &["--input", &server], &PYTHON].concat()))
    };
    let mut client = start(&[]);
    assert!(names(&ask(&mut client, "tools/list", json!({})).unwrap()).contains(&"echo"));
    // While it runs, too.
    call(&mut client, "change", json!({}));
    let why = loop {
        match ask(&mut client, "tools/list", json!({})) {
            Err(error) => break error,
            Ok(_) => std::thread::sleep(std::time::Duration::from_millis(100)),
        }
    };
    let why = why["message"].as_str().unwrap().to_owned();
    assert!(why.contains("added added; changed sample. "), "{why}");
    assert_eq!(refused(&mut client, "echo", json!({"text": "a"})), ("denied".into(), why.clone()));
    client.end();
    // The next time it begins with the changed ones.
    let mut client = start(&["--env", "CHANGED=1"]);
    assert!(ask(&mut client, "server/discover", json!({})).unwrap().get("instructions").is_none());
    let again = ask(&mut client, "tools/list", json!({})).unwrap_err();
    assert_eq!(again["message"], why.as_str());
    assert_eq!(refused(&mut client, "added", json!({})).0, "denied");
    assert!(ask(&mut client, "prompts/get", json!({"name": "say"})).is_err());
    client.end();
    for options in [&["--env", "CHANGED=1", "--accept-tools"][..], &["--env", "CHANGED=1"]] {
        let mut client = start(options);
        assert!(names(&ask(&mut client, "tools/list", json!({})).unwrap()).contains(&"added"));
        client.end();
    }
    let mut client = start(&[]);
    let back = ask(&mut client, "tools/list", json!({})).unwrap_err();
    assert!(back["message"].as_str().unwrap().contains("removed added; changed sample"), "{back}");
    client.end();
}

#[test]
fn servers_of_a_file_have_prefixes_and_one_that_dies_dies_alone() {
    let before = Leftovers::now();
    let (home, (folder, _)) = (fresh_home(), hostile());
    let server = "image = 'base'\ninput = 'server.py'\nmemory = 256\n\
        command = ['python3', '/workspace/input/server.py']\n";
    let config = format!(
        "[[server]]\nname = 'one'\n{server}[[server]]\nname = 'two'\ntools = ['e*']\n{server}\
         [[server]]\nname = 'not'\n{}",
        server.replace("python3", "/no/such/program")
    );
    let file = folder.path().join("servers.toml");
    fs::write(&file, config).unwrap();
    let mut client = Client::of(wrap(home.path(), &["--config", file.to_str().unwrap()]));
    let list = ask(&mut client, "tools/list", json!({})).unwrap();
    let names = names(&list);
    assert!(names.contains(&"one_die") && names.contains(&"one_echo"), "{names:?}");
    let two: Vec<_> = names.iter().filter(|name| name.starts_with("two_")).collect();
    assert_eq!(two, [&"two_echo"]);
    let info = ask(&mut client, "server/discover", json!({})).unwrap();
    let words = info["instructions"].as_str().unwrap();
    assert!(words.contains("begin with one_: Be good") && words.contains("two_"), "{words}");
    let resources = ask(&mut client, "resources/list", json!({})).unwrap();
    assert_eq!(resources["resources"][1]["uri"], "two+demo://a", "{resources}");
    let read = ask(&mut client, "resources/read", json!({"uri": "two+demo://a"})).unwrap();
    assert_eq!(read["contents"][0], json!({"uri": "two+demo://a", "text": "of demo://a"}));
    let params = json!({"name": "one_say", "arguments": {"x": "hi"}});
    let prompt = ask(&mut client, "prompts/get", params).unwrap();
    assert_eq!(prompt["messages"][0]["content"]["text"], "say hi");

    let (class, message) = refused(&mut client, "not_echo", json!({}));
    assert!(class == "denied" && message.contains("/no/such/program"), "{message}");
    for _ in 0..2 {
        let (class, message) = refused(&mut client, "one_die", json!({}));
        assert!(class == "guest_lost" && message.contains("exit status 3"), "{message}");
    }
    let echo = call(&mut client, "two_echo", json!({"text": "a"}));
    assert_eq!(echo["content"][0]["text"], "a");
    client.end();
    drop((home, folder));
    before.assert_unchanged();
}

#[test]
fn a_start_that_its_client_gives_up_ends_and_leaves_nothing_dangerous() {
    let before = Leftovers::now();
    let (home, output) = (fresh_home(), open_folder());
    let script = "ln -s /etc evil; echo here > good; sleep 1000";
    let args = ["--output", output.path().to_str().unwrap(), "--", "bash", "-c", script];
    let mut child = wrap(home.path(), &args).stdin(Stdio::piped()).spawn().unwrap();
    wait_for("the server", || {
        assert!(child.try_wait().unwrap().is_none());
        fs::read_to_string(output.path().join("good")).ok().filter(|text| !text.is_empty())
    });
    assert!(output.path().join("evil").is_symlink());
    drop(child.stdin.take());
    assert!(wait(&mut child).success());
    assert!(!output.path().join("evil").is_symlink() && output.path().join("good").exists());
    drop((home, output));
    before.assert_unchanged();
}

#[test]
fn a_server_that_does_not_start_says_so_and_bad_options_do_too() {
    let home = fresh_home();
    for (args, wanted) in [
        (&["--", "false"][..], "exit status 1"),
        (&["--", "/no/such/program"], "/no/such/program"),
        (&["--tools", "[", "--", "true"], "--tools"),
        (&["--config", "/nowhere.toml"], "/nowhere.toml"),
    ] {
        let mut command = wrap(home.path(), args);
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let status = wait(&mut child);
        let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(status.code(), Some(125), "{said}");
        assert!(said.contains(wanted), "{said}");
    }
}
