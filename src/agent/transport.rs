//! The agent's lines as messages of MCP, for the host's client.
//!
//! A line that is no message ends the connection: the agent is not ours any more. To answer it, as the
//! SDK's own transport does, would let a hostile guest keep both sides answering each other for ever.

use std::io;

use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::lines::{Line, LineReader};

/// A line to write, and who waits for that.
struct Outgoing {
    line: Vec<u8>,
    done: oneshot::Sender<io::Result<()>>,
}

/// One connection; lines are as long as the reader lets them be.
pub(super) struct AgentLines<R> {
    read: LineReader<R>,
    /// As many as there are calls. The client sends each message in a task of its own: the order is that
    /// in which they are given to [`Transport::send`], lest a cancellation overtakes its call.
    write: Option<mpsc::UnboundedSender<Outgoing>>,
}

impl<R: AsyncRead + Unpin> AgentLines<R> {
    /// Must be called inside tokio.
    pub(super) fn new(read: R, write: impl AsyncWrite + Send + Unpin + 'static) -> Self {
        let (lines, waiting) = mpsc::unbounded_channel();
        tokio::spawn(write_out(write, waiting));
        // The stream itself fails where a line is too long.
        let read = LineReader::new(read, usize::MAX);
        Self { read, write: Some(lines) }
    }
}

/// Writes lines in their order, until there are no more or one cannot be written.
async fn write_out(
    mut write: impl AsyncWrite + Unpin,
    mut waiting: mpsc::UnboundedReceiver<Outgoing>,
) {
    while let Some(Outgoing { line, done }) = waiting.recv().await {
        let written = match write.write_all(&line).await {
            Ok(()) => write.flush().await,
            Err(error) => Err(error),
        };
        let failed = written.is_err();
        // Whoever sent it may have given up.
        let _ = done.send(written);
        if failed {
            return;
        }
    }
    // The agent may have closed its side already.
    let _ = write.shutdown().await;
}

impl<R: AsyncRead + Send + Unpin> Transport<RoleClient> for AgentLines<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let (done, written) = oneshot::channel();
        let queued = serde_json::to_vec(&message).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            let lines = self.write.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
            lines.send(Outgoing { line, done }).map_err(|_| io::ErrorKind::BrokenPipe.into())
        });
        async move {
            queued?;
            written.await.unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        match self.read.next().await.ok()?? {
            Line::Whole(line) => serde_json::from_slice(&line).ok(),
            Line::TooLong => None,
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.write = None;
        Ok(())
    }
}
