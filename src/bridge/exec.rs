//! A command in a sandbox of a `casulo serve`: its streams over one connection.

use std::collections::BTreeMap;
use std::time::Duration;

use casulo_protocol::spec::RunSpec;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;

use super::endpoint::SendError;
use super::{Endpoint, MAX_ERROR};
use crate::gateway::http::exec::{HOST, PROTOCOL};

/// Longest time until the server has answered.
const ANSWER: Duration = Duration::from_secs(60);

/// Body of the request.
#[derive(Serialize)]
struct Wanted<'a> {
    command: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<&'a str>,
    env: &'a BTreeMap<String, String>,
}

/// The streams of a command that has been asked for: this side is that of the host.
pub(crate) struct Stream {
    /// Carries frames.
    pub(crate) connection: TokioIo<Upgraded>,
    /// Whether the sandbox is on an emulated host.
    pub(crate) emulated: bool,
}

/// Starts a command in the sandbox `id`; it ends with the connection.
///
/// # Errors
/// The server cannot be reached, or refuses; a sentence for the user.
pub(crate) async fn start(
    endpoint: &Endpoint,
    id: &str,
    command: &RunSpec,
) -> Result<Stream, String> {
    match tokio::time::timeout(ANSWER, asked(endpoint, id, command)).await {
        Ok(result) => result,
        Err(_) => Err(format!("{endpoint} did not answer within {} seconds", ANSWER.as_secs())),
    }
}

async fn asked(endpoint: &Endpoint, id: &str, command: &RunSpec) -> Result<Stream, String> {
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
        return Err(format!("{id:?} is no id of a sandbox; create_sandbox gives one"));
    }
    let path = endpoint.beside(&format!("/v1/sandboxes/{id}/exec"));
    let path = path.ok_or_else(|| format!("{endpoint}: there is no such path"))?;
    let cwd = command.workdir.as_deref();
    let wanted = Wanted { command: &command.command, cwd, env: &command.env };
    let body = serde_json::to_vec(&wanted).map_err(|error| error.to_string())?;
    let mut request = Request::new(Full::from(body));
    *request.method_mut() = Method::POST;
    let headers = request.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
    let response = endpoint.send_to(path, request).await;
    let mut response = response.map_err(|error| {
        let hint = match error {
            SendError::Connect(_) => {
                "; start `casulo serve` there, or say with --connect where it is"
            }
            SendError::Exchange(_) => "",
        };
        format!("{endpoint}: {error}{hint}")
    })?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ERROR).collect().await;
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        let hint = match status {
            StatusCode::UNAUTHORIZED => {
                "; the token is that of --token-file, of CASULO_TOKEN, or for a server on this machine \
                 that of CASULO_HOME"
            }
            _ => "",
        };
        return Err(format!("{}{hint}", endpoint.refused(status, &body)));
    }
    let emulated = response.headers().get(HOST).is_some_and(|host| host == "emulated");
    let connection = hyper::upgrade::on(&mut response).await;
    let connection = connection.map_err(|error| format!("{endpoint}: {error}"))?;
    Ok(Stream { connection: TokioIo::new(connection), emulated })
}
