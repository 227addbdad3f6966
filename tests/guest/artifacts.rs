//! What comes out of sandboxes and is kept for a while: as resources over stdio, and as files over HTTP.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::client::Client;
use crate::http::{Server, token};
use crate::support::{PATIENCE, casulo_path, folder, home, sha256};

/// Five megabytes that are not all the same.
fn big() -> Vec<u8> {
    (0..5_000_000u32).map(|n| (n % 251) as u8).collect()
}

/// What the guest leaves in its output folder.
const WRITES: &str = r"
import os
os.chdir('/workspace/output')
open('a.txt', 'w').write('hello é\n')
os.makedirs('plots')
open('plots/p.png', 'wb').write(b'\x89PNG\r\n\x1a\n\0')
open(b'bytes \xff', 'wb').write(b'x')
open('big.bin', 'wb').write((bytes(range(251)) * 20000)[:5000000])
open('closed', 'w').write('c')
os.chmod('closed', 0)
os.symlink('/etc/passwd', 'out')
os.symlink('a.txt', 'in')
open('bell\a', 'w').write('x')
try:
    os.mkfifo('fifo')
except OSError:
    pass # A share takes none.
";

/// The whole answer to the end of a sandbox, links and all.
fn destroy(client: &mut Client, sandbox: &str) -> Value {
    let id = client.begin("destroy_sandbox", json!({"sandbox_id": sandbox}));
    let answer = client.answer(id);
    assert_ne!(answer["result"]["isError"], true, "{answer}");
    answer["result"].clone()
}

fn request(client: &mut Client, method: &str, params: Value) -> Value {
    let id = client.request(method, params);
    client.answer(id)
}

fn uris(client: &mut Client) -> Vec<String> {
    let list = request(client, "resources/list", json!({}));
    let list = list["result"]["resources"].as_array().unwrap().iter();
    list.map(|one| one["uri"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn artifacts_of_a_destroyed_sandbox_are_resources() {
    let mut client = Client::start(&[]);
    let sandbox = client.sandbox();
    let wrote = client.python(&sandbox, WRITES);
    assert_eq!(wrote["exit_code"], 0, "{wrote}");
    let paths: Vec<_> = wrote["files"].as_array().unwrap().iter().map(|f| &f["path"]).collect();
    assert!(paths.contains(&&json!("plots/p.png")), "figures are listed: {wrote}");
    let uri = |path: &str| format!("casulo://sandboxes/{sandbox}/files/{path}");
    let early = request(&mut client, "resources/read", json!({"uri": uri("a.txt")}));
    assert_eq!(early["error"]["code"], -32602);
    assert!(early["error"]["message"].as_str().unwrap().contains("read_file"), "{early}");

    let result = destroy(&mut client, &sandbox);
    let value = &result["structuredContent"];
    let big = big();
    let expected: [(&str, &str, &[u8]); 5] = [
        ("a.txt", "a.txt", "hello é\n".as_bytes()),
        ("big.bin", "big.bin", &big),
        ("bytes \u{fffd}", "bytes%20%FF", b"x"),
        ("closed", "closed", b"c"),
        ("plots/p.png", "plots/p.png", b"\x89PNG\r\n\x1a\n\0"),
    ];
    let artifacts = value["artifacts"].as_array().unwrap();
    assert_eq!(artifacts.len(), expected.len(), "{value}");
    let links: Vec<_> = result["content"].as_array().unwrap()[1..].iter().collect();
    assert_eq!(links.len(), expected.len());
    for ((artifact, link), (path, encoded, data)) in artifacts.iter().zip(links).zip(expected) {
        let whole = json!({"path": path, "size": data.len(), "sha256": sha256(data),
            "uri": uri(encoded)});
        assert_eq!(artifact, &whole);
        assert_eq!((&link["type"], &link["uri"]), (&json!("resource_link"), &whole["uri"]));
        assert_eq!((&link["name"], &link["size"]), (&whole["path"], &whole["size"]));
    }
    assert_eq!(value["artifact_ttl_seconds"], 3600);
    let rejected: Vec<_> =
        value["rejected"].as_array().unwrap().iter().map(|one| &one["path"]).collect();
    assert_eq!(rejected, [&json!("bell\\u{7}"), &json!("out")], "{value}");

    let read = |client: &mut Client, path: &str| {
        request(client, "resources/read", json!({"uri": uri(path)}))
    };
    let text = read(&mut client, "a.txt")["result"].clone();
    assert_eq!(text["contents"][0]["text"], "hello é\n");
    assert_eq!(
        (&text["contents"][0]["mimeType"], &text["cacheScope"]),
        (&json!("text/plain"), &json!("private"))
    );
    let image = read(&mut client, "plots/p.png")["result"]["contents"][0].clone();
    assert_eq!(STANDARD.decode(image["blob"].as_str().unwrap()).unwrap(), expected[4].2);
    let large = read(&mut client, "big.bin")["error"].clone();
    assert_eq!(large["code"], -32602);
    assert!(large["message"].as_str().unwrap().contains("5000000 bytes"), "{large}");
    let mut errors = Vec::new();
    for path in
        ["out", "in", "fifo", "bell%07", "plots", "../a.txt", "%2e%2e/%2e%2e/etc/passwd", ""]
    {
        errors.push(read(&mut client, path)["error"].clone());
    }
    let unknown = format!("casulo://sandboxes/sb_{}/files/a.txt", "0".repeat(32));
    errors.push(request(&mut client, "resources/read", json!({"uri": unknown}))["error"].clone());
    for error in &errors {
        assert_eq!((&error["code"], &error["message"]), (&json!(-32602), &errors[0]["message"]));
    }
    let all: Vec<String> = expected.iter().map(|(_, path, _)| uri(path)).collect();
    assert_eq!(uris(&mut client), all);
    client.bad("destroy_sandbox", json!({"sandbox_id": sandbox}), "sandbox_not_found");
    client.end();
    assert_eq!(stores(), Vec::<PathBuf>::new());
}

#[test]
fn artifacts_of_a_call_without_a_sandbox_are_resources_too() {
    let mut client = Client::start(&[]);
    let call = json!({"command": "echo one > a; mkdir d; echo two > d/b"});
    let result = client.good("run_command", call);
    let files = result["files"].as_array().unwrap();
    assert_eq!(files.len(), 3, "{result}");
    assert!(files[1].get("uri").is_none(), "a folder");
    let uri = files[2]["uri"].as_str().unwrap();
    assert!(uri.ends_with("/files/d/b"));
    let read = request(&mut client, "resources/read", json!({"uri": uri}));
    assert_eq!(read["result"]["contents"][0]["text"], "two\n");
    assert_eq!(client.good("run_command", json!({"command": "ls"}))["stdout"], "", "each its own");
    client.end();
}

#[test]
fn artifacts_are_kept_when_a_sandbox_ends_by_itself() {
    let mut client = Client::start(&["--idle-timeout", "1"]);
    let sandbox = client.sandbox();
    client.good(
        "write_file",
        json!({"sandbox_id": sandbox, "path": "/workspace/output/a", "content": "x"}),
    );
    let began = std::time::Instant::now();
    while uris(&mut client).is_empty() {
        assert!(began.elapsed() < PATIENCE);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    assert_eq!(uris(&mut client), [format!("casulo://sandboxes/{sandbox}/files/a")]);
    client.end();
}

#[test]
fn artifacts_are_in_the_output_folder_as_well_if_there_is_one() {
    let folder = folder();
    let mut client = Client::start(&["--output", folder.path().to_str().unwrap()]);
    let code = "open('figure.png', 'wb').write(b'figure')";
    let fresh = client.good("execute_code", json!({"language": "python", "code": code}));
    let file = &fresh["files"][0];
    assert_eq!((&file["path"], &file["size"]), (&json!("figure.png"), &json!(6)), "{fresh}");
    assert_eq!((&file["sha256"], &file["change"]), (&json!(sha256(b"figure")), &json!("created")));
    let id = file["uri"].as_str().unwrap().split('/').nth(3).unwrap();
    assert_eq!(std::fs::read(folder.path().join(id).join("figure.png")).unwrap(), b"figure");

    let sandbox = client.sandbox();
    let kept = client.python(&sandbox, code);
    let file = &kept["files"][0];
    assert_eq!((&file["path"], &file["sha256"]), (&json!("figure.png"), &json!(sha256(b"figure"))));
    assert!(file.get("uri").is_none(), "it may still change");
    assert_eq!(client.python(&sandbox, "1")["files"], json!([]), "only what the call changed");
    let result = destroy(&mut client, &sandbox);
    let artifact = &result["structuredContent"]["artifacts"][0];
    // What becomes of the operator's file does not matter to what is kept.
    let file = folder.path().join(&sandbox).join("figure.png");
    assert_eq!(std::fs::read(&file).unwrap(), b"figure");
    std::fs::write(&file, "changed").unwrap();
    let read = request(&mut client, "resources/read", json!({"uri": artifact["uri"]}));
    assert_eq!(read["result"]["contents"][0]["text"], "figure");
    client.end();
    assert_eq!(std::fs::read(&file).unwrap(), b"changed");
}

#[test]
fn artifacts_can_be_limited_to_patterns_and_to_nothing() {
    let folder = folder();
    let output = folder.path().to_str().unwrap();
    let mut client = Client::start(&["--artifact", "*.csv", "--output", output]);
    let sandbox = client.sandbox();
    client.bash(&sandbox, "echo 1 > a.csv; echo 2 > b.txt; ln -s /etc/passwd c.csv");
    let result = destroy(&mut client, &sandbox)["structuredContent"].clone();
    assert_eq!(result["artifacts"].as_array().unwrap().len(), 1, "{result}");
    assert_eq!(
        (&result["artifacts"][0]["path"], &result["withheld"]),
        (&json!("a.csv"), &json!(1))
    );
    assert_eq!(uris(&mut client).len(), 1);
    client.end();

    let mut client = Client::start(&["--artifact-ttl", "0"]);
    let discovered = request(&mut client, "server/discover", json!({}));
    assert!(discovered["result"]["capabilities"].get("resources").is_none(), "{discovered}");
    let sandbox = client.sandbox();
    client.bash(&sandbox, "echo 1 > a.csv");
    let result = destroy(&mut client, &sandbox)["structuredContent"].clone();
    assert_eq!((&result["artifacts"], &result["files"]), (&json!([]), &json!([])), "{result}");
    client.end();
}

/// An answer of HTTP: status, head and body.
struct Answer(u16, String, Vec<u8>);

fn get(server: &Server, caller: &str, path: &str, more: &str) -> Answer {
    let address = server.url.strip_prefix("http://").unwrap().strip_suffix("/mcp").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "GET /v1/sandboxes/{path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\n\
         Connection: close\r\n{more}\r\n",
        token(caller)
    )
    .unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    Answer(head[9..12].parse().unwrap(), head, all[end + 4..].to_vec())
}

#[test]
fn artifacts_are_served_over_http_to_their_caller_alone() {
    let server = Server::with("127.0.0.1:0", &[]);
    let mut ana = server.client("ana");
    let sandbox = ana.sandbox();
    let wrote = ana.python(&sandbox, WRITES);
    assert_eq!(wrote["exit_code"], 0, "{wrote}");
    let files = format!("{sandbox}/files");
    assert_eq!(get(&server, "ana", &files, "").0, 409, "it still runs");
    let unknown = get(&server, "ana", &format!("sb_{}/files", "0".repeat(32)), "");
    assert_eq!((unknown.0, get(&server, "bob", &files, "").2), (404, unknown.2.clone()));
    let result = destroy(&mut ana, &sandbox)["structuredContent"].clone();

    let list: Value = serde_json::from_slice(&get(&server, "ana", &files, "").2).unwrap();
    for (one, artifact) in
        list["files"].as_array().unwrap().iter().zip(result["artifacts"].as_array().unwrap())
    {
        for field in ["path", "size", "sha256", "uri"] {
            assert_eq!(one[field], artifact[field], "{field}");
        }
        let Answer(status, _, data) = get(
            &server,
            "ana",
            one["href"].as_str().unwrap().strip_prefix("/v1/sandboxes/").unwrap(),
            "",
        );
        assert_eq!((status, json!(sha256(&data))), (200, one["sha256"].clone()));
    }
    let big = big();
    let range = get(&server, "ana", &format!("{files}/big.bin"), "Range: bytes=4999990-\r\n");
    assert_eq!((range.0, range.2.as_slice()), (206, &big[4_999_990..]));
    assert!(range.1.to_ascii_lowercase().contains("content-range: bytes 4999990-4999999/5000000"));
    let tar = get(&server, "ana", &format!("{files}?format=tar"), "").2;
    let folder = folder();
    let mut untar = std::process::Command::new("tar")
        .args(["-x", "-f", "-", "-C"])
        .arg(folder.path())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    untar.stdin.take().unwrap().write_all(&tar).unwrap();
    assert!(untar.wait().unwrap().success());
    assert!(std::fs::read(folder.path().join("big.bin")).unwrap() == big);
    assert_eq!(std::fs::read(folder.path().join("plots/p.png")).unwrap(), b"\x89PNG\r\n\x1a\n\0");

    for (caller, path) in [
        ("bob", files.clone()),
        ("bob", format!("{files}/a.txt")),
        ("bob", format!("{files}?format=tar")),
        ("ana", format!("{files}/out")),
        ("ana", format!("{files}/fifo")),
        ("ana", format!("{files}/..%2f..%2f..%2fetc%2fpasswd")),
        ("ana", format!("{files}//etc/passwd")),
    ] {
        let Answer(status, _, body) = get(&server, caller, &path, "");
        assert_eq!((status, &body), (404, &unknown.2), "{caller} {path}");
    }
    // The same over MCP.
    let mut bob = server.client("bob");
    let uri = result["artifacts"][0]["uri"].clone();
    assert_eq!(uris(&mut bob), Vec::<String>::new());
    let foreign = request(&mut bob, "resources/read", json!({"uri": uri}));
    assert_eq!(foreign["error"]["code"], -32602, "{foreign}");
    let own = request(&mut ana, "resources/read", json!({"uri": uri}));
    assert_eq!(own["result"]["contents"][0]["text"], "hello é\n", "{own}");
    ana.end();
    bob.end();
    server.end();
}

#[test]
fn artifacts_go_when_their_time_is_over() {
    let server = Server::with("127.0.0.1:0", &["--artifact-ttl", "3"]);
    let mut ana = server.client("ana");
    let sandbox = ana.sandbox();
    ana.bash(&sandbox, "echo x > a");
    let result = destroy(&mut ana, &sandbox)["structuredContent"].clone();
    assert_eq!(
        (&result["artifacts"][0]["size"], &result["artifact_ttl_seconds"]),
        (&json!(2), &json!(3))
    );
    let began = std::time::Instant::now();
    let path = format!("{sandbox}/files/a");
    while get(&server, "ana", &path, "").0 != 404 {
        assert!(began.elapsed() < PATIENCE);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    let unknown = get(&server, "ana", &format!("sb_{}/files", "0".repeat(32)), "");
    assert_eq!(get(&server, "ana", &path, "").2, unknown.2);
    let [store] = stores().try_into().unwrap();
    while std::fs::read_dir(&store).unwrap().count() > 0 {
        assert!(began.elapsed() < PATIENCE, "the files themselves go as well");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    ana.end();
    server.end();
}

/// The folders of this user's gateways.
fn stores() -> Vec<PathBuf> {
    let places = ["/var/tmp", "/tmp", "/run", "/dev/shm"].map(Path::new);
    let entries = places.into_iter().filter_map(|place| std::fs::read_dir(place).ok()).flatten();
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("casulo-artifacts-"))
        .collect()
}

#[test]
fn artifacts_of_a_killed_server_are_removed_by_the_next() {
    let mut server = Server::with("127.0.0.1:0", &[]);
    let mut ana = server.client("ana");
    let (ended, live) = (ana.sandbox(), ana.sandbox());
    for sandbox in [&ended, &live] {
        ana.bash(sandbox, "echo secret > a");
    }
    destroy(&mut ana, &ended);
    let [left] = stores().try_into().unwrap();
    let mut files: Vec<_> = std::fs::read_dir(&left)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let mut expected = vec![ended.clone(), format!("{live}.live")];
    expected.sort();
    assert_eq!(files, expected);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    assert!(left.exists());
    let next = Server::with("127.0.0.1:0", &[]);
    let began = std::time::Instant::now();
    while left.exists() {
        // A VM of the killed server may take a moment to end.
        assert!(began.elapsed() < PATIENCE && !left.join(&ended).exists());
        Server::with("127.0.0.1:0", &[]).end();
    }
    next.end();
    assert_eq!(stores(), Vec::<PathBuf>::new());
}

#[test]
fn artifacts_for_which_the_disk_has_no_room_are_counted_and_the_others_kept() {
    // In `/run`, since every other place is made small; what is needed from there is brought along.
    let stage = tempfile::tempdir_in("/run").unwrap();
    let [output, bin, kept] = ["output", "bin", "home"].map(|name| stage.path().join(name));
    for folder in [&output, &bin, &kept] {
        std::fs::create_dir(folder).unwrap();
    }
    let small = "mount --bind \"$1\" \"$2\"; mount --bind \"$3\" \"$4\"; shift 4; \
                 for place in /dev/shm /var/tmp /tmp; do mount -t tmpfs -o size=3m none $place; done; \
                 cd /; exec \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "sh", "-ec", small, "sh"]);
    command.arg(casulo_path().parent().unwrap()).arg(&bin).arg(home()).arg(&kept);
    command.arg(bin.join("casulo")).args(["mcp", "--host", "native", "--output"]).arg(&output);
    command.env("CASULO_HOME", &kept);
    let mut client = Client::of(command);
    let sandbox = client.sandbox();
    let write = "for size in 1 5 1; do n=$((n + 1)); head -c ${size}000000 /dev/zero > f$n; done";
    client.bash(&sandbox, write);
    let result = destroy(&mut client, &sandbox)["structuredContent"].clone();
    let paths: Vec<_> =
        result["artifacts"].as_array().unwrap().iter().map(|one| &one["path"]).collect();
    assert_eq!((paths, &result["artifacts_lost"]), (vec![&json!("f1"), &json!("f3")], &json!(1)));
    assert!(result["note"].as_str().unwrap().contains("No space left"), "{result}");
    for file in ["f1", "f2", "f3"] {
        assert!(output.join(&sandbox).join(file).exists(), "the operator has them all");
    }
    client.end();
}
