//! The user's terminal while a job in the emulated host has one of its own.

use std::os::fd::BorrowedFd;

use rustix::termios::{OptionalActions, Termios};

/// Puts the terminal into raw mode (every key goes to the job); restores it when dropped.
pub(super) struct RawMode {
    before: Termios,
}

fn stdin() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}

impl RawMode {
    /// `None` when stdin is not a terminal.
    pub(super) fn enter() -> Option<Self> {
        let before = rustix::termios::tcgetattr(stdin()).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be gone; then there is nothing to restore.
        let _ = rustix::termios::tcsetattr(stdin(), OptionalActions::Flush, &self.before);
    }
}

/// Rows and columns of the user's terminal, if stdin or stdout is one.
pub(super) fn size() -> Option<(u16, u16)> {
    [rustix::stdio::stdin(), rustix::stdio::stdout()]
        .into_iter()
        .find_map(|fd| rustix::termios::tcgetwinsize(fd).ok())
        .map(|size| (size.ws_row, size.ws_col))
}
