//! The agent's lines as messages of MCP, for the host's client.
//!
//! A line that is no message ends the connection: the agent is not ours any more. To answer it, as the
//! SDK's own transport does, would let a hostile guest keep both sides answering each other for ever.

use std::io;
use std::sync::Arc;

use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Mutex;

/// One connection; lines are as long as the reader lets them be.
pub(super) struct AgentLines<R, W> {
    read: BufReader<R>,
    line: Vec<u8>,
    write: Arc<Mutex<W>>,
}

impl<R: AsyncRead, W> AgentLines<R, W> {
    pub(super) fn new(read: R, write: W) -> Self {
        Self { read: BufReader::new(read), line: Vec::new(), write: Arc::new(Mutex::new(write)) }
    }
}

impl<R, W> Transport<RoleClient> for AgentLines<R, W>
where
    R: AsyncRead + Send + Unpin,
    W: AsyncWrite + Send + Unpin + 'static,
{
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let write = Arc::clone(&self.write);
        async move {
            let mut line = serde_json::to_vec(&message)?;
            line.push(b'\n');
            let mut write = write.lock().await;
            write.write_all(&line).await?;
            write.flush().await
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            // What was read stays in `line` when the future is dropped.
            let available = self.read.fill_buf().await.ok()?;
            if available.is_empty() {
                return None;
            }
            let newline = available.iter().position(|byte| *byte == b'\n');
            let length = newline.map_or(available.len(), |at| at.saturating_add(1));
            self.line.extend_from_slice(available.get(..length).unwrap_or_default());
            self.read.consume(length);
            if newline.is_some() {
                let line = std::mem::take(&mut self.line);
                return serde_json::from_slice(&line).ok();
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.write.lock().await.shutdown().await
    }
}
