//! Names from the guest, checked before anything else looks at them.
//!
//! A [`Name`] is one component of a path: it can neither leave the folder it is used in nor mean the
//! folder itself. Every operation that takes a name takes this type.

use std::ffi::{CStr, CString};

use rustix::io::Errno;

/// Longest name in bytes (`NAME_MAX` of Linux).
pub(super) const NAME_MAX: usize = 255;
/// Longest target of a symbolic link in bytes (`PATH_MAX` less its NUL).
pub(super) const TARGET_MAX: usize = 4095;

/// A checked name: 1 to [`NAME_MAX`] bytes, no `/`, no NUL, neither `.` nor `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name(CString);

impl Name {
    /// Checks `bytes`, which are a name without its NUL.
    ///
    /// # Errors
    /// `ENAMETOOLONG` or `EINVAL`.
    pub(super) fn new(bytes: &[u8]) -> Result<Self, Errno> {
        if bytes.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
            return Err(Errno::INVAL);
        }
        CString::new(bytes).map(Self).map_err(|_| Errno::INVAL)
    }

    /// The name for a system call.
    pub(super) fn as_c_str(&self) -> &CStr {
        &self.0
    }
}

/// Takes one NUL-terminated string off the front of `bytes`.
///
/// # Errors
/// `EINVAL` if there is no NUL.
pub(super) fn split_nul(bytes: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let end = bytes.iter().position(|byte| *byte == 0).ok_or(Errno::INVAL)?;
    let (name, rest) = bytes.split_at_checked(end).ok_or(Errno::INVAL)?;
    Ok((name, rest.get(1..).unwrap_or_default()))
}

/// The one name that is all of `bytes`.
pub(super) fn one_name(bytes: &[u8]) -> Result<Name, Errno> {
    let (name, rest) = split_nul(bytes)?;
    if !rest.is_empty() {
        return Err(Errno::INVAL);
    }
    Name::new(name)
}

/// The two names that are all of `bytes`.
pub(super) fn two_names(bytes: &[u8]) -> Result<(Name, Name), Errno> {
    let (first, rest) = split_nul(bytes)?;
    Ok((Name::new(first)?, one_name(rest)?))
}

/// A name and the target of a symbolic link: any bytes but NUL, never looked at by the host.
pub(super) fn name_and_target(bytes: &[u8]) -> Result<(Name, CString), Errno> {
    let (name, rest) = split_nul(bytes)?;
    let name = Name::new(name)?;
    let (target, rest) = split_nul(rest)?;
    if target.is_empty() {
        return Err(Errno::NOENT);
    }
    if target.len() > TARGET_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    if !rest.is_empty() {
        return Err(Errno::INVAL);
    }
    Ok((name, CString::new(target).map_err(|_| Errno::INVAL)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_folder_are_refused() {
        let bad: &[&[u8]] =
            &[b"", b".", b"..", b"/", b"a/b", b"../x", b"/etc", b"a/", b"a\0b", &[b'x'; 256]];
        for name in bad {
            assert!(Name::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn names_of_any_other_bytes_are_taken() {
        let good: &[&[u8]] =
            &[b"a", b"...", b"..x", b".git", b" ", b"\\", b"\xff\xfe", b"a\nb", &[b'x'; 255]];
        for name in good {
            assert_eq!(Name::new(name).unwrap().as_c_str().to_bytes(), *name);
        }
    }

    #[test]
    fn strings_must_end_where_the_message_ends() {
        assert!(one_name(b"a\0").is_ok());
        for bad in [&b"a"[..], b"", b"a\0b", b"a\0\0", b"a\0b\0"] {
            assert!(one_name(bad).is_err(), "{bad:?}");
        }
        assert!(two_names(b"a\0b\0").is_ok());
        for bad in [&b"a\0"[..], b"a\0b", b"a\0..\0", b"a\0b\0c\0"] {
            assert!(two_names(bad).is_err(), "{bad:?}");
        }
        assert!(name_and_target(b"a\0../../etc/passwd\0").is_ok());
        assert!(name_and_target(b"a\0\0").is_err());
    }
}
