//! The agent's lines as messages of MCP, for the host's client.
//!
//! A line that is no message ends the connection: the agent is not ours any more. To answer it, as the
//! SDK's own transport does, would let a hostile guest keep both sides answering each other for ever.

use std::io;
use std::sync::Arc;

use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::Mutex;

use crate::lines::{Line, LineReader};

/// One connection; lines are as long as the reader lets them be.
pub(super) struct AgentLines<R, W> {
    read: LineReader<R>,
    write: Arc<Mutex<W>>,
}

impl<R: AsyncRead + Unpin, W> AgentLines<R, W> {
    pub(super) fn new(read: R, write: W) -> Self {
        // The stream itself fails where a line is too long.
        let read = LineReader::new(read, usize::MAX);
        Self { read, write: Arc::new(Mutex::new(write)) }
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
        match self.read.next().await.ok()?? {
            Line::Whole(line) => serde_json::from_slice(&line).ok(),
            Line::TooLong => None,
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.write.lock().await.shutdown().await
    }
}
