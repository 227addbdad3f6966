//! Bounds on what one input may make this process hold: memory and descriptors.

use std::alloc::System;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use cap::Cap;

/// Beyond its limit an allocation fails, and the process aborts: a finding.
#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

/// Most bytes by which the heap may grow while one input is worked on.
const GROWTH: usize = 16 << 20;
/// Most bytes that all inputs together may leave behind: less than one each, in any longer run.
const LEFT_BEHIND: usize = 4 << 20;

static FIRST: AtomicUsize = AtomicUsize::new(0);

/// Watches from its making to its [`Limits::check`].
#[must_use]
pub struct Limits {
    next_fd: i32,
}

impl Limits {
    /// Limits from now on.
    pub fn new() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let next = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // What tells of a panic needs memory.
                let _ = HEAP.set_limit(usize::MAX);
                next(panic);
            }));
        });
        let now = HEAP.allocated();
        let first = match FIRST.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => now,
            Err(first) => first,
        };
        assert!(now < first + LEFT_BEHIND, "{} bytes were not freed in all", now - first);
        HEAP.set_limit(now + GROWTH).expect("a limit above what is allocated");
        Self { next_fd: next_fd() }
    }

    /// How many descriptors are open beyond those at the start. Exact, if none of those was closed and
    /// there are no gaps.
    pub fn descriptors(&self) -> i32 {
        next_fd() - self.next_fd
    }

    /// To be called when everything that the input made is dropped.
    pub fn check(self) {
        HEAP.set_limit(usize::MAX).expect("no limit");
        assert_eq!(self.descriptors(), 0, "descriptors were not closed");
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::new()
    }
}

/// The least number that no descriptor has.
fn next_fd() -> i32 {
    let fd = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), 0).expect("a descriptor");
    fd.as_raw_fd()
}
