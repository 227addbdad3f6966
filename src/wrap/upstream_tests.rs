//! A server in memory that says anything.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, DuplexStream};

use super::*;

/// A bound against hanging, not a measurement.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    read: BufReader<DuplexStream>,
    write: Option<DuplexStream>,
    end: Option<oneshot::Sender<String>>,
    notes: mpsc::Receiver<Note>,
}

fn pair() -> (Arc<Upstream>, Server) {
    let (ours, read) = tokio::io::duplex(1 << 16);
    let (write, theirs) = tokio::io::duplex(1 << 16);
    let (end, ended) = oneshot::channel();
    let (tell, notes) = mpsc::channel(4);
    let upstream = Upstream::new(theirs, ours, ended, tell, Said::new("test"));
    let read = BufReader::new(read);
    (Arc::new(upstream), Server { read, write: Some(write), end: Some(end), notes })
}

impl Server {
    async fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.read.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn say(&mut self, bytes: &[u8]) {
        let write = self.write.as_mut().unwrap();
        write.write_all(bytes).await.unwrap();
        write.write_all(b"\n").await.unwrap();
    }

    async fn tell(&mut self, message: Value) {
        self.say(message.to_string().as_bytes()).await;
    }
}

/// Begins a request.
fn ask(upstream: &Arc<Upstream>) -> JoinHandle<Answer> {
    let upstream = Arc::clone(upstream);
    tokio::spawn(async move { upstream.request("x", Map::new(), PATIENCE, None).await })
}

#[tokio::test]
async fn answers_find_their_requests_and_others_are_nobodys() {
    let (upstream, mut server) = pair();
    let (first, second) = (ask(&upstream), ask(&upstream));
    let (a, b) = (server.hear().await["id"].clone(), server.hear().await["id"].clone());
    for id in [json!(99), json!("1"), json!(1.5), json!(null), json!([1]), json!(-1)] {
        server.tell(json!({"jsonrpc": "2.0", "id": id, "result": {"evil": true}})).await;
    }
    server
        .tell(json!({"jsonrpc": "2.0", "id": b, "error": {"code": -1, "message": "a\u{1b}[1mb"}}))
        .await;
    server.tell(json!({"jsonrpc": "2.0", "id": a, "result": {"ok": true}})).await;
    // A second answer is too late.
    server.tell(json!({"jsonrpc": "2.0", "id": a, "result": {"evil": true}})).await;
    let (x, y) = (first.await.unwrap(), second.await.unwrap());
    let (good, bad) = if x.is_ok() { (x, y) } else { (y, x) };
    assert_eq!(good.unwrap(), json!({"ok": true}));
    let wanted = Failure::Error { code: -1, message: "a?[1mb".into() };
    assert_eq!(bad.unwrap_err(), wanted);
    assert!(lock(&upstream.shared.state).pending.is_empty());
}

#[tokio::test]
async fn what_may_have_been_the_answer_ends_every_wait_and_the_server_is_still_heard() {
    let values = format!("{{\"x\":[{}0]}}", "0,".repeat(1 << 19));
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(1000), "]".repeat(1000));
    for (bad, wanted) in [
        (vec![b'x'; MAX_LINE + 1], "more than 8388608 bytes"),
        (vec![b'{'; 20_000_000], "more than 8388608 bytes"),
        (b"{\"jsonrpc\":\"2.0\",\"id\":1,\"resu".to_vec(), "no JSON"),
        (b"{\xff}".to_vec(), "no JSON"),
        (values.into_bytes(), "too many values"),
        (deep.into_bytes(), "no JSON"),
        (b"{\"id\":1}".to_vec(), "without a result"),
        (b"{\"id\":1,\"result\":[]}".to_vec(), "without a result"),
    ] {
        let (upstream, mut server) = pair();
        let request = ask(&upstream);
        server.hear().await;
        server.say(&bad).await;
        let error = request.await.unwrap().unwrap_err();
        assert!(matches!(&error, Failure::Broken(why) if why.contains(wanted)), "{error}");
        let request = ask(&upstream);
        let id = server.hear().await["id"].clone();
        // What programs say beside it is passed over.
        for chatter in
            [&b"Server running"[..], b"", b"  ", b"[1]", b"\xff\xfe", b"null", b"{\"a\":1}"]
        {
            server.say(chatter).await;
        }
        server.tell(json!({"jsonrpc": "2.0", "id": id, "result": {}})).await;
        assert_eq!(request.await.unwrap(), Ok(json!({})));
    }
}

#[tokio::test]
async fn what_the_server_asks_of_us_is_refused() {
    let (_upstream, mut server) = pair();
    for method in ["sampling/createMessage", "elicitation/create", "roots/list", "tools/call", "x"]
    {
        server.tell(json!({"jsonrpc": "2.0", "id": "q", "method": method, "params": {}})).await;
        let answer = server.hear().await;
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!("q"), &json!(-32601)));
        assert!(answer["error"]["message"].as_str().unwrap().contains("refused"));
    }
    server.tell(json!({"jsonrpc": "2.0", "id": 7, "method": "ping"})).await;
    assert_eq!(server.hear().await, json!({"jsonrpc": "2.0", "id": 7, "result": {}}));
}

#[tokio::test]
async fn of_notifications_only_changes_and_progress_of_our_requests_count() {
    let (upstream, mut server) = pair();
    let (tell, mut told) = mpsc::channel(1);
    let request = tokio::spawn({
        let upstream = Arc::clone(&upstream);
        async move { upstream.request("x", Map::new(), PATIENCE, Some(tell)).await }
    });
    let heard = server.hear().await;
    let id = heard["id"].clone();
    assert_eq!(heard["params"]["_meta"]["progressToken"], id);
    let note = |method: &str, params: Value| json!({"jsonrpc": "2.0", "method": format!("notifications/{method}"), "params": params});
    for (method, params) in [
        ("progress", json!({"progressToken": 1000, "progress": 1})),
        ("progress", json!({"progressToken": "1", "progress": 1})),
        ("progress", json!([])),
        ("cancelled", json!({"requestId": id})),
        ("message", json!({"level": "info", "data": {"a": "b"}})),
        ("resources/updated", json!({"uri": "x"})),
        ("nonsense", json!(null)),
    ] {
        server.tell(note(method, params)).await;
    }
    for _ in 0..1000 {
        server.tell(note("progress", json!({"progressToken": id, "progress": 2}))).await;
        server.tell(note("tools/list_changed", json!({}))).await;
    }
    assert_eq!(told.recv().await.unwrap()["progress"], 2);
    assert_eq!(server.notes.recv().await, Some(Note::Tools));
    server.tell(json!({"jsonrpc": "2.0", "id": id, "result": {}})).await;
    assert!(request.await.unwrap().is_ok());
}

#[tokio::test]
async fn a_request_that_nobody_waits_for_is_cancelled_at_the_server() {
    let (upstream, mut server) = pair();
    let request = ask(&upstream);
    let id = server.hear().await["id"].clone();
    request.abort();
    let cancel = server.hear().await;
    assert_eq!(cancel["method"], "notifications/cancelled");
    assert_eq!(cancel["params"]["requestId"], id);
    assert!(lock(&upstream.shared.state).pending.is_empty());
    // Time is a limit too.
    let limit = Duration::from_millis(20);
    let late = upstream.request("x", Map::new(), limit, None).await;
    assert_eq!(late, Err(Failure::Late(limit)));
    server.hear().await;
    assert_eq!(server.hear().await["method"], "notifications/cancelled");
}

#[tokio::test]
async fn a_server_that_does_not_read_stops_nobody() {
    let (upstream, server) = pair();
    let big = Map::from_iter([("x".to_owned(), Value::String("x".repeat(1 << 20)))]);
    let limit = Duration::from_millis(20);
    for _ in 0..200 {
        let late = upstream.request("x", big.clone(), limit, None).await;
        assert_eq!(late, Err(Failure::Late(limit)));
    }
    assert!(lock(&upstream.shared.state).pending.is_empty());
    drop(server);
}

#[tokio::test]
async fn the_end_of_the_server_is_the_end_of_every_wait() {
    let (upstream, mut server) = pair();
    let request = ask(&upstream);
    server.hear().await;
    server.end.take().unwrap().send("exit status 3".into()).unwrap();
    server.write = None;
    let wanted = Failure::Ended("exit status 3".into());
    assert_eq!(request.await.unwrap(), Err(wanted.clone()));
    let next = upstream.request("x", Map::new(), PATIENCE, None).await;
    assert_eq!(next, Err(wanted));
    assert_eq!(upstream.ended().as_deref(), Some("exit status 3"));
    // One that only closes its output has ended as far as anybody can tell.
    let (upstream, mut server) = pair();
    let request = ask(&upstream);
    server.hear().await;
    (server.end, server.write) = (None, None);
    let wanted = Failure::Ended("it closed its output".into());
    assert_eq!(request.await.unwrap(), Err(wanted));
    // Its input ends when ours does.
    upstream.close_input();
    let mut rest = Vec::new();
    server.read.read_to_end(&mut rest).await.unwrap();
    let closed = upstream.request("x", Map::new(), PATIENCE, None).await;
    assert!(matches!(closed, Err(Failure::Ended(_))));
}
