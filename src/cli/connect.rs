//! `casulo mcp --connect`: standard input and output to a `casulo serve` elsewhere.

use std::path::PathBuf;

use crate::bridge::{self, Endpoint};
use crate::cli::host;
use crate::gateway::http;

/// A server that answers instead of this process.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Options of a connection")]
pub(crate) struct ConnectOptions {
    /// Pass everything on to the `casulo serve` at http://HOST:PORT/mcp, https://HOST/mcp or
    /// unix:PATH, where sandboxes outlive this process
    #[arg(long, value_name = "URL", conflicts_with_all = ["SandboxOptions", "max_sandboxes", "keep"])]
    pub(crate) connect: Option<String>,
    /// The server's token file [default: CASULO_TOKEN in the environment, else for a server on this
    /// machine token in CASULO_HOME]
    #[arg(long, value_name = "FILE", requires = "connect")]
    token_file: Option<PathBuf>,
    /// Who to be, where the token file names several
    #[arg(long, value_name = "NAME", requires = "token_file")]
    caller: Option<String>,
    /// Certificates to check the server's with, in PEM form [default: this machine's]
    #[arg(long, value_name = "FILE", requires = "connect")]
    ca_file: Option<PathBuf>,
    /// Let the token go unencrypted to another machine, since the way there is safe
    #[arg(long, requires = "connect")]
    plain_http: bool,
}

impl ConnectOptions {
    fn token(&self, url: &str) -> Result<Option<String>, String> {
        let file = match &self.token_file {
            Some(file) => file.clone(),
            None => {
                if let Some(token) = std::env::var_os("CASULO_TOKEN").filter(|t| !t.is_empty()) {
                    let token = token.into_string();
                    return token.map(Some).map_err(|_| "CASULO_TOKEN is no text".to_owned());
                }
                let file = host::home().join("token");
                // Nobody else is to be told this machine's own token.
                if url.starts_with("unix:") || !bridge::is_local(url) || !file.exists() {
                    return Ok(None);
                }
                file
            }
        };
        let mut entries = http::read_tokens(&file).map_err(|e| e.to_string())?;
        if let Some(caller) = &self.caller {
            entries.retain(|entry| entry.name == *caller);
        }
        match (entries.pop(), entries.is_empty()) {
            (Some(entry), true) => Ok(Some(entry.token)),
            (Some(_), false) => {
                Err(format!("{} names several callers; choose one with --caller", file.display()))
            }
            (None, _) => Err(format!("{} does not name that caller", file.display())),
        }
    }

    /// Serves until the client closes standard input; gives the exit status.
    pub(crate) fn run(&self, url: &str) -> Result<u8, String> {
        let token = self.token(url)?;
        let endpoint =
            Endpoint::new(url, token.as_deref(), self.ca_file.as_deref(), self.plain_http);
        let endpoint = endpoint.map_err(|e| e.to_string())?;
        let tokio = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| format!("cannot start: {e}"))?;
        let result = tokio.block_on(async {
            let (input, output) = rmcp::transport::stdio_pipes();
            bridge::run(endpoint, input, output).await
        });
        // A read of standard input may still be pending; it must not keep the process.
        tokio.shutdown_background();
        result.map(|()| 0).map_err(|e| format!("standard input or output failed: {e}"))
    }
}
