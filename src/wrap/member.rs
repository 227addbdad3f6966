//! One wrapped server: its VM, the talk with it, and what of it may be used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use rmcp::model::{CallToolResult, Implementation};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::ServerSpec;
use super::guest::Guest;
use super::offer::{self, MAX_PROSE, Offered, Tools};
use super::pin::{Identity, Offer, Pins};
use super::said::Said;
use super::upstream::{Failure, Note, Upstream};
use crate::{Runtime, text};

/// Revisions with a handshake that a server may answer with.
const LEGACY: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// The revision without one.
const MODERN: &str = "2026-07-28";
/// How long a server may take to start.
const START: Duration = Duration::from_secs(60);
const START_EMULATED: Duration = Duration::from_secs(400);
/// Most entries of a list, its pages, and their bytes.
const MAX_ENTRIES: usize = 1000;
const MAX_PAGES: usize = 100;
const MAX_LIST: usize = 4 << 20;

/// What a server says of itself.
#[derive(Clone, Debug)]
pub(super) struct Info {
    pub(super) implementation: Implementation,
    pub(super) instructions: Option<String>,
    pub(super) tools: bool,
    pub(super) resources: bool,
    pub(super) prompts: bool,
    pub(super) completions: bool,
}

/// A wrapped server that runs, or ran.
pub(super) struct Member {
    pub(super) spec: ServerSpec,
    pub(super) info: Info,
    pub(super) said: Said,
    upstream: Upstream,
    guest: Mutex<Option<Guest>>,
    pins: Pins,
    /// Its tools, or why they are refused.
    tools: Mutex<Result<Arc<Tools>, String>>,
    /// The instructions as they came, which belong to what was accepted.
    raw_instructions: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Member {
    /// Boots, shakes hands, and looks at the tools. `notes` gets what the server tells later.
    ///
    /// # Errors
    /// The server cannot be used, and why.
    pub(super) async fn start(
        runtime: &Runtime,
        spec: ServerSpec,
        pins: Pins,
        accept: bool,
        notes: mpsc::Sender<Note>,
        give_up: &CancellationToken,
    ) -> Result<Self, String> {
        let said = Said::new(&spec.name);
        let start = Guest::start(runtime, spec.place.clone(), spec.command.clone(), &said);
        // Before it has started nothing of the server's has run.
        let given_up = || "it was given up before it had started".to_owned();
        let start = give_up.run_until_cancelled(start).await;
        let (guest, streams) = start.unwrap_or_else(|| Err(given_up()))?;
        let upstream =
            Upstream::new(streams.stdout, streams.stdin, streams.end, notes, said.clone());
        let limit = if guest.emulated() { START_EMULATED } else { START };
        let shaken = tokio::time::timeout(limit, handshake(&upstream, limit));
        let shaken = match give_up.run_until_cancelled(shaken).await {
            Some(shaken) => shaken.unwrap_or(Err(Failure::Late(limit))),
            None => {
                guest.kill();
                Err(Failure::Ended(given_up()))
            }
        };
        let (info, raw_instructions) = match shaken {
            Ok(shaken) => shaken,
            Err(failure) => {
                upstream.close_input();
                // Its shares must be safe to read, and there is another error to tell.
                let _ = guest.close().await;
                return Err(format!("cannot start the server: {failure}"));
            }
        };
        let tools = Mutex::new(Err("its tools have not been asked for".to_owned()));
        let guest = Mutex::new(Some(guest));
        let member = Self { spec, info, said, upstream, guest, pins, tools, raw_instructions };
        if give_up.run_until_cancelled(member.refresh(accept, limit)).await.is_some() {
            return Ok(member);
        }
        if let Some(guest) = lock(&member.guest).as_ref() {
            guest.kill();
        }
        let _ = member.close().await;
        Err(given_up())
    }

    /// Asks for the tools and compares them with those that were accepted. Tells whether they may be
    /// used.
    pub(super) async fn refresh(&self, accept: bool, limit: Duration) -> bool {
        let tools = self.fetch(accept, limit).await;
        match &tools {
            Err(why) => self.said.note(why),
            Ok(tools) => {
                for (name, why) in &tools.refused {
                    self.said.note(&format!("the tool {name:.128} is refused: {why}"));
                }
            }
        }
        let good = tools.is_ok();
        *lock(&self.tools) = tools;
        good
    }

    async fn fetch(&self, accept: bool, limit: Duration) -> Result<Arc<Tools>, String> {
        let list = match self.info.tools {
            true => self.list("tools/list", "tools", limit).await.map_err(|f| f.to_string())?,
            false => Vec::new(),
        };
        let server = Identity {
            image: self.spec.place.name(),
            files: self.spec.place.files(),
            command: self.spec.command.command.clone(),
            name: self.spec.name.clone(),
        };
        let offer = Offer::new(self.raw_instructions.clone(), &list);
        let accepted = self.pins.check(&server, &offer, accept);
        if let Some(changes) = accepted.map_err(|error| error.to_string())? {
            self.said.note(&format!("accepted other tools than before: {changes}"));
        }
        for pattern in self.spec.tools.idle(list.iter()) {
            self.said.note(&format!("no tool of the server is called {pattern}"));
        }
        Ok(Arc::new(Tools::new(&list, &self.spec.tools, &self.spec.name)))
    }

    /// The tools that may be used, or why none may.
    pub(super) fn tools(&self) -> Result<Arc<Tools>, String> {
        lock(&self.tools).clone()
    }

    /// All pages of a list.
    pub(super) async fn list(
        &self,
        method: &str,
        key: &str,
        limit: Duration,
    ) -> Result<Vec<Value>, Failure> {
        list(&self.upstream, method, key, limit).await
    }

    /// A request of a client within the time of a call.
    pub(super) async fn request(
        &self,
        method: &str,
        params: Map<String, Value>,
        progress: Option<mpsc::Sender<Value>>,
    ) -> Result<Value, Failure> {
        self.upstream.request(method, params, self.spec.timeout, progress).await
    }

    /// Calls a tool with arguments that fit its schema.
    ///
    /// # Errors
    /// The arguments do not fit, or there is no result that can be passed on. An error of the server's
    /// own is in the inner result.
    pub(super) async fn call(
        &self,
        offered: &Offered,
        arguments: Map<String, Value>,
        progress: Option<mpsc::Sender<Value>>,
    ) -> Result<Result<CallToolResult, Failure>, TaskError> {
        let error = |class, retry, message| TaskError { class, message, retry };
        let arguments = Value::Object(arguments);
        offered.schema.check(&arguments).map_err(|why| {
            let message = format!("the arguments do not fit the tool's schema: {why}");
            error(ErrorClass::InvalidArgument, Retry::No, message)
        })?;
        let mut params = Map::new();
        params.insert("name".to_owned(), offered.name.clone().into());
        params.insert("arguments".to_owned(), arguments);
        let result = match self.request("tools/call", params, progress).await {
            Ok(result) => result,
            Err(failure @ Failure::Error { .. }) => return Ok(Err(failure)),
            Err(failure) => return Err(task_error(&failure)),
        };
        let (most, raw) = (self.spec.max_result, self.spec.raw);
        let result = offer::tool_result(result, &self.spec.name, most, raw);
        result.map(Ok).map_err(|why| {
            error(ErrorClass::Internal, Retry::Unknown, format!("the tool has run, but {why}"))
        })
    }

    /// Why it has ended, if it has.
    pub(super) fn ended(&self) -> Option<String> {
        self.upstream.ended()
    }

    /// Ends the server and its VM.
    ///
    /// # Errors
    /// A writable folder could not be looked at.
    pub(super) async fn close(&self) -> Result<(), crate::Error> {
        self.upstream.close_input();
        let guest = lock(&self.guest).take();
        match guest {
            Some(guest) => guest.close().await,
            None => Ok(()),
        }
    }
}

/// A failure as a tool's error.
pub(super) fn task_error(failure: &Failure) -> TaskError {
    let class = match failure {
        Failure::Ended(_) => ErrorClass::GuestLost,
        _ => ErrorClass::Internal,
    };
    TaskError { class, message: failure.to_string(), retry: Retry::Unknown }
}

/// Finds out which revision the server speaks, and what it says of itself.
pub(super) async fn handshake(
    upstream: &Upstream,
    limit: Duration,
) -> Result<(Info, Option<String>), Failure> {
    let us = json!({"name": "casulo", "version": env!("CARGO_PKG_VERSION")});
    let hello = json!({"protocolVersion": LEGACY[0], "capabilities": {}, "clientInfo": us});
    let Value::Object(hello) = hello else { return Err(Failure::Broken("unreachable".into())) };
    match upstream.request("initialize", hello, limit, None).await {
        Ok(answer) => {
            let version = answer.get("protocolVersion").and_then(Value::as_str).unwrap_or_default();
            if !LEGACY.contains(&version) {
                let version = text::safe(&version.chars().take(40).collect::<String>());
                let why =
                    format!("speaks a revision of MCP that Casulo does not know: {version:?}");
                return Err(Failure::Broken(why));
            }
            upstream.notify("notifications/initialized", json!({}));
            let server = answer.get("serverInfo").cloned().unwrap_or_default();
            Ok(info(&answer, &server))
        }
        // It may speak only the revision that has no such request.
        Err(Failure::Error { .. }) => {
            let meta = json!({
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
                "io.modelcontextprotocol/clientInfo": us,
            });
            upstream.set_meta(meta.as_object().cloned().unwrap_or_default());
            let answer = upstream.request("server/discover", Map::new(), limit, None).await?;
            let versions = answer.get("supportedVersions").and_then(Value::as_array);
            if !versions.is_some_and(|all| all.iter().any(|version| version == MODERN)) {
                let why = format!("speaks neither {MODERN} nor a revision with a handshake");
                return Err(Failure::Broken(why));
            }
            let meta = answer.get("_meta");
            let server = meta.and_then(|meta| meta.get("io.modelcontextprotocol/serverInfo"));
            Ok(info(&answer, &server.cloned().unwrap_or_default()))
        }
        Err(failure) => Err(failure),
    }
}

/// The server's description of itself, and its instructions as they came.
fn info(answer: &Value, server: &Value) -> (Info, Option<String>) {
    let word = |key: &str| server.get(key).and_then(Value::as_str).map(offer::short);
    let some = |word: Option<String>, other: &str| {
        word.filter(|word| !word.is_empty()).unwrap_or_else(|| other.to_owned())
    };
    let mut implementation =
        Implementation::new(some(word("name"), "wrapped"), some(word("version"), "0"));
    implementation.title = word("title");
    let raw = answer.get("instructions").and_then(Value::as_str);
    let raw = raw.map(|text| text.chars().take(MAX_PROSE).collect::<String>());
    let can = |what: &str| answer.pointer(&format!("/capabilities/{what}")).is_some();
    let info = Info {
        implementation,
        instructions: raw.as_deref().map(text::stripped).filter(|text| !text.is_empty()),
        tools: can("tools"),
        resources: can("resources"),
        prompts: can("prompts"),
        completions: can("completions"),
    };
    (info, raw)
}

/// All pages of a list.
pub(super) async fn list(
    upstream: &Upstream,
    method: &str,
    key: &str,
    limit: Duration,
) -> Result<Vec<Value>, Failure> {
    let pages = async {
        let (mut all, mut bytes, mut cursor) = (Vec::new(), 0usize, None::<String>);
        for _ in 0..MAX_PAGES {
            let mut params = Map::new();
            if let Some(cursor) = cursor.take() {
                params.insert("cursor".to_owned(), cursor.into());
            }
            let mut page = upstream.request(method, params, limit, None).await?;
            let Some(Value::Array(entries)) = page.get_mut(key).map(Value::take) else {
                return Err(Failure::Broken(format!("answered {method} without {key}")));
            };
            let size = |value: &Value| serde_json::to_vec(value).map_or(MAX_LIST, |v| v.len());
            bytes = entries.iter().map(size).fold(bytes, usize::saturating_add);
            all.extend(entries);
            if all.len() > MAX_ENTRIES || bytes > MAX_LIST {
                let why = format!("lists more than {MAX_ENTRIES} {key} or {MAX_LIST} bytes");
                return Err(Failure::Broken(why));
            }
            match page.get("nextCursor").and_then(Value::as_str) {
                None => return Ok(all),
                Some(next) if next.len() > 4096 => {
                    return Err(Failure::Broken("has a cursor of over 4096 bytes".to_owned()));
                }
                Some(next) => cursor = Some(next.to_owned()),
            }
        }
        Err(Failure::Broken(format!("lists more than {MAX_PAGES} pages of {key}")))
    };
    tokio::time::timeout(limit, pages).await.unwrap_or(Err(Failure::Late(limit)))
}
