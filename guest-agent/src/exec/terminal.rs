//! A pseudo-terminal for a command.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use casulo_protocol::agent::WindowSize;
use rustix::fs::{Gid, Mode, Uid};
use rustix::process::{Pid, Signal};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::user::User;

/// Group `tty`, the same in every distribution; it lets write(1) and its like in.
const TTY_GROUP: u32 = 5;

/// Makes a terminal of this size that belongs to `user`: master, then slave.
///
/// # Errors
/// No devpts, or no more terminals.
pub fn open(size: WindowSize, user: &User) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    resize(&master, size.rows, size.columns)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    // So that the user can open it by name. Only root may; tests as another user need not.
    if rustix::process::geteuid().is_root() {
        let owner = Uid::from_raw(user.uid);
        rustix::fs::fchown(&slave, Some(owner), Some(Gid::from_raw(TTY_GROUP)))?;
        rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620))?;
    }
    Ok((master, slave))
}

/// Sets the size; the foreground gets SIGWINCH.
///
/// # Errors
/// `terminal` is none.
pub fn resize(terminal: impl AsFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

/// Sends `signal` to the foreground process group of the terminal, else to the group of `leader`.
/// A number that is no signal, and a group that is gone, are ignored.
pub fn signal_foreground(terminal: Option<impl AsFd>, leader: Pid, signal: u32) {
    let Some(signal) = i32::try_from(signal).ok().and_then(Signal::from_named_raw) else { return };
    let group = terminal.and_then(|t| rustix::termios::tcgetpgrp(t).ok()).unwrap_or(leader);
    let _ = rustix::process::kill_process_group(group, signal);
}
