//! The device and its one queue. It has no state of its own to save.

use crate::devices::virtio::chain::{Chain, split_chain};
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, VirtioDevice};

const DEVICE_TYPE: u32 = 4;
pub(super) const QUEUE_SIZE: u16 = 16;
/// Most bytes for one request: a guest must not make the host compute randomness without end.
const MAX_REQUEST: u64 = 4096;

/// The entropy device.
#[derive(Default)]
pub struct RngDevice {
    active: Option<Active>,
}

struct Active {
    activation: Activation,
    queue: Virtqueue,
}

impl RngDevice {
    /// A device without state.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl VirtioDevice for RngDevice {
    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE]
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), DeviceError> {
        let queue = activation.queues.pop();
        self.active = queue.map(|queue| Active { activation, queue });
        Ok(())
    }

    fn queue_event(&mut self, _queue: usize) -> Result<(), DeviceError> {
        let Some(Active { activation, queue }) = &mut self.active else { return Ok(()) };
        let memory = &*activation.memory;
        queue.serve(memory, &activation.interrupt, |chain| fill(memory, chain))
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queues(&self) -> Vec<&Virtqueue> {
        self.active.iter().map(|active| &active.queue).collect()
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        Ok(serde_json::Value::Null)
    }

    fn restore(&mut self, _state: serde_json::Value) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Fills the buffers of one request; returns the number of bytes.
fn fill(memory: &GuestMemory, chain: Chain<'_>) -> Result<u32, DeviceError> {
    let (_, mut buffers) = split_chain(memory, chain)?;
    let mut written = 0;
    let mut random = [0u8; 256];
    while written < MAX_REQUEST && !buffers.is_empty() {
        let count = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(std::io::Error::from)?;
        written += buffers.write(random.get(..count).unwrap_or_default()) as u64;
    }
    // At most MAX_REQUEST and a little more.
    Ok(u32::try_from(written).unwrap_or(0))
}
