//! Whom a command runs as: the image's own `/etc/passwd` and `/etc/group`, read by hand because a
//! static binary must not load NSS modules of an image it does not know.

use std::io;
use std::path::Path;

/// User of commands when the caller names none.
pub const DEFAULT_UID: u32 = 1000;

/// Longest account file that is read; the rest of a longer one is ignored.
const MAX_FILE: u64 = 1 << 20;

/// A resolved user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Name, or the uid in decimal when the image has no account for it.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home folder; `/` when the image has no account.
    pub home: String,
    /// Login shell; `/bin/sh` when the image has no account.
    pub shell: String,
}

/// Why a user cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// No account of that name.
    #[error("the image has no user {0:?}; use a name of its /etc/passwd or a number")]
    NoUser(String),
    /// No group of that name.
    #[error("the image has no group {0:?}; use a name of its /etc/group or a number")]
    NoGroup(String),
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

fn accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|n| !n.is_empty())?;
        let _password = fields.next()?;
        let uid = fields.next()?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let _comment = fields.next()?;
        let home = fields.next().filter(|h| !h.is_empty()).unwrap_or("/");
        let shell = fields.next().filter(|s| !s.is_empty()).unwrap_or("/bin/sh");
        Some(Account { name, uid, gid, home, shell })
    })
}

fn groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|n| !n.is_empty())?;
        let _password = fields.next()?;
        let gid = fields.next()?.parse().ok()?;
        Some((name, gid, fields.next().unwrap_or_default()))
    })
}

/// Resolves `spec` (empty, name, uid, or either with `:group`) against the text of the two files.
///
/// A number without an account is taken as it is, with a group of the same number.
///
/// # Errors
/// A name that the files do not have.
pub fn resolve(spec: &str, passwd: &str, group: &str) -> Result<User, UserError> {
    let (who, wanted_group) = match spec.split_once(':') {
        Some((who, group)) => (who, Some(group).filter(|g| !g.is_empty())),
        None => (spec, None),
    };
    let default = DEFAULT_UID.to_string();
    let who = if who.is_empty() { default.as_str() } else { who };
    // A name wins over a number, as in chown(1).
    let account = accounts(passwd)
        .find(|a| a.name == who)
        .or_else(|| who.parse().ok().and_then(|uid: u32| accounts(passwd).find(|a| a.uid == uid)));
    let mut user = match account {
        Some(a) => User {
            name: a.name.to_owned(),
            uid: a.uid,
            gid: a.gid,
            groups: Vec::new(),
            home: a.home.to_owned(),
            shell: a.shell.to_owned(),
        },
        None => {
            let uid = who.parse().map_err(|_| UserError::NoUser(who.to_owned()))?;
            User {
                name: who.to_owned(),
                uid,
                gid: uid,
                groups: Vec::new(),
                home: "/".to_owned(),
                shell: "/bin/sh".to_owned(),
            }
        }
    };
    if let Some(wanted) = wanted_group {
        user.gid = groups(group)
            .find(|(name, ..)| *name == wanted)
            .map(|(_, gid, _)| gid)
            .or_else(|| wanted.parse().ok())
            .ok_or_else(|| UserError::NoGroup(wanted.to_owned()))?;
    } else {
        user.groups = groups(group)
            .filter(|(_, gid, members)| {
                *gid != user.gid && members.split(',').any(|m| m == user.name)
            })
            .map(|(_, gid, _)| gid)
            .take(64)
            .collect();
    }
    Ok(user)
}

/// Resolves `spec` against the files below `root`; a file that is not there counts as empty.
///
/// # Errors
/// A name that the files do not have.
pub fn lookup(spec: &str, root: &Path) -> Result<User, UserError> {
    let text = |name: &str| read_bounded(&root.join(name)).unwrap_or_default();
    resolve(spec, &text("etc/passwd"), &text("etc/group"))
}

fn read_bounded(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    // NONBLOCK: a workload that is root could put a FIFO here.
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        broken line\n\
        daemon:x:1:1::/usr/sbin:/usr/sbin/nologin\n\
        big:x:99999999999:1::/:\n\
        user:x:1000:1000:,,,:/home/user:/bin/bash\n\
        bare:x:7:8:::\n\
        2000:x:5:5::/odd:/bin/sh\n";
    const GROUP: &str =
        "root:x:0:\nstaff:x:50:user,bare\nuser:x:1000:user\nvideo:x:44:other,user\nbad:x:no:user\n";

    fn found(spec: &str) -> User {
        resolve(spec, PASSWD, GROUP).unwrap()
    }

    #[test]
    fn empty_means_uid_1000_with_its_supplementary_groups() {
        let user = found("");
        assert_eq!((user.uid, user.gid), (1000, 1000));
        assert_eq!(user.name, "user");
        assert_eq!(user.home, "/home/user");
        assert_eq!(user.groups, [50, 44]);
        assert_eq!(found("1000"), user);
        assert_eq!(found("user"), user);
    }

    #[test]
    fn a_group_of_ones_own_replaces_all_groups() {
        let user = found("user:staff");
        assert_eq!((user.uid, user.gid), (1000, 50));
        assert!(user.groups.is_empty());
        assert_eq!(found(":0").gid, 0);
        assert_eq!(found("root:1234").gid, 1234);
    }

    #[test]
    fn numbers_need_no_account_and_names_do() {
        let user = found("4242");
        assert_eq!((user.uid, user.gid, user.home.as_str()), (4242, 4242, "/"));
        assert_eq!(resolve("nobody", PASSWD, GROUP), Err(UserError::NoUser("nobody".to_owned())));
        assert_eq!(resolve("-1", PASSWD, GROUP), Err(UserError::NoUser("-1".to_owned())));
        assert_eq!(
            resolve("user:wheel", PASSWD, GROUP),
            Err(UserError::NoGroup("wheel".to_owned()))
        );
        assert_eq!(resolve("", "", "").unwrap().uid, 1000);
    }

    #[test]
    fn names_win_over_numbers_and_empty_fields_have_defaults() {
        assert_eq!(found("2000").uid, 5);
        let bare = found("bare");
        assert_eq!((bare.home.as_str(), bare.shell.as_str()), ("/", "/bin/sh"));
    }
}
