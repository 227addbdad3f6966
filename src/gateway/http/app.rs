//! From a request to its answer.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::HostKind;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use rmcp::ServerHandler;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ErrorData, JsonRpcError, RequestId};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::super::Gateway;
use super::super::metrics::Metrics;
use super::super::sandboxes::{self, Sandboxes};
use super::auth::{Callers, Entry};
use super::exec;
use super::origin::{Foreign, Names};

/// Path of the MCP endpoint.
pub(super) const MCP: &str = "/mcp";
/// Begin of every path of a sandbox.
pub(super) const SANDBOXES: &str = "/v1/sandboxes/";
/// Most bytes of a request.
pub(super) const MAX_BODY: usize = 4 << 20;
/// Longest time for the body of a request to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Most sessions of one caller; only clients of 2025-11-25 and before have sessions.
pub(super) const MAX_SESSIONS: usize = 256;
/// A session without a request for so long ends; it must be longer than the longest call.
const SESSION_IDLE: Duration = Duration::from_secs(60 * 60);
/// Name of who calls without a token.
const LOCAL: &str = "local";

pub(super) type Body = BoxBody<Bytes, Infallible>;

/// Answers requests to the MCP endpoint.
type Mcp = Box<dyn Fn(Request<Full<Bytes>>) -> BoxFuture<Response<Body>> + Send + Sync>;
type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
/// Makes it, for some sessions.
pub(in super::super) type Endpoint =
    Arc<dyn Fn(Arc<LocalSessionManager>, StreamableHttpServerConfig) -> Mcp + Send + Sync>;

/// The endpoint of an MCP server of any kind.
pub(in super::super) fn endpoint(server: impl ServerHandler + Clone) -> Endpoint {
    Arc::new(move |sessions, config| {
        let server = server.clone();
        let service = StreamableHttpService::new(move || Ok(server.clone()), sessions, config);
        Box::new(move |request| {
            let service = service.clone();
            Box::pin(async move { service.handle(request).await })
        })
    })
}

/// A caller and its MCP sessions, which nobody else can name.
struct Caller {
    name: sandboxes::Caller,
    mcp: Mcp,
    sessions: Arc<LocalSessionManager>,
}

impl Caller {
    fn new(gateway: &Gateway, name: &str, cancel: &CancellationToken) -> Arc<Self> {
        let mut sessions = LocalSessionManager::default();
        let mut session = SessionConfig::default();
        session.keep_alive = Some(SESSION_IDLE);
        sessions.session_config = session;
        let sessions = Arc::new(sessions);
        // Hosts and origins are checked before, for every path alike.
        let config = StreamableHttpServerConfig::default()
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_max_request_body_bytes(MAX_BODY)
            .with_cancellation_token(cancel.clone());
        let mcp = gateway.endpoint(name)(Arc::clone(&sessions), config);
        Arc::new(Self { name: name.into(), mcp, sessions })
    }
}

/// Everything that requests share.
pub(super) struct App {
    gateway: Arc<Gateway>,
    names: Names,
    callers: Callers<Arc<Caller>>,
    /// Who calls without a token, if anybody may.
    open: Option<Arc<Caller>>,
    in_flight: watch::Sender<usize>,
    pub(super) draining: AtomicBool,
    /// Connections that are the streams of a command.
    pub(super) streams: TaskTracker,
    /// Ends them.
    pub(super) cut: CancellationToken,
}

/// A call that is being answered, until the last byte of its answer.
pub(super) struct InFlight(Arc<App>);

impl InFlight {
    pub(super) fn new(app: &Arc<App>) -> Self {
        app.in_flight.send_modify(|n| *n = n.saturating_add(1));
        Self(Arc::clone(app))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|n| *n = n.saturating_sub(1));
    }
}

impl App {
    pub(super) fn new(
        gateway: Arc<Gateway>,
        names: Names,
        tokens: Vec<Entry>,
        open: bool,
        cancel: &CancellationToken,
    ) -> Self {
        let caller = |name: &str| Caller::new(&gateway, name, cancel);
        let callers = tokens.into_iter().map(|entry| (entry.token, caller(&entry.name)));
        let callers = Callers::new(callers);
        let open = open.then(|| caller(LOCAL));
        Self {
            names,
            callers,
            open,
            in_flight: watch::Sender::new(0),
            draining: AtomicBool::new(false),
            streams: TaskTracker::new(),
            cut: cancel.clone(),
            gateway,
        }
    }

    /// Until no call is being answered.
    pub(super) async fn idle(&self) {
        // The sender lives as long as `self`.
        let _ = self.in_flight.subscribe().wait_for(|n| *n == 0).await;
    }

    pub(super) fn connected(&self) {
        self.gateway.metrics.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sandboxes(&self) -> &Sandboxes {
        &self.gateway.sandboxes
    }

    /// What sandboxes run on.
    pub(super) fn host(&self) -> HostKind {
        self.gateway.host
    }

    pub(super) fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.gateway.metrics)
    }

    /// The answer to new calls when the server is about to end.
    pub(super) fn refused(&self) -> Option<Response<Body>> {
        if !self.draining.load(Ordering::Relaxed) {
            return None;
        }
        let message = "this server is about to end and takes no more calls";
        let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, ErrorClass::Capacity, message);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
        Some(response)
    }

    pub(super) async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let response = self.answer(request).await;
        self.gateway.metrics.request(response.status().as_u16());
        response
    }

    async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        match self.names.check(request.uri(), request.headers()) {
            Ok(()) => {}
            Err(Foreign::Host) => {
                let message = "this server is not known under the request's Host; if it should be, \
                               start it with --allow-host";
                return problem(StatusCode::FORBIDDEN, ErrorClass::Denied, message);
            }
            Err(Foreign::Origin) => {
                let message = "web pages of this Origin may not call this server; if they should, \
                               start it with --allow-origin";
                return problem(StatusCode::FORBIDDEN, ErrorClass::Denied, message);
            }
        }
        if request.uri().path() == "/healthz" {
            return match (request.method(), self.draining.load(Ordering::Relaxed)) {
                (&Method::GET | &Method::HEAD, false) => text(StatusCode::OK, "ok\n".into()),
                (&Method::GET | &Method::HEAD, true) => {
                    text(StatusCode::SERVICE_UNAVAILABLE, "draining\n".into())
                }
                _ => not_allowed("GET, HEAD"),
            };
        }
        let caller = match self.callers.find(request.headers()) {
            Ok(Some(caller)) => caller,
            Ok(None) => match &self.open {
                Some(caller) => caller,
                None => return unauthorized("this server wants `Authorization: Bearer TOKEN`"),
            },
            Err(_) => return unauthorized("this token is not, or no longer, a caller's"),
        };
        match request.uri().path() {
            MCP => self.mcp(caller, request).await,
            "/metrics" if request.method() == Method::GET => {
                let in_flight = *self.in_flight.borrow();
                let draining = self.draining.load(Ordering::Relaxed);
                let text_now = self.gateway.metrics_text(in_flight, draining);
                let mut response = text(StatusCode::OK, text_now);
                let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            "/metrics" => not_allowed("GET"),
            path if path.starts_with(SANDBOXES) => match exec::id_of(path).map(str::to_owned) {
                Some(id) => self.exec(&caller.name, &id, request).await,
                None => self.files(&caller.name, &request).await,
            },
            _ => problem(
                StatusCode::NOT_FOUND,
                ErrorClass::InvalidArgument,
                "there is nothing here; MCP is at /mcp, and what came out of a sandbox at \
                 /v1/sandboxes/{id}/files",
            ),
        }
    }

    async fn mcp(self: &Arc<Self>, caller: &Caller, request: Request<Incoming>) -> Response<Body> {
        if request.method() != Method::POST {
            let end = request.method() == Method::DELETE;
            // Its body, if any, means nothing.
            let mut response = (caller.mcp)(request.map(|_| Full::default())).await;
            // The session has ended by now; some clients take "accepted" for a failure.
            if end && response.status() == StatusCode::ACCEPTED {
                *response.status_mut() = StatusCode::NO_CONTENT;
            }
            return response;
        }
        let in_flight = InFlight::new(self);
        if let Some(refused) = self.refused() {
            return refused;
        }
        let (head, body) = request.into_parts();
        let body = match read(body).await {
            Ok(body) => body,
            Err(error) => {
                let data = ErrorData::invalid_request(error.to_string(), None);
                return error.close(jsonrpc(error.status(), None, data));
            }
        };
        let message = match serde_json::from_slice::<ClientJsonRpcMessage>(&body) {
            Ok(message) => message,
            Err(error) => return malformed(&body, &error),
        };
        let initialize = matches!(
            &message,
            ClientJsonRpcMessage::Request(request)
                if matches!(request.request, ClientRequest::InitializeRequest(_))
        );
        if initialize && caller.sessions.sessions.read().await.len() >= MAX_SESSIONS {
            let message = "this caller has too many MCP sessions; end some with DELETE, or use a \
                           client of MCP 2026-07-28, which needs none";
            return problem(StatusCode::TOO_MANY_REQUESTS, ErrorClass::Capacity, message);
        }
        let response = (caller.mcp)(Request::from_parts(head, Full::new(body))).await;
        // The answer may be a stream; the call ends with it.
        response.map(|body| {
            body.map_frame(move |frame| {
                let _until_the_end = &in_flight;
                frame
            })
            .boxed()
        })
    }
}

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BodyError {
    #[error("a request has at most {MAX_BODY} bytes")]
    TooLong,
    #[error("the request's body did not arrive")]
    Late,
}

impl BodyError {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Late => StatusCode::REQUEST_TIMEOUT,
        }
    }

    /// The answer, after which what is left of the body is not waited for.
    pub(super) fn close(self, mut response: Response<Body>) -> Response<Body> {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }
}

/// The whole body, if it is neither too long nor too slow.
pub(super) async fn read(body: Incoming) -> Result<Bytes, BodyError> {
    if body.size_hint().lower() > u64::try_from(MAX_BODY).unwrap_or(u64::MAX) {
        return Err(BodyError::TooLong);
    }
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(BodyError::TooLong),
        Ok(Err(_)) | Err(_) => Err(BodyError::Late),
    }
}

/// What is no JSON is a parse error, and other JSON than a message an invalid request.
fn malformed(body: &[u8], error: &serde_json::Error) -> Response<Body> {
    let (id, error) = match serde_json::from_slice::<serde_json::Value>(body) {
        Err(error) => (None, ErrorData::parse_error(format!("this is no JSON: {error}"), None)),
        Ok(value) => {
            let id = value.get("id").cloned();
            let id = id.and_then(|id| serde_json::from_value::<RequestId>(id).ok());
            let message = format!("this is no JSON-RPC message of MCP: {error}");
            (id, ErrorData::invalid_request(message, None))
        }
    };
    jsonrpc(StatusCode::BAD_REQUEST, id, error)
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Full::from(body).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn text(status: StatusCode, body: String) -> Response<Body> {
    response(status, "text/plain; charset=utf-8", body)
}

fn jsonrpc(status: StatusCode, id: Option<RequestId>, error: ErrorData) -> Response<Body> {
    let body = serde_json::to_string(&JsonRpcError::new(id, error)).unwrap_or_default();
    response(status, "application/json", body)
}

/// An error in the form that tools give too.
pub(super) fn problem(status: StatusCode, class: ErrorClass, message: &str) -> Response<Body> {
    let retry = if status.is_server_error() { Retry::Yes } else { Retry::No };
    let error = TaskError { class, message: message.to_owned(), retry };
    let body = serde_json::to_string(&error).unwrap_or_default();
    response(status, "application/json", body)
}

fn unauthorized(message: &str) -> Response<Body> {
    let mut response = problem(StatusCode::UNAUTHORIZED, ErrorClass::Denied, message);
    let scheme = HeaderValue::from_static("Bearer realm=\"casulo\"");
    response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
    response
}

/// The answer to a caller that does too much.
pub(super) fn busy(error: &TaskError) -> Response<Body> {
    let mut response = problem(StatusCode::TOO_MANY_REQUESTS, error.class, &error.message);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

pub(super) fn not_allowed(methods: &'static str) -> Response<Body> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed\n".into());
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}
