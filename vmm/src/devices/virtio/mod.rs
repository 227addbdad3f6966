//! Virtio devices: what a device is, and what the transport gives it.
//!
//! The transport ([virtio-mmio version 2][spec]) lives on the bus and is driven by vCPU threads. A
//! device lives on one worker thread, which calls it at activation, when the driver kicks a queue, and
//! when the device's own descriptor becomes readable. So a device needs no locks.
//!
//! [spec]: https://docs.oasis-open.org/virtio/virtio/v1.2/virtio-v1.2.html

pub mod balloon;
pub mod block;
pub mod chain;
pub mod fs;
pub mod mmio;
pub mod page;
pub mod queue;
pub mod rng;
pub mod vsock;
pub mod worker;

#[cfg(test)]
mod harness;

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

use self::page::RegisterPage;
use self::queue::{QueueError, Virtqueue};

/// The guest's memory, shared by all threads.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// A virtio device, owned and driven by one worker thread.
///
/// An error from any method marks the device `NEEDS_RESET`; the VM and its other devices go on.
///
/// ```text
///               activate            pause
///   inactive ------------> active ----------> paused
///     | ^ ^                 | ^                 | |
///     | | +------reset------+ +-----resume------+ |
///     | +---------------------reset---------------+
///     +-- restore: before the first activation of a new device
/// ```
/// It is saved while paused or inactive.
pub trait VirtioDevice: Send + 'static {
    /// Device type, one of `VIRTIO_ID_*`.
    fn device_type(&self) -> u32;
    /// Feature bits that the device offers beside `VERSION_1`, `EVENT_IDX` and `INDIRECT_DESC`, which
    /// the transport adds.
    fn features(&self) -> u64;
    /// Largest size of each queue, in order: powers of two, at most 32,768.
    fn queue_sizes(&self) -> Vec<u16>;
    /// The configuration space. It is constant: the transport takes one copy.
    fn config(&self) -> Vec<u8>;
    /// The driver is ready (`DRIVER_OK`); all queues are valid. After [`VirtioDevice::restore`] the
    /// queues go on where they were saved.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// The driver kicked a queue.
    fn queue_event(&mut self, queue: usize) -> Result<(), DeviceError>;
    /// One more descriptor to wait for while active, such as the device's own epoll set.
    fn poll_fd(&self) -> Option<RawFd> {
        None
    }
    /// [`VirtioDevice::poll_fd`] is readable. It is asked again until it is not.
    fn poll_event(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// The driver reset the device, or it failed: forget the queues and all that belongs to the driver. May
    /// be called at any time, and twice.
    fn reset(&mut self);
    /// All queues of the activation in their order; none while inactive. The transport saves the positions.
    fn queues(&self) -> Vec<&Virtqueue>;
    /// Finish or undo what is in flight. Until [`VirtioDevice::resume`] or a reset the device is not called
    /// for kicks or its descriptor, and must not touch guest memory.
    fn pause(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Go on after [`VirtioDevice::pause`]. Kicks that came in the meantime follow.
    fn resume(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// The device's own state, while it is paused or inactive; the transport saves its registers, features
    /// and queues. What cannot be saved (connections, open files) is the device's to explain to the driver
    /// after a restore.
    fn save(&self) -> Result<serde_json::Value, DeviceError>;
    /// Takes back what [`VirtioDevice::save`] gave, on a new device. If the saved one was active,
    /// [`VirtioDevice::activate`] follows, and a kick of each queue, because one may have been lost. A plain
    /// pause never leads here.
    fn restore(&mut self, state: serde_json::Value) -> Result<(), DeviceError>;
}

/// What a device gets when its driver is ready.
pub struct Activation {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    /// The feature bits that the driver took, those of the transport included, which the queues know
    /// already.
    pub features: u64,
    /// All queues of [`VirtioDevice::queue_sizes`], ready and valid.
    pub queues: Vec<Virtqueue>,
    /// How to interrupt the driver.
    pub interrupt: Interrupt,
}

/// Why a device cannot go on. It needs a reset by the driver; the VM lives.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver broke the rules of the device or of its queues.
    #[error("the driver broke the rules: {0}")]
    Driver(String),
    /// The driver broke the rules of its queues.
    #[error("bad queue: {0}")]
    Queue(#[from] QueueError),
    /// Guest memory could not be read or written.
    #[error("bad guest memory access: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// The host failed.
    #[error("host I/O failed: {0}")]
    Io(#[from] io::Error),
    /// A saved state does not fit.
    #[error("bad saved state: {0}")]
    State(String),
}

/// Used-buffer notification, a bit of the interrupt status register.
pub const INTERRUPT_QUEUE: u32 = 1;
/// Configuration change, a bit of the interrupt status register.
pub const INTERRUPT_CONFIG: u32 = 2;

/// A device's interrupt line: a status register read by the driver, and an irqfd.
#[derive(Clone, Debug)]
pub struct Interrupt {
    status: Status,
    line: Arc<EventFd>,
}

/// Where the driver reads why it was interrupted.
#[derive(Clone, Debug)]
enum Status {
    /// A word of its own.
    Word(Arc<AtomicU32>),
    /// The register page, which says "used buffers" as long as the device is active.
    Page(Arc<RegisterPage>),
}

impl Interrupt {
    /// An interrupt that adds to `status` and then signals `line`.
    #[must_use]
    pub fn new(status: Arc<AtomicU32>, line: Arc<EventFd>) -> Self {
        Self { status: Status::Word(status), line }
    }

    /// An interrupt of a device whose registers the guest reads from a page.
    #[must_use]
    pub fn of_page(page: Arc<RegisterPage>, line: Arc<EventFd>) -> Self {
        Self { status: Status::Page(page), line }
    }

    /// Tells the driver that buffers were used. Ask the queue first (`needs_notification`).
    pub fn signal_queue(&self) -> io::Result<()> {
        self.signal(INTERRUPT_QUEUE)
    }

    /// Tells the driver to look at the device's configuration and status.
    pub fn signal_config(&self) -> io::Result<()> {
        self.signal(INTERRUPT_CONFIG)
    }

    fn signal(&self, bit: u32) -> io::Result<()> {
        // Either way, stored before the write below, which the driver's interrupt handler follows.
        match &self.status {
            Status::Word(status) => {
                status.fetch_or(bit, Ordering::SeqCst);
            }
            Status::Page(page) if bit == INTERRUPT_CONFIG => page.announce_config(),
            Status::Page(_) => {}
        }
        match self.line.write(1) {
            // The counter is full: the line is signalled already.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn signals_set_their_bit_and_the_line() {
        let status = Arc::new(AtomicU32::new(0));
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let interrupt = Interrupt::new(status.clone(), line.clone());
        interrupt.signal_queue().unwrap();
        interrupt.signal_config().unwrap();
        assert_eq!(status.load(Ordering::SeqCst), INTERRUPT_QUEUE | INTERRUPT_CONFIG);
        assert_eq!(line.read().unwrap(), 2);
    }

    #[test]
    fn a_full_line_is_no_error() {
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        line.write(u64::MAX - 1).unwrap();
        Interrupt::new(Arc::default(), line).signal_queue().unwrap();
    }
}
