//! Two tasks never see each other.

use std::process::Stdio;

use crate::support::{folder, output, run, wait};

/// Fills memory, /tmp, the writable layer and the output with a marker, then says so and waits for
/// the end of its input. The marker is put together in the guest, so that it stands in no argument.
const FILL: &str = r"
import sys
marker = bytes(b ^ 0x55 for b in bytes.fromhex(sys.argv[1]))
block = marker * 4096
kept = [bytes(block) for _ in range(400)]
for path in ('/tmp/a', '/home/sandbox/a', '/workspace/output/a', '/workspace/tmp/a'):
    with open(path, 'wb') as f:
        for _ in range(40):
            f.write(block)
print('filled', flush=True)
sys.stdin.read()
";

/// As root: looks for the marker in every disk, every mounted file system and all of memory that a
/// process can get hold of (freshly allocated pages and /dev/mem where it exists).
const SEARCH: &str = r"
import os, sys, mmap, stat
marker = bytes(b ^ 0x55 for b in bytes.fromhex(sys.argv[1]))
found, read = [], 0
def scan(path, f):
    global read
    tail = b''
    while True:
        try:
            data = f.read(1 << 20)
        except OSError:
            return
        if not data:
            return
        read += len(data)
        if marker in tail + data:
            found.append(path)
            return
        tail = data[-len(marker):]
for name in os.listdir('/dev'):
    path = '/dev/' + name
    if name.startswith(('vd', 'mem', 'kmem', 'port')) and os.path.exists(path):
        try:
            with open(path, 'rb', buffering=0) as f:
                scan(path, f)
        except OSError:
            pass
for top in ('/tmp', '/home', '/workspace', '/run', '/var/tmp', '/dev/shm'):
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, 'rb') as f:
                    scan(path, f)
pages = []
try:
    for _ in range(300):
        m = mmap.mmap(-1, 1 << 20)
        if marker in m[:]:
            found.append('memory')
        read += 1 << 20
        m[0] = 1
        pages.append(m)
except (MemoryError, OSError):
    pass
print('found' if found else 'nothing', found, read > 200 << 20)
";

/// 32 random bytes, as hex of their complement-like XOR: the marker itself appears nowhere outside.
fn masked_marker() -> String {
    let mut bytes = [0u8; 32];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_search_finds_what_is_there() {
    // The search itself must be able to find a marker, else the tests below show nothing.
    let marker = masked_marker();
    let script = format!("{FILL}\nkept.clear()\n{SEARCH}");
    let out = output(run(["--user", "root", "--", "python3", "-c", &script, &marker]));
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("filled\nfound"), "{text} {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn a_task_never_sees_another_at_once_or_after() {
    let marker = masked_marker();
    let (out_a, out_b) = (folder(), folder());
    let mut first = run([
        "--output",
        out_a.path().to_str().unwrap(),
        "-i",
        "--",
        "python3",
        "-c",
        FILL,
        &marker,
    ])
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .spawn()
    .unwrap();
    let mut word = [0; 7];
    std::io::Read::read_exact(first.stdout.as_mut().unwrap(), &mut word).unwrap();
    assert_eq!(&word, b"filled\n");

    let search = || {
        let out = output(run([
            "--user",
            "root",
            "--output",
            out_b.path().to_str().unwrap(),
            "--",
            "python3",
            "-c",
            SEARCH,
            &marker,
        ]));
        assert_eq!(
            String::from_utf8_lossy(&out.stdout),
            "nothing [] True\n",
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
    };
    search();
    drop(first.stdin.take());
    assert!(wait(&mut first).success());
    search();
}
