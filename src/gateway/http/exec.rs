//! `POST /v1/sandboxes/{id}/exec`: a command in a kept sandbox, whose standard input and outputs the
//! connection then is.
//!
//! The request asks for an upgrade (RFC 9110, section 7.8) to [`PROTOCOL`]; the answer is 101, after
//! which both sides send frames ([`super::stream`]).

use std::sync::Arc;

use casulo_protocol::error::ErrorClass;
use casulo_protocol::result::HostKind;
use casulo_protocol::spec::RunSpec;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, UPGRADE};
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

use super::super::processes::Attached;
use super::super::sandboxes;
use super::super::tools;
use super::app::{App, Body, SANDBOXES, busy, not_allowed, problem, read};
use super::peer::Peer;
use super::stream;
use crate::{Execution, Program};

/// What the connection is upgraded to.
pub(crate) const PROTOCOL: &str = "casulo-stream";
/// What the sandbox runs on: `native` or `emulated`, which takes longer for everything.
pub(crate) const HOST: HeaderName = HeaderName::from_static("casulo-host");

/// The id in a path of this kind.
pub(super) fn id_of(path: &str) -> Option<&str> {
    let id = path.strip_prefix(SANDBOXES)?.strip_suffix("/exec")?;
    (!id.contains('/')).then_some(id)
}

/// Whether one of the words of a header is `word`.
fn says(headers: &HeaderMap, name: HeaderName, word: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|list| list.split(',')).any(|one| one.trim().eq_ignore_ascii_case(word))
}

impl App {
    /// Answers a request for a command in the sandbox `id`.
    pub(super) async fn exec(
        self: &Arc<Self>,
        caller: &sandboxes::Caller,
        id: &str,
        mut request: Request<Incoming>,
    ) -> Response<Body> {
        if *request.method() != Method::POST {
            return not_allowed("POST");
        }
        if let Some(refused) = self.refused() {
            return refused;
        }
        let headers = request.headers();
        let old = request.version() < Version::HTTP_11;
        if old || !says(headers, CONNECTION, "upgrade") || !says(headers, UPGRADE, PROTOCOL) {
            let message = "this is for programs that upgrade the connection to casulo-stream, as \
                           `casulo wrap --sandbox` does";
            let status = StatusCode::UPGRADE_REQUIRED;
            let mut response = problem(status, ErrorClass::InvalidArgument, message);
            response.headers_mut().insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
            return response;
        }
        let sandboxes = self.sandboxes();
        if let Err(error) = sandboxes.count_call(caller) {
            return busy(&error);
        }
        let call = match sandboxes.get(caller, id) {
            Ok(call) => call,
            Err(error) => return problem(StatusCode::NOT_FOUND, error.class, &error.message),
        };
        let upgrade = hyper::upgrade::on(&mut request);
        let peer = request.extensions().get::<Arc<Peer>>().cloned();
        let body = match read(request.into_body()).await {
            Ok(body) => body,
            Err(error) => {
                return error.close(problem(
                    error.status(),
                    ErrorClass::InvalidArgument,
                    &error.to_string(),
                ));
            }
        };
        let args = match tools::exec_arguments(&body) {
            Ok(args) => args,
            Err(why) => {
                let message = format!("wrong request: {why}");
                return problem(StatusCode::BAD_REQUEST, ErrorClass::InvalidArgument, &message);
            }
        };
        let attached = match Attached::new(call) {
            Ok(attached) => attached,
            Err(error) => return busy(&error),
        };
        let mut spec = RunSpec::new(args.command);
        spec.workdir = args.cwd.wanted();
        spec.env = args.env.0;
        let (stall, cut) = (sandboxes.limits.stall, self.cut.clone());
        self.streams.spawn(async move {
            // A caller that goes away before it has been answered wants nothing.
            let Ok(connection) = upgrade.await else { return };
            let run = |stdio, kill: CancellationToken| async move {
                // Given back when the command has ended, and not when the caller has heard of it.
                let attached = attached;
                let (program, how) = (Program::Command, Execution::default());
                let sandbox = attached.sandbox();
                sandbox.execute(&spec, &program, stdio, how, kill.cancelled()).await
            };
            let closed = async {
                match peer {
                    Some(peer) => peer.closed().await,
                    None => std::future::pending().await,
                }
            };
            stream::carry(TokioIo::new(connection), stall, closed, &cut, run).await;
        });
        let mut response = Response::new(Body::default());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
        let host = match self.host() {
            HostKind::Emulated => "emulated",
            _ => "native",
        };
        headers.insert(HOST, HeaderValue::from_static(host));
        response
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use hyper::body::Bytes;
    use hyper::header::ORIGIN;
    use serde_json::json;

    use super::super::tests::*;
    use super::*;

    #[test]
    fn only_a_path_of_one_sandbox_is_for_commands() {
        assert_eq!(id_of("/v1/sandboxes/sb_1/exec"), Some("sb_1"));
        for other in [
            "/v1/sandboxes/sb_1/files/exec",
            "/v1/sandboxes/sb_1/exec/",
            "/v1/sandboxes/exec",
            "/v1/sandboxes//x/exec",
            "/mcp/exec",
        ] {
            assert_eq!(id_of(other), None, "{other}");
        }
    }

    /// A whole and good request, but for the sandbox, which nobody has.
    fn request(token: Option<&str>) -> Request<Full<Bytes>> {
        let mut request = post(token, r#"{"command": ["true"]}"#);
        let id = format!("sb_{}", "0".repeat(32));
        *request.uri_mut() = format!("/v1/sandboxes/{id}/exec").parse().unwrap();
        let headers = request.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("keep-alive, Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("Casulo-Stream"));
        request
    }

    #[tokio::test]
    async fn a_sandbox_that_the_caller_does_not_have_is_not_found_whatever_the_rest() {
        let server = Running::local().await;
        let reply = server.send(request(Some(ANA))).await;
        assert_eq!(reply.status, StatusCode::NOT_FOUND, "{reply:?}");
        let told = reply.json();
        assert_eq!(told["class"], "sandbox_not_found");
        for id in ["", "..", "sb_1", "%00"] {
            let mut request = request(Some(ANA)).map(|_| Full::from("{"));
            *request.uri_mut() = format!("/v1/sandboxes/{id}/exec").parse().unwrap();
            let reply = server.send(request).await;
            assert_eq!((reply.status, reply.json()), (StatusCode::NOT_FOUND, told.clone()));
        }
    }

    #[tokio::test]
    async fn what_is_no_upgrade_of_a_caller_is_refused() {
        let server = Running::local().await;
        assert_eq!(server.send(request(None)).await.status, StatusCode::UNAUTHORIZED);
        let mut foreign = request(Some(ANA));
        foreign.headers_mut().insert(ORIGIN, HeaderValue::from_static("http://evil.com"));
        assert_eq!(server.send(foreign).await.status, StatusCode::FORBIDDEN);
        let mut get = request(Some(ANA));
        *get.method_mut() = Method::GET;
        assert_eq!(server.send(get).await.status, StatusCode::METHOD_NOT_ALLOWED);
        let mut old = request(Some(ANA));
        *old.version_mut() = Version::HTTP_10;
        assert_eq!(server.send(old).await.status, StatusCode::UPGRADE_REQUIRED);
        for (name, value) in [(CONNECTION, "close"), (UPGRADE, "websocket"), (UPGRADE, "")] {
            let mut plain = request(Some(ANA));
            plain.headers_mut().insert(name, HeaderValue::from_static(value));
            let reply = server.send(plain).await;
            assert_eq!(reply.status, StatusCode::UPGRADE_REQUIRED, "{value}");
            assert_eq!(reply.headers[UPGRADE], PROTOCOL);
        }
    }

    #[test]
    fn a_request_has_bounds() {
        let take = |value: serde_json::Value| tools::exec_arguments(value.to_string().as_bytes());
        let good = take(json!({"command": ["a", ""], "cwd": "/x", "env": {"A": "b"}})).unwrap();
        assert_eq!((good.command.len(), good.cwd.wanted().as_deref()), (2, Some("/x")));
        assert!(take(json!({"command": vec!["a"; 1024]})).is_ok());
        assert!(take(json!({"command": ["a".repeat(131_071)]})).is_ok());
        for (wrong, why) in [
            (json!({}), "missing field `command`"),
            (json!([]), "invalid"),
            (json!({"command": "true"}), "invalid type"),
            (json!({"command": []}), "at least 1"),
            (json!({"command": vec!["a"; 1025]}), "at most 1024"),
            (json!({"command": ["a".repeat(131_072)]}), "command[0] has 131072"),
            (json!({"command": ["a", "b\0"]}), "command[1] has a NUL"),
            (json!({"command": ["a", 1]}), "invalid type"),
            (json!({"command": ["a"], "cwd": "x"}), "cwd does not match"),
            (json!({"command": ["a"], "env": {"A=": "b"}}), "env"),
            (json!({"command": ["a"], "env": {"A": "b\0"}}), "NUL"),
            (
                json!({"command": ["a"], "user": "root"}),
                "unknown argument user; there are command, cwd, env",
            ),
        ] {
            let error = take(wrong.clone()).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
        assert!(tools::exec_arguments(b"{").is_err());
    }
}
