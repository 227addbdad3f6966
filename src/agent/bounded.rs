//! Bounds on the lines of JSON that the agent sends, counted before any of them is parsed.
//!
//! The length of a line alone does not bound what it costs: `{"":0},` takes seven bytes of the line and
//! a hundred times as much when it is parsed. So the values of a line are counted as well, by what
//! separates them. A line with [`MAX_VALUES`] values takes at most some 50 MiB of this process while it
//! is parsed, one that has [`MAX_MCP_LINE`] bytes beside them some 100 MiB (measured: the buffer, which
//! doubles as it grows, and two copies of its texts). There is one such line at a time on a connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use casulo_protocol::agent::MAX_MCP_LINE;
use tokio::io::{AsyncRead, ReadBuf};

/// Most separators in a line: the 10,000 entries of the longest listing have some 140,000.
pub(super) const MAX_VALUES: usize = 1 << 18;

/// A stream that fails with `InvalidData` where a line exceeds the bounds.
pub(super) struct Bounded<R> {
    inner: R,
    line: Line,
}

/// How far the line has come.
#[derive(Debug, Default)]
struct Line {
    length: usize,
    values: usize,
    in_text: bool,
    /// The next byte is part of an escape sequence.
    escaped: bool,
}

/// Whether a whole line keeps the bounds.
#[cfg_attr(not(feature = "wrap"), expect(dead_code, reason = "only wrapped servers need it"))]
pub(crate) fn keeps_bounds(line: &[u8]) -> bool {
    Line::default().feed(line).is_ok()
}

impl<R> Bounded<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, line: Line::default() }
    }
}

impl Line {
    /// Counts bytes. Whether the line is valid JSON is not looked at: where it is not, parsing ends.
    fn feed(&mut self, bytes: &[u8]) -> io::Result<()> {
        for byte in bytes {
            self.length = self.length.saturating_add(1);
            match byte {
                // Not allowed within a text, so a line always ends here.
                b'\n' => *self = Self::default(),
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_text,
                b'"' => self.in_text = !self.in_text,
                b',' | b':' | b'[' | b'{' if !self.in_text => {
                    self.values = self.values.saturating_add(1);
                }
                _ => {}
            }
            if self.length > MAX_MCP_LINE || self.values > MAX_VALUES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a line of the guest agent is too long",
                ));
            }
        }
        Ok(())
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Bounded<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        let new = buffer.filled().get(before..).unwrap_or_default();
        Poll::Ready(self.line.feed(new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(bytes: &[u8]) -> io::Result<Line> {
        let mut line = Line::default();
        bytes.chunks(7).try_for_each(|part| line.feed(part))?;
        Ok(line)
    }

    #[test]
    fn values_are_counted_outside_of_texts_only() {
        assert_eq!(line(br#"{"a":[1,2],"b":{}}"#).unwrap().values, 7);
        assert_eq!(line(br#"["a,b:[{","\",[\\",1]"#).unwrap().values, 3);
        assert_eq!(line(b"[1,2]\n[1").unwrap().values, 1, "each line for itself");
        assert_eq!(
            line(b"\"open, text\n[1,").unwrap().values,
            2,
            "no text goes on in the next line"
        );
    }

    #[test]
    fn a_line_has_an_end_and_so_many_values() {
        let many = |count| "0,".repeat(count);
        assert!(line(many(MAX_VALUES).as_bytes()).is_ok());
        assert!(line(many(MAX_VALUES + 1).as_bytes()).is_err());
        assert!(line(&vec![b' '; MAX_MCP_LINE]).is_ok());
        assert!(line(&vec![b' '; MAX_MCP_LINE + 1]).is_err());
        let texts = format!("[\"{}\"]\n", ",".repeat(MAX_VALUES + 1));
        assert!(line(texts.repeat(100).as_bytes()).is_ok());
    }
}
