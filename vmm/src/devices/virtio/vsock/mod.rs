//! Virtio-vsock: stream connections between the guest and this process's parent, without names.
//!
//! The parent asks through a [`VsockHandle`] and gets connected descriptors as [`VsockEvent`]s; there are
//! no socket files. The guest may dial only the ports that were registered; it is told RST otherwise.
//!
//! [`packet`] knows what lies in a descriptor chain, [`connection`] is the protocol of one stream,
//! [`muxer`] all streams of a guest, [`device`] the queues, [`event`] what happens after a restore.

pub mod connection;
pub mod credit;
pub mod device;
pub mod event;
pub mod handle;
pub mod muxer;
pub mod packet;
pub mod socket;

pub use device::VsockDevice;
pub use handle::{VsockEvent, VsockEvents, VsockHandle};

#[cfg(test)]
mod testing;
