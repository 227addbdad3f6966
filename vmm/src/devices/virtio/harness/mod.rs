//! What the tests of transport, queues and devices share: a driver's rings in guest memory, and a device on
//! its registers and its thread as in a VM.

#![allow(unreachable_pub, reason = "helpers of tests")]

mod attacks;
mod round_trip;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::chain::Descriptor;
use super::mmio::{MmioTransport, TRANSPORT_FEATURES};
use super::page::{STATUS_NEEDS_RESET, register};
use super::worker::{Worker, serve};
use super::{GuestMemory, VirtioDevice};
use crate::devices::serial::Console;

pub(super) const NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub(super) const WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub(super) const INDIRECT: u16 = 4;

/// End of the first region of [`memory`]; a hole follows.
pub(super) const END: u64 = 0x20_0000;
/// Start of the second region.
pub(super) const SECOND: u64 = 0x40_0000;
/// Where buffers may lie; rings are below.
pub(super) const DATA: u64 = 0x10_0000;

/// Longest that anything here may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Guest memory of two regions with a hole between them.
pub(super) fn memory() -> Arc<GuestMemory> {
    let regions = [(GuestAddress(0), 0x20_0000), (GuestAddress(SECOND), 0x10_0000)];
    Arc::new(GuestMemory::from_ranges(&regions).unwrap())
}

/// A queue as its driver sees it.
pub(super) struct Ring {
    pub memory: Arc<GuestMemory>,
    pub base: u64,
    pub size: u16,
    /// Available index, as the driver counts it.
    pub avail: u16,
    /// Used entries that the driver has seen.
    pub seen: u16,
    next: u16,
}

impl Ring {
    pub const AVAIL: u64 = 0x4000;
    pub const USED: u64 = 0x6000;

    /// An empty ring number `index`, zeroed.
    pub fn new(memory: &Arc<GuestMemory>, index: usize, size: u16) -> Self {
        let base = 0x1_0000 * (index as u64 + 1);
        memory.write_slice(&[0; 0x1_0000], GuestAddress(base)).unwrap();
        Self { memory: memory.clone(), base, size, avail: 0, seen: 0, next: 0 }
    }

    /// The queue as a transport would make it.
    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(1024).unwrap();
        queue.try_set_size(self.size).unwrap();
        queue.try_set_desc_table_address(GuestAddress(self.base)).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(self.base + Self::AVAIL)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(self.base + Self::USED)).unwrap();
        queue.set_ready(true);
        assert!(queue.is_valid(&*self.memory));
        queue
    }

    fn half(&self, offset: u64) -> u16 {
        self.memory.load(GuestAddress(self.base + offset), Ordering::Acquire).unwrap()
    }

    pub fn set_half(&self, offset: u64, value: u16) {
        self.memory.store(value, GuestAddress(self.base + offset), Ordering::Release).unwrap();
    }

    /// Writes an entry of the descriptor table.
    pub fn descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = self.base + 16 * u64::from(index);
        put_descriptor(&self.memory, at, address, length, flags, next);
    }

    /// Makes the chain that begins at `head` available.
    pub fn offer(&mut self, head: u16) {
        self.set_half(Self::AVAIL + 4 + 2 * u64::from(self.avail % self.size), head);
        self.avail = self.avail.wrapping_add(1);
        self.set_half(Self::AVAIL + 2, self.avail);
    }

    /// Makes a chain of (address, length, device may write) available; returns its head.
    pub fn chain(&mut self, parts: &[(u64, u32, bool)]) -> u16 {
        let head = self.next;
        for (number, (address, length, writable)) in parts.iter().enumerate() {
            let index = self.next;
            self.next = (self.next + 1) % self.size;
            let flags = if *writable { WRITE } else { 0 };
            let flags = if number + 1 < parts.len() { flags | NEXT } else { flags };
            self.descriptor(index, *address, *length, flags, self.next);
        }
        self.offer(head);
        head
    }

    /// Used entries (head, bytes written) since the last call.
    pub fn used(&mut self) -> Vec<(u16, u32)> {
        let end = self.half(Self::USED + 2);
        let mut all = Vec::new();
        while self.seen != end {
            let slot = self.base + Self::USED + 4 + 8 * u64::from(self.seen % self.size);
            let [head, length]: [u32; 2] = self.memory.read_obj(GuestAddress(slot)).unwrap();
            all.push((u16::try_from(head).unwrap(), length));
            self.seen = self.seen.wrapping_add(1);
        }
        all
    }

    /// With `EVENT_IDX`: interrupt when the used entry of this number is there.
    pub fn set_used_event(&self, number: u16) {
        self.set_half(Self::AVAIL + 4 + 2 * u64::from(self.size), number);
    }

    /// With `EVENT_IDX`: the device wants a kick when the available entry of this number is there.
    pub fn avail_event(&self) -> u16 {
        self.half(Self::USED + 4 + 8 * u64::from(self.size))
    }

    /// Without `EVENT_IDX`: the flags of the used ring.
    pub fn used_flags(&self) -> u16 {
        self.half(Self::USED)
    }
}

/// Writes a descriptor anywhere.
pub(super) fn put_descriptor(
    memory: &GuestMemory,
    at: u64,
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
) {
    let descriptor = Descriptor::new(address, length, flags, next);
    let raw = virtio_queue::desc::RawDescriptor::from(descriptor);
    memory.write_obj(raw, GuestAddress(at)).unwrap();
}

/// A device behind its registers, with the driver's rings.
pub(super) struct Board {
    pub transport: Arc<MmioTransport>,
    pub memory: Arc<GuestMemory>,
    pub line: Arc<EventFd>,
    pub console: Console,
    pub rings: Vec<Ring>,
    /// First ring in guest memory, for boards that share it.
    pub place: usize,
}

impl Board {
    /// A device and its worker, which is for [`serve`].
    pub fn new(device: Box<dyn VirtioDevice>, memory: Arc<GuestMemory>) -> (Self, Worker) {
        let pages = crate::memory::map_pages(NonZeroUsize::new(4096).unwrap()).unwrap();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let console = Console::default();
        let (transport, worker) =
            MmioTransport::new(device, memory.clone(), pages, 0, line.clone(), console.clone())
                .unwrap();
        let transport = Arc::new(transport);
        (Self { transport, memory, line, console, rings: Vec::new(), place: 0 }, worker)
    }

    /// A device on a thread of its own.
    pub fn start(device: Box<dyn VirtioDevice>, memory: Arc<GuestMemory>) -> Self {
        let (board, worker) = Self::new(device, memory);
        std::thread::spawn(move || serve(vec![worker]).unwrap());
        board
    }

    pub fn write(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    pub fn read(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub fn status(&self) -> u32 {
        self.read(register::STATUS)
    }

    pub fn offered(&self) -> u64 {
        let [low, high] = [0, 1].map(|half| {
            self.write(register::DEVICE_FEATURES_SEL, half);
            u64::from(self.read(register::DEVICE_FEATURES))
        });
        low | high << 32
    }

    /// Every register write of a good driver up to DRIVER_OK, in order.
    pub fn steps(&self, features: u64) -> Vec<(u64, u32)> {
        let mut steps = vec![(register::STATUS, 1), (register::STATUS, 3)];
        for (half, value) in [(0, features), (1, features >> 32)] {
            steps.push((register::DRIVER_FEATURES_SEL, half));
            steps.push((register::DRIVER_FEATURES, value as u32));
        }
        steps.push((register::STATUS, 11));
        for (number, ring) in self.rings.iter().enumerate() {
            steps.push((register::QUEUE_SEL, number as u32));
            steps.push((register::QUEUE_NUM, ring.size.into()));
            for (register, address) in [
                (register::QUEUE_DESC, ring.base),
                (register::QUEUE_DRIVER, ring.base + Ring::AVAIL),
                (register::QUEUE_DEVICE, ring.base + Ring::USED),
            ] {
                steps.push((register, address as u32));
                steps.push((register + 4, (address >> 32) as u32));
            }
            steps.push((register::QUEUE_READY, 1));
        }
        steps.push((register::STATUS, 15));
        steps
    }

    /// Makes new, empty rings of the size that the device offers, at most 128.
    pub fn new_rings(&mut self) {
        self.rings = (0..)
            .map_while(|number| {
                self.write(register::QUEUE_SEL, number);
                let most = u16::try_from(self.read(register::QUEUE_NUM_MAX)).unwrap();
                let index = self.place + number as usize;
                (most > 0).then(|| Ring::new(&self.memory, index, most.min(128)))
            })
            .collect();
    }

    /// Does what a good driver does, with these features.
    pub fn bring_up_with(&mut self, features: u64) {
        self.new_rings();
        for (register, value) in self.steps(features) {
            self.write(register, value);
        }
        assert_eq!(self.status(), 15, "{}", self.console.tail(1000));
    }

    pub fn bring_up(&mut self) {
        self.bring_up_with(TRANSPORT_FEATURES);
    }

    pub fn reset(&self) {
        self.write(register::STATUS, 0);
        assert_eq!(self.status(), 0);
    }

    pub fn kick(&self, queue: usize) {
        self.write(register::QUEUE_NOTIFY, queue as u32);
    }

    /// Waits for `count` used entries of a queue.
    #[track_caller]
    pub fn wait_used(&mut self, queue: usize, count: usize) -> Vec<(u16, u32)> {
        let mut all = Vec::new();
        wait(|| {
            all.extend(self.rings[queue].used());
            assert_eq!(self.status() & STATUS_NEEDS_RESET, 0, "{}", self.console.tail(1000));
            all.len() >= count
        });
        assert_eq!(all.len(), count);
        all
    }

    /// Waits until the device says that it needs a reset, and that it interrupted its driver for it.
    #[track_caller]
    pub fn wait_broken(&self) {
        wait(|| self.status() & STATUS_NEEDS_RESET != 0 && self.line.read().is_ok());
        assert_eq!(self.status(), 15 | STATUS_NEEDS_RESET);
        assert_eq!(self.read(register::INTERRUPT_STATUS), 3);
    }
}

/// Waits for something.
#[track_caller]
pub(super) fn wait(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}
