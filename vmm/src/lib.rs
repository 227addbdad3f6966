//! `casulo-vmm`: one process that is one microVM.
//!
//! The parent passes everything as descriptors over one socket ([`casulo_protocol::vmm`]); this process
//! opens no path, knows nothing of agents, MCP or policies, and ends when that socket closes. Everything
//! that the guest writes is hostile input: it is checked here, it may fail its own device, and it must
//! never panic, block or grow this process without bound.

pub mod arch;
pub mod builder;
pub mod control;
pub mod devices;
pub mod io;
pub mod jail;
pub mod kvm;
pub mod memory;
pub mod self_test;
pub mod vcpu;
pub mod vmm;
