//! A `casulo serve` that answers instead of this process, and how to reach it.

use std::path::PathBuf;

use crate::bridge::{self, Endpoint};
use crate::cli::host;
use crate::gateway::http;

/// Who to be to a server, and what to trust on the way; beside an argument of the group `remote`.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Options of a connection")]
pub(crate) struct ConnectOptions {
    /// The server's token file [default: CASULO_TOKEN in the environment, else for a server on this
    /// machine token in CASULO_HOME]
    #[arg(long, value_name = "FILE", requires = "remote")]
    token_file: Option<PathBuf>,
    /// Who to be, where the token file names several
    #[arg(long, value_name = "NAME", requires = "token_file")]
    caller: Option<String>,
    /// Certificates to check the server's with, in PEM form [default: this machine's]
    #[arg(long, value_name = "FILE", requires = "remote")]
    ca_file: Option<PathBuf>,
    /// Let the token go unencrypted to another machine, since the way there is safe
    #[arg(long, requires = "remote")]
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

    /// The server at `url`.
    ///
    /// # Errors
    /// The address, the token or the certificates are wrong; a sentence for the user.
    pub(crate) fn endpoint(&self, url: &str) -> Result<Endpoint, String> {
        let token = self.token(url)?;
        Endpoint::new(url, token.as_deref(), self.ca_file.as_deref(), self.plain_http)
            .map_err(|error| error.to_string())
    }
}
