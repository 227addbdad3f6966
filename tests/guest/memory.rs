//! Guest memory: how much there is, and that what the guest no longer needs goes back to the host.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use crate::support::{run, vmm_of, wait, wait_for};

const MIB: u64 = 1 << 20;

/// A Python program in a guest that does one step for each line it gets, and answers each.
struct Steps {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Steps {
    fn start(options: &[&str], program: &str) -> Self {
        let mut command = run(options);
        command.args(["--", "python3", "-u", "-c", program]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    fn step(&mut self) -> String {
        self.stdin.write_all(b"\n").unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Bytes of memory that the VMM has, from `/proc/PID/status`.
    fn resident(&self) -> u64 {
        let vmm = vmm_of(self.child.id());
        assert_eq!(vmm.len(), 1);
        let status = std::fs::read_to_string(format!("/proc/{}/status", vmm[0])).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    fn finish(mut self) {
        drop(self.stdin);
        assert!(wait(&mut self.child).success());
    }
}

#[test]
fn memory_that_the_guest_frees_returns_to_the_host() {
    let program = "import sys\n\
        input(); print('ready')\n\
        input(); held = bytearray(b'\\1') * (512 << 20); print('held', len(held))\n\
        input(); del held; print('freed')\n\
        sys.stdin.read()";
    let mut guest = Steps::start(&["--memory", "1024"], program);
    assert_eq!(guest.step(), "ready");
    let before = guest.resident();
    assert_eq!(guest.step(), "held 536870912");
    let held = guest.resident();
    assert!(held >= before + 500 * MIB, "{before} -> {held}");
    assert_eq!(guest.step(), "freed");
    // The guest kernel waits two seconds before it reports, and goes through its lists in pieces.
    let after = wait_for("the return of the memory", || {
        let now = guest.resident();
        (now <= before + 64 * MIB).then_some(now)
    });
    eprintln!("resident: {} MiB, {} MiB, {} MiB", before / MIB, held / MIB, after / MIB);
    guest.finish();
}
