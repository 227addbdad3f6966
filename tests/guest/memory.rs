//! Guest memory: how much there is, and that what the guest no longer needs goes back to the host.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::support::{
    Leftovers, assert_output, assert_refused, output, run, vmm_of, wait, wait_for,
};

const MIB: u64 = 1 << 20;

/// A Python program in a guest that does one step for each line it gets, and answers each.
pub(crate) struct Steps {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Steps {
    pub(crate) fn start(options: &[&str], program: &str) -> Self {
        Self::start_by(run(options), program)
    }

    /// The same with a command that is at hand, up to its options.
    pub(crate) fn start_by(mut command: Command, program: &str) -> Self {
        command.args(["--", "python3", "-u", "-c", program]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub(crate) fn step(&mut self) -> String {
        self.stdin.write_all(b"\n").unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// The VMM.
    pub(crate) fn vmm(&self) -> u32 {
        let vmm = vmm_of(self.child.id());
        assert_eq!(vmm.len(), 1);
        vmm[0]
    }

    /// Bytes of memory that the VMM has, from `/proc/PID/status`.
    fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.vmm())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    pub(crate) fn finish(mut self) {
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

/// Prints where RAM ends, whether its last page is there, and `MemTotal` in MiB.
const MAP: &str = "import os, struct\n\
    ram = [l.split()[0].split('-') for l in open('/proc/iomem') if 'System RAM' in l]\n\
    end = max(int(last, 16) for _, last in ram) + 1\n\
    flags = os.open('/proc/kpageflags', os.O_RDONLY)\n\
    last = struct.unpack('Q', os.pread(flags, 8, (end // 4096 - 1) * 8))[0]\n\
    total = int(open('/proc/meminfo').readline().split()[1]) >> 10\n\
    print(end >> 20, last & (1 << 20) == 0, total)";

/// What a guest of so many MiB prints of its memory.
fn map(memory_mib: u64) -> (u64, u64) {
    let memory = memory_mib.to_string();
    let out = output(run(["--user", "root", "--memory", &memory, "--", "python3", "-c", MAP]));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(out.status.success() && words.len() == 3, "{memory} MiB: {out:?}");
    assert_eq!(words[1], "True", "{memory} MiB: {text}");
    (words[0].parse().unwrap(), words[2].parse().unwrap())
}

#[test]
fn all_memory_that_was_asked_for_is_there() {
    let host = std::fs::read_to_string("/proc/meminfo").unwrap();
    let host = host.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10;
    for (memory, end) in [(64, 64), (3072, 3072), (4096, 5120), (8192, 9216)] {
        if memory > host {
            // A guest larger than its host is refused.
            eprintln!("not tested: {memory} MiB on a host of {host} MiB");
            continue;
        }
        let (found, total) = map(memory);
        assert_eq!(found, end, "{memory} MiB");
        // The kernel keeps some 20 MiB for itself, and tables that grow with the memory.
        assert!(total <= memory && total >= memory - memory / 32 - 32, "{memory} MiB: {total}");
        eprintln!("{memory} MiB: {total} MiB to use, RAM ends at {found} MiB");
    }
}

#[test]
fn pages_on_both_sides_of_the_hole_hold_what_is_written() {
    // 256 MiB lie above the hole, and more are used; every page gets a number of its own.
    let program = "import ctypes, mmap, os, struct, sys\n\
        pagemap = os.open('/proc/self/pagemap', os.O_RDONLY)\n\
        size, pages, chunks = 64 << 20, (64 << 20) // 4096, []\n\
        for n in range(6):\n \
            chunk = mmap.mmap(-1, size)\n \
            for page in range(pages): struct.pack_into('Q', chunk, page * 4096, n * pages + page)\n \
            chunks.append(chunk)\n\
        wrong, places = 0, set()\n\
        for n, chunk in enumerate(chunks):\n \
            numbers = struct.iter_unpack('Q4088x', chunk)\n \
            wrong += sum(number != n * pages + page for page, (number,) in enumerate(numbers))\n \
            start = ctypes.addressof(ctypes.c_char.from_buffer(chunk)) // 4096\n \
            frames = os.pread(pagemap, pages * 8, start * 8)\n \
            places.update((f & ((1 << 55) - 1)) >> 18 for (f,) in struct.iter_unpack('Q', frames))\n\
        print(wrong, min(places) < 3, 3 in places, max(places) >= 4)";
    let out = output(run(["--user", "root", "--memory", "3328", "--", "python3", "-c", program]));
    // No wrong page; some below the hole, none in it, some above.
    assert_output(&out, 0, "0 True False True\n", "");
}

#[test]
fn a_guest_larger_than_its_host_is_refused_at_once() {
    let before = Leftovers::now();
    let out = output(run(["--memory", "1048576", "--", "true"]));
    assert_refused(&out, &["memory is 1048576 MiB", "this host has only", "ask for less memory"]);
    before.assert_unchanged();
}
