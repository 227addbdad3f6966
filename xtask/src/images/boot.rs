//! The boot volume: the guest agent and the empty folders that it mounts things on.

use std::fs;

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
pub(super) fn build() -> Result<()> {
    let mut cargo = std::process::Command::new("cargo");
    cargo.args(["build", "--quiet", "--release", "--package", "casulo-agent"]);
    sh::run(cargo.current_dir(paths::root())).context("the guest agent does not build")?;
    let path = paths::binaries().join("casulo-agent");
    let binary = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut volume = Vec::new();
    erofs::write(&tree(binary)?, 0, [0; 16], &mut volume)?;

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

fn tree(binary: Vec<u8>) -> Result<Tree> {
    let mut tree = Tree::new(0);
    tree.insert(b"init", Inode::new(Kind::File(Data::Bytes(binary)), 0o755, 0))?;
    for folder in FOLDERS {
        tree.insert(folder.as_bytes(), Inode::new(Kind::Dir, 0o755, 0))?;
    }
    Ok(tree)
}
