//! The shares of the host that the workload may write, and when to flush them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags};

/// Writable shares.
#[derive(Clone, Debug, Default)]
pub struct Shares(Arc<Mutex<Vec<Share>>>);

#[derive(Debug)]
struct Share {
    path: PathBuf,
    /// Opened at the first flush.
    open: Option<Arc<OwnedFd>>,
}

impl Shares {
    /// The shares at these places, which must be out of the workload's reach.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let shares = paths.into_iter().map(|path| Share { path, open: None }).collect();
        Self(Arc::new(Mutex::new(shares)))
    }

    /// Has the host store what the guest's kernel still holds of them. A file that was closed is
    /// on the host already; this is for mapped files. Errors are not reported: the program that
    /// wrote the bytes had its chance to ask.
    pub async fn sync(&self) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return;
        }
        let shares = self.clone();
        let _ = tokio::task::spawn_blocking(move || shares.sync_now()).await;
    }

    fn sync_now(&self) {
        let open: Vec<Arc<OwnedFd>> = {
            let mut shares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            for share in shares.iter_mut().filter(|s| s.open.is_none()) {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let open = rustix::fs::openat(CWD, &share.path, flags, Mode::empty());
                share.open = open.ok().map(Arc::new);
            }
            shares.iter().filter_map(|s| s.open.clone()).collect()
        };
        for fd in open {
            let _ = rustix::fs::syncfs(&fd);
        }
    }
}
