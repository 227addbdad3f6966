//! The store with folders that look as a guest would have left them.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use sha2::{Digest, Sha256};

use super::*;
use crate::image::hex;

pub(in crate::gateway) fn digest(data: &[u8]) -> String {
    hex(&Sha256::digest(data))
}

fn room(files: usize, bytes: u64) -> Room {
    Room { ttl: Duration::from_secs(3600), files, bytes }
}

fn store(folder: &tempfile::TempDir, room: Room) -> Store {
    Store::new(&[folder.path().to_owned()], &[], room).unwrap()
}

fn released(path: &[u8], size: usize) -> Released {
    Released { path: path.to_owned(), size: u64::try_from(size).unwrap(), sha256: None }
}

/// Keeps files as the output of a sandbox that has ended.
pub(in crate::gateway) fn put(
    store: &Store,
    owner: &str,
    id: &str,
    files: &[(&[u8], &[u8])],
) -> Outcome {
    let live = store.live(id).unwrap();
    let mut list = Vec::new();
    for (path, data) in files {
        let place = live.path().join(std::ffi::OsStr::from_bytes(path));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, data).unwrap();
        list.push(released(path, data.len()));
    }
    store.keep(&owner.into(), id, Source::Live(live), list)
}

fn read(kept: &Kept, path: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    let mut file = kept.open(kept.find(path).unwrap()).unwrap();
    io::Read::read_to_end(&mut file, &mut data).unwrap();
    data
}

fn ids(store: &Store, owner: &str) -> Vec<String> {
    store.all(&owner.into()).iter().map(|(kept, _)| kept.id.clone()).collect()
}

#[test]
fn files_are_kept_by_number_whatever_their_paths() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 1000));
    let mode = fs::metadata(&store.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700, "nobody else's");
    let files: [(&[u8], &[u8]); 4] =
        [(b"b", b"two"), (b"a/deep/c.txt", b"one"), (b"not utf-8 \xff", b""), (b"a\\b %2e", b"x")];
    let outcome = put(&store, "ana", "sb_1", &files);
    assert_eq!((outcome.omitted, outcome.reason), (0, None));
    let (kept, left) = store.get(&"ana".into(), "sb_1").unwrap();
    assert!(left <= Duration::from_secs(3600));
    for (path, data) in files {
        let artifact = kept.find(path).unwrap();
        let size = u64::try_from(data.len()).unwrap();
        assert_eq!((artifact.size, artifact.sha256.as_str()), (size, digest(data).as_str()));
        assert_eq!(read(&kept, path), data);
    }
    let sorted: Vec<_> = kept.list.iter().map(|one| one.path.as_slice()).collect();
    assert!(sorted.is_sorted());
    let mut names: Vec<_> =
        fs::read_dir(store.path.join("sb_1")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["0", "1", "2", "3"]);
    assert!(!store.path.join("sb_1.live").exists(), "nothing else of the output is left");
    for path in [&b""[..], b"..", b"../sb_1/0", b"/etc/passwd", b"0", b"b/", b"b\0", b"./b", b"B"] {
        assert!(kept.find(path).is_none(), "{path:?}");
    }
    assert_eq!(store.count(), (4, 7));
}

#[test]
fn nobody_but_the_owner_finds_anything() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 1000));
    put(&store, "ana", "sb_1", &[(b"a", b"1")]);
    for (owner, id) in
        [("bob", "sb_1"), ("ana", "sb_2"), ("", "sb_1"), ("ana", "sb_1/"), ("ana", "")]
    {
        assert!(store.get(&owner.into(), id).is_none(), "{owner} {id}");
    }
    assert!(store.all(&"bob".into()).is_empty());
    assert_eq!(ids(&store, "ana"), ["sb_1"]);
}

#[test]
fn what_is_no_plain_file_is_not_kept_and_nothing_is_read_through_it() {
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let secret = outside.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    for copy in [false, true] {
        let store = store(&folder, room(100, 1000));
        let live = store.live("sb_1").unwrap();
        let root = if copy { folder.path().join("operator") } else { live.path().to_owned() };
        fs::create_dir_all(&root).unwrap();
        // What a guest, or another program of the operator, could put in the place of a file that has
        // been looked at.
        symlink(&secret, root.join("link")).unwrap();
        symlink(outside.path(), root.join("folder")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            root.join("fifo"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        fs::write(root.join("grown"), "1234567").unwrap();
        fs::write(root.join("shrunk"), "1").unwrap();
        fs::write(root.join("good"), "good").unwrap();
        let list = vec![
            released(b"link", 6),
            released(b"folder/secret", 6),
            released(b"fifo", 0),
            released(b"grown", 6),
            released(b"shrunk", 6),
            released(b"gone", 6),
            released(b"../../escape", 6),
            released(b"good", 4),
        ];
        let source = if copy {
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            Source::Operator(rustix::fs::open(&root, flags, Mode::empty()).unwrap())
        } else {
            Source::Live(live)
        };
        let outcome = store.keep(&"ana".into(), "sb_1", source, list);
        assert_eq!(outcome.omitted, 7, "{outcome:?}");
        assert!(outcome.reason.is_some());
        let paths: Vec<_> = outcome.kept.list.iter().map(|one| one.path.as_slice()).collect();
        assert_eq!(paths, [b"good"]);
        assert_eq!(fs::read_dir(store.path.join("sb_1")).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(root.join("good").exists(), copy, "the operator's own file stays");
        let _ = fs::remove_dir_all(folder.path().join("operator"));
    }
}

#[test]
fn a_file_that_the_guest_has_closed_is_the_owners_to_read_and_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 1000));
    let live = store.live("sb_1").unwrap();
    let path = live.path().join("closed");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6000)).unwrap();
    let outcome =
        store.keep(&"ana".into(), "sb_1", Source::Live(live), vec![released(b"closed", 1)]);
    assert_eq!(read(&outcome.kept, b"closed"), b"x");
    assert_eq!(fs::metadata(store.path.join("sb_1/0")).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn a_kept_file_that_was_tampered_with_is_not_given() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 1000));
    let kept = put(&store, "ana", "sb_1", &[(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]).kept;
    let place = store.path.join("sb_1");
    fs::remove_file(place.join("0")).unwrap();
    symlink("/etc/passwd", place.join("0")).unwrap();
    fs::write(place.join("1"), "22").unwrap();
    fs::remove_file(place.join("2")).unwrap();
    fs::create_dir(place.join("2")).unwrap();
    for artifact in &kept.list {
        assert!(kept.open(artifact).is_err(), "{artifact:?}");
    }
}

#[test]
fn a_caller_has_room_for_so_many_files_and_the_oldest_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(3, 1000));
    let at_the_limit = put(&store, "ana", "sb_1", &[(b"a", b""), (b"b", b""), (b"c", b"")]);
    assert_eq!((at_the_limit.kept.list.len(), at_the_limit.omitted), (3, 0));
    // Another caller's room is its own.
    put(&store, "bob", "sb_b", &[(b"a", b""), (b"b", b""), (b"c", b"")]);
    assert_eq!((ids(&store, "ana").len(), ids(&store, "bob").len()), (1, 1));
    put(&store, "ana", "sb_2", &[(b"a", b"")]);
    assert_eq!(ids(&store, "ana"), ["sb_2"], "one more file, and the oldest sandbox's had to go");
    let above = put(&store, "ana", "sb_3", &[(b"d", b""), (b"a", b""), (b"b", b""), (b"c", b"")]);
    assert_eq!((above.kept.list.len(), above.omitted), (3, 1));
    assert!(above.reason.unwrap().contains("room for 3 files"));
    assert!(above.kept.find(b"d").is_none(), "the last by path");
    assert_eq!(ids(&store, "ana"), ["sb_3"]);
    drop((at_the_limit, above.kept));
    store.sweep();
    let mut names: Vec<_> =
        fs::read_dir(&store.path).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["sb_3", "sb_b"], "and their files");
    assert_eq!(ids(&store, "bob"), ["sb_b"]);
}

#[test]
fn a_caller_has_room_for_so_many_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 10));
    let all = put(&store, "ana", "sb_1", &[(b"a", b"12345"), (b"b", b"12345")]);
    assert_eq!(all.omitted, 0);
    // What is too large alone is left out, and what comes after it may still fit.
    let most = put(&store, "ana", "sb_2", &[(b"a", b"12345678901"), (b"b", b"1234567890")]);
    assert_eq!((most.omitted, most.kept.list.len()), (1, 1));
    assert_eq!(ids(&store, "ana"), ["sb_2"]);
    put(&store, "ana", "sb_3", &[(b"a", b"")]);
    assert_eq!(ids(&store, "ana"), ["sb_2", "sb_3"], "nothing needs no place");
    let none = put(&store, "ana", "sb_4", &[(b"a", b"12345678901")]);
    assert_eq!((none.omitted, none.kept.list.len()), (1, 0));
    assert!(store.get(&"ana".into(), "sb_4").is_none());
}

#[test]
fn files_go_when_their_time_is_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut short = room(100, 1000);
    short.ttl = Duration::from_millis(200);
    let store = store(&folder, short);
    let outcome = put(&store, "ana", "sb_1", &[(b"a", b"1")]);
    assert_eq!(ids(&store, "ana"), ["sb_1"]);
    std::thread::sleep(Duration::from_millis(250));
    assert!(store.get(&"ana".into(), "sb_1").is_none(), "at once");
    assert!(ids(&store, "ana").is_empty());
    store.sweep();
    assert_eq!(store.count(), (0, 0));
    // Who is just being given it gets all of it.
    assert_eq!(read(&outcome.kept, b"a"), b"1");
    drop(outcome);
    store.sweep();
    assert_eq!(fs::read_dir(&store.path).unwrap().count(), 0);
}

#[test]
fn many_ends_at_once_stay_within_the_room() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(store(&folder, room(20, 200)));
    std::thread::scope(|scope| {
        for n in 0..16 {
            let store = Arc::clone(&store);
            scope.spawn(move || {
                let files: Vec<(Vec<u8>, Vec<u8>)> =
                    (0..5).map(|f| (format!("f{f}").into_bytes(), vec![b'x'; 11])).collect();
                let files: Vec<_> =
                    files.iter().map(|(a, b)| (a.as_slice(), b.as_slice())).collect();
                put(&store, "ana", &format!("sb_{n}"), &files);
                let (files, bytes) = lock(&store.state).used(&"ana".into());
                assert!(files <= 20 && bytes <= 200, "{files} {bytes}");
            });
        }
    });
    let (files, bytes) = store.count();
    assert!(files > 0 && files <= 20 && bytes <= 200);
    store.sweep();
    let on_disk: usize = fs::read_dir(&store.path)
        .unwrap()
        .map(|e| fs::read_dir(e.unwrap().path()).unwrap().count())
        .sum();
    assert_eq!(on_disk, files);
}

#[test]
fn a_sandbox_that_is_dropped_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, room(100, 1000));
    let live = store.live("sb_1").unwrap();
    assert!(live.is_empty());
    fs::write(live.path().join("a"), "x").unwrap();
    assert!(!live.is_empty());
    drop(live);
    store.sweep();
    assert_eq!(fs::read_dir(&store.path).unwrap().count(), 0);
}

#[test]
fn the_folder_goes_with_its_store_and_one_left_behind_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let first = store(&folder, room(100, 1000));
    let kept = put(&first, "ana", "sb_1", &[(b"a", b"1")]);
    let left = folder.path().join("casulo-artifacts-0123/sb_9");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("0"), "x").unwrap();
    let foreign = folder.path().join("casulo-other");
    fs::create_dir(&foreign).unwrap();
    let second = store(&folder, room(100, 1000));
    assert!(!left.exists(), "its process was killed");
    assert!(first.path.join("sb_1/0").exists() && second.path.exists(), "in use");
    second.clear();
    assert!(!second.path.exists());
    assert!(second.live("sb_1").is_err());
    drop(kept);
    let path = first.path.clone();
    drop(first);
    assert!(!path.exists() && foreign.exists());
}

#[test]
fn no_store_where_a_guest_could_look_into_it() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    symlink(&inner, folder.path().join("other way")).unwrap();
    let free = tempfile::tempdir().unwrap();
    let folders = [folder.path().join("other way"), "/nonexistent".into(), free.path().to_owned()];
    let store = Store::new(&folders, &[folder.path()], room(1, 1)).unwrap();
    assert_eq!(store.path.parent().unwrap(), free.path().canonicalize().unwrap());
    let error = Store::new(&folders[..2], &[folder.path()], room(1, 1)).unwrap_err();
    assert!(error.contains("shared with guests") && error.contains("--artifact-ttl 0"), "{error}");
}
