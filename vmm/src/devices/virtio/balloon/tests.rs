//! Reports, honest and hostile, against 16 pages of RAM, a hole, and 16 more.

use std::sync::Arc;

use proptest::prelude::*;
use virtio_bindings::bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::BalloonDevice;
use super::device::{F_REPORTING, QUEUE_SIZES, REPORTING};
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, Interrupt, VirtioDevice};

/// Where the pages that the tests look at begin, after those of the rings.
const LOW: u64 = 0x10_0000;
const HIGH: u64 = 0x80_0000;
const SIZE: u64 = 0x1_0000;
const FEATURES: u64 = 1 << F_REPORTING;

struct World {
    memory: Arc<GuestMemory>,
    device: BalloonDevice,
    line: Arc<EventFd>,
}

impl World {
    /// A device and two pieces of RAM full of ones.
    fn new() -> Self {
        let ranges =
            [(GuestAddress(0), (LOW + SIZE) as usize), (GuestAddress(HIGH), SIZE as usize)];
        let memory = Arc::new(GuestMemory::from_ranges(&ranges).unwrap());
        for start in [LOW, HIGH] {
            memory.write_slice(&[1; SIZE as usize], GuestAddress(start)).unwrap();
        }
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        Self { memory, device: BalloonDevice::new(), line }
    }

    /// Sends one chain of (address, length, writable) to a queue and serves it.
    fn send(&mut self, index: usize, chain: &[(u64, u32, bool)]) -> Result<(), DeviceError> {
        self.send_with(index, chain, FEATURES)
    }

    fn send_with(
        &mut self,
        index: usize,
        chain: &[(u64, u32, bool)],
        features: u64,
    ) -> Result<(), DeviceError> {
        let places = [0, 0x4_0000, 0x8_0000].map(GuestAddress);
        let mocks: Vec<_> = places
            .into_iter()
            .zip(QUEUE_SIZES)
            .map(|(place, size)| MockSplitQueue::create(&*self.memory, place, size))
            .collect();
        let descriptors: Vec<RawDescriptor> = chain
            .iter()
            .map(|(address, length, writable)| {
                let flags = if *writable { VRING_DESC_F_WRITE as u16 } else { 0 };
                Descriptor::new(*address, *length, flags, 0).into()
            })
            .collect();
        mocks[index].build_desc_chain(&descriptors).unwrap();
        let queues = mocks
            .iter()
            .map(|mock| Virtqueue::new(mock.create_queue().unwrap(), features))
            .collect();
        let interrupt = Interrupt::new(Arc::default(), self.line.clone());
        let memory = self.memory.clone();
        self.device.activate(Activation { memory, features, queues, interrupt })?;
        self.device.queue_event(index)?;
        assert_eq!(mocks[index].used().idx().load(), 1);
        assert_eq!(mocks[index].used().ring().ref_at(0).unwrap().load().len(), 0);
        assert_eq!(self.line.read().unwrap(), 1);
        Ok(())
    }

    /// Pages that were given back; each is all ones or all zeros.
    fn empty(&self) -> Vec<u64> {
        let pages = (LOW..LOW + SIZE).chain(HIGH..HIGH + SIZE).step_by(0x1000);
        pages
            .filter(|page| {
                let mut bytes = [0; 0x1000];
                self.memory.read_slice(&mut bytes, GuestAddress(*page)).unwrap();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{page:#x}");
                bytes[0] == 0
            })
            .collect()
    }
}

#[test]
fn it_offers_reporting_and_nothing_else() {
    let device = BalloonDevice::new();
    assert_eq!(device.device_type(), 5);
    assert_eq!(device.features(), 1 << 5);
    assert_eq!(device.queue_sizes().len(), 3);
    // No size is asked for.
    assert_eq!(device.config(), [0; 16]);
}

#[test]
fn reported_pages_are_given_back() {
    let mut world = World::new();
    world.send(REPORTING, &[(LOW, 0x2000, true), (HIGH + 0x3000, 0x1000, true)]).unwrap();
    assert_eq!(world.empty(), [LOW, LOW + 0x1000, HIGH + 0x3000]);
}

#[test]
fn a_full_request_of_the_driver_fits() {
    // PAGE_REPORTING_CAPACITY ranges; here of one page each.
    let chain: Vec<_> = (0..16u64)
        .flat_map(|n| [LOW, HIGH].map(|start| (start + n * 0x1000, 0x1000, true)))
        .collect();
    let mut world = World::new();
    world.send(REPORTING, &chain).unwrap();
    assert_eq!(world.empty().len(), 32);
}

#[test]
fn incomplete_pages_stay() {
    let mut world = World::new();
    let chain = [(LOW + 1, 0x1fff, true), (LOW + 0x4000, 0xfff, true)];
    world.send(REPORTING, &chain).unwrap();
    assert_eq!(world.empty(), [LOW + 0x1000]);
}

#[test]
fn overlapping_and_repeated_ranges_are_harmless() {
    let mut world = World::new();
    let chain = [(LOW, 0x3000, true), (LOW + 0x1000, 0x3000, true), (LOW, 0x3000, true)];
    world.send(REPORTING, &chain).unwrap();
    assert_eq!(world.empty().len(), 4);
}

#[test]
fn ranges_that_are_not_ram_break_the_device_and_free_nothing() {
    for (address, length) in [
        (LOW + SIZE, 0x1000),
        (LOW + SIZE - 0x1000, 0x2000),
        // From one piece of RAM over the hole into the other.
        (LOW, (HIGH - LOW) as u32 + 0x1000),
        (HIGH - 0x1000, 0x2000),
        // Registers of devices.
        (crate::layout::VIRTIO_START, 0x1000),
        (crate::layout::LOCAL_APIC, 0x1000),
        (u64::MAX - 0xfff, 0x1000),
        (u64::MAX, 1),
        (HIGH, u32::MAX),
    ] {
        let mut world = World::new();
        let error = world.send(REPORTING, &[(address, length, true)]).unwrap_err();
        assert!(matches!(error, DeviceError::Driver(_)), "{address:#x}: {error}");
        assert_eq!(world.empty(), [0u64; 0], "{address:#x}");
    }
}

#[test]
fn what_came_before_a_bad_range_is_given_back_and_what_comes_after_is_not() {
    let mut world = World::new();
    let chain = [(LOW, 0x1000, true), (HIGH - 1, 1, true), (HIGH, 0x1000, true)];
    assert!(world.send(REPORTING, &chain).is_err());
    assert_eq!(world.empty(), [LOW]);
    // A length of zero is a breach of any queue.
    let mut world = World::new();
    let error = world.send(REPORTING, &[(LOW, 0, true)]).unwrap_err();
    assert!(matches!(error, DeviceError::Queue(_)), "{error}");
}

#[test]
fn a_page_that_the_device_may_not_write_is_refused() {
    let mut world = World::new();
    let error = world.send(REPORTING, &[(LOW, 0x1000, false)]).unwrap_err();
    assert!(matches!(error, DeviceError::Driver(_)));
    assert_eq!(world.empty(), [0u64; 0]);
}

#[test]
fn the_balloon_itself_is_answered_and_takes_nothing() {
    for queue in [0, 1] {
        let mut world = World::new();
        // Page frame numbers, as a driver sends them, and a buffer that looks like a report.
        world.send(queue, &[(LOW, 16, false)]).unwrap();
        assert_eq!(world.empty(), [0u64; 0]);
        let mut world = World::new();
        world.send(queue, &[(LOW, 0x1000, true)]).unwrap();
        assert_eq!(world.empty(), [0u64; 0]);
    }
}

#[test]
fn without_the_feature_nothing_is_reported() {
    let mut world = World::new();
    world.send_with(REPORTING, &[(LOW, 0x1000, true)], 0).unwrap();
    assert_eq!(world.empty(), [0u64; 0]);
}

#[test]
fn events_of_no_queue_or_without_a_driver_are_ignored() {
    let mut world = World::new();
    world.device.queue_event(REPORTING).unwrap();
    world.send(REPORTING, &[(LOW, 0x1000, true)]).unwrap();
    world.device.queue_event(3).unwrap();
    world.device.queue_event(usize::MAX).unwrap();
    world.device.reset();
    world.device.queue_event(REPORTING).unwrap();
    // A driver that comes back after a reset is served.
    world.send(REPORTING, &[(HIGH, 0x1000, true)]).unwrap();
    assert_eq!(world.empty(), [LOW, HIGH]);
}

#[test]
fn a_reset_after_a_hostile_report_makes_it_usable_again() {
    let mut world = World::new();
    world.send(REPORTING, &[(u64::MAX, 1, true)]).unwrap_err();
    world.device.reset();
    world.send(REPORTING, &[(LOW, 0x1000, true)]).unwrap();
    assert_eq!(world.empty(), [LOW]);
}

#[test]
fn its_state_is_nothing_but_its_queues() {
    let mut world = World::new();
    world.send(REPORTING, &[(LOW, 0x1000, true)]).unwrap();
    world.device.pause().unwrap();
    assert_eq!(world.device.queues().len(), 3);
    let saved = world.device.save().unwrap();
    let mut other = World::new();
    other.device.restore(saved).unwrap();
    other.send(REPORTING, &[(HIGH, 0x1000, true)]).unwrap();
    assert_eq!(other.empty(), [HIGH]);
    let strange = serde_json::json!({ "size": 1 });
    assert!(matches!(other.device.restore(strange), Err(DeviceError::State(_))));
}

proptest! {
    #[test]
    fn whatever_is_reported_only_its_whole_pages_of_ram_go(
        chain in prop::collection::vec(
            (prop_oneof![LOW - 0x2000..LOW + SIZE + 0x2000, HIGH - 0x2000..HIGH + SIZE + 0x2000, any::<u64>()],
             prop_oneof![1u32..0x3000, any::<u32>()], prop::bool::weighted(0.9)), 1..8),
        queue in 0usize..3,
    ) {
        let mut world = World::new();
        // Not over the rings, which lie in the same RAM.
        let chain: Vec<_> = chain.into_iter().filter(|(address, ..)| *address >= LOW).collect();
        prop_assume!(!chain.is_empty());
        let result = world.send(queue, &chain);
        // Other queues look at no buffer.
        prop_assert!(queue == REPORTING || result.is_ok());
        for page in world.empty() {
            let reported = chain.iter().any(|(start, length, writable)| {
                *writable && *start <= page
                    && page + 0x1000 <= start.saturating_add(u64::from(*length))
            });
            prop_assert!(queue == REPORTING && reported, "{page:#x}");
        }
    }
}
