//! Whether a peer has closed its side, which reading tells only after everything that it has sent before.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tokio::io::unix::AsyncFd;

use crate::vm;

/// The peer of a connection.
#[derive(Debug)]
pub(super) struct Peer(AsyncFd<OwnedFd>);

impl Peer {
    /// The peer of this socket; `None` when there are no descriptors left. Must be called inside tokio.
    pub(super) fn of(socket: &impl AsFd) -> Option<Arc<Self>> {
        // Another descriptor of the same socket: what is watched by one is not taken from the other.
        let socket = socket.as_fd().try_clone_to_owned().ok()?;
        Some(Arc::new(Self(vm::watched(socket).ok()?)))
    }

    /// Until it has closed its side, or the connection is broken.
    pub(super) async fn closed(&self) {
        // An error means that the runtime ends.
        while let Ok(mut ready) = self.0.readable().await {
            // EPOLLRDHUP, EPOLLHUP or EPOLLERR (epoll_ctl(2)).
            if ready.ready().is_read_closed() || ready.ready().is_error() {
                return;
            }
            // There is something to read; the next event is more of it, or the end.
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::*;

    async fn told(ours: impl AsFd + AsyncReadExt + Unpin, mut theirs: impl AsyncWriteExt + Unpin) {
        let mut ours = ours;
        let peer = Peer::of(&ours).unwrap();
        let mut closed = Box::pin(peer.closed());
        for _ in 0..3 {
            theirs.write_all(&[1; 1000]).await.unwrap();
            let short = std::time::Duration::from_millis(20);
            assert!(tokio::time::timeout(short, &mut closed).await.is_err());
        }
        drop(theirs);
        // Nothing of what was sent has been read.
        closed.await;
        let mut all = Vec::new();
        ours.read_to_end(&mut all).await.unwrap();
        assert_eq!(all.len(), 3000);
        peer.closed().await;
    }

    #[tokio::test]
    async fn the_end_is_known_while_there_is_more_to_read() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        told(ours, theirs).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        told(listener.accept().await.unwrap().0, theirs).await;
    }
}
