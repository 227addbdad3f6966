//! `casulo image`: what images there are.

use std::io::Write;

use serde_json::json;

use crate::cli::{FAILED, complain, host};
use crate::image::Store;

/// Commands of `casulo image`.
#[derive(clap::Subcommand, Clone, Debug)]
pub(crate) enum Command {
    /// List the images
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one image's manifest as JSON
    Inspect {
        /// Name or digest
        image: String,
    },
}

/// Runs it; gives the exit status.
pub(crate) fn run(command: &Command) -> u8 {
    let home = host::home();
    let store = Store::new(home.join("images"), home.join("state"));
    match command {
        Command::List { json } => list(&store, *json),
        Command::Inspect { image } => match store.open(image) {
            Ok(image) => {
                let value = json!({ "digest": image.digest, "manifest": image.manifest });
                print(&format!("{value:#}"))
            }
            Err(e) => {
                complain(&e.to_string());
                FAILED
            }
        },
    }
}

fn list(store: &Store, as_json: bool) -> u8 {
    let mut rows = Vec::new();
    for listed in store.list() {
        // A damaged image is listed too; `inspect` tells what is wrong with it.
        let size = store.open(&listed.name).ok().map(|image| {
            image.manifest.layers.iter().fold(0u64, |sum, l| sum.saturating_add(l.size))
        });
        rows.push((listed, size));
    }
    if as_json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(l, size)| json!({ "name": l.name, "digest": l.digest, "size": size }))
            .collect();
        return print(&json!(rows).to_string());
    }
    let mut text = format!("{:<20} {:<12} {:>10}\n", "NAME", "DIGEST", "SIZE");
    for (listed, size) in rows {
        let digest: String = listed.digest.chars().take(12).collect();
        let size = size.map_or("damaged".to_owned(), |s| format!("{} MiB", s.div_ceil(1 << 20)));
        text.push_str(&format!("{:<20} {digest:<12} {size:>10}\n", listed.name));
    }
    print(text.trim_end())
}

fn print(text: &str) -> u8 {
    // A reader that is gone does not want it.
    let _ = writeln!(std::io::stdout(), "{text}");
    0
}
