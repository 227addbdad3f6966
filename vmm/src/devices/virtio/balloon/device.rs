//! The device. It has no state of its own but the queues.

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use crate::devices::virtio::chain::Chain;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, VirtioDevice};
use crate::memory::{self, ReleaseError};

/// `VIRTIO_BALLOON_F_REPORTING`, Linux `include/uapi/linux/virtio_balloon.h`.
pub(super) const F_REPORTING: u32 = 5;
/// Index of the reporting queue when there is none for statistics and none for free page hints.
pub(super) const REPORTING: usize = 2;
/// The driver of the reporting queue wants room for 32 buffers (`PAGE_REPORTING_CAPACITY`).
pub(super) const QUEUE_SIZES: [u16; 3] = [16, 16, 64];
/// `struct virtio_balloon_config`: size wanted, size reached, hint command, poison; all zero.
const CONFIG_SIZE: usize = 16;

/// The device. It has no state of its own but the queues.
#[derive(Default)]
pub struct BalloonDevice {
    active: Option<Activation>,
}

impl BalloonDevice {
    /// A device without a driver.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl VirtioDevice for BalloonDevice {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        1 << F_REPORTING
    }

    fn queue_sizes(&self) -> Vec<u16> {
        QUEUE_SIZES.to_vec()
    }

    fn config(&self) -> Vec<u8> {
        vec![0; CONFIG_SIZE]
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn queue_event(&mut self, queue: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else { return Ok(()) };
        // Without the feature nobody agreed on what a request in this queue means.
        let reporting = queue == REPORTING && active.features & (1 << F_REPORTING) != 0;
        let Some(queue) = active.queues.get_mut(queue) else { return Ok(()) };
        let memory = &*active.memory;
        queue.serve(memory, &active.interrupt, |chain| {
            if reporting {
                report(memory, chain)?;
            }
            Ok(0)
        })
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queues(&self) -> Vec<&Virtqueue> {
        self.active.iter().flat_map(|active| &active.queues).collect()
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        Ok(serde_json::Value::Null)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), DeviceError> {
        match state {
            serde_json::Value::Null => Ok(()),
            other => Err(DeviceError::State(format!("a balloon has none, but got {other}"))),
        }
    }
}

/// Gives back the pages of one request.
fn report(memory: &GuestMemory, chain: Chain<'_>) -> Result<(), DeviceError> {
    for descriptor in chain {
        let descriptor = descriptor?;
        if !descriptor.is_write_only() {
            return Err(DeviceError::Driver("a reported page is not writable".into()));
        }
        let (start, length) = (descriptor.addr().0, u64::from(descriptor.len()));
        memory::release(memory, start, length).map_err(|error| match error {
            ReleaseError::NotMemory { .. } => DeviceError::Driver(error.to_string()),
            ReleaseError::Host(error) => DeviceError::Io(error),
        })?;
    }
    Ok(())
}
