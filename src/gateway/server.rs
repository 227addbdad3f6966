//! The MCP server: finds the tool, and gives its result or its error.

use std::sync::Arc;
use std::time::Instant;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::HostKind;
use rmcp::ErrorData;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, Implementation,
    JsonObject, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult,
    PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse, ResourcesCapability,
    ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use serde::de::DeserializeOwned;

use super::metrics::{Metrics, Outcome};
pub(super) use super::progress::Context;
use super::render::{self, Budget};
use super::resources;
use super::sandboxes::{Caller, Sandboxes};
use super::tools::args::{CreateSandboxArgs, DestroySandboxArgs};
use super::tools::results::CreateSandboxResult;
use super::tools::{self, Name};
use crate::text;

const INSTRUCTIONS: &str = "Runs code and commands in isolated Linux microVMs without network. \
    run_command and execute_code without sandbox_id get a fresh microVM that is discarded after the \
    call. For work in several steps call create_sandbox once and pass its sandbox_id: files, \
    processes and the variables of execute_code stay. destroy_sandbox at the end gives what is in \
    /workspace/output as resources. A program that fails is a normal result: look at exit_code and \
    stderr. Work longer than a minute: start_process and poll_process.";

/// The gateway as one caller sees it. Clones share its sandboxes.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) sandboxes: Arc<Sandboxes>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) caller: Caller,
    pub(super) host: HostKind,
    /// Calls without a sandbox share one.
    pub(super) keep: bool,
}

/// Name of the sandbox that calls without one share. No caller can give that name.
const SHARED: &str = " shared";
const SHARED_INSTRUCTIONS: &str = "Runs code and commands in an isolated Linux microVM without network, \
    which keeps files and variables between calls; its sandbox_id is in the results, for the other \
    tools. A program that fails is a normal result: look at exit_code and stderr. Work longer than a \
    minute: start_process and poll_process.";

pub(super) fn invalid(message: impl Into<String>) -> TaskError {
    TaskError { class: ErrorClass::InvalidArgument, message: message.into(), retry: Retry::No }
}

pub(super) fn internal(message: impl Into<String>) -> TaskError {
    TaskError { class: ErrorClass::Internal, message: message.into(), retry: Retry::Unknown }
}

pub(super) fn capacity(message: impl Into<String>) -> TaskError {
    TaskError { class: ErrorClass::Capacity, message: message.into(), retry: Retry::Yes }
}

pub(super) fn cancelled() -> TaskError {
    internal("the call was cancelled")
}

fn wrong(error: String) -> TaskError {
    invalid(format!("wrong arguments: {error}"))
}

impl Server {
    /// The sandbox of a call that names none, if such calls share one.
    pub(super) async fn shared(&self) -> Result<Option<String>, TaskError> {
        if !self.keep {
            return Ok(None);
        }
        self.sandboxes.create(&self.caller, SHARED).await.map(|(id, _)| Some(id))
    }

    async fn call(
        &self,
        tool: Name,
        arguments: JsonObject,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        fn parse<T: DeserializeOwned>(tool: Name, arguments: JsonObject) -> Result<T, TaskError> {
            tool.arguments(arguments).map_err(wrong)
        }
        // What frees something must not have to wait for it.
        let _place = match tool {
            Name::DestroySandbox | Name::StopProcess => None,
            _ => Some(context.or_cancelled(self.sandboxes.admit(&self.caller)).await?),
        };
        match tool {
            Name::RunCommand => {
                let arguments = tool.run_arguments(arguments).map_err(wrong)?;
                self.run_command(arguments, context).await
            }
            Name::ExecuteCode => {
                let arguments = tool.run_arguments(arguments).map_err(wrong)?;
                self.execute_code(arguments, context).await
            }
            Name::ReadFile => self.read_file(parse(tool, arguments)?, context).await,
            Name::WriteFile => self.write_file(parse(tool, arguments)?, context).await,
            Name::ListFiles => self.list_files(parse(tool, arguments)?, context).await,
            Name::StartProcess => self.start_process(parse(tool, arguments)?, context).await,
            Name::PollProcess => self.poll_process(parse(tool, arguments)?, context).await,
            Name::StopProcess => self.stop_process(parse(tool, arguments)?, context).await,
            Name::CreateSandbox => {
                let args: CreateSandboxArgs = parse(tool, arguments)?;
                let create = self.sandboxes.create(&self.caller, &args.name);
                let (sandbox_id, created) = context.or_cancelled(create).await?;
                render::both(&CreateSandboxResult {
                    sandbox_id,
                    created,
                    idle_timeout_seconds: self.sandboxes.limits.idle.as_secs(),
                    max_life_seconds: self.sandboxes.limits.life.as_secs(),
                })
            }
            Name::DestroySandbox => {
                let args: DestroySandboxArgs = parse(tool, arguments)?;
                let ended = self.sandboxes.destroy(&self.caller, &args.sandbox_id).await?;
                let budget = Budget::new(super::limits::DEFAULT_OUTPUT_BYTES, false);
                let ttl = self.sandboxes.limits.artifact_ttl.as_secs();
                render::destroyed(ended, ttl, budget, context.knows_links)
            }
        }
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut name = Implementation::new("casulo", env!("CARGO_PKG_VERSION"));
        name.title = Some("Casulo".to_owned());
        let mut capabilities = ServerCapabilities::builder().enable_tools().build();
        if self.sandboxes.store.is_some() {
            capabilities.resources = Some(ResourcesCapability::default());
        }
        ServerConfig::new(capabilities).with_server_info(name).with_instructions(if self.keep {
            SHARED_INSTRUCTIONS
        } else {
            INSTRUCTIONS
        })
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let list = if self.keep { tools::list_keeping() } else { tools::list() };
        Ok(ListToolsResult::with_all_items(list)
            .with_ttl_ms(3_600_000)
            .with_cache_scope(CacheScope::Private))
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        self.resources(request.and_then(|request| request.cursor))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(resources::templates())
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        self.resource(&request.uri).await.map(Into::into)
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        Name::parse(name).map(|name| name.tool().clone())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = Name::parse(&request.name) else {
            let name = text::brief(&request.name, 100);
            let message = format!("unknown tool {name}; tools/list names the tools");
            return Err(ErrorData::invalid_params(message, None));
        };
        let started = Instant::now();
        let context = Context::new(&context);
        let result = self.call(tool, request.arguments.unwrap_or_default(), &context).await;
        let outcome = match &result {
            Ok(_) => Outcome::Result,
            Err(_) if context.cancel.is_cancelled() => Outcome::Cancelled,
            Err(_) => Outcome::Error,
        };
        self.metrics.call(tool.as_str(), outcome, started.elapsed());
        Ok(result.unwrap_or_else(|error| render::error(&error)).into())
    }
}
