//! The threads of a VM: each enters its jail before it does anything else.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use seccompiler::BpfProgram;

use crate::builder::BuildError;
use crate::devices::virtio::fs::Share;
use crate::jail::landlock::{self, Root};
use crate::jail::seccomp::{self, Kind};
use crate::jail::{Confine, JailError};

/// Room for what a device or a vCPU puts on its stack; only touched pages cost memory.
const STACK_SIZE: usize = 256 * 1024;

/// Starts threads, and the filters that each installs first.
pub(crate) struct Threads {
    confine: Confine,
    /// For threads that close Landlock around themselves; empty when this thread did for all.
    roots: Arc<[ShareRoot]>,
    filters: Vec<(Kind, Arc<BpfProgram>)>,
    ready: Sender<Result<(), JailError>>,
    reports: Receiver<Result<(), JailError>>,
    count: usize,
}

/// A share root as Landlock wants it.
pub(crate) struct ShareRoot {
    fd: OwnedFd,
    read_only: bool,
    file: bool,
}

impl Threads {
    /// Prepares the jail; with [`Confine::Process`], Landlock holds for the calling thread from here on.
    pub(crate) fn new(confine: Confine, roots: Vec<ShareRoot>) -> Result<Self, BuildError> {
        let (ready, reports) = channel();
        let mut roots: Arc<[ShareRoot]> = roots.into();
        if confine == Confine::Process {
            restrict(&roots)?;
            roots = Arc::default();
        }
        Ok(Self { confine, roots, filters: Vec::new(), ready, reports, count: 0 })
    }

    fn filter(&mut self, kind: Kind) -> Arc<BpfProgram> {
        if let Some((_, filter)) = self.filters.iter().find(|(known, _)| *known == kind) {
            return filter.clone();
        }
        let filter = Arc::new(seccomp::filter(kind));
        self.filters.push((kind, filter.clone()));
        filter
    }

    /// Starts a thread that enters its jail, reports, and runs `body`.
    pub(crate) fn spawn(
        &mut self,
        name: String,
        kind: Kind,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, BuildError> {
        let filter = self.filter(kind);
        let roots = self.roots.clone();
        let confine = self.confine;
        let ready = self.ready.clone();
        let thread = move || {
            let result = match confine {
                Confine::Process => seccomp::install(&filter),
                Confine::Threads => restrict(&roots).and_then(|()| seccomp::install(&filter)),
                Confine::Nothing => Ok(()),
            };
            let failed = result.is_err();
            drop((filter, roots));
            // The builder waits for every report.
            let _ = ready.send(result);
            drop(ready);
            if !failed {
                body();
            }
        };
        let thread = thread::Builder::new()
            .name(name)
            .stack_size(STACK_SIZE)
            .spawn(thread)
            .map_err(BuildError::Thread)?;
        self.count += 1;
        Ok(thread)
    }

    /// Waits until every thread is in its jail; with [`Confine::Process`], enters that of the control
    /// thread.
    pub(crate) fn finish(mut self) -> Result<(), BuildError> {
        for _ in 0..self.count {
            let gone = |_| BuildError::Thread(io::ErrorKind::BrokenPipe.into());
            self.reports.recv().map_err(gone)??;
        }
        if self.confine == Confine::Process {
            seccomp::install(&self.filter(Kind::Control))?;
        }
        Ok(())
    }
}

/// The roots of these shares.
pub(crate) fn roots(shares: &[Share]) -> Result<Vec<ShareRoot>, BuildError> {
    let root = |share: &Share| {
        let stat = rustix::fs::fstat(&share.root)?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        Ok(ShareRoot {
            fd: share.root.try_clone()?,
            read_only: share.read_only,
            file: kind != rustix::fs::FileType::Directory,
        })
    };
    shares.iter().map(root).collect::<io::Result<_>>().map_err(BuildError::Device)
}

fn restrict(roots: &[ShareRoot]) -> Result<(), JailError> {
    let roots: Vec<Root<'_>> = roots
        .iter()
        .map(|root| Root { fd: root.fd.as_fd(), read_only: root.read_only, file: root.file })
        .collect();
    landlock::restrict(&roots)
}

/// Ends the process with a word on standard error: a device thread cannot go on.
pub(crate) fn abort(error: &dyn Display) -> ! {
    eprintln!("casulo-vmm: a device thread ended: {error}");
    std::process::abort();
}
