//! What programs expect of Linux, in the guest.

use crate::support::{folder, output, run};

/// Each check prints its name; the list is compared whole.
const SCRIPT: &str = include_str!("compat.py");

#[test]
fn guest_compat() {
    let scripts = folder();
    std::fs::write(scripts.path().join("compat.py"), SCRIPT).unwrap();
    let out = output(run([
        "--image",
        "dev",
        "--cpus",
        "2",
        "--input",
        scripts.path().to_str().unwrap(),
        "--",
        "python3",
        "/workspace/input/compat.py",
    ]));
    assert_eq!(
        String::from_utf8_lossy(&out.stdout),
        "pool\nhttp4\nhttp6\npty\nstrace\ninotify\nunshare\nshm\nmqueue\ntimers\ncompile\nnode-like\n",
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(out.status.code(), Some(0));
}
