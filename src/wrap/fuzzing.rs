//! A door for the fuzz target `wrap` to all that a wrapped server says.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::member::{handshake, list};
use super::offer::{self, Allowlist, Tools};
use super::pin::Offer;
use super::said::Said;
use super::upstream::Upstream;

/// Both sides are on one thread: what is not there by now does not come, where the program waits too.
const LIMIT: Duration = Duration::from_millis(10);
const MAX_RESULT: usize = 64 * 1024;

/// Speaks with a server as `casulo wrap` does; gives what it would tell.
pub(crate) async fn talk(stream: UnixStream) -> Vec<String> {
    let (read, write) = stream.into_split();
    let (end, ended) = oneshot::channel();
    let (tell, _notes) = mpsc::channel(1);
    drop(end);
    let upstream = Upstream::new(read, write, ended, tell, Said::silent());
    let mut told = Vec::new();
    let raw = match handshake(&upstream, LIMIT).await {
        Ok((info, raw)) => {
            told.extend(info.instructions);
            told.push(info.implementation.name);
            raw
        }
        Err(failure) => {
            told.push(failure.to_string());
            None
        }
    };
    match list(&upstream, "tools/list", "tools", LIMIT).await {
        Err(failure) => told.push(failure.to_string()),
        Ok(tools) => {
            let _ = Offer::new(raw, &tools);
            let tools = Tools::new(&tools, &Allowlist::default(), "p");
            told.extend(tools.refused.into_values());
            for offered in tools.tools.iter().take(8) {
                told.extend(offered.tool.description.as_deref().map(str::to_owned));
                let arguments = json!({"text": "x", "data": [1, {}], "path": null});
                told.extend(offered.schema.check(&arguments).err());
                let answer = upstream.request("tools/call", Map::new(), LIMIT, None).await;
                told.extend(result(answer.map_err(|failure| failure.to_string())).err());
            }
        }
    }
    for (method, key) in [("resources/list", "resources"), ("prompts/list", "prompts")] {
        for value in list(&upstream, method, key, LIMIT).await.unwrap_or_default() {
            let _ = offer::entry::<Value>(value, "p");
        }
    }
    told
}

fn result(answer: Result<Value, String>) -> Result<(), String> {
    let result = offer::tool_result(answer?, "p", MAX_RESULT, false)?;
    let encoded = serde_json::to_string(&result).unwrap_or_default();
    assert!(encoded.len() <= 2 * MAX_RESULT, "{} bytes", encoded.len());
    Ok(())
}
