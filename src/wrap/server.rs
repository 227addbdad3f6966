//! What the client talks to: one server, or several behind prefixes.
//!
//! Everything a client sees has been parsed and is written anew here; nothing of a wrapped server's
//! bytes passes as it is.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use rmcp::ErrorData;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CompleteRequestParams, CompleteResult, ErrorCode,
    GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ProgressToken, ReadResourceRequestParams, ReadResourceResponse,
    ReadResourceResult, Reference, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{NotificationContext, Peer, RequestContext, RoleServer};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::member::{Member, task_error};
use super::offer;
use super::upstream::{Failure, Note};
use crate::gateway::render;
use crate::text;

/// How long a list may be kept: without a session nobody is told of a change.
const TTL_MS: u64 = 60_000;
/// Time between two notifications of progress.
const PROGRESS: Duration = Duration::from_millis(100);
/// Our own codes, outside of the reserved range.
const REFUSED: i32 = -31001;
const UNAVAILABLE: i32 = -31002;

/// One of the servers.
pub(super) enum Slot {
    Up(Arc<Member>),
    /// It could not be started.
    Down {
        name: String,
        why: String,
    },
}

/// The server for one client. Clones are the same.
#[derive(Clone)]
pub(super) struct Front {
    pub(super) slots: Arc<Vec<Slot>>,
    /// A client with a session, to be told of changes.
    peer: Arc<Mutex<Option<Peer<RoleServer>>>>,
}

fn refused(why: String) -> ErrorData {
    ErrorData::new(ErrorCode(REFUSED), text::safe(&why), None)
}

/// The error for a client where there is no result.
fn error(failure: &Failure) -> ErrorData {
    match failure {
        Failure::Error { code, message } => {
            let code = i32::try_from(*code).unwrap_or(-32603);
            ErrorData::new(ErrorCode(code), text::safe(message), None)
        }
        failure => ErrorData::new(ErrorCode(UNAVAILABLE), text::safe(&failure.to_string()), None),
    }
}

impl Front {
    pub(super) fn new(slots: Vec<Slot>) -> Self {
        Self { slots: Arc::new(slots), peer: Arc::default() }
    }

    fn up(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Up(member) => Some(member),
            Slot::Down { .. } => None,
        })
    }

    /// The servers that may be used: all but those whose tools are refused.
    fn usable(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.up().filter(|member| member.tools().is_ok())
    }

    /// The one server, if it has no prefix.
    fn alone(&self) -> Option<&Slot> {
        match self.slots.as_slice() {
            [slot @ Slot::Up(member)] if member.spec.name.is_empty() => Some(slot),
            [slot @ Slot::Down { name, .. }] if name.is_empty() => Some(slot),
            _ => None,
        }
    }

    /// The server of a public name, and its name there.
    fn find<'a>(&self, public: &'a str, separator: char) -> Option<(&Slot, &'a str)> {
        if let Some(slot) = self.alone() {
            return Some((slot, public));
        }
        let (prefix, rest) = public.split_once(separator)?;
        let slot = self.slots.iter().find(|slot| match slot {
            Slot::Up(member) => member.spec.name == prefix,
            Slot::Down { name, .. } => name == prefix,
        })?;
        Some((slot, rest))
    }

    /// As [`Self::find`], for what may be used.
    fn route<'a>(
        &self,
        public: &'a str,
        separator: char,
    ) -> Result<(&Arc<Member>, &'a str), ErrorData> {
        match self.find(public, separator) {
            Some((Slot::Up(member), name)) => {
                member.tools().map_err(refused)?;
                Ok((member, name))
            }
            Some((Slot::Down { why, .. }, _)) => Err(refused(why.clone())),
            None => {
                let public = text::safe(&public.chars().take(100).collect::<String>());
                Err(ErrorData::invalid_params(format!("there is no {public:?} here"), None))
            }
        }
    }

    /// Entries of a list of every server. One that has none, or does not answer, is left out where
    /// there are others.
    async fn entries<T: DeserializeOwned>(
        &self,
        method: &str,
        key: &str,
        has: impl Fn(&Member) -> bool,
    ) -> Result<Value, ErrorData> {
        let mut all = Vec::new();
        if let Some(slot) = self.alone() {
            usable_slot(slot).map_err(refused)?;
        }
        for member in self.usable().filter(|member| has(member)) {
            match member.list(method, key, member.spec.timeout).await {
                Ok(list) => all.extend(list.into_iter().filter_map(|value| {
                    let kept = value.clone();
                    // Checked by the type, told as JSON.
                    offer::entry::<T>(kept, &member.spec.name)?;
                    offer::entry::<Value>(value, &member.spec.name)
                })),
                Err(failure) if self.alone().is_some() => return Err(error(&failure)),
                Err(failure) => member.said.note(&failure.to_string()),
            }
        }
        Ok(json!({"resultType": "complete", key: all, "ttlMs": TTL_MS, "cacheScope": "private"}))
    }

    /// A request to the server of a name or address, and its result.
    async fn ask<T: DeserializeOwned>(
        &self,
        member: &Member,
        method: &str,
        params: Value,
        context: &RequestContext<RoleServer>,
    ) -> Result<T, ErrorData> {
        let Value::Object(params) = params else {
            return Err(ErrorData::internal_error("unreachable", None));
        };
        let answer = with_progress(context, |progress| member.request(method, params, progress));
        let answer = or_cancelled(context, answer).await?.map_err(|failure| error(&failure))?;
        offer::result(answer, &member.spec.name, member.spec.max_result, member.spec.raw)
            .map_err(|why| ErrorData::internal_error(why, None))
    }

    /// Passes on what a server tells, until it is gone.
    pub(super) async fn listen(self, member: Arc<Member>, mut notes: mpsc::Receiver<Note>) {
        while let Some(note) = notes.recv().await {
            if note == Note::Tools {
                member.refresh(false, member.spec.timeout).await;
            }
            let peer = self.peer.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(peer) = peer {
                // A client that is not there any more need not know.
                let _ = match note {
                    Note::Tools => peer.notify_tool_list_changed().await,
                    Note::Resources => peer.notify_resource_list_changed().await,
                    Note::Prompts => peer.notify_prompt_list_changed().await,
                };
            }
            // One that tells this without end is not asked without end.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

fn usable_slot(slot: &Slot) -> Result<(), String> {
    match slot {
        Slot::Up(member) => member.tools().map(drop),
        Slot::Down { why, .. } => Err(why.clone()),
    }
}

/// Runs `work` until it ends or the client gives up, which cancels it at the server.
async fn or_cancelled<T>(
    context: &RequestContext<RoleServer>,
    work: impl Future<Output = T>,
) -> Result<T, ErrorData> {
    tokio::select! {
        result = work => Ok(result),
        () = context.ct.cancelled() => {
            Err(ErrorData::new(ErrorCode(UNAVAILABLE), "the request was cancelled", None))
        }
    }
}

/// Runs `work` with a place for its progress, and tells the client of that if it wants to know.
async fn with_progress<T, F: Future<Output = T>>(
    context: &RequestContext<RoleServer>,
    work: impl FnOnce(Option<mpsc::Sender<Value>>) -> F,
) -> T {
    let Some(token) = context.meta.get_progress_token() else { return work(None).await };
    let (tell, told) = mpsc::channel(1);
    tokio::select! {
        biased;
        result = work(Some(tell)) => result,
        () = pass_on(token, &context.peer, told) => std::future::pending().await,
    }
}

async fn pass_on(token: ProgressToken, peer: &Peer<RoleServer>, mut told: mpsc::Receiver<Value>) {
    let mut last = f64::NEG_INFINITY;
    while let Some(params) = told.recv().await {
        let number = |key: &str| params.get(key).and_then(Value::as_f64);
        // Progress must increase.
        let Some(progress) = number("progress").filter(|now| *now > last) else { continue };
        last = progress;
        let mut params_out = ProgressNotificationParam::new(token.clone(), progress);
        params_out.total = number("total");
        params_out.message = params
            .get("message")
            .and_then(Value::as_str)
            .map(|text| text::safe(&text.chars().take(4096).collect::<String>()));
        // A client that does not listen is not told; the result will be there.
        let _ = peer.notify_progress(params_out).await;
        tokio::time::sleep(PROGRESS).await;
    }
}

/// A value of ours in the SDK's type.
fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ErrorData> {
    serde_json::from_value(value)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

impl ServerHandler for Front {
    fn get_info(&self) -> ServerConfig {
        let mut capabilities =
            ServerCapabilities::builder().enable_tools().enable_tool_list_changed().build();
        let changes = json!({"listChanged": true});
        if self.up().any(|member| member.info.resources) {
            capabilities.resources = serde_json::from_value(changes.clone()).ok();
        }
        if self.up().any(|member| member.info.prompts) {
            capabilities.prompts = serde_json::from_value(changes).ok();
        }
        if self.up().any(|member| member.info.completions) {
            capabilities.completions = Some(Map::new());
        }
        if let Some(Slot::Up(member)) = self.alone() {
            let mut info = ServerConfig::new(capabilities)
                .with_server_info(member.info.implementation.clone());
            // What was not accepted is not told to a model either.
            if member.tools().is_ok() {
                info.instructions.clone_from(&member.info.instructions);
            }
            return info;
        }
        let mut name = Implementation::new("casulo", env!("CARGO_PKG_VERSION"));
        name.title = Some("Casulo".to_owned());
        let mut info = ServerConfig::new(capabilities).with_server_info(name);
        let parts = self.usable().filter_map(|member| {
            let words = member.info.instructions.as_ref()?;
            Some(format!("The tools whose names begin with {}_: {words}", member.spec.name))
        });
        let parts = parts.collect::<Vec<_>>().join("\n\n");
        info.instructions = (!parts.is_empty()).then_some(parts);
        info
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.peer);
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        if let Some(slot) = self.alone() {
            usable_slot(slot).map_err(refused)?;
        }
        let tools: Vec<Tool> = self
            .up()
            .filter_map(|member| member.tools().ok())
            .flat_map(|tools| tools.tools.iter().map(|t| t.tool.clone()).collect::<Vec<_>>())
            .collect();
        let kind = "complete";
        typed(json!({"resultType": kind, "tools": tools, "ttlMs": TTL_MS, "cacheScope": "private"}))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        let tools = self.up().filter_map(|member| member.tools().ok());
        tools.into_iter().find_map(|tools| tools.get(name).map(|offered| offered.tool.clone()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let denied = |message: String| {
            let error = TaskError { class: ErrorClass::Denied, message, retry: Retry::No };
            Ok(render::error(&error).into())
        };
        let unknown = || {
            ErrorData::invalid_params(
                format!(
                    "unknown tool {}; tools/list names the tools",
                    text::brief(&request.name, 100)
                ),
                None,
            )
        };
        let member = match self.find(&request.name, '_') {
            Some((Slot::Up(member), _)) => member,
            Some((Slot::Down { why, .. }, _)) => return denied(why.clone()),
            None => return Err(unknown()),
        };
        let tools = match member.tools() {
            Ok(tools) => tools,
            Err(why) => return denied(why),
        };
        if let Some(why) = tools.refused.get(&*request.name) {
            return denied(format!("this tool is refused: {why}"));
        }
        let Some(offered) = tools.get(&request.name) else { return Err(unknown()) };
        if let Some(why) = member.ended() {
            return Ok(render::error(&task_error(&Failure::Ended(why))).into());
        }
        let arguments = request.arguments.clone().unwrap_or_default();
        let call = with_progress(&context, |progress| member.call(offered, arguments, progress));
        match or_cancelled(&context, call).await? {
            Ok(Ok(result)) => Ok(result.into()),
            Ok(Err(failure)) => Err(error(&failure)),
            Err(task) => Ok(render::error(&task).into()),
        }
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let list = self
            .entries::<rmcp::model::Resource>("resources/list", "resources", |m| m.info.resources);
        typed(or_cancelled(&context, list).await??)
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let (method, key) = ("resources/templates/list", "resourceTemplates");
        let list = self.entries::<rmcp::model::ResourceTemplate>(method, key, |m| m.info.resources);
        typed(or_cancelled(&context, list).await??)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let (member, uri) = self.route(&request.uri, '+')?;
        let params = json!({"uri": uri});
        let result: ReadResourceResult =
            self.ask(member, "resources/read", params, &context).await?;
        Ok(result.into())
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let list =
            self.entries::<rmcp::model::Prompt>("prompts/list", "prompts", |m| m.info.prompts);
        typed(or_cancelled(&context, list).await??)
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let (member, name) = self.route(&request.name, '_')?;
        let params = json!({"name": name, "arguments": request.arguments.unwrap_or_default()});
        let result: GetPromptResult = self.ask(member, "prompts/get", params, &context).await?;
        Ok(result.into())
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let (public, separator) = match &request.r#ref {
            Reference::Prompt(prompt) => (prompt.name.clone(), '_'),
            Reference::Resource(resource) => (resource.uri.clone(), '+'),
            _ => return Err(ErrorData::invalid_params("unknown kind of reference", None)),
        };
        let (member, own) = self.route(&public, separator)?;
        let mut params = serde_json::to_value(&request).unwrap_or_default();
        if let Some(params) = params.as_object_mut() {
            params.remove("_meta");
        }
        let key = if separator == '+' { "uri" } else { "name" };
        if let Some(place) = params.pointer_mut(&format!("/ref/{key}")) {
            *place = own.into();
        }
        self.ask(member, "completion/complete", params, &context).await
    }
}
