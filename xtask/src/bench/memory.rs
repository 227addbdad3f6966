//! What processes hold in memory beside the memory of the guest.
//!
//! From `smaps`: everything but the mappings that are at least as large as the guest's memory.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Memory of one process in KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) name: String,
    /// Resident in the mappings of the guest's memory.
    pub(super) guest: u64,
    /// Resident beside it: program text and libraries included, which processes share.
    pub(super) resident: u64,
    /// Of this: what belongs to no file, or was changed, and so is of this process alone.
    pub(super) anonymous: u64,
    /// Page tables.
    pub(super) tables: u64,
}

/// The process and all its descendants.
pub(super) fn tree(root: u32, guest_mib: u64) -> Result<Vec<Process>> {
    let mut found = Vec::new();
    let mut left = vec![root];
    while let Some(pid) = left.pop() {
        let proc = Path::new("/proc").join(pid.to_string());
        let smaps = fs::read_to_string(proc.join("smaps"))
            .with_context(|| format!("cannot read the memory map of process {pid}"))?;
        let status = fs::read_to_string(proc.join("status"))?;
        let name = fs::read_to_string(proc.join("comm"))?.trim().to_owned();
        found.push(Process { tables: field(&status, "VmPTE:"), ..sum(&smaps, guest_mib, name) });
        for thread in fs::read_dir(proc.join("task"))? {
            let children = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    Ok(found)
}

fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn sum(smaps: &str, guest_mib: u64, name: String) -> Process {
    let mut process = Process { name, guest: 0, resident: 0, anonymous: 0, tables: 0 };
    let mut size = 0;
    for line in smaps.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let kib: u64 = value.split_whitespace().next().and_then(|v| v.parse().ok()).unwrap_or(0);
        let guest = size >= guest_mib * 1024;
        match key {
            "Size" => size = kib,
            "Rss" if guest => process.guest += kib,
            "Rss" => process.resident += kib,
            "Anonymous" if !guest => process.anonymous += kib,
            _ => {}
        }
    }
    process
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_guest_is_told_apart() {
        let smaps = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n\
            Size:             131072 kB\nRss:               40960 kB\nAnonymous:     40960 kB\n\
            55d000000000-55d000100000 r-xp 00000000 fe:01 12                 /usr/bin/a: b\n\
            Size:               1024 kB\nRss:                 800 kB\nAnonymous:         4 kB\n";
        let process = sum(smaps, 128, "vmm".to_owned());
        assert_eq!((process.guest, process.resident, process.anonymous), (40960, 800, 4));
    }

    #[test]
    fn this_process_is_found() {
        let list = tree(std::process::id(), 1 << 20).unwrap();
        let first = &list[0];
        assert!(first.resident > 100 && first.anonymous > 10 && first.guest == 0, "{first:?}");
    }
}
