use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use casulo_protocol::result::{Change, FileKind, Reason};
use casulo_protocol::spec::ShareSpec;
use rustix::fs::{CWD, FileType};

use super::*;
use crate::shares;

fn fifo(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn root(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

/// A task with the output folder `out`, which does `work` in what it sees of it.
fn task(spec: &SandboxSpec, work: impl FnOnce(&Path)) -> Output {
    let mut shares = shares::open_all(spec, &[]).unwrap();
    let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let outputs = tokio.block_on(Outputs::begin(spec, &mut shares, false)).unwrap();
    let seen = std::fs::read_link(walk::fd_path(&shares[0].root)).unwrap();
    work(&seen);
    outputs.finish(true).unwrap()
}

fn spec(out: &Path) -> SandboxSpec {
    let mut spec = SandboxSpec::default();
    spec.output = Some(out.to_owned());
    spec
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into()).collect();
    names.sort();
    names
}

fn rejected(findings: &Output) -> Vec<(&str, Reason)> {
    findings.rejected.iter().map(|r| (r.path.as_str(), r.reason)).collect()
}

const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

#[test]
fn changes_are_told_with_digests() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("sub")).unwrap();
    for name in ["kept", "changed", "gone", "sub/old"] {
        std::fs::write(at(name), "1").unwrap();
    }
    let findings = task(&spec(folder.path()), |out| {
        std::fs::write(out.join("changed"), "22").unwrap();
        std::fs::remove_file(out.join("gone")).unwrap();
        std::fs::write(out.join("sub/new"), "abc").unwrap();
        std::fs::create_dir(out.join("dir")).unwrap();
        symlink("changed", out.join("link")).unwrap();
    });
    let short: Vec<_> =
        findings.files.iter().map(|c| (c.path.as_str(), c.kind, c.change)).collect();
    assert_eq!(
        short,
        [
            ("changed", FileKind::File, Change::Modified),
            ("dir", FileKind::Directory, Change::Created),
            ("gone", FileKind::File, Change::Deleted),
            ("link", FileKind::Symlink, Change::Created),
            ("sub/new", FileKind::File, Change::Created),
        ]
    );
    assert_eq!(findings.files[3].sha256, None);
    assert_eq!(findings.files[4].sha256.as_deref(), Some(ABC));
    assert!(findings.rejected.is_empty());
}

#[test]
fn links_out_of_the_folder_are_removed_and_those_inside_stay() {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir_in(folder.path()).unwrap();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(outside.path().join("secret"), "s").unwrap();
    let outside_name = outside.path().file_name().unwrap().to_str().unwrap();
    let cases: &[(&str, &str, bool)] = &[
        ("file", "d/e/f", true),
        ("d/up", "../d/e", true),
        ("d/e/over", "../../d/./e/../e/f", true),
        ("loop", "loop", true),
        ("nowhere", "not/yet/there", true),
        ("d/nowhere", "../later", true),
        ("self", ".", true),
        ("through", "d/up/f", true),
        ("absolute", "/etc/passwd", false),
        ("guest", "/workspace/output/d/e/f", false),
        ("up", "..", false),
        ("d/out", "../../", false),
        ("d/e/far", "../../../../../../etc", false),
        ("sibling", &format!("../{outside_name}/secret"), false),
        // Out and in again: leaves, if only for a moment, and depends on the folder's name.
        ("round", "../out/d", false),
        // Nothing there now, but whoever makes `x` would open a way out.
        ("trap", "x/../../y", false),
        ("d/trap", "x/../../../y", false),
        // Leads through a link that leads out; once that is gone, it leads nowhere.
        ("a-chained", "absolute/x", false),
        ("z-chained", "absolute/x", true),
        ("d/e/deeper", "over2/../../../..", false),
        ("escape", "bad\u{1b}[2J", false),
    ];
    let findings = task(&spec(&out), |out| {
        std::fs::create_dir_all(out.join("d/e/over2")).unwrap();
        std::fs::write(out.join("d/e/f"), "x").unwrap();
        for (name, target, _) in cases {
            symlink(target, out.join(name)).unwrap();
        }
    });
    for (name, target, stays) in cases {
        let there = std::fs::symlink_metadata(out.join(name)).is_ok();
        assert_eq!(there, *stays, "{name} -> {target}");
        let told = findings.rejected.iter().find(|r| r.path == *name);
        assert_eq!(told.is_none(), *stays, "{name}");
        assert!(told.is_none_or(|r| r.reason == Reason::LinkOutside && r.still_there.is_none()));
        assert_eq!(findings.files.iter().any(|f| f.path == *name), *stays, "{name}");
    }
    assert!(outside.path().join("secret").exists());
    assert_eq!(findings.rejected[0].share, "/workspace/output");
}

#[test]
fn all_or_no_links_if_asked_for() {
    for (links, left) in [(OutputLinks::All, 2), (OutputLinks::None, 0)] {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = spec(folder.path());
        spec.output_links = links;
        let findings = task(&spec, |out| {
            symlink("/etc/passwd", out.join("a")).unwrap();
            symlink(".", out.join("b")).unwrap();
            fifo(&out.join("fifo"));
        });
        assert_eq!(names(folder.path()).len(), left);
        assert_eq!(findings.rejected.len(), 3 - left);
        assert_eq!(findings.rejected.last().unwrap().reason, Reason::Special);
    }
}

#[test]
fn special_files_and_names_that_drive_terminals_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let findings = task(&spec(folder.path()), |out| {
        std::fs::create_dir(out.join("d")).unwrap();
        fifo(&out.join("d/fifo"));
        UnixListener::bind(out.join("socket")).unwrap();
        std::fs::write(out.join("a\nb"), "").unwrap();
        std::fs::write(out.join("esc\u{1b}]0;x\u{7}"), "").unwrap();
        std::fs::write(out.join("c1\u{9b}2J"), "").unwrap();
        std::fs::write(out.join("del\u{7f}"), "").unwrap();
        std::fs::create_dir_all(out.join("dir\r/deep/er")).unwrap();
        std::fs::write(out.join("dir\r/deep/er/file"), "").unwrap();
        // Not UTF-8, but nothing that a terminal obeys.
        std::fs::write(out.join(OsStr::from_bytes(b"caf\xe9")), "").unwrap();
        std::fs::write(out.join("ordin\u{e4}ry"), "").unwrap();
    });
    let left = names(folder.path());
    let expected: Vec<PathBuf> =
        vec![OsStr::from_bytes(b"caf\xe9").into(), "d".into(), "ordin\u{e4}ry".into()];
    assert_eq!(left, expected);
    assert_eq!(names(&folder.path().join("d")), Vec::<PathBuf>::new());
    assert_eq!(
        rejected(&findings),
        [
            ("a\nb", Reason::Name),
            ("c1\u{9b}2J", Reason::Name),
            ("d/fifo", Reason::Special),
            ("del\u{7f}", Reason::Name),
            ("dir\r", Reason::Name),
            ("esc\u{1b}]0;x\u{7}", Reason::Name),
            ("socket", Reason::Special),
        ]
    );
}

#[test]
fn what_was_there_before_is_the_callers_own() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fifo(&at("fifo"));
    fifo(&at("replaced"));
    symlink("/etc/passwd", at("link")).unwrap();
    symlink("/etc/passwd", at("bent")).unwrap();
    std::fs::create_dir(at("d\n")).unwrap();
    symlink("/", at("d\n/root")).unwrap();
    std::fs::write(at("d\n/file\n"), "old").unwrap();
    let findings = task(&spec(folder.path()), |out| {
        std::fs::write(out.join("d\n/file\n"), "new").unwrap();
        // Changed by the task: no longer the caller's.
        std::fs::remove_file(out.join("bent")).unwrap();
        symlink("/etc/shadow", out.join("bent")).unwrap();
        std::fs::remove_file(out.join("replaced")).unwrap();
        symlink("/", out.join("replaced")).unwrap();
        symlink("/etc/passwd", out.join("d\n/link")).unwrap();
        // A way through the caller's own link is a way out all the same.
        symlink("d\n/root/etc", out.join("through")).unwrap();
    });
    let expected = ["d\n", "fifo", "link"].map(PathBuf::from);
    assert_eq!(names(folder.path()), expected);
    assert_eq!(names(&at("d\n")), ["file\n", "root"].map(PathBuf::from));
    let paths: Vec<_> = findings.rejected.iter().map(|r| r.path.as_str()).collect();
    assert_eq!(paths, ["bent", "d\n/link", "replaced", "through"]);
}

#[test]
fn folders_closed_by_the_task_hide_nothing_and_those_of_the_caller_stay_closed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let set = |path: PathBuf, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    std::fs::create_dir_all(at("own/x")).unwrap();
    set(at("own"), 0);
    let findings = task(&spec(folder.path()), |out| {
        std::fs::create_dir_all(out.join("a/b")).unwrap();
        symlink("/etc", out.join("a/b/link")).unwrap();
        set(out.join("a/b"), 0);
        set(out.join("a"), 0);
    });
    assert_eq!(rejected(&findings), [("a/b/link", Reason::LinkOutside)]);
    assert_eq!(std::fs::metadata(at("own")).unwrap().mode() & 0o777, 0);
    set(at("own"), 0o700);
}

#[test]
fn depth_hides_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let findings = task(&spec(folder.path()), |out| {
        let mut at = root(out);
        for _ in 0..1500 {
            rustix::fs::mkdirat(&at, c"d", Mode::RWXU).unwrap();
            at = walk::open_folder(&at, c"d").unwrap();
        }
        rustix::fs::symlinkat(c"/etc/passwd", &at, c"out").unwrap();
        rustix::fs::symlinkat(c"../d", &at, c"in").unwrap();
    });
    assert_eq!(findings.rejected.len(), 1);
    assert_eq!(findings.rejected[0].reason, Reason::LinkOutside);
    assert!(findings.rejected[0].path.len() <= 4096);
    walk::remove(root(folder.path()), c"d").unwrap();
}

#[test]
fn reports_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let findings = task(&spec(folder.path()), |out| {
        for n in 0..inspect::MOST_CHANGES + 5 {
            std::fs::write(out.join(format!("f{n}")), "").unwrap();
        }
        for n in 0..inspect::MOST_REJECTED + 7 {
            symlink("/", out.join(format!("l{n}"))).unwrap();
        }
    });
    assert_eq!((findings.files.len(), findings.files_omitted), (inspect::MOST_CHANGES, 5));
    assert_eq!((findings.rejected.len(), findings.rejected_omitted), (inspect::MOST_REJECTED, 7));
    // All of them are gone, told or not.
    assert!(names(folder.path()).iter().all(|n| n.to_str().unwrap().starts_with('f')));
}

#[test]
fn a_sparse_file_costs_no_reading_beyond_the_bound() {
    let folder = tempfile::tempdir().unwrap();
    let findings = task(&spec(folder.path()), |out| {
        File::create(out.join("huge")).unwrap().set_len(inspect::MOST_HASHED + 1).unwrap();
        std::fs::write(out.join("small"), "abc").unwrap();
    });
    assert_eq!(findings.files[0].sha256, None);
    assert_eq!(findings.files[1].sha256.as_deref(), Some(ABC));
}

#[test]
fn other_writable_folders_are_made_safe_too() {
    let (out, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut spec = spec(out.path());
    let host = work.path().to_owned();
    spec.shares.push(ShareSpec { host, guest: "/work".into(), writable: true });
    let findings = task(&spec, |_| symlink("/etc/passwd", work.path().join("x")).unwrap());
    assert_eq!((findings.rejected[0].share.as_str(), names(work.path()).len()), ("/work", 0));
    // Only the output folder's changes are listed.
    assert!(findings.files.is_empty());
}

fn with_artifacts(out: &Path, patterns: &[&str]) -> SandboxSpec {
    let mut spec = spec(out);
    spec.artifacts = patterns.iter().map(|p| (*p).to_owned()).collect();
    spec
}

#[test]
fn only_matching_regular_files_are_released() {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine"), "mine").unwrap();
    let spec = with_artifacts(folder.path(), &["*.csv", "plots/**", "deep/**/x?.txt"]);
    let findings = task(&spec, |out| {
        assert_eq!(names(out), Vec::<PathBuf>::new(), "the guest does not see the output folder");
        assert_eq!(std::fs::metadata(out).unwrap().mode() & 0o777, 0o700);
        std::fs::write(out.join("a.csv"), "abc").unwrap();
        std::fs::write(out.join("a.txt"), "no").unwrap();
        std::fs::create_dir_all(out.join("plots/more")).unwrap();
        std::fs::write(out.join("plots/p.png"), "p").unwrap();
        std::fs::write(out.join("plots/more/q.png"), "q").unwrap();
        std::fs::create_dir_all(out.join("deep/1/2")).unwrap();
        std::fs::write(out.join("deep/1/2/x1.txt"), "1").unwrap();
        std::fs::write(out.join("deep/b.csv"), "`*` does not match folders").unwrap();
        // Not regular files, whatever their names.
        symlink(outside.path(), out.join("plots/way")).unwrap();
        symlink("a.csv", out.join("link.csv")).unwrap();
        fifo(&out.join("pipe.csv"));
        std::fs::create_dir(out.join("dir.csv")).unwrap();
        std::fs::write(out.join("bad\n.csv"), "").unwrap();
        std::fs::set_permissions(out.join("a.csv"), std::fs::Permissions::from_mode(0o4000))
            .unwrap();
    });
    let released: Vec<_> =
        findings.files.iter().map(|f| (f.path.as_str(), f.size, f.change)).collect();
    let created = Change::Created;
    assert_eq!(
        released,
        [
            ("a.csv", 3, created),
            ("deep/1/2/x1.txt", 1, created),
            ("plots/more/q.png", 1, created),
            ("plots/p.png", 1, created),
        ]
    );
    assert_eq!(findings.files[0].sha256.as_deref(), Some(ABC));
    assert_eq!(names(folder.path()), ["a.csv", "deep", "mine", "plots"].map(PathBuf::from));
    assert_eq!(names(&folder.path().join("plots")), ["more", "p.png"].map(PathBuf::from));
    assert_eq!(std::fs::metadata(folder.path().join("a.csv")).unwrap().mode() & 0o7000, 0);
    assert_eq!(
        rejected(&findings),
        [
            ("bad\n.csv", Reason::Name),
            ("pipe.csv", Reason::Special),
            ("plots/way", Reason::LinkOutside),
        ]
    );
    // `a.txt`, `deep/b.csv` and the link that stays inside.
    assert_eq!(findings.withheld, 3);
}

#[test]
fn artifacts_replace_files_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("old"), "old").unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    symlink(outside.path().join("made"), at("link")).unwrap();
    symlink(outside.path(), at("way")).unwrap();
    std::fs::write(at("file"), "").unwrap();
    let findings = task(&with_artifacts(folder.path(), &["**"]), |out| {
        for name in ["old", "folder", "link"] {
            std::fs::write(out.join(name), "new").unwrap();
        }
        for name in ["way", "file"] {
            std::fs::create_dir(out.join(name)).unwrap();
            std::fs::write(out.join(name).join("x"), "new").unwrap();
        }
    });
    let released: Vec<_> = findings.files.iter().map(|f| (f.path.as_str(), f.change)).collect();
    assert_eq!(released, [("old", Change::Modified)]);
    assert_eq!(std::fs::read(at("old")).unwrap(), b"new");
    assert_eq!(names(outside.path()), Vec::<PathBuf>::new());
    let mut refused: Vec<_> = rejected(&findings);
    refused.sort_by_key(|(path, _)| *path);
    let expected = ["file/x", "folder", "link", "way/x"].map(|path| (path, Reason::Place));
    assert_eq!(refused, expected);
    assert!(findings.rejected.iter().all(|r| r.detail.is_some()));
}

#[test]
fn patterns_are_checked() {
    for bad in ["", "/etc/*", "../x", "a/../b", "[", "./"] {
        assert!(compile(&[bad.to_owned()]).is_err(), "{bad:?}");
    }
    assert!(compile(&vec!["x".to_owned(); 300]).is_err());
    for (pattern, path, matches) in [
        ("report/", "report/a/b", true),
        ("./x", "x", true),
        ("*.{csv,json}", "a.json", true),
        ("*", "a/b", false),
        ("**/*.py", "a.py", true),
        ("\\*", "*", true),
        ("\\*", "a", false),
    ] {
        let set = compile(&[pattern.to_owned()]).unwrap();
        assert_eq!(set.is_match(path), matches, "{pattern} {path}");
    }
}

#[test]
fn an_output_folder_serves_one_task_or_several_with_artifacts() {
    let folder = tempfile::tempdir().unwrap();
    let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let begin = |spec: &SandboxSpec| {
        let mut shares = shares::open_all(spec, &[]).unwrap();
        tokio.block_on(Outputs::begin(spec, &mut shares, false))
    };
    let busy = |result: Result<Outputs, Error>| {
        matches!(result, Err(Error::Share(ShareError::Busy { .. })))
    };
    let (plain, staged) = (spec(folder.path()), with_artifacts(folder.path(), &["*"]));
    let first = begin(&plain).unwrap();
    assert!(busy(begin(&plain)) && busy(begin(&staged)));
    drop(first);
    let (first, second) = (begin(&staged).unwrap(), begin(&staged).unwrap());
    assert!(busy(begin(&plain)));
    drop((first, second));
    assert_eq!(names(folder.path()), Vec::<PathBuf>::new());
    begin(&plain).unwrap();
}

#[test]
fn staging_folders_of_tasks_that_were_killed_are_swept() {
    let folder = tempfile::tempdir().unwrap();
    let stale = folder.path().join(".casulo-staging-0123");
    std::fs::create_dir_all(stale.join("deep")).unwrap();
    std::fs::write(stale.join("deep/x"), "").unwrap();
    let live = Staging::new(root(folder.path()), compile(&[]).unwrap()).unwrap();
    assert!(!stale.exists());
    let second = Staging::new(root(folder.path()), compile(&[]).unwrap()).unwrap();
    assert_eq!(names(folder.path()).len(), 2, "one in use is left");
    drop((live, second));
    assert_eq!(names(folder.path()).len(), 0);
}

#[test]
fn a_live_folder_is_listed_and_nothing_in_it_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let fd = root(folder.path());
    let before = snapshot(&fd).unwrap();
    symlink("/etc/passwd", folder.path().join("link")).unwrap();
    fifo(&folder.path().join("fifo"));
    std::fs::write(folder.path().join("closed"), "x").unwrap();
    std::fs::set_permissions(folder.path().join("closed"), std::fs::Permissions::from_mode(0o000))
        .unwrap();
    let (list, omitted) = changes(&fd, &before).unwrap();
    assert_eq!((list.len(), omitted), (3, 0));
    assert_eq!(names(folder.path()).len(), 3);
    assert_eq!(std::fs::metadata(folder.path().join("closed")).unwrap().mode() & 0o777, 0);
}
