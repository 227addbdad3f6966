//! Tests that drive the real binaries and real guests.
//!
//! They need KVM that runs an ordinary kernel. `cargo xtask test` runs this program in the emulated
//! host; on a machine with real KVM it also runs as it stands. One test at a time
//! (`--test-threads=1`): several compare what is on the machine before and after.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod artifacts;
mod broken;
mod client;
#[allow(dead_code, unreachable_pub, reason = "the tests of the VMM use more of it")]
#[path = "../../vmm/tests/common/code.rs"]
mod code;
mod compat;
mod cpus;
mod disks;
mod embed;
mod ending;
mod errors;
mod hang;
mod http;
mod isolation;
mod mcp;
mod mcp_limits;
mod memory;
mod output;
mod run;
mod shares;
mod support;
mod tools;
mod vsock;
mod wrap;
mod wrap_kept;
