//! Process 1 of the guest.
//!
//! * [`boot`] makes a Linux system out of a kernel and a stack of image layers, reports to the host
//!   and applies what the host answers;
//! * [`exec`] runs commands, [`streams`] holds the connections that carry their bytes, [`reaper`]
//!   collects orphans, [`shares`] flushes what the workload wrote to the host;
//! * [`files`] and [`server`] are the rest of the tools and the MCP server that offers all of them.
//!
//! The host trusts nothing of what is said here, and the agent trusts the host; between the agent
//! and the workload stand the user id, cgroups and a seccomp filter, which keep an unprivileged
//! workload from disturbing the agent. A workload that is root may do so, to its own loss.

pub mod boot;
pub mod code;
pub mod exec;
pub mod files;
pub mod reaper;
pub mod server;
pub mod service;
pub mod shares;
pub mod streams;
