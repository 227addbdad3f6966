//! What comes out of a guest: safe to read, and only what was asked for.

use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{assert_refused, folder, output, run, sha256, wait, wait_for};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn json(out: &std::process::Output) -> serde_json::Value {
    let error = || String::from_utf8_lossy(&out.stderr).into_owned();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", error()))
}

/// Leaves traps of every kind beside ordinary files.
const TRAPS: &str = r#"
import os, socket
open('good', 'w').write('abc')
os.mkdir('d')
os.symlink('../good', 'd/inside')
os.symlink('/etc/passwd', 'absolute')
os.symlink('../../../etc/passwd', 'd/up')
for make in [lambda: os.mkfifo('d/fifo'), lambda: socket.socket(socket.AF_UNIX).bind('socket')]:
    try:
        make()
    except OSError as error:
        print(error)
open('a\x1b[2Jb', 'w').close()
os.mkdir('new\nline')
open('new\nline/x', 'w').close()
"#;

#[test]
fn traps_are_removed_and_told() {
    let folder = folder();
    // The user's own, from before: none of the task's business.
    symlink("/etc/passwd", folder.path().join("mine")).unwrap();
    let out = output(run(["--output", text(folder.path()), "--", "python3", "-c", TRAPS]));
    assert_eq!(out.status.code(), Some(0));
    assert_eq!(names(folder.path()), ["d", "good", "mine"]);
    assert_eq!(names(&folder.path().join("d")), ["inside"]);
    let told = String::from_utf8_lossy(&out.stderr);
    for word in ["absolute", "d/up", "new\\nline", "a\\u{1b}[2Jb", "--output-links all"] {
        assert!(told.contains(word), "{word}: {told}");
    }
    assert!(!told.contains('\u{1b}') && told.lines().all(|line| line.starts_with("casulo: ")));
}

#[test]
fn the_result_lists_changes_and_rejections() {
    let folder = folder();
    let out =
        output(run(["--json", "--output", text(folder.path()), "--", "python3", "-c", TRAPS]));
    let result = json(&out);
    let files: Vec<&str> =
        result["files"].as_array().unwrap().iter().map(|f| f["path"].as_str().unwrap()).collect();
    assert_eq!(files, ["d", "d/inside", "good"]);
    assert_eq!(result["files"][2]["sha256"], sha256(b"abc"));
    let rejected: Vec<(&str, &str)> = result["rejected"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| (r["path"].as_str().unwrap(), r["reason"].as_str().unwrap()))
        .collect();
    for wanted in [
        ("absolute", "link_outside"),
        ("d/up", "link_outside"),
        ("a\u{1b}[2Jb", "name"),
        ("new\nline", "name"),
    ] {
        assert!(rejected.contains(&wanted), "{wanted:?} in {rejected:?}");
    }
}

#[test]
fn links_stay_if_asked_for() {
    let folder = folder();
    let path = text(folder.path());
    let script = "ln -s /etc/passwd a; ln -s . b";
    let out = output(run(["--output-links", "all", "--output", path, "--", "sh", "-c", script]));
    assert_eq!((out.status.code(), out.stderr.as_slice()), (Some(0), &b""[..]));
    assert_eq!(names(folder.path()), ["a", "b"]);
    let script = "rm a b; ln -s . c";
    let out = output(run(["--output-links", "none", "--output", path, "--", "sh", "-c", script]));
    assert_eq!(out.status.code(), Some(0));
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn only_artifacts_are_released_also_after_a_timeout() {
    let folder = folder();
    fs::write(folder.path().join("mine"), "mine").unwrap();
    fs::write(folder.path().join("old.csv"), "old").unwrap();
    let script = "ls -A; echo 1,2 > a.csv; echo new > old.csv; mkdir -p plots/x; echo p > plots/x/p; \
                  echo log > run.log; ln -s /etc/passwd b.csv; ln -s a.csv c.csv; sleep 1000";
    let out = output(run([
        "--json",
        "--timeout",
        "5",
        "--artifact",
        "*.csv",
        "--artifact",
        "plots/**",
        "--output",
        text(folder.path()),
        "--",
        "sh",
        "-c",
        script,
    ]));
    assert_eq!(out.status.code(), Some(124));
    let result = json(&out);
    assert_eq!(result["stdout"], "", "the guest does not see the output folder");
    let files: Vec<(&str, &str, &str)> = result["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| {
            let field = |name: &str| f[name].as_str().unwrap();
            (field("path"), field("change"), field("sha256"))
        })
        .collect();
    assert_eq!(
        files,
        [
            ("a.csv", "created", sha256(b"1,2\n").as_str()),
            ("old.csv", "modified", sha256(b"new\n").as_str()),
            ("plots/x/p", "created", sha256(b"p\n").as_str()),
        ]
    );
    assert_eq!(result["files"][0]["size"], 4);
    assert_eq!(result["withheld"], 2);
    assert_eq!(result["rejected"][0]["path"], "b.csv");
    assert_eq!(names(folder.path()), ["a.csv", "mine", "old.csv", "plots"]);
    assert_eq!(fs::read(folder.path().join("old.csv")).unwrap(), b"new\n");
}

#[test]
fn a_signal_leaves_no_traps_and_no_staging_folder() {
    for artifacts in [false, true] {
        let folder = folder();
        let mut command = run(["--output", text(folder.path())]);
        if artifacts {
            command.args(["--artifact", "*"]);
        }
        command.args(["--", "sh", "-c", "echo x > file; ln -s / way; echo up; sleep 1000"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut word = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(wait(&mut child).code(), Some(143));
        assert_eq!(names(folder.path()), ["file"]);
    }
}

#[test]
fn a_staging_folder_left_by_sigkill_is_removed_by_the_next_task() {
    let folder = folder();
    let command = || {
        let mut command = run(["--artifact", "*", "--output", text(folder.path())]);
        command.args(["--", "sh", "-c"]);
        command
    };
    let mut child = command().arg("echo up; sleep 1000").stdout(Stdio::piped()).spawn().unwrap();
    let mut word = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    let staged = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
        entries.filter(|p| p.to_string_lossy().contains(".casulo-staging-")).collect()
    };
    assert_eq!(staged(folder.path()).len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    // The VMM, whose descriptor holds the lock too, ends a moment later.
    wait_for("the sweep", || {
        let out = output({
            let mut command = command();
            command.arg("true");
            command
        });
        assert_eq!(out.status.code(), Some(0));
        staged(folder.path()).is_empty().then_some(())
    });
}

#[test]
fn two_tasks_do_not_share_an_output_folder_by_accident() {
    let folder = folder();
    let path = text(folder.path());
    let mut first = run(["--output", path, "--", "sh", "-c", "echo up; sleep 1000"]);
    let mut child = first.stdout(Stdio::piped()).spawn().unwrap();
    let mut word = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
    let out = output(run(["--output", path, "--", "true"]));
    assert_refused(&out, &["another task", "of its own"]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn the_record_says_what_was_read_and_written() {
    let (input, out) = (folder(), folder());
    fs::write(input.path().join("data"), vec![b'x'; 100_000]).unwrap();
    fs::write(input.path().join("unread"), "x").unwrap();
    let script = "cat /workspace/input/data > /dev/null; printf 12345 > made; ls /workspace/input > /dev/null";
    let out = output(run([
        "--json",
        "--input",
        text(input.path()),
        "--output",
        text(out.path()),
        "--",
        "sh",
        "-c",
        script,
    ]));
    let result = json(&out);
    let find = |path: &str| {
        let list = result["accessed"].as_array().unwrap();
        list.iter().find(|a| a["path"] == path).cloned()
    };
    let data = find("/workspace/input/data").unwrap();
    assert_eq!((data["written"].as_u64(), data["changed"].as_bool()), (Some(0), Some(false)));
    assert!(data["read"].as_u64().unwrap() >= 100_000);
    let made = find("/workspace/output/made").unwrap();
    assert_eq!((made["written"].as_u64(), made["changed"].as_bool()), (Some(5), Some(true)));
    assert_eq!(find("/workspace/input/unread"), None);
}

#[test]
fn changes_of_the_host_are_seen_in_a_live_input() {
    let input = folder();
    let file = input.path().join("file");
    fs::write(&file, "one\n").unwrap();
    let script =
        "cat /workspace/input/file; read go; cat /workspace/input/file /workspace/input/new";
    let mut command =
        run(["--input-live", "--input", text(input.path()), "--", "sh", "-c", script]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    fs::write(&file, "another\n").unwrap();
    fs::write(input.path().join("new"), "new\n").unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"go\n").unwrap();
    let out = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&out.stderr);
    assert_eq!((&first, out.stdout.as_slice()), (b"one\n", &b"another\nnew\n"[..]), "{told}");
}

#[test]
fn the_number_of_files_is_limited() {
    let folder = folder();
    let script = "for n in $(seq 100); do true > f$n || break; done 2>/dev/null; ls | wc -l";
    let path = text(folder.path());
    let out = output(run(["--output-files", "20", "--output", path, "--", "sh", "-c", script]));
    assert_eq!(String::from_utf8_lossy(&out.stdout), "20\n");
    assert_eq!(names(folder.path()).len(), 20);
    assert!(String::from_utf8_lossy(&out.stderr).contains("--output-files"));
}
