//! virtio-rng: random bytes from the host's kernel.

use virtio_queue::{Queue, QueueOwnedT, QueueT};

use super::chain::split_chain;
use super::{Activation, DeviceError, VirtioDevice};

const DEVICE_TYPE: u32 = 4;
const QUEUE_SIZE: u16 = 16;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use virtio_bindings::bindings::virtio_ring::VRING_DESC_F_WRITE;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use crate::devices::virtio::{GuestMemory, Interrupt};

    /// Serves one request with buffers of these lengths; returns the used length and the bytes.
    fn request(lengths: &[u32]) -> (u32, Vec<u8>) {
        let memory = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x20_0000)]).unwrap());
        let mock = MockSplitQueue::new(&*memory, QUEUE_SIZE);
        let mut address = 0x10_0000;
        let descriptors: Vec<RawDescriptor> = lengths
            .iter()
            .map(|length| {
                let d = Descriptor::new(address, *length, VRING_DESC_F_WRITE as u16, 0);
                address += u64::from(*length);
                d.into()
            })
            .collect();
        mock.build_desc_chain(&descriptors).unwrap();
        let queue: Queue = mock.create_queue().unwrap();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let interrupt = Interrupt::new(Arc::new(AtomicU32::new(0)), line.clone());
        let mut device = RngDevice::new();
        let features = 0;
        device
            .activate(Activation {
                memory: memory.clone(),
                features,
                queues: vec![queue],
                interrupt,
            })
            .unwrap();
        device.queue_event(0).unwrap();
        assert_eq!(line.read().unwrap(), 1);
        assert_eq!(mock.used().idx().load(), 1);
        let used = mock.used().ring().ref_at(0).unwrap().load();
        let mut bytes = vec![0; lengths.iter().sum::<u32>() as usize];
        assert!(memory.check_range(GuestAddress(0x10_0000), bytes.len()));
        memory.read_slice(&mut bytes, GuestAddress(0x10_0000)).unwrap();
        (used.len(), bytes)
    }

    #[test]
    fn buffers_are_filled() {
        let (used, bytes) = request(&[40, 24]);
        assert_eq!(used, 64);
        assert!(bytes.iter().filter(|byte| **byte != 0).count() > 32);
    }

    #[test]
    fn large_requests_are_cut() {
        let (used, bytes) = request(&[0x10000]);
        assert_eq!(used, 4096);
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn no_room_is_no_error() {
        assert_eq!(request(&[0]).0, 0);
    }
}
