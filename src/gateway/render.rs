//! From what a guest said, which is data, to the result that a client sees: within its size, and safe
//! to read.

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::{FileChange, Rejected, RunResult, SandboxFate};
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Serialize;

use super::artifacts::{Outcome, uri};
use super::resources;
use super::sandboxes::Ended;
use super::tools::results::{ArtifactFile, DestroySandboxResult};
use crate::capture::Capture;
use crate::text;

/// How much a result may hold, and in which form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    bytes: usize,
    raw: bool,
}

impl Budget {
    /// Most bytes of the encoded result.
    pub(super) fn new(bytes: u32, raw: bool) -> Self {
        Self { bytes: usize::try_from(bytes).unwrap_or(usize::MAX), raw }
    }

    pub(super) fn bytes(self) -> usize {
        self.bytes
    }

    pub(super) fn raw(self) -> bool {
        self.raw
    }

    /// An output longer than this may not fit whole, escapes and all, beside another one.
    pub(super) fn spill_after(self) -> u64 {
        u64::try_from(self.bytes / 32).unwrap_or(u64::MAX)
    }

    /// Whether `value` fits when it is encoded.
    pub(super) fn fits(self, value: &impl Serialize) -> bool {
        serde_json::to_string(value).is_ok_and(|json| json.len() <= self.bytes)
    }
}

/// A result in both forms that clients read: structured, and the same JSON as text.
pub(super) fn both<T: Serialize>(value: &T) -> Result<CallToolResult, TaskError> {
    let value = serde_json::to_value(value).map_err(|error| TaskError {
        class: ErrorClass::Internal,
        message: format!("cannot encode the result: {error}"),
        retry: Retry::Unknown,
    })?;
    let mut result = CallToolResult::success(vec![ContentBlock::text(value.to_string())]);
    result.structured_content = Some(value);
    Ok(result)
}

/// An error that the model can read and act on.
pub(crate) fn error(error: &TaskError) -> CallToolResult {
    let mut error = error.clone();
    // It may repeat what the caller or the guest said.
    error.message = text::safe(&error.message.chars().take(4000).collect::<String>());
    let value = serde_json::to_value(&error).unwrap_or_default();
    // Not structured too: what is structured must fit the tool's output schema, and clients that check
    // that (the TypeScript SDK 1.x) would show the user a broken server instead of this error.
    CallToolResult::error(vec![ContentBlock::text(value.to_string())])
}

/// Puts both outputs of a command into its result, within the budget.
pub(super) fn command(
    mut result: RunResult,
    [stdout, stderr]: &[Capture; 2],
    budget: Budget,
) -> RunResult {
    cut(
        &mut result.files,
        &mut result.files_omitted,
        &mut result.rejected,
        &mut result.rejected_omitted,
        budget.bytes / 2,
    );
    if let Some(value) = &result.result {
        let most = budget.bytes / 8;
        let mut shown: String = value.chars().take(most).collect();
        if shown.len() < value.len() {
            shown.push_str("...");
            result.truncated = true;
        }
        result.result = Some(if budget.raw { shown } else { text::safe(&shown) });
    }
    // Why a program could not be started is there already.
    let said = text::safe(&std::mem::take(&mut result.stderr));
    let (out, err) = (stdout.parts(), stderr.parts());
    let cut_before = result.truncated;
    let mut room = budget.bytes;
    loop {
        let (share_out, share_err) = shares(&out, &err, room);
        let (stdout, cut_out) = both_ends(&out, share_out, budget.raw);
        let (stderr, cut_err) = both_ends(&err, share_err, budget.raw);
        result.stdout = stdout;
        result.stderr = stderr + &said;
        result.truncated = cut_before || cut_out || cut_err;
        result.note = result.truncated.then(|| note(&result));
        // Escapes can make JSON up to six times as long as its text.
        if budget.fits(&result) || room == 0 {
            break;
        }
        room = room / 8 * 7;
    }
    if !result.truncated {
        // Nothing is missing here.
        (result.stdout_file, result.stderr_file) = (None, None);
    }
    result
}

/// Divides the room: each output gets half, and what the other does not need.
fn shares(out: &Parts, err: &Parts, room: usize) -> (usize, usize) {
    let needs = |parts: &Parts| usize::try_from(parts.2).unwrap_or(usize::MAX);
    let half = room / 2;
    (
        room.saturating_sub(needs(err).min(half)).max(half),
        room.saturating_sub(needs(out).min(half)).max(half),
    )
}

fn note(result: &RunResult) -> String {
    match (result.sandbox, &result.stdout_file, &result.stderr_file) {
        (SandboxFate::Kept, Some(file), None) | (SandboxFate::Kept, None, Some(file)) => {
            format!("truncated; page through {file} with read_file")
        }
        (SandboxFate::Kept, Some(out), Some(err)) => {
            format!("truncated; page through {out} and {err} with read_file")
        }
        (SandboxFate::Kept, None, None) => "truncated".to_owned(),
        (SandboxFate::Discarded, ..) => {
            "truncated; repeat with a sandbox_id or write to /workspace/output".to_owned()
        }
    }
}

/// Most links to artifacts beside a result, and most bytes of them: some clients show each to the model.
const MOST_LINKS: usize = 50;
const MOST_LINK_BYTES: usize = 16 * 1024;

/// Result of the end of a kept sandbox; with links to what is kept of it for clients that know links.
pub(super) fn destroyed(
    ended: Ended,
    ttl_seconds: u64,
    budget: Budget,
    linked: bool,
) -> Result<CallToolResult, TaskError> {
    let mut links = Vec::new();
    if let (Some(outcome), true) = (&ended.outcome, linked) {
        let mut bytes = 0usize;
        for one in outcome.kept.list.iter().take(MOST_LINKS) {
            let link = resources::resource(&outcome.kept, one);
            let length = serde_json::to_string(&link).map_or(usize::MAX, |json| json.len());
            bytes = bytes.saturating_add(length);
            if bytes > MOST_LINK_BYTES {
                break;
            }
            links.push(ContentBlock::resource_link(link));
        }
    }
    let mut result = both(&end(ended, ttl_seconds, budget, linked.then_some(links.len())))?;
    result.content.extend(links);
    Ok(result)
}

fn end(
    ended: Ended,
    ttl_seconds: u64,
    budget: Budget,
    links: Option<usize>,
) -> DestroySandboxResult {
    let Ended { mut output, outcome } = ended;
    cut(
        &mut output.files,
        &mut output.files_omitted,
        &mut output.rejected,
        &mut output.rejected_omitted,
        (budget.bytes / 2).saturating_sub(500),
    );
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let (mut artifacts, mut total, mut lost, mut reason) = (Vec::new(), 0, 0, None);
    if let Some(Outcome { kept, omitted, reason: why }) = outcome {
        (total, lost, reason) = (kept.list.len(), omitted, why);
        let mut room = (budget.bytes / 2).saturating_sub(500);
        for one in &kept.list {
            let file = ArtifactFile {
                path: text::of(&one.path, false),
                size: one.size,
                sha256: one.sha256.clone(),
                uri: uri::of(&kept.id, &one.path),
            };
            let length = serde_json::to_string(&file).map_or(usize::MAX, |json| json.len());
            let Some(left) = room.checked_sub(length.saturating_add(1)) else { break };
            room = left;
            artifacts.push(file);
        }
    }
    let mut notes = Vec::new();
    if lost > 0 {
        let reason: String = reason.unwrap_or_default().chars().take(200).collect();
        notes.push(format!("{lost} files are not kept: {}", text::safe(&reason)));
    }
    if artifacts.len() < total || links.is_some_and(|links| links < total) {
        notes.push(format!("resources/list names all {total} artifacts"));
    }
    DestroySandboxResult {
        destroyed: true,
        artifacts_omitted: count(total.saturating_sub(artifacts.len())),
        artifacts,
        artifacts_lost: lost,
        artifact_ttl_seconds: if total > 0 { ttl_seconds } else { 0 },
        note: (!notes.is_empty()).then(|| notes.join("; ")),
        files: output.files,
        files_omitted: output.files_omitted,
        rejected: output.rejected,
        rejected_omitted: output.rejected_omitted,
        withheld: output.withheld,
    }
}

/// Makes names safe, and leaves entries out until the rest takes at most `limit` bytes of JSON.
fn cut(
    files: &mut Vec<FileChange>,
    files_omitted: &mut u64,
    rejected: &mut Vec<Rejected>,
    rejected_omitted: &mut u64,
    limit: usize,
) {
    files.iter_mut().for_each(|file| file.path = text::safe(&file.path));
    rejected.iter_mut().for_each(|one| one.path = text::safe(&one.path));
    let length = |files: &Vec<FileChange>, rejected: &Vec<Rejected>| {
        let files = serde_json::to_string(files).map(|s| s.len());
        let rejected = serde_json::to_string(rejected).map(|s| s.len());
        files.unwrap_or(usize::MAX).saturating_add(rejected.unwrap_or(usize::MAX))
    };
    let less = |length: usize| u64::try_from(length.div_ceil(2)).unwrap_or(u64::MAX);
    while length(files, rejected) > limit && !(files.is_empty() && rejected.is_empty()) {
        // The longer list first.
        if files.len() >= rejected.len() {
            *files_omitted = files_omitted.saturating_add(less(files.len()));
            files.truncate(files.len() / 2);
        } else {
            *rejected_omitted = rejected_omitted.saturating_add(less(rejected.len()));
            rejected.truncate(rejected.len() / 2);
        }
    }
}

/// Head, tail and number of bytes of an output.
type Parts = (Vec<u8>, Vec<u8>, u64);

/// Text of an output within `limit` bytes: head and tail, with what was left out in between.
fn both_ends((head, tail, bytes): &Parts, limit: usize, raw: bool) -> (String, bool) {
    let kept = head.len().saturating_add(tail.len());
    let total = usize::try_from(*bytes).unwrap_or(usize::MAX).max(kept);
    if kept == total && total <= limit {
        let all = [head.as_slice(), tail].concat();
        return (text::of(&all, raw), false);
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
    let (first, last) = (whole_end(first), whole_start(last));
    let left_out = total.saturating_sub(first.len()).saturating_sub(last.len());
    let (first, last) = (text::of(first, raw), text::of(last, raw));
    (format!("{first}\n[{left_out} bytes left out]\n{last}"), true)
}

/// Without the beginning of a character at the end.
pub(super) fn whole_end(bytes: &[u8]) -> &[u8] {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => {
            bytes.get(..error.valid_up_to()).unwrap_or_default()
        }
        _ => bytes,
    }
}

/// Without the rest of a character at the start.
fn whole_start(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|b| **b & 0xc0 == 0x80).count();
    bytes.get(rest..).unwrap_or_default()
}

/// As much of `bytes` as fits into `most` bytes of JSON, as text, and how many bytes that is. A
/// character is not torn unless it is the only one.
pub(super) fn prefix(bytes: &[u8], most: usize, raw: bool) -> (String, usize) {
    let mut length = bytes.len();
    loop {
        let part = bytes.get(..length).unwrap_or_default();
        let part = if length < bytes.len() { whole_end(part) } else { part };
        let part = if part.is_empty() { bytes.get(..length).unwrap_or_default() } else { part };
        let text = text::of(part, raw);
        let json = serde_json::to_string(&text).map_or(usize::MAX, |json| json.len());
        if json <= most || length <= 1 {
            return (text, part.len());
        }
        // In proportion to what was too much, and at least a little less.
        let scaled = u128::try_from(part.len()).unwrap_or(0).saturating_mul(most as u128)
            / u128::try_from(json).unwrap_or(1).max(1);
        let scaled = usize::try_from(scaled).unwrap_or(0);
        length = scaled.min(part.len().saturating_sub(1)).max(1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use casulo_protocol::result::{Change, FileKind, Reason};
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt as _;

    use super::super::artifacts::tests::{digest, put};
    use super::super::artifacts::{Room, Store};
    use super::*;

    fn captured(data: &[u8], limit: usize) -> Capture {
        let mut capture = Capture::new(limit);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(capture.write_all(data)).unwrap();
        capture
    }

    fn rendered(stdout: &[u8], stderr: &[u8], result: RunResult, bytes: u32) -> RunResult {
        let budget = Budget::new(bytes, false);
        let captures = [captured(stdout, budget.bytes()), captured(stderr, budget.bytes())];
        let result = command(result, &captures, budget);
        assert!(budget.fits(&result), "{} bytes", serde_json::to_string(&result).unwrap().len());
        result
    }

    #[test]
    fn both_ends_are_kept_with_what_is_missing_in_between() {
        let parts = |head: &[u8], tail: &[u8], bytes| (head.to_vec(), tail.to_vec(), bytes);
        let text = |parts: &Parts, limit| both_ends(parts, limit, false);
        assert_eq!(text(&parts(b"ab", b"cd", 4), 100), ("abcd".to_owned(), false));
        let (long, cut) = text(&parts(b"aaaa", b"zzzz", 1000), 4);
        assert_eq!((long.as_str(), cut), ("aa\n[996 bytes left out]\nzz", true));
        let (own, cut) = text(&parts(b"abcdefgh", b"", 8), 4);
        assert_eq!((own.as_str(), cut), ("ab\n[4 bytes left out]\ngh", true));
        // Characters are not torn, and the count is right.
        let (torn, _) = text(&parts("aéé".as_bytes(), "éz".as_bytes(), 100), 4);
        assert_eq!(torn, "a\n[98 bytes left out]\nz");
    }

    #[test]
    fn a_result_is_whole_at_its_limit_and_cut_one_above() {
        let empty = serde_json::to_string(&rendered(b"", b"", RunResult::new(), 24 * 1024));
        let room = 24 * 1024 - empty.unwrap().len();
        let fits = rendered(&vec![b'x'; room], b"", RunResult::new(), 24 * 1024);
        assert!(!fits.truncated);
        assert_eq!(serde_json::to_string(&fits).unwrap().len(), 24 * 1024);
        let cut = rendered(&vec![b'x'; room + 1], b"", RunResult::new(), 24 * 1024);
        assert!(cut.truncated && cut.stdout.contains("bytes left out"));
        assert!(cut.stdout.len() > 10_000, "most of it is there");
        assert_eq!(
            cut.note.unwrap(),
            "truncated; repeat with a sandbox_id or write to /workspace/output"
        );
    }

    #[test]
    fn a_kept_sandbox_tells_where_the_rest_is() {
        let mut result = RunResult::new();
        result.sandbox = SandboxFate::Kept;
        result.stdout_file = Some("/run/x.stdout".into());
        let cut = rendered(&[b'x'; 30_000], b"", result.clone(), 24 * 1024);
        assert_eq!(cut.note.unwrap(), "truncated; page through /run/x.stdout with read_file");
        let whole = rendered(b"x", b"", result, 24 * 1024);
        assert_eq!((whole.note, whole.stdout_file), (None, None));
    }

    #[test]
    fn one_long_output_does_not_cost_the_other() {
        let both = rendered(&[b'x'; 100_000], b"the reason", RunResult::new(), 24 * 1024);
        assert_eq!(both.stderr, "the reason");
        assert!(both.stdout.len() > 20_000);
        let half = rendered(&[b'x'; 100_000], &[b'y'; 100_000], RunResult::new(), 24 * 1024);
        assert!(half.stderr.len() > 10_000 && half.stdout.len() > 10_000);
    }

    #[test]
    fn escapes_and_long_values_do_not_break_the_limit() {
        for bytes in [2048, 24 * 1024, 256 * 1024] {
            for fill in [1u8, b'"', 0xff, b'\\'] {
                let mut result = RunResult::new();
                result.result = Some("\u{1}\"".repeat(100_000));
                let result = rendered(&vec![fill; 300_000], &vec![fill; 300_000], result, bytes);
                assert!(result.truncated);
            }
        }
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        let mut output = crate::Output::default();
        let file =
            |n: usize| FileChange::new(format!("{n:0200}"), FileKind::File, 1, Change::Created);
        output.files = (0..1000).map(file).collect();
        output.files_omitted = 7;
        let share = || "/workspace/output".to_owned();
        let rejected = |n| Rejected::new(share(), format!("{n}"), FileKind::Other, Reason::Special);
        output.rejected = (0..1000).map(rejected).collect();
        let mut result = RunResult::new();
        output.clone().add_to(&mut result);
        let result = rendered(&[b'x'; 20_000], b"", result, 24 * 1024);
        let count = |left: usize, omitted: u64| left as u64 + omitted;
        assert!(!result.files.is_empty() && !result.rejected.is_empty());
        assert_eq!(count(result.files.len(), result.files_omitted), 1007);
        assert_eq!(count(result.rejected.len(), result.rejected_omitted), 1000);
        let budget = Budget::new(24 * 1024, false);
        let result = end(Ended { output, outcome: None }, 60, budget, Some(0));
        assert_eq!(count(result.files.len(), result.files_omitted), 1007);
        assert!(budget.fits(&result));
        assert_eq!((result.artifacts.len(), result.artifact_ttl_seconds), (0, 0));
        assert_eq!(result.note, None);
    }

    #[test]
    fn what_is_kept_is_named_within_the_budget_and_linked_where_links_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let room = Room { ttl: Duration::from_secs(60), files: 900, bytes: 1 << 20 };
        let store = Store::new(&[folder.path().to_owned()], &[], room).unwrap();
        let budget = Budget::new(24 * 1024, false);
        let ended = |count: usize, linked: bool| {
            let paths: Vec<Vec<u8>> = (0..count)
                .map(|n| format!("{n:03}-\u{202e}{}.png", "\u{e9}".repeat(60)).into_bytes())
                .collect();
            let files: Vec<(&[u8], &[u8])> =
                paths.iter().map(|path| (path.as_slice(), &b"x"[..])).collect();
            let outcome = put(&store, "ana", &format!("sb_{count}_{linked}"), &files);
            Ended { output: crate::Output::default(), outcome: Some(outcome) }
        };
        for (count, linked, links) in [(2, true, 2), (2, false, 0), (1000, true, MOST_LINKS)] {
            let result = destroyed(ended(count, linked), 60, budget, linked).unwrap();
            let value = result.structured_content.unwrap();
            let artifacts = value["artifacts"].as_array().unwrap();
            let omitted = value["artifacts_omitted"].as_u64().unwrap();
            let lost = value["artifacts_lost"].as_u64().unwrap();
            assert_eq!(artifacts.len() as u64 + omitted + lost, count as u64);
            assert_eq!(lost, if count > 900 { 100 } else { 0 });
            assert_eq!(value["artifact_ttl_seconds"], 60);
            assert!(budget.fits(&value) && !artifacts.is_empty());
            let first = &artifacts[0];
            assert_eq!((&first["size"], &first["sha256"]), (&1.into(), &digest(b"x").into()));
            assert!(first["path"].as_str().unwrap().starts_with("000-\\u{202e}\u{e9}"), "{first}");
            let found: Vec<_> =
                result.content.iter().filter_map(ContentBlock::as_resource_link).collect();
            assert!(found.len() <= links && (links == 0) == found.is_empty(), "{}", found.len());
            for (link, artifact) in found.iter().zip(artifacts) {
                assert_eq!((&artifact["uri"], link.size), (&link.uri.clone().into(), Some(1)));
                assert_eq!(link.mime_type.as_deref(), Some("image/png"));
            }
            let encoded = serde_json::to_string(&found).unwrap();
            assert!(encoded.len() <= MOST_LINK_BYTES + 1024, "{}", encoded.len());
            let note = value.get("note").and_then(|note| note.as_str()).unwrap_or_default();
            assert_eq!(note.contains("resources/list names all 900"), count > 900, "{note}");
            assert_eq!(note.contains("100 files are not kept"), count > 900, "{note}");
        }
    }

    #[test]
    fn names_of_files_cannot_hide_anything() {
        let mut result = RunResult::new();
        let name = "a\u{202e}b\u{1b}[2J".to_owned();
        result.files = vec![FileChange::new(name, FileKind::File, 1, Change::Created)];
        let result = rendered(b"", b"", result, 24 * 1024);
        assert_eq!(result.files[0].path, "a\\u{202e}b");
    }

    proptest! {
        #[test]
        fn a_prefix_fits_and_loses_nothing(
            bytes in proptest::collection::vec(any::<u8>(), 1..400),
            most in 20usize..300,
        ) {
            let mut rest = bytes.as_slice();
            let mut steps = 0;
            while !rest.is_empty() {
                let (text, taken) = prefix(rest, most, false);
                prop_assert!(taken > 0 && serde_json::to_string(&text).unwrap().len() <= most);
                rest = &rest[taken..];
                steps += 1;
            }
            prop_assert!(steps <= bytes.len());
        }
    }
}
