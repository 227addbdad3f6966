//! Casulo's HTTP server with the tools, resources and prompts that the MCP conformance suite asks for.
//!
//! The suite (`@modelcontextprotocol/conformance`) tests a whole server stack through fixtures of its own; each
//! scenario says which. Everything but those is what `casulo serve` uses: listening, Host and Origin, tokens,
//! sessions, bodies and errors. `cargo xtask test` runs it.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use casulo::gateway::http::{Address, Config, HttpServer};
use casulo::gateway::{Gateway, Limits};
use casulo::protocol::result::HostKind;
use casulo::protocol::spec::SandboxSpec;
use casulo::{Runtime, RuntimeConfig};
use tokio_util::sync::CancellationToken;

mod fixture;
mod rounds;

fn main() -> Result<(), Box<dyn Error>> {
    let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    tokio.block_on(async {
        // No tool of the fixtures starts a guest.
        let vmm = std::env::current_exe()?;
        let runtime = Runtime::open(RuntimeConfig::in_home(Path::new("/"), vmm))?;
        let fixture = fixture::Fixture::new()?;
        let limits = Limits { artifact_ttl: Duration::ZERO, ..Limits::default() };
        let template = SandboxSpec::default();
        let gateway = Gateway::new(Arc::new(runtime), template, limits, HostKind::Native)?;
        let gateway = gateway.instead(fixture);
        let mut config = Config::new("127.0.0.1:0".parse::<Address>()?, Vec::new());
        // The suite has no way to send a token.
        config.anonymous = true;
        let server = HttpServer::bind(Arc::new(gateway), config).await?;
        eprintln!("serving MCP at {}", server.url());
        let never = CancellationToken::new();
        server.serve(never.clone(), never).await;
        Ok(())
    })
}
