//! What a server offered when it was first used: its tools and its instructions, which a model reads as
//! part of its own. A later offer that differs is refused until the user accepts it.
//!
//! The offer is kept as it came, hidden characters included, so that a change of those is a change too.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::image::hex;
use crate::text;

/// Format of the files.
const FORMAT: u32 = 1;
/// Most bytes of a file; what a server may offer is far smaller.
const MAX_FILE: u64 = 16 << 20;
/// Most names of tools in a message.
const MAX_NAMES: usize = 10;

/// Whose offer it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Identity {
    /// The image, as the user named it, or whose sandbox the server is in.
    pub(super) image: String,
    /// Program and arguments.
    pub(super) command: Vec<String>,
    /// The server's name among several.
    pub(super) name: String,
    /// What of the host it can read and not write, in which its program may be: the same command is
    /// another server in another project.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) files: Vec<PathBuf>,
}

/// What a server offers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Offer {
    /// The server's words to the model.
    pub(super) instructions: Option<String>,
    /// Each tool by its name: title, description, schemas and annotations.
    pub(super) tools: BTreeMap<String, Value>,
}

/// A file with an accepted offer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    format: u32,
    #[serde(flatten)]
    server: Identity,
    /// SHA-256 of the offer in canonical form.
    sha256: String,
    offer: Offer,
}

/// Why an offer is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum PinError {
    /// It is not the one that was accepted.
    #[error(
        "the server's tools are not those that were accepted: {changes}. Compare the accepted ones in \
         {file} with what it offers now, in {offered}; --accept-tools accepts that"
    )]
    Changed {
        /// What differs.
        changes: String,
        /// Where the accepted offer is.
        file: PathBuf,
        /// Where the new one is.
        offered: PathBuf,
    },
    /// The accepted offer cannot be read.
    #[error(
        "cannot read the accepted tools in {file}: {why}; --accept-tools accepts what the server \
         offers now"
    )]
    Unreadable {
        /// Where it is.
        file: PathBuf,
        /// Why.
        why: String,
    },
    /// The offer cannot be kept.
    #[error("cannot keep the accepted tools in {file}: {why}")]
    Unwritable {
        /// Where.
        file: PathBuf,
        /// Why.
        why: String,
    },
}

impl Offer {
    /// From `tools/list` as it came. Of two tools with one name the last counts here; neither is shown.
    pub(super) fn new(instructions: Option<String>, tools: &[Value]) -> Self {
        const KEYS: [&str; 5] =
            ["title", "description", "inputSchema", "outputSchema", "annotations"];
        let tools = tools.iter().map(|tool| {
            let name = tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
            let kept =
                KEYS.iter().filter_map(|key| Some(((*key).to_owned(), tool.get(key)?.clone())));
            (name, Value::Object(kept.collect()))
        });
        Self { instructions, tools: tools.collect() }
    }

    /// SHA-256 of the offer as JSON with sorted keys and no spaces.
    fn digest(&self) -> String {
        // serde_json's maps are sorted by key.
        let json = serde_json::to_value(self).unwrap_or_default().to_string();
        hex(&Sha256::digest(json.as_bytes()))
    }

    /// What `new` has that this has not, and the reverse, in words.
    fn changes(&self, new: &Offer) -> String {
        let named = |what: &str, names: Vec<&String>| {
            if names.is_empty() {
                return None;
            }
            let list = names.iter().take(MAX_NAMES);
            let list: Vec<String> = list.map(|name| text::brief(name, 100)).collect();
            let more = names.len().saturating_sub(MAX_NAMES);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            Some(format!("{what} {}{more}", list.join(", ")))
        };
        let (old_tools, new_tools) = (&self.tools, &new.tools);
        let added = new_tools.keys().filter(|name| !old_tools.contains_key(*name)).collect();
        let removed = old_tools.keys().filter(|name| !new_tools.contains_key(*name)).collect();
        let changed = old_tools
            .iter()
            .filter(|(name, tool)| new_tools.get(*name).is_some_and(|new| new != *tool))
            .map(|(name, _)| name)
            .collect();
        let instructions = self.instructions != new.instructions;
        let parts = [
            named("added", added),
            named("removed", removed),
            named("changed", changed),
            instructions.then(|| "other instructions".to_owned()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}

/// The accepted offers, a file each.
#[derive(Clone, Debug)]
pub(super) struct Pins {
    folder: PathBuf,
}

impl Pins {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn file(&self, server: &Identity) -> PathBuf {
        let key = serde_json::to_value(server).unwrap_or_default().to_string();
        self.folder.join(format!("{}.json", hex(&Sha256::digest(key.as_bytes()))))
    }

    /// Compares an offer with the accepted one; the first one is accepted, and with `accept` any: then it
    /// gives what changed, if anything did.
    ///
    /// # Errors
    /// It differs, or the file cannot be read or written.
    pub(super) fn check(
        &self,
        server: &Identity,
        offer: &Offer,
        accept: bool,
    ) -> Result<Option<String>, PinError> {
        let file = self.file(server);
        let known = match read(&file) {
            Ok(pin) => pin,
            Err(_) if accept => None,
            Err(why) => return Err(PinError::Unreadable { file, why }),
        };
        let sha256 = offer.digest();
        if known.as_ref().is_some_and(|pin| pin.sha256 == sha256) {
            return Ok(None);
        }
        let offered = file.with_extension("offered.json");
        let changes = known.map(|pin| pin.offer.changes(offer));
        let pin = Pin { format: FORMAT, server: server.clone(), sha256, offer: offer.clone() };
        match changes {
            Some(changes) if !accept => {
                // Where it cannot be written there is none to look at, and it is refused all the same.
                let _ = self.write(&offered, &pin);
                Err(PinError::Changed { changes, file, offered })
            }
            changes => {
                let written = self.write(&file, &pin);
                written.map_err(|error| PinError::Unwritable { file, why: error.to_string() })?;
                // If there is one.
                let _ = std::fs::remove_file(&offered);
                Ok(changes)
            }
        }
    }

    /// All or nothing, also when two processes write at once.
    fn write(&self, file: &Path, pin: &Pin) -> std::io::Result<()> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let number = crate::runtime::random::<8>().map_err(std::io::Error::other)?;
        let temporary = file.with_extension(hex(&number));
        let mut options = std::fs::OpenOptions::new();
        let mut out = options.write(true).create_new(true).mode(0o600).open(&temporary)?;
        let mut json = serde_json::to_vec_pretty(pin)?;
        json.push(b'\n');
        let written = out.write_all(&json).and_then(|()| out.sync_all());
        let written = written.and_then(|()| std::fs::rename(&temporary, file));
        if written.is_err() {
            // What is left of it is named after nothing that is looked for.
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }
}

/// The accepted offer, if there is one.
fn read(file: &Path) -> Result<Option<Pin>, String> {
    use std::io::Read;
    let open = match std::fs::File::open(file) {
        Ok(open) => open,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let mut json = Vec::new();
    open.take(MAX_FILE).read_to_end(&mut json).map_err(|error| error.to_string())?;
    let pin: Pin = serde_json::from_slice(&json).map_err(|error| error.to_string())?;
    if pin.format != FORMAT {
        return Err(format!("it has format {}, and this Casulo knows {FORMAT}", pin.format));
    }
    if pin.sha256 != pin.offer.digest() {
        return Err("its digest is not that of its content".to_owned());
    }
    Ok(Some(pin))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn identity(name: &str) -> Identity {
        let command = vec!["x".into()];
        Identity { image: "base".into(), command, name: name.into(), files: Vec::new() }
    }

    fn offer(tools: Value) -> Offer {
        Offer::new(Some("hi".into()), tools.as_array().unwrap())
    }

    #[test]
    fn the_first_offer_is_kept_and_a_change_needs_to_be_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let pins = Pins::new(folder.path().join("wrap/pins"));
        let first = offer(json!([
            {"name": "a", "description": "x", "inputSchema": {"type": "object"}},
            {"name": "b", "annotations": {"readOnlyHint": true}},
        ]));
        pins.check(&identity(""), &first, false).unwrap();
        // The same in another order, and with what is no part of it.
        let same = offer(json!([
            {"annotations": {"readOnlyHint": true}, "name": "b", "_meta": {"n": 1}},
            {"inputSchema": {"type": "object"}, "description": "x", "name": "a"},
        ]));
        pins.check(&identity(""), &same, false).unwrap();
        let evil = offer(json!([
            {"name": "a", "description": "x\u{200b}", "inputSchema": {"type": "object"}},
            {"name": "c\n"},
        ]));
        let error = pins.check(&identity(""), &evil, false).unwrap_err().to_string();
        assert!(error.contains("added c\\n; removed b; changed a. "), "{error}");
        assert!(error.contains("--accept-tools"));
        let offered = pins.file(&identity("")).with_extension("offered.json");
        let shown = std::fs::read_to_string(&offered).unwrap();
        assert!(error.contains(offered.to_str().unwrap()) && shown.contains("\"c\\n\""), "{shown}");
        // Still refused, and another server has its own.
        assert!(pins.check(&identity(""), &evil, false).is_err());
        pins.check(&identity("other"), &evil, false).unwrap();
        let elsewhere = Identity { files: vec!["/project/server.py".into()], ..identity("") };
        pins.check(&elsewhere, &evil, false).unwrap();
        let accepted = pins.check(&identity(""), &evil, true).unwrap();
        assert_eq!(accepted.as_deref(), Some("added c\\n; removed b; changed a"));
        assert!(!offered.exists());
        assert_eq!(pins.check(&identity(""), &evil, true).unwrap(), None);
        assert_eq!(pins.check(&identity(""), &evil, false).unwrap(), None);
        let mut words = evil.clone();
        words.instructions = None;
        let error = pins.check(&identity(""), &words, false).unwrap_err().to_string();
        assert!(error.contains("accepted: other instructions. "), "{error}");
        let files: Vec<_> = std::fs::read_dir(&pins.folder).unwrap().flatten().collect();
        assert_eq!(files.len(), 4, "three accepted and one offered, and nothing temporary");
    }

    #[test]
    fn a_file_that_was_tampered_with_is_no_acceptance() {
        let folder = tempfile::tempdir().unwrap();
        let pins = Pins::new(folder.path().to_owned());
        let (server, first) = (identity(""), offer(json!([{"name": "a", "description": "good"}])));
        pins.check(&server, &first, false).unwrap();
        let file = pins.file(&server);
        let text = std::fs::read_to_string(&file).unwrap();
        for bad in ["", "{}", "[1", &text.replace("good", "evil"), &text.replace(": 1,", ": 9,")] {
            std::fs::write(&file, bad).unwrap();
            let error = pins.check(&server, &first, false).unwrap_err();
            assert!(matches!(error, PinError::Unreadable { .. }), "{error}");
        }
        pins.check(&server, &first, true).unwrap();
        pins.check(&server, &first, false).unwrap();
    }

    #[test]
    fn changes_are_bounded_in_the_message() {
        let many: Vec<Value> =
            (0..500).map(|n| json!({"name": format!("{n}{}", "x".repeat(5000))})).collect();
        let text = Offer::default().changes(&Offer::new(None, &many));
        assert!(text.len() < 3000 && text.ends_with("and 490 more"), "{text}");
    }
}
