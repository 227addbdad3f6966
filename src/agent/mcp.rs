//! MCP client of the agent, over one stream to the guest.
//!
//! Both sides know each other's protocol version from the boot channel, so there is no handshake: the
//! revision of MCP that has none is used, where every request describes itself.

use rmcp::ServiceError;
use rmcp::model::{
    CallToolRequestParams, CallToolResult, ClientCapabilities, ClientConfig, ContentBlock,
    Implementation, ProtocolVersion, ServerCapabilities, ServerPeerInfo,
};
use rmcp::service::{RoleClient, RunningService};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::bounded::Bounded;
use super::quote;
use super::transport::AgentLines;

/// A connection to the agent's tools. Dropping a call cancels it in the guest.
#[derive(Debug)]
pub(crate) struct Client(RunningService<RoleClient, ClientConfig>);

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The agent refused it, with a sentence.
    Refused(String),
    /// The connection is gone, or the answer makes no sense.
    Lost(String),
}

impl Client {
    /// Speaks MCP on `stream` from now on.
    pub(crate) fn new(stream: UnixStream) -> Self {
        let (read, write) = stream.into_split();
        let transport = AgentLines::new(Bounded::new(read), write);
        let us = Implementation::new("casulo", env!("CARGO_PKG_VERSION"));
        let us = ClientConfig::new(ClientCapabilities::default(), us);
        let them =
            ServerPeerInfo::new(ProtocolVersion::V_2026_07_28, ServerCapabilities::default());
        Self(rmcp::service::serve_directly(us, transport, Some(them)))
    }

    /// Calls a tool.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        tool: &'static str,
        arguments: &impl Serialize,
    ) -> Result<T, CallError> {
        let lost = |text: String| CallError::Lost(text);
        let arguments = match serde_json::to_value(arguments) {
            Ok(serde_json::Value::Object(map)) => map,
            Ok(_) | Err(_) => return Err(lost("the arguments are no object".into())),
        };
        let request = CallToolRequestParams::new(tool).with_arguments(arguments);
        match self.0.peer().call_tool(request).await {
            Ok(result) => parse(result),
            Err(ServiceError::McpError(error)) => Err(CallError::Refused(quote(&error.message))),
            Err(error) => Err(lost(quote(&error.to_string()))),
        }
    }
}

fn parse<T: DeserializeOwned>(result: CallToolResult) -> Result<T, CallError> {
    if result.is_error == Some(true) {
        let text = result.content.iter().find_map(ContentBlock::as_text);
        return Err(CallError::Refused(text.map_or_else(
            || "the guest agent refused the request without a reason".to_owned(),
            |text| quote(&text.text),
        )));
    }
    let value = result
        .structured_content
        .ok_or_else(|| CallError::Lost("the guest agent's answer has no content".into()))?;
    // What is not understood may be repeated in the error, at any length.
    serde_json::from_value(value).map_err(|e| {
        CallError::Lost(quote(&format!("the guest agent's answer is not understood: {e}")))
    })
}

#[cfg(test)]
mod tests {
    use casulo_protocol::agent::{FileWritten, MAX_MCP_LINE, WriteFile, tool};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    /// Answers one call with `answer`, in which `ID` stands for the request's id.
    async fn call(answer: &str) -> (Result<FileWritten, CallError>, serde_json::Value) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answer = answer.to_owned();
        let agent = tokio::spawn(async move {
            let mut theirs = BufReader::new(theirs);
            let mut line = String::new();
            theirs.read_line(&mut line).await.unwrap();
            let request: serde_json::Value = serde_json::from_str(&line).unwrap();
            let answer = answer.replace("ID", &request["id"].to_string());
            // The host may hang up before the end.
            let _ = theirs.write_all(answer.as_bytes()).await;
            let _ = theirs.write_all(b"\n").await;
            request
        });
        let client = Client::new(ours);
        let result = client.call(tool::WRITE_FILE, &WriteFile::default()).await;
        (result, agent.await.unwrap())
    }

    #[tokio::test]
    async fn the_first_line_is_the_call() {
        let answer = r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","content":[],"structuredContent":{"size":7}}}"#;
        let (result, request) = call(answer).await;
        assert_eq!(result.unwrap().size, 7);
        assert_eq!(request["method"], "tools/call");
        assert_eq!(request["params"]["name"], "write_file");
        let meta = &request["params"]["_meta"];
        assert_eq!(meta["io.modelcontextprotocol/protocolVersion"], "2026-07-28");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_call_that_is_dropped_at_once_is_made_and_then_cancelled() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (client, mut lines) = (Client::new(ours), BufReader::new(theirs).lines());
        for n in 0..500 {
            let write = WriteFile { path: "x".repeat(n * 10), ..WriteFile::default() };
            let call = client.call::<FileWritten>(tool::WRITE_FILE, &write);
            assert!(tokio::time::timeout(std::time::Duration::ZERO, call).await.is_err());
            let mut next = async || {
                let line = lines.next_line().await.unwrap().unwrap();
                serde_json::from_str::<serde_json::Value>(&line).unwrap()
            };
            let (call, cancel) = (next().await, next().await);
            assert_eq!(call["method"], "tools/call", "{call}");
            assert_eq!(cancel["method"], "notifications/cancelled", "{cancel}");
            assert_eq!(cancel["params"]["requestId"], call["id"]);
        }
    }

    #[tokio::test]
    async fn refusals_are_told_without_control_characters() {
        let answer = r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","isError":true,"content":[{"type":"text","text":"no \u001b[31msuch file"}]}}"#;
        let Err(CallError::Refused(text)) = call(answer).await.0 else { panic!() };
        assert_eq!(text, "no ?[31msuch file");
        let answer =
            r#"{"jsonrpc":"2.0","id":ID,"error":{"code":-32602,"message":"unknown tool"}}"#;
        let Err(CallError::Refused(text)) = call(answer).await.0 else { panic!() };
        assert_eq!(text, "unknown tool");
    }

    #[tokio::test]
    async fn an_agent_that_answers_everything_with_nonsense_is_lost_at_once() {
        for nonsense in [&b"{\"jsonrpd\":\"2.0\",\"error\":{}}\n"[..], b"[]\n", b"hello\n", b"\n"] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let answers = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
            let counted = std::sync::Arc::clone(&answers);
            let agent = tokio::spawn(async move {
                let mut theirs = BufReader::new(theirs);
                let mut line = String::new();
                while theirs.read_line(&mut line).await.is_ok_and(|n| n > 0) {
                    counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if theirs.write_all(nonsense).await.is_err() {
                        break;
                    }
                    line.clear();
                }
            });
            let client = Client::new(ours);
            let write = WriteFile::default();
            let call = client.call::<FileWritten>(tool::WRITE_FILE, &write);
            let result = tokio::time::timeout(std::time::Duration::from_secs(10), call).await;
            assert!(matches!(result, Ok(Err(CallError::Lost(_)))), "{result:?}");
            drop(client);
            agent.await.unwrap();
            let answers = answers.load(std::sync::atomic::Ordering::Relaxed);
            assert!(answers <= 2, "the two answered each other {answers} times");
        }
    }

    #[tokio::test]
    async fn nonsense_is_an_error_not_a_hang() {
        for answer in [
            r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","content":[],"structuredContent":{"size":-1}}}"#,
            r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","content":[]}}"#,
        ] {
            assert!(matches!(call(answer).await.0, Err(CallError::Lost(_))));
        }
        let long = format!(
            r#"{{"jsonrpc":"2.0","id":ID,"result":{{"resultType":"complete","content":[],"structuredContent":{{"size":"{}"}}}}}}"#,
            "long".repeat(100_000)
        );
        let Err(CallError::Lost(text)) = call(&long).await.0 else { panic!() };
        assert!(text.contains("longlong") && text.len() <= 2000, "{} bytes", text.len());
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let client = Client::new(ours);
        let result: Result<FileWritten, _> =
            client.call(tool::WRITE_FILE, &WriteFile::default()).await;
        assert!(matches!(result, Err(CallError::Lost(_))));
    }

    #[tokio::test]
    async fn an_answer_that_would_take_more_memory_than_an_answer_may_ends_the_connection() {
        let answer = |content: &str| {
            let head =
                r#"{"jsonrpc":"2.0","id":ID,"result":{"resultType":"complete","content":[],"#;
            format!(r#"{head}"structuredContent":{{"size":7,"more":{content}}}}}}}"#)
        };
        // Far more values than the host takes, in a line of a length that it takes; and too long a text.
        let values = format!("[{}0]", "0,".repeat((MAX_MCP_LINE - 500) / 2));
        let text = format!("\"{}\"", "x".repeat(MAX_MCP_LINE));
        for content in [values, text] {
            assert!(matches!(call(&answer(&content)).await.0, Err(CallError::Lost(_))));
        }
        let texts = format!("[{}0]", "\"[,:{\",".repeat(100_000));
        assert_eq!(call(&answer(&texts)).await.0.unwrap().size, 7);
    }
}
