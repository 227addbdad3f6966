//! The caller's terminal in raw mode, put back on every way out.

use std::io::{IsTerminal, Stdin, Stdout};

use casulo_protocol::agent::WindowSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Raw mode of standard input while it lives.
#[derive(Debug)]
pub(crate) struct Raw {
    stdin: Stdin,
    before: Option<Termios>,
}

impl Raw {
    /// Switches standard input to raw mode if it is a terminal.
    pub(crate) fn enter() -> Self {
        let stdin = std::io::stdin();
        let before = tcgetattr(&stdin).ok();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            // Without raw mode the command still works, only less comfortably.
            let _ = tcsetattr(&stdin, OptionalActions::Drain, &raw);
        }
        Self { stdin, before }
    }

    /// Puts the terminal back.
    pub(crate) fn leave(&mut self) {
        if let Some(before) = self.before.take() {
            let _ = tcsetattr(&self.stdin, OptionalActions::Drain, &before);
        }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Size of the terminal on standard output or input; 24 by 80 where there is none.
pub(crate) fn size() -> WindowSize {
    // A terminal of which nobody knows the size says zero.
    let known = |size: &WindowSize| size.rows > 0 && size.columns > 0;
    let found = of_stdout(&std::io::stdout()).filter(known);
    let found = found.or_else(|| of_stdin(&std::io::stdin()).filter(known));
    found.unwrap_or(WindowSize { rows: 24, columns: 80 })
}

fn of_stdout(stdout: &Stdout) -> Option<WindowSize> {
    if stdout.is_terminal() { tcgetwinsize(stdout).ok().map(convert) } else { None }
}

fn of_stdin(stdin: &Stdin) -> Option<WindowSize> {
    if stdin.is_terminal() { tcgetwinsize(stdin).ok().map(convert) } else { None }
}

fn convert(size: rustix::termios::Winsize) -> WindowSize {
    WindowSize { rows: size.ws_row, columns: size.ws_col }
}
