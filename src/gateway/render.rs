//! From the agent's answer, which is data, to the result that a client sees.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{Captured, CommandResult};
use casulo_protocol::result::{HostKind, RunResult, SandboxFate};
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;

/// Most bytes of one encoded result.
pub(super) const MAX_RESULT: usize = 24 * 1024;
/// Bytes of each of stdout and stderr that the agent is asked to keep.
pub(super) const KEPT_OUTPUT: u64 = 20 * 1024;

/// A result in both forms that clients read: structured, and the same JSON as text.
///
/// # Errors
/// The value has no JSON form.
pub(super) fn both<T: Serialize>(value: &T) -> Result<CallToolResult, serde_json::Error> {
    let value = serde_json::to_value(value)?;
    let mut result = CallToolResult::success(vec![ContentBlock::text(value.to_string())]);
    result.structured_content = Some(value);
    Ok(result)
}

/// Result of a command, at most [`MAX_RESULT`] bytes when encoded.
pub(super) fn command(
    answer: &CommandResult,
    host: HostKind,
    fate: SandboxFate,
    sandbox_id: Option<String>,
) -> RunResult {
    let mut result = RunResult::new();
    result.exit_code = answer.exit_code;
    result.signal = answer.signal;
    result.timed_out = answer.timed_out;
    result.oom = answer.oom;
    result.stdout_bytes = answer.stdout.bytes;
    result.stderr_bytes = answer.stderr.bytes;
    result.duration_ms = answer.duration_ms;
    result.sandbox = fate;
    result.sandbox_id = sandbox_id;
    result.host = host;
    let mut budget = MAX_RESULT;
    loop {
        let (stdout, cut_out) = text(&answer.stdout, budget / 2);
        let (stderr, cut_err) = text(&answer.stderr, budget / 2);
        result.stdout = stdout;
        result.stderr = stderr;
        if let Some(error) = &answer.start_error {
            result.stderr.push_str(error);
        }
        result.truncated = cut_out || cut_err;
        // Escapes can make JSON up to six times as long as its text; halve until it fits.
        let length = serde_json::to_string(&result).map(|s| s.len()).unwrap_or(usize::MAX);
        if length <= MAX_RESULT || budget == 0 {
            return result;
        }
        budget /= 2;
    }
}

/// Text of an output within `limit` bytes: head and tail, with what was left out in between.
fn text(captured: &Captured, limit: usize) -> (String, bool) {
    // The guest may send anything; what is no base64 counts as nothing.
    let head = STANDARD.decode(&captured.head).unwrap_or_default();
    let tail = STANDARD.decode(&captured.tail).unwrap_or_default();
    let kept = head.len().saturating_add(tail.len());
    let total = usize::try_from(captured.bytes).unwrap_or(usize::MAX).max(kept);
    if kept == total && total <= limit {
        let mut all = head;
        all.extend(tail);
        return (String::from_utf8_lossy(&all).into_owned(), false);
    }
    let half = limit / 2;
    // Without a tail the head is all there is, so its end is the tail.
    let (first, last) = if tail.is_empty() {
        let cut = head.len().saturating_sub(half).max(half.min(head.len()));
        (head.get(..half.min(head.len())), head.get(cut..))
    } else {
        (head.get(..half.min(head.len())), tail.get(tail.len().saturating_sub(half)..))
    };
    let (first, last) = (first.unwrap_or_default(), last.unwrap_or_default());
    let left_out = total.saturating_sub(first.len()).saturating_sub(last.len());
    let text = format!(
        "{}\n[{left_out} bytes left out]\n{}",
        String::from_utf8_lossy(first),
        String::from_utf8_lossy(last)
    );
    (text, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured(head: &[u8], tail: &[u8], bytes: u64) -> Captured {
        Captured { head: STANDARD.encode(head), tail: STANDARD.encode(tail), bytes }
    }

    #[test]
    fn short_output_is_whole() {
        assert_eq!(text(&captured(b"ab", b"cd", 4), 100), ("abcd".to_owned(), false));
    }

    #[test]
    fn long_output_keeps_both_ends() {
        let (text, cut) = text(&captured(b"aaaa", b"zzzz", 1000), 4);
        assert_eq!(text, "aa\n[996 bytes left out]\nzz");
        assert!(cut);
    }

    #[test]
    fn a_head_over_the_limit_is_its_own_tail() {
        let (text, cut) = text(&captured(b"abcdefgh", b"", 8), 4);
        assert_eq!(text, "ab\n[4 bytes left out]\ngh");
        assert!(cut);
    }

    #[test]
    fn escapes_do_not_break_the_limit() {
        let answer = CommandResult {
            stdout: captured(&[1; 20_000], b"", 20_000),
            ..CommandResult::default()
        };
        let result = command(&answer, HostKind::Native, SandboxFate::Discarded, None);
        assert!(serde_json::to_string(&result).unwrap().len() <= MAX_RESULT);
        assert!(result.truncated);
    }

    #[test]
    fn a_lying_guest_gives_a_result_all_the_same() {
        let answer = CommandResult {
            stdout: Captured { head: "!!".into(), tail: "*".into(), bytes: u64::MAX },
            ..CommandResult::default()
        };
        assert!(command(&answer, HostKind::Native, SandboxFate::Discarded, None).truncated);
    }
}
