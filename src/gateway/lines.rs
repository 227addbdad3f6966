//! MCP over lines, one JSON-RPC message each, with an answer to everything that is no message.
//!
//! Every limit is kept before a message reaches the server: the length of a line, the depth of its
//! nesting (serde_json's 128), and the number of requests that wait for their answer. A client that
//! does not read its answers is not read from either, once a few wait for it.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rmcp::model::{ClientNotification, JsonRpcMessage, RequestId};
use rmcp::service::{RoleServer, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::lines::{Line, LineReader};

/// Longest line of a client in bytes.
pub(super) const MAX_LINE: usize = 8 << 20;
/// Most requests of a client that wait for their answer.
pub(super) const MAX_IN_FLIGHT: usize = 256;
/// Answers that wait for the client to read.
const QUEUE: usize = 4;
/// How long the client may take to read the last answers.
const FAREWELL: Duration = Duration::from_secs(5);

/// JSON-RPC's code for what is no JSON.
const PARSE_ERROR: i32 = -32700;
/// JSON-RPC's code for JSON that is no request.
const INVALID_REQUEST: i32 = -32600;
/// Our own, outside of the reserved range.
const TOO_MANY_REQUESTS: i32 = -31000;

/// One client.
pub(crate) struct Lines<R> {
    read: LineReader<R>,
    /// An answer of our own that waits for room.
    pending: Option<Value>,
    queue: Option<mpsc::Sender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
    in_flight: Arc<Mutex<HashSet<String>>>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// Reads from `read` and writes to `write`. Must be called inside tokio.
    pub(crate) fn new(read: R, mut write: impl AsyncWrite + Send + Unpin + 'static) -> Self {
        let (queue, mut lines) = mpsc::channel::<Vec<u8>>(QUEUE);
        let writer = tokio::spawn(async move {
            while let Some(line) = lines.recv().await {
                if write.write_all(&line).await.is_err() || write.flush().await.is_err() {
                    // Nobody reads any more; what is sent from now on is told so.
                    return;
                }
            }
        });
        Self {
            read: LineReader::new(read, MAX_LINE),
            pending: None,
            queue: Some(queue),
            writer: Some(writer),
            in_flight: Arc::default(),
        }
    }

    /// The message in a line, or the answer to it; neither for what needs none.
    fn parse(&self, line: &[u8]) -> Result<Option<RxJsonRpcMessage<RoleServer>>, Value> {
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line).trim_ascii();
        if line.is_empty() {
            return Ok(None);
        }
        let value: Value = serde_json::from_slice(line).map_err(|error| {
            refusal(None, PARSE_ERROR, &format!("the line is no JSON: {error}"))
        })?;
        if value.is_array() {
            let text = "batches are no part of MCP; send one message a line";
            return Err(refusal(None, INVALID_REQUEST, text));
        }
        let id = value.get("id").filter(|id| id.is_string() || id.is_number()).cloned();
        let has_method = value.get("method").is_some_and(Value::is_string);
        let notification = has_method && value.get("id").is_none();
        match serde_json::from_value::<RxJsonRpcMessage<RoleServer>>(value) {
            Ok(message) => self.admit(message).map(Some),
            // JSON-RPC answers no notification, whatever is wrong with it.
            Err(_) if notification => Ok(None),
            Err(error) => {
                let text = format!("the message is no request of JSON-RPC 2.0: {error:.500}");
                Err(refusal(id, INVALID_REQUEST, &text))
            }
        }
    }

    /// Notes a request, unless its id is in use or too many wait.
    fn admit(
        &self,
        message: RxJsonRpcMessage<RoleServer>,
    ) -> Result<RxJsonRpcMessage<RoleServer>, Value> {
        let mut in_flight = lock(&self.in_flight);
        match &message {
            JsonRpcMessage::Request(request) => {
                let key = key(&request.id);
                if in_flight.contains(&key) {
                    // With its id, this would pass for the answer to the first one.
                    let text = format!("a request with the id {key:.100} is being answered");
                    return Err(refusal(None, INVALID_REQUEST, &text));
                }
                if in_flight.len() >= MAX_IN_FLIGHT {
                    let text = format!(
                        "{MAX_IN_FLIGHT} requests are being answered; wait for some of them"
                    );
                    let id = serde_json::to_value(&request.id).ok();
                    return Err(refusal(id, TOO_MANY_REQUESTS, &text));
                }
                in_flight.insert(key);
            }
            JsonRpcMessage::Notification(notification) => {
                // There may be no answer to it.
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    in_flight.remove(&key(id));
                }
            }
            _ => {}
        }
        drop(in_flight);
        Ok(message)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(id: &RequestId) -> String {
    serde_json::to_string(id).unwrap_or_default()
}

/// An error of JSON-RPC. MCP leaves the id out where it is not known.
fn refusal(id: Option<Value>, code: i32, message: &str) -> Value {
    let error = json!({"code": code, "message": crate::text::safe(message)});
    match id {
        Some(id) => json!({"jsonrpc": "2.0", "id": id, "error": error}),
        None => json!({"jsonrpc": "2.0", "error": error}),
    }
}

fn encode(message: &impl serde::Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the client is gone")
}

impl<R: AsyncRead + Send + Unpin> Transport<RoleServer> for Lines<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let (queue, in_flight) = (self.queue.clone(), Arc::clone(&self.in_flight));
        async move {
            let answered = match &message {
                JsonRpcMessage::Response(response) => Some(key(&response.id)),
                JsonRpcMessage::Error(error) => error.id.as_ref().map(key),
                _ => None,
            };
            let sent = queue.ok_or_else(closed)?.send(encode(&message)?).await;
            if let Some(key) = answered {
                lock(&in_flight).remove(&key);
            }
            sent.map_err(|_| closed())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            if let Some(answer) = &self.pending {
                let line = encode(answer).ok()?;
                // Waits for room; dropping the future leaves the answer where it is.
                let room = self.queue.as_ref()?.reserve().await.ok()?;
                room.send(line);
                self.pending = None;
            }
            // A client whose pipe is broken is gone.
            match self.read.next().await.ok()?? {
                Line::TooLong => {
                    let text = format!("a line is longer than {MAX_LINE} bytes; it was skipped");
                    self.pending = Some(refusal(None, INVALID_REQUEST, &text));
                }
                Line::Whole(line) => match self.parse(&line) {
                    Ok(Some(message)) => return Some(message),
                    Ok(None) => {}
                    Err(answer) => self.pending = Some(answer),
                },
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.queue = None;
        if let Some(mut writer) = self.writer.take() {
            // A client that does not read must not keep us.
            if tokio::time::timeout(FAREWELL, &mut writer).await.is_err() {
                writer.abort();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, DuplexStream};

    use super::*;

    struct Peer {
        lines: Lines<tokio::io::ReadHalf<DuplexStream>>,
        theirs: BufReader<DuplexStream>,
    }

    fn peer(buffer: usize) -> Peer {
        let (ours, theirs) = tokio::io::duplex(buffer);
        let (read, write) = tokio::io::split(ours);
        Peer { lines: Lines::new(read, write), theirs: BufReader::new(theirs) }
    }

    impl Peer {
        /// Says `bytes` and a good request; gives the answers that come before that is received.
        async fn answers(&mut self, bytes: &[u8]) -> Vec<Value> {
            let mut all = bytes.to_vec();
            all.extend(b"\n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n");
            let say = async {
                self.theirs.get_mut().write_all(&all).await.unwrap();
            };
            let (message, ()) = tokio::join!(self.lines.receive(), say);
            assert!(matches!(message, Some(JsonRpcMessage::Notification(_))), "{message:?}");
            // Everything that was queued is written by now or soon.
            let mut answers = Vec::new();
            let mut line = String::new();
            while let Ok(Ok(length)) =
                tokio::time::timeout(Duration::from_millis(50), self.theirs.read_line(&mut line))
                    .await
            {
                assert!(length > 0);
                answers.push(serde_json::from_str(&line).unwrap());
                line.clear();
            }
            answers
        }
    }

    fn ping(id: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#)
    }

    #[tokio::test]
    async fn what_is_no_message_gets_an_error_and_the_next_line_is_heard() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let deep_arguments = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"x","arguments":{{"a":{}{}}}}}}}"#,
            "[".repeat(1000),
            "]".repeat(1000)
        );
        for (bytes, code) in [
            (&b"hello"[..], PARSE_ERROR),
            (b"{", PARSE_ERROR),
            (b"\xff\xfe{}", PARSE_ERROR),
            (b"\0", PARSE_ERROR),
            (b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"} {}", PARSE_ERROR),
            (deep.as_bytes(), PARSE_ERROR),
            (deep_arguments.as_bytes(), PARSE_ERROR),
            (b"[]", INVALID_REQUEST),
            (b"[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}]", INVALID_REQUEST),
            (b"null", INVALID_REQUEST),
            (b"42", INVALID_REQUEST),
            (b"\"ping\"", INVALID_REQUEST),
            (b"{}", INVALID_REQUEST),
            (b"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"ping\"}", INVALID_REQUEST),
            (b"{\"id\":1,\"method\":\"ping\"}", INVALID_REQUEST),
            (b"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}", INVALID_REQUEST),
            (b"{\"jsonrpc\":\"2.0\",\"id\":1.5,\"method\":\"ping\"}", INVALID_REQUEST),
        ] {
            let answers = peer(1 << 20).answers(bytes).await;
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(100)]);
            assert_eq!(answers.len(), 1, "{shown}");
            assert_eq!(answers[0]["error"]["code"], code, "{shown}: {}", answers[0]);
        }
        // Nothing is owed to an empty line or to a notification that makes no sense.
        for bytes in [&b""[..], b"  \r", b"{\"jsonrpc\":\"1.0\",\"method\":\"notifications/x\"}"] {
            assert!(peer(1 << 20).answers(bytes).await.is_empty());
        }
    }

    #[tokio::test]
    async fn a_line_is_taken_at_its_limit_and_refused_one_above_and_at_20_mb() {
        let line = |length: usize| {
            let mut line = ping("1").into_bytes();
            line.resize(length, b' ');
            line
        };
        for (length, good) in [(MAX_LINE, true), (MAX_LINE + 1, false), (20_000_000, false)] {
            let Peer { mut lines, mut theirs } = peer(1 << 16);
            let mut all = line(length);
            all.extend(format!("\n{}\n", ping("2")).bytes());
            let say = tokio::spawn(async move {
                theirs.get_mut().write_all(&all).await.unwrap();
                theirs
            });
            let first = lines.receive().await.unwrap();
            let JsonRpcMessage::Request(first) = first else { panic!() };
            assert_eq!(key(&first.id), if good { "1" } else { "2" });
            if !good {
                let mut answer = String::new();
                say.await.unwrap().read_line(&mut answer).await.unwrap();
                assert!(answer.contains("longer than 8388608 bytes"), "{answer}");
            }
        }
    }

    #[tokio::test]
    async fn an_id_in_use_is_refused_and_free_again_after_its_answer() {
        let mut peer = peer(1 << 16);
        let first = format!("{}\n{}\n{}\n", ping("7"), ping("7"), ping("\"7\""));
        peer.theirs.get_mut().write_all(first.as_bytes()).await.unwrap();
        for wanted in ["7", "\"7\""] {
            let Some(JsonRpcMessage::Request(r)) = peer.lines.receive().await else { panic!() };
            assert_eq!(key(&r.id), wanted);
        }
        let mut answer = String::new();
        peer.theirs.read_line(&mut answer).await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer.get("id").is_none(), "it is no answer to the first one: {answer}");
        let done = TxJsonRpcMessage::<RoleServer>::error(
            rmcp::ErrorData::invalid_request("x", None),
            Some(RequestId::Number(7)),
        );
        peer.lines.send(done).await.unwrap();
        peer.theirs.get_mut().write_all(format!("{}\n", ping("7")).as_bytes()).await.unwrap();
        assert!(peer.lines.receive().await.is_some());
        // A cancelled one is free too.
        let cancel =
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}"#;
        let more = format!("{cancel}\n{}\n", ping("7"));
        peer.theirs.get_mut().write_all(more.as_bytes()).await.unwrap();
        assert!(matches!(peer.lines.receive().await, Some(JsonRpcMessage::Notification(_))));
        assert!(matches!(peer.lines.receive().await, Some(JsonRpcMessage::Request(_))));
    }

    #[tokio::test]
    async fn requests_are_taken_up_to_their_number_and_refused_above() {
        let mut peer = peer(1 << 20);
        let all: String = (0..=MAX_IN_FLIGHT).map(|n| ping(&n.to_string()) + "\n").collect();
        peer.theirs.get_mut().write_all(all.as_bytes()).await.unwrap();
        for _ in 0..MAX_IN_FLIGHT {
            assert!(peer.lines.receive().await.is_some());
        }
        let more = tokio::time::timeout(Duration::from_millis(50), peer.lines.receive()).await;
        assert!(more.is_err());
        let mut answer = String::new();
        peer.theirs.read_line(&mut answer).await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(256), &json!(-31000)));
    }

    #[tokio::test]
    async fn a_client_that_never_reads_is_not_read_for_ever() {
        let Peer { mut lines, mut theirs } = peer(4096);
        // Each line is answered, and nobody takes the answers.
        let flood = tokio::spawn(async move {
            let mut written = 0u64;
            let line = b"nonsense\n".repeat(100);
            while tokio::time::timeout(
                Duration::from_millis(300),
                theirs.get_mut().write_all(&line),
            )
            .await
            .is_ok()
            {
                written += 1;
            }
            (written, theirs)
        });
        let heard = tokio::time::timeout(Duration::from_secs(30), lines.receive());
        let ((written, theirs), heard) = tokio::select! {
            flood = flood => (flood.unwrap(), true),
            _ = heard => panic!("nothing is to be heard"),
        };
        assert!(heard && written < 1000, "{written}");
        // Its end does not wait for it either.
        tokio::time::timeout(Duration::from_secs(20), lines.close()).await.unwrap().unwrap();
        drop(theirs);
    }

    #[tokio::test]
    async fn a_read_that_is_interrupted_loses_nothing() {
        let Peer { mut lines, mut theirs } = peer(1 << 16);
        let (first, second) = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#.split_at(20);
        theirs.get_mut().write_all(first.as_bytes()).await.unwrap();
        let cut = tokio::time::timeout(Duration::from_millis(20), lines.receive()).await;
        assert!(cut.is_err());
        theirs.get_mut().write_all(second.as_bytes()).await.unwrap();
        // The last line needs no end.
        theirs.get_mut().shutdown().await.unwrap();
        assert!(lines.receive().await.is_some());
        assert!(lines.receive().await.is_none());
        let mut rest = Vec::new();
        lines.close().await.unwrap();
        drop(lines);
        theirs.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
    }
}
