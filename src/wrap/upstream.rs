//! The client's side of a wrapped server: requests go in as lines of JSON-RPC, answers come out.
//!
//! The server is in a guest and may be hostile. Only answers to our own requests, progress of those,
//! and the word that a list has changed mean anything here. What it asks of us is refused. A line that
//! is too long, or no JSON, may have been any answer, so every request that waits is told. Nothing that
//! the server sends is queued without a bound, and nothing waits for it without a time limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::said::Said;
use crate::agent::{bounded, quote};
use crate::lines::{Line, LineReader};

/// Longest line of a server in bytes.
pub(super) const MAX_LINE: usize = 8 << 20;
/// Messages that wait until the server reads.
const QUEUE: usize = 64;
/// How long the reason for the end of a server is waited for.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Why a request has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server answered with an error.
    Error {
        /// JSON-RPC's code.
        code: i64,
        /// A sentence, safe to show.
        message: String,
    },
    /// It did not answer in time.
    Late(Duration),
    /// Its answer cannot be used, or may have been what could not be used.
    Broken(String),
    /// It has ended.
    Ended(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error { code, message } => write!(f, "the server's error {code}: {message}"),
            Self::Late(limit) => {
                write!(f, "the server did not answer within {} seconds", limit.as_secs_f32())
            }
            Self::Broken(why) => write!(f, "the server {why}"),
            Self::Ended(why) => write!(f, "the server has ended: {why}"),
        }
    }
}

/// What a server tells of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Tools,
    Resources,
    Prompts,
}

type Answer = Result<Value, Failure>;

/// A request that waits.
struct Pending {
    answer: oneshot::Sender<Answer>,
    progress: Option<mpsc::Sender<Value>>,
}

#[derive(Default)]
struct State {
    next: u64,
    pending: HashMap<u64, Pending>,
    ended: Option<String>,
    /// `_meta` of every request to a server of 2026-07-28.
    meta: Option<Map<String, Value>>,
}

struct Shared {
    state: Mutex<State>,
    out: Mutex<Option<mpsc::Sender<Vec<u8>>>>,
    said: Said,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running server.
pub(super) struct Upstream {
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
    writer: JoinHandle<()>,
}

impl Upstream {
    /// Speaks with the server behind `read` and `write`. `end` gives the reason once it has ended;
    /// `notes` gets what it tells. Must be called inside tokio.
    pub(super) fn new(
        read: impl AsyncRead + Send + Unpin + 'static,
        mut write: impl AsyncWrite + Send + Unpin + 'static,
        end: oneshot::Receiver<String>,
        notes: mpsc::Sender<Note>,
        said: Said,
    ) -> Self {
        let (out, mut lines) = mpsc::channel::<Vec<u8>>(QUEUE);
        let writer = tokio::spawn(async move {
            while let Some(line) = lines.recv().await {
                if write.write_all(&line).await.is_err() || write.flush().await.is_err() {
                    return;
                }
            }
            // A server that reads to the end of its input ends now.
            let _ = write.shutdown().await;
        });
        let shared = Arc::new(Shared { state: Mutex::default(), out: Mutex::new(Some(out)), said });
        let reader = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move {
                let mut lines = LineReader::new(read, MAX_LINE);
                loop {
                    match lines.next().await {
                        Ok(Some(Line::Whole(line))) => shared.line(&line, &notes),
                        Ok(Some(Line::TooLong)) => {
                            let why = format!("sent a line of more than {MAX_LINE} bytes");
                            shared.fail_all(&Failure::Broken(why));
                        }
                        Ok(None) | Err(_) => break,
                    }
                }
                let why = tokio::time::timeout(LAST_WORDS, end).await;
                let why = why.ok().and_then(Result::ok);
                shared.end(&why.unwrap_or_else(|| "it closed its output".to_owned()));
            }
        });
        Self { shared, reader, writer }
    }

    /// Sends `meta` with every request from now on.
    pub(super) fn set_meta(&self, meta: Map<String, Value>) {
        lock(&self.shared.state).meta = Some(meta);
    }

    /// Why the server has ended, if it has.
    pub(super) fn ended(&self) -> Option<String> {
        lock(&self.shared.state).ended.clone()
    }

    /// Sends a request and waits for its result. Dropping the future cancels it at the server.
    pub(super) async fn request(
        &self,
        method: &str,
        params: Map<String, Value>,
        limit: Duration,
        progress: Option<mpsc::Sender<Value>>,
    ) -> Answer {
        let (tell, answer) = oneshot::channel();
        let wants_progress = progress.is_some();
        let (id, meta) = {
            let mut state = lock(&self.shared.state);
            if let Some(why) = &state.ended {
                return Err(Failure::Ended(why.clone()));
            }
            state.next = state.next.saturating_add(1);
            let id = state.next;
            state.pending.insert(id, Pending { answer: tell, progress });
            (id, state.meta.clone())
        };
        // Forgets the request and tells the server, however this ends before the answer.
        let mut asked = Asked { shared: &self.shared, id, sent: false };
        let line = message(id, method, params, meta, wants_progress);
        let exchange = async {
            self.shared.send(line).await?;
            asked.sent = true;
            answer.await.unwrap_or_else(|_| Err(Failure::Broken("was not heard".to_owned())))
        };
        let result = match tokio::time::timeout(limit, exchange).await {
            Ok(result) => result,
            Err(_) => Err(Failure::Late(limit)),
        };
        drop(asked);
        result
    }

    /// Sends a notification; one that does not fit into the queue is lost.
    pub(super) fn notify(&self, method: &str, params: Value) {
        self.shared.try_send(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    /// Closes the server's input; what it still says is heard.
    pub(super) fn close_input(&self) {
        *lock(&self.shared.out) = None;
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.reader.abort();
        self.writer.abort();
    }
}

fn message(
    id: u64,
    method: &str,
    mut params: Map<String, Value>,
    meta: Option<Map<String, Value>>,
    progress: bool,
) -> Vec<u8> {
    let mut meta = meta.unwrap_or_default();
    if progress {
        meta.insert("progressToken".to_owned(), id.into());
    }
    if !meta.is_empty() {
        params.insert("_meta".to_owned(), Value::Object(meta));
    }
    let message = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
    let mut line = message.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// A request that was made.
struct Asked<'a> {
    shared: &'a Shared,
    id: u64,
    sent: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let waited = lock(&self.shared.state).pending.remove(&self.id).is_some();
        if waited && self.sent {
            let params = json!({"requestId": self.id, "reason": "nobody waits for the answer"});
            let cancel =
                json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
            self.shared.try_send(&cancel);
        }
    }
}

impl Shared {
    async fn send(&self, line: Vec<u8>) -> Result<(), Failure> {
        let ended = || Failure::Ended("its input is closed".to_owned());
        let out = lock(&self.out).clone().ok_or_else(ended)?;
        out.send(line).await.map_err(|_| ended())
    }

    fn try_send(&self, message: &Value) {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        if let Some(out) = lock(&self.out).as_ref() {
            // A server that does not read does not learn it.
            let _ = out.try_send(line);
        }
    }

    fn fail_all(&self, failure: &Failure) {
        self.said.note(&failure.to_string());
        let pending = std::mem::take(&mut lock(&self.state).pending);
        for (_, waiting) in pending {
            let _ = waiting.answer.send(Err(failure.clone()));
        }
    }

    fn end(&self, why: &str) {
        lock(&self.state).ended = Some(why.to_owned());
        let failure = Failure::Ended(why.to_owned());
        if lock(&self.out).is_none() && lock(&self.state).pending.is_empty() {
            // As it was told to.
            return;
        }
        self.fail_all(&failure);
    }

    fn line(&self, line: &[u8], notes: &mpsc::Sender<Note>) {
        let line = line.trim_ascii();
        if line.is_empty() {
            return;
        }
        if !line.starts_with(b"{") {
            // Programs say all kinds of things on their standard output. No answer begins like this.
            let text = String::from_utf8_lossy(line.get(..200).unwrap_or(line)).into_owned();
            return self.said.note(&format!("the server said, and not in JSON: {text}"));
        }
        if !bounded::keeps_bounds(line) {
            return self.fail_all(&Failure::Broken("sent a line of too many values".to_owned()));
        }
        match serde_json::from_slice::<Value>(line) {
            Ok(Value::Object(message)) => self.message(message, notes),
            Ok(_) => {}
            Err(error) => {
                let why = format!("sent a line that is no JSON: {}", quote(&error.to_string()));
                self.fail_all(&Failure::Broken(why));
            }
        }
    }

    fn message(&self, mut message: Map<String, Value>, notes: &mpsc::Sender<Note>) {
        let id = message.remove("id");
        let method = message.get("method").and_then(Value::as_str);
        match (method, id) {
            (Some(method), Some(id)) if id.is_string() || id.is_number() => {
                if method == "ping" {
                    return self.try_send(&json!({"jsonrpc": "2.0", "id": id, "result": {}}));
                }
                let method: String = quote(method).chars().take(100).collect();
                self.said.note(&format!("refused the server's request {method}"));
                let text = format!("{method} is refused: this server runs in a sandbox of Casulo");
                let error = json!({"code": -32601, "message": text});
                self.try_send(&json!({"jsonrpc": "2.0", "id": id, "error": error}));
            }
            (Some(method), None) => self.notification(method, &message, notes),
            (None, Some(id)) => {
                let waiting = id.as_u64().and_then(|id| lock(&self.state).pending.remove(&id));
                // An answer to what nobody asked, or not any more.
                let Some(waiting) = waiting else { return };
                let _ = waiting.answer.send(answer(message));
            }
            _ => {}
        }
    }

    fn notification(&self, method: &str, message: &Map<String, Value>, notes: &mpsc::Sender<Note>) {
        let params = message.get("params");
        let note = match method {
            "notifications/tools/list_changed" => Note::Tools,
            "notifications/resources/list_changed" => Note::Resources,
            "notifications/prompts/list_changed" => Note::Prompts,
            "notifications/progress" => {
                let Some(params) = params else { return };
                let token = params.get("progressToken").and_then(Value::as_u64);
                let state = lock(&self.state);
                let waiting = token.and_then(|token| state.pending.get(&token));
                if let Some(progress) = waiting.and_then(|waiting| waiting.progress.as_ref()) {
                    // Progress that comes faster than it is passed on is left out.
                    let _ = progress.try_send(params.clone());
                }
                return;
            }
            "notifications/message" => {
                let data = params.and_then(|params| params.get("data"));
                let text = data.map(|data| match data {
                    Value::String(text) => text.clone(),
                    data => data.to_string(),
                });
                return self.said.note(&format!("log: {}", text.unwrap_or_default()));
            }
            _ => return,
        };
        // One that waits to be looked at is enough.
        let _ = notes.try_send(note);
    }
}

fn answer(mut message: Map<String, Value>) -> Answer {
    if let Some(error) = message.get("error") {
        let code = error.get("code").and_then(Value::as_i64).unwrap_or(-32603);
        let message = error.get("message").and_then(Value::as_str).unwrap_or("without a message");
        return Err(Failure::Error { code, message: quote(message) });
    }
    match message.remove("result") {
        Some(result @ Value::Object(_)) => Ok(result),
        _ => Err(Failure::Broken("sent an answer without a result".to_owned())),
    }
}

#[cfg(test)]
#[path = "upstream_tests.rs"]
mod tests;
