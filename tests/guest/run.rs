//! `casulo run`: output, status, input, terminal.

use std::io::{Read, Write};
use std::process::Stdio;

use crate::support::{
    Leftovers, assert_output, output, output_with_input, pattern, run, sha256, wait,
};

#[test]
fn a_program_prints_exactly_its_bytes() {
    let before = Leftovers::now();
    let out = output(run(["--", "python3", "-c", "print(6*7)"]));
    assert_output(&out, 0, "42\n", "");
    before.assert_unchanged();
}

#[test]
fn statuses_pass_through() {
    for status in [0, 1, 42] {
        let out = output(run(["--", "sh", "-c", &format!("exit {status}")]));
        assert_output(&out, status, "", "");
    }
    let out = output(run(["sh", "-c", "kill -TERM $$"]));
    assert_output(&out, 128 + 15, "", "");
    let out = output(run(["sh", "-c", "kill -SEGV $$"]));
    assert_eq!(out.status.code(), Some(128 + 11));
}

#[test]
fn a_missing_or_unexecutable_program_is_127_or_126() {
    let out = output(run(["--", "no-such-program"]));
    assert_eq!(out.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&out.stderr).contains("no-such-program"));
    let out = output(run(["--", "/etc/passwd"]));
    assert_eq!(out.status.code(), Some(126));
}

#[test]
fn options_end_at_the_first_word_that_is_none() {
    let out = output(run(["echo", "--cpus", "-t"]));
    assert_output(&out, 0, "--cpus -t\n", "");
}

#[test]
fn standard_input_reaches_the_program() {
    let input = pattern(3_000_001, 1);
    let out = output_with_input(run(["--", "sha256sum"]), &input);
    assert_output(&out, 0, &format!("{}  -\n", sha256(&input)), "");
}

#[test]
fn standard_error_stays_apart() {
    let out = output(run(["--", "sh", "-c", "echo out; echo err >&2"]));
    assert_output(&out, 0, "out\n", "err\n");
}

#[test]
fn a_hundred_megabytes_arrive_whole_and_in_order() {
    // 12,500,000 numbers of 8 bytes: each position is checked.
    let program = "import sys\n\
                   for start in range(0, 12500000, 62500):\n \
                   sys.stdout.buffer.write(b''.join(n.to_bytes(8,'little') for n in range(start, start+62500)))\n";
    let mut child = run(["--", "python3", "-c", program])
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut stdout = std::io::BufReader::with_capacity(1 << 20, child.stdout.take().unwrap());
    let mut word = [0; 8];
    for expected in 0..12_500_000u64 {
        stdout.read_exact(&mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), expected);
    }
    assert_eq!(stdout.read(&mut word).unwrap(), 0);
    assert!(wait(&mut child).success());
}

#[test]
fn the_host_environment_is_not_inherited() {
    let mut command = run(["--env", "GIVEN=1", "--env", "PASSED", "--", "env"]);
    command.env("SECRET_OF_THE_HOST", "x").env("PASSED", "on");
    let out = output(command);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(!text.contains("SECRET_OF_THE_HOST"), "{text}");
    assert!(text.lines().any(|line| line == "GIVEN=1"));
    assert!(text.lines().any(|line| line == "PASSED=on"));
}

#[test]
fn commands_run_as_an_ordinary_user_without_privileges() {
    let script = "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status";
    let out = output(run(["--", "sh", "-c", script]));
    assert_output(
        &out,
        0,
        "1000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\n",
        "",
    );
    let out = output(run(["--user", "root", "--", "id", "-u"]));
    assert_output(&out, 0, "0\n", "");
}

#[test]
fn the_workload_cannot_use_vsock() {
    let script = "import socket\ntry:\n socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)\n print('open')\nexcept OSError:\n print('refused')";
    for user in ["1000", "root"] {
        let out = output(run(["--user", user, "--", "python3", "-c", script]));
        assert_output(&out, 0, "refused\n", "");
    }
}

#[test]
fn json_tells_the_result_and_the_files() {
    let folder = crate::support::folder();
    let path = folder.path().to_str().unwrap();
    let script = "echo hello > made.txt; exit 3";
    let out = output(run(["--json", "--output", path, "--", "sh", "-c", script]));
    assert_eq!(out.status.code(), Some(3));
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value["exit_code"], 3);
    assert_eq!(value["sandbox"], "discarded");
    assert_eq!(value["files"][0]["path"], "made.txt");
    assert_eq!(value["files"][0]["size"], 6);
    assert_eq!(value["files"][0]["sha256"], sha256(b"hello\n"));
    assert_eq!(value["files"][0]["change"], "created");
}

#[test]
fn a_terminal_resizes() {
    // `script` gives casulo a terminal of its own; the size is changed from inside with stty, which
    // the kernel tells casulo by SIGWINCH.
    let casulo = crate::support::casulo_path();
    let inner = format!(
        "stty rows 30 cols 90; (sleep 1; while :; do stty rows 41 cols 133 < /dev/tty; sleep 1; done) & \
         {} run --host native -t -- sh -c 'test -t 0 && stty size; \
         until stty size | grep -q \"41 133\"; do sleep 0.1; done; echo resized'; echo status=$?; kill $!",
        casulo.display()
    );
    let mut command = std::process::Command::new("script");
    command
        .args(["-qec", &inner, "/dev/null"])
        .env("CASULO_HOME", crate::support::home())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stdin = child.stdin.take();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    wait(&mut child);
    drop(stdin);
    assert!(text.contains("30 90") || text.contains("41 133"), "{text}");
    assert!(text.contains("resized"), "{text}");
    assert!(text.contains("status=0"), "{text}");
}

#[test]
fn a_terminal_passes_keys() {
    let casulo = crate::support::casulo_path();
    let inner = format!("{} run --host native -t -- sh -c 'read x; echo got-$x'", casulo.display());
    let mut child = std::process::Command::new("script")
        .args(["-qec", &inner, "/dev/null"])
        .env("CASULO_HOME", crate::support::home())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"abc\r").unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    wait(&mut child);
    drop(stdin);
    assert!(text.contains("got-abc"), "{text}");
}

#[test]
fn all_cpus_are_there() {
    let out = output(run(["--cpus", "2", "--", "nproc"]));
    assert_output(&out, 0, "2\n", "");
}
