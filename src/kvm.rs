//! The state of `/dev/kvm`, with what to do about it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{Mode, OFlags};

const KVM: &str = "/dev/kvm";

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvmError {
    /// There is no `/dev/kvm`.
    #[error(
        "this machine has no /dev/kvm: it offers no hardware virtualisation, or the module kvm-intel \
         or kvm-amd is not loaded (as root: `modprobe kvm-intel` or `modprobe kvm-amd`). Without it, \
         `--host emulated` runs the task in an emulated host, slowly and without a boundary against \
         hostile code"
    )]
    Absent,
    /// The caller may not open it.
    #[error(
        "no permission to open /dev/kvm: it belongs to the group `{group}`. Join it with \
         `sudo usermod -aG {group} {user}`, then log in again (or run `newgrp {group}`)"
    )]
    Permission {
        /// Group of the device.
        group: String,
        /// Name of the caller.
        user: String,
    },
    /// Opening failed for another reason.
    #[error("cannot open /dev/kvm: {0}")]
    Open(io::Error),
}

/// Opens `/dev/kvm`.
///
/// # Errors
/// It is absent, not permitted, or broken; the message says what to do.
pub fn open() -> Result<OwnedFd, KvmError> {
    use rustix::io::Errno;
    match rustix::fs::open(KVM, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Err(KvmError::Absent),
        Err(Errno::ACCESS | Errno::PERM) => Err(KvmError::Permission {
            group: group(),
            user: name_of("/etc/passwd", rustix::process::geteuid().as_raw())
                .unwrap_or_else(|| "$USER".to_owned()),
        }),
        Err(e) => Err(KvmError::Open(e.into())),
    }
}

/// The group that owns `/dev/kvm`, by name.
pub fn group() -> String {
    let gid = std::fs::metadata(KVM).map(|m| m.gid()).ok();
    gid.and_then(|g| name_of("/etc/group", g).or(Some(g.to_string())))
        .filter(|g| g != "root")
        .unwrap_or_else(|| "kvm".to_owned())
}

/// The name with this id in a file of the format of `/etc/passwd`.
fn name_of(file: &str, id: u32) -> Option<String> {
    find_name(&std::fs::read_to_string(file).ok()?, id)
}

fn find_name(table: &str, id: u32) -> Option<String> {
    table.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let found: u32 = fields.nth(1)?.parse().ok()?;
        (found == id && !name.is_empty()).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let table = "root:x:0:\nkvm:x:104:a,b\nbroken\n:x:7:\n";
        assert_eq!(find_name(table, 104).as_deref(), Some("kvm"));
        assert_eq!(find_name(table, 0).as_deref(), Some("root"));
        assert_eq!(find_name(table, 7), None);
        assert_eq!(find_name(table, 9), None);
    }

    #[test]
    fn permission_error_names_group_and_command() {
        let text = KvmError::Permission { group: "kvm".into(), user: "ann".into() }.to_string();
        assert!(text.contains("`kvm`") && text.contains("sudo usermod -aG kvm ann"));
    }
}
