//! A driver in front of the real transport, worker and device.
//!
//! Layout of the guest's memory:
//!
//! ```text
//! 0x01000  queue 0: descriptor table, available ring (+ 0x2000), used ring (+ 0x3000)
//! 0x06000  queue 1
//! 0x0b000  queue 2
//! 0x10000  data, to the end of the first region and in the second, which follows at 0x30000
//! 0x40000  hole
//! 0x80000  third region, to 0x90000
//! ```

use std::num::NonZeroUsize;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use casulo_vmm::devices::serial::Console;
use casulo_vmm::devices::virtio::mmio::MmioTransport;
use casulo_vmm::devices::virtio::page::register;
use casulo_vmm::devices::virtio::worker::Worker;
use casulo_vmm::devices::virtio::{GuestMemory, VirtioDevice};
use event_manager::{EventManager, SubscriberOps};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::program::{Buffer, Op, Place, QueueOp, RegisterOp, Setup};

const REGIONS: [(u64, usize); 3] = [(0, 0x3_0000), (0x3_0000, 0x1_0000), (0x8_0000, 0x1_0000)];
/// Start of the data area.
pub const DATA: u64 = 0x1_0000;
/// End of the data area.
pub const DATA_END: u64 = 0x4_0000;
const END: u64 = 0x9_0000;
const QUEUES: u64 = 0x1000;
const QUEUE_STRIDE: u64 = 0x5000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Largest queue for which the layout has room.
const MAX_QUEUE: u32 = 512;
/// Rounds of events after one action before the worker is said to spin.
const MAX_ROUNDS: usize = 2000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 64;
const VERSION_1: u64 = 1 << 32;

/// What the driver knows of one of its queues.
#[derive(Clone, Debug)]
struct Ring {
    base: u64,
    size: u16,
    next_desc: u16,
    avail: u16,
    used: u16,
}

/// A buffer that the device has used.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// First descriptor of the chain.
    pub head: u16,
    /// Bytes written, as the device says.
    pub length: u32,
}

/// A guest with one device.
pub struct Machine {
    /// The guest's memory.
    pub memory: Arc<GuestMemory>,
    transport: Arc<MmioTransport>,
    manager: EventManager<Worker>,
    console: Console,
    rings: Vec<Ring>,
    /// Where the next buffer of a well-formed request goes.
    next_data: u64,
}

impl Machine {
    /// A machine after power-on. Every input gets the same memory, zeroed.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        static MEMORY: OnceLock<Arc<GuestMemory>> = OnceLock::new();
        static PAGES: OnceLock<Arc<MmapRegion<()>>> = OnceLock::new();
        let memory = MEMORY.get_or_init(|| {
            let regions = REGIONS.map(|(start, size)| (GuestAddress(start), size));
            Arc::new(GuestMemory::from_ranges(&regions).expect("guest memory"))
        });
        for region in memory.iter() {
            let size = usize::try_from(region.len()).expect("a small region");
            let slice = region.get_slice(vm_memory::MemoryRegionAddress(0), size);
            slice.expect("the whole region").copy_from(&ZEROS[..size]);
        }
        let pages = PAGES.get_or_init(|| {
            let size = NonZeroUsize::new(4096).expect("not zero");
            casulo_vmm::memory::map_pages(size).expect("a page")
        });
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
        let (sizes, console) = (device.queue_sizes(), Console::default());
        let (memory, pages) = (memory.clone(), pages.clone());
        let (transport, worker) =
            MmioTransport::new(device, memory.clone(), pages, 0, line, console.clone())
                .expect("a transport");
        let mut manager = EventManager::new_with_capacity(8).expect("an epoll set");
        manager.add_subscriber(worker);
        let rings = (0..sizes.len() as u64).map(Ring::new).collect();
        Self { memory, transport: Arc::new(transport), manager, console, rings, next_data: DATA }
    }

    /// The device status register.
    pub fn status(&self) -> u32 {
        self.word(register::STATUS)
    }

    /// Reads a register.
    pub fn word(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes a register.
    pub fn set(&mut self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    /// Writes any bytes to the registers, and lets the worker do what follows from it.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let is_reset = offset == register::STATUS && bytes == [0; 4];
        if is_reset && self.status() & DRIVER_OK != 0 {
            self.aside(|transport| transport.write(register::STATUS, &[0; 4]));
        } else {
            self.transport.write(offset, bytes);
        }
        // The worker hears of no other register.
        if matches!(offset, register::STATUS | register::QUEUE_NOTIFY) {
            self.settle();
        }
        self.check_status();
    }

    /// Does something for which the transport waits for the worker, which is driven by this thread.
    fn aside(&mut self, job: impl FnOnce(&MmioTransport) + Send + 'static) {
        let transport = self.transport.clone();
        let vcpu = Vcpu::get();
        vcpu.run(Box::new(move || job(&transport)));
        while !vcpu.is_done() {
            self.manager.run_with_timeout(0).expect("events");
        }
    }

    /// Stops the device, saves its state and lets it go on. A device may refuse to be saved.
    pub fn save(&mut self) {
        self.aside(|transport| {
            if transport.pause().is_ok() {
                let saved = transport.save();
                saved.iter().for_each(|state| assert!(serde_json::to_vec(state).is_ok()));
            }
            // Told to the driver by the status.
            let _ = transport.resume();
        });
        self.settle();
    }

    /// Runs the worker until there is nothing to do.
    ///
    /// # Panics
    /// It does not come to an end.
    pub fn settle(&mut self) {
        for _ in 0..MAX_ROUNDS {
            if self.manager.run_with_timeout(0).expect("events") == 0 {
                return;
            }
        }
        panic!("the worker spins");
    }

    /// The status only ever holds what a driver may have reached.
    fn check_status(&self) {
        let status = self.status();
        for (bit, needs) in [(DRIVER, ACKNOWLEDGE), (FEATURES_OK, DRIVER), (DRIVER_OK, FEATURES_OK)]
        {
            assert!(status & bit == 0 || status & needs != 0, "status {status:#x}");
        }
        assert!(status & !0xcf == 0, "status {status:#x}");
    }

    /// Resets the device and does what a good driver does.
    pub fn bring_up(&mut self, setup: &Setup) {
        self.set(register::STATUS, 0);
        // The transport does not wait for ever, and this thread may have to wait for a processor.
        for _ in 0..5 {
            if self.status() != 0 {
                self.set(register::STATUS, 0);
            }
        }
        assert_eq!(self.status(), 0, "a reset");
        self.set(register::STATUS, ACKNOWLEDGE);
        self.set(register::STATUS, ACKNOWLEDGE | DRIVER);
        let mut taken = 0;
        for half in 0..2_u32 {
            self.set(register::DEVICE_FEATURES_SEL, half);
            taken |= u64::from(self.word(register::DEVICE_FEATURES)) << (32 * half);
        }
        let ring = u64::from(setup.features) << 24 & (0b11 << 28);
        let others = if setup.features & 1 == 0 { 0 } else { !(0b11 << 28) };
        taken &= VERSION_1 | ring | others;
        self.features(taken);
        self.set(register::STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(self.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK, "features {taken:#x}");
        for number in 0..self.rings.len() {
            self.set(register::QUEUE_SEL, number as u32);
            let halved = u32::from(setup.halved.get(number).copied().unwrap_or(0)) % 16;
            let size = (self.word(register::QUEUE_NUM_MAX).min(MAX_QUEUE) >> halved).max(1);
            let mut ring = Ring::new(number as u64);
            ring.size = size as u16;
            self.place(ring.base, &[0; QUEUE_STRIDE as usize]);
            self.queue(size, ring.base, ring.base + AVAIL, ring.base + USED);
            self.rings[number] = ring;
        }
        let all = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
        self.set(register::STATUS, all);
        assert_eq!(self.status(), all, "a good driver is served: {}", self.console.tail(200));
    }

    fn features(&mut self, features: u64) {
        for (half, value) in [(0, features), (1, features >> 32)] {
            self.set(register::DRIVER_FEATURES_SEL, half);
            self.set(register::DRIVER_FEATURES, value as u32);
        }
    }

    fn queue(&mut self, size: u32, desc: u64, avail: u64, used: u64) {
        self.set(register::QUEUE_NUM, size);
        for (register, address) in [
            (register::QUEUE_DESC, desc),
            (register::QUEUE_DRIVER, avail),
            (register::QUEUE_DEVICE, used),
        ] {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(register::QUEUE_READY, 1);
    }

    /// Puts bytes into the guest's memory; where there is none, nothing happens.
    pub fn place(&self, address: u64, bytes: &[u8]) {
        let _ = self.memory.write(bytes, GuestAddress(address));
    }

    /// Bytes of the guest's memory; where there is none, zeros.
    pub fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let _ = self.memory.read(&mut bytes, GuestAddress(address));
        bytes
    }

    fn half(&self, address: u64) -> u16 {
        self.memory.read_obj(GuestAddress(address)).unwrap_or(0)
    }

    /// Room for `length` bytes in the data area, which is used in turns.
    pub fn room(&mut self, length: u32) -> u64 {
        let length = u64::from(length).min(DATA_END - DATA);
        if self.next_data + length > DATA_END {
            self.next_data = DATA;
        }
        let address = self.next_data;
        self.next_data += length;
        address
    }

    /// Offers a chain of buffers (address, length, whether the device may write it), without a kick.
    /// Gives its head.
    pub fn offer(&mut self, queue: usize, buffers: &[(u64, u32, bool)], indirect: bool) -> u16 {
        let Some(ring) = self.rings.get(queue) else { return 0 };
        let (base, size, head) = (ring.base, ring.size, ring.next_desc);
        let last = buffers.len().saturating_sub(1);
        let mut table = Vec::new();
        for (index, (address, length, writable)) in buffers.iter().enumerate() {
            let place = if indirect { 0 } else { head };
            let next = place.wrapping_add(index as u16).wrapping_add(1) % size.max(1);
            let next = if indirect { index as u16 + 1 } else { next };
            let flags = if index < last { NEXT } else { 0 } | if *writable { WRITE } else { 0 };
            table.push(descriptor(*address, *length, flags, next));
        }
        if indirect {
            let bytes = table.concat();
            let address = self.room(bytes.len() as u32);
            self.place(address, &bytes);
            table = vec![descriptor(address, bytes.len() as u32, INDIRECT, 0)];
        }
        for (index, bytes) in table.iter().enumerate() {
            let place = u64::from(head.wrapping_add(index as u16) % size.max(1));
            self.place(base + place * 16, bytes);
        }
        let ring = &mut self.rings[queue];
        ring.next_desc = head.wrapping_add(table.len() as u16) % size.max(1);
        let slot = u64::from(ring.avail % size.max(1));
        ring.avail = ring.avail.wrapping_add(1);
        let index = ring.avail;
        self.place(base + AVAIL + 4 + slot * 2, &head.to_le_bytes());
        self.place(base + AVAIL + 2, &index.to_le_bytes());
        head
    }

    /// Kicks a queue.
    pub fn kick(&mut self, queue: usize) {
        self.set(register::QUEUE_NOTIFY, queue as u32);
    }

    /// What the device has used since this was asked last.
    pub fn used(&mut self, queue: usize) -> Vec<Used> {
        let Some(ring) = self.rings.get(queue).cloned() else { return Vec::new() };
        let end = self.half(ring.base + USED + 2);
        let count = end.wrapping_sub(ring.used).min(ring.size);
        self.rings[queue].used = end;
        let from = end.wrapping_sub(count);
        (0..count)
            .map(|n| {
                let slot = u64::from(from.wrapping_add(n) % ring.size.max(1));
                let address = ring.base + USED + 4 + slot * 8;
                let length = self.memory.read_obj(GuestAddress(address + 4)).unwrap_or(0);
                Used { head: self.half(address), length }
            })
            .collect()
    }

    /// The first `length` bytes of the buffers of a chain, of which the first descriptor may be indirect.
    pub fn chain_bytes(&self, queue: usize, head: u16, length: usize) -> Vec<u8> {
        let Some(ring) = self.rings.get(queue) else { return Vec::new() };
        let (mut table, mut index) = (ring.base, u64::from(head));
        let mut bytes = Vec::new();
        for _ in 0..16 {
            let at = |offset| GuestAddress(table.wrapping_add(index * 16 + offset));
            let address: u64 = self.memory.read_obj(at(0)).unwrap_or(0);
            let size: u32 = self.memory.read_obj(at(8)).unwrap_or(0);
            let flags: u16 = self.memory.read_obj(at(12)).unwrap_or(0);
            let next: u16 = self.memory.read_obj(at(14)).unwrap_or(0);
            if flags & INDIRECT != 0 {
                (table, index) = (address, 0);
                continue;
            }
            bytes.extend(self.bytes(address, (size as usize).min(length - bytes.len())));
            if flags & NEXT == 0 || bytes.len() >= length {
                break;
            }
            index = u64::from(next);
        }
        bytes
    }

    /// A well-formed request: parts for the device to read, then room for its answer. Gives the number of
    /// bytes written and the answer's room (of each piece at most 64 KiB), or `None` if the device did not
    /// use the chain.
    pub fn request(
        &mut self,
        queue: usize,
        parts: &[&[u8]],
        rooms: &[u32],
        indirect: bool,
    ) -> Option<(u32, Vec<u8>)> {
        let mut buffers = Vec::new();
        // A good driver offers no empty buffers.
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let address = self.room(part.len() as u32);
            self.place(address, part);
            buffers.push((address, part.len() as u32, false));
        }
        for length in rooms.iter().filter(|length| **length > 0) {
            buffers.push((self.room(*length), *length, true));
        }
        self.used(queue);
        let head = self.offer(queue, &buffers, indirect);
        self.kick(queue);
        let used = self.used(queue).into_iter().rfind(|used| used.head == head)?;
        let mut answer = Vec::new();
        for (address, length, _) in buffers.iter().filter(|(_, _, writable)| *writable) {
            answer.extend(self.bytes(*address, (*length as usize).min(0x1_0000)));
        }
        Some((used.length, answer))
    }

    /// Carries out one action of a driver.
    pub fn run(&mut self, op: &Op) {
        match op {
            Op::Queue(op) => self.run_queue(op),
            Op::Register(op) => self.run_register(op),
        }
    }

    fn ring(&self, queue: u8) -> &Ring {
        &self.rings[usize::from(queue) % self.rings.len()]
    }

    fn run_queue(&mut self, op: &QueueOp) {
        match op {
            QueueOp::Put { place, bytes } => self.place(place.address(), bytes),
            QueueOp::Chain { queue, buffers, indirect } => {
                let queue = usize::from(*queue) % self.rings.len();
                let buffers: Vec<_> = buffers.iter().take(16).map(Buffer::raw).collect();
                self.offer(queue, &buffers, *indirect);
                self.kick(queue);
            }
            QueueOp::Descriptor { queue, index, place, length, flags, next } => {
                let ring = self.ring(*queue);
                let address = ring.base + u64::from(*index % ring.size.max(1)) * 16;
                let bytes =
                    descriptor(place.address(), length.bytes(), u16::from(*flags & 7), *next);
                self.place(address, &bytes);
            }
            QueueOp::Slot { queue, slot, head } => {
                let ring = self.ring(*queue);
                let slot = u64::from(u16::from(*slot) % ring.size.max(1));
                self.place(ring.base + AVAIL + 4 + slot * 2, &head.to_le_bytes());
            }
            QueueOp::Index { queue, index } => {
                let queue = usize::from(*queue) % self.rings.len();
                self.rings[queue].avail = *index;
                self.place(self.rings[queue].base + AVAIL + 2, &index.to_le_bytes());
            }
            QueueOp::Advance { queue, by } => {
                let queue = usize::from(*queue) % self.rings.len();
                let ring = &mut self.rings[queue];
                ring.avail = ring.avail.wrapping_add(u16::from(*by));
                let (base, index) = (ring.base, ring.avail);
                self.place(base + AVAIL + 2, &index.to_le_bytes());
            }
            QueueOp::UsedEvent { queue, index } => {
                let ring = self.ring(*queue);
                let address = ring.base + AVAIL + 4 + u64::from(ring.size) * 2;
                self.place(address, &index.to_le_bytes());
            }
            QueueOp::Kick(queue) => self.kick(usize::from(*queue)),
        }
    }

    fn run_register(&mut self, op: &RegisterOp) {
        match op {
            RegisterOp::Word { register, value } => {
                self.set(u64::from(*register) * 4, u32::from(*value));
            }
            RegisterOp::Write { offset, width, value } => {
                let width = usize::from(*width) % 9;
                self.write(u64::from(*offset) % 0x1010, &value.to_le_bytes()[..width]);
            }
            RegisterOp::Read { offset, width } => {
                let mut bytes = [0; 8];
                let width = usize::from(*width) % 9;
                self.transport.read(u64::from(*offset) % 0x1010, &mut bytes[..width]);
            }
            RegisterOp::Status(status) => self.set(register::STATUS, u32::from(*status)),
            RegisterOp::Features(features) => self.features(*features),
            RegisterOp::Queue { queue, size, desc, avail, used } => {
                self.set(register::QUEUE_SEL, u32::from(*queue));
                self.queue(u32::from(*size), desc.address(), avail.address(), used.address());
            }
            RegisterOp::BringUp(setup) => self.bring_up(setup),
            RegisterOp::Save => self.save(),
            RegisterOp::Reset => self.set(register::STATUS, 0),
        }
    }

    /// Brings the device up again if it is not in use, as a driver does that wants to go on. Gives whether
    /// that was needed.
    pub fn recover(&mut self, setup: &Setup) -> bool {
        let needed = self.status() != ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
        if needed {
            self.bring_up(setup);
        }
        needed
    }

    /// Whether the device has given up on the driver.
    pub fn is_broken(&self) -> bool {
        self.status() & NEEDS_RESET != 0
    }
}

impl Ring {
    fn new(number: u64) -> Self {
        let base = QUEUES + number * QUEUE_STRIDE;
        Self { base, size: 1, next_desc: 0, avail: 0, used: 0 }
    }
}

impl Place {
    /// The address.
    pub fn address(&self) -> u64 {
        match self {
            Self::Data(word) => DATA + u64::from(*word) * 4,
            Self::Ring(byte) => u64::from(*byte),
            Self::End(below) => END - u64::from(*below),
            Self::Last(below) => u64::MAX - u64::from(*below),
            Self::Any(address) => *address,
        }
    }
}

impl Buffer {
    fn raw(&self) -> (u64, u32, bool) {
        (self.place.address(), self.length.bytes(), self.writable)
    }
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&next.to_le_bytes());
    bytes
}

static ZEROS: [u8; 0x3_0000] = [0; 0x3_0000];

type Job = Box<dyn FnOnce() + Send>;

/// A thread for what waits for the worker.
struct Vcpu {
    jobs: Sender<Job>,
    done: Receiver<()>,
}

impl Vcpu {
    fn get() -> std::sync::MutexGuard<'static, Self> {
        static VCPU: OnceLock<Mutex<Vcpu>> = OnceLock::new();
        VCPU.get_or_init(|| Mutex::new(Self::start())).lock().expect("a vCPU that lives")
    }

    fn start() -> Self {
        let (jobs, next) = channel::<Job>();
        let (tell, done) = channel();
        std::thread::spawn(move || {
            for job in next {
                job();
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        Self { jobs, done }
    }

    fn run(&self, job: Job) {
        self.jobs.send(job).expect("a vCPU that lives");
    }

    /// Whether the job is done; waits a little for it.
    fn is_done(&self) -> bool {
        self.done.recv_timeout(Duration::from_micros(50)).is_ok()
    }
}
