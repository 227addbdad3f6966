//! The device and its one queue. It has no state of its own to save.

use virtio_queue::{Queue, QueueOwnedT, QueueT};

use crate::devices::virtio::chain::split_chain;
use crate::devices::virtio::{Activation, DeviceError, VirtioDevice};

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
    queue: Queue,
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
        self.active.as_mut().map_or(Ok(()), Active::serve)
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        Ok(serde_json::Value::Null)
    }

    fn restore(&mut self, _state: serde_json::Value) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Active {
    fn serve(&mut self) -> Result<(), DeviceError> {
        let memory = &*self.activation.memory;
        loop {
            self.queue.disable_notification(memory)?;
            let mut used = false;
            while let Some(chain) = self.queue.iter(memory)?.next() {
                let head = chain.head_index();
                let (_, mut buffers) = split_chain(memory, chain)?;
                let mut written = 0;
                let mut random = [0u8; 256];
                while written < MAX_REQUEST && !buffers.is_empty() {
                    let count =
                        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
                            .map_err(std::io::Error::from)?;
                    written += buffers.write(random.get(..count).unwrap_or_default()) as u64;
                }
                // At most MAX_REQUEST and a little more.
                self.queue.add_used(memory, head, u32::try_from(written).unwrap_or(0))?;
                used = true;
            }
            if used && self.queue.needs_notification(memory)? {
                self.activation.interrupt.signal_queue()?;
            }
            if !self.queue.enable_notification(memory)? {
                return Ok(());
            }
        }
    }
}
