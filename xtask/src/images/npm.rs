//! The packages of npm in an image: `node_modules` as `npm ci` makes it from a lock file.
//!
//! npm checks each package against the hash in the lock file, and runs no scripts of packages, so what
//! comes out depends on the lock file alone.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::recipe::Npm;
use super::tree::{Data, Inode, Kind, Tree};
use crate::sh;

/// Where the packages are in the guest.
const PLACE: &[u8] = b"opt/node_modules";

/// Adds the packages to a tree.
pub(crate) fn add(tree: &mut Tree, npm: &Npm, work: &Path, epoch: u64) -> Result<()> {
    sh::need(&[("npm", "npm")])?;
    let folder = work.join("npm");
    fs::create_dir(&folder).context("cannot make a folder for npm")?;
    fs::write(folder.join("package.json"), &npm.package)?;
    fs::write(folder.join("package-lock.json"), &npm.lock)?;
    let mut command = Command::new("npm");
    command.args(["ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund"]);
    sh::output(command.current_dir(&folder)).context("npm cannot install the packages")?;
    insert(tree, &folder.join("node_modules"), PLACE, epoch)?;
    fs::remove_dir_all(&folder).context("cannot remove npm's folder")
}

/// Adds a file, link or folder with all that is in it; it belongs to root.
fn insert(tree: &mut Tree, from: &Path, to: &[u8], epoch: u64) -> Result<()> {
    let name = from.display();
    let meta = fs::symlink_metadata(from).with_context(|| format!("cannot look at {name}"))?;
    let executable = meta.permissions().mode() & 0o111 != 0;
    let (kind, mode) = if meta.is_dir() {
        (Kind::Dir, 0o755)
    } else if meta.is_symlink() {
        (Kind::Symlink(fs::read_link(from)?.as_os_str().as_bytes().to_vec()), 0o777)
    } else if meta.is_file() {
        let data = fs::read(from).with_context(|| format!("cannot read {name}"))?;
        (Kind::File(Data::Bytes(data)), if executable { 0o755 } else { 0o644 })
    } else {
        bail!("{name} is neither a file nor a folder");
    };
    tree.insert(to, Inode::new(kind, mode, epoch))?;
    if meta.is_dir() {
        for entry in fs::read_dir(from).with_context(|| format!("cannot list {name}"))? {
            let entry = entry?;
            let below = [to, b"/", entry.file_name().as_bytes()].concat();
            insert(tree, &entry.path(), &below, epoch)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_packages_is_taken_whatever_its_times_and_order() {
        let folder = tempfile::tempdir().unwrap();
        let modules = folder.path().join("node_modules");
        fs::create_dir_all(modules.join("a")).unwrap();
        fs::create_dir_all(modules.join(".bin")).unwrap();
        fs::write(modules.join("a/index.js"), "#!/usr/bin/env node\n").unwrap();
        fs::write(modules.join("a/LICENSE"), "MIT").unwrap();
        let mode = fs::Permissions::from_mode(0o775);
        fs::set_permissions(modules.join("a/index.js"), mode).unwrap();
        std::os::unix::fs::symlink("../a/index.js", modules.join(".bin/a")).unwrap();
        let mut tree = Tree::new(5);
        insert(&mut tree, &modules, PLACE, 5).unwrap();
        let inode = |path: &str| tree.get(format!("opt/node_modules/{path}").as_bytes()).unwrap();
        assert_eq!((inode("a/index.js").mode, inode("a/index.js").mtime), (0o755, 5));
        assert_eq!((inode("a/LICENSE").mode, inode("a").mode), (0o644, 0o755));
        assert!(matches!(&inode(".bin/a").kind, Kind::Symlink(to) if to == b"../a/index.js"));
    }
}
