//! Names of artifacts on the wire: URIs of resources, and paths of HTTP. Both spell the bytes of a path
//! in the same way.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

/// Begin of the URI of every artifact.
const BEGIN: &str = "casulo://sandboxes/";
/// What stands between the id and the path.
const FILES: &str = "/files/";
/// RFC 6570: the path keeps its slashes.
pub(crate) const TEMPLATE: &str = "casulo://sandboxes/{sandbox_id}/files/{+path}";
/// RFC 3986, 2.3: what is never encoded; and the slash between names.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// The path of a file as part of a URI.
pub(crate) fn encode(path: &[u8]) -> String {
    percent_encode(path, ENCODED).to_string()
}

/// The URI of a sandbox's file.
pub(crate) fn of(id: &str, path: &[u8]) -> String {
    format!("{BEGIN}{id}{FILES}{}", encode(path))
}

/// The sandbox's id and the bytes of the path, if that is a URI of ours. Whether there is such a file is
/// another question: `..` and the like are names as others are, and no file has them.
pub(crate) fn parse(uri: &str) -> Option<(&str, Vec<u8>)> {
    split(uri.strip_prefix(BEGIN)?)
}

/// The same for what follows the common begin of a path of HTTP.
pub(crate) fn split(rest: &str) -> Option<(&str, Vec<u8>)> {
    let (id, path) = rest.split_once('/')?;
    let path = path.strip_prefix("files/")?;
    (!id.is_empty() && !path.is_empty()).then(|| (id, percent_decode_str(path).collect()))
}

/// A guess at the media type, by the name alone.
pub(crate) fn media_type(path: &[u8]) -> &'static str {
    let guess = mime_guess::from_path(Path::new(OsStr::from_bytes(path)));
    guess.first_raw().unwrap_or("application/octet-stream")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_not_plain_is_encoded_byte_for_byte() {
        assert_eq!(of("sb_1", b"a/b-c_d.~e"), "casulo://sandboxes/sb_1/files/a/b-c_d.~e");
        assert_eq!(encode(b"a b%?#\\\"\xff\xc3\xa9"), "a%20b%25%3F%23%5C%22%FF%C3%A9");
        assert_eq!(
            parse("casulo://sandboxes/sb_1/files/a%2fb%FF"),
            Some(("sb_1", b"a/b\xff".to_vec()))
        );
        // Decoded once and no more.
        assert_eq!(parse("casulo://sandboxes/x/files/%252e").unwrap().1, b"%2e");
    }

    #[test]
    fn nothing_else_is_a_uri_of_ours() {
        for uri in [
            "",
            "file:///etc/passwd",
            "casulo://sandboxes/",
            "casulo://sandboxes/x/files/",
            "casulo://sandboxes//files/a",
            "casulo://sandboxes/x/file/a",
            "casulo://sandboxes/x",
            "CASULO://sandboxes/x/files/a",
            "casulo://sandboxes/x/../files/a",
            "casulo:/sandboxes/x/files/a",
        ] {
            assert_eq!(parse(uri), None, "{uri}");
        }
    }

    #[test]
    fn media_types_are_guessed_by_name() {
        assert_eq!(media_type(b"a/b.png"), "image/png");
        assert_eq!(media_type(b"a.CSV"), "text/csv");
        for unknown in [&b"a"[..], b"png", b".png", b"a.\xff", b""] {
            assert_eq!(media_type(unknown), "application/octet-stream", "{unknown:?}");
        }
    }

    proptest! {
        #[test]
        fn every_path_comes_back(path in proptest::collection::vec(1u8.., 1..100)) {
            let uri = of("sb_1", &path);
            prop_assert!(uri.bytes().all(|b| b.is_ascii_graphic()));
            prop_assert_eq!(parse(&uri), Some(("sb_1", path)));
        }
    }
}
