//! `casulo serve`: the MCP gateway over Streamable HTTP.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::result::HostKind;
use tokio_util::sync::CancellationToken;

use crate::cli::ends::Ends;
use crate::cli::host::{self, Choice, Connection};
use crate::cli::limits::LimitOptions;
use crate::cli::options::{Host, SandboxOptions};
use crate::cli::{FAILED, complain};
use crate::emulated;
use crate::gateway::Gateway;
use crate::gateway::http::{self, Address, Config, HttpServer};
use crate::vm::capacity;
use crate::{Runtime, RuntimeConfig};

/// Options of `casulo serve`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    server: ServerOptions,
    #[command(flatten)]
    sandbox: SandboxOptions,
}

/// Where to listen, and for whom.
#[derive(clap::Args, Clone, Debug)]
struct ServerOptions {
    /// Address and port, or unix:PATH for a socket that only you can connect to
    #[arg(long, default_value = "127.0.0.1:7420", value_name = "ADDRESS")]
    listen: Address,
    /// File with a line `NAME TOKEN` for each caller [default: token in CASULO_HOME, made at the
    /// first start; none for unix:PATH]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Let every program of this machine call without a token
    #[arg(long, conflicts_with = "token_file")]
    no_token: bool,
    /// Certificate chain for TLS, in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate, in PEM form
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve other machines without TLS, since something in front of this server does it
    #[arg(long)]
    plain_http: bool,
    /// Further name under which clients reach the server; may be repeated
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Further origin (https://NAME) whose web pages may call; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Seconds that running calls get to end after SIGTERM or Ctrl-C; a second signal ends them
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    drain: u32,
    #[command(flatten)]
    limits: LimitOptions,
}

impl ServerOptions {
    /// What this machine passes on to a server in the emulated host.
    fn forward(&self) -> Result<SocketAddrV4, String> {
        match self.listen {
            Address::Tcp(SocketAddr::V4(address)) if address.port() != 0 => Ok(address),
            _ => Err(format!(
                "the emulated host can be reached on an IPv4 address and a port other than 0 only, \
                 and not on {}",
                self.listen
            )),
        }
    }

    /// What the server is to do, and where the tokens are if a file of them was made.
    fn config(&self) -> Result<(Config, Option<PathBuf>), String> {
        let (tokens, file) = match &self.token_file {
            Some(path) => (http::read_tokens(path).map_err(|e| e.to_string())?, None),
            None if self.no_token || matches!(self.listen, Address::Unix(_)) => (Vec::new(), None),
            None => {
                let path = host::home().join("token");
                let (tokens, _) = http::read_or_make_tokens(&path).map_err(|e| e.to_string())?;
                (tokens, Some(path))
            }
        };
        let mut config = Config::new(self.listen.clone(), tokens);
        config.anonymous = self.no_token;
        if let Address::Tcp(listen) = &self.listen
            && emulated::is_forwarded()
        {
            config.bind = Some(SocketAddr::from((emulated::FORWARDED, listen.port())));
        }
        config.hosts.clone_from(&self.allow_host);
        config.origins.clone_from(&self.allow_origin);
        config.tls = self.tls_cert.clone().zip(self.tls_key.clone());
        config.plain_http = self.plain_http;
        config.drain = Duration::from_secs(self.drain.into());
        Ok((config, file))
    }
}

/// Serves until a signal; gives the exit status.
pub(crate) fn run(args: &Args) -> u8 {
    let status = host::config().map_err(|e| e.to_string()).and_then(|config| {
        capacity::check(args.sandbox.memory).map_err(|e| e.to_string())?;
        // A service is not to run on something slow and unsafe without having been told so.
        if args.sandbox.host == Host::Auto && !config.emulated {
            host::usable(&config).map_err(|trouble| {
                format!("{trouble}; for development, `--host emulated` serves without KVM")
            })?;
        }
        if args.sandbox.host == Host::Native
            && !config.emulated
            && let Err(trouble) = host::usable(&config)
        {
            complain(&format!("{trouble}; serving all the same, as --host native says"));
        }
        let forward = args.sandbox.host == Host::Emulated && !config.emulated;
        let listen = forward.then(|| args.server.forward()).transpose()?;
        if let Some(address) = listen {
            // Said here in plain words, and not by the emulator.
            std::net::TcpListener::bind(address)
                .map_err(|error| format!("cannot listen on {address}: {error}"))?;
        }
        let connection = Connection { listen, ..Connection::default() };
        match host::choose(&args.sandbox, &config, connection)? {
            Choice::Native => serve(args, config),
            Choice::Done(status) => Ok(status),
        }
    });
    status.unwrap_or_else(|error| {
        complain(&error);
        FAILED
    })
}

/// A connection takes two descriptors and a sandbox more, and most machines give a process 1024 unless it
/// asks for what it may have.
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    // With fewer there are fewer connections at once; others wait.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

fn serve(args: &Args, runtime: RuntimeConfig) -> Result<u8, String> {
    more_descriptors();
    let host = if runtime.emulated { HostKind::Emulated } else { HostKind::Native };
    let (config, token_file) = args.server.config()?;
    let tokio = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start: {e}"))?;
    let status = tokio.block_on(async {
        let runtime = Arc::new(Runtime::open(runtime).map_err(|e| e.to_string())?);
        let spec = args.sandbox.spec();
        let limits = args.server.limits.limits(false);
        let gateway = Gateway::new(runtime, spec, limits, host).map_err(|e| e.to_string())?;
        // What is wrong with the options is said now, not at the first call of a tool.
        gateway.check().await.map_err(|e| e.to_string())?;
        let gateway = Arc::new(gateway);
        let (stop, now) = (CancellationToken::new(), CancellationToken::new());
        signals(&stop, &now)?;
        let server =
            HttpServer::bind(Arc::clone(&gateway), config).await.map_err(|e| e.to_string())?;
        match &token_file {
            Some(file) => complain(&format!(
                "serving MCP at {}; the token is in {}",
                server.url(),
                file.display()
            )),
            None => complain(&format!("serving MCP at {}", server.url())),
        }
        server.serve(stop, now).await;
        gateway.close().await;
        Ok(0)
    });
    // A request may still look for a file; it must not keep the process.
    tokio.shutdown_background();
    status
}

/// The first signal stops the server, the second at once.
fn signals(stop: &CancellationToken, now: &CancellationToken) -> Result<(), String> {
    let mut ends = Ends::install().map_err(|e| e.to_string())?;
    let (stop, now) = (stop.clone(), now.clone());
    tokio::spawn(async move {
        for token in [stop, now] {
            ends.next().await;
            token.cancel();
        }
    });
    Ok(())
}
