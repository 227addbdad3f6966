//! `casulo mcp --connect`: MCP on standard input and output, answered by a `casulo serve` elsewhere.
//!
//! A client restarts its stdio servers at will; the sandboxes live on in the server. Messages pass as
//! they are, a request of MCP to an HTTP request each:
//!
//! * A request that stands alone (2026-07-28) gets the headers that repeat its content; when the client
//!   cancels it, the HTTP stream is closed, which is how that revision cancels over HTTP.
//! * `initialize` opens a session, whose id goes with what follows. If the server has forgotten it,
//!   because it was restarted, the bridge repeats the handshake and the client need not know.
//!
//! Whatever goes wrong, a request gets an answer.

mod endpoint;
#[cfg(feature = "wrap")]
pub(crate) mod exec;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use sse_stream::SseStream;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

pub use endpoint::{Endpoint, EndpointError, is_local};

use endpoint::SendError;

use crate::lines::{Line, LineReader};

/// Most bytes of a message, as the server has it too.
const MAX_MESSAGE: usize = 4 << 20;
/// Most bytes of an error's body that are passed on.
const MAX_ERROR: usize = 64 * 1024;
/// Answers that may wait for a client that does not read.
const WAITING: usize = 64;
/// Where a request of MCP 2026-07-28 says its revision.
const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";
const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const NAME: HeaderName = HeaderName::from_static("mcp-name");

/// Passes messages between `input`, `output` and the server until the input ends. Calls that run then
/// are given up.
///
/// # Errors
/// The input cannot be read, or the output not be written.
pub async fn run(
    endpoint: Endpoint,
    input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin + Send + 'static,
) -> io::Result<()> {
    let (out, mut lines) = mpsc::channel::<String>(WAITING);
    let writer = tokio::spawn(async move {
        while let Some(mut line) = lines.recv().await {
            line.push('\n');
            output.write_all(line.as_bytes()).await?;
            output.flush().await?;
        }
        Ok::<_, io::Error>(())
    });
    let bridge =
        Arc::new(Bridge { endpoint, out, session: Mutex::default(), calls: Mutex::default() });
    let mut input = LineReader::new(input, MAX_MESSAGE);
    let mut tasks = JoinSet::new();
    let read = async {
        while let Some(line) = input.next().await? {
            bridge.line(line, &mut tasks).await;
            while tasks.try_join_next().is_some() {}
        }
        Ok(())
    };
    let result = tokio::select! {
        result = read => result,
        // Nobody reads the answers any more.
        () = bridge.out.closed() => Ok(()),
    };
    // Dropped connections cancel what stands alone; the end of the session cancels the rest.
    tasks.shutdown().await;
    bridge.end_session().await;
    drop(bridge);
    match writer.await {
        Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => result,
    }
}

/// What is known of the session of a client that has begun with `initialize`.
#[derive(Clone, Debug, Default)]
struct Session {
    id: Option<HeaderValue>,
    version: Option<HeaderValue>,
    /// The first request, to repeat it.
    initialize: Option<Value>,
}

struct Bridge {
    endpoint: Endpoint,
    out: mpsc::Sender<String>,
    session: Mutex<Session>,
    /// Calls that stand alone, by their ids as JSON.
    calls: Mutex<HashMap<String, CancellationToken>>,
}

/// A poisoned lock means that a task panicked; what it guards is replaced as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a response holds.
enum Messages {
    One(Option<Value>),
    Stream(Box<SseStream<Incoming>>),
}

/// Why a request has no answer from the server; what the client is told.
struct Failure {
    /// The server's own JSON-RPC error, if it sent one.
    body: Option<Value>,
    message: String,
}

impl Bridge {
    async fn line(self: &Arc<Self>, line: Line, tasks: &mut JoinSet<()>) {
        let message = match line {
            Line::TooLong => {
                let text = format!("a message has at most {MAX_MESSAGE} bytes");
                return self.error(Value::Null, -32600, &text).await;
            }
            Line::Whole(line) if line.iter().all(u8::is_ascii_whitespace) => return,
            Line::Whole(line) => match serde_json::from_slice::<Value>(&line) {
                Ok(message) => message,
                Err(error) => {
                    let text = format!("this is no JSON: {error}");
                    return self.error(Value::Null, -32700, &text).await;
                }
            },
        };
        let method = message.get("method").and_then(Value::as_str).map(str::to_owned);
        let id = message.get("id").cloned();
        match (method.as_deref(), id) {
            (Some("initialize"), Some(id)) => self.initialize(id, message).await,
            (Some(_), Some(id)) => {
                let (bridge, cancel) = (Arc::clone(self), CancellationToken::new());
                let key = id.to_string();
                let alone = stands_alone(&message);
                if alone {
                    lock(&self.calls).insert(key.clone(), cancel.clone());
                }
                tasks.spawn(async move {
                    tokio::select! {
                        () = bridge.call(id, &message) => {}
                        () = cancel.cancelled() => {}
                    }
                    if alone {
                        lock(&bridge.calls).remove(&key);
                    }
                });
            }
            (Some("notifications/cancelled"), None) => {
                let id = message.pointer("/params/requestId").map(Value::to_string);
                let call = id.and_then(|id| lock(&self.calls).remove(&id));
                match call {
                    Some(call) => call.cancel(),
                    None => self.tell(&message).await,
                }
            }
            // An answer of the client's, or a notification.
            (None, Some(_)) if message.get("result").or(message.get("error")).is_some() => {
                self.tell(&message).await;
            }
            (Some(_), None) => self.tell(&message).await,
            (None, id) => {
                let id = id.unwrap_or_default();
                self.error(id, -32600, "this is no JSON-RPC message of MCP").await;
            }
        }
    }

    /// Something that wants no answer.
    async fn tell(&self, message: &Value) {
        // There is nobody to complain to: a notification has no answer.
        let _ = self.exchange(message).await;
    }

    async fn initialize(&self, id: Value, message: Value) {
        *lock(&self.session) = Session { initialize: Some(message.clone()), ..Session::default() };
        match self.handshake(&message).await {
            Ok(answer) => self.say(&answer).await,
            Err(failure) => self.fail(id, failure).await,
        }
    }

    /// Opens a session, and gives the server's answer.
    async fn handshake(&self, initialize: &Value) -> Result<Value, Failure> {
        let response =
            self.post(initialize, &Session::default()).await.map_err(|e| self.lost(&e))?;
        let session = response.headers().get(SESSION).cloned();
        let mut answer = None;
        let mut messages = self.messages(response).await?;
        while let Some(message) = self.next(&mut messages).await? {
            if message.get("id") == initialize.get("id") && message.get("method").is_none() {
                answer = Some(message);
            }
        }
        let answer = answer.ok_or_else(|| self.silent())?;
        let version = answer.pointer("/result/protocolVersion").and_then(Value::as_str);
        let version = version.and_then(|version| HeaderValue::from_str(version).ok());
        let mut known = lock(&self.session);
        (known.id, known.version) = (session, version);
        drop(known);
        Ok(answer)
    }

    /// Passes a request on, and everything that the server says to it.
    async fn call(&self, id: Value, message: &Value) {
        if let Err(failure) = self.answered(&id, message).await {
            self.fail(id, failure).await;
        }
    }

    async fn answered(&self, id: &Value, message: &Value) -> Result<(), Failure> {
        let response = self.exchange(message).await?;
        let mut answered = false;
        let mut messages = self.messages(response).await?;
        while let Some(message) = self.next(&mut messages).await? {
            answered |= message.get("id") == Some(id) && message.get("method").is_none();
            self.say(&message).await;
        }
        if answered { Ok(()) } else { Err(self.silent()) }
    }

    /// Sends a message; if the server has forgotten the session, opens a new one first.
    async fn exchange(&self, message: &Value) -> Result<Response<Incoming>, Failure> {
        let session = lock(&self.session).clone();
        let response = self.post(message, &session).await.map_err(|error| self.lost(&error))?;
        let forgotten = response.status() == StatusCode::NOT_FOUND && session.id.is_some();
        if !forgotten || stands_alone(message) {
            return Ok(response);
        }
        let Some(initialize) = session.initialize else { return Ok(response) };
        // Another message may have done it meanwhile.
        if lock(&self.session).id == session.id {
            self.handshake(&initialize).await?;
            let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
            let session = lock(&self.session).clone();
            self.post(&initialized, &session).await.map_err(|error| self.lost(&error))?;
        }
        let session = lock(&self.session).clone();
        self.post(message, &session).await.map_err(|error| self.lost(&error))
    }

    async fn post(
        &self,
        message: &Value,
        session: &Session,
    ) -> Result<Response<Incoming>, SendError> {
        let mut request = Request::new(Full::from(message.to_string()));
        *request.method_mut() = Method::POST;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let both = HeaderValue::from_static("application/json, text/event-stream");
        headers.insert(ACCEPT, both);
        let mut set = |name: HeaderName, value: Option<HeaderValue>| {
            if let Some(value) = value {
                headers.insert(name, value);
            }
        };
        if stands_alone(message) {
            let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str);
            let header = |text: &str| HeaderValue::from_str(text).ok();
            let version = message.pointer("/params/_meta").and_then(|meta| meta.get(VERSION_KEY));
            set(VERSION, version.and_then(Value::as_str).and_then(header));
            set(METHOD, text("/method").and_then(header));
            set(NAME, text("/params/name").or(text("/params/uri")).and_then(header));
        } else {
            set(SESSION, session.id.clone());
            set(VERSION, session.version.clone());
        }
        self.endpoint.send(request).await
    }

    /// The messages of a response: one as JSON, or a stream of events.
    async fn messages(&self, response: Response<Incoming>) -> Result<Messages, Failure> {
        let status = response.status();
        let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let is_stream =
            kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("text/event-stream"));
        if status.is_success() && is_stream {
            return Ok(Messages::Stream(Box::new(SseStream::new(response.into_body()))));
        }
        let limit = if status.is_success() { usize::MAX } else { MAX_ERROR };
        let body = Limited::new(response.into_body(), limit).collect().await;
        let body = body.map_err(|error| self.broken(&*error))?.to_bytes();
        if !status.is_success() {
            return Err(self.refused(status, &body));
        }
        let message = serde_json::from_slice(&body).map_err(|error| self.broken(&error))?;
        Ok(Messages::One(Some(message)))
    }

    async fn next(&self, messages: &mut Messages) -> Result<Option<Value>, Failure> {
        let events = match messages {
            Messages::One(message) => return Ok(message.take()),
            Messages::Stream(events) => events,
        };
        while let Some(event) = events.next().await {
            let data = event.map_err(|error| self.broken(&error))?.data.unwrap_or_default();
            // An event without data only says how to come back.
            if !data.is_empty() {
                return serde_json::from_str(&data).map_err(|error| self.broken(&error));
            }
        }
        Ok(None)
    }

    async fn end_session(&self) {
        let session = std::mem::take(&mut *lock(&self.session));
        let Some(id) = session.id else { return };
        let mut request = Request::new(Full::default());
        *request.method_mut() = Method::DELETE;
        request.headers_mut().insert(SESSION, id);
        if let Some(version) = session.version {
            request.headers_mut().insert(VERSION, version);
        }
        // Else it ends by itself.
        let limit = std::time::Duration::from_secs(2);
        let _ = tokio::time::timeout(limit, self.endpoint.send(request)).await;
    }

    fn lost(&self, error: &SendError) -> Failure {
        let outcome = match error {
            SendError::Connect(_) => "the request has not been sent",
            SendError::Exchange(_) => "it is not known whether the request took effect",
        };
        Failure { body: None, message: format!("{}: {error}; {outcome}", self.endpoint) }
    }

    fn broken(&self, error: &(impl std::fmt::Display + ?Sized)) -> Failure {
        let message = format!(
            "{}: the answer broke off: {error}; it is not known whether the request took effect",
            self.endpoint
        );
        Failure { body: None, message }
    }

    fn silent(&self) -> Failure {
        self.broken("there was none")
    }

    fn refused(&self, status: StatusCode, body: &Bytes) -> Failure {
        let value = serde_json::from_slice::<Value>(body).ok();
        let is_error = value.as_ref().is_some_and(|value| value.get("error").is_some());
        let message = self.endpoint.refused(status, body);
        Failure { body: value.filter(|_| is_error), message }
    }

    async fn fail(&self, id: Value, failure: Failure) {
        match failure.body {
            Some(mut body) => {
                if let Some(body) = body.as_object_mut() {
                    body.insert("id".to_owned(), id);
                }
                self.say(&body).await;
            }
            None => self.error(id, -32603, &failure.message).await,
        }
    }

    async fn error(&self, id: Value, code: i32, message: &str) {
        let error = json!({"code": code, "message": message});
        self.say(&json!({"jsonrpc": "2.0", "id": id, "error": error})).await;
    }

    async fn say(&self, message: &Value) {
        // The client has gone; `run` sees that too.
        let _ = self.out.send(message.to_string()).await;
    }
}

/// Whether a message names its revision itself, as those of MCP 2026-07-28 do.
fn stands_alone(message: &Value) -> bool {
    message.pointer("/params/_meta").and_then(|meta| meta.get(VERSION_KEY)).is_some()
}

#[cfg(test)]
mod tests;
