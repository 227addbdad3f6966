//! The recipes of the images, `rootfs/*.toml`, and the lock files with the versions of packages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// A recipe as it is in its file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    name: String,
    from: Option<String>,
    suite: Option<String>,
    epoch: Option<u64>,
    #[serde(default)]
    packages: Vec<String>,
    #[serde(default)]
    exclude: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    workdir: Option<String>,
    user: Option<String>,
    #[serde(default)]
    entrypoint: Vec<String>,
    #[serde(default)]
    users: Vec<User>,
    #[serde(default)]
    folders: Vec<FolderSpec>,
    #[serde(default)]
    files: Vec<FileSpec>,
    /// Whether packages of npm belong to it, by `NAME/package.json` and `NAME/package-lock.json`.
    #[serde(default)]
    npm: bool,
}

/// Packages of npm.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Npm {
    /// `package.json`.
    pub(crate) package: String,
    /// `package-lock.json`, with a hash for each package.
    pub(crate) lock: String,
}

/// A user and a group of the same name and number.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct User {
    /// Name of both.
    pub(crate) name: String,
    /// Number of both.
    pub(crate) id: u32,
    /// Home folder; made only if it is among the folders.
    pub(crate) home: String,
    /// Login shell.
    pub(crate) shell: String,
}

/// A folder to make.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FolderSpec {
    /// Absolute path.
    pub(crate) path: String,
    /// User and group id.
    #[serde(default)]
    pub(crate) owner: u32,
    /// Permission bits, octal.
    #[serde(default = "folder_mode")]
    pub(crate) mode: String,
}

/// A file to write.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileSpec {
    /// Absolute path.
    pub(crate) path: String,
    /// All of it.
    pub(crate) content: String,
    /// User and group id.
    #[serde(default)]
    pub(crate) owner: u32,
    /// Permission bits, octal.
    #[serde(default = "file_mode")]
    pub(crate) mode: String,
}

fn folder_mode() -> String {
    "755".into()
}

fn file_mode() -> String {
    "644".into()
}

/// Permission bits from a recipe's octal text.
pub(crate) fn mode(text: &str) -> Result<u16> {
    let bits = u16::from_str_radix(text, 8).with_context(|| format!("mode {text:?}"))?;
    ensure!(bits <= 0o7777, "mode {text:?} has more than permission bits");
    Ok(bits)
}

/// A recipe with all that it takes from the ones below it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Recipe {
    /// Name of the image.
    pub(crate) name: String,
    /// Names of the recipes below, the lowest first.
    pub(crate) parents: Vec<String>,
    /// Debian release.
    pub(crate) suite: String,
    /// `SOURCE_DATE_EPOCH`: latest time of a file.
    pub(crate) epoch: u64,
    /// Packages by name, sorted; their dependencies come along.
    pub(crate) packages: Vec<String>,
    /// Paths to leave out.
    pub(crate) exclude: Vec<String>,
    /// Environment of commands.
    pub(crate) env: BTreeMap<String, String>,
    /// Working folder.
    pub(crate) workdir: Option<String>,
    /// User of commands.
    pub(crate) user: Option<String>,
    /// Put before commands.
    pub(crate) entrypoint: Vec<String>,
    /// Users to add.
    pub(crate) users: Vec<User>,
    /// Folders to make.
    pub(crate) folders: Vec<FolderSpec>,
    /// Files to write.
    pub(crate) files: Vec<FileSpec>,
    /// `name=version` of every package, sorted; empty: whatever the archive offers.
    pub(crate) lock: Vec<String>,
    /// Packages of npm. Left out where there are none, so that caches without them stay good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) npm: Option<Npm>,
}

impl Recipe {
    /// Reads `NAME.toml` of a folder, the recipes that it builds on, and its lock file.
    pub(crate) fn load(folder: &Path, name: &str) -> Result<Recipe> {
        let mut chain = vec![read(folder, name)?];
        while let Some(parent) = chain.last().and_then(|file| file.from.clone()) {
            ensure!(
                chain.iter().all(|file| file.name != parent),
                "recipe {name} builds on itself through {parent}"
            );
            chain.push(read(folder, &parent)?);
        }
        chain.reverse();
        let mut recipe = merge(&chain)?;
        let lock = folder.join(format!("{name}.lock"));
        if lock.exists() {
            let text = fs::read_to_string(&lock)
                .with_context(|| format!("cannot read {}", lock.display()))?;
            recipe.lock = parse_lock(&text).with_context(|| format!("in {}", lock.display()))?;
        }
        if chain.last().is_some_and(|file| file.npm) {
            let text = |file: &str| {
                let path = folder.join(name).join(file);
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
            };
            recipe.npm =
                Some(Npm { package: text("package.json")?, lock: text("package-lock.json")? });
        }
        Ok(recipe)
    }
}

fn read(folder: &Path, name: &str) -> Result<RecipeFile> {
    let path = folder.join(format!("{name}.toml"));
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: RecipeFile =
        toml::from_str(&text).with_context(|| format!("{} is not a recipe", path.display()))?;
    ensure!(file.name == name, "{} names itself {:?}", path.display(), file.name);
    Ok(file)
}

/// The lowest recipe first. Lists add up; single values and variables of higher ones win.
fn merge(chain: &[RecipeFile]) -> Result<Recipe> {
    let last = |get: fn(&RecipeFile) -> Option<String>| chain.iter().rev().find_map(get);
    let (top, below) = chain.split_last().context("no recipe")?;
    let mut packages: Vec<String> = chain.iter().flat_map(|f| f.packages.clone()).collect();
    packages.sort();
    packages.dedup();
    Ok(Recipe {
        name: top.name.clone(),
        parents: below.iter().map(|file| file.name.clone()).collect(),
        suite: last(|f| f.suite.clone()).with_context(|| format!("{}: no suite", top.name))?,
        epoch: chain
            .iter()
            .rev()
            .find_map(|f| f.epoch)
            .with_context(|| format!("{}: no epoch", top.name))?,
        packages,
        exclude: chain.iter().flat_map(|f| f.exclude.clone()).collect(),
        env: chain.iter().flat_map(|f| f.env.clone()).collect(),
        workdir: last(|f| f.workdir.clone()),
        user: last(|f| f.user.clone()),
        entrypoint: top.entrypoint.clone(),
        users: chain.iter().flat_map(|f| f.users.clone()).collect(),
        folders: chain.iter().flat_map(|f| f.folders.clone()).collect(),
        files: chain.iter().flat_map(|f| f.files.clone()).collect(),
        lock: Vec::new(),
        npm: None,
    })
}

/// Lines `name=version`; `#` begins a comment.
fn parse_lock(text: &str) -> Result<Vec<String>> {
    let mut lock = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let (name, version) =
            line.split_once('=').with_context(|| format!("{line:?} is not name=version"))?;
        let word = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.~:".contains(&b))
        };
        ensure!(word(name) && word(version), "{line:?} is not name=version");
        lock.push(line.to_owned());
    }
    lock.sort();
    Ok(lock)
}

/// Text of a lock file.
pub(crate) fn format_lock(name: &str, packages: &[String]) -> String {
    format!(
        "# Packages of the image `{name}`. Written by `cargo xtask images --update`.\n{}\n",
        packages.join("\n")
    )
}

/// Whether a path matches a pattern: part by part, `*` stands for any run of characters, and a
/// pattern that matches a folder matches all below it.
pub(crate) fn matches(pattern: &str, path: &[u8]) -> bool {
    let mut parts = path.split(|b| *b == b'/');
    pattern.split('/').all(|want| parts.next().is_some_and(|part| glob(want.as_bytes(), part)))
}

fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern.split_first(), text.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), None) => glob(rest, text),
        (Some((b'*', rest)), Some((_, after))) => glob(rest, text) || glob(pattern, after),
        (Some((want, rest)), Some((have, after))) => want == have && glob(rest, after),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(text: &str) -> Result<RecipeFile> {
        Ok(toml::from_str(text)?)
    }

    #[test]
    fn the_recipes_of_the_repository_are_in_order() {
        let folder = crate::paths::root().join("rootfs");
        for name in super::super::IMAGES {
            let recipe = Recipe::load(&folder, name).unwrap();
            assert_eq!(recipe.name, name);
            assert!(recipe.users.iter().any(|user| user.id == 1000));
            for spec in &recipe.folders {
                mode(&spec.mode).unwrap();
            }
            // Each wanted package is pinned.
            for package in &recipe.packages {
                let pin = format!("{package}=");
                assert!(recipe.lock.iter().any(|line| line.starts_with(&pin)), "{package}");
            }
        }
    }

    #[test]
    fn what_lies_below_has_the_same_versions() {
        let folder = crate::paths::root().join("rootfs");
        let dev = Recipe::load(&folder, "dev").unwrap();
        for line in Recipe::load(&folder, "base").unwrap().lock {
            assert!(dev.lock.contains(&line), "dev.lock lacks {line}");
        }
    }

    #[test]
    fn unknown_keys_are_refused() {
        for text in [
            "name = 'x'\npackage = []",
            "name = 'x'\n[[folders]]\npath = '/a'\nuid = 3",
            "name = 'x'\n[[users]]\nname = 'u'\nid = 1\nhome = '/'\nshell = '/bin/sh'\nsudo = true",
        ] {
            assert!(recipe(text).unwrap_err().to_string().contains("unknown field"), "{text}");
        }
    }

    #[test]
    fn higher_recipes_add_and_override() {
        let low = "name = 'low'\nsuite = 's'\nepoch = 5\npackages = ['b']\nexclude = ['x']
            workdir = '/low'\n[env]\nA = '1'\nB = '2'";
        let high = "name = 'high'\nfrom = 'low'\npackages = ['a', 'b']\nexclude = ['y']
            [env]\nB = '3'";
        let merged = merge(&[recipe(low).unwrap(), recipe(high).unwrap()]).unwrap();
        assert_eq!((merged.name.as_str(), merged.suite.as_str(), merged.epoch), ("high", "s", 5));
        assert_eq!(merged.parents, ["low"]);
        assert_eq!(merged.packages, ["a", "b"]);
        assert_eq!(merged.exclude, ["x", "y"]);
        assert_eq!(merged.workdir.as_deref(), Some("/low"));
        assert_eq!(
            merged.env,
            BTreeMap::from([("A", "1"), ("B", "3")].map(|(k, v)| (k.into(), v.into())))
        );
        assert!(merge(&[recipe("name = 'x'").unwrap()]).is_err(), "no suite");
    }

    #[test]
    fn every_package_of_npm_has_a_hash() {
        let folder = crate::paths::root().join("rootfs");
        let npm = Recipe::load(&folder, "node").unwrap().npm.unwrap();
        let lock: serde_json::Value = serde_json::from_str(&npm.lock).unwrap();
        let package: serde_json::Value = serde_json::from_str(&npm.package).unwrap();
        let packages = lock["packages"].as_object().unwrap();
        assert_eq!(packages[""]["dependencies"], package["dependencies"]);
        assert!(packages.len() > 1);
        for (name, package) in packages.iter().filter(|(name, _)| !name.is_empty()) {
            let hash = package["integrity"].as_str().unwrap_or_default();
            assert!(hash.starts_with("sha512-"), "{name}");
        }
        assert!(Recipe::load(&folder, "base").unwrap().npm.is_none());
    }

    #[test]
    fn circles_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.toml"), "name = 'a'\nfrom = 'b'").unwrap();
        fs::write(folder.path().join("b.toml"), "name = 'b'\nfrom = 'a'").unwrap();
        let error = Recipe::load(folder.path(), "a").unwrap_err();
        assert!(error.to_string().contains("builds on itself"), "{error}");
    }

    #[test]
    fn lock_files_are_read_back() {
        let packages = vec!["a=1:2.0-1+b3~x".to_owned(), "lib-c++6=1".to_owned()];
        assert_eq!(parse_lock(&format_lock("x", &packages)).unwrap(), packages);
        for text in ["a", "a=", "=1", "a=1 b=2", "a=1\nPin: origin evil"] {
            assert!(parse_lock(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn patterns_match_part_by_part_and_all_below() {
        for (pattern, path, wanted) in [
            ("usr/share/man", "usr/share/man", true),
            ("usr/share/man", "usr/share/man/man1/ls.1", true),
            ("usr/share/man", "usr/share/mango", false),
            ("usr/share/man", "usr/share", false),
            ("dev/*", "dev/null", true),
            ("dev/*", "dev", false),
            ("etc/*-", "etc/passwd-", true),
            ("etc/*-", "etc/passwd", false),
            ("usr/bin/*lto-dump*", "usr/bin/x86_64-linux-gnu-lto-dump-12", true),
            ("a*b*c", "aXbYc", true),
            ("a*b*c", "aXbY", false),
        ] {
            assert_eq!(matches(pattern, path.as_bytes()), wanted, "{pattern} {path}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("1777").unwrap(), 0o1777);
        assert!(mode("999").is_err());
        assert!(mode("17777").is_err());
    }
}
