//! Lines of at most so many bytes.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt};

/// A line without its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Whole(Vec<u8>),
    /// It was longer than the limit and has been passed over.
    TooLong,
}

/// The next line, or `None` at the end. What follows the last line end counts as a line.
pub(super) async fn next(
    reader: &mut (impl AsyncBufRead + Unpin),
    limit: usize,
) -> io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let chunk = reader.fill_buf().await?;
        if chunk.is_empty() {
            return Ok(match (too_long, line.is_empty()) {
                (true, _) => Some(Line::TooLong),
                (false, true) => None,
                (false, false) => Some(Line::Whole(line)),
            });
        }
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let part = chunk.get(..end.unwrap_or(chunk.len())).unwrap_or_default();
        if line.len().saturating_add(part.len()) > limit {
            too_long = true;
            line = Vec::new();
        } else if !too_long {
            line.extend_from_slice(part);
        }
        let used = part.len().saturating_add(usize::from(end.is_some()));
        reader.consume(used);
        if end.is_some() {
            return Ok(Some(if too_long { Line::TooLong } else { Line::Whole(line) }));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::BufReader;

    use super::*;

    #[tokio::test]
    async fn a_long_line_is_passed_over_and_the_next_is_read() {
        // Small buffers, so that lines come in pieces.
        let input = b"abcd\n\nabcde\nabcdefghijk\nx\nlast";
        let mut reader = BufReader::with_capacity(3, &input[..]);
        let mut lines = Vec::new();
        while let Some(line) = next(&mut reader, 4).await.unwrap() {
            lines.push(line);
        }
        let whole = |text: &str| Line::Whole(text.into());
        let wanted =
            [whole("abcd"), whole(""), Line::TooLong, Line::TooLong, whole("x"), whole("last")];
        assert_eq!(lines, wanted);
    }
}
