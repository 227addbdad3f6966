//! The tools, resources and prompts; `fixture.json` has those that never change.

#![allow(deprecated, reason = "the suite also tests what only older revisions have")]

use std::sync::Arc;
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities,
    CompleteRequestParams, CompleteResult, ContentBlock, GetPromptRequestParams, GetPromptResponse,
    GetPromptResult, Implementation, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, LoggingLevel, LoggingMessageNotificationParam,
    PaginatedRequestParams, ProgressNotificationParam, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, ServerCapabilities, ServerConfig, ServerRequest,
    SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter, UnsubscribeRequestParams,
};
use rmcp::service::{RequestContext, RoleServer, SubscriptionContext};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::broadcast;

use crate::rounds::{Next, Rounds};

/// An image of one red pixel, and a sound without samples.
const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEARKwAAIhYAQACABAAZGF0YQAAAAA=";
/// Tools that do something.
const ACTING: [&str; 7] = [
    "test_tool_with_logging",
    "test_logging_tool",
    "test_tool_with_progress",
    "test_sampling",
    "test_missing_capability",
    "test_trigger_tool_change",
    "test_trigger_prompt_change",
];
/// Between the messages of a tool that sends several.
const PAUSE: Duration = Duration::from_millis(50);

/// Which list a tool has changed.
#[derive(Clone, Copy)]
enum Change {
    Tools,
    Prompts,
}

/// The server of the fixtures. Clones share everything.
#[derive(Clone)]
pub(crate) struct Fixture {
    data: Arc<Value>,
    rounds: Arc<Rounds>,
    changes: broadcast::Sender<Change>,
}

impl Fixture {
    pub(crate) fn new() -> Result<Self, serde_json::Error> {
        let mut data: Value = serde_json::from_str(include_str!("fixture.json"))?;
        fill(&mut data);
        let part = |name: &str| data[name].as_object().cloned().unwrap_or_default();
        let rounds = Arc::new(Rounds::new(part("rounds"), part("inputs")));
        Ok(Self { data: Arc::new(data), rounds, changes: broadcast::Sender::new(16) })
    }

    fn part<T: DeserializeOwned>(&self, name: &str) -> Result<T, ErrorData> {
        made(self.data[name].clone())
    }
}

/// Replaces the names of the image, the sound and the schema that occur more than once.
fn fill(value: &mut Value) {
    match value {
        Value::String(text) => match text.as_str() {
            "$PNG" => *text = PNG.to_owned(),
            "$WAV" => *text = WAV.to_owned(),
            "$name" => {
                let properties = json!({"name": {"type": "string"}});
                *value = json!({"type": "object", "properties": properties, "required": ["name"]});
            }
            _ => {}
        },
        Value::Array(list) => list.iter_mut().for_each(fill),
        Value::Object(map) => map.values_mut().for_each(fill),
        _ => {}
    }
}

fn made<T: DeserializeOwned>(value: Value) -> Result<T, ErrorData> {
    serde_json::from_value(value).map_err(|e| ErrorData::internal_error(e.to_string(), None))
}

/// A result, whose kind only its makers in the SDK fill in.
fn answered<T: DeserializeOwned>(mut value: Value) -> Result<T, ErrorData> {
    if let Some(result) = value.as_object_mut() {
        result.insert("resultType".to_owned(), "complete".into());
    }
    made(value)
}

fn said(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text.into())])
}

fn text_of<'a>(arguments: &'a Map<String, Value>, name: &str) -> &'a str {
    arguments.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Asks the client of an older revision, which answers with a message of its own.
async fn ask(context: &RequestContext<RoleServer>, request: Value) -> Result<Value, ErrorData> {
    let request: ServerRequest = made(request)?;
    let answer = context.peer.send_request(request).await;
    let answer = answer.map_err(|e| ErrorData::internal_error(e.to_string(), None))?;
    serde_json::to_value(answer).map_err(|e| ErrorData::internal_error(e.to_string(), None))
}

/// Tells the client something, if its request has asked for that or is of an older revision.
async fn log(context: &RequestContext<RoleServer>, text: &str) {
    if context.meta.protocol_version().is_some() && context.meta.log_level().is_none() {
        return;
    }
    let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(text));
    // A client that has gone needs no log.
    let _ = context.peer.notify_logging_message(message).await;
}

impl Fixture {
    async fn act(
        &self,
        name: &str,
        arguments: &Map<String, Value>,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        match name {
            "test_tool_with_logging" | "test_logging_tool" => {
                for text in
                    ["Tool execution started", "Tool processing data", "Tool execution completed"]
                {
                    log(context, text).await;
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(said("logged"))
            }
            "test_tool_with_progress" => {
                for progress in [0.0, 50.0, 100.0] {
                    if let Some(token) = context.meta.get_progress_token() {
                        let message =
                            ProgressNotificationParam::new(token, progress).with_total(100.0);
                        // As above.
                        let _ = context.peer.notify_progress(message).await;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(said("done"))
            }
            "test_sampling" => {
                let content = json!({"type": "text", "text": text_of(arguments, "prompt")});
                let messages = json!([{"role": "user", "content": content}]);
                let request = json!({
                    "method": "sampling/createMessage",
                    "params": {"messages": messages, "maxTokens": 100},
                });
                let answer = ask(context, request).await?;
                Ok(said(format!("LLM response: {}", answer["content"]["text"])))
            }
            "test_missing_capability" => {
                let client = context.client_capabilities().unwrap_or_default();
                if client.sampling.is_none() {
                    let required: ClientCapabilities = made(json!({"sampling": {}}))?;
                    return Err(ErrorData::missing_required_client_capability(required));
                }
                Ok(said("the client can sample"))
            }
            "test_trigger_tool_change" | "test_trigger_prompt_change" => {
                let tools = name == "test_trigger_tool_change";
                // Nobody may listen.
                let _ = self.changes.send(if tools { Change::Tools } else { Change::Prompts });
                Ok(said("changed"))
            }
            _ => {
                let schema = &self.data["elicitations"][name];
                if schema.is_null() {
                    let known = answered(self.data["results"][name].clone());
                    return known.map_err(|_| {
                        ErrorData::invalid_params(format!("unknown tool {name}"), None)
                    });
                }
                let message = match text_of(arguments, "message") {
                    "" => "Please answer",
                    message => message,
                };
                let request = json!({
                    "method": "elicitation/create",
                    "params": {"mode": "form", "message": message, "requestedSchema": schema},
                });
                let answer = ask(context, request).await?;
                let (action, content) = (&answer["action"], &answer["content"]);
                Ok(said(format!("User response: action={action}, content={content}")))
            }
        }
    }
}

impl ServerHandler for Fixture {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_logging()
            .enable_completions()
            .build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("casulo-conformance", env!("CARGO_PKG_VERSION")))
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let keys = |part: &str| {
            let part = self.data[part].as_object();
            part.into_iter().flat_map(Map::keys).cloned().collect::<Vec<_>>()
        };
        let asking = self.rounds.names().filter(|name| !name.ends_with("_prompt"));
        let tools = keys("results").into_iter().chain(keys("elicitations"));
        let tools = tools.chain(asking.chain(ACTING).map(str::to_owned)).map(|name| {
            let properties = match name.as_str() {
                "test_sampling" => json!({"prompt": {"type": "string"}}),
                "test_elicitation" => json!({"message": {"type": "string"}}),
                _ => json!({}),
            };
            let schema = json!({"type": "object", "properties": properties});
            json!({"name": name, "description": "A tool of the conformance suite", "inputSchema": schema})
        });
        Ok(ListToolsResult::with_all_items(made(tools.collect())?).with_ttl_ms(1000))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let client = context.client_capabilities().unwrap_or_default();
        let (responses, state) =
            (request.input_responses.as_ref(), request.request_state.as_deref());
        match self.rounds.next(&request.name, responses, state, &client)? {
            Some(Next::Ask(result)) => Ok(result.into()),
            Some(Next::Answer) => {
                let inputs = serde_json::to_string(&responses).unwrap_or_default();
                Ok(said(format!("state-ok {inputs}")).into())
            }
            None => {
                let arguments = request.arguments.unwrap_or_default();
                self.act(&request.name, &arguments, &context).await.map(Into::into)
            }
        }
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(self.part("resources")?).with_ttl_ms(1000))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(self.part("templates")?).with_ttl_ms(1000))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let known = self.data["resources"].as_array().into_iter().flatten();
        let mut content = known.clone().find(|one| one["uri"] == request.uri.as_str()).cloned();
        if let Some(id) = request.uri.strip_prefix("test://template/")
            && let Some(id) = id.strip_suffix("/data")
        {
            let text =
                json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
            content = Some(json!({
                "uri": request.uri, "mimeType": "application/json", "text": text.to_string(),
            }));
        }
        let Some(content) = content else {
            let data = Some(json!({"uri": request.uri}));
            return Err(ErrorData::resource_not_found("there is no such resource", data));
        };
        let result: ReadResourceResult = answered(json!({"contents": [content]}))?;
        Ok(result.with_ttl_ms(1000).into())
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(self.part("prompts")?).with_ttl_ms(1000))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let client = context.client_capabilities().unwrap_or_default();
        let (responses, state) =
            (request.input_responses.as_ref(), request.request_state.as_deref());
        if let Some(Next::Ask(result)) =
            self.rounds.next(&request.name, responses, state, &client)?
        {
            return Ok(result.into());
        }
        let arguments = serde_json::to_value(request.arguments).unwrap_or_default();
        let argument = |name: &str| arguments[name].as_str().unwrap_or_default().to_owned();
        let text = |text: &str| json!({"type": "text", "text": text});
        let content = match request.name.as_str() {
            "test_simple_prompt" => vec![text("This is a simple prompt for testing.")],
            "test_prompt_with_arguments" => {
                let (one, two) = (argument("arg1"), argument("arg2"));
                vec![text(&format!("Prompt with arguments: arg1='{one}', arg2='{two}'"))]
            }
            "test_prompt_with_embedded_resource" => vec![
                json!({"type": "resource", "resource": {
                    "uri": argument("resourceUri"),
                    "mimeType": "text/plain",
                    "text": "Embedded resource content for testing.",
                }}),
                text("Please process the embedded resource above."),
            ],
            "test_prompt_with_image" => vec![
                json!({"type": "image", "data": PNG, "mimeType": "image/png"}),
                text("Please analyze the image above."),
            ],
            "test_input_required_result_prompt" => vec![text("The client has been asked.")],
            name => {
                return Err(ErrorData::invalid_params(format!("unknown prompt {name}"), None));
            }
        };
        let messages =
            content.into_iter().map(|content| json!({"role": "user", "content": content}));
        let messages: Vec<Value> = messages.collect();
        answered::<GetPromptResult>(json!({"messages": messages})).map(Into::into)
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let known = ["paris", "park", "party"];
        let values: Vec<&str> =
            known.into_iter().filter(|one| one.starts_with(&request.argument.value)).collect();
        let total = values.len();
        answered(json!({"completion": {"values": values, "total": total, "hasMore": false}}))
    }

    async fn set_level(
        &self,
        _request: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        // Everything that the tools log is at one level.
        Ok(())
    }

    async fn subscribe(
        &self,
        _request: SubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        // Nothing changes, so there is nobody to be told.
        Ok(())
    }

    async fn unsubscribe(
        &self,
        _request: UnsubscribeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        Ok(())
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.changes.subscribe();
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = context.cancelled() => return Ok(()),
            };
            // What the client did not ask for is refused by the sink.
            let _ = match change {
                Ok(Change::Tools) => context.sink().notify_tool_list_changed().await,
                Ok(Change::Prompts) => context.sink().notify_prompt_list_changed().await,
                Err(broadcast::error::RecvError::Lagged(_)) => Ok(()),
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            };
        }
    }
}
