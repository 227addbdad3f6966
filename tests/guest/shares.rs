//! The input and output shares.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use crate::support::{
    USER, assert_output, casulo, casulo_as_user, folder, open_folder, output, pattern, run, sha256,
};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn input_is_visible() {
    let input = folder();
    fs::write(input.path().join("a.txt"), "from the host\n").unwrap();
    fs::create_dir(input.path().join("sub")).unwrap();
    fs::write(input.path().join("sub/b.txt"), "b\n").unwrap();
    let script = "cat /workspace/input/a.txt /workspace/input/sub/b.txt; ls /workspace/input";
    let out = output(run(["--input", text(input.path()), "--", "sh", "-c", script]));
    assert_output(&out, 0, "from the host\nb\na.txt\nsub\n", "");
}

#[test]
fn listings_are_whole_for_readers_with_any_buffer() {
    let input = folder();
    // Names of 255 bytes, and folders below, at and above what one reply holds.
    for (name, count, width) in
        [("none", 0, 1), ("some", 25, 3), ("many", 700, 4), ("long", 150, 255)]
    {
        fs::create_dir(input.path().join(name)).unwrap();
        for number in 0..count {
            fs::write(input.path().join(format!("{name}/{number:0>width$}")), "").unwrap();
        }
    }
    let script = r#"
import ctypes, os, shutil, struct
libc = ctypes.CDLL(None, use_errno=True)
def more(fd, size):
    buffer = ctypes.create_string_buffer(size)
    got = libc.syscall(217, fd, buffer, size)
    assert got >= 0, os.strerror(ctypes.get_errno())
    at = 0
    while at < got:
        length = struct.unpack_from('H', buffer.raw, at + 16)[0]
        yield buffer.raw[at + 19:at + length].split(b'\0')[0].decode()
        at += length
def rest(fd, size):
    names = []
    while part := list(more(fd, size)):
        names += part
    return sorted(name for name in names if name not in ('.', '..'))
output = '/workspace/output/copy'
shutil.copytree('/workspace/input', output)
for top in '/workspace/input', output:
    for name, count, width in ('none', 0, 1), ('some', 25, 3), ('many', 700, 4), ('long', 150, 255):
        expected = [str(number).zfill(width) for number in range(count)]
        for size in 300, 4096, 32768, 1 << 20, 300:
            fd = os.open(f'{top}/{name}', os.O_RDONLY)
            assert rest(fd, size) == expected, (top, name, size)
            if top == output:
                # Behind the end, and from the beginning again.
                os.close(os.open(f'{top}/{name}/new', os.O_CREAT | os.O_WRONLY))
                assert rest(fd, size) in ([], ['new']), (name, size)
                os.lseek(fd, 0, os.SEEK_SET)
                assert rest(fd, size) == expected + ['new'], (name, size)
                os.unlink(f'{top}/{name}/new')
            os.close(fd)
shutil.rmtree(output)
print(os.listdir('/workspace/output'))
"#;
    let to = folder();
    let (input, to) = (text(input.path()), text(to.path()));
    let out = output(run(["--input", input, "--output", to, "--", "python3", "-c", script]));
    assert_output(&out, 0, "[]\n", "");
}

#[test]
fn input_cannot_be_written_also_not_by_root_after_a_remount() {
    let input = folder();
    fs::write(input.path().join("a.txt"), "precious\n").unwrap();
    fs::create_dir(input.path().join("dir")).unwrap();
    // By system calls: the image has no `mount`, and a test that cannot remount shows nothing.
    let script = r#"
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
BIND_REMOUNT = 32 | 4096
done = libc.mount(None, b'/workspace/input', None, BIND_REMOUNT, None)
print('remount', done, flush=True)
os.chdir('/workspace/input')
for name, attempt in [
    ('create', lambda: open('new', 'w')),
    ('append', lambda: open('a.txt', 'a')),
    ('truncate', lambda: os.truncate('a.txt', 0)),
    ('unlink', lambda: os.unlink('a.txt')),
    ('rename', lambda: os.rename('a.txt', 'b.txt')),
    ('mkdir', lambda: os.mkdir('d2')),
    ('rmdir', lambda: os.rmdir('dir')),
    ('link', lambda: os.link('a.txt', 'hard')),
    ('symlink', lambda: os.symlink('a.txt', 'soft')),
    ('chmod', lambda: os.chmod('a.txt', 0o777)),
    ('utime', lambda: os.utime('a.txt')),
]:
    try:
        attempt()
        print(name, 'DONE')
    except OSError as error:
        print(name, errno.errorcode[error.errno])
"#;
    let input_path = text(input.path());
    let out = output(run(["--user", "root", "--input", input_path, "--", "python3", "-c", script]));
    let names = [
        "create", "append", "truncate", "unlink", "rename", "mkdir", "rmdir", "link", "symlink",
        "chmod", "utime",
    ];
    let refused: String = names.iter().map(|name| format!("{name} EROFS\n")).collect();
    assert_output(&out, 0, &format!("remount 0\n{refused}"), "");
    let mut names: Vec<_> =
        fs::read_dir(input.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.txt", "dir"]);
    assert_eq!(fs::read(input.path().join("a.txt")).unwrap(), b"precious\n");
}

#[test]
fn a_single_file_can_be_the_input() {
    let input = folder();
    fs::write(input.path().join("data.csv"), "1,2\n").unwrap();
    fs::write(input.path().join("other"), "no\n").unwrap();
    let file = input.path().join("data.csv");
    let out = output(run([
        "--share",
        &format!("{}:/workspace/data.csv:ro", text(&file)),
        "--",
        "cat",
        "/workspace/data.csv",
    ]));
    assert_output(&out, 0, "1,2\n", "");
}

#[test]
fn output_is_on_the_host_with_the_callers_owner() {
    let folder = folder();
    let script = "echo one > a; mkdir -p d/e; echo two > d/e/b; ln -s a link; mv a c; chmod 750 d; \
                  touch gone; rm gone; stat -c %u c";
    let out = output(run(["--output", text(folder.path()), "--", "sh", "-c", script]));
    assert_output(&out, 0, "1000\n", "");
    assert_eq!(fs::read(folder.path().join("c")).unwrap(), b"one\n");
    assert_eq!(fs::read(folder.path().join("d/e/b")).unwrap(), b"two\n");
    assert_eq!(fs::read_link(folder.path().join("link")).unwrap(), Path::new("a"));
    assert!(!folder.path().join("gone").exists());
    let meta = fs::metadata(folder.path().join("c")).unwrap();
    assert_eq!(meta.uid(), rustix::process::getuid().as_raw());
}

#[test]
fn an_ordinary_user_runs_tasks_and_owns_the_output() {
    let folder = open_folder();
    std::os::unix::fs::chown(folder.path(), Some(USER), Some(USER)).unwrap();
    let script = "echo mine > a; id -u";
    let out = output(casulo_as_user(
        true,
        ["run", "--host", "native", "--output", text(folder.path()), "--", "sh", "-c", script],
    ));
    assert_output(&out, 0, "1000\n", "");
    let meta = fs::metadata(folder.path().join("a")).unwrap();
    assert_eq!((meta.uid(), meta.gid()), (USER, USER));
}

#[test]
fn two_hundred_megabytes_are_the_same_both_ways() {
    let (input, out) = (folder(), folder());
    let bytes = pattern(200_000_000, 7);
    fs::write(input.path().join("big"), &bytes).unwrap();
    let sum = sha256(&bytes);
    drop(bytes);
    let script = "sha256sum < /workspace/input/big; cp /workspace/input/big copy; sha256sum < copy";
    let ran = output(run([
        "--input",
        text(input.path()),
        "--output",
        text(out.path()),
        "--",
        "sh",
        "-c",
        script,
    ]));
    assert_output(&ran, 0, &format!("{sum}  -\n{sum}  -\n"), "");
    assert_eq!(sha256(&fs::read(out.path().join("copy")).unwrap()), sum);
}

#[test]
fn without_output_the_folder_is_there_and_lost() {
    let out = output(run(["--", "sh", "-c", "pwd; echo x > a && cat a"]));
    assert_output(&out, 0, "/workspace/output\nx\n", "");
}

#[test]
fn a_full_output_disk_is_enospc_and_the_programs_own_status() {
    let folder = folder();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"])
        .arg(folder.path())
        .status()
        .unwrap();
    assert!(mounted.success());
    let script = "import errno, os\n\
                  try:\n f = open('big', 'wb')\n for _ in range(64): f.write(bytes(1 << 20)); f.flush()\n\
                  except OSError as e:\n print(errno.errorcode[e.errno], flush=True); os._exit(7)\n";
    let out = output(run(["--output", text(folder.path()), "--", "python3", "-c", script]));
    let unmounted = std::process::Command::new("umount").arg(folder.path()).status().unwrap();
    assert!(unmounted.success());
    assert_eq!(out.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&out.stdout), "ENOSPC\n");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("casulo: "), "{stderr}");
}

#[test]
fn the_output_limit_holds() {
    let folder = folder();
    let script = "dd if=/dev/zero of=big bs=64k count=1000 status=none 2>/dev/null || echo refused";
    let out = output(run([
        "--output",
        text(folder.path()),
        "--output-limit",
        "4194304",
        "--",
        "sh",
        "-c",
        script,
    ]));
    assert_eq!(String::from_utf8_lossy(&out.stdout), "refused\n");
    let size = fs::metadata(folder.path().join("big")).unwrap().len();
    assert!(size <= (4 << 20) + (1 << 20), "{size}");
    assert!(size >= 3 << 20, "{size}");
}

#[test]
fn links_in_the_input_lead_nowhere_on_the_host() {
    let (input, secret) = (folder(), folder());
    fs::write(secret.path().join("secret"), "host secret\n").unwrap();
    std::os::unix::fs::symlink(secret.path().join("secret"), input.path().join("leak")).unwrap();
    std::os::unix::fs::symlink(secret.path(), input.path().join("leakdir")).unwrap();
    let script = "cat /workspace/input/leak /workspace/input/leakdir/secret 2>/dev/null; echo end";
    let out =
        output(run(["--user", "root", "--input", text(input.path()), "--", "sh", "-c", script]));
    assert_output(&out, 0, "end\n", "");
}

#[test]
fn a_scratch_disk_takes_more_than_the_memory() {
    let script = "dd if=/dev/zero of=/home/sandbox/big bs=1M count=300 status=none && echo ok";
    let out = output(run(["--memory", "128", "--scratch", "512", "--", "sh", "-c", script]));
    assert_output(&out, 0, "ok\n", "");
}

#[test]
fn a_link_of_the_image_does_not_lead_a_share_over_the_agents_own() {
    let share = folder();
    // `/var/run` is a link to `/run` in the image.
    for place in ["/var/run/casulo", "/var/run/casulo/fs"] {
        let spec = format!("{}:{place}", text(share.path()));
        let out = output(run(["--share", &spec, "--", "true"]));
        crate::support::assert_refused(&out, &["/run/casulo", "belongs to the system"]);
    }
}

/// Reads each file of the input and prints what it got, or the error.
const READ_ALL: &str = r#"
import errno, os
for name in sorted(os.listdir('/workspace/input')):
    path = '/workspace/input/' + name
    try:
        print(name, os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError as error:
        print(name, errno.errorcode[error.errno])
"#;

/// A folder with files of `owner`, of whom nobody else may read some.
fn files_of(owner: u32) -> tempfile::TempDir {
    let folder = open_folder();
    for (name, mode) in [("closed", 0o600), ("open", 0o644)] {
        let file = folder.path().join(name);
        fs::write(&file, name).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        chown(&file, Some(owner), Some(owner)).unwrap();
    }
    let inner = folder.path().join("private");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("secret"), "secret").unwrap();
    fs::set_permissions(&inner, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&inner, Some(owner), Some(owner)).unwrap();
    folder
}

#[test]
fn an_ordinary_user_cannot_read_the_files_of_others_by_a_share() {
    let input = files_of(0);
    for options in [&["--user", "root"][..], &["--input-live"], &[]] {
        let args = ["run", "--host", "native", "--input", text(input.path())];
        let command = ["--", "python3", "-c", READ_ALL];
        let all = args.iter().chain(options).chain(&command);
        let out = output(casulo_as_user(true, all));
        assert_output(&out, 0, "closed EACCES\nopen open\nprivate EACCES\n", "");
    }
}

#[test]
fn root_reads_by_its_rights_as_an_owner_and_not_by_its_capabilities() {
    let input = files_of(USER);
    for options in [&["--user", "root"][..], &["--input-live"], &[]] {
        let args = ["--input", text(input.path())];
        let command = ["--", "python3", "-c", READ_ALL];
        let out = output(run(args.iter().chain(options).chain(&command)));
        assert_output(&out, 0, "closed EACCES\nopen open\nprivate EACCES\n", "");
    }
    // Nor does it write what belongs to others.
    let script = "echo x 2>/dev/null > open || echo refused; cat open";
    let share = format!("{}:/mnt:rw", text(input.path()));
    let workdir = ["--share", &share, "--workdir", "/mnt", "--user", "root"];
    let out = output(run(workdir.iter().chain(&["--", "sh", "-c", script])));
    assert_output(&out, 0, "refused\nopen", "");
}

#[test]
fn attributes_are_on_the_host_where_they_were_asked_for() {
    let script = r#"
import errno, os
for name in [b'user.note', b'trusted.note', b'security.capability', b'system.posix_acl_access']:
    try:
        os.setxattr('file', name, b'from the guest')
        print(name.decode(), os.getxattr('file', name).decode(), os.listxattr('file'))
    except OSError as error:
        print(name.decode(), errno.errorcode[error.errno])
"#;
    let folder = folder();
    fs::write(folder.path().join("file"), "").unwrap();
    let value = |name: &str| {
        let mut value = [0; 64];
        let got = rustix::fs::lgetxattr(folder.path().join("file"), name, &mut value);
        got.map(|length| String::from_utf8_lossy(&value[..length]).into_owned())
    };
    let command = ["--user", "root", "--", "python3", "-c", script];
    let args = ["--output", text(folder.path())];
    let out = output(run(args.iter().chain(&command)));
    // What is no capability the guest's own kernel refuses.
    let refused = "user.note ENOTSUP\ntrusted.note ENOTSUP\nsecurity.capability EINVAL\n\
                   system.posix_acl_access ENOTSUP\n";
    assert_output(&out, 0, refused, "");
    assert!(value("user.note").is_err());

    let args = ["--share-xattr", "--output", text(folder.path())];
    let out = output(run(args.iter().chain(&command)));
    let lines = refused.replace("user.note ENOTSUP", "user.note from the guest ['user.note']");
    assert_output(&out, 0, &lines, "");
    assert_eq!(value("user.note").unwrap(), "from the guest");
    assert!(value("security.capability").is_err() && value("trusted.note").is_err());
}

#[test]
fn doctor_says_what_a_share_on_9p_lacks() {
    let warns = |folder: &Path| {
        let mut command = casulo(["doctor", "--json"]);
        command.current_dir(folder);
        let out = output(command);
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().clone();
        findings.into_iter().find(|finding| finding["name"] == "shares")
    };
    let tmpfs = folder();
    assert_eq!(warns(tmpfs.path()), None);
    // The root file system of the emulated host is there over 9p (`V9FS_MAGIC`).
    let is_9p = |place: &&Path| rustix::fs::statfs(*place).is_ok_and(|fs| fs.f_type == 0x0102_1997);
    let here = [Path::new(env!("CARGO_MANIFEST_DIR")), Path::new("/usr"), Path::new("/")];
    let Some(on_9p) = here.iter().find(|place| is_9p(place)) else {
        eprintln!("nothing lies on 9p here");
        return;
    };
    let warning = warns(on_9p).expect("a warning");
    assert_eq!(warning["state"], "warning");
    assert!(warning["detail"].as_str().unwrap().contains("9p"), "{warning}");
    assert!(warning["fix"].as_str().unwrap().contains("tmpfs"), "{warning}");
}
