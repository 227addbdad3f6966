//! Counts VM exits of all virtual machines with the tracepoint `kvm:kvm_exit`.
//!
//! A histogram of tracefs counts in the kernel, by reason, and so needs no events to be read. It
//! costs time at each exit, which is why runs that are counted are not timed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};

const EVENT: &str = "events/kvm/kvm_exit";
const TRIGGER: &str = "hist:keys=isa,exit_reason:size=256";

/// Exits by reason, most frequent first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Exits(pub(super) Vec<(String, u64)>);

impl Exits {
    pub(super) fn total(&self) -> u64 {
        self.0.iter().map(|(_, count)| count).sum()
    }
}

/// A histogram that is being filled. Dropping it ends that.
pub(super) struct Counter {
    event: PathBuf,
}

impl Counter {
    /// Starts counting from zero.
    pub(super) fn start() -> io::Result<Self> {
        let event = tracefs()?.join(EVENT);
        fs::write(event.join("trigger"), TRIGGER)?;
        Ok(Self { event })
    }

    /// What was counted so far.
    pub(super) fn read(&self) -> io::Result<Exits> {
        let text = fs::read_to_string(self.event.join("hist"))?;
        let format = fs::read_to_string(self.event.join("format"))?;
        Ok(parse(&text, &format))
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // Were it to fail, later runs would be a little slower, equally for all.
        let _ = fs::write(self.event.join("trigger"), format!("!{TRIGGER}"));
    }
}

/// Where tracefs is; mounts it if nobody has.
fn tracefs() -> io::Result<PathBuf> {
    let folder = Path::new("/sys/kernel/tracing");
    if !folder.join("events").exists() {
        rustix::mount::mount("tracefs", folder, "tracefs", MountFlags::empty(), c"")?;
    }
    Ok(folder.to_owned())
}

/// Lines such as `{ isa: 2, exit_reason: 1024 } hitcount: 17603`, named by the event's format.
fn parse(text: &str, format: &str) -> Exits {
    let mut list: Vec<(String, u64)> = text
        .lines()
        .filter_map(|line| {
            let (keys, hits) = line.strip_prefix('{')?.split_once('}')?;
            let value = |name: &str| -> Option<u64> {
                let (_, rest) = keys.split_once(name)?;
                rest.split(',').next()?.trim().parse().ok()
            };
            let (isa, reason) = (value("isa:")?, value("exit_reason:")?);
            let count = hits.split_once("hitcount:")?.1.split_whitespace().next()?.parse().ok()?;
            Some((name(format, isa == 1, reason), count))
        })
        .collect();
    list.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    Exits(list)
}

/// The reason's name from the table for Intel, the first in the format, or AMD, the last.
fn name(format: &str, intel: bool, reason: u64) -> String {
    let tables: Vec<&str> = format.split("__print_symbolic(").skip(1).collect();
    let table = if intel { tables.first() } else { tables.last() };
    let names = table.into_iter().flat_map(|table| table.split('{')).filter_map(|entry| {
        let (number, rest) = entry.split_once(',')?;
        let name = rest.split('"').nth(1)?;
        Some((sum(number)?, name))
    });
    names
        .filter(|(number, _)| *number == reason)
        .map(|(_, name)| name.to_lowercase())
        .next()
        .unwrap_or_else(|| format!("{reason:#x}"))
}

/// `0x040 + 14`
fn sum(text: &str) -> Option<u64> {
    text.split('+')
        .map(|part| match part.trim().strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => part.trim().parse().ok(),
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_read_and_named() {
        let format = concat!(
            r#"print fmt: "x", (REC->isa == 1) ? __print_symbolic(REC->exit_reason & 0xffff, "#,
            r#"{ 0, "EXCEPTION_NMI" }, { 48, "EPT_VIOLATION" }) : "#,
            r#"__print_symbolic(REC->exit_reason, { 0x040 + 14, "PF excp" }, { 0x400, "npf" })"#,
        );
        let text = "# event histogram\n#\n\n\
            { isa:          2, exit_reason:         78 } hitcount:          3\n\
            { isa:          2, exit_reason:       1024 } hitcount:      17603\n\
            { isa:          1, exit_reason:         48 } hitcount:         2\n\
            { isa:          2, exit_reason:         5 } hitcount:         1\n\n\
            Totals:\n    Hits: 17609\n";
        let exits = parse(text, format);
        let expected = [("npf", 17603), ("pf excp", 3), ("ept_violation", 2), ("0x5", 1)];
        assert_eq!(exits.0, expected.map(|(name, count)| (name.to_owned(), count)));
        assert_eq!(exits.total(), 17609);
    }
}
