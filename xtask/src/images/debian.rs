//! A Debian root file system as a tar, made by mmdebstrap.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::progress::Progress;
use super::recipe::Recipe;
use super::tree::Tree;
use crate::sh;

/// What mmdebstrap needs; `newuidmap` only for ordinary users.
const TOOLS: [(&str, &str); 3] = [
    ("mmdebstrap", "mmdebstrap"),
    ("newuidmap", "uidmap"),
    ("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring"),
];

/// Never unpacked. The copyright files stay: whoever passes an image on has to pass them on.
const DPKG_OPTIONS: [&str; 4] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
];

/// Compiles all modules again. With `SOURCE_DATE_EPOCH` set, as it is while packages are installed,
/// Python makes `.pyc` files that are checked against a hash of their source, so that every import
/// in the guest would read the source too; and only some would be there.
const COMPILE: &str = "chroot \"$1\" env -u SOURCE_DATE_EPOCH PYTHONHASHSEED=0 sh -c '\
    ! test -e /usr/bin/python3 || python3 -m compileall -q -f -j 1 --invalidation-mode timestamp \
    /usr/lib/python3.* /usr/lib/python3/dist-packages'";

/// Makes the tar of a recipe's packages in the pinned versions (`name=version`), or others where the
/// archive no longer has them.
pub(crate) fn bootstrap(
    recipe: &Recipe,
    pins: &[String],
    tar: &Path,
    progress: &Progress,
) -> Result<()> {
    let root = sh::output(Command::new("id").arg("-u"))?.trim() == "0";
    let tools = TOOLS.iter().filter(|(tool, _)| !root || *tool != "newuidmap");
    sh::need(&tools.copied().collect::<Vec<_>>())?;

    let pins = preferences(pins)?;
    let suite = &recipe.suite;
    let epoch = recipe.epoch;
    let mut command = Command::new("mmdebstrap");
    command
        .arg(if root { "--mode=root" } else { "--mode=unshare" })
        .args(["--variant=essential", "--format=tar", "--architectures=amd64"])
        .arg("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr")
        .arg(format!("--include={}", recipe.packages.join(",")))
        .args(DPKG_OPTIONS.map(|option| format!("--dpkgopt={option}")))
        .arg(format!("--setup-hook=upload '{}' /etc/apt/preferences.d/pins", pins.path().display()))
        // The times that end up in the tar, before Python notes them in its `.pyc` files.
        .arg(format!(
            "--customize-hook=find \"$1/usr\" \"$1/etc\" -xdev -type f -newermt @{epoch} -exec touch -d @{epoch} {{}} +"
        ))
        .arg(format!("--customize-hook={COMPILE}"))
        .args([suite.as_str(), "-"])
        .arg(format!("deb http://deb.debian.org/debian {suite} main"))
        .arg(format!("deb http://deb.debian.org/debian {suite}-updates main"))
        .arg(format!("deb http://deb.debian.org/debian-security {suite}-security main"))
        .env("SOURCE_DATE_EPOCH", epoch.to_string())
        .env("PYTHONHASHSEED", "0")
        .env("LC_ALL", "C.UTF-8")
        .env("PATH", path())
        .stdin(Stdio::null())
        .stdout(File::create(tar).with_context(|| format!("cannot write {}", tar.display()))?)
        .stderr(Stdio::piped())
        // When it cannot write the tar, it sends SIGHUP to its whole process group. (After the end
        // of this process it ends too, at its next word to the broken pipe, and cleans up.)
        .process_group(0);
    if std::env::var_os("TMPDIR").is_none() {
        // The chroot: too large for a /tmp in memory, and not below a home folder that the users
        // of a user namespace cannot enter.
        command.env("TMPDIR", "/var/tmp");
    }

    let mut child = command.spawn().context("cannot start mmdebstrap")?;
    let mut said = Vec::new();
    for line in BufReader::new(child.stderr.take().context("no stderr")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).trim_end().to_owned();
        match line.strip_prefix("I: ") {
            Some(said) => step(said).map_or((), |step| progress.step(step)),
            // Pages of it, on one line.
            None if line.starts_with("(Reading database") => {}
            None => said.push(line),
        }
    }
    let status = child.wait()?;
    if !status.success() {
        let tail = said.get(said.len().saturating_sub(8)..).unwrap_or_default().join("\n");
        let all = said.join("\n");
        bail!("mmdebstrap failed ({status}): {}\n{tail}", explain(&all, root));
    }
    Ok(())
}

/// What of mmdebstrap's words is of interest, for a person who waits.
fn step(said: &str) -> Option<&str> {
    if said.starts_with("running --customize-hook") && said.contains("compileall") {
        return Some("compiling Python's modules");
    }
    const BEGINNINGS: [&str; 6] =
        ["running apt-get", "downloading", "extracting", "installing", "cleaning", "creating"];
    BEGINNINGS.iter().any(|begin| said.starts_with(begin)).then(|| said.trim_end_matches('.'))
}

/// Users' paths lack the sbin folders on Debian.
fn path() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Preferences for apt, readable by the users of a user namespace.
fn preferences(pins: &[String]) -> Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let mut file = tempfile::Builder::new()
        .prefix("casulo-pins-")
        .permissions(std::fs::Permissions::from_mode(0o644))
        .tempfile()
        .context("cannot make a temporary file")?;
    for (name, version) in pins.iter().filter_map(|line| line.split_once('=')) {
        writeln!(file, "Package: {name}\nPin: version {version}\nPin-Priority: 1001\n")
            .context("cannot write a temporary file")?;
    }
    Ok(file)
}

/// One sentence about a failure that a person can do something about.
fn explain(output: &str, root: bool) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| output.contains(word));
    if says(&["No space left on device"]) {
        "the disk is full; free some space: about 1 GB in /var/tmp (or where TMPDIR says) and 1 GB in the \
         cache folder"
    } else if says(&[
        "Could not resolve",
        "Temporary failure resolving",
        "Failed to fetch",
        "Could not connect",
        "Unable to connect",
    ]) {
        "Debian's archive does not answer; check the network, or the proxy in http_proxy"
    } else if !root && says(&["newuidmap", "newgidmap", "subuid", "subgid", "unshare", "uid_map"]) {
        "this user cannot make a user namespace; add the user to /etc/subuid and /etc/subgid \
         (`sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 NAME`), or run as root"
    } else if says(&["Unable to locate package", "has no installation candidate"]) {
        "the archive does not have one of the recipe's packages"
    } else {
        "its last words follow"
    }
}

/// `name=version` of every installed package, sorted, from dpkg's status file.
pub(crate) fn packages(tree: &Tree) -> Result<Vec<String>> {
    let status = tree.file("var/lib/dpkg/status")?.context("no package is installed")?;
    Ok(parse_status(&String::from_utf8_lossy(&status)))
}

fn parse_status(status: &str) -> Vec<String> {
    let mut packages: Vec<String> = status
        .split("\n\n")
        .filter_map(|paragraph| {
            let field = |name: &str| {
                paragraph.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
            };
            (field("Status:")? == "install ok installed").then_some(())?;
            Some(format!("{}={}", field("Package:")?, field("Version:")?))
        })
        .collect();
    packages.sort();
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_installed_packages_are_listed() {
        let status = "Package: b\nStatus: install ok installed\nVersion: 1:2-3\nDescription: x\n y\n\n\
            Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
            Package: a\nStatus: install ok installed\nVersion: 4\n";
        assert_eq!(parse_status(status), ["a=4", "b=1:2-3"]);
    }

    #[test]
    fn failures_say_what_to_do() {
        for (output, root, wanted) in [
            ("tar: write error: No space left on device", true, "disk is full"),
            (
                "E: Failed to fetch http://deb.debian.org/x  Temporary failure resolving",
                true,
                "network",
            ),
            ("E: unable to pick chroot mode: newuidmap is not installed", false, "/etc/subuid"),
            ("E: Unable to locate package nonsense", true, "recipe's packages"),
        ] {
            assert!(explain(output, root).contains(wanted), "{output}");
        }
    }

    #[test]
    fn preferences_pin_each_package() {
        let file = preferences(&["a=1:2-3".to_owned(), "b=4".to_owned()]).unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert!(
            text.starts_with("Package: a\nPin: version 1:2-3\nPin-Priority: 1001\n\n"),
            "{text}"
        );
        assert_eq!(text.matches("Package:").count(), 2);
    }
}
