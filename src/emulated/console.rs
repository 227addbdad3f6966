//! The end of what the emulated machine's console and QEMU have said, kept for error messages.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

const KEPT: usize = 64 * 1024;
const LINES: usize = 25;

/// Reads a socket until its end; keeps the last 64 KiB.
pub(super) struct Console {
    kept: Arc<Mutex<VecDeque<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Console {
    pub(super) fn new(socket: OwnedFd) -> Self {
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let shared = Arc::clone(&kept);
        let reader = std::thread::spawn(move || {
            let mut socket = File::from(socket);
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = socket.read(&mut buffer) {
                let mut kept = shared.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend(buffer.get(..n).unwrap_or_default());
                let excess = kept.len().saturating_sub(KEPT);
                kept.drain(..excess);
            }
        });
        Self { kept, reader: Some(reader) }
    }

    /// The last lines. Call it when QEMU is gone: it waits until all that was said is here.
    pub(super) fn last_lines(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            // The reader does not panic, and its result would change nothing.
            let _ = reader.join();
        }
        let bytes: Vec<u8> = {
            let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.iter().copied().collect()
        };
        last_lines(&String::from_utf8_lossy(&bytes))
    }
}

/// The last lines that say something: no empty ones, nor QEMU's complaint about features that TCG
/// lacks, nor the control sequences with which firmware clears the screen.
fn last_lines(text: &str) -> String {
    let printable: String = text
        .replace("\u{1b}[", "\n\u{1b}[")
        .chars()
        .filter(|c| *c == '\n' || *c == '\t' || !c.is_control())
        .collect();
    let lines: Vec<&str> = printable
        .lines()
        .map(str::trim_end)
        .filter(|l| !l.is_empty() && !l.contains("TCG doesn't support requested feature"))
        .filter(|l| !is_control_sequence(l))
        .collect();
    lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().join("\n")
}

/// What is left of `ESC [ 2 J` and its like.
fn is_control_sequence(line: &str) -> bool {
    line.strip_prefix('[').is_some_and(|rest| {
        rest.len() <= 8
            && rest.ends_with(|c: char| c.is_ascii_alphabetic())
            && rest
                .trim_end_matches(|c: char| c.is_ascii_alphabetic())
                .chars()
                .all(|c| c.is_ascii_digit() || c == ';' || c == '?' || c == '=')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_lines_that_tell_something_are_kept() {
        let text = "\u{1b}c\u{1b}[?7l\u{1b}[2J\u{1b}[0mqemu: warning: TCG doesn't support requested \
                    feature: CPUID\r\n\r\nKernel panic - not syncing\r\n";
        assert_eq!(last_lines(text).lines().last(), Some("Kernel panic - not syncing"));
        assert!(!last_lines(text).contains("TCG"));
    }

    #[test]
    fn only_the_end_is_kept() {
        let text: String = (0..1000).map(|n| format!("line {n}\n")).collect();
        let lines = last_lines(&text);
        assert_eq!(lines.lines().count(), LINES);
        assert!(lines.ends_with("line 999"));
    }
}
