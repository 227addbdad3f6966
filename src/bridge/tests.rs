//! The bridge between a client in memory and a real server. Nothing here needs a guest.

use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, DuplexStream, Lines};
use tokio::task::JoinHandle;

use super::*;
use crate::gateway::http::tests::{ANA, Running, tokens};
use crate::gateway::http::{Address, Config};

/// A bound against hanging, not a measurement.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client and its bridge.
struct Client {
    input: DuplexStream,
    output: Lines<BufReader<DuplexStream>>,
    bridge: JoinHandle<io::Result<()>>,
}

impl Client {
    fn new(address: &str, token: Option<&str>) -> Self {
        let endpoint = Endpoint::new(address, token, None, false).unwrap();
        let (input, theirs_in) = tokio::io::duplex(1 << 16);
        let (theirs_out, output) = tokio::io::duplex(1 << 16);
        let bridge = tokio::spawn(run(endpoint, theirs_in, theirs_out));
        Self { input, output: BufReader::new(output).lines(), bridge }
    }

    async fn say(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    async fn next(&mut self) -> Value {
        let line = tokio::time::timeout(PATIENCE, self.output.next_line()).await.unwrap();
        serde_json::from_str(&line.unwrap().expect("an answer")).unwrap()
    }

    async fn ask(&mut self, message: Value) -> Value {
        self.say(&message.to_string()).await;
        let answer = self.next().await;
        assert_eq!(answer["id"], message["id"], "{answer}");
        answer
    }

    async fn handshake(&mut self) {
        let hello = self.ask(initialize()).await;
        assert_eq!(hello["result"]["protocolVersion"], "2025-11-25", "{hello}");
        let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        self.say(&initialized.to_string()).await;
    }

    /// The client ends; gives what else it was told.
    async fn end(self) -> Vec<String> {
        drop(self.input);
        tokio::time::timeout(PATIENCE, self.bridge).await.unwrap().unwrap().unwrap();
        let mut lines = self.output;
        let mut rest = Vec::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            rest.push(line);
        }
        rest
    }
}

fn url(server: &Running) -> String {
    match &server.address {
        Address::Tcp(address) => format!("http://{address}/mcp"),
        unix @ Address::Unix(_) => unix.to_string(),
    }
}

fn initialize() -> Value {
    json!({"jsonrpc": "2.0", "id": "first", "method": "initialize", "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }})
}

fn legacy(id: u32, method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

fn modern(id: u32, method: &str, params: Value) -> Value {
    let mut message = legacy(id, method, params);
    message["params"]["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    message
}

/// A call of a tool that needs no guest to fail.
fn call() -> Value {
    let sandbox = format!("sb_{}", "0".repeat(32));
    json!({"name": "destroy_sandbox", "arguments": {"sandbox_id": sandbox}})
}

fn is_not_found(answer: &Value) {
    let text = answer["result"]["content"][0]["text"].as_str().unwrap_or_default();
    assert!(text.contains("sandbox_not_found"), "{answer}");
}

#[tokio::test]
async fn a_client_of_either_era_is_served() {
    let server = Running::local().await;
    let mut client = Client::new(&url(&server), Some(ANA));
    let found = client.ask(modern(1, "server/discover", json!({}))).await;
    assert!(found["result"]["supportedVersions"].is_array(), "{found}");
    is_not_found(&client.ask(modern(2, "tools/call", call())).await);
    assert!(client.end().await.is_empty());

    let mut client = Client::new(&url(&server), Some(ANA));
    client.handshake().await;
    let list = client.ask(legacy(1, "tools/list", json!({}))).await;
    assert!(list["result"]["tools"].is_array(), "{list}");
    is_not_found(&client.ask(legacy(2, "tools/call", call())).await);
    // As Claude Code does: both on one pipe.
    is_not_found(&client.ask(modern(3, "tools/call", call())).await);
    assert!(client.end().await.is_empty());
}

#[tokio::test]
async fn a_socket_in_the_file_system_needs_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let server = Running::start(Config::new(Address::Unix(path), Vec::new())).await;
    let mut client = Client::new(&url(&server), None);
    client.handshake().await;
    is_not_found(&client.ask(legacy(1, "tools/call", call())).await);
}

#[tokio::test]
async fn a_server_that_forgot_the_session_gets_the_handshake_again() {
    let first = Running::local().await;
    let address = first.address.clone();
    let mut client = Client::new(&url(&first), Some(ANA));
    client.handshake().await;
    is_not_found(&client.ask(legacy(1, "tools/call", call())).await);
    first.stop.cancel();
    while !first.task.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let lost = client.ask(legacy(2, "tools/call", call())).await;
    let text = lost["error"]["message"].as_str().unwrap();
    assert!(text.contains("cannot connect") && text.contains("has not been sent"), "{text}");
    let _second = Running::start(Config::new(address, tokens())).await;
    // The client has not been told anything of a new session.
    is_not_found(&client.ask(legacy(3, "tools/call", call())).await);
    is_not_found(&client.ask(legacy(4, "tools/call", call())).await);
    assert!(client.end().await.is_empty());
}

#[tokio::test]
async fn what_the_server_refuses_is_an_answer() {
    let server = Running::local().await;
    let mut client = Client::new(&url(&server), Some("ffffffffffffffffffffffffffffffff"));
    for request in [initialize(), legacy(1, "tools/list", json!({})), modern(2, "ping", json!({}))]
    {
        let answer = client.ask(request).await;
        let text = answer["error"]["message"].as_str().unwrap();
        assert!(text.contains("401") && text.contains("token"), "{text}");
    }
    let mut client = Client::new(&url(&server), Some(ANA));
    // An error of the protocol is the server's own.
    let answer = client.ask(modern(1, "no/such/method", json!({}))).await;
    assert_eq!(answer["error"]["code"], -32601, "{answer}");
    let answer = client.ask(legacy(2, "tools/list", json!({}))).await;
    assert!(answer["error"]["message"].is_string(), "{answer}");
}

#[tokio::test]
async fn bad_lines_are_answered_and_the_next_is_served() {
    let server = Running::local().await;
    let mut client = Client::new(&url(&server), Some(ANA));
    for (line, code) in [
        ("hello".to_owned(), -32700),
        ("{\"jsonrpc\":".to_owned(), -32700),
        ("[".repeat(1000), -32700),
        (format!("{{\"a\":\"{}\"}}", "x".repeat(MAX_MESSAGE)), -32600),
    ] {
        client.say(&line).await;
        let answer = client.next().await;
        assert_eq!(answer["error"]["code"], code, "{answer}");
        assert_eq!(answer["id"], Value::Null);
    }
    client.say("").await;
    let odd = client.ask(json!({"id": 5, "method": 7})).await;
    assert_eq!(odd["error"]["code"], -32600, "{odd}");
    is_not_found(&client.ask(modern(1, "tools/call", call())).await);
}

#[tokio::test]
async fn a_hundred_calls_at_once_are_each_answered() {
    let server = Running::local().await;
    let mut client = Client::new(&url(&server), Some(ANA));
    client.handshake().await;
    for id in 0..100 {
        let message = if id % 2 == 0 {
            legacy(id, "tools/call", call())
        } else {
            modern(id, "tools/call", call())
        };
        client.say(&message.to_string()).await;
    }
    let mut ids = Vec::new();
    for _ in 0..100 {
        let answer = client.next().await;
        is_not_found(&answer);
        ids.push(answer["id"].as_u64().unwrap());
    }
    ids.sort_unstable();
    assert_eq!(ids, (0..100).collect::<Vec<_>>());
}

#[tokio::test]
async fn the_bridge_ends_when_nobody_reads_it() {
    let server = Running::local().await;
    let Client { mut input, output, bridge } = Client::new(&url(&server), Some(ANA));
    drop(output);
    let message = format!("{}\n", modern(1, "server/discover", json!({})));
    input.write_all(message.as_bytes()).await.unwrap();
    tokio::time::timeout(PATIENCE, bridge).await.unwrap().unwrap().unwrap();
}
