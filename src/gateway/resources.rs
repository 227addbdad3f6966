//! What sandboxes have put out, as resources of MCP: `resources/list`, `resources/read` and links to
//! them in results.
//!
//! A caller sees its own only. What is expired, unknown or another caller's gives one and the same error.

use std::io::Read;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::error::{ErrorClass, TaskError};
use rmcp::ErrorData;
use rmcp::model::{
    CacheScope, ErrorCode, ListResourceTemplatesResult, ListResourcesResult, ReadResourceResult,
    Resource, ResourceContents, ResourceTemplate,
};
use serde_json::json;

use super::artifacts::{Artifact, Kept, uri};
use super::server::Server;
use crate::text;

/// Most resources of one page, and most bytes of it.
const PAGE: usize = 100;
const PAGE_BYTES: usize = 64 * 1024;
/// The code of a request that there is no room for, as in `lines`.
const CAPACITY: ErrorCode = ErrorCode(-31000);

/// An artifact as clients see it in lists and links.
pub(super) fn resource(kept: &Kept, artifact: &Artifact) -> Resource {
    Resource::new(uri::of(&kept.id, &artifact.path), text::of(&artifact.path, false))
        .with_mime_type(uri::media_type(&artifact.path))
        .with_size(artifact.size)
}

/// How URIs are made.
pub(super) fn templates() -> ListResourceTemplatesResult {
    let template = ResourceTemplate::new(uri::TEMPLATE, "artifact")
        .with_title("File that came out of a sandbox")
        .with_description(
            "A file that was in /workspace/output when its sandbox ended; path is relative to that \
             folder, percent-encoded.",
        );
    ListResourceTemplatesResult::with_all_items(vec![template])
        .with_ttl_ms(3_600_000)
        .with_cache_scope(CacheScope::Private)
}

/// Where a page of a list goes on: after the file of that place of that sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cursor {
    number: u64,
    place: usize,
}

impl Cursor {
    fn parse(text: &str) -> Result<Self, ErrorData> {
        let parsed = text.split_once('.').and_then(|(number, place)| {
            Some(Self { number: number.parse().ok()?, place: place.parse().ok()? })
        });
        parsed.ok_or_else(|| {
            ErrorData::invalid_params("this cursor is not one of resources/list", None)
        })
    }

    fn text(self) -> String {
        format!("{}.{}", self.number, self.place)
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn refused(error: TaskError) -> ErrorData {
    match error.class {
        ErrorClass::Capacity => ErrorData::new(CAPACITY, error.message, None),
        _ => ErrorData::internal_error(error.message, None),
    }
}

fn not_found(uri: &str) -> ErrorData {
    let text = "no such resource: it never was, has expired, or made place for newer ones";
    ErrorData::resource_not_found(text, Some(json!({"uri": text::safe(uri)})))
}

impl Server {
    /// A page of the caller's artifacts.
    pub(super) fn resources(
        &self,
        cursor: Option<String>,
    ) -> Result<ListResourcesResult, ErrorData> {
        self.sandboxes.count_call(&self.caller).map_err(refused)?;
        let after = cursor.map(|text| Cursor::parse(&text)).transpose()?;
        let all = self.sandboxes.store.as_ref().map(|store| store.all(&self.caller));
        let (mut page, mut bytes, mut last, mut next) = (Vec::new(), 0usize, None, None);
        'all: for (kept, _) in all.iter().flatten() {
            for (place, artifact) in kept.list.iter().enumerate() {
                let here = Cursor { number: kept.number, place };
                if after.is_some_and(|a| (here.number, here.place) <= (a.number, a.place)) {
                    continue;
                }
                let one = resource(kept, artifact);
                let length = serde_json::to_string(&one).map_or(usize::MAX, |json| json.len());
                bytes = bytes.saturating_add(length);
                if page.len() >= PAGE || (bytes > PAGE_BYTES && !page.is_empty()) {
                    next = last.map(Cursor::text);
                    break 'all;
                }
                page.push(one);
                last = Some(here);
            }
        }
        let mut result = ListResourcesResult::with_all_items(page)
            // Any call may change it.
            .with_ttl_ms(0)
            .with_cache_scope(CacheScope::Private);
        result.next_cursor = next;
        Ok(result)
    }

    /// The content of one.
    pub(super) async fn resource(&self, wanted: &str) -> Result<ReadResourceResult, ErrorData> {
        let _place = self.sandboxes.admit(&self.caller).await.map_err(refused)?;
        let (id, path) = uri::parse(wanted).ok_or_else(|| not_found(wanted))?;
        let found = self.sandboxes.store.as_ref().and_then(|store| store.get(&self.caller, id));
        let Some((kept, left)) = found else {
            if self.sandboxes.is_live(&self.caller, id) {
                let text = "this sandbox still runs: read its files with read_file; they become \
                            resources when it has ended";
                return Err(ErrorData::invalid_params(
                    text,
                    Some(json!({"uri": text::safe(wanted)})),
                ));
            }
            return Err(not_found(wanted));
        };
        let artifact = kept.find(&path).cloned().ok_or_else(|| not_found(wanted))?;
        let most = u64::from(self.sandboxes.limits.output_bytes);
        let uri = uri::of(id, &artifact.path);
        let contents = if artifact.size <= most {
            let broken =
                |e| ErrorData::internal_error(format!("cannot read the artifact: {e}"), None);
            let read = {
                let (kept, artifact) = (std::sync::Arc::clone(&kept), artifact.clone());
                move || -> std::io::Result<Vec<u8>> {
                    let mut data = Vec::new();
                    kept.open(&artifact)?.take(artifact.size).read_to_end(&mut data)?;
                    Ok(data)
                }
            };
            let data = tokio::task::spawn_blocking(read).await;
            let data = data.map_err(|e| broken(std::io::Error::other(e)))?.map_err(broken)?;
            self.metrics.served(artifact.size);
            Some(contents(data, &uri, &artifact.path))
        } else {
            None
        };
        let fits = |contents: &ResourceContents| {
            let length = serde_json::to_string(contents).map_or(usize::MAX, |json| json.len());
            u64::try_from(length).is_ok_and(|length| length <= most)
        };
        let contents = contents.filter(fits).ok_or_else(|| {
            let text = format!(
                "this resource has {} bytes, more than resources/read gives ({most} when encoded); \
                 fetch it from `casulo serve` with GET /v1/sandboxes/{id}/files/{}, whole or in \
                 ranges, or read the file in parts with read_file before the sandbox ends",
                artifact.size,
                uri::encode(&artifact.path)
            );
            ErrorData::invalid_params(text, Some(json!({"uri": uri, "size": artifact.size})))
        })?;
        Ok(ReadResourceResult::new(vec![contents])
            // It never changes, but it goes.
            .with_ttl_ms(milliseconds(left))
            .with_cache_scope(CacheScope::Private))
    }
}

/// Text where that is all of it and hides nothing; else the bytes.
fn contents(data: Vec<u8>, uri: &str, path: &[u8]) -> ResourceContents {
    let contents = match String::from_utf8(data) {
        Ok(text) if !text.chars().any(text::is_hidden) => ResourceContents::text(text, uri),
        Ok(text) => ResourceContents::blob(STANDARD.encode(text), uri),
        Err(error) => ResourceContents::blob(STANDARD.encode(error.as_bytes()), uri),
    };
    contents.with_mime_type(uri::media_type(path))
}
