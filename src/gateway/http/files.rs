//! `GET /v1/sandboxes/{id}/files`: what came out of a sandbox that has ended, as a list or as a tar
//! archive, and `…/files/{path}`: one of the files, whole or a range of it.
//!
//! The path is decoded once and looked up in the list; it never reaches the file system. What is
//! unknown, expired or another caller's gives one and the same answer.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::error::ErrorClass;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{
    ACCEPT, ACCEPT_RANGES, CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, Response, StatusCode};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::super::artifacts::{Kept, uri};
use super::super::metrics::Metrics;
use super::super::sandboxes;
use super::app::{App, Body, InFlight, SANDBOXES, busy, not_allowed, problem};
use super::pieces::{self, Piece};
use super::range::{self, Wanted};
use crate::text;

/// Bytes that are read and sent at a time.
const CHUNK: usize = 64 * 1024;
/// Least bytes a second that a client takes, beside the time for which it may take nothing.
const SLOWEST: u64 = 4096;

type Pieces = Box<dyn Iterator<Item = Piece> + Send>;

/// How the list is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Tar,
}

impl Format {
    fn of(query: Option<&str>, headers: &HeaderMap) -> Option<Self> {
        let mut asked =
            query.unwrap_or_default().split('&').filter_map(|q| q.strip_prefix("format="));
        match asked.next() {
            Some("json") => Some(Self::Json),
            Some("tar") => Some(Self::Tar),
            Some(_) => None,
            None => {
                let accepts =
                    headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
                let tar = accepts.flat_map(|list| list.split(',')).any(|kind| {
                    let kind = kind.split(';').next().unwrap_or_default().trim();
                    kind.eq_ignore_ascii_case("application/x-tar")
                });
                Some(if tar { Self::Tar } else { Self::Json })
            }
        }
    }

    fn pieces(self, kept: Arc<Kept>, left: Duration) -> Pieces {
        match self {
            Self::Json => Box::new(pieces::json(kept, left.as_secs())),
            Self::Tar => Box::new(pieces::tar(kept)),
        }
    }
}

fn not_found() -> Response<Body> {
    problem(
        StatusCode::NOT_FOUND,
        ErrorClass::SandboxNotFound,
        "there is no such file or sandbox: it never was, has expired, or made place for newer ones",
    )
}

impl App {
    /// Answers a request for what is below [`SANDBOXES`].
    pub(super) async fn files(
        self: &Arc<Self>,
        caller: &sandboxes::Caller,
        request: &Request<Incoming>,
    ) -> Response<Body> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return not_allowed("GET, HEAD");
        }
        let in_flight = InFlight::new(self);
        if let Some(refused) = self.refused() {
            return refused;
        }
        let sandboxes = self.sandboxes();
        let place = match sandboxes.download(caller) {
            Ok(place) => place,
            Err(error) => return busy(&error),
        };
        let rest = request.uri().path().strip_prefix(SANDBOXES).unwrap_or_default();
        let (id, path) = match rest.strip_suffix("/files").filter(|id| !id.contains('/')) {
            Some(id) => (id, None),
            None => match uri::split(rest) {
                Some((id, path)) => (id, Some(path)),
                None => return not_found(),
            },
        };
        let store = sandboxes.store.as_ref();
        let Some((kept, left)) = store.and_then(|store| store.get(caller, id)) else {
            if sandboxes.is_live(caller, id) {
                return problem(
                    StatusCode::CONFLICT,
                    ErrorClass::InvalidArgument,
                    "this sandbox still runs: its files can be fetched when it has ended; until then \
                     use the tools list_files and read_file",
                );
            }
            return not_found();
        };
        let headers = request.headers();
        let head = *request.method() == Method::HEAD;
        let answer = match path {
            None => match Format::of(request.uri().query(), headers) {
                Some(format) => list(&kept, left, format).await,
                None => {
                    return problem(
                        StatusCode::BAD_REQUEST,
                        ErrorClass::InvalidArgument,
                        "format is json or tar",
                    );
                }
            },
            Some(path) => file(&kept, &path, headers, !head),
        };
        let Some(Answer { mut response, pieces }) = answer else { return not_found() };
        safe(response.headers_mut());
        if let (Some(pieces), false) = (pieces, head) {
            let stall = sandboxes.limits.stall;
            let metrics = self.metrics();
            let stream = stream(kept, pieces, stall, metrics).map(move |bytes| {
                // As long as something is being sent.
                let _held = (&in_flight, &place);
                Ok(Frame::data(bytes))
            });
            *response.body_mut() = StreamBody::new(stream).boxed();
        }
        response
    }
}

/// Head of an answer, and what is to follow.
struct Answer {
    response: Response<Body>,
    pieces: Option<Pieces>,
}

fn header(response: &mut Response<Body>, name: HeaderName, value: &str) {
    // Values are made of what headers can hold.
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// What comes from a guest is data: no browser is to show it, run it or keep it.
fn safe(headers: &mut HeaderMap) {
    for (name, value) in [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "private, no-store"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; sandbox"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

async fn list(kept: &Arc<Kept>, left: Duration, format: Format) -> Option<Answer> {
    let all = Arc::clone(kept);
    // Many headers are made for it.
    let length = tokio::task::spawn_blocking(move || {
        format.pieces(all, left).fold(0u64, |sum, piece| sum.saturating_add(piece.length()))
    });
    let mut response = Response::new(Empty::new().boxed());
    header(&mut response, CONTENT_LENGTH, &length.await.ok()?.to_string());
    match format {
        Format::Json => header(&mut response, CONTENT_TYPE, "application/json"),
        Format::Tar => {
            header(&mut response, CONTENT_TYPE, "application/x-tar");
            header(&mut response, CONTENT_DISPOSITION, &attachment(&format!("{}.tar", kept.id)));
        }
    }
    Some(Answer { response, pieces: Some(format.pieces(Arc::clone(kept), left)) })
}

fn file(kept: &Kept, path: &[u8], headers: &HeaderMap, ranges: bool) -> Option<Answer> {
    let place = kept.place(path)?;
    let artifact = kept.list.get(place)?;
    let tag = format!("\"{}\"", artifact.sha256);
    let wanted = range::wanted(headers, &tag, artifact.size, ranges);
    let mut response = Response::new(Empty::new().boxed());
    header(&mut response, ETAG, &tag);
    header(&mut response, ACCEPT_RANGES, "bytes");
    let size = artifact.size;
    let (status, start, length) = match wanted {
        Wanted::Whole => (StatusCode::OK, 0, size),
        Wanted::Part { start, length } => {
            let last = start.saturating_add(length).saturating_sub(1);
            header(&mut response, CONTENT_RANGE, &format!("bytes {start}-{last}/{size}"));
            (StatusCode::PARTIAL_CONTENT, start, length)
        }
        Wanted::OutOfRange => {
            header(&mut response, CONTENT_RANGE, &format!("bytes */{size}"));
            *response.status_mut() = StatusCode::RANGE_NOT_SATISFIABLE;
            return Some(Answer { response, pieces: None });
        }
        Wanted::NotModified | Wanted::Failed => {
            *response.status_mut() = match wanted {
                Wanted::Failed => StatusCode::PRECONDITION_FAILED,
                _ => StatusCode::NOT_MODIFIED,
            };
            return Some(Answer { response, pieces: None });
        }
    };
    *response.status_mut() = status;
    header(&mut response, CONTENT_LENGTH, &length.to_string());
    header(&mut response, CONTENT_TYPE, uri::media_type(path));
    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    header(&mut response, CONTENT_DISPOSITION, &attachment(&text::of(name, false)));
    let piece = Piece::File { place, start, length };
    Some(Answer { response, pieces: Some(Box::new(std::iter::once(piece))) })
}

/// RFC 6266: a plain name for old clients, and the real one.
fn attachment(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
        .collect();
    let encoded = utf8_percent_encode(name, ATTRIBUTE);
    format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}")
}

/// RFC 8187: what stands for itself.
const ATTRIBUTE: &percent_encoding::AsciiSet =
    &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');

/// Sends the pieces as the client takes them. One that takes them too slowly, or a file that cannot be
/// read, ends the answer before its length is reached, which closes the connection. One that takes nothing
/// at all is noticed where the connection is written to.
fn stream(
    kept: Arc<Kept>,
    pieces: Pieces,
    stall: Duration,
    metrics: Arc<Metrics>,
) -> ReceiverStream<Bytes> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut sender = Sender { sender, stall, began: Instant::now(), sent: 0, metrics };
        let mut small = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Bytes(bytes) => small.extend_from_slice(&bytes),
                Piece::File { place, start, length } => {
                    if !small.is_empty() && !sender.send(std::mem::take(&mut small).into()).await {
                        return;
                    }
                    if !sender.file(&kept, place, start, length).await {
                        return;
                    }
                }
            }
            if small.len() >= CHUNK && !sender.send(std::mem::take(&mut small).into()).await {
                return;
            }
        }
        if !small.is_empty() {
            sender.send(small.into()).await;
        }
    });
    ReceiverStream::new(receiver)
}

struct Sender {
    sender: mpsc::Sender<Bytes>,
    stall: Duration,
    began: Instant,
    sent: u64,
    metrics: Arc<Metrics>,
}

impl Sender {
    /// Whether the client still wants more.
    async fn send(&mut self, bytes: Bytes) -> bool {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let slowest = Duration::from_secs(self.sent.checked_div(SLOWEST).unwrap_or(0));
        let limit = self.stall.saturating_add(slowest);
        let until = self.began.checked_add(limit).unwrap_or(self.began);
        let sent =
            matches!(tokio::time::timeout_at(until, self.sender.send(bytes)).await, Ok(Ok(())));
        if sent {
            self.sent = self.sent.saturating_add(length);
            self.metrics.served(length);
        }
        sent
    }

    async fn file(&mut self, kept: &Arc<Kept>, place: usize, start: u64, length: u64) -> bool {
        let open = {
            let kept = Arc::clone(kept);
            move || kept.list.get(place).and_then(|one| kept.open(one).ok())
        };
        let Ok(Some(file)) = tokio::task::spawn_blocking(open).await else { return false };
        let file = Arc::new(file);
        let (mut at, mut left) = (start, length);
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let read = {
                let file = Arc::clone(&file);
                move || {
                    let mut chunk = vec![0; want];
                    file.read_exact_at(&mut chunk, at).map(|()| chunk)
                }
            };
            let Ok(Ok(chunk)) = tokio::task::spawn_blocking(read).await else { return false };
            let read = u64::try_from(want).unwrap_or(0);
            if !self.send(chunk.into()).await {
                return false;
            }
            at = at.saturating_add(read);
            left = left.saturating_sub(read);
        }
        true
    }
}

#[cfg(test)]
mod tests;
