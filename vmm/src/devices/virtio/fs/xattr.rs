//! Extended attributes: SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR.
//!
//! Only where the share asks for them, only `user.*`, and so only of regular files and folders: nothing
//! that a host gives a meaning to (capabilities, access lists, security labels) is seen or set.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{FileType, OFlags, XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;

use super::abi::{GetxattrIn, GetxattrOut, SetxattrIn};
use super::names::split_nul;
use super::server::{Output, Server};
use super::wire::Cursor;

/// What the names begin with.
const PREFIX: &[u8] = b"user.";
/// Longest name in bytes, without its NUL (`XATTR_NAME_MAX`).
const NAME_MAX: usize = 255;
/// Largest value, and largest list of names, in bytes (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const VALUE_MAX: usize = 64 << 10;

/// A checked name with its NUL.
fn checked(name: &[u8]) -> Result<Vec<u8>, Errno> {
    if name.len() > NAME_MAX {
        return Err(Errno::RANGE);
    }
    if !name.starts_with(PREFIX) || name.len() == PREFIX.len() {
        return Err(Errno::OPNOTSUPP);
    }
    Ok([name, &[0]].concat())
}

/// The one name that is all of `bytes`.
fn one(bytes: &[u8]) -> Result<Vec<u8>, Errno> {
    let (name, rest) = split_nul(bytes)?;
    if rest.is_empty() { checked(name) } else { Err(Errno::INVAL) }
}

fn c_str(name: &[u8]) -> Result<&CStr, Errno> {
    CStr::from_bytes_with_nul(name).map_err(|_| Errno::INVAL)
}

/// Size of an attribute with its name; 0 if there is none.
fn size_of(file: &OwnedFd, name: &CStr) -> u64 {
    let value = fgetxattr(file, name, &mut vec![0; VALUE_MAX][..]);
    let both = |value: usize| value.saturating_add(name.count_bytes());
    value.map_or(0, |value| u64::try_from(both(value)).unwrap_or(u64::MAX))
}

/// Answers with `value`, or with its size if the guest has room for nothing.
fn answer(room: u32, value: Vec<u8>, output: &mut Output<'_>) -> Result<(), Errno> {
    let size = u32::try_from(value.len()).map_err(|_| Errno::TOOBIG)?;
    if room == 0 {
        output.put(&GetxattrOut { size, padding: 0 });
    } else if size > room {
        return Err(Errno::RANGE);
    } else {
        output.set_body(value);
    }
    Ok(())
}

impl Server {
    /// The file of a node whose attributes may be seen.
    ///
    /// # Errors
    /// `ENOSYS` if no share has attributes, so that the guest does not ask again; `EOPNOTSUPP` if this
    /// one has none.
    fn with_xattr(&mut self, id: u64) -> Result<Arc<OwnedFd>, Errno> {
        if !self.shares.iter().any(|share| share.xattr) {
            return Err(Errno::NOSYS);
        }
        if id == super::abi::ROOT_ID {
            return Err(Errno::OPNOTSUPP);
        }
        let node = self.nodes.get(id)?;
        let kind = node.kind;
        if !self.share(node)?.xattr || !matches!(kind, FileType::RegularFile | FileType::Directory)
        {
            return Err(Errno::OPNOTSUPP);
        }
        // They cannot be read by a path descriptor.
        if let Some(open) = self.handles.shared(id, true, false) {
            return Ok(open);
        }
        let path = self.reach(id)?;
        Ok(Arc::new(self.reopen(&*path, OFlags::RDONLY)?))
    }

    /// GETXATTR
    pub(super) fn get_xattr(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let file = self.with_xattr(id)?;
        let wanted: GetxattrIn = input.take()?;
        let name = one(&input.take_rest(NAME_MAX + 1)?)?;
        let mut value = vec![0; VALUE_MAX];
        let size = fgetxattr(&file, c_str(&name)?, &mut value[..])?;
        value.truncate(size);
        answer(wanted.size, value, output)
    }

    /// LISTXATTR
    pub(super) fn list_xattr(
        &mut self,
        id: u64,
        input: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Errno> {
        let file = self.with_xattr(id)?;
        let wanted: GetxattrIn = input.take()?;
        let mut all = vec![0; VALUE_MAX];
        let size = flistxattr(&file, &mut all[..])?;
        all.truncate(size);
        let names = all.split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(PREFIX));
        answer(wanted.size, names.collect::<Vec<_>>().concat(), output)
    }

    /// SETXATTR
    pub(super) fn set_xattr(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let file = self.with_xattr(id)?;
        self.writable_node(id)?;
        let wanted: SetxattrIn = input.take()?;
        let size = usize::try_from(wanted.size).unwrap_or(usize::MAX);
        if size > VALUE_MAX {
            return Err(Errno::TOOBIG);
        }
        let rest = input.take_rest(NAME_MAX + 1 + VALUE_MAX)?;
        let (name, value) = split_nul(&rest)?;
        let name = checked(name)?;
        let name = c_str(&name)?;
        let known = XattrFlags::CREATE | XattrFlags::REPLACE;
        let flags = XattrFlags::from_bits(wanted.flags).filter(|flags| known.contains(*flags));
        let (Some(flags), true) = (flags, value.len() == size) else { return Err(Errno::INVAL) };
        let before = size_of(&file, name);
        let after = u64::try_from(size.saturating_add(name.count_bytes())).unwrap_or(u64::MAX);
        if self.account(id).is_some() {
            self.settled_account(id)?.allow_allocation(after.saturating_sub(before))?;
        }
        fsetxattr(&file, name, value, flags)?;
        if let Some(account) = self.account(id) {
            account.remove(before);
            account.add(after);
        }
        Ok(())
    }

    /// REMOVEXATTR
    pub(super) fn remove_xattr(&mut self, id: u64, input: &mut Cursor<'_>) -> Result<(), Errno> {
        let file = self.with_xattr(id)?;
        self.writable_node(id)?;
        let name = one(&input.take_rest(NAME_MAX + 1)?)?;
        let name = c_str(&name)?;
        let before = size_of(&file, name);
        fremovexattr(&file, name)?;
        if let Some(account) = self.account(id) {
            account.remove(before);
        }
        Ok(())
    }
}
