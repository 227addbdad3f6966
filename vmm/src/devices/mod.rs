//! Devices of the machine.

pub mod virtio;
