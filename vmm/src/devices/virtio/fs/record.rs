//! Which files the guest has read and written, for the one who asked for the task.
//!
//! The server enters each file that the guest opens, by its path in the share at that time, and then
//! adds up what it reads and writes. The record is bounded in files and in bytes of their paths; what
//! does not fit is only counted. It is shared with the control thread, which asks for it a few times in
//! the life of a VM: so the lock is almost never waited for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use casulo_protocol::vmm::{FileUse, MAX_FILES, MAX_PACKET, Message};

/// Most bytes of all paths together.
const MAX_PATH_BYTES: usize = 1 << 20;
/// Longest path that is recorded, in bytes: it must fit into a packet with every byte escaped.
const MAX_PATH: usize = 4096;
/// Room in a packet for what is not an entry.
const PACKET_FRAME: usize = 256;

/// Place of a file in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

/// The record of one device.
#[derive(Debug, Default)]
pub struct Record(Mutex<Files>);

#[derive(Debug, Default)]
struct Files {
    entries: Vec<Entry>,
    /// By share and path.
    index: HashMap<(Arc<str>, Arc<[u8]>), usize>,
    path_bytes: usize,
    left_out: u64,
}

#[derive(Debug)]
struct Entry {
    share: Arc<str>,
    path: Arc<[u8]>,
    read: u64,
    written: u64,
    changed: bool,
}

impl Record {
    fn files(&self) -> MutexGuard<'_, Files> {
        // Numbers that only grow: nothing is half done if a thread panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a file that is opened, or `None` if the record is full.
    pub(super) fn enter(&self, share: &Arc<str>, path: &[u8]) -> Option<Place> {
        let mut files = self.files();
        let key = (share.clone(), Arc::<[u8]>::from(path));
        if let Some(place) = files.index.get(&key) {
            return Some(Place(*place));
        }
        let place = files.entries.len();
        let path_bytes = files.path_bytes.saturating_add(path.len());
        if place >= MAX_FILES || path_bytes > MAX_PATH_BYTES || path.len() > MAX_PATH {
            files.left_out = files.left_out.saturating_add(1);
            return None;
        }
        files.path_bytes = path_bytes;
        let (share, path) = key.clone();
        files.index.insert(key, place);
        files.entries.push(Entry { share, path, read: 0, written: 0, changed: false });
        Some(Place(place))
    }

    /// The guest has read `bytes` of a file.
    pub(super) fn read(&self, place: Option<Place>, bytes: usize) {
        self.update(place, |entry| {
            entry.read = entry.read.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
        });
    }

    /// The guest has written `bytes` to a file, or changed it in another way (0).
    pub(super) fn written(&self, place: Option<Place>, bytes: usize) {
        self.update(place, |entry| {
            entry.written = entry.written.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
            entry.changed = true;
        });
    }

    fn update(&self, place: Option<Place>, change: impl FnOnce(&mut Entry)) {
        let Some(Place(place)) = place else { return };
        if let Some(entry) = self.files().entries.get_mut(place) {
            change(entry);
        }
    }

    /// The record as messages for the parent, each of which fits into a packet: at least one.
    #[must_use]
    pub fn parts(&self) -> Vec<Message> {
        let files = self.files();
        let mut parts: Vec<Vec<FileUse>> = vec![Vec::new()];
        let mut room = MAX_PACKET.saturating_sub(PACKET_FRAME);
        for entry in &files.entries {
            let file = FileUse {
                share: entry.share.to_string(),
                path: String::from_utf8_lossy(&entry.path).into_owned(),
                read: entry.read,
                written: entry.written,
                changed: entry.changed,
            };
            let size = serde_json::to_vec(&file).map_or(MAX_PACKET, |json| json.len());
            // And a comma.
            let size = size.saturating_add(1);
            if size > room {
                parts.push(Vec::new());
                room = MAX_PACKET.saturating_sub(PACKET_FRAME);
            }
            room = room.saturating_sub(size);
            if let Some(part) = parts.last_mut() {
                part.push(file);
            }
        }
        let left_out = files.left_out;
        drop(files);
        let last = parts.len().saturating_sub(1);
        let message = |(number, files)| Message::Files { files, left_out, more: number < last };
        parts.into_iter().enumerate().map(message).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share() -> Arc<str> {
        Arc::from("output")
    }

    fn all(record: &Record) -> (Vec<FileUse>, u64) {
        let (mut all, mut out) = (Vec::new(), 0);
        let parts = record.parts();
        let count = parts.len();
        for (number, part) in parts.into_iter().enumerate() {
            assert!(serde_json::to_vec(&part).unwrap().len() <= MAX_PACKET);
            let Message::Files { files, left_out, more } = part else { panic!("{part:?}") };
            assert_eq!(more, number + 1 < count);
            all.extend(files);
            out = left_out;
        }
        (all, out)
    }

    #[test]
    fn what_is_opened_again_adds_up() {
        let record = Record::default();
        let a = record.enter(&share(), b"sub/a");
        let b = record.enter(&share(), b"b\xff");
        record.read(a, 10);
        record.written(b, 7);
        assert_eq!(record.enter(&share(), b"sub/a"), a);
        record.read(a, 5);
        let other = record.enter(&Arc::from("input"), b"sub/a");
        assert_ne!(other, a);
        let (files, left_out) = all(&record);
        let file = |share: &str, path: &str, read, written| FileUse {
            share: share.into(),
            path: path.into(),
            read,
            written,
            changed: written > 0,
        };
        let expected = [
            file("output", "sub/a", 15, 0),
            file("output", "b\u{fffd}", 0, 7),
            file("input", "sub/a", 0, 0),
        ];
        assert_eq!((files.as_slice(), left_out), (expected.as_slice(), 0));
    }

    #[test]
    fn a_full_record_counts_what_it_leaves_out() {
        let record = Record::default();
        for number in 0..MAX_FILES + 10 {
            let place = record.enter(&share(), format!("file-{number}").as_bytes());
            assert_eq!(place.is_some(), number < MAX_FILES);
            record.written(place, 1);
        }
        assert!(record.enter(&share(), b"file-0").is_some(), "known ones are still found");
        let (files, left_out) = all(&record);
        assert_eq!((files.len(), left_out), (MAX_FILES, 10));
        assert!(files.iter().all(|file| file.written == 1));
    }

    #[test]
    fn long_paths_of_any_bytes_fit_into_packets_and_the_bound() {
        let record = Record::default();
        let mut kept = 0;
        for number in 0..1000_usize {
            // Control characters take six bytes each in JSON.
            let mut path = vec![1; MAX_PATH];
            path[..8].copy_from_slice(&number.to_le_bytes());
            kept += usize::from(record.enter(&share(), &path).is_some());
        }
        assert_eq!(kept, MAX_PATH_BYTES / MAX_PATH);
        assert!(record.enter(&share(), &[b'x'; MAX_PATH + 1]).is_none());
        let (files, left_out) = all(&record);
        assert_eq!((files.len(), left_out), (kept, 1000 - kept as u64 + 1));
    }
}
