//! Lines of at most so many bytes from a stream, for JSON-RPC with one message each.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Bytes of one read.
const BUFFER: usize = 16 * 1024;

/// A line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// All of it, without its line feed.
    Whole(Vec<u8>),
    /// It is longer than the limit. Told as soon as that is known; the rest of it is passed over.
    TooLong,
}

/// A stream that is read by lines.
#[derive(Debug)]
pub(crate) struct LineReader<R> {
    read: BufReader<R>,
    limit: usize,
    line: Vec<u8>,
    /// The rest of a line that was too long is passed over.
    skipping: bool,
}

impl<R: AsyncRead + Unpin> LineReader<R> {
    /// Lines of at most `limit` bytes beside the line feed.
    pub(crate) fn new(read: R, limit: usize) -> Self {
        let read = BufReader::with_capacity(BUFFER, read);
        Self { read, limit, line: Vec::new(), skipping: false }
    }

    /// The next line, or `None` at the end; what follows the last line feed is a line too. Dropping
    /// the future loses nothing: the next call goes on where it was.
    ///
    /// # Errors
    /// The stream cannot be read.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let available = self.read.fill_buf().await?;
            if available.is_empty() {
                // Empty while the rest of a long line is passed over.
                let rest = std::mem::take(&mut self.line);
                return Ok((!rest.is_empty()).then_some(Line::Whole(rest)));
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let part = available.get(..end.unwrap_or(available.len())).unwrap_or_default();
            let used = part.len().saturating_add(usize::from(end.is_some()));
            let (was_skipping, ends) = (self.skipping, end.is_some());
            let too_long = self.line.len().saturating_add(part.len()) > self.limit;
            if !was_skipping && !too_long {
                self.line.extend_from_slice(part);
            }
            self.read.consume(used);
            self.skipping = !ends && (was_skipping || too_long);
            match (was_skipping, too_long, ends) {
                (true, ..) | (false, false, false) => {}
                (false, true, _) => {
                    self.line = Vec::new();
                    return Ok(Some(Line::TooLong));
                }
                (false, false, true) => {
                    return Ok(Some(Line::Whole(std::mem::take(&mut self.line))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn whole(text: &str) -> Line {
        Line::Whole(text.into())
    }

    #[tokio::test]
    async fn a_long_line_is_passed_over_and_the_next_is_read() {
        let (mut theirs, ours) = tokio::io::duplex(3);
        let writer = tokio::spawn(async move {
            // Small pieces.
            theirs.write_all(b"abcd\n\nabcde\nabcdefghijk\nx\r\nlast").await.unwrap();
        });
        let mut reader = LineReader::new(ours, 4);
        let mut lines = Vec::new();
        while let Some(line) = reader.next().await.unwrap() {
            lines.push(line);
        }
        writer.await.unwrap();
        let wanted =
            [whole("abcd"), whole(""), Line::TooLong, Line::TooLong, whole("x\r"), whole("last")];
        assert_eq!(lines, wanted);
        assert_eq!(reader.next().await.unwrap(), None, "and again");
    }

    #[tokio::test]
    async fn a_long_line_is_told_of_before_its_end_and_costs_nothing() {
        let (mut theirs, ours) = tokio::io::duplex(1 << 16);
        let mut reader = LineReader::new(ours, 1000);
        theirs.write_all(&[b'x'; 1001]).await.unwrap();
        assert_eq!(reader.next().await.unwrap(), Some(Line::TooLong));
        assert_eq!(reader.line.capacity(), 0);
        let more = tokio::spawn(async move {
            for _ in 0..100 {
                theirs.write_all(&[b'x'; 100_000]).await.unwrap();
            }
            theirs.write_all(b"\nnext\nunended").await.unwrap();
            theirs.write_all(&[b'x'; 1000]).await.unwrap();
        });
        assert_eq!(reader.next().await.unwrap(), Some(whole("next")));
        assert_eq!(reader.next().await.unwrap(), Some(Line::TooLong));
        assert_eq!(reader.next().await.unwrap(), None);
        more.await.unwrap();
    }

    #[tokio::test]
    async fn a_read_that_is_interrupted_loses_nothing() {
        let (mut theirs, ours) = tokio::io::duplex(1 << 16);
        let mut reader = LineReader::new(ours, 10);
        for (part, wanted) in [
            (&b"ab"[..], None),
            (b"cd", None),
            (b"ef\ngh", Some(whole("abcdef"))),
            (b"i", None),
            (b"\n", Some(whole("ghi"))),
            (b"more than ten", Some(Line::TooLong)),
            (b" and more", None),
            (b" of it\nx\n", Some(whole("x"))),
        ] {
            theirs.write_all(part).await.unwrap();
            // The future is dropped where there is no line yet.
            let next = tokio::time::timeout(std::time::Duration::from_millis(20), reader.next());
            let next = next.await.ok().map(|line| line.unwrap().unwrap());
            assert_eq!(next, wanted, "after {:?}", String::from_utf8_lossy(part));
        }
    }
}
