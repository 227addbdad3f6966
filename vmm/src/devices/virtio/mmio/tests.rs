//! A driver, good and bad, against the transport, the worker and a device that tells what it is asked.

use super::*;

use std::num::NonZeroUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use proptest::prelude::*;
use vm_memory::GuestAddress;

use crate::devices::serial::Console;
use crate::devices::virtio::DeviceError;
use crate::devices::virtio::worker::serve;

const QUEUES: [u16; 2] = [64, 16];
const OWN_FEATURES: u64 = 1 << 5;

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Activated { features: u64, sizes: Vec<u16>, event_idx: bool },
    Kicked(usize),
    Reset,
}

/// Tells what it is asked; queue 1 fails.
struct Device(Sender<Told>);

impl VirtioDevice for Device {
    fn device_type(&self) -> u32 {
        26
    }
    fn features(&self) -> u64 {
        OWN_FEATURES
    }
    fn queue_sizes(&self) -> Vec<u16> {
        QUEUES.to_vec()
    }
    fn config(&self) -> Vec<u8> {
        vec![1, 2, 3]
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let told = Told::Activated {
            features: activation.features,
            sizes: activation.queues.iter().map(Virtqueue::size).collect(),
            event_idx: activation.queues.iter().all(Virtqueue::event_idx),
        };
        let _ = self.0.send(told);
        Ok(())
    }
    fn queue_event(&mut self, queue: usize) -> Result<(), DeviceError> {
        let _ = self.0.send(Told::Kicked(queue));
        if queue == 1 {
            return Err(DeviceError::Driver("queue 1 is not to be kicked".into()));
        }
        Ok(())
    }
    fn reset(&mut self) {
        let _ = self.0.send(Told::Reset);
    }
    fn queues(&self) -> Vec<&Virtqueue> {
        Vec::new()
    }
    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        Ok(serde_json::Value::Null)
    }
    fn restore(&mut self, _state: serde_json::Value) -> Result<(), DeviceError> {
        Ok(())
    }
}

struct World {
    transport: MmioTransport,
    told: Receiver<Told>,
    line: Arc<EventFd>,
    console: Console,
}

impl World {
    fn new() -> Self {
        let (sender, told) = channel();
        let memory = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap());
        let pages = crate::memory::map_pages(NonZeroUsize::new(4096).unwrap()).unwrap();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let console = Console::default();
        let device = Box::new(Device(sender));
        let (transport, worker) =
            MmioTransport::new(device, memory, pages, 0, line.clone(), console.clone()).unwrap();
        std::thread::spawn(move || serve(vec![worker]).unwrap());
        Self { transport, told, line, console }
    }

    fn write(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn read(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn status(&self) -> u32 {
        self.read(register::STATUS)
    }

    fn told(&self) -> Told {
        self.told.recv_timeout(Duration::from_secs(10)).unwrap()
    }

    fn told_nothing(&self) -> bool {
        self.told.recv_timeout(Duration::from_millis(50)).is_err()
    }

    fn features(&self, features: u64) {
        for (half, value) in [(0, features), (1, features >> 32)] {
            self.write(register::DRIVER_FEATURES_SEL, half);
            self.write(register::DRIVER_FEATURES, value as u32);
        }
    }

    fn queue(&self, number: u32, size: u32, base: u64) {
        self.write(register::QUEUE_SEL, number);
        self.write(register::QUEUE_NUM, size);
        for (register, address) in [
            (register::QUEUE_DESC, base),
            (register::QUEUE_DRIVER, base + 0x1000),
            (register::QUEUE_DEVICE, base + 0x2000),
        ] {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(register::QUEUE_READY, 1);
    }

    /// Up to FEATURES_OK.
    fn negotiate(&self) {
        self.write(register::STATUS, ACKNOWLEDGE);
        self.write(register::STATUS, ACKNOWLEDGE | DRIVER);
        self.features(TRANSPORT_FEATURES | OWN_FEATURES);
        self.write(register::STATUS, 11);
        assert_eq!(self.status(), 11);
    }

    fn bring_up(&self) {
        self.negotiate();
        self.queue(0, 64, 0x10000);
        self.queue(1, 8, 0x20000);
        self.write(register::STATUS, 15);
        assert_eq!(
            self.told(),
            Told::Activated {
                features: TRANSPORT_FEATURES | OWN_FEATURES,
                sizes: vec![64, 8],
                event_idx: true
            }
        );
    }
}

#[test]
fn a_good_driver() {
    let world = World::new();
    assert_eq!(world.read(register::MAGIC), 0x7472_6976);
    world.write(register::DEVICE_FEATURES_SEL, 1);
    assert_eq!(world.read(register::DEVICE_FEATURES), 1);
    world.write(register::DEVICE_FEATURES_SEL, 2);
    assert_eq!(world.read(register::DEVICE_FEATURES), 0);
    for (queue, size) in [(0, 64), (1, 16), (2, 0), (u32::MAX, 0)] {
        world.write(register::QUEUE_SEL, queue);
        assert_eq!(world.read(register::QUEUE_NUM_MAX), size);
    }
    world.bring_up();
    assert_eq!(world.status(), 15);
    assert_eq!(world.read(register::INTERRUPT_STATUS), 1);
    world.write(register::QUEUE_NOTIFY, 0);
    assert_eq!(world.told(), Told::Kicked(0));
    world.write(register::INTERRUPT_ACK, 1);
    world.write(register::STATUS, 0);
    assert_eq!(world.told(), Told::Reset);
    assert_eq!(world.status(), 0);
    assert_eq!(world.read(register::INTERRUPT_STATUS), 0);
    // And again.
    world.bring_up();
}

#[test]
fn a_failed_device_needs_a_reset_and_works_after_it() {
    let world = World::new();
    world.bring_up();
    world.write(register::QUEUE_NOTIFY, 1);
    assert_eq!(world.told(), Told::Kicked(1));
    while world.line.read().is_err() {
        std::thread::yield_now();
    }
    assert_eq!(world.status(), 15 | STATUS_NEEDS_RESET);
    assert_eq!(world.read(register::INTERRUPT_STATUS), 3);
    assert!(world.console.tail(200).contains("queue 1 is not to be kicked"));
    // It forgets its driver at once.
    assert_eq!(world.told(), Told::Reset);
    world.write(register::QUEUE_NOTIFY, 0);
    assert!(world.told_nothing());
    // The driver cannot clear the bit, only reset.
    world.write(register::STATUS, 15);
    assert_eq!(world.status(), 15 | STATUS_NEEDS_RESET);
    world.write(register::STATUS, 0);
    assert_eq!(world.told(), Told::Reset);
    world.bring_up();
    world.write(register::QUEUE_NOTIFY, 0);
    assert_eq!(world.told(), Told::Kicked(0));
}

#[test]
fn status_bits_come_in_order_and_stay() {
    let world = World::new();
    for early in [DRIVER, FEATURES_OK, DRIVER_OK, STATUS_NEEDS_RESET] {
        world.write(register::STATUS, early);
        assert_eq!(world.status(), 0, "{early}");
    }
    world.write(register::STATUS, ACKNOWLEDGE);
    world.write(register::STATUS, ACKNOWLEDGE | DRIVER | DRIVER_OK);
    assert_eq!(world.status(), ACKNOWLEDGE | DRIVER);
    world.write(register::STATUS, ACKNOWLEDGE);
    assert_eq!(world.status(), ACKNOWLEDGE | DRIVER);
    world.write(register::STATUS, 0x103);
    assert_eq!(world.status(), ACKNOWLEDGE | DRIVER);
    world.write(register::STATUS, ACKNOWLEDGE | DRIVER | FAILED);
    assert_eq!(world.status(), ACKNOWLEDGE | DRIVER | FAILED);
}

#[test]
fn features_are_refused_when_not_offered_or_too_old() {
    for bad in [TRANSPORT_FEATURES | 1 << 6, OWN_FEATURES, TRANSPORT_FEATURES | 1 << 63] {
        let world = World::new();
        world.write(register::STATUS, 3);
        world.features(bad);
        world.write(register::STATUS, 11);
        assert_eq!(world.status(), 3, "{bad:#x}");
        // It may still choose better.
        world.features(TRANSPORT_FEATURES);
        world.write(register::STATUS, 11);
        assert_eq!(world.status(), 11);
        // But no more now.
        world.features(0);
        world.queue(0, 64, 0x10000);
        world.queue(1, 16, 0x20000);
        world.write(register::STATUS, 15);
        assert!(matches!(world.told(), Told::Activated { features: TRANSPORT_FEATURES, .. }));
    }
}

#[test]
fn bad_queues_fail_the_device_before_it_starts() {
    let bad: [(u32, u64); 8] = [
        (0, 0x10000),
        (3, 0x10000),
        (128, 0x10000),
        (0x1_0000, 0x10000),
        (64, 0x10001),
        (64, 0x10_0000),
        (64, u64::MAX - 0xfff),
        (64, 0xf_e000),
    ];
    for (size, base) in bad {
        let world = World::new();
        world.negotiate();
        world.queue(0, size, base);
        world.queue(1, 16, 0x20000);
        world.write(register::STATUS, 15);
        assert_eq!(world.status(), 15 | STATUS_NEEDS_RESET, "{size} {base:#x}");
        assert!(world.told_nothing());
        world.write(register::STATUS, 0);
        assert_eq!(world.told(), Told::Reset);
        world.bring_up();
    }
}

#[test]
fn a_queue_that_is_not_ready_fails_the_device() {
    let world = World::new();
    world.negotiate();
    world.queue(0, 64, 0x10000);
    world.write(register::STATUS, 15);
    assert_eq!(world.status(), 15 | STATUS_NEEDS_RESET);
}

#[test]
fn queues_are_frozen_before_and_after_their_time() {
    let world = World::new();
    world.write(register::STATUS, 3);
    world.queue(0, 8, 0x10000);
    assert_eq!(world.read(register::QUEUE_READY), 0);
    world.write(register::STATUS, 0);
    world.negotiate();
    world.queue(1, 8, 0x20000);
    world.queue(0, 64, 0x10000);
    assert_eq!(world.read(register::QUEUE_READY), 1);
    // Ready: its place stays.
    world.write(register::QUEUE_NUM, 2);
    world.write(register::QUEUE_DESC, 0xfffff);
    world.write(register::STATUS, 15);
    assert!(matches!(world.told(), Told::Activated { sizes, .. } if sizes == [64, 8]));
    for (register, value) in [
        (register::QUEUE_READY, 0),
        (register::QUEUE_NUM, 2),
        (register::QUEUE_DESC, 0x5000),
        (register::QUEUE_DEVICE + 4, 1),
    ] {
        world.write(register, value);
    }
    assert_eq!(world.read(register::QUEUE_READY), 1);
    assert!(world.told_nothing());
}

#[test]
fn other_widths_and_places_are_ignored() {
    let world = World::new();
    world.transport.write(register::STATUS, &[1]);
    world.transport.write(register::STATUS, &[1, 0]);
    world.transport.write(register::STATUS, &[1, 0, 0, 0, 0, 0, 0, 0]);
    world.transport.write(register::STATUS, &[]);
    world.write(register::STATUS + 1, 1);
    world.write(register::CONFIG, 9);
    world.write(register::MAGIC, 9);
    world.write(u64::MAX, 9);
    assert_eq!(world.status(), 0);
    assert_eq!(world.read(register::CONFIG), 0x0003_0201);
    world.write(register::QUEUE_NOTIFY, 2);
    world.write(register::QUEUE_NOTIFY, u32::MAX);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is written, the status only ever holds what a driver may have reached.
    #[test]
    fn no_sequence_of_writes_breaks_the_order(
        writes in prop::collection::vec((0u64..0x30, prop::sample::select(vec![
            0u32, 1, 2, 3, 4, 7, 8, 11, 15, 64, 128, 143, 0x1000, 0x2000, u32::MAX,
        ])), 0..80)
    ) {
        let world = World::new();
        for (register, value) in writes {
            world.write(register * 4, value);
            let status = world.status();
            prop_assert!(status & DRIVER == 0 || status & ACKNOWLEDGE != 0);
            prop_assert!(status & FEATURES_OK == 0 || status & DRIVER != 0);
            prop_assert!(status & DRIVER_OK == 0 || status & FEATURES_OK != 0);
        }
    }
}
