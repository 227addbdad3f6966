//! What is said on our standard error of and by a wrapped server: safe to read, bounded, and never
//! waited for. A client that does not read standard error must not stop its own server.

use std::io::{self, Write};
use std::pin::Pin;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::AsyncWrite;

use crate::text;

/// Longest line.
const MAX_LINE: usize = 2000;
/// Bytes that may be said at once, and in a second on average.
const BURST: f64 = 64.0 * 1024.0;
const RATE: f64 = 4.0 * 1024.0;
/// Lines that wait for standard error.
const QUEUE: usize = 256;

/// Where it goes. Clones share the bound.
#[derive(Clone, Debug)]
pub(super) struct Said {
    prefix: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    out: SyncSender<String>,
    budget: Mutex<Budget>,
}

#[derive(Debug)]
struct Budget {
    bytes: f64,
    at: Instant,
    left_out: u64,
}

impl Said {
    /// Lines begin with `casulo: ` and `name`, if there is one.
    pub(super) fn new(name: &str) -> Self {
        let (out, lines) = sync_channel::<String>(QUEUE);
        // Ends when the last clone does. Without it nothing is said.
        let writer = std::thread::Builder::new().name("casulo-stderr".into());
        let _ = writer.spawn(move || {
            for line in lines {
                // Nothing can be done about a standard error that is closed.
                let _ = io::stderr().write_all(line.as_bytes());
            }
        });
        Self::to(name, out)
    }

    /// Nowhere.
    #[cfg(fuzzing)]
    pub(super) fn silent() -> Self {
        Self::to("", sync_channel(1).0)
    }

    fn to(name: &str, out: SyncSender<String>) -> Self {
        let budget = Budget { bytes: BURST, at: Instant::now(), left_out: 0 };
        let prefix = if name.is_empty() { String::new() } else { format!("{name}: ") };
        Self { prefix, shared: Arc::new(Shared { out, budget: Mutex::new(budget) }) }
    }

    /// Says a line, if there is room.
    pub(super) fn note(&self, line: &str) {
        let line: String = line.chars().take(MAX_LINE).collect();
        let line = text::safe(&line).replace('\n', " ");
        let line = format!("casulo: {}{line}\n", self.prefix);
        let mut budget = self.shared.budget.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let earned = now.saturating_duration_since(budget.at).as_secs_f64() * RATE;
        budget.bytes = (budget.bytes + earned).min(BURST);
        budget.at = now;
        #[expect(clippy::cast_precision_loss, reason = "a line is short")]
        let cost = line.len() as f64;
        if budget.bytes < cost {
            budget.left_out = budget.left_out.saturating_add(1);
            return;
        }
        budget.bytes -= cost;
        let line = match budget.left_out {
            0 => line,
            n => format!("casulo: {}[{n} lines left out]\n{line}", self.prefix),
        };
        budget.left_out = match self.shared.out.try_send(line) {
            Err(TrySendError::Full(_)) => budget.left_out.saturating_add(1),
            _ => 0,
        };
    }

    /// The server's standard error.
    pub(super) fn stderr(&self) -> Stderr {
        Stderr {
            said: self.clone(),
            line: Vec::new(),
            skipping: false,
            #[cfg(feature = "http")]
            words: None,
        }
    }
}

/// The last that `casulo serve` said on the standard error of a server in one of its sandboxes, made safe
/// to read.
#[cfg(feature = "http")]
#[derive(Clone, Debug, Default)]
pub(super) struct LastWords(Arc<Mutex<Option<String>>>);

#[cfg(feature = "http")]
impl LastWords {
    pub(super) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Lines of a server's standard error.
pub(super) struct Stderr {
    said: Said,
    line: Vec<u8>,
    skipping: bool,
    #[cfg(feature = "http")]
    words: Option<LastWords>,
}

impl Stderr {
    /// Keeps lines that begin as those of `casulo serve` do instead of saying them. A server may say
    /// such lines too; they count as what is said of it.
    #[cfg(feature = "http")]
    pub(super) fn keeping(mut self, words: LastWords) -> Self {
        self.words = Some(words);
        self
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if !std::mem::take(&mut self.skipping) && !line.is_empty() {
            #[cfg(feature = "http")]
            if let (Some(words), Some(text)) = (&self.words, line.strip_prefix(b"casulo: ")) {
                let text = text::safe(&String::from_utf8_lossy(text));
                *words.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
                return;
            }
            self.said.note(&String::from_utf8_lossy(&line));
        }
    }
}

impl AsyncWrite for Stderr {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            if !self.skipping {
                let room = MAX_LINE.saturating_sub(self.line.len());
                self.line.extend_from_slice(text.get(..room).unwrap_or(text));
                if self.line.len() >= MAX_LINE {
                    self.end_line();
                    self.skipping = true;
                }
            }
            if ends {
                self.end_line();
            }
        }
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end_line();
        Poll::Ready(Ok(()))
    }
}

impl Drop for Stderr {
    fn drop(&mut self) {
        self.end_line();
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn lines_are_safe_and_short_and_a_flood_is_left_out() {
        let (out, lines) = sync_channel(10_000);
        let said = Said::to("files", out);
        let mut stderr = said.stderr();
        stderr.write_all(b"on\xffe \x1b[31mred\nt\r\n\nwo\x00").await.unwrap();
        stderr.write_all(b"\n").await.unwrap();
        stderr.write_all(&vec![b'x'; 100_000]).await.unwrap();
        stderr.write_all(b"\nend").await.unwrap();
        drop(stderr);
        let heard: Vec<String> = lines.try_iter().collect();
        assert_eq!(heard[0], "casulo: files: on\u{fffd}e red\n");
        assert_eq!(heard[2], "casulo: files: wo\\u{0}\n");
        assert_eq!(heard[3].len(), MAX_LINE + "casulo: files: \n".len());
        assert_eq!(heard[4], "casulo: files: end\n");
        let mut stderr = said.stderr();
        for _ in 0..10_000 {
            stderr.write_all(b"flood flood flood\n").await.unwrap();
        }
        let bytes: usize = lines.try_iter().map(|line| line.len()).sum();
        assert!(bytes <= 200_000, "{bytes}");
    }

    #[cfg(feature = "http")]
    #[tokio::test]
    async fn the_last_words_of_casulo_serve_are_kept_and_not_said() {
        let (out, lines) = sync_channel(10);
        let words = LastWords::default();
        let mut stderr = Said::to("", out).stderr().keeping(words.clone());
        stderr.write_all(b"one\ncasulo: first\ncas").await.unwrap();
        stderr.write_all(b"ulo: the \x1b[31mlast\n").await.unwrap();
        drop(stderr);
        assert_eq!(lines.try_iter().collect::<Vec<_>>(), ["casulo: one\n"]);
        assert_eq!(words.take().as_deref(), Some("the last"));
        assert_eq!(words.take(), None);
    }

    #[test]
    fn nobody_waits_for_a_reader() {
        let (out, lines) = sync_channel(1);
        let said = Said::to("", out);
        for n in 0..100 {
            said.note(&n.to_string());
        }
        assert_eq!(lines.try_iter().collect::<Vec<_>>(), ["casulo: 0\n"]);
        said.note("more");
        assert_eq!(lines.try_iter().next().unwrap(), "casulo: [99 lines left out]\ncasulo: more\n");
    }
}
