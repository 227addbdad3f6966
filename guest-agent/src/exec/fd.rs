//! Pipes, terminals and pidfds in the event loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// A descriptor that the event loop watches.
#[derive(Debug)]
pub struct Fd(AsyncFd<OwnedFd>);

impl Fd {
    /// Makes `fd` non-blocking and watches it.
    ///
    /// # Errors
    /// The descriptor cannot be polled, or the limit of watches is met.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Self::watch(fd)
    }

    /// Watches a descriptor that has no mode of its own, such as a pidfd.
    ///
    /// # Errors
    /// The descriptor cannot be polled, or the limit of watches is met.
    pub fn watch(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the OwnedFd is private to this type, which never closes or replaces it while the
        // AsyncFd holds it.
        let fd = unsafe { AsyncFd::register(fd) };
        Ok(Self(fd.map_err(io::Error::from)?))
    }

    /// Reads some bytes; 0 is the end. A terminal whose other side is closed has ended.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut guard = self.0.readable().await?;
            if let Ok(result) = guard.try_io(|fd| read_once(fd.as_fd(), buffer)) {
                return result;
            }
        }
    }

    /// Like [`Fd::read`], but once `finished` is true, "nothing there" is the end too: no process
    /// is left that could write more.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub async fn read_until(
        &self,
        buffer: &mut [u8],
        finished: &mut watch::Receiver<bool>,
    ) -> io::Result<usize> {
        if !*finished.borrow() {
            tokio::select! {
                result = self.read(buffer) => return result,
                Ok(_) = finished.wait_for(|f| *f) => {}
            }
        }
        match read_once(self.as_fd(), buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            result => result,
        }
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// Those of `write(2)`.
    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut guard = self.0.writable().await?;
            match guard.try_io(|fd| retry(|| rustix::io::write(fd, data))) {
                Ok(written) => data = data.get(written?..).unwrap_or_default(),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Waits until it can be read.
    ///
    /// # Errors
    /// The event loop is gone.
    pub async fn readable(&self) -> io::Result<()> {
        // The readiness stays set: a pidfd once readable is readable for good.
        self.0.readable().await.map(|mut guard| guard.retain_ready())
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

fn retry(mut call: impl FnMut() -> Result<usize, Errno>) -> io::Result<usize> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result.map_err(io::Error::from),
        }
    }
}

fn read_once(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    match retry(|| rustix::io::read(fd, &mut *buffer)) {
        // What a terminal says when its last other user has closed it.
        Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(0),
        result => result,
    }
}
