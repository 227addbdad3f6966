//! The MCP server: checks arguments, finds or boots the sandbox, calls it, and renders the answer.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{ListFiles, ReadFile, WriteFile};
use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::{HostKind, SandboxFate};
use casulo_protocol::spec::{OUTPUT_PATH, RunSpec};
use rmcp::ErrorData;
use rmcp::handler::server::ServerHandler;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock,
    Implementation, JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use super::metrics::{Metrics, Outcome};
use super::render;
use super::sandboxes::{Caller, Held, Sandboxes};
use super::tools::{
    self, CreateSandboxArgs, CreateSandboxResult, DestroySandboxArgs, Encoding, ExecuteCodeArgs,
    ListFilesArgs, MAX_ENTRIES, MAX_READ, MAX_TIMEOUT_SECONDS, Name, ReadFileArgs, ReadFileResult,
    RunCommandArgs, WriteFileArgs, WriteFileResult,
};
use crate::agent::Program;
use crate::{Files, Output};

const INSTRUCTIONS: &str = "Runs code and commands in isolated Linux microVMs without network. \
    run_command and execute_code without sandbox_id get a fresh microVM that is discarded after the \
    call. For work in several steps call create_sandbox once, pass its sandbox_id, and \
    destroy_sandbox at the end. A program that fails is a normal result: look at exit_code and \
    stderr.";

/// The gateway as one caller sees it. Clones share its sandboxes.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) sandboxes: Arc<Sandboxes>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) caller: Caller,
    pub(super) host: HostKind,
}

fn invalid(message: impl Into<String>) -> TaskError {
    TaskError { class: ErrorClass::InvalidArgument, message: message.into(), retry: Retry::No }
}

fn internal(message: impl Into<String>) -> TaskError {
    TaskError { class: ErrorClass::Internal, message: message.into(), retry: Retry::Unknown }
}

fn cancelled() -> TaskError {
    internal("the call was cancelled")
}

fn parse<T: DeserializeOwned>(arguments: Option<JsonObject>) -> Result<T, TaskError> {
    serde_json::from_value(serde_json::Value::Object(arguments.unwrap_or_default()))
        .map_err(|error| invalid(format!("wrong arguments: {error}")))
}

fn check_range(name: &str, value: u32, max: u32) -> Result<(), TaskError> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(invalid(format!("{name} is {value}; it must be from 1 to {max}")))
}

fn structured<T: Serialize>(value: &T) -> Result<CallToolResult, TaskError> {
    render::both(value).map_err(|error| internal(format!("cannot encode the result: {error}")))
}

/// Runs `work` until it ends or the client gives up.
async fn or_cancelled<T>(
    cancel: &CancellationToken,
    work: impl Future<Output = Result<T, TaskError>>,
) -> Result<T, TaskError> {
    tokio::select! {
        result = work => result,
        () = cancel.cancelled() => Err(cancelled()),
    }
}

impl Server {
    async fn call(
        &self,
        tool: Name,
        arguments: Option<JsonObject>,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        match tool {
            Name::RunCommand => self.run_command(parse(arguments)?, cancel).await,
            Name::ExecuteCode => self.execute_code(parse(arguments)?, cancel).await,
            Name::ReadFile => self.read_file(parse(arguments)?, cancel).await,
            Name::WriteFile => self.write_file(parse(arguments)?, cancel).await,
            Name::ListFiles => self.list_files(parse(arguments)?, cancel).await,
            Name::CreateSandbox => {
                let CreateSandboxArgs {} = parse(arguments)?;
                let sandbox_id = or_cancelled(cancel, self.sandboxes.create(&self.caller)).await?;
                structured(&CreateSandboxResult {
                    sandbox_id,
                    idle_timeout_seconds: self.sandboxes.limits.idle.as_secs(),
                    max_life_seconds: self.sandboxes.limits.life.as_secs(),
                })
            }
            Name::DestroySandbox => {
                let args: DestroySandboxArgs = parse(arguments)?;
                let output = self.sandboxes.destroy(&self.caller, &args.sandbox_id).await?;
                structured(&render::destroyed(output))
            }
        }
    }

    async fn run_command(
        &self,
        args: RunCommandArgs,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        if args.command.is_empty() {
            return Err(invalid("command is empty"));
        }
        let mut spec = RunSpec::new(["bash", "-c", &args.command]);
        spec.env = args.env;
        let program = Program::Command;
        self.execute(
            spec,
            program,
            &args.sandbox_id,
            args.timeout_seconds,
            &args.cwd,
            args.stdin,
            cancel,
        )
        .await
    }

    async fn execute_code(
        &self,
        args: ExecuteCodeArgs,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        let mut spec = RunSpec::default();
        spec.env = args.env;
        let program = Program::Code { language: args.language.name().to_owned(), code: args.code };
        self.execute(
            spec,
            program,
            &args.sandbox_id,
            args.timeout_seconds,
            &args.cwd,
            args.stdin,
            cancel,
        )
        .await
    }

    #[expect(clippy::too_many_arguments, reason = "the fields that two argument types share")]
    async fn execute(
        &self,
        mut spec: RunSpec,
        program: Program,
        sandbox_id: &str,
        timeout_seconds: u32,
        cwd: &str,
        stdin: String,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        check_range("timeout_seconds", timeout_seconds, MAX_TIMEOUT_SECONDS)?;
        spec.timeout_ms = Some(u64::from(timeout_seconds) * 1000);
        spec.workdir = (!cwd.is_empty()).then(|| cwd.to_owned());
        let run = async |held: &Held| {
            held.sandbox
                .call(&spec, &program, stdin, render::KEPT_OUTPUT)
                .await
                .map_err(TaskError::from)
        };
        let (answer, output, fate, id) = if sandbox_id.is_empty() {
            // Dropping the sandbox on cancellation ends its VM.
            let (answer, output) = or_cancelled(cancel, async {
                let held = self.sandboxes.fresh(&self.caller).await?;
                let answer = run(&held).await?;
                let output = held.sandbox.finish(Files::List).await.map_err(TaskError::from)?;
                Ok((answer, output))
            })
            .await?;
            (answer, output, SandboxFate::Discarded, None)
        } else {
            let call = self.sandboxes.get(&self.caller, sandbox_id)?;
            let answer = or_cancelled(cancel, run(&call)).await?;
            (answer, Output::default(), SandboxFate::Kept, Some(sandbox_id.to_owned()))
        };
        structured(&render::command(&answer, output, self.host, fate, id))
    }

    async fn read_file(
        &self,
        args: ReadFileArgs,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        check_range("limit", args.limit, MAX_READ)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let request =
            ReadFile { path: args.path, offset: args.offset, limit: u64::from(args.limit) };
        let answer = or_cancelled(cancel, async {
            call.sandbox.read_file(request).await.map_err(TaskError::from)
        })
        .await?;
        let data = STANDARD
            .decode(&answer.data)
            .map_err(|_| internal("the guest's answer is no base64; destroy this sandbox"))?;
        let length = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if length > u64::from(args.limit) {
            return Err(internal("the guest sent more than was asked for; destroy this sandbox"));
        }
        structured(&ReadFileResult {
            content: match args.encoding {
                Encoding::Utf8 => String::from_utf8_lossy(&data).into_owned(),
                Encoding::Base64 => answer.data,
            },
            encoding: args.encoding,
            size: answer.size,
            next_offset: args.offset.saturating_add(length),
        })
    }

    async fn write_file(
        &self,
        args: WriteFileArgs,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        let data = match args.encoding {
            Encoding::Utf8 => STANDARD.encode(&args.content),
            Encoding::Base64 => {
                STANDARD
                    .decode(&args.content)
                    .map_err(|error| invalid(format!("content is no base64: {error}")))?;
                args.content
            }
        };
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let request = WriteFile { path: args.path, data, append: args.append, mode: None };
        let answer = or_cancelled(cancel, async {
            call.sandbox.write_file(request).await.map_err(TaskError::from)
        })
        .await?;
        structured(&WriteFileResult { size: answer.size })
    }

    async fn list_files(
        &self,
        args: ListFilesArgs,
        cancel: &CancellationToken,
    ) -> Result<CallToolResult, TaskError> {
        check_range("limit", args.limit, MAX_ENTRIES)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let path = if args.path.is_empty() { OUTPUT_PATH.to_owned() } else { args.path };
        let request = ListFiles { path, recursive: args.recursive, limit: u64::from(args.limit) };
        let mut answer = or_cancelled(cancel, async {
            call.sandbox.list_files(request).await.map_err(TaskError::from)
        })
        .await?;
        // The guest may ignore the limit.
        let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
        if answer.entries.len() > limit {
            answer.entries.truncate(limit);
            answer.truncated = true;
        }
        structured(&answer)
    }
}

/// An error that the model can read and act on: the same object in both forms.
fn error_result(error: &TaskError) -> CallToolResult {
    let value = serde_json::to_value(error).unwrap_or_default();
    let mut result = CallToolResult::error(vec![ContentBlock::text(value.to_string())]);
    result.structured_content = Some(value);
    result
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut name = Implementation::new("casulo", env!("CARGO_PKG_VERSION"));
        name.title = Some("Casulo".to_owned());
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(name)
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools::list())
            .with_ttl_ms(3_600_000)
            .with_cache_scope(CacheScope::Private))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::list().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = Name::parse(&request.name) else {
            return Err(ErrorData::invalid_params(
                format!("unknown tool {:?}; tools/list names the tools", request.name),
                None,
            ));
        };
        let started = Instant::now();
        let result = self.call(tool, request.arguments, &context.ct).await;
        let outcome = match &result {
            Ok(_) => Outcome::Result,
            Err(_) if context.ct.is_cancelled() => Outcome::Cancelled,
            Err(_) => Outcome::Error,
        };
        self.metrics.call(tool.as_str(), outcome, started.elapsed());
        Ok(result.unwrap_or_else(|error| error_result(&error)).into())
    }
}
