//! The device behind real queues in guest memory, driven as a Linux guest does.

use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::handle::VsockEvent;
use super::super::packet::Op;
use super::super::testing::{GUEST_CID, Stream, header};
use super::*;

const PORT: u32 = 80;
const GUEST: u32 = 1234;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

const RX_RING: u64 = 0;
const TX_RING: u64 = 0x1_0000;
const EVENT_RING: u64 = 0x2_0000;
/// 4 KiB for each receive buffer, by descriptor.
const RX_DATA: u64 = 0x10_0000;
const TX_DATA: u64 = 0x30_0000;
/// 8 bytes for each event buffer, by descriptor.
const EVENT_DATA: u64 = 0x50_0000;
const MEMORY: usize = 0x80_0000;

/// A driver for one device.
struct Driver {
    memory: Arc<GuestMemory>,
    device: VsockDevice,
    handle: VsockHandle,
    events: VsockEvents,
    line: Arc<EventFd>,
    rx_posted: u16,
    rx_seen: u16,
    tx_posted: u16,
    events_posted: u16,
    event_idx: bool,
}

fn ring(memory: &GuestMemory, start: u64) -> MockSplitQueue<'_, GuestMemory> {
    MockSplitQueue::create(memory, GuestAddress(start), QUEUE_SIZE)
}

/// Addresses inside a ring: available index, available ring, used index, used ring.
fn parts(start: u64) -> [u64; 4] {
    let size = u64::from(QUEUE_SIZE);
    let avail = start + 16 * size;
    let used = (avail + 4 + 2 * size + 3) & !3;
    [avail + 2, avail + 4, used + 2, used + 4]
}

impl Driver {
    fn new(event_idx: bool) -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let memory = Arc::new(memory);
        let (device, handle, events) = VsockDevice::new(GUEST_CID, &[PORT]).unwrap();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let mut driver = Self {
            memory,
            device,
            handle,
            events,
            line,
            rx_posted: 0,
            rx_seen: 0,
            tx_posted: 0,
            events_posted: 0,
            event_idx,
        };
        driver.activate();
        driver
    }

    fn activate(&mut self) {
        (self.rx_posted, self.rx_seen, self.tx_posted, self.events_posted) = (0, 0, 0, 0);
        let memory = Arc::clone(&self.memory);
        let queues = [RX_RING, TX_RING, EVENT_RING].map(|start| {
            let mut queue: Queue = ring(&memory, start).create_queue().unwrap();
            // The mock places the used ring without room for `used_event`.
            let [_, _, used, _] = parts(start);
            queue.set_used_ring_address(Some(u32::try_from(used - 2).unwrap()), Some(0));
            memory.write_obj(0_u32, GuestAddress(used - 2)).unwrap();
            Virtqueue::new(queue, self.features())
        });
        self.device
            .activate(Activation {
                memory,
                features: 0,
                queues: queues.into(),
                interrupt: Interrupt::new(Arc::new(AtomicU32::new(0)), Arc::clone(&self.line)),
            })
            .unwrap();
    }

    fn features(&self) -> u64 {
        let features = if self.event_idx { 1 << VIRTIO_RING_F_EVENT_IDX } else { 0 };
        features | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn set_descriptor(&self, start: u64, index: u16, descriptor: Descriptor) {
        let at = GuestAddress(start + 16 * u64::from(index));
        self.memory.write_obj(RawDescriptor::from(descriptor), at).unwrap();
    }

    fn post(&self, start: u64, posted: u16, head: u16) {
        let [idx, avail, ..] = parts(start);
        let slot = GuestAddress(avail + 2 * u64::from(posted % QUEUE_SIZE));
        self.memory.write_obj(head, slot).unwrap();
        self.memory.store(posted.wrapping_add(1), GuestAddress(idx), Ordering::Release).unwrap();
    }

    /// Posts receive buffers as Linux does: one descriptor of 4 KiB each.
    fn post_rx(&mut self, count: u16) {
        for _ in 0..count {
            let index = self.rx_posted % QUEUE_SIZE;
            let address = RX_DATA + 4096 * u64::from(index);
            self.set_descriptor(RX_RING, index, Descriptor::new(address, 4096, WRITE, 0));
            self.post(RX_RING, self.rx_posted, index);
            self.rx_posted = self.rx_posted.wrapping_add(1);
        }
    }

    /// Posts a packet whose bytes lie in pieces of the given lengths.
    fn post_tx(&mut self, header: Header, data: &[u8], pieces: &[usize]) {
        let bytes = [&header.to_bytes()[..], data].concat();
        self.memory.write_slice(&bytes, GuestAddress(TX_DATA)).unwrap();
        let mut at = 0;
        let count = u16::try_from(pieces.len()).unwrap();
        for (index, &piece) in (0..).zip(pieces) {
            let flags = if index + 1 < count { NEXT } else { 0 };
            let address = TX_DATA + at as u64;
            let len = u32::try_from(piece).unwrap();
            self.set_descriptor(TX_RING, index, Descriptor::new(address, len, flags, index + 1));
            at += piece;
        }
        self.post(TX_RING, self.tx_posted, 0);
        self.tx_posted = self.tx_posted.wrapping_add(1);
    }

    fn send(&mut self, header: Header, data: &[u8], pieces: &[usize]) {
        let len = u32::try_from(data.len()).unwrap();
        self.post_tx(Header { len, ..header }, data, pieces);
        self.device.queue_event(TX).unwrap();
    }

    fn op(&mut self, op: Op) {
        self.send(header(op, PORT, GUEST), &[], &[HEADER_LEN]);
    }

    fn poll(&mut self) {
        while self.readable() {
            self.device.poll_event().unwrap();
        }
    }

    fn readable(&self) -> bool {
        let epoll = self.device.muxer.epoll_fd();
        poll(&mut [PollFd::new(epoll, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1
    }

    fn receive(&mut self) -> Vec<(Header, Vec<u8>)> {
        let [_, _, idx, used] = parts(RX_RING);
        let end: u16 = self.memory.load(GuestAddress(idx), Ordering::Acquire).unwrap();
        let mut packets = Vec::new();
        while self.rx_seen != end {
            let slot = GuestAddress(used + 8 * u64::from(self.rx_seen % QUEUE_SIZE));
            let [head, len]: [u32; 2] = self.memory.read_obj(slot).unwrap();
            let mut bytes = vec![0; len as usize];
            let address = RX_DATA + 4096 * u64::from(head);
            self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
            let (header, data) = bytes.split_at(HEADER_LEN);
            let header = Header::from_bytes(header.try_into().unwrap());
            assert_eq!(header.len as usize, data.len());
            packets.push((header, data.to_vec()));
            self.rx_seen = self.rx_seen.wrapping_add(1);
        }
        packets
    }

    fn interrupts(&self) -> u64 {
        self.line.read().unwrap_or(0)
    }

    fn accepted(&self) -> Stream {
        match self.events.next() {
            Some(VsockEvent::Accepted { port: PORT, stream }) => Stream::from(stream),
            other => panic!("not accepted: {other:?}"),
        }
    }

    fn open(&mut self) -> Stream {
        self.post_rx(1);
        self.op(Op::Request);
        assert_eq!(self.receive()[0].0.op, Op::Response.number());
        self.interrupts();
        self.accepted()
    }
}

#[test]
fn it_describes_itself() {
    let (device, _handle, _events) = VsockDevice::new(GUEST_CID, &[]).unwrap();
    assert_eq!(device.device_type(), 19);
    assert_eq!(device.queue_sizes().len(), 3);
    assert_eq!(device.config(), [3, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn packets_go_both_ways_with_one_interrupt_per_batch() {
    for event_idx in [false, true] {
        let mut driver = Driver::new(event_idx);
        let mut stream = driver.open();
        driver.send(header(Op::ReadWrite, PORT, GUEST), b"ping", &[HEADER_LEN, 4]);
        assert_eq!(stream.read().0, b"ping");
        driver.interrupts();
        stream.write(&[7; 100_000]);
        driver.post_rx(100);
        driver.device.poll_event().unwrap();
        let packets = driver.receive();
        let data: usize = packets.iter().map(|(_, data)| data.len()).sum();
        assert_eq!(data, 100_000);
        assert_eq!(packets.len(), 100_000_usize.div_ceil(4052));
        // With EVENT_IDX the driver asked for one at its first buffer (`used_event` is 0), which is past.
        assert_eq!(driver.interrupts(), u64::from(!event_idx));
    }
}

#[test]
fn many_descriptors_carry_one_packet() {
    let mut driver = Driver::new(true);
    let mut stream = driver.open();
    let data: Vec<u8> = (0..65_536_u32).map(|n| (n % 253) as u8).collect();
    let mut pieces = vec![HEADER_LEN];
    pieces.extend([4096; 16]);
    driver.send(header(Op::ReadWrite, PORT, GUEST), &data, &pieces);
    // And with a header in pieces, the last of which is shared.
    driver.send(header(Op::ReadWrite, PORT, GUEST), &data, &[1, 20, 22, 1001, 64_000, 536]);
    let (got, ended) = stream.read();
    assert!(!ended && got == [data.clone(), data].concat());
}

#[test]
fn a_chain_that_is_not_as_long_as_its_header_says_ends_the_connection() {
    for pieces in [&[HEADER_LEN, 9][..], &[HEADER_LEN, 11], &[HEADER_LEN]] {
        let mut driver = Driver::new(true);
        let mut stream = driver.open();
        driver.post_rx(1);
        driver.send(header(Op::ReadWrite, PORT, GUEST), &[0; 10], pieces);
        assert_eq!(driver.receive()[0].0.op, Op::Reset.number());
        assert!(stream.read().1);
    }
}

#[test]
fn a_chain_without_a_header_is_given_back_and_forgotten() {
    let mut driver = Driver::new(true);
    let _stream = driver.open();
    driver.post_rx(1);
    driver.post_tx(header(Op::Request, 5, 5), &[], &[HEADER_LEN - 1]);
    driver.device.queue_event(TX).unwrap();
    assert!(driver.receive().is_empty());
    let [_, _, idx, _] = parts(TX_RING);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(idx)).unwrap(), 2);
}

#[test]
fn receive_buffers_that_cannot_carry_a_packet_are_given_back() {
    let mut driver = Driver::new(true);
    let mut stream = driver.open();
    for (len, flags) in [(44, WRITE), (10, WRITE), (4096, 0), (1, WRITE)] {
        let index = driver.rx_posted % QUEUE_SIZE;
        driver.set_descriptor(RX_RING, index, Descriptor::new(RX_DATA, len, flags, 0));
        driver.post(RX_RING, driver.rx_posted, index);
        driver.rx_posted += 1;
    }
    driver.post_rx(1);
    stream.write(b"data");
    driver.poll();
    let [_, _, idx, used] = parts(RX_RING);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(idx)).unwrap(), 6);
    for slot in 1..5 {
        let at = GuestAddress(used + 8 * slot);
        assert_eq!(driver.memory.read_obj::<[u32; 2]>(at).unwrap()[1], 0);
    }
    driver.rx_seen += 4;
    assert_eq!(driver.receive()[0].1, b"data");
}

#[test]
fn data_waits_for_receive_buffers_without_spinning() {
    let mut driver = Driver::new(true);
    let mut stream = driver.open();
    stream.write(&[9; 10_000]);
    driver.poll();
    assert!(driver.receive().is_empty());
    // The driver is asked to kick when it has a buffer: `avail_event` is the next index.
    let [_, _, idx, used] = parts(RX_RING);
    let event = GuestAddress(used + 8 * u64::from(QUEUE_SIZE));
    assert_eq!(driver.memory.read_obj::<u16>(event).unwrap(), 1);
    driver.post_rx(2);
    driver.device.queue_event(RX).unwrap();
    assert_eq!(driver.receive().len(), 2);
    driver.post_rx(2);
    driver.device.queue_event(RX).unwrap();
    let packets = driver.receive();
    assert_eq!(packets.len(), 1);
    assert_eq!(packets[0].1.len(), 10_000 - 2 * 4052);
    // The buffer that was not needed is still there for the next packet.
    stream.write(b"more");
    driver.poll();
    assert_eq!(driver.receive()[0].1, b"more");
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(idx)).unwrap(), 5);
}

#[test]
fn the_host_opens_a_connection() {
    let mut driver = Driver::new(true);
    driver.handle.connect(77, GUEST).unwrap();
    driver.post_rx(10);
    driver.poll();
    let packets = driver.receive();
    let local = packets[0].0.src_port;
    assert_eq!(packets[0].0.op, Op::Request.number());
    driver.send(header(Op::Response, local, GUEST), &[], &[HEADER_LEN]);
    assert!(matches!(driver.events.next(), Some(VsockEvent::Connected { id: 77, .. })));
}

#[test]
fn rings_go_round() {
    let mut driver = Driver::new(true);
    let mut stream = driver.open();
    let mut fwd_cnt = 0;
    for round in 0..2000_u32 {
        driver.post_rx(1);
        stream.write(&round.to_le_bytes());
        driver.poll();
        assert_eq!(driver.receive()[0].1, round.to_le_bytes());
        fwd_cnt += 4;
        let echo = Header { fwd_cnt, ..header(Op::ReadWrite, PORT, GUEST) };
        driver.send(echo, &round.to_le_bytes(), &[HEADER_LEN, 4]);
        assert_eq!(stream.read().0, round.to_le_bytes());
        // Credit updates.
        driver.receive();
    }
}

#[test]
fn an_available_index_out_of_range_is_an_error() {
    let mut driver = Driver::new(true);
    let [idx, ..] = parts(TX_RING);
    driver.memory.write_obj(QUEUE_SIZE + 1, GuestAddress(idx)).unwrap();
    assert!(matches!(driver.device.queue_event(TX), Err(DeviceError::Queue(_))));
    let mut driver = Driver::new(true);
    let [idx, ..] = parts(RX_RING);
    driver.memory.write_obj(QUEUE_SIZE + 1, GuestAddress(idx)).unwrap();
    driver.post_tx(header(Op::Request, PORT, GUEST), &[], &[HEADER_LEN]);
    assert!(matches!(driver.device.queue_event(TX), Err(DeviceError::Queue(_))));
}

#[test]
fn a_reset_closes_all_and_the_next_driver_starts_afresh() {
    let mut driver = Driver::new(true);
    let mut stream = driver.open();
    driver.device.reset();
    assert!(stream.read().1);
    driver.device.queue_event(TX).unwrap();
    driver.device.poll_event().unwrap();
    driver.activate();
    let mut stream = driver.open();
    driver.send(header(Op::ReadWrite, PORT, GUEST), b"again", &[HEADER_LEN, 5]);
    assert_eq!(stream.read().0, b"again");
}

#[test]
fn a_full_transmit_queue_does_not_keep_the_device_forever() {
    let mut driver = Driver::new(true);
    driver.post_rx(1);
    for _ in 0..QUEUE_SIZE {
        driver.post_tx(header(Op::Request, 9, 9), &[], &[HEADER_LEN]);
    }
    driver.device.queue_event(TX).unwrap();
    let [_, _, idx, _] = parts(TX_RING);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(idx)).unwrap(), QUEUE_SIZE);
    // All refused, of which one had room.
    assert_eq!(driver.receive().len(), 1);
    assert!(!driver.readable());
}

// Save and restore.

/// `TRANSPORT_RESET` in the used ring of the event queue: the length and the event of each buffer.
fn events(driver: &Driver) -> Vec<(u32, u32)> {
    let [_, _, idx, used] = parts(EVENT_RING);
    let count: u16 = driver.memory.read_obj(GuestAddress(idx)).unwrap();
    (0..count)
        .map(|slot| {
            let at = GuestAddress(used + 8 * u64::from(slot % QUEUE_SIZE));
            let [head, len]: [u32; 2] = driver.memory.read_obj(at).unwrap();
            let data = GuestAddress(EVENT_DATA + 8 * u64::from(head));
            (len, driver.memory.read_obj(data).unwrap())
        })
        .collect()
}

impl Driver {
    /// Posts event buffers as Linux does; beforehand they hold something else than the event.
    fn post_events(&mut self, count: u16) {
        for _ in 0..count {
            let index = self.events_posted % QUEUE_SIZE;
            let address = EVENT_DATA + 8 * u64::from(index);
            self.memory.write_obj(u64::MAX, GuestAddress(address)).unwrap();
            self.set_descriptor(EVENT_RING, index, Descriptor::new(address, 4, WRITE, 0));
            self.post(EVENT_RING, self.events_posted, index);
            self.events_posted = self.events_posted.wrapping_add(1);
        }
    }

    /// Whether Linux would kick the event queue when it offers one more buffer.
    fn would_kick(&self) -> bool {
        let [_, _, idx, used] = parts(EVENT_RING);
        let flags: u16 = self.memory.read_obj(GuestAddress(idx - 2)).unwrap();
        let event = GuestAddress(used + 8 * u64::from(QUEUE_SIZE));
        match self.event_idx {
            true => self.memory.read_obj::<u16>(event).unwrap() == self.events_posted,
            false => flags & 1 == 0,
        }
    }

    /// The same guest on another device, to which the state goes; its rings go on where they were.
    fn restored(mut self, offered: u16) -> Self {
        let state = self.device.save().unwrap();
        let [queue_rx, queue_tx] = [RX_RING, TX_RING].map(|start| {
            let [_, _, idx, _] = parts(start);
            self.memory.read_obj::<u16>(GuestAddress(idx)).unwrap()
        });
        let (mut device, handle, events) = VsockDevice::new(GUEST_CID, &[PORT]).unwrap();
        device.restore(state).unwrap();
        (self.device, self.handle, self.events) = (device, handle, events);
        self.events_posted = 0;
        self.post_events(offered);
        let memory = Arc::clone(&self.memory);
        let queues =
            [(RX_RING, queue_rx), (TX_RING, queue_tx), (EVENT_RING, 0)].map(|(start, at)| {
                let [idx, avail, used, _] = parts(start);
                let mut queue = Queue::new(QUEUE_SIZE).unwrap();
                let low = |address: u64| Some(u32::try_from(address).unwrap());
                queue.set_size(QUEUE_SIZE);
                queue.set_desc_table_address(low(start), Some(0));
                queue.set_avail_ring_address(low(idx - 2), Some(0));
                queue.set_used_ring_address(low(used - 2), Some(0));
                assert_eq!(avail, idx + 2);
                queue.set_next_avail(at);
                queue.set_next_used(at);
                queue.set_ready(true);
                assert!(queue.is_valid(&*memory));
                Virtqueue::new(queue, self.features())
            });
        self.interrupts();
        let interrupt = Interrupt::new(Arc::new(AtomicU32::new(0)), Arc::clone(&self.line));
        let activation = Activation { memory, features: 0, queues: queues.into(), interrupt };
        self.device.activate(activation).unwrap();
        self
    }
}

#[test]
fn ports_survive_a_snapshot() {
    let (mut device, _handle, _events) = VsockDevice::new(GUEST_CID, &[]).unwrap();
    let state = device.save().unwrap();
    device.restore(state).unwrap();
    for bad in [
        "{}",
        "[]",
        r#"{"next_port":1,"active":true}"#,
        r#"{"next_port":4294967296,"active":true}"#,
        r#"{"next_port":1073741824}"#,
        r#"{"next_port":1073741824,"active":1}"#,
    ] {
        assert!(device.restore(serde_json::from_str(bad).unwrap()).is_err());
    }
    // A connection after the restore has another port than any before it.
    let mut driver = Driver::new(true);
    driver.post_rx(10);
    driver.handle.connect(1, GUEST).unwrap();
    driver.poll();
    let before = driver.receive()[0].0.src_port;
    let mut driver = driver.restored(1);
    driver.post_events(1);
    driver.device.queue_event(EVENT).unwrap();
    driver.handle.connect(1, GUEST).unwrap();
    driver.poll();
    let packets = driver.receive();
    assert_eq!((packets[0].0.op, packets[0].0.src_port), (Op::Request.number(), before + 1));
}

#[test]
fn a_restored_guest_is_told_that_its_connections_are_gone() {
    for event_idx in [false, true] {
        let mut driver = Driver::new(event_idx);
        let mut stream = driver.open();
        let mut driver = driver.restored(8);
        assert_eq!(events(&driver), [(4, 0)]);
        assert!(driver.interrupts() > 0);
        assert!(driver.would_kick());
        // The old stream ended with the old device.
        assert!(stream.read().1);
        // Once and never again, however often the queues are looked at.
        driver.post_events(1);
        for queue in [EVENT, RX, TX, EVENT] {
            driver.device.queue_event(queue).unwrap();
        }
        driver.post_events(3);
        driver.device.queue_event(EVENT).unwrap();
        assert_eq!(events(&driver), [(4, 0)]);
    }
}

#[test]
fn nothing_reaches_a_restored_guest_before_it_has_seen_the_event() {
    for offered in [8, 0] {
        let mut driver = Driver::new(true);
        drop(driver.open());
        driver.poll();
        let mut driver = driver.restored(offered);
        driver.post_rx(10);
        // What the host asks for, an answer to a new connection, and one to an old connection: all wait.
        driver.handle.connect(5, GUEST).unwrap();
        driver.poll();
        driver.op(Op::Request);
        driver.send(header(Op::CreditUpdate, PORT, GUEST + 1), &[], &[HEADER_LEN]);
        driver.device.queue_event(RX).unwrap();
        driver.poll();
        assert_eq!(driver.receive(), []);
        assert!(!driver.readable(), "it would spin");
        if offered == 0 {
            // No buffer for the event yet; the driver kicks when it has one.
            assert!(events(&driver).is_empty());
            assert!(driver.would_kick());
            driver.post_events(1);
            driver.device.queue_event(EVENT).unwrap();
            assert_eq!(events(&driver), [(4, 0)]);
            driver.device.queue_event(RX).unwrap();
            assert_eq!(driver.receive(), []);
        }
        assert!(driver.would_kick());
        driver.post_events(1);
        driver.device.queue_event(EVENT).unwrap();
        driver.poll();
        let mut ops: Vec<u16> = driver.receive().iter().map(|(header, _)| header.op).collect();
        ops.sort_unstable();
        assert_eq!(ops, [Op::Request, Op::Response, Op::Reset].map(Op::number));
        let mut stream = driver.accepted();
        stream.write(b"goes on");
        driver.poll();
        assert_eq!(driver.receive()[0].1, b"goes on");
    }
}

#[test]
fn packets_that_wait_in_the_queue_of_a_restored_guest_are_taken() {
    let mut driver = Driver::new(true);
    drop(driver.open());
    driver.poll();
    driver.receive();
    // The guest has kicked for this one, but nobody looked before the snapshot.
    driver.post_tx(header(Op::Request, PORT, GUEST + 7), &[], &[HEADER_LEN]);
    let driver = driver.restored(8);
    driver.accepted();
}

#[test]
fn event_buffers_without_room_are_given_back() {
    let driver = Driver::new(true);
    for (index, (len, flags)) in (0..).zip([(3, WRITE), (4, 0), (1, WRITE)]) {
        driver.set_descriptor(EVENT_RING, index, Descriptor::new(EVENT_DATA, len, flags, 0));
    }
    let mut driver = driver.restored(0);
    for index in 0..3 {
        driver.post(EVENT_RING, index, index);
    }
    driver.events_posted = 3;
    driver.device.queue_event(EVENT).unwrap();
    assert!(events(&driver).iter().all(|(len, _)| *len == 0));
    assert_eq!(events(&driver).len(), 3);
    driver.post_events(1);
    driver.device.queue_event(EVENT).unwrap();
    assert_eq!(events(&driver).last(), Some(&(4, 0)));
}

#[test]
fn only_a_restored_driver_is_told() {
    // A first driver, a driver after a reset, and one that goes on after a pause.
    let mut driver = Driver::new(true);
    driver.post_events(8);
    let mut stream = driver.open();
    driver.device.pause().unwrap();
    let state = driver.device.save().unwrap();
    driver.device.resume().unwrap();
    driver.send(header(Op::ReadWrite, PORT, GUEST), b"on", &[HEADER_LEN, 2]);
    stream.write(b"and on");
    driver.post_rx(2);
    driver.poll();
    assert_eq!(
        (stream.read(), driver.receive()[0].1.as_slice()),
        ((b"on".to_vec(), false), &b"and on"[..])
    );
    driver.device.reset();
    // Restored, but the guest resets the device before it uses it again.
    driver.device.restore(state).unwrap();
    driver.device.reset();
    driver.activate();
    driver.post_events(8);
    driver.open();
    assert_eq!(events(&driver), []);
    // Saved before there was a driver: there were no connections.
    let (device, ..) = VsockDevice::new(GUEST_CID, &[]).unwrap();
    let state = device.save().unwrap();
    driver.device.reset();
    driver.device.restore(state).unwrap();
    driver.activate();
    driver.post_events(8);
    driver.open();
    assert_eq!(events(&driver), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_contents_of_the_rings_break_the_device(
        descriptors in prop::collection::vec(
            (
                prop_oneof![Just(TX_DATA), Just(RX_RING), Just(MEMORY as u64 - 20), any::<u64>()],
                prop_oneof![Just(44_u32), 0..100_u32, any::<u32>()],
                0..8_u16,
                0..20_u16,
            ),
            1..40,
        ),
        heads in prop::collection::vec(0..300_u16, 1..20),
        data in prop::collection::vec(any::<u8>(), 200),
        jump in prop_oneof![4 => Just(0_u16), 1 => any::<u16>()],
        event_idx: bool,
    ) {
        let mut driver = Driver::new(event_idx);
        let _stream = driver.open();
        driver.memory.write_slice(&data, GuestAddress(TX_DATA)).unwrap();
        // A valid header in part of the cases, so that more than refusals are met.
        if data[0] % 2 == 0 {
            let op = Op::from_number(u16::from(data[1] % 7) + 1).unwrap();
            let bytes = Header { len: u32::from(data[2]), ..header(op, PORT, GUEST) }.to_bytes();
            driver.memory.write_slice(&bytes, GuestAddress(TX_DATA)).unwrap();
        }
        for start in [TX_RING, RX_RING] {
            for (index, &(address, len, flags, next)) in (0..).zip(&descriptors) {
                driver.set_descriptor(start, index, Descriptor::new(address, len, flags, next));
            }
        }
        driver.handle.connect(1, 5).unwrap();
        for &head in &heads {
            driver.post(TX_RING, driver.tx_posted, head);
            driver.tx_posted = driver.tx_posted.wrapping_add(1);
            driver.post(RX_RING, driver.rx_posted, head);
            driver.rx_posted = driver.rx_posted.wrapping_add(1);
            // Errors are allowed, panics and endless loops are not.
            let _ = driver.device.queue_event(TX);
            let _ = driver.device.queue_event(RX);
            let _ = driver.device.poll_event();
        }
        let [idx, ..] = parts(TX_RING);
        driver.memory.write_obj(driver.tx_posted.wrapping_add(jump), GuestAddress(idx)).unwrap();
        let _ = driver.device.queue_event(TX);
        driver.device.reset();
    }
}
