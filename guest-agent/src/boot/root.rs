//! The root file system of the guest.
//!
//! ```text
//! /dev/vda           boot volume: this program and empty folders
//! /dev/vdb ...       image layers (erofs)        -> lower layers of the overlay
//! tmpfs or scratch   writable layer              -> upper layer, with /tmp, /run and /dev/shm
//! ```
//!
//! All that is kept in memory shares one tmpfs of half the memory, so that the workload meets "no
//! space left" before the VM runs out of memory. After the switch the boot volume and the layers
//! are mounted still, below the new root, where no path leads.

use std::ffi::CStr;
use std::io;
use std::os::unix::fs::PermissionsExt as _;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_bind, mount_move};

use super::{BootArguments, BootError, Trace, step, sys};

/// Empty folders of the boot volume of which one serves to mount things on.
const STAGES: [&str; 4] = ["/run", "/mnt", "/sys", "/proc"];

/// Makes the root file system and enters it.
pub(super) fn make(arguments: BootArguments, trace: &mut Trace) -> Result<(), BootError> {
    // Kernels with CONFIG_DEVTMPFS_MOUNT have done it.
    let devices = mount("dev", "/dev", "devtmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, None);
    ignore(devices, Errno::BUSY).map_err(step("mount the devices"))?;
    let stage = stage()?;
    trace.mark("devices and memory are mounted");
    layers(arguments, stage)?;
    trace.mark("layers are mounted");
    overlay(arguments, stage)?;
    trace.mark("overlay is mounted");
    kernel_file_systems(stage)?;
    trace.mark("kernel file systems are mounted");
    enter(stage)?;
    links()?;
    sys::set_limits().map_err(step("set the limits of processes"))?;
    trace.mark("root is entered");
    Ok(())
}

/// Mounts the tmpfs that holds everything that is kept in memory.
fn stage() -> Result<&'static str, BootError> {
    for stage in STAGES {
        let options = Some(c"mode=0755,size=50%");
        match mount("memory", stage, "tmpfs", MountFlags::empty(), options) {
            Ok(()) => return Ok(stage),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(step(format!("mount a tmpfs at {stage}"))(error)),
        }
    }
    let error = io::Error::from(io::ErrorKind::NotFound);
    Err(step("find an empty folder on the boot volume")(error))
}

fn disk(number: u8) -> String {
    // 25 at most (see `BootArguments::parse`), so it stays a letter.
    format!("/dev/vd{}", char::from(b'b'.saturating_add(number)))
}

fn layers(arguments: BootArguments, stage: &str) -> Result<(), BootError> {
    for number in 0..arguments.layers {
        let (disk, folder) = (disk(number), format!("{stage}/{number}"));
        make_folder(&folder, 0o755)?;
        mount(&disk, &folder, "erofs", MountFlags::RDONLY, None)
            .map_err(step(format!("mount image layer {number} from {disk}")))?;
    }
    if arguments.scratch {
        let (disk, folder) = (disk(arguments.layers), format!("{stage}/scratch"));
        make_folder(&folder, 0o755)?;
        // discard: what is deleted gives its blocks back to the host, of which the disk is a sparse file.
        mount(&disk, &folder, "ext4", MountFlags::NOATIME, Some(c"discard"))
            .map_err(step(format!("mount the scratch disk from {disk}")))?;
    }
    Ok(())
}

fn overlay(arguments: BootArguments, stage: &str) -> Result<(), BootError> {
    let writable = if arguments.scratch { format!("{stage}/scratch") } else { stage.to_owned() };
    let (upper, work) = (format!("{writable}/upper"), format!("{writable}/work"));
    make_folder(&upper, 0o755)?;
    make_folder(&work, 0o755)?;
    let root = format!("{stage}/root");
    make_folder(&root, 0o755)?;
    let lower: Vec<String> = (0..arguments.layers).rev().map(|n| format!("{stage}/{n}")).collect();
    // volatile: nothing of it outlives the VM, so a sync need not reach the disk.
    let options = format!(
        "lowerdir={},upperdir={upper},workdir={work},redirect_dir=on,volatile",
        lower.join(":")
    );
    let options = std::ffi::CString::new(options)
        .map_err(|e| step("mount the overlay")(io::Error::other(e)))?;
    mount("overlay", &root, "overlay", MountFlags::empty(), Some(&options))
        .map_err(step("mount the overlay"))
}

/// A file system of the kernel at a folder of the new root.
struct Kernel {
    kind: &'static str,
    at: &'static str,
    options: Option<&'static CStr>,
}

fn kernel_file_systems(stage: &str) -> Result<(), BootError> {
    let root = format!("{stage}/root");
    make_folder(&format!("{root}/dev"), 0o755)?;
    mount_move("/dev", format!("{root}/dev")).map_err(step("move the devices"))?;
    for name in ["dev/pts", "dev/mqueue"] {
        make_folder(&format!("{root}/{name}"), 0o755)?;
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for Kernel { kind, at, options } in [
        Kernel { kind: "proc", at: "proc", options: None },
        Kernel { kind: "sysfs", at: "sys", options: None },
        Kernel { kind: "cgroup2", at: "sys/fs/cgroup", options: None },
        Kernel { kind: "devpts", at: "dev/pts", options: Some(c"gid=5,mode=620,ptmxmode=666") },
        Kernel { kind: "mqueue", at: "dev/mqueue", options: None },
    ] {
        // Terminals are devices.
        let flags = if kind == "devpts" { flags.difference(MountFlags::NODEV) } else { flags };
        let target = format!("{root}/{at}");
        let attach = || mount(kind, &target, kind, flags, options);
        let mut result = attach();
        if result == Err(Errno::NOENT) {
            // Folders that an image lacks are made in the writable layer.
            make_folder(&target, 0o755)?;
            result = attach();
        }
        result.map_err(step(format!("mount {kind} at /{at}")))?;
    }
    for (name, at, mode) in
        [("shm", "dev/shm", 0o1777), ("tmp", "tmp", 0o1777), ("run", "run", 0o755)]
    {
        let source = format!("{stage}/memory-{name}");
        make_folder(&source, mode)?;
        let target = format!("{root}/{at}");
        if name == "shm" {
            make_folder(&target, mode)?;
        }
        let mut result = mount_bind(source.as_str(), target.as_str());
        if result == Err(Errno::NOENT) {
            make_folder(&target, mode)?;
            result = mount_bind(source.as_str(), target.as_str());
        }
        result.map_err(step(format!("mount memory at /{at}")))?;
    }
    Ok(())
}

fn enter(stage: &str) -> Result<(), BootError> {
    let result = rustix::process::chdir(format!("{stage}/root"))
        .and_then(|()| mount_move(".", "/"))
        .and_then(|()| rustix::process::chroot("."))
        .and_then(|()| rustix::process::chdir("/"));
    result.map_err(step("enter the root file system"))
}

/// Names in /dev that programs expect and devtmpfs does not have.
fn links() -> Result<(), BootError> {
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        ignore(rustix::fs::symlink(target, name), Errno::EXIST)
            .map_err(step(format!("make {name}")))?;
    }
    Ok(())
}

fn ignore(result: rustix::io::Result<()>, harmless: Errno) -> rustix::io::Result<()> {
    match result {
        Err(error) if error == harmless => Ok(()),
        result => result,
    }
}

/// Mounts a new file system.
pub(super) fn mount(
    source: &str,
    target: &str,
    kind: &str,
    flags: MountFlags,
    options: Option<&CStr>,
) -> rustix::io::Result<()> {
    rustix::mount::mount(source, target, kind, flags, options)
}

/// Makes one folder, unless it is there.
pub(super) fn make_folder(path: &str, mode: u32) -> Result<(), BootError> {
    let made = rustix::fs::mkdir(path, Mode::from_raw_mode(mode & 0o777));
    ignore(made, Errno::EXIST).map_err(step(format!("make the folder {path}")))?;
    if mode > 0o777 && made.is_ok() {
        // The umask and mkdir leave out the sticky bit.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(step(format!("make the folder {path}")))?;
    }
    Ok(())
}
