//! The MCP gateway: Casulo's face to agents.
//!
//! The gateway owns the tool list, the schemas and the limits. The guest's agent answers its calls,
//! and those answers are data: [`render`](self) bounds and decodes them.

mod render;
mod sandboxes;
mod server;
pub mod tools;

use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::result::HostKind;
use casulo_protocol::spec::SandboxSpec;
use rmcp::ServiceExt;
use rmcp::service::ServerInitializeError;

pub use sandboxes::Limits;

use crate::Runtime;

/// How often idle and old sandboxes are looked for.
const REAP_EVERY: Duration = Duration::from_secs(5);

/// Serves one MCP client on standard input and output until it closes them, or until `stop` is over.
///
/// Every sandbox is made after `template`; its output folder gets a folder of its own for each
/// sandbox.
///
/// # Errors
/// The client broke the protocol before the first request, or the server task failed.
pub async fn serve_stdio(
    runtime: Arc<Runtime>,
    template: SandboxSpec,
    limits: Limits,
    host: HostKind,
    stop: impl Future<Output = ()>,
) -> std::io::Result<()> {
    let sandboxes = sandboxes::Sandboxes::new(runtime, template, limits);
    let server = server::Server { sandboxes: Arc::clone(&sandboxes), host };
    let reaper = tokio::spawn({
        let sandboxes = Arc::clone(&sandboxes);
        async move {
            loop {
                tokio::time::sleep(REAP_EVERY).await;
                sandboxes.reap();
            }
        }
    });
    let serve = async {
        match server.serve(rmcp::transport::stdio_pipes()).await {
            Ok(running) => running.waiting().await.map(drop).map_err(std::io::Error::other),
            // A client that only probes and leaves is no failure.
            Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
            Err(error) => Err(std::io::Error::other(error)),
        }
    };
    let result = tokio::select! {
        result = serve => result,
        () = stop => Ok(()),
    };
    reaper.abort();
    sandboxes.close().await;
    result
}
