//! virtio-blk over a file, read-only or writable.
//!
//! Data moves between the file and guest memory without a copy. Every request is checked before the file is
//! touched; one that asks for what is not there fails by its status byte, one that has no room for a status
//! byte breaks the rules of the device and fails the device. When the host fails (a full disk, a file that
//! shrank), the guest gets an I/O error and the console ring a line with the reason.
//!
//! A writable disk takes discards, which give blocks back to the host, if the file system that it lies on
//! has holes.

mod device;
mod range;
mod request;
#[cfg(test)]
mod tests;

pub use self::device::BlockDevice;
