//! Conditions and ranges of a request for a file: RFC 9110, sections 13 and 14.
//!
//! A file never changes, and its digest is its entity tag. One range is served; a request for several
//! gets the whole file, as every server may answer it.

use hyper::header::{HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH, IF_RANGE, RANGE};

/// What is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All of it.
    Whole,
    /// So many bytes from there on: never none.
    Part { start: u64, length: u64 },
    /// The range begins beyond the end.
    OutOfRange,
    /// The client has it already.
    NotModified,
    /// The client wants another file.
    Failed,
}

/// What a request with these headers is for. `tag` is the file's entity tag, with its quotes; `ranges`:
/// whether the method knows ranges.
pub(super) fn wanted(headers: &HeaderMap, tag: &str, size: u64, ranges: bool) -> Wanted {
    if headers.contains_key(IF_MATCH) && !names(headers, &IF_MATCH, tag, false) {
        return Wanted::Failed;
    }
    if names(headers, &IF_NONE_MATCH, tag, true) {
        return Wanted::NotModified;
    }
    let mut all = headers.get_all(RANGE).iter();
    let (Some(range), None, true) = (all.next(), all.next(), ranges) else { return Wanted::Whole };
    // A date is never this file's: it has none.
    if headers.get(IF_RANGE).is_some_and(|condition| condition.as_bytes() != tag.as_bytes()) {
        return Wanted::Whole;
    }
    range.to_str().ok().and_then(|range| one(range, size)).unwrap_or(Wanted::Whole)
}

/// Whether a list of entity tags names `tag`.
fn names(headers: &HeaderMap, header: &HeaderName, tag: &str, weak: bool) -> bool {
    let lists =
        headers.get_all(header).iter().filter_map(|value: &HeaderValue| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).map(str::trim).any(|one| {
        let strong = if weak { one.strip_prefix("W/").unwrap_or(one) } else { one };
        one == "*" || strong == tag
    })
}

/// A single range; none if it is another unit, several, or wrong, which are all to be ignored.
fn one(range: &str, size: u64) -> Option<Wanted> {
    let (unit, range) = range.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = range.trim().split_once('-')?;
    let end = size.checked_sub(1);
    let (start, last) = match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => (first, last),
        (Some(first), None) if last.is_empty() => (first, u64::MAX),
        (None, Some(length)) if first.is_empty() => {
            let Some(length) = length.checked_sub(1) else { return Some(Wanted::OutOfRange) };
            (end.unwrap_or(0).saturating_sub(length), u64::MAX)
        }
        _ => return None,
    };
    match end {
        Some(end) if start <= end => {
            let length = last.min(end).saturating_sub(start).saturating_add(1);
            Some(Wanted::Part { start, length })
        }
        _ => Some(Wanted::OutOfRange),
    }
}

/// Digits and nothing else; what is more than fits is the most that does.
fn number(digits: &str) -> Option<u64> {
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| digits.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAG: &str = "\"abc\"";

    fn of(headers: &[(HeaderName, &str)], size: u64) -> Wanted {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, HeaderValue::from_str(value).unwrap());
        }
        wanted(&map, TAG, size, true)
    }

    fn range(value: &str, size: u64) -> Wanted {
        of(&[(RANGE, value)], size)
    }

    fn part(start: u64, length: u64) -> Wanted {
        Wanted::Part { start, length }
    }

    #[test]
    fn a_single_range_is_cut_to_the_file() {
        for (value, wanted) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=0-9", part(0, 10)),
            ("bytes=0-", part(0, 10)),
            ("bytes=9-", part(9, 1)),
            ("bytes=9-9", part(9, 1)),
            ("bytes=3-100", part(3, 7)),
            ("bytes=-1", part(9, 1)),
            ("bytes=-10", part(0, 10)),
            ("bytes=-11", part(0, 10)),
            ("BYTES = 1-2", part(1, 2)),
            ("bytes=0-99999999999999999999999999", part(0, 10)),
            ("bytes=-99999999999999999999999999", part(0, 10)),
            ("bytes=10-", Wanted::OutOfRange),
            ("bytes=10-20", Wanted::OutOfRange),
            ("bytes=-0", Wanted::OutOfRange),
            ("bytes=99999999999999999999999999-", Wanted::OutOfRange),
        ] {
            assert_eq!(range(value, 10), wanted, "{value}");
        }
        for value in ["bytes=0-", "bytes=0-0", "bytes=-1"] {
            assert_eq!(range(value, 0), Wanted::OutOfRange, "{value} of nothing");
        }
    }

    #[test]
    fn what_is_no_single_range_of_bytes_is_ignored() {
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=a-b",
            "bytes=5-2",
            "bytes=1-2x",
            "bytes=+1-2",
            "bytes=--1",
            "bytes=1-2,4-5",
            "bytes=0-0,",
            "bytes=0x1-2",
            "lines=1-2",
            "bytes 0-1",
            "bytes=1 - 2",
        ] {
            assert_eq!(range(value, 10), Wanted::Whole, "{value}");
        }
        assert_eq!(of(&[(RANGE, "bytes=0-0"), (RANGE, "bytes=1-1")], 10), Wanted::Whole);
        let many = format!("bytes={}", vec!["0-0"; 5000].join(","));
        assert_eq!(range(&many, 10), Wanted::Whole);
        let mut head = HeaderMap::new();
        head.insert(RANGE, HeaderValue::from_static("bytes=0-0"));
        assert_eq!(wanted(&head, TAG, 10, false), Wanted::Whole, "HEAD knows no ranges");
    }

    #[test]
    fn conditions_are_about_the_digest() {
        let ranged = |condition| of(&[(RANGE, "bytes=1-1"), (IF_RANGE, condition)], 10);
        assert_eq!(ranged(TAG), part(1, 1));
        for other in ["\"xyz\"", "W/\"abc\"", "Tue, 15 Nov 1994 08:12:31 GMT", "abc"] {
            assert_eq!(ranged(other), Wanted::Whole, "{other}");
        }
        for same in [TAG, "W/\"abc\"", "*", "\"x\", \"abc\""] {
            assert_eq!(of(&[(IF_NONE_MATCH, same)], 10), Wanted::NotModified, "{same}");
        }
        assert_eq!(of(&[(IF_NONE_MATCH, "\"x\"")], 10), Wanted::Whole);
        for (condition, wanted) in [
            (TAG, Wanted::Whole),
            ("*", Wanted::Whole),
            ("\"x\"", Wanted::Failed),
            ("W/\"abc\"", Wanted::Failed),
            ("", Wanted::Failed),
        ] {
            assert_eq!(of(&[(IF_MATCH, condition)], 10), wanted, "{condition}");
        }
    }

    proptest! {
        #[test]
        fn a_part_is_never_empty_and_within_the_file(value in "(bytes=)?[0-9,-]{0,24}", size: u64) {
            if let Wanted::Part { start, length } = range(&value, size) {
                prop_assert!(length > 0);
                prop_assert!(start.checked_add(length).is_some_and(|end| end <= size));
            }
        }
    }
}
