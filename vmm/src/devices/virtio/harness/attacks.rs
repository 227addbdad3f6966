//! Hostile drivers against real devices on a shared thread: the one they break needs a reset and is as good
//! as new after it, the others go on.

use super::*;

use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};

use proptest::prelude::*;

use crate::devices::virtio::block::BlockDevice;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::rng::RngDevice;
use crate::devices::virtio::{Activation, DeviceError};

const HEADER: u64 = DATA;
const SECTOR: u64 = DATA + 0x1000;
const STATUS_AT: u64 = DATA + 0x2000;
const TABLE: u64 = DATA + 0x3000;

/// A disk whose sector n is full of n + 1.
fn disk() -> BlockDevice {
    let file = tempfile::tempfile().unwrap();
    for sector in 0..8 {
        file.write_all_at(&[sector as u8 + 1; 512], sector * 512).unwrap();
    }
    BlockDevice::new(file, true, "attacked").unwrap()
}

/// A disk to attack, and a source of entropy as a bystander, on one thread.
struct World {
    disk: Board,
    bystander: Board,
}

impl World {
    fn new() -> Self {
        let memory = memory();
        let (mut disk, first) = Board::new(Box::new(disk()), memory.clone());
        let (mut bystander, second) = Board::new(Box::new(RngDevice::new()), memory);
        std::thread::spawn(move || serve(vec![first, second]).unwrap());
        bystander.place = 4;
        bystander.bring_up();
        disk.bring_up();
        Self { disk, bystander }
    }

    /// The driver reads a sector as it should.
    fn read(&mut self, sector: u64) {
        read(&mut self.disk, sector);
    }

    fn bystander_works(&mut self) {
        self.bystander.rings[0].chain(&[(SECOND, 64, true)]);
        self.bystander.kick(0);
        assert_eq!(self.bystander.wait_used(0, 1)[0].1, 64);
    }
}

fn put_header(memory: &GuestMemory, sector: u64) {
    memory.write_obj([0u32, 0], GuestAddress(HEADER)).unwrap();
    memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
    memory.write_obj(0xffu8, GuestAddress(STATUS_AT)).unwrap();
}

const GOOD: [(u64, u32, bool); 3] =
    [(HEADER, 16, false), (SECTOR, 512, true), (STATUS_AT, 1, true)];

fn read(disk: &mut Board, sector: u64) {
    put_header(&disk.memory, sector);
    let head = disk.rings[0].chain(&GOOD);
    disk.kick(0);
    assert_eq!(disk.wait_used(0, 1), [(head, 513)]);
    let byte: u8 = disk.memory.read_obj(GuestAddress(SECTOR + 511)).unwrap();
    assert_eq!(u64::from(byte), sector + 1);
    assert_eq!(disk.memory.read_obj::<u8>(GuestAddress(STATUS_AT)).unwrap(), 0);
}

/// What a driver does to its ring, and a word of what the log says of it.
type Attack = (&'static str, fn(&mut Ring), &'static str);

/// A good request but for its data, which is at this address.
fn data_at(ring: &mut Ring, address: u64, length: u32) {
    ring.chain(&[(HEADER, 16, false), (address, length, true), (STATUS_AT, 1, true)]);
}

const ATTACKS: &[Attack] = &[
    (
        "circle",
        |ring| {
            ring.descriptor(0, HEADER, 16, NEXT, 1);
            ring.descriptor(1, SECTOR, 512, NEXT | WRITE, 1);
            ring.offer(0);
        },
        "circle",
    ),
    ("head beyond the table", |ring| ring.offer(128), "beyond the end"),
    ("last head", |ring| ring.offer(u16::MAX), "beyond the end"),
    (
        "next beyond the table",
        |ring| {
            ring.descriptor(0, HEADER, 16, NEXT, 4000);
            ring.offer(0);
        },
        "beyond the end",
    ),
    ("empty buffer", |ring| data_at(ring, SECTOR, 0), "length of zero"),
    ("outside of memory", |ring| data_at(ring, 1 << 40, 512), "memory"),
    ("in the hole", |ring| data_at(ring, END, 512), "memory"),
    ("across the end of memory", |ring| data_at(ring, END - 256, 512), "memory"),
    ("wrapping addresses", |ring| data_at(ring, u64::MAX - 255, 512), "memory"),
    ("registers as data", |ring| data_at(ring, crate::layout::virtio(0), 512), "memory"),
    (
        "four gibibytes",
        |ring| {
            let huge = u32::MAX;
            ring.chain(&[(HEADER, 16, false), (SECTOR, huge, true), (STATUS_AT, 1, true)]);
        },
        "4 GiB",
    ),
    (
        "read after write",
        |ring| {
            ring.chain(&[(HEADER, 16, false), (STATUS_AT, 1, true), (SECTOR, 512, false)]);
        },
        "readable buffer follows",
    ),
    (
        "no header",
        |ring| {
            ring.chain(&[(STATUS_AT, 1, true)]);
        },
        "without a header",
    ),
    (
        "no status",
        |ring| {
            ring.chain(&[(HEADER, 16, false)]);
        },
        "room for its status",
    ),
    (
        "index far ahead",
        |ring| ring.set_half(Ring::AVAIL + 2, ring.avail + ring.size + 1),
        "available index",
    ),
    ("index goes back", |ring| ring.set_half(Ring::AVAIL + 2, u16::MAX), "available index"),
    (
        "nested tables",
        |ring| {
            put_descriptor(&ring.memory, TABLE, TABLE, 16, INDIRECT, 0);
            ring.descriptor(0, TABLE, 16, INDIRECT, 0);
            ring.offer(0);
        },
        "inside of an indirect table",
    ),
    (
        "table with a next",
        |ring| {
            put_descriptor(&ring.memory, TABLE, HEADER, 16, 0, 0);
            ring.descriptor(0, TABLE, 16, INDIRECT | NEXT, 1);
            ring.descriptor(1, STATUS_AT, 1, WRITE, 0);
            ring.offer(0);
        },
        "flag for a next one",
    ),
    (
        "empty table",
        |ring| {
            ring.descriptor(0, TABLE, 0, INDIRECT, 0);
            ring.offer(0);
        },
        "table of 0 bytes",
    ),
    (
        "table of half a descriptor",
        |ring| {
            ring.descriptor(0, TABLE, 24, INDIRECT, 0);
            ring.offer(0);
        },
        "table of 24 bytes",
    ),
    (
        "table outside of memory",
        |ring| {
            ring.descriptor(0, END, 16, INDIRECT, 0);
            ring.offer(0);
        },
        "memory",
    ),
    (
        "table at the end of the address space",
        |ring| {
            ring.descriptor(0, u64::MAX - 15, 64, INDIRECT, 0);
            ring.offer(0);
        },
        "memory",
    ),
];

#[test]
fn every_attack_breaks_the_device_alone_until_its_driver_resets_it() {
    for (name, attack, words) in ATTACKS {
        println!("{name}");
        let mut world = World::new();
        world.read(3);
        // The rings go on from the good request.
        let ring = &mut world.disk.rings[0];
        put_header(&ring.memory, 0);
        attack(ring);
        while world.disk.line.read().is_ok() {}
        world.disk.kick(0);
        world.disk.wait_broken();
        let log = world.disk.console.tail(500);
        assert!(log.contains("virtio device 0 (disk): needs a reset"), "{name}: {log}");
        assert!(log.contains(words), "{name}: {log}");
        world.bystander_works();
        // Nothing but a reset helps.
        world.disk.rings[0].chain(&GOOD);
        world.disk.kick(0);
        world.disk.write(register::STATUS, 15);
        assert_eq!(world.disk.status(), 15 | STATUS_NEEDS_RESET);
        world.disk.reset();
        world.disk.bring_up();
        world.read(5);
        world.bystander_works();
    }
}

#[test]
fn one_device_broken_a_thousand_times_works_and_the_log_stays_short() {
    let mut world = World::new();
    for round in 0..1000 {
        let (_, attack, _) = ATTACKS[round % ATTACKS.len()];
        put_header(&world.disk.memory, 0);
        attack(&mut world.disk.rings[0]);
        world.disk.kick(0);
        world.disk.wait_broken();
        world.disk.reset();
        world.disk.bring_up();
    }
    world.read(7);
    world.bystander_works();
    let log = world.disk.console.tail(usize::MAX);
    assert!(log.lines().count() <= 33 && log.len() < 8192, "{log}");
}

/// Buffers over each other, over the rings, and rings over each other: nonsense, but the host's memory is
/// not in it.
#[test]
fn overlapping_buffers_and_rings_hurt_only_the_guest() {
    let mut world = World::new();
    put_header(&world.disk.memory, 2);
    // Header, data and status in the same bytes; then the data over the used ring, and over the table.
    let base = world.disk.rings[0].base;
    for place in [HEADER, base + Ring::USED, base + Ring::AVAIL, base] {
        put_header(&world.disk.memory, 2);
        world.disk.rings[0].chain(&[(HEADER, 16, false), (place, 512, true), (place, 1, true)]);
        world.disk.kick(0);
        wait(|| world.disk.line.read().is_ok());
        world.bystander_works();
        world.disk.reset();
        world.disk.bring_up();
    }
    // All three rings in one place.
    world.disk.reset();
    let mut steps = world.disk.steps(TRANSPORT_FEATURES);
    for (register, value) in &mut steps {
        if [register::QUEUE_DESC, register::QUEUE_DRIVER, register::QUEUE_DEVICE].contains(register)
        {
            *value = 0x1_0000;
        }
    }
    for (register, value) in steps {
        world.disk.write(register, value);
    }
    world.disk.memory.write_slice(&[1; 0x1000], GuestAddress(0x1_0000)).unwrap();
    world.disk.kick(0);
    world.bystander_works();
    world.disk.reset();
    world.disk.bring_up();
    world.read(1);
}

/// CVE-2026-5747 of another VMM: queue registers written while the device runs moved its rings.
#[test]
fn a_running_device_keeps_its_rings() {
    let mut world = World::new();
    let elsewhere = 0xc_0000u64;
    for value in [0, 1, 8, elsewhere as u32, u32::MAX] {
        for queue in [0, 1, u32::MAX] {
            world.disk.write(register::QUEUE_SEL, queue);
            for offset in (register::QUEUE_NUM..register::QUEUE_DEVICE + 8).step_by(4) {
                if offset != register::STATUS && offset != register::QUEUE_NOTIFY {
                    world.disk.write(offset, value);
                }
            }
        }
    }
    world.disk.write(register::QUEUE_SEL, 0);
    assert_eq!(world.disk.read(register::QUEUE_READY), 1);
    assert_eq!(world.disk.status(), 15);
    world.read(4);
    let found: [u8; 32] = world.disk.memory.read_obj(GuestAddress(elsewhere)).unwrap();
    assert_eq!(found, [0; 32]);
    assert!(
        world
            .disk
            .console
            .tail(9000)
            .contains("ignored 0x0 for register 0x38 while the status is 0xf")
    );
}

#[test]
fn a_queue_can_be_made_ready_and_unready_until_the_driver_is_ready() {
    let mut world = World::new();
    world.disk.reset();
    let steps = world.disk.steps(TRANSPORT_FEATURES);
    let (last, setup) = steps.split_last().unwrap();
    for (register, value) in setup {
        world.disk.write(*register, *value);
    }
    for value in [0, 1, 2, u32::MAX, 0, 1, 1] {
        world.disk.write(register::QUEUE_READY, value);
        assert_eq!(world.disk.read(register::QUEUE_READY), u32::from(value == 1));
    }
    world.disk.write(last.0, last.1);
    world.disk.rings[0] = Ring::new(&world.disk.memory, 0, 128);
    world.read(6);
}

#[test]
fn a_feature_that_is_not_offered_is_refused_bit_by_bit() {
    let board = Board::start(Box::new(disk()), memory());
    let offered = board.offered();
    assert_eq!(offered & TRANSPORT_FEATURES, TRANSPORT_FEATURES);
    for bit in 0..64 {
        let features = TRANSPORT_FEATURES | 1 << bit;
        for (register, value) in board.steps(features) {
            if (register, value) == (register::STATUS, 15) {
                break;
            }
            board.write(register, value);
        }
        let accepted = offered & 1 << bit != 0;
        assert_eq!(board.status(), if accepted { 11 } else { 3 }, "{bit}");
        board.reset();
    }
    assert!(board.console.tail(9000).contains("refused features"));
}

#[test]
fn a_reset_after_any_step_leads_to_a_new_device() {
    let mut world = World::new();
    let steps = world.disk.steps(TRANSPORT_FEATURES);
    for count in 0..=steps.len() {
        world.disk.reset();
        for (register, value) in &steps[..count] {
            world.disk.write(*register, *value);
        }
        world.disk.reset();
        assert_eq!(world.disk.read(register::QUEUE_READY), 0);
        assert_eq!(world.disk.read(register::INTERRUPT_STATUS), 0);
        world.disk.bring_up();
        world.read(count as u64 % 8);
    }
}

/// When the write of the reset returns, the driver uses the memory for something else.
#[test]
fn a_thousand_resets_with_requests_in_flight_leave_no_late_write() {
    let mut world = World::new();
    for round in 0..1000u32 {
        put_header(&world.disk.memory, 1);
        for _ in 0..round % 40 {
            world.disk.rings[0].chain(&GOOD);
        }
        world.disk.kick(0);
        world.disk.reset();
        let pattern = [round as u8; 0x1000];
        let places = [SECTOR, world.disk.rings[0].base + Ring::USED, STATUS_AT];
        for place in places {
            world.disk.memory.write_slice(&pattern, GuestAddress(place)).unwrap();
        }
        world.bystander_works();
        for place in places {
            let mut found = [0; 0x1000];
            world.disk.memory.read_slice(&mut found, GuestAddress(place)).unwrap();
            assert!(found == pattern, "round {round}: {place:#x} was written after the reset");
        }
        world.disk.bring_up();
    }
    world.read(2);
}

#[test]
fn two_cpus_at_once_reset_and_set_up_the_same_device() {
    let mut world = World::new();
    let steps = world.disk.steps(TRANSPORT_FEATURES);
    std::thread::scope(|scope| {
        for cpu in 0..2 {
            let (transport, steps) = (world.disk.transport.clone(), &steps);
            scope.spawn(move || {
                for round in 0..1000usize {
                    for (register, value) in steps.iter().take((round * (7 + cpu)) % 30) {
                        transport.write(*register, &value.to_le_bytes());
                    }
                    transport.write(register::QUEUE_NOTIFY, &[0; 4]);
                    transport.write(register::STATUS, &[0; 4]);
                }
            });
        }
        for _ in 0..50 {
            world.bystander_works();
        }
    });
    world.disk.reset();
    world.disk.bring_up();
    world.read(0);
}

/// A driver that never stops making chains available does not keep the thread.
#[test]
fn a_driver_without_end_leaves_the_thread_to_others() {
    let mut world = World::new();
    let stop = Arc::new(AtomicBool::new(false));
    let mut ring = world.bystander.rings.remove(0);
    ring.descriptor(0, SECOND, 64, WRITE, 0);
    let (transport, stopped) = (world.bystander.transport.clone(), stop.clone());
    let flood = std::thread::spawn(move || {
        let mut count = 0u64;
        while !stopped.load(Ordering::Relaxed) {
            // As many as fit, again at once when some are used.
            count += ring.used().len() as u64;
            while ring.avail.wrapping_sub(ring.seen) < ring.size {
                ring.offer(0);
            }
            transport.write(register::QUEUE_NOTIFY, &[0; 4]);
        }
        count
    });
    for round in 0..100 {
        world.read(round % 8);
    }
    // Nor from its own reset.
    world.bystander.write(register::STATUS, 0);
    stop.store(true, Ordering::Relaxed);
    assert!(flood.join().unwrap() > 0);
    wait(|| world.bystander.status() == 0);
    world.bystander.bring_up();
    world.bystander_works();
}

#[test]
fn accesses_of_any_width_and_place_are_harmless() {
    let mut world = World::new();
    for offset in (0..0x1000).chain([u64::MAX, u64::MAX - 3]) {
        for width in [0, 1, 2, 3, 4, 5, 8, 16] {
            // A word at its place is a register; that is tested elsewhere.
            if width != 4 || offset % 4 != 0 {
                world.disk.transport.write(offset, &vec![0; width]);
            }
            let mut bytes = vec![0xaa; width];
            world.disk.transport.read(offset, &mut bytes);
        }
    }
    assert_eq!(world.disk.status(), 15);
    world.read(3);
    // Registers that can only be read, and places between registers.
    for offset in (0..0x1000).step_by(4) {
        let known = [register::STATUS, register::QUEUE_NOTIFY];
        if !known.contains(&offset) {
            world.disk.write(offset, 0x5555_5555);
        }
    }
    assert_eq!(world.disk.read(register::MAGIC), 0x7472_6976);
    assert_eq!(world.disk.status(), 15);
    world.read(3);
}

/// A device that waits for its host in every request.
struct Slow {
    active: Option<Activation>,
    began: Sender<()>,
    host: Receiver<()>,
}

impl VirtioDevice for Slow {
    fn device_type(&self) -> u32 {
        2
    }
    fn features(&self) -> u64 {
        0
    }
    fn queue_sizes(&self) -> Vec<u16> {
        vec![8]
    }
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }
    fn queue_event(&mut self, _queue: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let (began, host) = (&self.began, &self.host);
        active.queues[0].serve(&active.memory, &active.interrupt, |_| {
            began.send(()).unwrap();
            host.recv().unwrap();
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
    fn restore(&mut self, _state: serde_json::Value) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[test]
fn a_reset_does_not_wait_for_a_slow_host_without_end() {
    let ((began, begins), (go, host)) = (channel(), channel());
    let mut board = Board::start(Box::new(Slow { active: None, began, host }), memory());
    board.bring_up();
    board.rings[0].chain(&[(DATA, 1, true)]);
    board.kick(0);
    begins.recv().unwrap();
    // The host does not answer, and yet the write returns.
    board.write(register::STATUS, 0);
    assert_eq!(board.status(), 15, "the reset is not over");
    assert!(board.console.tail(200).contains("waits for the host"));
    // Until then nothing is taken, from any CPU.
    for (register, value) in board.steps(TRANSPORT_FEATURES) {
        board.write(register, value);
        assert_eq!(board.status(), 15);
    }
    go.send(()).unwrap();
    wait(|| board.status() == 0);
    assert_eq!(board.read(register::INTERRUPT_STATUS), 0);
    board.bring_up();
    board.rings[0].chain(&[(DATA, 1, true)]);
    board.kick(0);
    begins.recv().unwrap();
    go.send(()).unwrap();
    assert_eq!(board.wait_used(0, 1).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Random rings, tables and indices behind a good setup: the device serves or breaks, and is as good as
    /// new after a reset.
    #[test]
    fn random_rings(
        table in prop::collection::vec(
            (prop::sample::select(vec![HEADER, SECTOR, STATUS_AT, TABLE, 0x1_0000, END - 8, u64::MAX - 8]),
             prop::sample::select(vec![0u32, 1, 16, 48, 512, 513, 1 << 20, u32::MAX]), 0u16..8, 0u16..9), 8),
        heads in prop::collection::vec(0u16..10, 0..8),
        index in prop::option::weighted(0.2, any::<u16>()),
        kind in 0u32..16,
    ) {
        let mut world = World::new();
        put_header(&world.disk.memory, 0);
        world.disk.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        let ring = &mut world.disk.rings[0];
        for (number, (address, length, flags, next)) in table.iter().enumerate() {
            ring.descriptor(number as u16, *address, *length, *flags, *next);
            put_descriptor(&ring.memory, TABLE + 16 * number as u64, *address, *length, flags & 3, *next);
        }
        for head in heads {
            ring.offer(head);
        }
        if let Some(index) = index {
            ring.set_half(Ring::AVAIL + 2, index);
        }
        world.disk.kick(0);
        world.bystander_works();
        world.disk.reset();
        world.disk.bring_up();
        world.read(1);
    }
}
