//! The HTTP layer over real sockets. Nothing here needs a guest.

use std::path::Path;
use std::time::Duration;

use casulo_protocol::spec::SandboxSpec;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::*;
use crate::gateway::Limits;
use crate::{Runtime, RuntimeConfig};

pub(crate) const ANA: &str = "ana-0123456789abcdef0123456789abcdef";
pub(super) const BOB: &str = "bob-0123456789abcdef0123456789abcdef";
/// A bound against hanging, not a measurement.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn gateway() -> Arc<Gateway> {
    gateway_with(Limits::default())
}

pub(super) fn gateway_with(limits: Limits) -> Arc<Gateway> {
    // Never started: no test makes a sandbox.
    let vmm = std::env::current_exe().unwrap();
    let runtime = Runtime::open(RuntimeConfig::in_home(Path::new("/nonexistent"), vmm)).unwrap();
    let host = casulo_protocol::result::HostKind::Native;
    Arc::new(Gateway::new(Arc::new(runtime), SandboxSpec::default(), limits, host).unwrap())
}

pub(crate) fn tokens() -> Vec<Entry> {
    [("ana", ANA), ("bob", BOB)].map(|(n, t)| Entry { name: n.into(), token: t.into() }).to_vec()
}

/// A server that runs until it is dropped.
pub(crate) struct Running {
    pub(crate) address: Address,
    pub(crate) stop: CancellationToken,
    pub(crate) task: tokio::task::JoinHandle<()>,
    pub(super) gateway: Arc<Gateway>,
}

impl Running {
    pub(crate) async fn start(config: Config) -> Self {
        Self::serving(gateway(), config).await
    }

    pub(super) async fn serving(gateway: Arc<Gateway>, config: Config) -> Self {
        let server = HttpServer::bind(Arc::clone(&gateway), config).await.unwrap();
        let (address, stop) = (server.address().clone(), CancellationToken::new());
        let task = tokio::spawn(server.serve(stop.clone(), CancellationToken::new()));
        Self { address, stop, task, gateway }
    }

    pub(crate) async fn local() -> Self {
        Self::start(Config::new("127.0.0.1:0".parse().unwrap(), tokens())).await
    }

    pub(super) async fn connect(&self) -> TcpStream {
        let Address::Tcp(address) = &self.address else { panic!("no TCP") };
        TcpStream::connect(address).await.unwrap()
    }

    pub(super) async fn send(&self, request: Request<Full<Bytes>>) -> Reply {
        send(self.connect().await, request).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) bytes: Bytes,
    /// The bytes as text.
    pub(super) body: String,
}

impl Reply {
    /// The JSON-RPC message: the body, or the last event of a stream.
    pub(super) fn json(&self) -> Value {
        let text = self.body.lines().filter_map(|line| line.strip_prefix("data:")).next_back();
        serde_json::from_str(text.unwrap_or(&self.body))
            .unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }
}

async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Reply {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let work = async {
        let response = sender.send_request(request).await.unwrap();
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).into_owned(),
            bytes: body,
        }
    };
    let reply = tokio::time::timeout(PATIENCE, work).await.unwrap();
    connection.abort();
    reply
}

pub(super) fn get(path: &str, token: Option<&str>) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    *request.uri_mut() = path.parse().unwrap();
    let headers = request.headers_mut();
    headers.insert(header::HOST, HeaderValue::from_static("localhost"));
    if let Some(token) = token {
        let value = HeaderValue::try_from(format!("Bearer {token}")).unwrap();
        headers.insert(header::AUTHORIZATION, value);
    }
    request
}

pub(super) fn post(token: Option<&str>, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let mut request = get("/mcp", token).map(|_| Full::new(body.into()));
    *request.method_mut() = Method::POST;
    let headers = request.headers_mut();
    let json = HeaderValue::from_static("application/json");
    headers.insert(header::CONTENT_TYPE, json);
    let both = HeaderValue::from_static("application/json, text/event-stream");
    headers.insert(header::ACCEPT, both);
    request
}

/// A request of MCP 2026-07-28.
pub(super) fn modern(token: Option<&str>, method: &str, mut params: Value) -> Request<Full<Bytes>> {
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    });
    let name = params.get("name").or(params.get("uri")).and_then(Value::as_str).map(str::to_owned);
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let mut request = post(token, body.to_string());
    let headers = request.headers_mut();
    headers.insert("mcp-protocol-version", HeaderValue::from_static("2026-07-28"));
    headers.insert("mcp-method", method.parse().unwrap());
    if let Some(name) = name {
        headers.insert("mcp-name", name.parse().unwrap());
    }
    request
}

fn list(token: Option<&str>) -> Request<Full<Bytes>> {
    modern(token, "tools/list", json!({}))
}

/// The first request of MCP 2025-11-25.
pub(super) fn initialize(token: Option<&str>) -> Request<Full<Bytes>> {
    let body = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }});
    post(token, body.to_string())
}

pub(super) fn in_session(
    mut request: Request<Full<Bytes>>,
    session: &HeaderValue,
) -> Request<Full<Bytes>> {
    request.headers_mut().insert("mcp-session-id", session.clone());
    request.headers_mut().insert("mcp-protocol-version", HeaderValue::from_static("2025-11-25"));
    request
}

fn legacy_list(token: Option<&str>, session: &HeaderValue) -> Request<Full<Bytes>> {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}});
    in_session(post(token, body.to_string()), session)
}

#[tokio::test]
async fn only_a_callers_token_opens() {
    let server = Running::local().await;
    for token in [Some(ANA), Some(BOB)] {
        let reply = server.send(list(token)).await;
        assert_eq!(reply.status, StatusCode::OK, "{reply:?}");
    }
    for token in [None, Some(""), Some("wrong"), Some(&ANA[..ANA.len() - 1])] {
        for request in [
            list(token),
            initialize(token),
            get("/metrics", token),
            get("/x", token),
            get("/v1/sandboxes/a/files", token),
            get("/v1/sandboxes/a/exec", token),
        ] {
            let reply = server.send(request).await;
            assert_eq!(reply.status, StatusCode::UNAUTHORIZED, "{token:?} {reply:?}");
            assert!(reply.headers[header::WWW_AUTHENTICATE].to_str().unwrap().contains("Bearer"));
            assert_eq!(reply.json()["class"], "denied");
        }
    }
    let reply = server.send(get("/healthz", None)).await;
    assert_eq!((reply.status, reply.body.as_str()), (StatusCode::OK, "ok\n"));
    assert_eq!(server.send(get("/x", Some(ANA))).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn without_tokens_everybody_on_this_machine_may_call_if_so_asked() {
    let mut config = Config::new("127.0.0.1:0".parse().unwrap(), Vec::new());
    config.anonymous = true;
    let server = Running::start(config).await;
    assert_eq!(server.send(list(None)).await.status, StatusCode::OK);
}

#[tokio::test]
async fn foreign_hosts_and_origins_are_refused_before_anything_else() {
    let server = Running::local().await;
    for (name, value, status) in [
        (header::HOST, "evil.com", StatusCode::FORBIDDEN),
        (header::HOST, "localhost.evil.com:80", StatusCode::FORBIDDEN),
        (header::HOST, "127.0.0.1:7420", StatusCode::OK),
        (header::ORIGIN, "http://evil.com", StatusCode::FORBIDDEN),
        (header::ORIGIN, "null", StatusCode::FORBIDDEN),
        (header::ORIGIN, "http://localhost:3000", StatusCode::OK),
    ] {
        for mut request in [list(Some(ANA)), get("/healthz", None), get("/metrics", Some(ANA))] {
            request.headers_mut().insert(&name, value.parse().unwrap());
            let reply = server.send(request).await;
            assert_eq!(reply.status, status, "{name}: {value}: {reply:?}");
        }
    }
    // No page of another origin is ever told that it may read an answer.
    let mut request = list(Some(ANA));
    request.headers_mut().insert(header::ORIGIN, "http://localhost:3000".parse().unwrap());
    let reply = server.send(request).await;
    assert!(!reply.headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN));
}

#[tokio::test]
async fn both_eras_are_served_at_one_address() {
    let server = Running::local().await;
    let discovered = server.send(modern(Some(ANA), "server/discover", json!({}))).await.json();
    let versions = discovered["result"]["supportedVersions"].as_array().unwrap();
    assert!(versions.contains(&json!("2026-07-28")) && versions.contains(&json!("2025-11-25")));
    let server_info = &discovered["result"]["_meta"]["io.modelcontextprotocol/serverInfo"];
    assert_eq!(server_info["name"], "casulo", "{discovered}");

    let hello = server.send(initialize(Some(ANA))).await;
    let result = &hello.json()["result"];
    assert_eq!(result["protocolVersion"], "2025-11-25");
    assert_eq!(result["serverInfo"]["name"], "casulo");
    let session = &hello.headers["mcp-session-id"];
    let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let request = in_session(post(Some(ANA), initialized.to_string()), session);
    assert_eq!(server.send(request).await.status, StatusCode::ACCEPTED);

    let old = server.send(legacy_list(Some(ANA), session)).await.json();
    let new = server.send(list(Some(ANA))).await.json();
    assert_eq!(old["result"]["tools"], new["result"]["tools"]);
    assert!(!new["result"]["tools"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn modern_requests_are_posts() {
    let server = Running::local().await;
    for method in [Method::GET, Method::DELETE, Method::PUT] {
        let mut request = list(Some(ANA));
        *request.method_mut() = method.clone();
        assert_eq!(server.send(request).await.status, StatusCode::METHOD_NOT_ALLOWED, "{method}");
    }
    let mut request = get("/healthz", None);
    *request.method_mut() = Method::POST;
    assert_eq!(server.send(request).await.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn a_session_is_of_no_use_to_another_caller() {
    let server = Running::local().await;
    let session = server.send(initialize(Some(ANA))).await.headers["mcp-session-id"].clone();
    let end = |token| {
        let mut request = in_session(get("/mcp", Some(token)), &session);
        *request.method_mut() = Method::DELETE;
        request
    };
    let status = async |request| server.send(request).await.status;
    assert_eq!(status(legacy_list(Some(BOB), &session)).await, StatusCode::NOT_FOUND);
    status(end(BOB)).await;
    assert_eq!(status(legacy_list(Some(ANA), &session)).await, StatusCode::OK);
    assert_eq!(status(end(ANA)).await, StatusCode::NO_CONTENT);
    assert_eq!(status(legacy_list(Some(ANA), &session)).await, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_caller_with_too_many_sessions_is_told_and_others_are_not_in_its_way() {
    let server = Running::local().await;
    for _ in 0..app::MAX_SESSIONS {
        assert_eq!(server.send(initialize(Some(ANA))).await.status, StatusCode::OK);
    }
    let reply = server.send(initialize(Some(ANA))).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(reply.json()["class"], "capacity");
    assert_eq!(server.send(initialize(Some(BOB))).await.status, StatusCode::OK);
    assert_eq!(server.send(list(Some(ANA))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn what_is_no_message_is_a_json_rpc_error() {
    let server = Running::local().await;
    let deep = "[".repeat(100_000);
    for (body, code, id) in [
        (&b"hello"[..], -32700, Value::Null),
        (b"", -32700, Value::Null),
        (b"{\"jsonrpc\":\"2.0\",", -32700, Value::Null),
        (b"\"\xff\"", -32700, Value::Null),
        (deep.as_bytes(), -32700, Value::Null),
        (b"[]", -32600, Value::Null),
        (b"7", -32600, Value::Null),
        (b"{\"id\":5}", -32600, json!(5)),
        (b"{\"jsonrpc\":\"1.0\",\"id\":\"a\",\"method\":\"tools/list\"}", -32600, json!("a")),
        (b"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"tools/list\"}", -32600, Value::Null),
    ] {
        let reply = server.send(post(Some(ANA), body.to_vec())).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{reply:?}");
        let error = reply.json();
        assert_eq!(error["error"]["code"], code, "{error}");
        assert_eq!(error.get("id").cloned().unwrap_or_default(), id, "{error}");
        assert_eq!(error["jsonrpc"], "2.0");
    }
}

#[tokio::test]
async fn a_request_has_at_most_four_mebibytes() {
    let server = Running::local().await;
    let message = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
    for (length, status) in
        [(app::MAX_BODY, StatusCode::ACCEPTED), (app::MAX_BODY + 1, StatusCode::PAYLOAD_TOO_LARGE)]
    {
        let body = message.clone() + &" ".repeat(length - message.len());
        let session = server.send(initialize(Some(ANA))).await.headers["mcp-session-id"].clone();
        let reply = server.send(in_session(post(Some(ANA), body), &session)).await;
        assert_eq!(reply.status, status, "{reply:?}");
    }
    // Without a length, and without an end.
    let mut stream = server.connect().await;
    let head = format!(
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ANA}\r\n\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let endless = tokio::spawn(async move {
        let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
        while writer.write_all(chunk.as_bytes()).await.is_ok() {}
    });
    let mut answer = [0; 12];
    tokio::time::timeout(PATIENCE, reader.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    drop(reader);
    tokio::time::timeout(PATIENCE, endless).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_call_without_a_guest_is_a_tool_error_and_is_counted() {
    let server = Running::local().await;
    let arguments =
        json!({"name": "destroy_sandbox", "arguments": {"sandbox_id": format!("sb_{:032}", 1)}});
    let reply = server.send(modern(Some(ANA), "tools/call", arguments)).await.json();
    assert_eq!(reply["result"]["isError"], true, "{reply}");
    assert!(reply["result"].get("structuredContent").is_none(), "it would not fit the schema");
    let text = reply["result"]["content"][0]["text"].as_str().unwrap();
    let error: Value = serde_json::from_str(text).unwrap();
    assert_eq!(error["class"], "sandbox_not_found");
    let metrics = server.send(get("/metrics", Some(BOB))).await;
    assert!(metrics.headers[header::CONTENT_TYPE].to_str().unwrap().starts_with("text/plain"));
    for line in [
        "casulo_tool_call_seconds_count{tool=\"destroy_sandbox\",outcome=\"error\"} 1",
        "casulo_http_requests_total{code=\"200\"} 1",
        "casulo_http_connections_total 2",
        "casulo_sandboxes 0",
    ] {
        assert!(metrics.body.lines().any(|l| l == line), "no {line} in {}", metrics.body);
    }
    assert!(!metrics.body.contains("ana"));
}

#[tokio::test]
async fn this_user_needs_no_token_on_a_socket_in_the_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("casulo.sock");
    let server = Running::start(Config::new(Address::Unix(path.clone()), tokens())).await;
    let status =
        async |request| send(UnixStream::connect(&path).await.unwrap(), request).await.status;
    assert_eq!(status(list(None)).await, StatusCode::OK);
    assert_eq!(status(list(Some(ANA))).await, StatusCode::OK);
    assert_eq!(status(list(Some("wrong"))).await, StatusCode::UNAUTHORIZED);
    let mut request = list(None);
    request.headers_mut().insert(header::ORIGIN, "http://evil.com".parse().unwrap());
    assert_eq!(status(request).await, StatusCode::FORBIDDEN);
    server.stop.cancel();
    while path.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Files of a certificate for `localhost` and its key, and what trusts it.
fn certificate(folder: &Path) -> (PathBuf, PathBuf, RootCertStore) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    (certificate, key, roots)
}

fn connector(roots: RootCertStore) -> TlsConnector {
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

#[tokio::test]
async fn tls_with_a_certificate_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key, roots) = certificate(folder.path());
    let mut config = Config::new("127.0.0.1:0".parse().unwrap(), tokens());
    config.tls = Some((certificate, key));
    let server = Running::start(config).await;
    let name = ServerName::try_from("localhost").unwrap();
    let stream = connector(roots).connect(name.clone(), server.connect().await).await.unwrap();
    assert_eq!(send(stream, list(Some(ANA))).await.status, StatusCode::OK);
    // Not trusted without the certificate.
    let other = connector(RootCertStore::empty()).connect(name, server.connect().await).await;
    assert!(other.is_err());
    // Who speaks no TLS gets no HTTP.
    let mut plain = server.connect().await;
    plain.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(PATIENCE, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"));
}

#[tokio::test]
async fn a_wrong_certificate_is_told_before_listening() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key, _) = self::certificate(folder.path());
    let (_, other_key, _) = {
        let other = folder.path().join("other");
        std::fs::create_dir(&other).unwrap();
        self::certificate(&other)
    };
    let missing = folder.path().join("missing.pem");
    for (certificate, key, words) in [
        (&missing, &key, "cannot read the certificates in"),
        (&certificate, &missing, "cannot read the private key in"),
        (&certificate, &certificate, "cannot read the private key in"),
        (&certificate, &other_key, "cannot be used"),
    ] {
        let mut config = Config::new("127.0.0.1:0".parse().unwrap(), tokens());
        config.tls = Some((certificate.clone(), key.clone()));
        let error = HttpServer::bind(gateway(), config).await.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn what_other_machines_reach_has_tokens_and_tls() {
    let bind = async |listen: &str, change: fn(&mut Config)| {
        let mut config = Config::new(listen.parse().unwrap(), tokens());
        change(&mut config);
        HttpServer::bind(gateway(), config).await.map(drop)
    };
    let bare = bind("0.0.0.0:0", |_| {}).await;
    assert!(matches!(bare, Err(ServeError::PlainToOthers(_))), "{bare:?}");
    let anonymous = bind("[::]:0", |config| {
        config.anonymous = true;
        config.plain_http = true;
    });
    assert!(matches!(anonymous.await, Err(ServeError::OpenToOthers(_))));
    let nobody = |config: &mut Config| config.tokens.clear();
    assert!(matches!(bind("127.0.0.1:0", nobody).await, Err(ServeError::NoToken(_))));
    let nobody = |config: &mut Config| {
        config.tokens.clear();
        config.plain_http = true;
    };
    assert!(matches!(bind("0.0.0.0:0", nobody).await, Err(ServeError::NoToken(_))));
    assert!(bind("0.0.0.0:0", |config| config.plain_http = true).await.is_ok());
}

#[tokio::test]
async fn while_draining_a_running_call_is_answered_and_new_ones_are_refused() {
    let server = Running::local().await;
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}).to_string();
    let mut running = server.connect().await;
    // A call is running as soon as its head has arrived.
    let head = format!(
        "POST /mcp HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ANA}\r\n\
         Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    running.write_all(head.as_bytes()).await.unwrap();
    let in_flight = async || {
        let text = server.send(get("/metrics", Some(ANA))).await.body;
        text.lines().any(|line| line == "casulo_http_in_flight 1")
    };
    while !in_flight().await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    server.stop.cancel();
    let health = async || server.send(get("/healthz", None)).await;
    while health().await.status == StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(health().await.body, "draining\n");
    let refused = server.send(list(Some(ANA))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers.contains_key(header::RETRY_AFTER));
    assert_eq!(refused.json()["retry"], "yes");
    let mut command = post(Some(ANA), "{}");
    *command.uri_mut() = "/v1/sandboxes/sb_1/exec".parse().unwrap();
    assert_eq!(server.send(command).await.status, StatusCode::SERVICE_UNAVAILABLE);
    running.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = running.read_to_string(&mut answer);
    tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
    assert!(!answer.starts_with("HTTP/1.1 503"), "{answer}");
    // And then it ends, although the drain time is not over.
    while !server.task.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
