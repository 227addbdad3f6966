//! From the agent's answer, which is data, to the result that a client sees.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{Captured, CommandResult};
use casulo_protocol::result::{HostKind, RunResult, SandboxFate};
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;

use super::tools::DestroySandboxResult;
use crate::Output;

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
    mut output: Output,
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
    cut(&mut output, MAX_RESULT / 2);
    output.add_to(&mut result);
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

/// Result of the end of a kept sandbox.
pub(super) fn destroyed(mut output: Output) -> DestroySandboxResult {
    cut(&mut output, MAX_RESULT);
    DestroySandboxResult {
        destroyed: true,
        files: output.files,
        files_omitted: output.files_omitted,
        rejected: output.rejected,
        rejected_omitted: output.rejected_omitted,
        withheld: output.withheld,
    }
}

/// Leaves entries out until the rest takes at most `limit` bytes of JSON.
fn cut(output: &mut Output, limit: usize) {
    let length = |output: &Output| {
        let files = serde_json::to_string(&output.files).map(|s| s.len());
        let rejected = serde_json::to_string(&output.rejected).map(|s| s.len());
        files.unwrap_or(usize::MAX).saturating_add(rejected.unwrap_or(usize::MAX))
    };
    let less = |length: usize| u64::try_from(length.div_ceil(2)).unwrap_or(u64::MAX);
    while length(output) > limit && !(output.files.is_empty() && output.rejected.is_empty()) {
        // The longer list first.
        if output.files.len() >= output.rejected.len() {
            let gone = less(output.files.len());
            output.files.truncate(output.files.len() / 2);
            output.files_omitted = output.files_omitted.saturating_add(gone);
        } else {
            let gone = less(output.rejected.len());
            output.rejected.truncate(output.rejected.len() / 2);
            output.rejected_omitted = output.rejected_omitted.saturating_add(gone);
        }
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
        let result =
            command(&answer, Output::default(), HostKind::Native, SandboxFate::Discarded, None);
        assert!(serde_json::to_string(&result).unwrap().len() <= MAX_RESULT);
        assert!(result.truncated);
    }

    #[test]
    fn a_lying_guest_gives_a_result_all_the_same() {
        let answer = CommandResult {
            stdout: Captured { head: "!!".into(), tail: "*".into(), bytes: u64::MAX },
            ..CommandResult::default()
        };
        assert!(
            command(&answer, Output::default(), HostKind::Native, SandboxFate::Discarded, None)
                .truncated
        );
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        use casulo_protocol::result::{Change, FileChange, FileKind, Reason, Rejected};
        let mut output = Output::default();
        let file =
            |n: usize| FileChange::new(format!("{n:0200}"), FileKind::File, 1, Change::Created);
        output.files = (0..1000).map(file).collect();
        output.files_omitted = 7;
        let share = || "/workspace/output".to_owned();
        let rejected = |n| Rejected::new(share(), format!("{n}"), FileKind::Other, Reason::Special);
        output.rejected = (0..1000).map(rejected).collect();
        let answer = CommandResult {
            stdout: captured(&[b'x'; 20_000], b"", 20_000),
            ..CommandResult::default()
        };
        let result =
            command(&answer, output.clone(), HostKind::Native, SandboxFate::Discarded, None);
        assert!(serde_json::to_string(&result).unwrap().len() <= MAX_RESULT);
        let count = |left: usize, omitted: u64| left as u64 + omitted;
        assert!(!result.files.is_empty() && !result.rejected.is_empty());
        assert_eq!(count(result.files.len(), result.files_omitted), 1007);
        assert_eq!(count(result.rejected.len(), result.rejected_omitted), 1000);
        let result = destroyed(output);
        assert_eq!(count(result.files.len(), result.files_omitted), 1007);
        assert!(serde_json::to_string(&result).unwrap().len() <= MAX_RESULT + 200);
    }
}
