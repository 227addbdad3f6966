//! `casulo mcp`: the MCP gateway for one client on standard input and output.

use std::sync::Arc;

use casulo_protocol::result::HostKind;

use crate::bridge::{self, Endpoint};
use crate::cli::connect::ConnectOptions;
use crate::cli::ends::{Ends, on_this_thread};
use crate::cli::host::{self, Choice, Connection};
use crate::cli::limits::LimitOptions;
use crate::cli::options::SandboxOptions;
use crate::cli::{FAILED, complain};
use crate::gateway::Gateway;
use crate::vm::capacity;
use crate::{Runtime, RuntimeConfig};

/// Options of `casulo mcp`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Let calls that name no sandbox share one, which lives as long as this process
    #[arg(long)]
    keep: bool,
    /// Pass everything on to the `casulo serve` at http://HOST:PORT/mcp, https://HOST/mcp or
    /// unix:PATH, where sandboxes outlive this process
    #[arg(
        long, value_name = "URL", group = "remote", help_heading = "Options of a connection",
        conflicts_with_all = ["SandboxOptions", "max_sandboxes", "keep"]
    )]
    connect: Option<String>,
    #[command(flatten)]
    connection: ConnectOptions,
    #[command(flatten)]
    sandbox: SandboxOptions,
    #[command(flatten)]
    limits: LimitOptions,
}

/// Serves until the client closes standard input; gives the exit status.
pub(crate) fn run(args: &Args) -> u8 {
    let status = match &args.connect {
        Some(url) => args.connection.endpoint(url).and_then(pass_on),
        None => here(args),
    };
    status.unwrap_or_else(|error| {
        complain(&error);
        FAILED
    })
}

/// Serves with a `casulo serve` elsewhere.
fn pass_on(endpoint: Endpoint) -> Result<u8, String> {
    on_this_thread(async {
        let (input, output) = rmcp::transport::stdio_pipes();
        let result = bridge::run(endpoint, input, output).await;
        result.map(|()| 0).map_err(|e| format!("standard input or output failed: {e}"))
    })
}

/// Serves with sandboxes of this process.
fn here(args: &Args) -> Result<u8, String> {
    host::config().map_err(|e| e.to_string()).and_then(|config| {
        capacity::check(args.sandbox.memory).map_err(|e| e.to_string())?;
        let stdio = Connection { input: true, ..Connection::default() };
        match host::choose(&args.sandbox, &config, stdio)? {
            Choice::Native => serve(args, config),
            Choice::Done(status) => Ok(status),
        }
    })
}

fn serve(args: &Args, config: RuntimeConfig) -> Result<u8, String> {
    let host = if config.emulated { HostKind::Emulated } else { HostKind::Native };
    on_this_thread(async {
        let runtime = Arc::new(Runtime::open(config).map_err(|e| e.to_string())?);
        let spec = args.sandbox.spec();
        let limits = args.limits.limits(true);
        let mut ends = Ends::install().map_err(|e| e.to_string())?;
        let mut status = 0;
        let stop = async { status = ends.next().await };
        let gateway = Gateway::new(runtime, spec, limits, host).map_err(|e| e.to_string())?;
        // What is wrong with the options is said now, not at the first call of a tool.
        gateway.check().await.map_err(|e| e.to_string())?;
        let served = gateway.serve_stdio(args.keep, stop).await;
        gateway.close().await;
        served.map_err(|e| format!("the MCP connection failed: {e}"))?;
        Ok(status)
    })
}
