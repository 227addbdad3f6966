//! `casulo-vmm`: one process that is one microVM, and the library that it is made of.
//!
//! A VM is described by a [`MachineConfig`], built, started, and waited for; `examples/boot.rs` does that in
//! a page. Nothing here opens a path: whoever describes the VM passes open files. Nothing here knows of
//! agents, MCP or policies.
//!
//! # From a description to a running guest
//!
//! ```text
//! control ─► config ──► builder ──────────────► vm ─────► vmm
//! (socket)   (what)     (wiring, in order)      (handle)  (serves the socket until the end)
//!
//! builder:   kvm      a VM with its interrupt controllers
//!            memory   RAM                            where: layout
//!            devices  serial, virtio                 lines: irq
//!            arch     kernel, boot structures, CPUID, registers
//!            threads  Landlock, a system call filter for each kind of thread: jail
//! ```
//!
//! # Threads and what they share
//!
//! ```text
//! vcpu0..n   KVM_RUN ─ exit ─► bus ─┬─► serial, i8042     a register, at once
//!                                   └─► virtio transport  a register; commands to a worker
//! disks      block, rng  ┐
//! vsock      vsock       ├ workers: own their device and its queues, woken by ioeventfds
//! fs         shares      ┘
//! control    the control socket, the end of the guest
//! ```
//!
//! * A device belongs to one worker thread, which alone touches its queues; there are no locks around
//!   devices. The driver's registers are pages that the guest reads without an exit; kicks and interrupts
//!   are event counters that KVM connects. So a running guest seldom leaves.
//! * The one state that all vCPUs share is [`devices::bus::Bus`]. A vCPU holds none of its locks while the
//!   guest runs, and waits for no other vCPU (the bus says what that means for a reset).
//! * Guest memory and threads live until the process ends: a process is one VM, and its end is how a VM is
//!   discarded.
//!
//! # Trust
//!
//! The guest is hostile, its kernel included. Everything that it writes is checked here with checked
//! arithmetic; it may fail its own device, and must never panic, block or grow this process without bound.
//! Should it take over a thread all the same, that thread is in a [`jail`].

pub mod accesses;
pub mod arch;
pub mod builder;
pub mod config;
pub mod control;
pub mod devices;
pub mod halt;
pub mod io;
pub mod irq;
pub mod jail;
pub mod kvm;
pub mod layout;
pub mod memory;
pub mod self_test;
mod threads;
pub mod vcpu;
pub mod vm;
pub mod vmm;

pub use config::{Disk, MachineConfig};
pub use devices::virtio::fs::Share;
pub use jail::Confine;
pub use vm::Vm;
