//! The gateway over Streamable HTTP.
//!
//! ```text
//!   accept -> TLS if any -> HTTP/1.1 -> names and origins -> who calls -> /mcp
//!                                                                         /v1/sandboxes/{id}/files
//!                                                                         /v1/sandboxes/{id}/exec
//!                                                                         /metrics
//! ```
//!
//! `/mcp` serves both eras of MCP: requests of 2026-07-28 stand alone; a client that begins with
//! `initialize` gets a session. Each caller has MCP sessions of its own, so that a session's id is of
//! no use to another. `/healthz` asks for no token.
//!
//! A server is on loopback, or it has tokens and TLS. To end, it first refuses new calls while those
//! that run get time, then cuts what still runs.

mod app;
mod auth;
pub(crate) mod exec;
mod files;
mod listen;
mod origin;
mod peer;
mod pieces;
mod range;
mod stream;
#[cfg(test)]
pub(crate) mod tests;
mod tls;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use auth::{Entry, TokenError, read as read_tokens, read_or_make as read_or_make_tokens};
pub use listen::Address;
pub use tls::TlsError;

use super::Gateway;
use app::App;
pub(super) use app::{Endpoint, endpoint};
use listen::{Listener, Stream};
use origin::Names;
use peer::Peer;

/// Most connections at once; more wait until one is closed.
const MAX_CONNECTIONS: usize = 1024;
/// Longest time for a TLS handshake, and for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of the head of a request.
const MAX_HEAD: usize = 64 * 1024;
/// How long streams get to end once they have been told to.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How to serve.
#[derive(Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: Address,
    /// Where to listen instead if something passes on to there what comes to `listen`.
    pub bind: Option<SocketAddr>,
    /// Who may call. May be empty on a socket in the file system.
    pub tokens: Vec<Entry>,
    /// Serve without a token whoever reaches a loopback address. On a socket in the file system this
    /// user and root need none in any case.
    pub anonymous: bool,
    /// Further names under which the server is reached.
    pub hosts: Vec<String>,
    /// Further origins whose web pages may call.
    pub origins: Vec<String>,
    /// Files of the certificate chain and its key.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Serve other machines without TLS, since something in front of this server does it.
    pub plain_http: bool,
    /// How long calls get to end after a signal.
    pub drain: Duration,
}

impl Config {
    /// On this address, with these tokens; ten seconds to drain.
    pub fn new(listen: Address, tokens: Vec<Entry>) -> Self {
        Self {
            listen,
            bind: None,
            tokens,
            anonymous: false,
            hosts: Vec::new(),
            origins: Vec::new(),
            tls: None,
            plain_http: false,
            drain: Duration::from_secs(10),
        }
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: Address,
        /// What the system said.
        error: io::Error,
    },
    /// Nobody could call.
    #[error("{0} needs a token for every caller; give a token file")]
    NoToken(Address),
    /// Whoever reaches the machine could call.
    #[error("{0} can be reached from other machines, so that it needs tokens")]
    OpenToOthers(Address),
    /// Tokens could be read on their way.
    #[error(
        "{0} can be reached from other machines, where tokens must not travel unencrypted; give a \
         certificate and its key (--tls-cert, --tls-key), or say that something in front of this \
         server does TLS (--plain-http)"
    )]
    PlainToOthers(Address),
    /// The certificate or its key.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A gateway that listens.
pub struct HttpServer {
    listener: Listener,
    address: Address,
    tls: Option<TlsAcceptor>,
    app: Arc<App>,
    drain: Duration,
    cancel: CancellationToken,
}

impl std::fmt::Debug for HttpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl HttpServer {
    /// Checks the configuration and listens.
    ///
    /// # Errors
    /// It would serve whom it should not, or cannot listen.
    pub async fn bind(gateway: Arc<Gateway>, config: Config) -> Result<Self, ServeError> {
        let names = match &config.listen {
            Address::Unix(_) => Names::any_host(&config.origins),
            Address::Tcp(tcp) => {
                let listen = || config.listen.clone();
                match (tcp.ip().is_loopback(), config.anonymous, config.tokens.is_empty()) {
                    (false, true, _) => return Err(ServeError::OpenToOthers(listen())),
                    (_, false, true) => return Err(ServeError::NoToken(listen())),
                    (false, ..) if config.tls.is_none() && !config.plain_http => {
                        return Err(ServeError::PlainToOthers(listen()));
                    }
                    _ => {}
                }
                let mut hosts = config.hosts.clone();
                if !tcp.ip().is_unspecified() {
                    hosts.push(match tcp.ip() {
                        std::net::IpAddr::V6(ip) => format!("[{ip}]"),
                        ip => ip.to_string(),
                    });
                }
                Names::new(&hosts, &config.origins)
            }
        };
        let tls = config.tls.as_ref().map(|(c, k)| tls::acceptor(c, k)).transpose()?;
        let failed = |error| ServeError::Listen { address: config.listen.clone(), error };
        let bind = config.bind.map(Address::Tcp);
        let listener = Listener::bind(bind.as_ref().unwrap_or(&config.listen));
        let listener = listener.await.map_err(failed)?;
        let address = match bind {
            Some(_) => config.listen.clone(),
            None => listener.address().map_err(failed)?,
        };
        let open = config.anonymous || matches!(address, Address::Unix(_));
        let cancel = CancellationToken::new();
        let app = Arc::new(App::new(gateway, names, config.tokens, open, &cancel));
        Ok(Self { listener, address, tls, app, drain: config.drain, cancel })
    }

    /// Where it listens; the port is the real one.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What to give to clients.
    pub fn url(&self) -> String {
        match &self.address {
            Address::Tcp(address) => {
                let scheme = if self.tls.is_some() { "https" } else { "http" };
                format!("{scheme}://{address}{}", app::MCP)
            }
            unix @ Address::Unix(_) => unix.to_string(),
        }
    }

    /// Serves until `stop`; then those who have called get the time to drain, unless `now` comes. The
    /// sandboxes stay until [`Gateway::close`].
    pub async fn serve(self, stop: CancellationToken, now: CancellationToken) {
        let Self { listener, tls, app, drain, cancel, .. } = self;
        let (connections, closing) = (TaskTracker::new(), CancellationToken::new());
        let mut accept = Box::pin(async {
            let limit = Arc::new(Semaphore::new(MAX_CONNECTIONS));
            loop {
                // The semaphore is never closed.
                let Ok(permit) = Arc::clone(&limit).acquire_owned().await else { return };
                let stream = match listener.accept().await {
                    Ok(stream) => stream,
                    Err(_) => {
                        // The client has gone already, or there are no descriptors; then it helps
                        // to wait a little.
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        continue;
                    }
                };
                let (app, tls, closing) = (Arc::clone(&app), tls.clone(), closing.clone());
                connections.spawn(async move {
                    app.connected();
                    match stream {
                        Stream::Tcp(stream) => {
                            let peer = Peer::of(&stream);
                            encrypted(stream, tls, app, peer, closing).await;
                        }
                        Stream::Unix(stream) => {
                            let peer = Peer::of(&stream);
                            encrypted(stream, tls, app, peer, closing).await;
                        }
                    }
                    drop(permit);
                });
            }
        });
        tokio::select! {
            () = &mut accept => {}
            () = stop.cancelled() => {}
            () = now.cancelled() => {}
        }
        // Still listening, so that who asks how it is, and who calls, is told.
        app.draining.store(true, Ordering::Relaxed);
        tokio::select! {
            () = &mut accept => {}
            () = app.idle() => {}
            () = tokio::time::sleep(drain) => {}
            () = now.cancelled() => {}
        }
        cancel.cancel();
        drop(accept);
        closing.cancel();
        for all in [&connections, &app.streams] {
            all.close();
        }
        let ended = async { tokio::join!(connections.wait(), app.streams.wait()) };
        let _ = tokio::time::timeout(LAST_WORDS, ended).await;
    }
}

/// Serves one connection, with TLS if there is a certificate.
async fn encrypted<S>(
    stream: S,
    tls: Option<TlsAcceptor>,
    app: Arc<App>,
    peer: Option<Arc<Peer>>,
    closing: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    match tls {
        None => connection(stream, app, peer, closing).await,
        Some(tls) => {
            // Who does not come to terms is no caller.
            let terms = tokio::time::timeout(HEAD_TIMEOUT, tls.accept(stream));
            if let Some(Ok(Ok(stream))) = closing.run_until_cancelled(terms).await {
                connection(stream, app, peer, closing).await;
            }
        }
    }
}

async fn connection<S>(
    stream: S,
    app: Arc<App>,
    peer: Option<Arc<Peer>>,
    closing: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(app.sandboxes().limits.stall));
    let service = service_fn(move |mut request: Request<Incoming>| {
        let app = Arc::clone(&app);
        if let Some(peer) = &peer {
            request.extensions_mut().insert(Arc::clone(peer));
        }
        async move { Ok::<_, std::convert::Infallible>(app.handle(request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), service)
        .with_upgrades();
    tokio::pin!(connection);
    // A client that breaks the protocol or goes away has been answered as far as possible.
    tokio::select! {
        _ = connection.as_mut() => {}
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}
