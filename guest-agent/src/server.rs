//! The agent's MCP server. Its client is Casulo's library on the host, which owns the public tools;
//! any MCP client will do for a look.

use std::borrow::Cow;
use std::sync::Arc;

use casulo_protocol::agent::{
    CommandResult, ExecuteCode, FileContent, FileList, FileWritten, ListFiles, ReadFile,
    RunCommand, WriteFile, tool,
};
use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use rmcp::handler::server::ServerHandler;
use rmcp::handler::server::common::schema_for_type;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
    JsonObject, ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::schemars::JsonSchema;
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ErrorData, ServiceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::code;
use crate::exec::{Engine, ExecError, Task};
use crate::files::{FileError, Files};

/// The tools.
#[derive(Clone)]
pub struct Server {
    engine: Engine,
    files: Arc<Files>,
}

impl Server {
    /// A server whose commands run in `engine`.
    pub fn new(engine: Engine, files: Files) -> Self {
        Self { engine, files: Arc::new(files) }
    }

    /// Serves one connection to its end. What goes wrong on it is its client's affair.
    pub async fn serve_connection(self, connection: impl AsyncRead + AsyncWrite + Send + 'static) {
        if let Ok(service) = ServiceExt::serve(self, connection).await {
            let _ = service.waiting().await;
        }
    }

    async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, TaskError> {
        let run = async |task: Task| {
            let result = self.engine.run(task, context.ct.clone().cancelled_owned()).await;
            answer(&result.map_err(of_exec)?)
        };
        let files = &self.files;
        match name {
            tool::RUN_COMMAND => {
                let RunCommand { argv, options } = arguments_of(arguments)?;
                run(Task { argv, options, extra: None }).await
            }
            tool::EXECUTE_CODE => {
                let request: ExecuteCode = arguments_of(arguments)?;
                if request.session.is_some() {
                    let cancelled = context.ct.clone().cancelled_owned();
                    let result = self.engine.run_session(request, cancelled);
                    return answer(&result.await.map_err(of_exec)?);
                }
                let ExecuteCode { language, code, options, .. } = request;
                let (argv, extra) = code::command(&language, code).map_err(invalid)?;
                run(Task { argv, options, extra }).await
            }
            tool::READ_FILE => {
                answer(&files.read(arguments_of(arguments)?).await.map_err(of_file)?)
            }
            tool::WRITE_FILE => {
                answer(&files.write(arguments_of(arguments)?).await.map_err(of_file)?)
            }
            tool::LIST_FILES => {
                answer(&files.list(arguments_of(arguments)?).await.map_err(of_file)?)
            }
            other => Err(invalid(format!("there is no tool {other:?}"))),
        }
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new(
                env!("CARGO_PKG_NAME"),
                env!("CARGO_PKG_VERSION"),
            ))
            .with_instructions("Runs commands and moves files in this virtual machine.")
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if !TOOLS.contains(&&*request.name) {
            let message = format!("there is no tool {:?}", request.name);
            return Err(ErrorData::invalid_params(message, None));
        }
        let arguments = request.arguments.unwrap_or_default();
        let result = self.call(&request.name, arguments, context).await;
        Ok(result.unwrap_or_else(|error| failure(&error)).into())
    }
}

const TOOLS: [&str; 5] =
    [tool::RUN_COMMAND, tool::EXECUTE_CODE, tool::READ_FILE, tool::WRITE_FILE, tool::LIST_FILES];

fn tools() -> Vec<Tool> {
    fn tool<I, O>(name: &'static str, description: &'static str) -> Tool
    where
        I: JsonSchema + 'static,
        O: JsonSchema + 'static,
    {
        Tool::new(Cow::Borrowed(name), Cow::Borrowed(description), schema_for_type::<I>())
            .with_raw_output_schema(schema_for_type::<O>())
    }
    vec![
        tool::<RunCommand, CommandResult>(tool::RUN_COMMAND, "Runs one program."),
        tool::<ExecuteCode, CommandResult>(tool::EXECUTE_CODE, "Runs Python or Bash source text."),
        tool::<ReadFile, FileContent>(tool::READ_FILE, "Reads part of a regular file."),
        tool::<WriteFile, FileWritten>(tool::WRITE_FILE, "Writes a file."),
        tool::<ListFiles, FileList>(tool::LIST_FILES, "Lists a folder."),
    ]
}

fn arguments_of<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, TaskError> {
    serde_json::from_value(serde_json::Value::Object(arguments))
        .map_err(|e| invalid(format!("the arguments do not fit the tool: {e}")))
}

/// The result as `structuredContent` only: no model reads it here, so a second copy as text would
/// be a waste.
fn answer<T: Serialize>(value: &T) -> Result<CallToolResult, TaskError> {
    let value = serde_json::to_value(value)
        .map_err(|e| error(ErrorClass::Internal, Retry::No, e.to_string()))?;
    let mut result = CallToolResult::success(Vec::new());
    result.structured_content = Some(value);
    Ok(result)
}

fn failure(error: &TaskError) -> CallToolResult {
    let mut result = CallToolResult::error(vec![ContentBlock::text(error.message.clone())]);
    result.structured_content = serde_json::to_value(error).ok();
    result
}

fn error(class: ErrorClass, retry: Retry, message: String) -> TaskError {
    TaskError { class, message, retry }
}

fn invalid(message: String) -> TaskError {
    error(ErrorClass::InvalidArgument, Retry::No, message)
}

fn of_exec(e: ExecError) -> TaskError {
    let message = e.to_string();
    match e {
        ExecError::Invalid(_) => invalid(message),
        ExecError::Busy | ExecError::InterpreterBusy(_) => {
            error(ErrorClass::Capacity, Retry::Yes, message)
        }
        ExecError::Stream(_) => error(ErrorClass::InvalidArgument, Retry::Yes, message),
        ExecError::Cancelled | ExecError::System { .. } => {
            error(ErrorClass::Internal, Retry::Unknown, message)
        }
    }
}

fn of_file(e: FileError) -> TaskError {
    let message = e.to_string();
    match e {
        FileError::Busy => error(ErrorClass::Capacity, Retry::Yes, message),
        FileError::User(..) => error(ErrorClass::Internal, Retry::No, message),
        FileError::System { .. }
        | FileError::NotRegular(_)
        | FileError::Kernel(_)
        | FileError::Base64(_) => invalid(message),
    }
}
