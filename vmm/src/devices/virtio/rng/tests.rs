//! Requests for random bytes.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use virtio_bindings::bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::Queue;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::RngDevice;
use super::device::QUEUE_SIZE;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, GuestMemory, Interrupt, VirtioDevice};

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
            queues: vec![Virtqueue::new(queue, 0)],
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
