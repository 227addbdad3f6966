//! Ten thousand generated cases through the device's queue, as a hostile driver sends them.
//!
//! A case is a few messages, in chains of descriptors that are cut at any place; a folder serves for many
//! cases, so that they build on what earlier ones have left. Beside it lies what must never be read or
//! changed. Another seed: `CASULO_FS_SEED`, a number.

use super::random::{Message, message, shaped};
use super::*;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::devices::virtio::fs::FsDevice;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, GuestMemory, Interrupt, VirtioDevice};

const FOLDERS: u64 = 25;
const CASES_IN_ONE: usize = 400;
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x14_0000;
const USED: u64 = 0x4_0000;
const QUEUE_SIZE: u16 = 16;

/// A driver that can do what it likes.
struct Driver<'a> {
    memory: &'a GuestMemory,
    device: FsDevice,
    ring: MockSplitQueue<'a, GuestMemory>,
    sent: u16,
}

impl<'a> Driver<'a> {
    fn new(memory: &'a Arc<GuestMemory>, base: &Path) -> Self {
        let mut device =
            FsDevice::new("casulo", shares(base), open_path(Path::new("/proc"))).unwrap();
        let ring = MockSplitQueue::create(memory.as_ref(), GuestAddress(0), QUEUE_SIZE);
        let other = MockSplitQueue::create(memory.as_ref(), GuestAddress(0x8_0000), QUEUE_SIZE);
        let mut queue: Queue = ring.create_queue().unwrap();
        // The mock's own used ring begins inside of its available ring.
        queue.set_used_ring_address(Some(USED as u32), Some(0));
        let queues = [other.create_queue().unwrap(), queue];
        let queues = queues.map(|queue| Virtqueue::new(queue, 0)).into();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let interrupt = Interrupt::new(Arc::new(AtomicU32::new(0)), line);
        let activation = Activation { memory: memory.clone(), features: 0, queues, interrupt };
        device.activate(activation).unwrap();
        Self { memory, device, ring, sent: 0 }
    }

    /// Sends a message in one chain, its two parts cut at `cut`, and returns what came back.
    fn send(&mut self, message: &[u8], room: usize, cut: usize) -> Vec<u8> {
        self.memory.write_slice(message, GuestAddress(REQUEST)).unwrap();
        let (next, write) = (1, 2);
        let mut parts = Vec::new();
        for (start, size, flags) in [(REQUEST, message.len(), 0), (REPLY, room, write)] {
            let cut = cut.min(size);
            for (offset, size) in [(0, cut), (cut, size - cut)] {
                if size > 0 {
                    parts.push((start + offset as u64, size as u32, flags));
                }
            }
        }
        let count = parts.len() as u16;
        for (index, (start, size, flags)) in (0..).zip(parts) {
            let more = if index + 1 < count { next } else { 0 };
            let one = Descriptor::new(start, size, flags | more, index + 1);
            self.ring.desc_table().store(index, RawDescriptor::from(one)).unwrap();
        }
        let slot = usize::from(self.sent % QUEUE_SIZE);
        self.ring.avail().ring().ref_at(slot).unwrap().store(0);
        self.sent = self.sent.wrapping_add(1);
        self.ring.avail().idx().store(self.sent);
        self.device.queue_event(1).unwrap();
        // Flags and index, then pairs of a chain and how much was written into it.
        let index: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        assert_eq!(index, self.sent, "every chain comes back");
        let used = GuestAddress(USED + 4 + 8 * slot as u64);
        let [chain, written]: [u32; 2] = self.memory.read_obj(used).unwrap();
        assert_eq!(chain, 0);
        let written = written as usize;
        assert!(written <= room);
        let mut reply = vec![0; written];
        self.memory.read_slice(&mut reply, GuestAddress(REPLY)).unwrap();
        reply
    }

    fn look_up(&mut self, parent: u64, name: &str) -> Option<u64> {
        let len = (InHeader::SIZE + name.len() + 1) as u32;
        let header = InHeader { len, opcode: op::LOOKUP, node: parent, ..Default::default() };
        let reply = self.send(&[bytes_of(&header), name_bytes(name)].concat(), 200, 40);
        EntryOut::parse(reply.get(OutHeader::SIZE..)?).map(|entry| entry.node)
    }

    /// Mounts again, and returns nodes in the shares, whose roots have the numbers 2 to 5.
    fn mount(&mut self) -> Vec<u64> {
        let header = InHeader { len: 104, opcode: op::INIT, ..Default::default() };
        let init = bytes_of(&InitIn { major: 7, minor: 38, max_readahead: 0, flags: !0 });
        self.send(&[bytes_of(&header), init, vec![0; 48]].concat(), 200, 40);
        let names = ["a.txt", "sub", "link", "fifo"].map(|name| (2, name));
        let names = names.into_iter().chain(["a.txt", "sub"].map(|name| (3, name)));
        names.filter_map(|(parent, name)| self.look_up(parent, name)).collect()
    }
}

fn case() -> impl Strategy<Value = Vec<(Message, usize)>> {
    let one = proptest::prop_oneof![1 => message().boxed(), 3 => shaped().boxed()];
    proptest::collection::vec((one, 0_usize..120), 1..10)
}

#[test]
fn ten_thousand_hostile_cases_leave_the_canary_alone() {
    let seed = std::env::var("CASULO_FS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or(1);
    let (mut served, mut refused) = (0_u64, 0_u64);
    for folder in 0..FOLDERS {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&folder.to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(Config::default(), random);
        let strategy = case();
        let world = World::new();
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let memory = Arc::new(memory);
        let mut driver = Driver::new(&memory, world.base.path());
        for number in 0..CASES_IN_ONE {
            // An earlier case may have unmounted it.
            let known = driver.mount();
            let mut messages = strategy.new_tree(&mut runner).unwrap().current();
            for (message, _) in &mut messages {
                // Numbers behind those of the shares stand for what is known in them.
                let other = message.node.checked_sub(6).and_then(|index| known.get(index as usize));
                message.node = *other.unwrap_or(&message.node);
            }
            for (message, cut) in &messages {
                let reply = driver.send(&message.bytes(), message.room, *cut);
                match OutHeader::parse(&reply) {
                    Some(OutHeader { error: 0, .. }) => served += 1,
                    _ => refused += 1,
                }
                let needle = b"contents of outside";
                let leak = reply.windows(needle.len()).any(|window| window == needle);
                assert!(!leak, "seed {seed}, folder {folder}, case {number}: {message:?}");
            }
            let unharmed = world.is_protected();
            assert!(unharmed, "seed {seed}, folder {folder}, case {number}: {messages:?}");
        }
    }
    // They are no test if all of them fail at the door.
    assert!(served > 2_000 && refused > 5_000, "{served} {refused}");
}
