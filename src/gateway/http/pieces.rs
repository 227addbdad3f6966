//! What an answer with files is made of, piece by piece: nothing of it is held as a whole.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::super::artifacts::{Artifact, Kept, uri};
use crate::text;

/// A block of a tar archive (POSIX.1-2017, pax: ustar Interchange Format).
const BLOCK: u64 = 512;
/// Largest size that the field of an ustar header holds.
const MOST_USTAR: u64 = 0o777_7777_7777;

/// A piece of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Bytes(Vec<u8>),
    /// So many bytes of a file of the list, from there on.
    File {
        place: usize,
        start: u64,
        length: u64,
    },
}

impl Piece {
    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => u64::try_from(bytes.len()).unwrap_or(u64::MAX),
            Self::File { length, .. } => *length,
        }
    }
}

/// An entry of the list.
#[derive(Serialize)]
struct Entry<'a> {
    path: String,
    size: u64,
    sha256: &'a str,
    media_type: &'static str,
    uri: String,
    href: String,
}

/// The list of files as JSON.
pub(super) fn json(kept: Arc<Kept>, ttl_seconds: u64) -> impl Iterator<Item = Piece> + Send {
    // An id needs no escapes.
    let begin = format!(
        "{{\"sandbox_id\":\"{}\",\"expires_in_seconds\":{ttl_seconds},\"files\":[",
        kept.id
    );
    let count = kept.list.len();
    let entries = (0..count).map(move |place| {
        let entry = kept.list.get(place).map(|one| entry(&kept.id, one)).unwrap_or_default();
        let comma = if place > 0 { "," } else { "" };
        Piece::Bytes(format!("{comma}{entry}").into_bytes())
    });
    let (begin, end) = (Piece::Bytes(begin.into_bytes()), Piece::Bytes(b"]}\n".to_vec()));
    std::iter::once(begin).chain(entries).chain(std::iter::once(end))
}

fn entry(id: &str, one: &Artifact) -> String {
    let encoded = uri::encode(&one.path);
    let entry = Entry {
        path: text::of(&one.path, false),
        size: one.size,
        sha256: &one.sha256,
        media_type: uri::media_type(&one.path),
        uri: uri::of(id, &one.path),
        href: format!("{}{id}/files/{encoded}", super::app::SANDBOXES),
    };
    serde_json::to_string(&entry).unwrap_or_default()
}

/// All files as a tar archive.
pub(super) fn tar(kept: Arc<Kept>) -> impl Iterator<Item = Piece> + Send {
    let count = kept.list.len();
    let files = (0..count).flat_map(move |place| {
        let (head, length) = match kept.list.get(place) {
            Some(one) => (header(one, kept.ended, place), one.size),
            None => (Vec::new(), 0),
        };
        let rest = length.checked_rem(BLOCK).filter(|rest| *rest > 0);
        let padding = rest.and_then(|rest| BLOCK.checked_sub(rest)).unwrap_or(0);
        let padding = vec![0; usize::try_from(padding).unwrap_or(0)];
        [Piece::Bytes(head), Piece::File { place, start: 0, length }, Piece::Bytes(padding)]
    });
    files.chain(std::iter::once(Piece::Bytes(vec![0; 1024])))
}

/// The headers of one file. What does not fit into the plain one is in one of pax before it; a name that
/// is no UTF-8 is declared as such.
fn header(one: &Artifact, ended: SystemTime, place: usize) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    let ended = ended.duration_since(UNIX_EPOCH).unwrap_or_default();
    header.set_mtime(ended.as_secs());
    header.set_size(one.size);
    let mut more: Vec<(&str, &[u8])> = Vec::new();
    let plain = one.path.is_ascii()
        && std::str::from_utf8(&one.path).is_ok_and(|path| header.set_path(path).is_ok());
    if !plain {
        if std::str::from_utf8(&one.path).is_err() {
            more.push(("hdrcharset", b"BINARY"));
        }
        more.push(("path", &one.path));
        // For programs that do not know pax. It always fits.
        let _ = header.set_path(format!("file-{place}"));
    }
    let size = one.size.to_string();
    if one.size > MOST_USTAR {
        more.push(("size", size.as_bytes()));
    }
    header.set_cksum();
    let mut archive = tar::Builder::new(Vec::new());
    // Writing to memory does not fail. The content follows by itself.
    let _ = archive.append_pax_extensions(more);
    let _ = archive.append(&header, std::io::empty());
    std::mem::take(archive.get_mut())
}
