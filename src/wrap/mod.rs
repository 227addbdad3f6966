//! `casulo wrap`: somebody else's MCP server in a microVM, which to the client is that server.
//!
//! The gateway is a client towards the server and a server towards the client, of either revision of
//! the protocol, whichever the wrapped server speaks:
//!
//! * [`upstream`] speaks JSON-RPC with the guest and keeps every bound of size, number and time;
//! * [`offer`] takes what acts unseen out of everything that a model or a person would read;
//! * [`schema`] checks a tool's input schema, and arguments against it before they reach the server;
//! * [`pin`] remembers the tools that were accepted;
//! * [`server`] answers the client.
//!
//! The server's files are its image and the shares, and it has no network; or it is in a sandbox of a
//! `casulo serve`, with whatever that has.

mod config;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
mod guest;
mod member;
mod offer;
mod pin;
mod said;
mod schema;
mod server;
mod upstream;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::spec::{RunSpec, SandboxSpec};
use rmcp::ServiceExt;
use rmcp::service::ServerInitializeError;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use config::{ConfigError, read as read_config};
pub use offer::Allowlist;

use member::Member;
use pin::Pins;
use server::{Front, Slot};

use crate::Runtime;
use crate::gateway::lines::Lines;

/// Default of [`ServerSpec::timeout`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Default of [`ServerSpec::max_result`].
pub const DEFAULT_MAX_RESULT: usize = 256 * 1024;

/// Where a server runs.
#[derive(Clone, Debug)]
pub enum Place {
    /// In a microVM of its own.
    Own(Box<SandboxSpec>),
    /// In a sandbox that is there already; its end is not the sandbox's.
    #[cfg(feature = "http")]
    Kept {
        /// The `casulo serve` that has it.
        endpoint: Box<crate::bridge::Endpoint>,
        /// The sandbox, as `create_sandbox` named it.
        id: String,
    },
}

impl Place {
    /// Its image, as the user named it, or whose sandbox it is: sandboxes come and go.
    fn name(&self) -> String {
        match self {
            Self::Own(sandbox) => sandbox.image.clone(),
            #[cfg(feature = "http")]
            Self::Kept { endpoint, .. } => format!("a sandbox of {}", endpoint.identity()),
        }
    }

    /// What of the host it can read and not write, in which its program may be.
    fn files(&self) -> Vec<PathBuf> {
        let sandbox = match self {
            Self::Own(sandbox) => sandbox,
            #[cfg(feature = "http")]
            Self::Kept { .. } => return Vec::new(),
        };
        let shares = sandbox.shares.iter().filter(|share| !share.writable);
        let all = sandbox.input.iter().chain(shares.map(|share| &share.host));
        // One that is not there is told when the server starts.
        all.map(|path| path.canonicalize().unwrap_or_else(|_| path.clone())).collect()
    }
}

/// A server to wrap.
#[derive(Clone, Debug)]
pub struct ServerSpec {
    /// Prefix of its tools among those of other servers; empty for a server alone.
    pub name: String,
    /// Where it runs.
    pub place: Place,
    /// The program that speaks MCP on standard input and output.
    pub command: RunSpec,
    /// Which of its tools may be used.
    pub tools: Allowlist,
    /// How long a request may take.
    pub timeout: Duration,
    /// Most bytes of a result.
    pub max_result: usize,
    /// Whether texts of results pass as they are instead of being made safe to read.
    pub raw: bool,
}

/// Wrapped servers that run.
pub struct Wrapped {
    front: Front,
    listeners: JoinSet<()>,
}

impl std::fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wrapped").finish_non_exhaustive()
    }
}

impl Wrapped {
    /// Starts every server, all at the same time. `pins` is the folder of the accepted tools; with
    /// `accept` those that are offered now are. Among several, one that cannot be started does not
    /// keep the others; its tools say why. Whatever has not started when `give_up` says so is ended, and
    /// what it wrote made safe to read.
    ///
    /// # Errors
    /// Why the only server, or every server, cannot be started.
    pub async fn start(
        runtime: Arc<Runtime>,
        servers: Vec<ServerSpec>,
        pins: PathBuf,
        accept: bool,
        give_up: CancellationToken,
    ) -> Result<Self, String> {
        let pins = Pins::new(pins);
        let mut starting = JoinSet::new();
        for (n, spec) in servers.into_iter().enumerate() {
            let (runtime, pins, give_up) = (Arc::clone(&runtime), pins.clone(), give_up.clone());
            starting.spawn(async move {
                let name = spec.name.clone();
                let (tell, notes) = mpsc::channel(4);
                let started = Member::start(&runtime, spec, pins, accept, tell, &give_up).await;
                (n, name, started.map(|member| (member, notes)))
            });
        }
        let mut slots = Vec::new();
        while let Some(started) = starting.join_next().await {
            // A panic ends the process.
            slots.extend(started);
        }
        slots.sort_by_key(|(n, ..)| *n);
        if slots.iter().all(|(_, _, started)| started.is_err()) {
            let why = slots.into_iter().find_map(|(_, _, started)| started.err());
            return Err(why.unwrap_or_else(|| "there is no server to wrap".to_owned()));
        }
        let mut notes = Vec::new();
        let slots = slots.into_iter().map(|(_, name, started)| match started {
            Ok((member, told)) => {
                let member = Arc::new(member);
                notes.push((Arc::clone(&member), told));
                Slot::Up(member)
            }
            Err(why) => {
                said::Said::new(&name).note(&why);
                Slot::Down { name, why }
            }
        });
        let front = Front::new(slots.collect());
        let mut listeners = JoinSet::new();
        for (member, told) in notes {
            listeners.spawn(front.clone().listen(member, told));
        }
        Ok(Self { front, listeners })
    }

    /// Serves one client, whose messages are lines, until it closes its side.
    ///
    /// # Errors
    /// The client broke the protocol before the first request, or the server task failed.
    pub async fn serve(
        &self,
        read: impl AsyncRead + Send + Unpin + 'static,
        write: impl AsyncWrite + Send + Unpin + 'static,
    ) -> io::Result<()> {
        match self.front.clone().serve(Lines::new(read, write)).await {
            Ok(running) => running.waiting().await.map(drop).map_err(io::Error::other),
            // A client that only probes and leaves is no failure.
            Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Ends every server, and makes what they wrote safe to read.
    ///
    /// # Errors
    /// What could not be made safe to read.
    pub async fn close(mut self) -> Result<(), String> {
        self.listeners.shutdown().await;
        let mut closing = JoinSet::new();
        for slot in self.front.slots.iter() {
            if let Slot::Up(member) = slot {
                let member = Arc::clone(member);
                closing.spawn(async move { member.close().await.map_err(|e| e.to_string()) });
            }
        }
        let mut result = Ok(());
        while let Some(closed) = closing.join_next().await {
            if let Ok(Err(error)) = closed {
                result = Err(error);
            }
        }
        result
    }
}
