//! Every bad input has an error of its own: exit 125, a sentence, nothing left.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

use crate::broken::BrokenHome;
use crate::support::{
    Leftovers, USER, assert_refused, casulo, casulo_as_user, folder, home, open_folder, output, run,
};

#[test]
fn the_broken_home_works_while_nothing_is_broken() {
    let home = BrokenHome::new();
    home.own_copy("kernel/vmlinux");
    home.own_copy(&home.base_layer());
    assert_eq!(home.run().status.code(), Some(0));
}

#[test]
fn missing_kernel() {
    let home = BrokenHome::new();
    fs::remove_file(home.path("kernel")).unwrap();
    assert_refused(&home.run(), &["kernel", "xtask"]);
}

#[test]
fn kernel_that_is_none() {
    let home = BrokenHome::new();
    let path = home.own_copy("kernel/vmlinux");
    fs::write(path, "not a kernel").unwrap();
    assert_refused(&home.run(), &["kernel"]);
}

#[test]
fn truncated_image() {
    let home = BrokenHome::new();
    let path = home.own_copy(&home.base_layer());
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
    assert_refused(&home.run(), &["layer", "bytes"]);
}

#[test]
fn one_flipped_byte_in_an_image() {
    let home = BrokenHome::new();
    let path = home.own_copy(&home.base_layer());
    // Verified once while it is whole, so that a remembered digest cannot hide the change.
    assert_eq!(home.run().status.code(), Some(0));
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 1], middle).unwrap();
    assert_refused(&home.run(), &["SHA-256"]);
}

#[test]
fn bad_superblock() {
    // The manifest names this file rightly, but it is no erofs.
    let home = BrokenHome::new();
    let bytes = vec![0x5a; 1 << 20];
    let sum = crate::support::sha256(&bytes);
    fs::write(home.path(format!("images/layers/{sum}.erofs")), &bytes).unwrap();
    let text = fs::read_to_string(home.path("images/names/base/image.json")).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    manifest["layers"] = serde_json::json!([{"sha256": sum, "size": bytes.len()}]);
    manifest["name"] = "broken".into();
    let text = serde_json::to_vec(&manifest).unwrap();
    let digest = crate::support::sha256(&text);
    fs::create_dir(home.path(format!("images/{digest}"))).unwrap();
    fs::write(home.path(format!("images/{digest}/image.json")), text).unwrap();
    std::os::unix::fs::symlink(format!("../{digest}"), home.path("images/names/broken")).unwrap();
    let mut command = run(["--image", "broken", "--", "true"]);
    command.env("CASULO_HOME", home.folder.path());
    assert_refused(&output(command), &["erofs"]);
}

#[test]
fn unknown_image_lists_the_known_ones() {
    assert_refused(&output(run(["--image", "nope", "--", "true"])), &["nope", "base"]);
}

#[test]
fn bad_shares() {
    let before = Leftovers::now();
    let out = output(run(["--input", "/no/such/folder", "--", "true"]));
    assert_refused(&out, &["/no/such/folder"]);
    let files = folder();
    let file = files.path().join("a-file");
    fs::write(&file, "").unwrap();
    let out = output(run(["--output", file.to_str().unwrap(), "--", "true"]));
    assert_refused(&out, &["a-file", "folder"]);
    drop(files);
    let out = output(run(["--input", "/", "--", "true"]));
    assert_refused(&out, &["--share-sensitive"]);
    before.assert_unchanged();
}

#[test]
fn unreadable_input_folder() {
    let closed = open_folder();
    fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let path = closed.path().to_str().unwrap();
    let out =
        output(casulo_as_user(true, ["run", "--host", "native", "--input", path, "--", "true"]));
    assert_refused(&out, &[path, "ermission"]);
}

#[test]
fn bad_sizes() {
    assert_refused(&output(run(["--memory", "0", "--", "true"])), &["memory"]);
    assert_refused(&output(run(["--cpus", "0", "--", "true"])), &["cpus"]);
    assert_refused(&output(run(["--cpus", "99", "--", "true"])), &["cpus"]);
}

#[test]
fn wrong_flags_and_no_command() {
    for args in [vec!["--no-such-flag", "--", "true"], vec![], vec!["--timeout", "abc", "true"]] {
        let out = output(run(args));
        assert_eq!(out.status.code(), Some(125));
        assert!(!out.stderr.is_empty());
    }
}

#[test]
fn no_permission_on_kvm_names_the_group() {
    for host in ["native", "auto"] {
        let out = output(casulo_as_user(false, ["run", "--host", host, "--", "true"]));
        assert_refused(&out, &["/dev/kvm", "kvm", "group"]);
    }
}

/// `command` in a mount namespace in which `script` has changed what is there.
fn without(script: &str, mut command: Command) -> std::process::Output {
    let mut unshare = Command::new("unshare");
    unshare.args(["-m", "sh", "-ec", &format!("{script}; exec \"$@\""), "sh"]);
    unshare.arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            unshare.env(key, value);
        }
    }
    unshare.stdin(std::process::Stdio::null());
    let _ = &mut command;
    output(unshare)
}

#[test]
fn no_kvm() {
    // An empty /dev hides the device in this namespace only.
    let hide = "mount -t tmpfs none /dev; mknod /dev/null c 1 3; chmod 666 /dev/null";
    let out = without(hide, casulo(["run", "--host", "native", "--", "true"]));
    assert_refused(&out, &["/dev/kvm"]);
}

#[test]
fn no_kvm_and_no_qemu() {
    // A home of the same files without an emulated host.
    let bare = folder();
    for part in ["kernel", "agent", "images"] {
        std::os::unix::fs::symlink(home().join(part), bare.path().join(part)).unwrap();
    }
    let hide = "mount -t tmpfs none /dev; mknod /dev/null c 1 3; chmod 666 /dev/null";
    let mut command = casulo(["run", "--host", "auto", "--", "true"]);
    command.env("PATH", "/nonexistent");
    // `sh` and `exec` need no PATH: the program is an absolute path, and the tools ran before.
    let script = format!("PATH=/usr/bin:/bin; {hide}; PATH=/nonexistent");
    let mut unshare = Command::new("/usr/bin/unshare");
    unshare
        .args(["-m", "/bin/sh", "-ec", &format!("{script}; export PATH; exec \"$@\""), "sh"])
        .arg(command.get_program())
        .args(command.get_args())
        .env("CASULO_HOME", bare.path())
        .env_remove("CASULO_EMULATED")
        .stdin(std::process::Stdio::null());
    assert_refused(&output(unshare), &["/dev/kvm", "qemu"]);
}

#[test]
fn a_kernel_that_never_starts_the_agent_is_a_boot_failure() {
    // A boot volume of another image: erofs, but without an agent.
    let home = BrokenHome::new();
    let layer = fs::read(home.path(home.base_layer())).unwrap();
    home.replace("agent/boot.erofs", "agent/agent.json", &layer);
    let out = home.run();
    // The phase, the reason, and the kernel's own words.
    let words = ["starting the guest agent", "the guest kernel panicked", "/init failed"];
    assert_refused(&out, &words);
}

#[test]
fn nothing_is_left_after_a_refusal() {
    let before = Leftovers::now();
    let _ = output(run(["--image", "nope", "--", "true"]));
    let _ = output(run(["--memory", "0", "--", "true"]));
    let _ = output(casulo_as_user(false, ["run", "--host", "native", "--", "true"]));
    // The user's copy of the binaries is made once and stays for other tests.
    let _ = USER;
    drop(before);
}
