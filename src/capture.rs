//! Keeps the head and the tail of an output, and counts the rest.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

#[derive(Debug, Default)]
struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    bytes: u64,
}

/// A sink that keeps at most `limit` bytes, half of them from the end. Clones share the content.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    kept: Arc<Mutex<Kept>>,
    head: usize,
    tail: usize,
}

impl Capture {
    pub(crate) fn new(limit: usize) -> Self {
        let tail = limit / 2;
        Self { kept: Arc::default(), head: limit.saturating_sub(tail), tail }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, data: &[u8]) {
        let mut kept = self.kept();
        kept.bytes = kept.bytes.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        let room = self.head.saturating_sub(kept.head.len()).min(data.len());
        let (head, rest) = data.split_at(room);
        kept.head.extend_from_slice(head);
        // Only the last `tail` bytes can survive.
        let rest = rest.get(rest.len().saturating_sub(self.tail)..).unwrap_or_default();
        kept.tail.extend(rest);
        let excess = kept.tail.len().saturating_sub(self.tail);
        kept.tail.drain(..excess);
    }

    /// What was kept of both ends, and the bytes in all. The tail is empty when nothing is missing.
    #[cfg(feature = "gateway")]
    pub(crate) fn parts(&self) -> (Vec<u8>, Vec<u8>, u64) {
        let kept = self.kept();
        let (mut head, mut tail) = (kept.head.clone(), Vec::from(kept.tail.clone()));
        if u64::try_from(head.len().saturating_add(tail.len())) == Ok(kept.bytes) {
            head.append(&mut tail);
        }
        (head, tail, kept.bytes)
    }

    /// The content as text, a line in place of what was left out, and whether something was.
    pub(crate) fn text(&self) -> (String, bool) {
        let kept = self.kept();
        let held = kept.head.len().saturating_add(kept.tail.len());
        let missing = kept.bytes.saturating_sub(u64::try_from(held).unwrap_or(u64::MAX));
        let tail: Vec<u8> = kept.tail.iter().copied().collect();
        if missing == 0 {
            let all = [kept.head.as_slice(), &tail].concat();
            return (String::from_utf8_lossy(&all).into_owned(), false);
        }
        let head = String::from_utf8_lossy(&kept.head);
        let tail = String::from_utf8_lossy(&tail);
        (format!("{head}\n[{missing} bytes left out]\n{tail}"), true)
    }
}

impl AsyncWrite for Capture {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.add(data);
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keeps_head_and_tail() {
        let capture = Capture::new(6);
        capture.add(b"abcdef");
        assert_eq!(capture.text(), ("abcdef".into(), false));
        capture.add(b"ghij");
        assert_eq!(capture.text(), ("abc\n[4 bytes left out]\nhij".into(), true));
    }

    #[test]
    fn a_character_across_head_and_tail_is_whole() {
        let capture = Capture::new(3);
        capture.add("é!".as_bytes());
        assert_eq!(capture.text().0, "é!");
    }

    proptest! {
        #[test]
        fn any_splitting_gives_the_same(
            data in proptest::collection::vec(0x20u8..0x7f, 0..200),
            limit in 0usize..100,
            size in 1usize..50,
        ) {
            let (whole, parts) = (Capture::new(limit), Capture::new(limit));
            whole.add(&data);
            data.chunks(size).for_each(|c| parts.add(c));
            prop_assert_eq!(whole.text(), parts.text());
            prop_assert_eq!(whole.text().1, data.len() > limit);
        }
    }
}
