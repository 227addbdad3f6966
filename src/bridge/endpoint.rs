//! Where `casulo serve` is, and one HTTP request to it.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, HOST, HeaderValue};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use crate::text;

/// Most characters that are repeated of what a server says.
const MAX_SAID: usize = 500;
/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a server cannot be named or reached. What was on its way to it has not been done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// It is no address of a server.
    #[error(
        "`{0}` is no address of a server; use http://HOST:PORT/mcp, https://HOST/mcp or unix:PATH"
    )]
    Address(String),
    /// The token would travel unencrypted.
    #[error(
        "{0} is another machine, where a token must not travel unencrypted; use https, or say that \
         the way there is safe (--plain-http)"
    )]
    Plain(String),
    /// The token has characters that no header can have.
    #[error("the token has characters that no HTTP header can have")]
    Token,
    /// Certificates cannot be read.
    #[error("cannot read certificates in {}: {error}", .path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        error: pem::Error,
    },
    /// There is nothing to check a server's certificate with.
    #[error("this machine has no trusted certificates; install ca-certificates, or give --ca-file")]
    NoRoots,
    /// TLS does not work.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

#[derive(Clone)]
enum Way {
    Unix(PathBuf),
    Tcp { host: String, port: u16, tls: Option<(TlsConnector, ServerName<'static>)> },
}

/// A server's MCP endpoint and the token for it.
#[derive(Clone)]
pub struct Endpoint {
    way: Way,
    name: String,
    path: Uri,
    host: HeaderValue,
    authorization: Option<HeaderValue>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.name).finish_non_exhaustive()
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// Whether what is said to `address` stays on this machine: a socket in the file system or loopback.
pub fn is_local(address: &str) -> bool {
    if address.starts_with("unix:") {
        return true;
    }
    let uri = address.parse::<Uri>().ok();
    uri.as_ref().and_then(Uri::host).is_some_and(is_loopback)
}

fn is_loopback(host: &str) -> bool {
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

impl Endpoint {
    /// The server at `address`, which is told `token`. Certificates are checked with those of `ca`,
    /// or of this machine. To another machine the token goes unencrypted only if `plain_http`.
    ///
    /// # Errors
    /// The address or the token is wrong, the token would be exposed, or there are no certificates.
    pub fn new(
        address: &str,
        token: Option<&str>,
        ca: Option<&Path>,
        plain_http: bool,
    ) -> Result<Self, EndpointError> {
        let authorization = token.map(|token| HeaderValue::try_from(format!("Bearer {token}")));
        let mut authorization = authorization.transpose().map_err(|_| EndpointError::Token)?;
        if let Some(value) = &mut authorization {
            value.set_sensitive(true);
        }
        let name = address.to_owned();
        if let Some(path) = address.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            let way = Way::Unix(path.into());
            let host = HeaderValue::from_static("localhost");
            return Ok(Self { way, name, path: Uri::from_static("/mcp"), host, authorization });
        }
        let wrong = || EndpointError::Address(address.to_owned());
        let uri = address.parse::<Uri>().map_err(|_| wrong())?;
        let authority = uri.authority().filter(|a| !a.as_str().contains('@')).ok_or_else(wrong)?;
        let encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong()),
        };
        if !encrypted && !plain_http && authorization.is_some() && !is_loopback(authority.host()) {
            return Err(EndpointError::Plain(authority.host().to_owned()));
        }
        let bare = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = if encrypted {
            let name = ServerName::try_from(bare.clone()).map_err(|_| wrong())?;
            Some((connector(ca)?, name))
        } else {
            None
        };
        let port = authority.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        let path = match uri.path_and_query().map(|path| path.as_str()) {
            None | Some("" | "/") => Uri::from_static("/mcp"),
            Some(path) => path.parse().map_err(|_| wrong())?,
        };
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| wrong())?;
        Ok(Self { way: Way::Tcp { host: bare, port, tls }, name, path, host, authorization })
    }

    /// The address in one spelling, for what is remembered of a server.
    pub(crate) fn identity(&self) -> String {
        let scheme = match &self.way {
            Way::Unix(path) => return format!("unix:{}", path.display()),
            Way::Tcp { tls: Some(_), .. } => "https",
            Way::Tcp { tls: None, .. } => "http",
        };
        // A header made of a part of a URL is text.
        format!("{scheme}://{}{}", self.host.to_str().unwrap_or_default(), self.path)
    }

    /// Sends a request to the MCP endpoint on a connection of its own; the address and the token are
    /// filled in.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, SendError> {
        self.send_to(self.path.clone(), request).await
    }

    /// What is beside the MCP endpoint: `/v1/…` at the same server, behind the same proxy if any.
    pub(super) fn beside(&self, path: &str) -> Option<Uri> {
        let before = self.path.path().strip_suffix("/mcp").unwrap_or_default();
        format!("{before}{path}").parse().ok()
    }

    /// As [`Self::send`], to another path.
    pub(super) async fn send_to(
        &self,
        path: Uri,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, SendError> {
        *request.uri_mut() = path;
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        if let Some(value) = &self.authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
        let connect = async {
            match &self.way {
                Way::Unix(path) => Connection::new(UnixStream::connect(path).await?).await,
                Way::Tcp { host, port, tls } => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    stream.set_nodelay(true)?;
                    match tls {
                        None => Connection::new(stream).await,
                        Some((tls, name)) => {
                            Connection::new(tls.connect(name.clone(), stream).await?).await
                        }
                    }
                }
            }
        };
        let connection = tokio::time::timeout(CONNECT_TIMEOUT, connect).await;
        let connection = connection.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        let mut connection = connection.map_err(SendError::Connect)?;
        connection.0.send_request(request).await.map_err(SendError::Exchange)
    }

    /// What a server said that did not do what was asked.
    pub(super) fn refused(&self, status: StatusCode, body: &[u8]) -> String {
        let value = serde_json::from_slice::<Value>(body).ok();
        let said = value.as_ref().and_then(|value| value.get("message")).and_then(Value::as_str);
        let said = said.map_or_else(|| String::from_utf8_lossy(body), Cow::Borrowed);
        let said: String = said.trim().chars().take(MAX_SAID).collect();
        format!("{self} answered {status}: {}", text::safe(&said))
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The request has not been sent.
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    /// It may have been.
    #[error("the connection broke: {0}")]
    Exchange(hyper::Error),
}

/// A connection for one request; it ends with the answer's body.
struct Connection(hyper::client::conn::http1::SendRequest<Full<Bytes>>);

impl Connection {
    async fn new(
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> std::io::Result<Self> {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(std::io::Error::other)?;
        // What goes wrong is seen by whoever waits for the answer.
        tokio::spawn(connection.with_upgrades());
        Ok(Self(sender))
    }
}

fn connector(ca: Option<&Path>) -> Result<TlsConnector, EndpointError> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            let failed = |error| EndpointError::Certificates { path: path.to_owned(), error };
            let certificates = CertificateDer::pem_file_iter(path)
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(failed)?;
            if certificates.is_empty() {
                return Err(failed(pem::Error::NoItemsFound));
            }
            for certificate in certificates {
                roots.add(certificate)?;
            }
        }
        // Some of a machine's certificates may be unusable; the others serve.
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(EndpointError::NoRoots);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let new = |address: &str| Endpoint::new(address, Some("t"), None, false);
        for good in ["http://127.0.0.1:7420/mcp", "http://[::1]:7420", "http://localhost/x?y=1"] {
            assert!(new(good).is_ok(), "{good}");
            assert!(is_local(good));
        }
        assert!(matches!(new("unix:/run/casulo").unwrap().way, Way::Unix(_)));
        assert_eq!(new("http://localhost:1/").unwrap().path, "/mcp");
        for bad in ["", "7420", "localhost:7420", "unix:", "ftp://localhost", "http://u@localhost"]
        {
            assert!(matches!(new(bad), Err(EndpointError::Address(_))), "{bad}");
        }
        for far in ["http://example.com", "http://10.0.0.1:80", "http://localhost.example.com"] {
            assert!(matches!(new(far), Err(EndpointError::Plain(_))), "{far}");
            assert!(!is_local(far));
            assert!(Endpoint::new(far, Some("t"), None, true).is_ok());
            assert!(Endpoint::new(far, None, None, false).is_ok());
        }
        let beside = |address: &str| new(address).unwrap().beside("/v1/x").unwrap().to_string();
        assert_eq!(beside("http://localhost"), "/v1/x");
        assert_eq!(beside("http://localhost/casulo/mcp"), "/casulo/v1/x");
        assert_eq!(beside("http://localhost/other?a=/mcp"), "/v1/x");
        assert_eq!(beside("unix:/run/casulo"), "/v1/x");
        let identity = |address: &str| new(address).unwrap().identity();
        assert_eq!(identity("http://localhost:1"), "http://localhost:1/mcp");
        assert_eq!(identity("http://localhost:1/mcp"), "http://localhost:1/mcp");
        assert_eq!(identity("unix:/run/casulo"), "unix:/run/casulo");
        let evil = format!(r#"{{"message": "no\u001b[2J\u202e{}"}}"#, "x".repeat(1000));
        let said = new("http://localhost").unwrap().refused(StatusCode::FORBIDDEN, evil.as_bytes());
        assert!(
            said.starts_with("http://localhost answered 403 Forbidden: no\\u{202e}x"),
            "{said}"
        );
        assert!(said.len() < 600);
        let file = tempfile::NamedTempFile::new().unwrap();
        let empty = Endpoint::new("https://localhost", None, Some(file.path()), false);
        assert!(matches!(empty, Err(EndpointError::Certificates { .. })));
        let line = Endpoint::new("http://localhost", Some("a\nb"), None, false);
        assert!(matches!(line, Err(EndpointError::Token)));
        assert!(!format!("{:?}", new("http://localhost").unwrap()).contains("Bearer"));
    }
}
