//! Head and tail of an output of unknown length, in bounded memory.

use std::collections::VecDeque;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::Captured;

/// Most bytes that are kept of one output, whatever the caller asks for: the agent's own memory is
/// a small reserve beside the workload's.
pub const MAX_CAPTURE: u64 = 1 << 20;

/// Keeps the first half and the last half of what is pushed.
#[derive(Debug)]
pub struct Capture {
    head: Vec<u8>,
    head_limit: usize,
    tail: VecDeque<u8>,
    tail_limit: usize,
    bytes: u64,
}

impl Capture {
    /// Keeps at most `limit` bytes, and never more than [`MAX_CAPTURE`].
    pub fn new(limit: u64) -> Self {
        let limit = usize::try_from(limit.min(MAX_CAPTURE)).unwrap_or(0);
        let tail_limit = limit / 2;
        Self {
            head: Vec::new(),
            head_limit: limit - tail_limit,
            tail: VecDeque::new(),
            tail_limit,
            bytes: 0,
        }
    }

    /// Adds output.
    pub fn push(&mut self, data: &[u8]) {
        self.bytes = self.bytes.saturating_add(data.len() as u64);
        let room = self.head_limit.saturating_sub(self.head.len()).min(data.len());
        let (to_head, rest) = data.split_at(room);
        self.head.extend_from_slice(to_head);
        // Only the end of what does not fit the head can survive in the tail.
        let rest = rest.get(rest.len().saturating_sub(self.tail_limit)..).unwrap_or_default();
        let over = (self.tail.len() + rest.len()).saturating_sub(self.tail_limit);
        self.tail.drain(..over.min(self.tail.len()));
        self.tail.extend(rest);
    }

    /// What was kept. When nothing was lost, all of it is in `head`.
    pub fn finish(self) -> Captured {
        let Self { mut head, tail, bytes, .. } = self;
        let mut tail = Vec::from(tail);
        if (head.len() + tail.len()) as u64 == bytes {
            head.append(&mut tail);
        }
        Captured { head: STANDARD.encode(&head), tail: STANDARD.encode(&tail), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(limit: u64, parts: &[&str]) -> (String, String, u64) {
        let mut capture = Capture::new(limit);
        for part in parts {
            capture.push(part.as_bytes());
        }
        let Captured { head, tail, bytes } = capture.finish();
        let text = |s: String| String::from_utf8(STANDARD.decode(s).unwrap()).unwrap();
        (text(head), text(tail), bytes)
    }

    #[test]
    fn short_output_is_all_head() {
        assert_eq!(run(8, &["ab", "cd"]), ("abcd".into(), String::new(), 4));
        assert_eq!(run(8, &["abcdef", "gh"]), ("abcdefgh".into(), String::new(), 8));
        assert_eq!(run(8, &[]), (String::new(), String::new(), 0));
    }

    #[test]
    fn long_output_keeps_both_ends() {
        assert_eq!(run(8, &["abcdefghi"]), ("abcd".into(), "fghi".into(), 9));
        assert_eq!(run(8, &["ab", "cdefg", "hijklmnopq"]), ("abcd".into(), "nopq".into(), 17));
        assert_eq!(run(8, &["abcdef", "gh", "i"]), ("abcd".into(), "fghi".into(), 9));
        assert_eq!(run(3, &["abcdef"]), ("ab".into(), "f".into(), 6));
    }

    #[test]
    fn nothing_is_kept_without_a_limit_and_memory_is_bounded() {
        assert_eq!(run(0, &["abc"]), (String::new(), String::new(), 3));
        let mut capture = Capture::new(u64::MAX);
        for _ in 0..40 {
            capture.push(&vec![1; 100_000]);
        }
        assert!(capture.head.len() + capture.tail.len() <= MAX_CAPTURE as usize);
        assert_eq!(capture.bytes, 4_000_000);
    }
}
