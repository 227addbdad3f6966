//! The command's standard descriptors as asynchronous streams, without threads and without
//! `O_NONBLOCK`, which would change the caller's terminal or pipe under its feet.
//!
//! A pipe that polls writable takes `PIPE_BUF` bytes without blocking; one that polls readable gives
//! what is there. Files that cannot be watched (regular ones, `/dev/null`) never block for long.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Most bytes that a writable pipe takes at once (`PIPE_BUF`).
const PIPE_BUF: usize = 4096;

/// One of the process's standard descriptors.
#[derive(Debug)]
pub(crate) enum Standard {
    /// Watched by the runtime.
    Watched(AsyncFd<OwnedFd>),
    /// Never blocks for long.
    Direct(OwnedFd),
}

impl Standard {
    /// A copy of `fd`.
    pub(crate) fn new(fd: impl AsFd) -> io::Result<Self> {
        let fd = fd.as_fd().try_clone_to_owned()?;
        // SAFETY: an OwnedFd stays open with the same number for as long as the AsyncFd owns it.
        match unsafe { AsyncFd::register(fd) } {
            Ok(watched) => Ok(Self::Watched(watched)),
            Err(error) => {
                let (fd, error) = error.into_parts();
                // EPERM is how epoll refuses files that are always ready.
                match error.kind() {
                    io::ErrorKind::PermissionDenied => Ok(Self::Direct(fd)),
                    _ => Err(error),
                }
            }
        }
    }
}

/// Does `work` if the descriptor is ready for `flags` now.
fn if_ready<T>(
    fd: &OwnedFd,
    flags: PollFlags,
    work: impl FnOnce(&OwnedFd) -> rustix::io::Result<T>,
) -> io::Result<T> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match rustix::event::poll(&mut [PollFd::new(fd, flags)], Some(&now)) {
        Ok(0) => Err(io::ErrorKind::WouldBlock.into()),
        // Ready, or in a state that the call itself reports.
        Ok(_) => Ok(work(fd)?),
        Err(e) => Err(e.into()),
    }
}

/// Calls again what a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

impl AsyncRead for Standard {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let space = buffer.initialize_unfilled();
        let n = match self.get_mut() {
            Self::Direct(fd) => retry(|| Ok(rustix::io::read(&*fd, &mut *space)?))?,
            Self::Watched(watched) => loop {
                let mut guard = ready!(watched.poll_read_ready(context))?;
                let read = |fd: &AsyncFd<OwnedFd>| {
                    retry(|| {
                        if_ready(fd.get_ref(), PollFlags::IN, |fd| {
                            rustix::io::read(fd, &mut *space)
                        })
                    })
                };
                match guard.try_io(read) {
                    Ok(result) => break result?,
                    Err(_would_block) => {}
                }
            },
        };
        buffer.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Standard {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Direct(fd) => Poll::Ready(retry(|| Ok(rustix::io::write(&*fd, data)?))),
            Self::Watched(watched) => loop {
                let part = data.get(..PIPE_BUF).unwrap_or(data);
                let mut guard = ready!(watched.poll_write_ready(context))?;
                let write = |fd: &AsyncFd<OwnedFd>| {
                    retry(|| {
                        if_ready(fd.get_ref(), PollFlags::OUT, |fd| rustix::io::write(fd, part))
                    })
                };
                match guard.try_io(write) {
                    Ok(result) => return Poll::Ready(result),
                    Err(_would_block) => {}
                }
            },
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_full_pipe_waits_without_blocking_the_runtime() {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut out = Standard::new(&writer).unwrap();
        drop(writer);
        let data: Vec<u8> = (0..1_000_000u32).map(|n| n as u8).collect();
        let wanted = data.clone();
        let write = tokio::spawn(async move { out.write_all(&data).await.unwrap() });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!write.is_finished());
        let mut input = Standard::new(&reader).unwrap();
        drop(reader);
        let mut got = Vec::new();
        input.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, wanted);
        write.await.unwrap();
    }

    #[tokio::test]
    async fn files_and_broken_pipes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let file = std::fs::File::create(&path).unwrap();
        let mut out = Standard::new(&file).unwrap();
        assert!(matches!(out, Standard::Direct(_)));
        out.write_all(b"hello").await.unwrap();
        let mut input = Standard::new(std::fs::File::open(&path).unwrap()).unwrap();
        let mut got = Vec::new();
        input.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"hello");

        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut out = Standard::new(&writer).unwrap();
        assert_eq!(out.write_all(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
