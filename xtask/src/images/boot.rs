//! The boot volume: the guest agent and the empty folders that it mounts things on.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};
use casulo_protocol::agent;
use serde::{Deserialize, Serialize};

use super::tree::{Data, Inode, Kind, Tree};
use super::{erofs, store};
use crate::{paths, sh};

/// What the agent mounts things on before it has a root of its own: a tmpfs with all the rest on
/// `/run`.
const FOLDERS: [&str; 4] = ["dev", "proc", "run", "sys"];

/// `agent.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct AgentJson {
    protocol: u32,
    version: String,
    sha256: String,
    size: u64,
}

/// Builds the agent and installs the boot volume.
pub(super) fn build(reproducible: bool) -> Result<()> {
    let path = if reproducible { agent_without_paths()? } else { agent_as_usual()? };
    let binary = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let volume = volume(binary)?;

    let folder = paths::casulo_home()?.join("agent");
    store::folder(&folder)?;
    let json = AgentJson {
        protocol: agent::VERSION,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        sha256: store::digest(&volume),
        size: volume.len() as u64,
    };
    let file = folder.join("boot.erofs");
    if store::digest_file(&file).is_ok_and(|(sha256, _)| sha256 == json.sha256) {
        eprintln!("agent: up to date");
    } else {
        store::create(&file, |out| Ok(out.write_all(&volume)?))?;
        eprintln!("agent: boot volume of {} KiB in {}", json.size / 1024, file.display());
    }
    let mut text = serde_json::to_vec_pretty(&json)?;
    text.push(b'\n');
    store::put(&folder.join("agent.json"), &text)
}

/// A volume whose `/init` is this program.
pub(super) fn volume(init: Vec<u8>) -> Result<Vec<u8>> {
    let mut volume = Vec::new();
    erofs::write(&tree(init)?, 0, [0; 16], &mut volume)?;
    Ok(volume)
}

fn cargo() -> Command {
    let mut cargo = sh::cargo();
    cargo.args(["build", "--quiet", "--release", "--package", "casulo-agent"]);
    cargo.current_dir(paths::root());
    cargo
}

fn agent_as_usual() -> Result<PathBuf> {
    sh::run(&mut cargo()).context("the guest agent does not build")?;
    Ok(paths::binaries().join("casulo-agent"))
}

/// Panic messages name source files below the user's folders. To rename these takes other flags
/// than the rest of the workspace has, and so a target folder of its own.
fn agent_without_paths() -> Result<PathBuf> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")));
    let mut flags = "-Ctarget-feature=+crt-static".to_owned();
    for (from, to) in [(home.context("HOME is not set")?, "/cargo"), (paths::root(), "/casulo")] {
        let from = from.to_str().context("the path of the sources is not UTF-8")?;
        flags.push_str(&format!("\x1f--remap-path-prefix={from}={to}"));
    }
    let target = paths::root().join("target/reproducible");
    let mut cargo = cargo();
    cargo.arg("--locked").arg("--target-dir").arg(&target).env("CARGO_ENCODED_RUSTFLAGS", flags);
    sh::run(&mut cargo).context("the guest agent does not build")?;
    Ok(target.join("x86_64-unknown-linux-gnu/release/casulo-agent"))
}

fn tree(binary: Vec<u8>) -> Result<Tree> {
    let mut tree = Tree::new(0);
    tree.insert(b"init", Inode::new(Kind::File(Data::Bytes(binary)), 0o755, 0))?;
    for folder in FOLDERS {
        tree.insert(folder.as_bytes(), Inode::new(Kind::Dir, 0o755, 0))?;
    }
    Ok(tree)
}
