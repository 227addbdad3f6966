//! The device with a driver's queues.

use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_queue::Queue;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::devices::virtio::fs::{FsDevice, FsError};
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{
    Activation, DeviceError, GuestMemory, INTERRUPT_QUEUE, Interrupt, VirtioDevice,
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x11_0000;

fn memory() -> Arc<GuestMemory> {
    Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap())
}

fn device() -> (TempDir, FsDevice) {
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("rw")).unwrap();
    fs::write(base.path().join("rw/a"), "hello").unwrap();
    let shares = vec![share(base.path(), "rw", "rw")];
    (base, FsDevice::new("casulo", shares, open_path(Path::new("/proc"))).unwrap())
}

fn activate(device: &mut FsDevice, memory: &Arc<GuestMemory>, queue: Queue) -> Arc<AtomicU32> {
    let status = Arc::new(AtomicU32::new(0));
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let hiprio = MockSplitQueue::create(memory.as_ref(), GuestAddress(0x20_0000), 16);
    let queues =
        [hiprio.create_queue().unwrap(), queue].map(|queue| Virtqueue::new(queue, 0)).into();
    let interrupt = Interrupt::new(status.clone(), line);
    device.activate(Activation { memory: memory.clone(), features: 0, queues, interrupt }).unwrap();
    status
}

fn request(op: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let len = (InHeader::SIZE + body.len()) as u32;
    [bytes_of(&InHeader { len, opcode: op, unique: 5, node, ..Default::default() }), body.to_vec()]
        .concat()
}

fn descriptor(address: u64, len: u32, flags: u16) -> Descriptor {
    Descriptor::new(address, len, flags, 0)
}

/// The descriptors in a row, each leading to the one behind it.
fn linked(descriptors: &[Descriptor]) -> Vec<RawDescriptor> {
    let link = |(index, one): (usize, &Descriptor)| {
        let next = if one.flags() & NEXT == 0 { 0 } else { index as u16 + 1 };
        RawDescriptor::from(Descriptor::new(one.addr().0, one.len(), one.flags(), next))
    };
    descriptors.iter().enumerate().map(link).collect()
}

#[test]
fn the_configuration_space_has_tag_and_queue_count() {
    let (base, device) = device();
    let config = device.config();
    assert_eq!(config.len(), 40);
    assert_eq!(&config[..7], b"casulo\0");
    assert_eq!(config[36..], 1_u32.to_le_bytes());
    assert_eq!(device.device_type(), 26);
    assert_eq!(device.queue_sizes().len(), 2);
    for tag in ["", &"x".repeat(37)] {
        let shares = vec![share(base.path(), "rw", "rw")];
        let refused = FsDevice::new(tag, shares, open_path(Path::new("/proc")));
        assert!(matches!(refused, Err(FsError::Tag(_))));
    }
}

#[test]
fn requests_are_served_through_the_queue() {
    let (_base, mut device) = device();
    let memory = memory();
    let driver = MockSplitQueue::create(memory.as_ref(), GuestAddress(0), 16);
    let init = bytes_of(&InitIn { major: 7, minor: 38, max_readahead: 0, flags: !0 });
    let messages = [
        request(op::INIT, 0, &init),
        request(op::LOOKUP, ROOT_ID, b"rw\0"),
        request(op::LOOKUP, 2, b"a\0"),
    ];
    let mut descriptors = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let offset = index as u64 * 0x1000;
        memory.write_slice(message, GuestAddress(REQUEST + offset)).unwrap();
        // The header apart from the body, and the reply in two parts.
        descriptors.push(descriptor(REQUEST + offset, 40, NEXT));
        descriptors.push(descriptor(REQUEST + offset + 40, message.len() as u32 - 40, NEXT));
        descriptors.push(descriptor(REPLY + offset, 16, NEXT | WRITE));
        descriptors.push(descriptor(REPLY + offset + 0x100, 200, WRITE));
    }
    driver.build_multiple_desc_chains(&linked(&descriptors)).unwrap();
    let status = activate(&mut device, &memory, driver.create_queue().unwrap());
    device.queue_event(1).unwrap();
    assert_eq!(driver.used().idx().load(), 3);
    assert_eq!(status.load(Ordering::SeqCst), INTERRUPT_QUEUE);
    let mut reply = [0; 144];
    for index in 0..3_u16 {
        let used = driver.used().ring().ref_at(index as usize).unwrap().load();
        assert_eq!(used.id(), u32::from(index) * 4);
        assert_eq!(used.len(), if index == 0 { 80 } else { 144 });
        let offset = u64::from(index) * 0x1000;
        memory.read_slice(&mut reply[..16], GuestAddress(REPLY + offset)).unwrap();
        let header = OutHeader::parse(&reply).unwrap();
        assert_eq!((header.error, header.unique), (0, 5));
    }
    memory.read_slice(&mut reply[..128], GuestAddress(REPLY + 0x2100)).unwrap();
    assert_eq!(EntryOut::parse(&reply).unwrap().attr.size, 5);

    assert!(matches!(device.save(), Err(DeviceError::State(_))), "mounted");
    device.reset();
    let state = device.save().unwrap();
    device.restore(state).unwrap();
    device.queue_event(1).unwrap();
}

/// Serves one chain, and returns the length in the used ring, or the error.
fn one_chain(descriptors: &[Descriptor]) -> Result<Option<u32>, DeviceError> {
    let (_base, mut device) = device();
    let memory = memory();
    let driver = MockSplitQueue::create(memory.as_ref(), GuestAddress(0), 16);
    let message = request(op::GETATTR, ROOT_ID, &bytes_of(&GetattrIn::default()));
    memory.write_slice(&message, GuestAddress(REQUEST)).unwrap();
    driver.build_multiple_desc_chains(&linked(descriptors)).unwrap();
    activate(&mut device, &memory, driver.create_queue().unwrap());
    device.queue_event(1)?;
    Ok((driver.used().idx().load() == 1)
        .then(|| driver.used().ring().ref_at(0).unwrap().load().len()))
}

#[test]
fn bad_chains_fail_their_request_or_the_device_and_nothing_else() {
    // Not mounted: an error with a header.
    let good = [descriptor(REQUEST, 56, NEXT), descriptor(REPLY, 200, WRITE)];
    assert_eq!(one_chain(&good).unwrap(), Some(16));
    let without_reply = [descriptor(REQUEST, 56, 0)];
    assert_eq!(one_chain(&without_reply).unwrap(), Some(0));
    let only_reply = [descriptor(REPLY, 200, WRITE)];
    assert_eq!(one_chain(&only_reply).unwrap(), Some(0));
    let wrong_order = [descriptor(REPLY, 200, NEXT | WRITE), descriptor(REQUEST, 56, 0)];
    assert_eq!(one_chain(&wrong_order).unwrap(), Some(0));
    for (address, len) in [(8 << 20, 56), ((4 << 20) - 10, 56), (u64::MAX - 3, 56), (0, u32::MAX)] {
        let outside = [descriptor(address, len, NEXT), descriptor(REPLY, 200, WRITE)];
        assert!(one_chain(&outside).is_err(), "{address}");
    }
}

#[test]
fn an_impossible_ring_index_needs_a_reset() {
    let (_base, mut device) = device();
    let memory = memory();
    let driver = MockSplitQueue::create(memory.as_ref(), GuestAddress(0), 16);
    driver.avail().idx().store(1000);
    activate(&mut device, &memory, driver.create_queue().unwrap());
    assert!(device.queue_event(1).is_err());
    assert!(device.queue_event(2).is_err(), "no such queue");
}
