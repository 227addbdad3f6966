//! Landlock: the file system is what lies beneath the share roots, and nothing else.
//!
//! On a kernel without Landlock, or with an older version of it, this is weaker or nothing; the file server
//! and seccomp do not depend on it.

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};

use super::JailError;

/// The newest version whose rights are known here; older kernels get what they know.
const VERSION: ABI = ABI::V6;

/// What the file server may reach.
#[derive(Clone, Copy, Debug)]
pub struct Root<'a> {
    /// A folder or a regular file, opened `O_PATH`.
    pub fd: BorrowedFd<'a>,
    /// Whether it is only read.
    pub read_only: bool,
    /// Whether it is a single file.
    pub file: bool,
}

/// Restricts this thread and all that it starts.
pub fn restrict(roots: &[Root<'_>]) -> Result<(), JailError> {
    try_restrict(roots).map_err(|error| JailError::Landlock(error.to_string()))
}

fn try_restrict(roots: &[Root<'_>]) -> Result<(), landlock::RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(VERSION))?
        .handle_access(AccessNet::from_all(VERSION))?
        .scope(Scope::from_all(VERSION))?
        .create()?;
    for root in roots {
        ruleset = ruleset.add_rule(PathBeneath::new(root.fd, rights(root)))?;
    }
    ruleset.restrict_self()?;
    Ok(())
}

fn rights(root: &Root<'_>) -> BitFlags<AccessFs> {
    let mut rights = if root.read_only {
        AccessFs::ReadFile | AccessFs::ReadDir
    } else {
        // Programs on a share run in the guest, never here; device nodes are made nowhere.
        AccessFs::from_all(VERSION)
            & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev)
    };
    if root.file {
        rights &= AccessFs::from_file(VERSION);
    }
    rights
}
