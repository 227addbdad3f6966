//! The MCP gateway: Casulo's face to agents.
//!
//! The gateway owns the tool list, the schemas and the limits. The guest's agent answers its calls,
//! and those answers are data: [`render`](self) bounds and decodes them.

mod admission;
mod artifacts;
mod files;
#[cfg(feature = "http")]
pub mod http;
mod limits;
pub(crate) mod lines;
#[cfg_attr(not(feature = "http"), expect(dead_code, reason = "only HTTP shows the counters"))]
mod metrics;
mod processes;
mod progress;
pub(crate) mod render;
mod resources;
mod run;
mod sandboxes;
mod server;
pub mod tools;

use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::result::HostKind;
use casulo_protocol::spec::SandboxSpec;
use rmcp::ServiceExt;
use rmcp::service::ServerInitializeError;

pub use limits::Limits;

use crate::{Error, Runtime};

/// How often idle and old sandboxes are looked for.
const REAP_EVERY: Duration = Duration::from_secs(5);

/// The sandboxes of one gateway and what its clients are told. Every way in, standard input and
/// output or HTTP, serves one of these.
pub struct Gateway {
    sandboxes: Arc<sandboxes::Sandboxes>,
    metrics: Arc<metrics::Metrics>,
    host: HostKind,
    reaper: tokio::task::JoinHandle<()>,
    /// What HTTP serves instead of the tools.
    #[cfg(feature = "http")]
    instead: Option<http::Endpoint>,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A gateway whose sandboxes are made after `template`; the template's output folder gets a
    /// folder of its own for each sandbox. Must be called inside tokio.
    ///
    /// # Errors
    /// What sandboxes put out is to be kept, and there is no folder to keep it in.
    pub fn new(
        runtime: Arc<Runtime>,
        template: SandboxSpec,
        limits: Limits,
        host: HostKind,
    ) -> Result<Self, Error> {
        let sandboxes = sandboxes::Sandboxes::new(runtime, template, limits)?;
        let reaper = tokio::spawn({
            let sandboxes = Arc::clone(&sandboxes);
            async move {
                loop {
                    tokio::time::sleep(REAP_EVERY).await;
                    sandboxes.reap();
                }
            }
        });
        Ok(Self {
            sandboxes,
            metrics: Arc::default(),
            host,
            reaper,
            #[cfg(feature = "http")]
            instead: None,
        })
    }

    /// Checks what sandboxes are made after, without starting one.
    ///
    /// # Errors
    /// The template is wrong, or something it needs is missing or damaged.
    pub async fn check(&self) -> Result<(), Error> {
        self.sandboxes.check().await
    }

    /// The MCP server for one caller.
    fn server(&self, caller: &str, keep: bool) -> server::Server {
        let (sandboxes, metrics) = (Arc::clone(&self.sandboxes), Arc::clone(&self.metrics));
        server::Server { sandboxes, metrics, caller: caller.into(), host: self.host, keep }
    }

    /// Lets HTTP serve another MCP server than the tools, through everything else that is in the way
    /// of a request: the conformance suite wants tools of its own.
    #[cfg(feature = "http")]
    #[doc(hidden)]
    #[must_use]
    pub fn instead(mut self, server: impl rmcp::ServerHandler + Clone) -> Self {
        self.instead = Some(http::endpoint(server));
        self
    }

    /// What HTTP serves to one caller.
    #[cfg(feature = "http")]
    fn endpoint(&self, caller: &str) -> http::Endpoint {
        self.instead.clone().unwrap_or_else(|| http::endpoint(self.server(caller, false)))
    }

    /// Counters for Prometheus; `in_flight` calls are being answered.
    #[cfg(feature = "http")]
    fn metrics_text(&self, in_flight: usize, draining: bool) -> String {
        let (sandboxes, kept) = self.sandboxes.count();
        let limit = self.sandboxes.limits.sandboxes;
        let store = self.sandboxes.store.as_ref();
        let (artifacts, artifact_bytes) = store.map_or((0, 0), |store| store.count());
        self.metrics.text(metrics::Now {
            sandboxes,
            kept,
            limit,
            in_flight,
            draining,
            artifacts,
            artifact_bytes,
        })
    }

    /// Serves one MCP client on standard input and output until it closes them, or until `stop` is
    /// over. The sandboxes stay until [`Self::close`]. With `keep` calls that name no sandbox share one.
    ///
    /// # Errors
    /// The client broke the protocol before the first request, or the server task failed.
    pub async fn serve_stdio(
        &self,
        keep: bool,
        stop: impl Future<Output = ()>,
    ) -> std::io::Result<()> {
        let serve = async {
            let (read, write) = rmcp::transport::stdio_pipes();
            match self.server("stdio", keep).serve(lines::Lines::new(read, write)).await {
                Ok(running) => running.waiting().await.map(drop).map_err(std::io::Error::other),
                // A client that only probes and leaves is no failure.
                Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
                Err(error) => Err(std::io::Error::other(error)),
            }
        };
        tokio::select! {
            result = serve => result,
            () = stop => Ok(()),
        }
    }

    /// Ends every sandbox, and makes what they wrote safe to read.
    pub async fn close(&self) {
        self.reaper.abort();
        self.sandboxes.close().await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.reaper.abort();
    }
}
