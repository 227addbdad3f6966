//! `casulo wrap`: other people's MCP servers for one client on standard input and output.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::spec::{RunSpec, SandboxSpec};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader};
use tokio_util::sync::CancellationToken;

use crate::cli::connect::ConnectOptions;
use crate::cli::ends::{Ends, on_this_thread};
use crate::cli::host::{self, Choice, Connection};
use crate::cli::options::{EnvironmentOptions, SandboxOptions, bytes, milliseconds};
use crate::cli::run::unknown_option;
use crate::cli::{FAILED, complain};
use crate::vm::capacity;
use crate::wrap::{self, Allowlist, Place, ServerSpec, Wrapped};
use crate::{Runtime, RuntimeConfig};

/// Where `casulo serve` is unless it was told otherwise.
const LOCAL: &str = "http://127.0.0.1:7420/mcp";
/// What each server of a file has of its own.
const EACH: [&str; 22] = [
    "argv",
    "artifact",
    "boot_timeout",
    "cold",
    "cpus",
    "env",
    "env_file",
    "image",
    "input",
    "input_live",
    "max_processes",
    "memory",
    "output",
    "output_files",
    "output_limit",
    "output_links",
    "scratch",
    "share",
    "share_sensitive",
    "share_xattr",
    "user",
    "workdir",
];

/// Options of `casulo wrap`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Offer only these tools of the server: names, and patterns with `*` and `?`, with commas
    /// between them
    #[arg(long, value_name = "ALLOWLIST", conflicts_with = "config")]
    tools: Option<String>,
    /// Accept the tools that the server offers now, in place of those that were accepted before
    #[arg(long)]
    accept_tools: bool,
    /// Most seconds that a request may take
    #[arg(long, default_value = "60", value_parser = milliseconds, value_name = "SECONDS", conflicts_with = "config")]
    timeout: u64,
    /// Most bytes of a result; K, M for KiB, MiB
    #[arg(long, default_value = "256K", value_parser = max_result, value_name = "BYTES", conflicts_with = "config")]
    max_result: usize,
    /// Pass the texts of results on as they are, with what acts unseen in them
    #[arg(long, conflicts_with = "config")]
    raw: bool,
    /// Wrap the servers of this file (docs/wrap.md) instead, each in a microVM of its own
    #[arg(long, value_name = "FILE", conflicts_with_all = EACH)]
    config: Option<PathBuf>,
    /// Run the server in this sandbox of a running `casulo serve`, which `create_sandbox` made,
    /// instead of in a microVM of its own
    #[arg(long = "sandbox", value_name = "ID", group = "remote", help_heading = "Options of a connection", conflicts_with_all = ["config", "SandboxOptions", "user"])]
    kept: Option<String>,
    /// Where that is: http://HOST:PORT/mcp, https://HOST/mcp or unix:PATH [default:
    /// http://127.0.0.1:7420/mcp]
    #[arg(long, value_name = "URL", help_heading = "Options of a connection", requires = "kept")]
    connect: Option<String>,
    #[command(flatten)]
    connection: ConnectOptions,
    #[command(flatten)]
    sandbox: SandboxOptions,
    #[command(flatten)]
    environment: EnvironmentOptions,
    /// The server's command and its arguments; options end here
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required_unless_present = "config")]
    argv: Vec<String>,
}

/// The microVM of a server that has its own.
fn own(server: &ServerSpec) -> Option<&SandboxSpec> {
    match &server.place {
        Place::Own(spec) => Some(spec),
        Place::Kept { .. } => None,
    }
}

fn max_result(text: &str) -> Result<usize, String> {
    match bytes(text)? {
        n @ 1024..=8_388_608 => usize::try_from(n).map_err(|error| error.to_string()),
        _ => Err("it must be from 1K to 8M".to_owned()),
    }
}

impl Args {
    /// The servers, and the options of a microVM with all that they need of this machine.
    fn servers(&self) -> Result<(Vec<ServerSpec>, SandboxOptions), String> {
        let mut all = self.sandbox.clone();
        if let Some(file) = &self.config {
            let servers = wrap::read_config(file).map_err(|error| error.to_string())?;
            let mut memory = 0u32;
            for server in &servers {
                let Some(spec) = own(server) else { continue };
                memory = memory.saturating_add(spec.memory_mib);
                let place = |host: &PathBuf, writable| casulo_protocol::spec::ShareSpec {
                    host: host.clone(),
                    guest: "/".to_owned(),
                    writable,
                };
                all.share.extend(spec.input.iter().map(|path| place(path, false)));
                all.share.extend(spec.output.iter().map(|path| place(path, true)));
                all.share.extend(spec.shares.iter().cloned());
                if let Some(output) = &spec.output {
                    // As --output does; what else is wrong is found when the server starts.
                    let _ = std::fs::create_dir(output);
                }
            }
            all.memory = memory;
            return Ok((servers, all));
        }
        let mut command = RunSpec::new(self.argv.clone());
        command.env = self.environment.environment()?;
        command.user.clone_from(&self.environment.user);
        command.workdir.clone_from(&self.environment.workdir);
        let patterns = self.tools.as_deref().map(|list| list.split(',').collect::<Vec<_>>());
        let tools = Allowlist::new(patterns.unwrap_or_default())
            .map_err(|error| format!("--tools: {error}"))?;
        let server = ServerSpec {
            name: String::new(),
            place: match &self.kept {
                None => Place::Own(Box::new(self.sandbox.spec())),
                Some(id) => {
                    let url = self.connect.as_deref().unwrap_or(LOCAL);
                    let endpoint = Box::new(self.connection.endpoint(url)?);
                    Place::Kept { endpoint, id: id.clone() }
                }
            },
            command,
            tools,
            timeout: Duration::from_millis(self.timeout),
            max_result: self.max_result,
            raw: self.raw,
        };
        Ok((vec![server], all))
    }
}

/// Serves until the client closes standard input; gives the exit status.
pub(crate) fn run(args: &Args) -> u8 {
    let status = started(args);
    status.unwrap_or_else(|error| {
        complain(&error);
        FAILED
    })
}

fn started(args: &Args) -> Result<u8, String> {
    if let Some(word) = unknown_option(&args.argv, std::env::args_os()) {
        return Err(format!(
            "unknown option {word:?}; `casulo wrap --help` lists the options, and `--` ends them"
        ));
    }
    let config = host::config().map_err(|e| e.to_string())?;
    let (servers, all) = args.servers()?;
    if args.kept.is_some() {
        // Nothing runs on this machine but this process.
        return serve(servers, args.accept_tools, config);
    }
    capacity::check(all.memory).map_err(|e| e.to_string())?;
    let stdio = Connection { input: true, ..Connection::default() };
    match host::choose(&all, &config, stdio)? {
        Choice::Native => serve(servers, args.accept_tools, config),
        Choice::Done(status) => Ok(status),
    }
}

/// Until the client has closed its side without having said anything.
async fn gone(read: &mut (impl AsyncBufRead + Unpin)) {
    if read.fill_buf().await.is_ok_and(|said| !said.is_empty()) {
        std::future::pending::<()>().await;
    }
}

fn serve(servers: Vec<ServerSpec>, accept: bool, config: RuntimeConfig) -> Result<u8, String> {
    on_this_thread(async {
        let runtime = Arc::new(Runtime::open(config).map_err(|e| e.to_string())?);
        for server in &servers {
            if let Some(spec) = own(server) {
                let whose = match server.name.as_str() {
                    "" => String::new(),
                    name => format!("server {name:?}: "),
                };
                runtime.check(spec).await.map_err(|e| format!("{whose}{e}"))?;
            }
        }
        let mut ends = Ends::install().map_err(|e| e.to_string())?;
        let pins = host::home().join("wrap/pins");
        let (read, write) = rmcp::transport::stdio_pipes();
        let (mut read, give_up) = (BufReader::new(read), CancellationToken::new());
        let start = Wrapped::start(runtime, servers, pins, accept, give_up.clone());
        tokio::pin!(start);
        let early = tokio::select! {
            wrapped = &mut start => Err(wrapped?),
            status = ends.next() => Ok(status),
            () = gone(&mut read) => Ok(0),
        };
        let wrapped = match early {
            Err(wrapped) => wrapped,
            Ok(status) => {
                give_up.cancel();
                // Those that have just started are ended as ever.
                return match start.await {
                    Ok(wrapped) => wrapped.close().await.map(|()| status),
                    Err(_) => Ok(status),
                };
            }
        };
        let served = tokio::select! {
            served = wrapped.serve(read, write) => served.map(|()| 0),
            status = ends.next() => Ok(status),
        };
        let closed = wrapped.close().await;
        let status = served.map_err(|e| format!("the MCP connection failed: {e}"))?;
        closed.map(|()| status)
    })
}
