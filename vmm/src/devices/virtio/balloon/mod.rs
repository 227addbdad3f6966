//! virtio-balloon, of which only free page reporting is offered: the guest tells which of its pages are
//! free, and the host takes them back.
//!
//! The driver has three queues, numbered without gaps as Linux and QEMU do: inflate, deflate, and
//! reporting. Nothing is ever asked of the balloon itself, its size in the configuration space stays zero;
//! a driver that inflates it all the same gets its buffers back, and keeps its memory.
//!
//! A reporting request is a chain of buffers that the device may write, each a range of free pages. The
//! guest kernel keeps them out of its allocator until the chain is used ([virtio 1.2], 5.5.6.7). Which
//! pages these are is the guest's word alone, and may be wrong on purpose: only whole pages of its own RAM
//! are given back (see [`memory::release`]), so it can empty its own memory and nothing else. A range that
//! is not RAM breaks the device.
//!
//! Linux (`mm/page_reporting.c`) waits two seconds after memory became free and reports blocks of at least
//! 2 MiB, at most 32 in one request, so a huge page of the host goes in one piece.
//!
//! [virtio 1.2]: https://docs.oasis-open.org/virtio/virtio/v1.2/virtio-v1.2.html

mod device;
#[cfg(test)]
mod tests;

pub use self::device::BalloonDevice;
