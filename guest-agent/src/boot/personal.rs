//! What the host's answer changes: the only part of a boot that differs between tasks.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use casulo_protocol::agent::{FS_TAG, Mount, Personalise};
use casulo_protocol::spec::OUTPUT_PATH;
use rustix::fs::{Gid, Uid};
use rustix::mount::{MountFlags, mount_bind, mount_remount};
use rustix::time::{ClockId, Timespec};

use super::{BootError, Trace, step, sys};
use crate::exec::cgroup::Cgroups;
use crate::exec::user::DEFAULT_UID;
use crate::shares::Shares;

/// Where the virtio-fs device is mounted, in a folder that only root may enter.
const DEVICE_FOLDER: &str = "/run/casulo";
const DEVICE: &str = "/run/casulo/fs";
/// Memory in a tmpfs beside the shares.
const MEMORY_PATH: &str = "/workspace/tmp";

/// Applies the host's answer; gives the writable shares.
pub(super) fn apply(
    personalise: &Personalise,
    cgroups: &Cgroups,
    trace: &mut Trace,
) -> Result<Shares, BootError> {
    let entropy = from_hex(&personalise.entropy)
        .map_err(|e| step("read the entropy")(io::Error::other(e)))?;
    if !entropy.is_empty() {
        sys::add_entropy(&entropy).map_err(step("add entropy"))?;
    }
    set_clock(personalise.clock_ns)?;
    set_name(&personalise.hostname)?;
    trace.mark("entropy, clock and name are set");
    let memory = personalise.max_memory.unwrap_or_else(workload_memory);
    cgroups.limit(memory, personalise.max_processes).map_err(step("limit the workload"))?;
    trace.mark("limits are set");
    workspace(&personalise.mounts)?;
    trace.mark("workspace is there");
    let shares = shares(&personalise.mounts)?;
    trace.mark("shares are mounted");
    Ok(shares)
}

fn from_hex(text: &str) -> Result<Vec<u8>, &'static str> {
    let digit = |b: &u8| char::from(*b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    if text.len() > 2 * sys::MAX_ENTROPY {
        return Err("it is too long");
    }
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return Err("its number of digits is odd");
    };
    pairs
        .iter()
        .map(|[high, low]| Some(digit(high)? << 4 | digit(low)?))
        .collect::<Option<_>>()
        .ok_or("it has a character that is no hexadecimal digit")
}

fn set_clock(nanoseconds: u64) -> Result<(), BootError> {
    let time = Timespec {
        tv_sec: i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(nanoseconds % 1_000_000_000).unwrap_or(0),
    };
    rustix::time::clock_settime(ClockId::Realtime, time).map_err(step("set the clock"))
}

fn set_name(name: &str) -> Result<(), BootError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
    if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
        let error = io::Error::other("a host name has 1 to 64 letters, digits, dots and hyphens");
        return Err(step(format!("use the name {name:?}"))(error));
    }
    rustix::system::sethostname(name.as_bytes()).map_err(step("set the host name"))?;
    // Without a resolver this is how the guest's own name becomes an address. An image with a
    // read-only or odd /etc is not a reason to fail.
    let hosts = format!("127.0.0.1 localhost {name}\n::1 localhost ip6-localhost ip6-loopback\n");
    let _ = std::fs::write("/etc/hosts", hosts);
    Ok(())
}

/// What the VM has, less what the kernel and the agent need to stay responsive while the workload
/// is at its limit.
fn workload_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let total = info.totalram.saturating_mul(info.mem_unit.into());
    workload_share(total)
}

fn workload_share(total: u64) -> u64 {
    const RESERVE: u64 = 12 << 20;
    total.saturating_sub(RESERVE + total / 32).max(total / 2)
}

/// Makes /workspace with its tmpfs, and the output folder if it is no share.
fn workspace(mounts: &[Mount]) -> Result<(), BootError> {
    make_folders(Path::new(MEMORY_PATH))?;
    let source = "/run/casulo/tmp";
    super::root::make_folder(DEVICE_FOLDER, 0o700)?;
    super::root::make_folder(source, 0o1777)?;
    mount_bind(source, MEMORY_PATH).map_err(step(format!("mount memory at {MEMORY_PATH}")))?;
    if !mounts.iter().any(|m| Path::new(&m.target) == Path::new(OUTPUT_PATH)) {
        make_folders(Path::new(OUTPUT_PATH))?;
        let (user, group) = (Uid::from_raw(DEFAULT_UID), Gid::from_raw(DEFAULT_UID));
        rustix::fs::chown(OUTPUT_PATH, Some(user), Some(group))
            .map_err(step(format!("give {OUTPUT_PATH} to the user")))?;
    }
    Ok(())
}

/// Mounts the device once and binds each share to its place.
fn shares(mounts: &[Mount]) -> Result<Shares, BootError> {
    if mounts.is_empty() {
        return Ok(Shares::default());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    super::root::make_folder(DEVICE, 0o700)?;
    super::root::mount(FS_TAG, DEVICE, "virtiofs", flags, None)
        .map_err(step("mount the shares"))?;
    let mut writable = Vec::new();
    for Mount { share, target, read_only, file } in mounts {
        // A share is a child of the device's root, and nothing else.
        if share.is_empty() || share.contains('/') || share == "." || share == ".." {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(step(format!("mount the share {share:?}"))(error));
        }
        let source = PathBuf::from(DEVICE).join(share);
        let place = Path::new(target);
        if !place.is_absolute() || place == Path::new("/") {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(step(format!("mount a share at {target:?}"))(error));
        }
        make_target(place, *file)?;
        // A link of the image may lead elsewhere than the host could see when it checked the place.
        let real = std::fs::canonicalize(place).map_err(step(format!("find {target}")))?;
        if is_reserved(&real) {
            let text = format!("it leads to {}, which belongs to the system", real.display());
            return Err(step(format!("mount a share at {target}"))(io::Error::other(text)));
        }
        mount_bind(&source, place).map_err(step(format!("mount a share at {target}")))?;
        if *read_only {
            mount_remount(place, flags | MountFlags::BIND | MountFlags::RDONLY, "")
                .map_err(step(format!("make the share at {target} read-only")))?;
        } else {
            writable.push(source);
        }
    }
    Ok(Shares::new(writable))
}

/// Whether something mounted there would cover what the system or the agent needs.
fn is_reserved(place: &Path) -> bool {
    let system = ["/proc", "/sys", "/dev", DEVICE_FOLDER].map(Path::new);
    system.iter().any(|s| place.starts_with(s) || s.starts_with(place))
}

fn make_target(target: &Path, file: bool) -> Result<(), BootError> {
    if !file {
        return make_folders(target);
    }
    if let Some(parent) = target.parent() {
        make_folders(parent)?;
    }
    let made = std::fs::OpenOptions::new().append(true).create(true).open(target);
    // One that cannot be opened for writing may still be a place to mount on.
    made.map(drop)
        .or_else(|error| if target.exists() { Ok(()) } else { Err(error) })
        .map_err(step(format!("make the file {}", target.display())))
}

fn make_folders(path: &Path) -> Result<(), BootError> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_folders(parent)?;
    }
    let made = std::fs::create_dir(path);
    made.map_err(step(format!("make the folder {}", path.display())))?;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).map_err(step(format!("open {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_pairs_of_digits() {
        assert_eq!(from_hex("00ff1A").unwrap(), [0, 255, 26]);
        assert!(from_hex("").unwrap().is_empty());
        for bad in ["0", "0g", "é", &"00".repeat(sys::MAX_ENTROPY + 1)] {
            assert!(from_hex(bad).is_err(), "{bad:.10}");
        }
    }

    #[test]
    fn shares_do_not_cover_the_system() {
        for place in ["/", "/proc", "/dev/shm/x", "/run", "/run/casulo", "/run/casulo/fs/input"] {
            assert!(is_reserved(Path::new(place)), "{place}");
        }
        for place in ["/run/mine", "/workspace/input", "/device", "/home/x"] {
            assert!(!is_reserved(Path::new(place)), "{place}");
        }
    }

    #[test]
    fn the_agent_keeps_a_reserve() {
        assert_eq!(workload_share(512 << 20), (512 - 12 - 16) << 20);
        assert_eq!(workload_share(128 << 20), (128 - 12 - 4) << 20);
        assert_eq!(workload_share(16 << 20), 8 << 20);
    }
}
