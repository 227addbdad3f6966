//! Disks of a guest: image layers and the scratch disk.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use crate::memory::Steps;
use crate::support::{assert_output, folder, output, run, wait_for};

const MIB: u64 = 1 << 20;

/// Bytes that the scratch disk of a VMM takes on the host: a file without a name and of this size.
fn scratch_bytes(vmm: u32, size: u64) -> u64 {
    let files = fs::read_dir(format!("/proc/{vmm}/fd")).unwrap().flatten();
    let sizes = files.filter_map(|entry| {
        let metadata = fs::metadata(entry.path()).ok()?;
        let found = metadata.is_file() && metadata.nlink() == 0 && metadata.len() == size;
        found.then(|| metadata.blocks() * 512)
    });
    let sizes: Vec<u64> = sizes.collect();
    assert_eq!(sizes.len(), 1, "one scratch disk");
    sizes[0]
}

#[test]
fn deleted_files_of_the_scratch_disk_give_their_blocks_back_to_the_host() {
    let program = "import os, sys\n\
        name = os.path.expanduser('~/big')\n\
        input(); print('ready')\n\
        input(); f = open(name, 'wb'); f.write(b'x' * (100 << 20)); f.close(); os.sync(); \
        print('written')\n\
        input(); os.remove(name); os.sync(); print('removed')\n\
        sys.stdin.read()";
    let mut guest = Steps::start(&["--scratch", "512"], program);
    let size = 512 * MIB;
    assert_eq!(guest.step(), "ready");
    let empty = scratch_bytes(guest.vmm(), size);
    assert_eq!(guest.step(), "written");
    let full = scratch_bytes(guest.vmm(), size);
    assert!(full >= empty + 100 * MIB, "{empty} -> {full}");
    assert_eq!(guest.step(), "removed");
    let after = wait_for("the return of the blocks", || {
        let now = scratch_bytes(guest.vmm(), size);
        (now <= empty + 8 * MIB).then_some(now)
    });
    eprintln!("scratch disk: {} MiB, {} MiB, {} MiB", empty / MIB, full / MIB, after / MIB);
    guest.finish();
}

#[test]
fn a_full_disk_of_the_host_is_an_io_error_and_the_guest_goes_on() {
    let folder = folder();
    let mount = |program: &str, options: &[&str]| {
        let status = Command::new(program).args(options).arg(folder.path()).status().unwrap();
        assert!(status.success());
    };
    mount("mount", &["-t", "tmpfs", "-o", "size=64m", "tmpfs"]);
    // The root is a volatile overlay: `sync` writes, `fsync` only tells whether that ever failed. When the
    // large file is gone, its blocks are the host's again, and the disk takes others.
    let program = "import errno, os\n\
        def put(name, size):\n\
        \x20with open(name, 'wb') as f: f.write(b'x' * size)\n\
        \x20os.sync()\n\
        name = os.path.expanduser('~/big')\n\
        put(name, 100 << 20)\n\
        f = os.open(name, os.O_RDONLY)\n\
        try: os.fsync(f)\n\
        except OSError as e: print(errno.errorcode[e.errno])\n\
        os.close(f); os.remove(name); os.sync()\n\
        put(name + '2', 8 << 20)\n\
        f = os.open(name + '2', os.O_RDONLY); os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)\n\
        print('and on', os.read(f, 8 << 20) == b'x' * (8 << 20))";
    let mut command = run(["--scratch", "512", "--", "python3", "-c", program]);
    command.env("TMPDIR", folder.path());
    let out = output(command);
    mount("umount", &[]);
    assert_output(&out, 0, "EIO\nand on True\n", "");
}

#[test]
fn an_image_of_two_layers_and_a_scratch_disk_are_four_disks() {
    let script = "cat /sys/block/vd*/ro; sha256sum /usr/bin/python3 | cut -c1-8 | wc -c; \
                  cd; dd if=/dev/urandom of=a bs=1M count=32 status=none && cp a b && sync && \
                  echo 3 > /proc/sys/vm/drop_caches; cmp a b && echo same";
    let out = output(run([
        "--image",
        "dev",
        "--scratch",
        "128",
        "--user",
        "root",
        "--",
        "sh",
        "-c",
        script,
    ]));
    assert_output(&out, 0, "1\n1\n1\n0\n9\nsame\n", "");
}
