//! `casulo doctor`: what works here, and how to put right what does not.

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::cli::host::{self, Trouble};
use crate::image::Store;
use crate::kvm::{self, KvmError};
use crate::{RuntimeConfig, emulated};

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Finding {
    /// What.
    name: &'static str,
    /// How it is.
    state: State,
    /// In words.
    detail: String,
    /// What to do, when something is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Works.
    Ok,
    /// Does not work, but something else does.
    Warning,
    /// Has to be put right.
    Error,
}

const BUILD: &str = "run `cargo xtask build` in Casulo's sources, or set CASULO_HOME";

/// Runs it; gives the exit status: 0 when tasks can be run here, else 1.
pub(crate) fn run(as_json: bool) -> u8 {
    let config = match host::config() {
        Ok(config) => config,
        Err(e) => {
            super::complain(&e.to_string());
            return super::FAILED;
        }
    };
    let findings = look(&config);
    let good = findings.iter().all(|f| f.state != State::Error);
    let mut out = std::io::stdout();
    // A reader that is gone does not want it.
    if as_json {
        let value = serde_json::json!({ "ok": good, "findings": findings });
        let _ = writeln!(out, "{value:#}");
    } else {
        for f in &findings {
            let mark = match f.state {
                State::Ok => "ok",
                State::Warning => "warning",
                State::Error => "ERROR",
            };
            let _ = writeln!(out, "{mark:<8} {:<14} {}", f.name, f.detail);
            if let Some(fix) = &f.fix {
                let _ = writeln!(out, "{:<8} {:<14} -> {fix}", "", "");
            }
        }
    }
    if good { 0 } else { 1 }
}

fn look(config: &RuntimeConfig) -> Vec<Finding> {
    let ok = |name, detail: String| Finding { name, state: State::Ok, detail, fix: None };
    let bad = |name, state, detail: String, fix: &str| Finding {
        name,
        state,
        detail,
        fix: Some(fix.to_owned()),
    };
    let home = host::home();
    let mut list = vec![ok("home", home.display().to_string())];
    let emulation = host::ready(config);
    // Without KVM the emulated host will do, if it is there.
    let without = if emulation.is_ok() { State::Warning } else { State::Error };
    if config.vmm.is_file() {
        list.push(ok("vmm", config.vmm.display().to_string()));
        list.push(match host::usable(config) {
            Ok(()) => ok("kvm", "/dev/kvm works".into()),
            Err(Trouble::Kvm(e @ KvmError::Permission { .. })) => {
                let fix = format!("join the group `{}` and log in again", kvm::group());
                bad("kvm", State::Error, e.to_string(), &fix)
            }
            Err(trouble) => {
                let fix = "use a machine with hardware virtualisation for real work";
                bad("kvm", without, trouble.to_string(), fix)
            }
        });
    } else {
        let detail = format!("{} does not exist", config.vmm.display());
        list.push(bad("vmm", State::Error, detail, "put casulo-vmm beside casulo"));
    }
    list.push(match &emulation {
        Ok(()) => ok("emulated host", "QEMU, kernel and modules are there".into()),
        Err(e) => {
            let fix = "only needed where there is no KVM";
            bad("emulated host", State::Warning, e.to_string(), fix)
        }
    });
    let store = Store::new(&config.images, &config.state);
    list.push(match store.open_kernel(&config.kernel) {
        Ok((info, _)) => ok("kernel", format!("{} ({} bytes)", info.version, info.size)),
        Err(e) => bad("kernel", State::Error, e.to_string(), BUILD),
    });
    list.push(match store.open_agent(&config.agent) {
        Ok((info, _)) => ok("agent", format!("{} (protocol {})", info.version, info.protocol)),
        Err(e) => bad("agent", State::Error, e.to_string(), BUILD),
    });
    let images = store.list();
    if images.is_empty() {
        list.push(bad("images", State::Error, "there are none".into(), BUILD));
    }
    for image in images {
        list.push(match store.open(&image.name) {
            Ok(_) => ok("image", format!("{} {}", image.name, image.digest)),
            Err(e) => bad("image", State::Error, e.to_string(), BUILD),
        });
    }
    list.extend(disk(&home));
    list.extend(shares_here());
    if emulated::is_emulated() {
        list.push(ok("host", "emulated: for development only".into()));
    }
    list
}

/// What a share of the current folder would lack.
fn shares_here() -> Option<Finding> {
    let here = std::fs::File::open(".").ok()?;
    crate::output::is_9p(&here).then(|| Finding {
        name: "shares",
        state: State::Warning,
        detail: "the current folder lies on 9p: shares of it have no sockets, FIFOs and device files, \
                 no exchanging rename, no holes punched into files, no attributes of an open file that \
                 was removed, and locks that no other machine sees"
            .into(),
        fix: Some("share folders of a tmpfs or of a disk".into()),
    })
}

/// Space on the disk of the home folder, or of its nearest parent that exists.
fn disk(home: &Path) -> Option<Finding> {
    const ENOUGH: u64 = 2 << 30;
    let stat = home.ancestors().find_map(|folder| rustix::fs::statvfs(folder).ok())?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let (state, fix) = if free < ENOUGH {
        (State::Warning, Some("make room: building kernel and images needs about 2 GiB".to_owned()))
    } else {
        (State::Ok, None)
    };
    Some(Finding { name: "disk", state, detail: format!("{} MiB free", free >> 20), fix })
}
