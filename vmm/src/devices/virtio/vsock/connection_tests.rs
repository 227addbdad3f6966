//! Random interleavings of a host's program, the muxer, and a model of a guest's sockets. Whatever the
//! order, every byte arrives once and in order, ends arrive after the data, and neither of the two
//! limits of the guest is ever passed.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::super::packet::TYPE_STREAM;
use super::super::testing::{Bench, Stream, header};
use super::*;

const PORT: u32 = 80;

/// What a Linux guest keeps for one socket.
struct ModelSocket {
    port: u32,
    stream: Stream,
    buf_alloc: u32,
    fwd_cnt: u32,
    fwd_cnt_told: u32,
    queue: VecDeque<Vec<u8>>,
    host_buf_alloc: u32,
    host_fwd_cnt: u32,
    sent: u32,
    received: u32,
    shutdown: u32,
    reset: bool,
    // What each side wrote and read, as counters of a known pattern.
    guest_wrote: usize,
    guest_read: usize,
    guest_saw_end: bool,
    host_wrote: usize,
    host_read: usize,
    host_saw_end: bool,
    host_ended: bool,
    guest_ended: bool,
}

fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect()
}

impl ModelSocket {
    fn header(&mut self, op: Op) -> Header {
        self.fwd_cnt_told = self.fwd_cnt;
        Header { buf_alloc: self.buf_alloc, fwd_cnt: self.fwd_cnt, ..header(op, PORT, self.port) }
    }

    fn receive(&mut self, header: &Header, data: Vec<u8>) {
        assert_eq!(header.kind, TYPE_STREAM);
        assert!(!self.reset, "nothing may follow a reset");
        self.host_buf_alloc = header.buf_alloc;
        self.host_fwd_cnt = header.fwd_cnt;
        match Op::from_number(header.op).unwrap() {
            Op::ReadWrite => {
                assert!(!data.is_empty());
                assert_eq!(self.shutdown & SHUTDOWN_SEND, 0, "data after the end");
                self.received = self.received.wrapping_add(header.len);
                assert!(self.received.wrapping_sub(self.fwd_cnt) <= self.buf_alloc, "credit");
                // virtio_transport_inc_rx_pkt of Linux.
                assert!(
                    (self.queue.len() + 1) * 576 <= (self.buf_alloc as usize).max(576),
                    "packets"
                );
                self.queue.push_back(data);
            }
            Op::Shutdown => self.shutdown |= header.flags,
            Op::Reset => self.reset = true,
            Op::CreditUpdate | Op::CreditRequest | Op::Response => {}
            Op::Request => panic!("nobody asked for that"),
        }
    }

    /// Reads up to `want` bytes. Returns whether Linux would send a credit update now.
    fn read(&mut self, mut want: usize) -> bool {
        while want > 0
            && let Some(packet) = self.queue.front_mut()
        {
            let len = want.min(packet.len());
            let part: Vec<u8> = packet.drain(..len).collect();
            assert!(part == pattern(self.guest_read, len), "host to guest, at {}", self.guest_read);
            self.guest_read += len;
            self.fwd_cnt = self.fwd_cnt.wrapping_add(u32::try_from(len).unwrap());
            want -= len;
            if packet.is_empty() {
                self.queue.pop_front();
            }
        }
        if self.queue.is_empty() && self.shutdown & SHUTDOWN_SEND != 0 {
            self.guest_saw_end = true;
        }
        let delta = self.fwd_cnt.wrapping_sub(self.fwd_cnt_told);
        delta > 0 && (self.queue.is_empty() || self.buf_alloc.saturating_sub(delta) < 64 * 1024)
    }

    fn credit(&self) -> usize {
        self.host_buf_alloc.saturating_sub(self.sent.wrapping_sub(self.host_fwd_cnt)) as usize
    }
}

#[derive(Clone, Debug)]
enum Action {
    HostWrites(usize, usize),
    HostReads(usize, usize),
    HostEnds(usize),
    GuestWrites(usize, usize),
    GuestReads(usize, usize),
    GuestEnds(usize),
    GuestAsks(usize),
    Posts(usize, usize),
    Runs,
}

fn action() -> impl Strategy<Value = Action> {
    let len = prop_oneof![1_usize..200, 1_usize..5000, 1_usize..=256 * 1024];
    let which = 0..2_usize;
    prop_oneof![
        8 => (which.clone(), len.clone()).prop_map(|(n, len)| Action::HostWrites(n, len)),
        6 => (which.clone(), len.clone()).prop_map(|(n, len)| Action::HostReads(n, len)),
        8 => (which.clone(), len.clone()).prop_map(|(n, len)| Action::GuestWrites(n, len)),
        6 => (which.clone(), len).prop_map(|(n, len)| Action::GuestReads(n, len)),
        1 => which.clone().prop_map(Action::HostEnds),
        1 => which.clone().prop_map(Action::GuestEnds),
        1 => which.prop_map(Action::GuestAsks),
        6 => (1..40_usize, prop_oneof![Just(4052_usize), 1..200_usize, Just(65536)])
            .prop_map(|(count, size)| Action::Posts(count, size)),
        10 => Just(Action::Runs),
    ]
}

struct World {
    bench: Bench,
    sockets: Vec<ModelSocket>,
}

impl World {
    fn new(buf_allocs: [u32; 2], fwd_cnt: u32) -> Self {
        let mut bench = Bench::new(&[PORT]);
        let mut sockets = Vec::new();
        for (port, buf_alloc) in (1000..).zip(buf_allocs) {
            bench.packet(Header { buf_alloc, ..header(Op::Request, PORT, port) }, &[]);
            let Some(super::super::VsockEvent::Accepted { stream, .. }) = bench.event() else {
                panic!("not accepted");
            };
            sockets.push(ModelSocket {
                port,
                stream: Stream::from(stream),
                buf_alloc,
                fwd_cnt: 0,
                fwd_cnt_told: 0,
                queue: VecDeque::new(),
                host_buf_alloc: 0,
                host_fwd_cnt: 0,
                sent: 0,
                received: 0,
                shutdown: 0,
                reset: false,
                guest_wrote: 0,
                guest_read: 0,
                guest_saw_end: false,
                host_wrote: 0,
                host_read: 0,
                host_saw_end: false,
                host_ended: false,
                guest_ended: false,
            });
        }
        // All counters are made to begin anywhere, near the wrap for example.
        bench.muxer.shift_counters(fwd_cnt);
        for socket in &mut sockets {
            for counter in [
                &mut socket.fwd_cnt,
                &mut socket.fwd_cnt_told,
                &mut socket.sent,
                &mut socket.received,
                &mut socket.host_fwd_cnt,
            ] {
                *counter = fwd_cnt;
            }
        }
        let mut world = Self { bench, sockets };
        world.bench.rx.post(2, 100);
        world.run();
        world
    }

    fn run(&mut self) {
        self.bench.run();
        while let Some((header, data)) = self.bench.rx.take() {
            let index = (header.dst_port - 1000) as usize;
            let socket = &mut self.sockets[index];
            socket.receive(&header, data);
            if header.op == Op::CreditRequest.number() {
                let answer = socket.header(Op::CreditUpdate);
                self.bench.packet(answer, &[]);
            }
        }
    }

    fn host_writes(&mut self, which: usize, len: usize) {
        use std::io::Write;
        let socket = &mut self.sockets[which];
        if socket.host_ended {
            return;
        }
        if let Ok(len) = socket.stream.0.write(&pattern(socket.host_wrote, len)) {
            socket.host_wrote += len;
        }
    }

    fn host_reads(&mut self, which: usize, len: usize) {
        use std::io::Read;
        let socket = &mut self.sockets[which];
        let mut data = vec![0; len];
        match socket.stream.0.read(&mut data) {
            Ok(0) => socket.host_saw_end = true,
            Ok(len) => {
                assert!(data[..len] == pattern(socket.host_read, len), "guest to host");
                socket.host_read += len;
            }
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }

    fn guest_writes(&mut self, which: usize, len: usize) {
        let socket = &mut self.sockets[which];
        let len = len.min(socket.credit());
        if socket.guest_ended || len == 0 {
            return;
        }
        let data = pattern(socket.guest_wrote, len);
        socket.guest_wrote += len;
        let len = u32::try_from(len).unwrap();
        socket.sent = socket.sent.wrapping_add(len);
        let header = Header { len, ..socket.header(Op::ReadWrite) };
        self.bench.packet(header, &data);
    }

    fn guest_reads(&mut self, which: usize, len: usize) {
        let socket = &mut self.sockets[which];
        if socket.read(len) {
            let update = socket.header(Op::CreditUpdate);
            self.bench.packet(update, &[]);
        }
    }

    fn host_ends(&mut self, which: usize) {
        let socket = &mut self.sockets[which];
        socket.host_ended = true;
        let _ = socket.stream.0.shutdown(std::net::Shutdown::Write);
    }

    fn guest_ends(&mut self, which: usize) {
        let socket = &mut self.sockets[which];
        if !socket.guest_ended {
            socket.guest_ended = true;
            let header = Header { flags: SHUTDOWN_SEND, ..socket.header(Op::Shutdown) };
            self.bench.packet(header, &[]);
        }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::HostWrites(which, len) => self.host_writes(which, len),
            Action::HostReads(which, len) => self.host_reads(which, len),
            Action::HostEnds(which) => self.host_ends(which),
            Action::GuestWrites(which, len) => self.guest_writes(which, len),
            Action::GuestReads(which, len) => self.guest_reads(which, len),
            Action::GuestEnds(which) => self.guest_ends(which),
            Action::GuestAsks(which) => {
                let header = self.sockets[which].header(Op::CreditRequest);
                self.bench.packet(header, &[]);
            }
            Action::Posts(count, size) => {
                if self.bench.rx.posted() < 200 {
                    self.bench.rx.post(count, size);
                }
            }
            Action::Runs => self.run(),
        }
    }

    /// Both sides end and read all; then nothing may be missing.
    fn finish(&mut self) {
        for which in 0..2 {
            self.host_ends(which);
            self.guest_ends(which);
        }
        let mut idle = 0;
        let mut progress = 0;
        while idle < 100 {
            self.bench.rx.post(64_usize.saturating_sub(self.bench.rx.posted()), 4052);
            self.run();
            for which in 0..2 {
                self.host_reads(which, 100_000);
                self.guest_reads(which, 100_000);
            }
            if self.sockets.iter().all(|s| s.host_saw_end && s.guest_saw_end) {
                break;
            }
            let read = self.sockets.iter().map(|s| s.host_read + s.guest_read).sum();
            idle = if read == progress { idle + 1 } else { 0 };
            progress = read;
        }
        for socket in &self.sockets {
            assert!(socket.host_saw_end && socket.guest_saw_end, "an end got lost");
            assert_eq!(socket.guest_read, socket.host_wrote, "host to guest");
            assert_eq!(socket.host_read, socket.guest_wrote, "guest to host");
            assert!(!socket.reset);
        }
        for port in [1000, 1001] {
            self.bench.op(Op::Shutdown, PORT, port, SHUTDOWN_BOTH);
        }
        self.run();
        assert_eq!(self.bench.muxer.connection_count(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_in_order_and_every_end_after_it(
        actions in prop::collection::vec(action(), 0..150),
        first in prop_oneof![Just(256 * 1024_u32), 50..10_000_u32],
        second in prop_oneof![Just(64 * 1024_u32), 1000..300_000_u32],
        counters in prop_oneof![Just(0_u32), Just(u32::MAX - 5000), any::<u32>()],
    ) {
        let mut world = World::new([first, second], counters);
        for action in &actions {
            world.act(action);
        }
        world.finish();
    }

    #[test]
    fn no_packet_of_the_guest_breaks_anything(
        packets in prop::collection::vec(
            (0..9_u16, 0..4_u32, 0..6_u32, any::<u32>(), any::<u32>(), 0..5000_usize, any::<bool>()),
            0..200,
        ),
    ) {
        let mut bench = Bench::new(&[1, 2]);
        let mut streams = Vec::new();
        for (op, local, guest, flags, number, len, right) in packets {
            let header = Header {
                op,
                flags,
                len: if right { u32::try_from(len).unwrap() } else { number },
                fwd_cnt: number,
                buf_alloc: number.rotate_left(7),
                ..header(Op::Request, local, guest)
            };
            bench.packet(header, &vec![0; if op == 5 { len } else { 0 }]);
            if number % 7 == 0 {
                bench.handle.connect(1, guest).unwrap();
            }
            if number % 5 == 0 {
                bench.packets();
            }
            while let Some(event) = bench.event() {
                match event {
                    super::super::VsockEvent::Accepted { stream, .. }
                    | super::super::VsockEvent::Connected { stream, .. } => {
                        let mut stream = Stream::from(stream);
                        if number % 2 == 0 {
                            stream.write(&[1; 1000]);
                            streams.push(stream);
                        }
                    }
                    super::super::VsockEvent::Refused { .. } => {}
                }
            }
        }
        bench.muxer.reset();
        prop_assert_eq!(bench.muxer.connection_count(), 0);
    }
}
