//! The tools of a working day in the output folder, on a tmpfs and on an ext4 disk of the host.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{folder, output, run};

/// A fresh ext4 disk, mounted while this lives.
struct Ext4(tempfile::TempDir);

impl Ext4 {
    fn new(mib: u64) -> Self {
        let folder = folder();
        let disk = folder.path().join("disk");
        fs::File::create(&disk).unwrap().set_len(mib << 20).unwrap();
        fs::create_dir(folder.path().join("mounted")).unwrap();
        let made = Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4"]).arg(&disk).status();
        assert!(made.unwrap().success());
        let place = folder.path().join("mounted");
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&disk).arg(place).status();
        assert!(mounted.unwrap().success(), "the emulated host has no loop devices or no ext4");
        Self(folder)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mounted")
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

/// Runs a script in a folder on each file system, and looks at what it left there.
#[track_caller]
fn on_each(script: &str, stdout: &str, look: impl Fn(&Path)) {
    on("tmpfs", folder().path(), script, stdout, &look);
    on("ext4", &Ext4::new(512).path(), script, stdout, &look);
}

/// Runs a script in a new folder below `path`, and looks at what it left there.
#[track_caller]
fn on(kind: &str, path: &Path, script: &str, stdout: &str, look: impl Fn(&Path)) {
    let out_folder = path.join("out");
    let mut command = run(["--image", "dev", "--memory", "1024", "--cpus", "2", "--output"]);
    command.arg(&out_folder).args(["--", "bash", "-e", "-c", script]);
    let out = output(command);
    let told = String::from_utf8_lossy(&out.stderr);
    assert_eq!(
        (out.status.code(), String::from_utf8_lossy(&out.stdout).as_ref()),
        (Some(0), stdout),
        "on {kind}: {told}"
    );
    look(&out_folder);
}

#[test]
fn git_clones_a_local_repository() {
    let script = r#"
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
        git init -q -b main origin; cd origin
        for n in $(seq 50); do mkdir -p d$((n % 7)); echo "$n" > "d$((n % 7))/f$n"; done
        git add -A; git commit -qm first; chmod +x d1/f1; git mv d2/f2 moved; git commit -qam second
        cd ..; git clone -q origin copy; cd copy
        git checkout -q -b topic HEAD~1; git checkout -q main
        git gc -q; git fsck --strict --no-progress; git status --porcelain
        git log --oneline | wc -l; stat -c %a d1/f1
    "#;
    on_each(script, "2\n755\n", |out| {
        assert_eq!(fs::read(out.join("copy/moved")).unwrap(), b"2\n");
        assert_eq!(fs::metadata(out.join("copy/d1/f1")).unwrap().mode() & 0o111, 0o111);
    });
}

#[test]
fn pip_installs_a_local_wheel() {
    let script = r#"
python3 - <<'END'
import zipfile
with zipfile.ZipFile('tiny-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('tiny/__init__.py', 'def answer():\n    return 42\n')
    info = 'tiny-1.0.dist-info/'
    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n')
    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(info + 'entry_points.txt', '[console_scripts]\ntiny = tiny:answer\n')
    wheel.writestr(info + 'RECORD', '')
END
python3 -m pip install -q --no-index --no-deps --disable-pip-version-check --target site ./tiny-1.0-py3-none-any.whl
PYTHONPATH=site python3 -c 'import tiny; print(tiny.answer())'
"#;
    on_each(script, "42\n", |out| {
        assert!(out.join("site/tiny-1.0.dist-info/METADATA").exists());
        assert_eq!(fs::metadata(out.join("site/bin/tiny")).unwrap().mode() & 0o111, 0o111);
    });
}

#[test]
fn tar_unpacks_ten_thousand_files() {
    // Fewer on the second: an emulated guest takes minutes for ten thousand.
    on("tmpfs", folder().path(), &tar(10_000), "10000\n", |out| unpacked(out, 10_000));
    on("ext4", &Ext4::new(512).path(), &tar(1000), "1000\n", |out| unpacked(out, 1000));
}

fn tar(files: usize) -> String {
    format!(
        r#"
python3 - <<'END'
import io, tarfile
with tarfile.open('/workspace/tmp/many.tar', 'w') as tar:
    for n in range({files}):
        entry = tarfile.TarInfo(f'many/d{{n % 100:02}}/file{{n}}')
        data = f'{{n}}\n'.encode() * (n % 50 + 1)
        entry.size, entry.mtime, entry.mode = len(data), 1000000000 + n, 0o640
        tar.addfile(entry, io.BytesIO(data))
END
tar xf /workspace/tmp/many.tar
find many -type f | wc -l
"#
    )
}

/// Every file is as it was packed.
fn unpacked(out: &Path, files: usize) {
    for n in 0..files {
        let file = out.join(format!("many/d{:02}/file{n}", n % 100));
        let meta = fs::metadata(&file).unwrap();
        assert_eq!(
            (meta.mode() & 0o777, meta.mtime()),
            (0o640, 1_000_000_000 + i64::try_from(n).unwrap())
        );
        assert_eq!(fs::read(file).unwrap(), format!("{n}\n").repeat(n % 50 + 1).as_bytes());
    }
}

#[test]
fn sqlite_serves_two_processes_with_a_write_ahead_log() {
    let script = r#"
cat > work.py <<'END'
import sqlite3, sys
db = sqlite3.connect('data.db', timeout=600, isolation_level=None)
for n in range(100):
    db.execute('begin immediate')
    db.execute('insert into t values (?, ?)', (sys.argv[1], n))
    db.execute('commit')
END
python3 - <<'END'
import sqlite3
db = sqlite3.connect('data.db')
assert db.execute('pragma journal_mode=wal').fetchone() == ('wal',)
db.execute('create table t(who, n)')
END
python3 work.py a & first=$!
python3 work.py b
wait $first
python3 - <<'END'
import sqlite3
db = sqlite3.connect('data.db')
print(*db.execute('pragma integrity_check').fetchone())
print(*db.execute('select count(*), count(distinct who), sum(n) from t').fetchone())
END
"#;
    on_each(script, "ok\n200 2 9900\n", |out| {
        assert!(fs::read(out.join("data.db")).unwrap().starts_with(b"SQLite format 3\0"));
    });
}

#[test]
fn make_builds_a_c_project_in_parallel() {
    let script = r#"
mkdir src
for n in $(seq 20); do echo "int f$n(void) { return $n; }" > src/f$n.c; done
{ for n in $(seq 20); do echo "int f$n(void);"; done
  echo '#include <stdio.h>'; echo 'int main(void) { int s = 0;'
  for n in $(seq 20); do echo "s += f$n();"; done; echo 'printf("%d\n", s); return 0; }'; } > src/main.c
printf 'OBJECTS := $(patsubst src/%%.c,build/%%.o,$(wildcard src/*.c))\nsum: $(OBJECTS)\n\tgcc -o $@ $^\nbuild/%%.o: src/%%.c | build\n\tgcc -O1 -c -o $@ $<\nbuild:\n\tmkdir build\n' > Makefile
make -s -j4; ./sum; make -q && echo current
"#;
    on_each(script, "210\ncurrent\n", |out| {
        assert_eq!(fs::metadata(out.join("sum")).unwrap().mode() & 0o111, 0o111);
        assert_eq!(fs::read_dir(out.join("build")).unwrap().count(), 21);
    });
}

/// What `write` has accepted: told on standard output, byte by byte of a growing file.
const WRITER: &str = "
import os, sys, time
f = os.open('log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for n in range(64):
    os.write(f, bytes([n]) * 65536)
os.write(1, b'up\\n')
time.sleep(1000)
";

#[test]
fn what_write_accepted_is_on_the_host_after_a_timeout_and_after_a_kill() {
    use std::io::Read;
    use std::process::Stdio;

    let ext4 = Ext4::new(64);
    for (n, base) in [folder().keep(), ext4.path()].into_iter().enumerate() {
        for kill in [false, true] {
            let out = base.join(format!("out{n}{kill}"));
            let mut command = run(["--timeout", "60", "--output"]);
            command.arg(&out).args(["--", "python3", "-c", WRITER]);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut word = [0; 3];
            child.stdout.as_mut().unwrap().read_exact(&mut word).unwrap();
            if kill {
                child.kill().unwrap();
            }
            let status = child.wait().unwrap();
            assert_eq!(status.code(), if kill { None } else { Some(124) });
            let written = fs::read(out.join("log")).unwrap();
            let expected: Vec<u8> = (0..64).flat_map(|n| vec![n; 65536]).collect();
            assert!(written == expected, "{} of {} bytes", written.len(), expected.len());
            fs::remove_dir_all(out).unwrap();
        }
        if n == 0 {
            fs::remove_dir(base).unwrap();
        }
    }
}

/// Each check prints its name; the list is compared whole.
const FILES: &str = include_str!("files.py");

#[test]
fn files_are_what_programs_expect() {
    let checks: String = FILES
        .split("@check\ndef ")
        .skip(1)
        .filter_map(|text| Some(format!("{}\n", text.split_once('(')?.0)))
        .collect();
    let script = format!("python3 - <<'END'\n{FILES}\nEND\n");
    on_each(&script, &checks, |out| {
        assert_eq!(&fs::read(out.join("shared2")).unwrap()[5000..5005], b"hello");
        assert_eq!(fs::metadata(out.join("sparse")).unwrap().len(), 65 << 20);
    });
}
