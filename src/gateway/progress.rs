//! What a call needs to know of the client that waits for it: whether it still waits, and whether it
//! wants to see the output as it comes.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use casulo_protocol::error::TaskError;
use rmcp::model::{ProgressNotificationParam, ProgressToken, ProtocolVersion};
use rmcp::service::{Peer, RequestContext, RoleServer};
use tokio::io::AsyncWrite;
use tokio_util::sync::CancellationToken;

use super::server::cancelled;
use crate::capture::Capture;
use crate::text;

/// Time between two notifications.
const INTERVAL: Duration = Duration::from_millis(250);
/// Most bytes of output in one notification.
const MOST: usize = 4096;

/// The client's side of one call.
pub(super) struct Context {
    pub(super) cancel: CancellationToken,
    /// Whether it knows links to resources in results, which came with MCP 2025-06-18.
    pub(super) knows_links: bool,
    progress: Option<(ProgressToken, Peer<RoleServer>)>,
    recent: Arc<Mutex<Recent>>,
}

/// The newest output that has not been told.
#[derive(Debug, Default)]
struct Recent {
    bytes: VecDeque<u8>,
    skipped: u64,
    total: u64,
    /// `total` when it was last told: progress must increase.
    told: u64,
}

impl Recent {
    fn push(&mut self, data: &[u8]) {
        self.total = self.total.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        self.bytes.extend(data.get(data.len().saturating_sub(MOST)..).unwrap_or_default());
        let over = self.bytes.len().saturating_sub(MOST);
        self.bytes.drain(..over);
        let over = over.saturating_add(data.len().saturating_sub(MOST));
        self.skipped = self.skipped.saturating_add(u64::try_from(over).unwrap_or(u64::MAX));
    }

    /// Takes what is new: a message, and the bytes so far.
    fn take(&mut self) -> Option<(String, u64)> {
        if self.bytes.is_empty() || self.total == self.told {
            return None;
        }
        self.told = self.total;
        let bytes: Vec<u8> = self.bytes.drain(..).collect();
        // A character that is not whole yet waits for its rest.
        let whole = match std::str::from_utf8(&bytes) {
            Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
                error.valid_up_to()
            }
            _ => bytes.len(),
        };
        let (now, later) = bytes.split_at_checked(whole).unwrap_or((&bytes, &[]));
        self.bytes.extend(later);
        let mut message = text::of(now, false);
        let skipped = std::mem::take(&mut self.skipped);
        if skipped > 0 {
            message.insert_str(0, &format!("[{skipped} bytes left out]\n"));
        }
        Some((message, self.total))
    }
}

impl Context {
    pub(super) fn new(context: &RequestContext<RoleServer>) -> Self {
        let token = context.meta.get_progress_token();
        Self {
            cancel: context.ct.clone(),
            knows_links: context
                .protocol_version()
                .is_some_and(|version| version >= ProtocolVersion::V_2025_06_18),
            progress: token.map(|token| (token, context.peer.clone())),
            recent: Arc::default(),
        }
    }

    /// Runs `work` until it ends or the client gives up.
    pub(super) async fn or_cancelled<T>(
        &self,
        work: impl Future<Output = Result<T, TaskError>>,
    ) -> Result<T, TaskError> {
        tokio::select! {
            result = work => result,
            () = self.cancel.cancelled() => Err(cancelled()),
        }
    }

    /// A sink that keeps what it gets in `capture`, and has it told if the client wants that.
    pub(super) fn tee(&self, capture: Capture) -> Box<dyn AsyncWrite + Send + Unpin> {
        match self.progress {
            None => Box::new(capture),
            Some(_) => Box::new(Tee { capture, recent: Arc::clone(&self.recent) }),
        }
    }

    /// Runs `work`, and tells the client of the output meanwhile if it wants that.
    pub(super) async fn with_progress<T>(&self, work: impl Future<Output = T>) -> T {
        let Some((token, peer)) = &self.progress else { return work.await };
        let tell = async {
            loop {
                tokio::time::sleep(INTERVAL).await;
                let news = self.recent.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some((message, total)) = news {
                    #[expect(clippy::cast_precision_loss, reason = "MCP counts in f64")]
                    let params = ProgressNotificationParam::new(token.clone(), total as f64)
                        .with_message(message);
                    // A client that does not listen is not told; the result will be there.
                    let _ = peer.notify_progress(params).await;
                }
            }
        };
        tokio::select! {
            biased;
            result = work => result,
            () = tell => std::future::pending().await,
        }
    }
}

struct Tee {
    capture: Capture,
    recent: Arc<Mutex<Recent>>,
}

impl AsyncWrite for Tee {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).push(data);
        Pin::new(&mut self.capture).poll_write(context, data)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_told_once_and_the_oldest_is_skipped() {
        let mut recent = Recent::default();
        assert!(recent.take().is_none());
        recent.push(b"one\n");
        recent.push(b"two\x1b[1m\n");
        assert_eq!(recent.take(), Some(("one\ntwo\n".to_owned(), 12)));
        assert!(recent.take().is_none());
        recent.push(&[b'x'; 10_000]);
        recent.push(b"y");
        let (message, total) = recent.take().unwrap();
        assert_eq!(total, 10_013);
        assert!(message.starts_with("[5905 bytes left out]\nxxx") && message.ends_with("xy"));
    }

    #[test]
    fn a_character_in_two_parts_is_told_whole() {
        let mut recent = Recent::default();
        let (first, second) = "aé".as_bytes().split_at(2);
        recent.push(first);
        assert_eq!(recent.take().unwrap().0, "a");
        recent.push(second);
        assert_eq!(recent.take().unwrap().0, "é");
        recent.push(b"\xc3");
        assert_eq!(recent.take().unwrap().0, "\u{fffd}");
        recent.push(b"b\xc3");
        assert_eq!(recent.take().unwrap().0, "b");
        assert!(recent.take().is_none(), "progress must increase");
    }
}
