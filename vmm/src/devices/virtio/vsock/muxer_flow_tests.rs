//! How much may move, and that nothing moves in circles: limits, credit, wake-ups.

use std::time::Duration;

use super::super::handle::BACKLOG;
use super::super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::super::testing::{Bench, Stream, header};
use super::*;

const PORT: u32 = 80;
const GUEST: u32 = 1234;

// Bounds.

#[test]
fn connections_are_capped() {
    let mut bench = Bench::new(&[PORT]);
    let mut streams = Vec::new();
    for port in 0..u32::try_from(MAX_CONNECTIONS).unwrap() {
        streams.push(bench.guest_opens(PORT, port));
    }
    bench.op(Op::Request, PORT, 5000, 0);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert!(bench.event().is_none());
    bench.handle.connect(1, GUEST).unwrap();
    bench.run();
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 1, .. })));
    // Large buffers are for the first ones only, and come back.
    assert_eq!(bench.muxer.large, MAX_LARGE);
    drop(streams);
    bench.run();
    for port in 0..u32::try_from(MAX_CONNECTIONS).unwrap() {
        bench.op(Op::Reset, PORT, port, 0);
    }
    assert_eq!(bench.muxer.connection_count(), 0);
    assert_eq!(bench.muxer.large, 0);
    bench.packets();
    assert!(!bench.muxer.has_work());
}

#[test]
fn connections_that_nobody_takes_are_capped() {
    let mut bench = Bench::new(&[PORT]);
    for port in 0..1000 {
        bench.op(Op::Request, PORT, port, 0);
        bench.op(Op::Reset, PORT, port, 0);
    }
    assert_eq!(bench.muxer.connection_count(), 0);
    assert!(bench.muxer.ready.is_empty());
    assert_eq!(std::iter::from_fn(|| bench.event()).count(), BACKLOG);
}

#[test]
fn resets_without_room_are_capped() {
    let mut bench = Bench::new(&[]);
    for port in 0..100_000 {
        bench.op(Op::Request, PORT, port, 0);
    }
    assert_eq!(bench.muxer.resets.len(), MAX_RESETS);
    for _ in 0..6 {
        assert!(bench.packets().len() <= 200);
    }
    assert!(!bench.muxer.has_work());
}

// Credit.

#[test]
fn the_guest_may_not_send_more_than_its_credit() {
    let mut bench = Bench::new(&[PORT]);
    let _stream = bench.guest_opens(PORT, GUEST);
    let mut sent = 0_u32;
    // Nobody reads: the socket fills, then the buffer. `fwd_cnt` says what has left the buffer.
    let fwd_cnt = loop {
        bench.data(PORT, GUEST, &[1; 50_000]);
        sent += 50_000;
        let packets = bench.packets();
        if let Some((header, _)) = packets.last() {
            assert_eq!(header.op, Op::CreditUpdate.number());
        }
        bench.op(Op::CreditRequest, PORT, GUEST, 0);
        let fwd_cnt = bench.packets()[0].0.fwd_cnt;
        if sent - fwd_cnt > LARGE_BUFFER - 50_000 {
            break fwd_cnt;
        }
    };
    let rest = usize::try_from(LARGE_BUFFER - (sent - fwd_cnt)).unwrap();
    bench.data(PORT, GUEST, &vec![1; rest]);
    assert_eq!(bench.ops(), []);
    bench.data(PORT, GUEST, &[1]);
    assert_eq!(bench.ops(), [Op::Reset]);
}

#[test]
fn the_guest_hears_of_room_before_it_runs_out() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    let mut updates = 0;
    let mut told = 0;
    for round in 1..=100_u32 {
        bench.data(PORT, GUEST, &[1; 20_000]);
        stream.read();
        for (header, _) in bench.packets() {
            assert_eq!(header.op, Op::CreditUpdate.number());
            told = header.fwd_cnt;
            updates += 1;
        }
        assert!(round * 20_000 - told <= LARGE_BUFFER / 2);
    }
    // But not with every packet.
    assert_eq!(updates, 100 / 7);
}

#[test]
fn a_full_buffer_that_drains_gives_credit() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    bench.packets();
    stream.read();
    let packets = bench.packets();
    assert_eq!(packets.last().unwrap().0.op, Op::CreditUpdate.number());
    assert_eq!(packets.last().unwrap().0.fwd_cnt, 420_000);
}

#[test]
fn without_credit_nothing_is_read_and_nothing_spins() {
    let mut bench = Bench::new(&[PORT]);
    let request = Header { buf_alloc: 1000, ..header(Op::Request, PORT, GUEST) };
    bench.packet(request, &[]);
    assert_eq!(bench.ops(), [Op::Response]);
    let Some(VsockEvent::Accepted { stream, .. }) = bench.event() else { panic!() };
    let mut stream = Stream::from(stream);
    stream.write(&[5; 2500]);
    assert_eq!(bench.packets().iter().map(|(_, data)| data.len()).collect::<Vec<_>>(), [1000]);
    assert!(!bench.muxer.has_work());
    assert!(!readable(&bench.muxer));
    // Even when the peer dies.
    drop(stream);
    assert!(readable(&bench.muxer));
    assert_eq!(bench.ops(), [Op::Shutdown]);
    assert!(!bench.muxer.has_work());
    assert!(!readable(&bench.muxer));
    // The guest reads, and gets the rest.
    for fwd_cnt in [1000, 2000] {
        let update = Header { buf_alloc: 1000, fwd_cnt, ..header(Op::CreditUpdate, PORT, GUEST) };
        bench.packet(update, &[]);
        let data: usize = bench.packets().iter().map(|(_, data)| data.len()).sum();
        assert_eq!(data, if fwd_cnt == 1000 { 1000 } else { 500 });
    }
}

#[test]
fn without_buffers_nothing_is_read_and_nothing_spins() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    while bench.rx.posted() > 0 {
        stream.write(b"x");
        bench.run();
        bench.rx.take();
        let update = Header { fwd_cnt: 190, ..header(Op::CreditUpdate, PORT, GUEST) };
        bench.packet(update, &[]);
    }
    stream.write(b"waits");
    bench.run();
    assert_eq!(bench.muxer.send(&mut bench.rx, 10, bench.now).unwrap(), Turn::NoBuffer);
    assert!(!readable(&bench.muxer));
    let packets = bench.packets();
    assert_eq!(packets.last().unwrap().1, b"waits");
}

#[test]
fn a_stalled_guest_is_asked_for_credit_less_and_less_often() {
    let mut bench = Bench::new(&[PORT]);
    bench.packet(Header { buf_alloc: 100, ..header(Op::Request, PORT, GUEST) }, &[]);
    let Some(VsockEvent::Accepted { stream, .. }) = bench.event() else { panic!() };
    let mut stream = Stream::from(stream);
    stream.write(&[5; 200]);
    assert_eq!(bench.ops(), [Op::Response, Op::ReadWrite]);
    let mut asked = 0;
    for _ in 0..600 {
        bench.pass(Duration::from_millis(100));
        asked += bench.ops().len();
    }
    assert!((10..25).contains(&asked), "{asked}");
}

#[test]
fn small_packets_do_not_exhaust_the_guests_packet_limit() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    let mut packets = Vec::new();
    for _ in 0..500 {
        stream.write(&[1; 100]);
        packets.extend(bench.packets());
    }
    // Linux resets at 455 (256 KiB / 576).
    assert_eq!(packets.len(), 256);
    // Once the guest has read, all that waited comes in few packets.
    let fwd_cnt = packets.iter().map(|(header, _)| header.len).sum();
    bench.packet(Header { fwd_cnt, ..header(Op::CreditUpdate, PORT, GUEST) }, &[]);
    let rest = bench.packets();
    assert_eq!(rest.iter().map(|(_, data)| data.len()).sum::<usize>(), 500 * 100 - 25_600);
    assert!(rest.len() < 10);
}

#[test]
fn old_and_false_credit_is_ignored() {
    let mut bench = Bench::new(&[PORT]);
    bench.packet(Header { buf_alloc: 10_000, ..header(Op::Request, PORT, GUEST) }, &[]);
    assert_eq!(bench.ops(), [Op::Response]);
    let Some(VsockEvent::Accepted { stream, .. }) = bench.event() else { panic!() };
    let mut stream = Stream::from(stream);
    stream.write(&[5; 50_000]);
    let mut update = |fwd_cnt| {
        let update = header(Op::CreditUpdate, PORT, GUEST);
        bench.packet(Header { buf_alloc: 10_000, fwd_cnt, ..update }, &[]);
        bench.packets().iter().map(|(_, data)| data.len()).sum::<usize>()
    };
    assert_eq!(update(0), 10_000);
    assert_eq!(update(4000), 4000);
    assert_eq!(update(1000), 0);
    assert_eq!(update(50_000), 0);
    assert_eq!(update(u32::MAX), 0);
    assert_eq!(update(5000), 1000);
}

#[test]
fn connections_take_turns() {
    let mut bench = Bench::new(&[PORT]);
    let mut streams: Vec<_> = (0..3).map(|port| bench.guest_opens(PORT, port)).collect();
    for stream in &mut streams {
        stream.write(&[1; 150_000]);
    }
    bench.rx.post(100, 4052);
    bench.run();
    let mut counts = [0; 3];
    while let Some((header, _)) = bench.rx.take() {
        counts[header.dst_port as usize] += 1;
    }
    assert!(counts.iter().all(|&count| count > 10), "{counts:?}");
}

#[test]
fn each_connection_has_counters_of_its_own() {
    let mut bench = Bench::new(&[PORT]);
    let mut streams: Vec<_> = (0..3).map(|port| bench.guest_opens(PORT, port)).collect();
    for (port, len) in [(0, 1000), (1, 20), (0, 300), (2, 7)] {
        bench.data(PORT, port, &vec![1; len]);
    }
    for (stream, (port, fwd_cnt)) in streams.iter_mut().zip([(0, 1300), (1, 20), (2, 7)]) {
        stream.read();
        bench.op(Op::CreditRequest, PORT, port, 0);
        let (header, _) = bench.packets().pop().unwrap();
        assert_eq!((header.dst_port, header.fwd_cnt), (port, fwd_cnt));
    }
}

#[test]
fn no_claim_of_the_guest_makes_the_host_take_more_than_it_can_pass_on() {
    // No buffer at all, and one without an end whose reader never reads.
    for (buf_alloc, expected) in [(0, 0), (u32::MAX, 2048)] {
        let mut bench = Bench::new(&[PORT]);
        bench.packet(Header { buf_alloc, ..header(Op::Request, PORT, GUEST) }, &[]);
        let Some(VsockEvent::Accepted { stream, .. }) = bench.event() else { panic!() };
        let mut stream = Stream::from(stream);
        let mut packets = 0;
        for _ in 0..3000 {
            use std::io::Write;
            let _ = stream.0.write(&[1; 100]);
            let count = bench.packets().iter().filter(|(header, _)| header.op == 5).count();
            packets += count;
        }
        assert_eq!(packets, expected);
        assert_eq!(bench.wakeups(), 0);
        // A count that is ahead of all that was sent changes nothing.
        let forged =
            Header { buf_alloc, fwd_cnt: 1 << 31, ..header(Op::CreditUpdate, PORT, GUEST) };
        bench.packet(forged, &[]);
        assert_eq!(bench.packets().iter().filter(|(header, _)| header.op == 5).count(), 0);
    }
}

// Wake-ups: how often the device has to look at its descriptor before it is quiet.

#[test]
fn a_reader_that_stalls_costs_no_wakeups() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    bench.packets();
    assert_eq!(bench.wakeups(), 0);
    // It reads a little: too little for the socket to be called writable.
    use std::io::Read;
    stream.0.read_exact(&mut [0; 100]).unwrap();
    assert!(bench.wakeups() <= 1);
    // All: what waited moves, and then it is quiet.
    stream.read();
    assert!((1..4).contains(&bench.wakeups()));
    bench.packets();
    assert_eq!(bench.wakeups(), 0);
    // With nothing left to write, reading wakes nobody.
    stream.read();
    bench.wakeups();
    bench.data(PORT, GUEST, b"x");
    stream.read();
    assert_eq!(bench.wakeups(), 0);
}

#[test]
fn peers_that_are_dead_cost_no_wakeups() {
    // The guest never answers; the host's program died with data on its way in none, either or both
    // directions, or ended its direction and then died.
    for (to_host, to_guest, half) in
        [(0, 0, false), (7, 0, false), (0, 1, false), (7, 1, false), (7, 1, true)]
    {
        let mut bench = Bench::new(&[PORT]);
        let mut stream = bench.guest_opens(PORT, GUEST);
        // No buffers, and so no way to tell the guest.
        while bench.rx.posted() > 0 {
            stream.write(b"x");
            bench.run();
            let update = Header { fwd_cnt: 199, ..header(Op::CreditUpdate, PORT, GUEST) };
            bench.packet(update, &[]);
        }
        for _ in 0..to_host {
            bench.data(PORT, GUEST, &[1; 60_000]);
        }
        for _ in 0..to_guest {
            stream.write(&[2; 100_000]);
        }
        if half {
            stream.0.shutdown(std::net::Shutdown::Write).unwrap();
            bench.wakeups();
        }
        drop(stream);
        assert!(bench.wakeups() <= 2);
        bench.run();
        assert_eq!(bench.wakeups(), 0, "{to_host} {to_guest} {half}");
        // One buffer at a time, slowly: each packet is one turn.
        for _ in 0..10 {
            bench.rx.post(1, 4052);
            bench.run();
            assert_eq!(bench.wakeups(), 0);
        }
    }
}

#[test]
fn a_guest_that_ends_both_ways_costs_no_wakeups_while_the_host_drains() {
    let mut bench = Bench::new(&[PORT]);
    let stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    bench.packets();
    assert!(bench.wakeups() <= 2);
    assert_eq!(bench.wakeups(), 0);
    drop(stream);
    assert!(bench.wakeups() <= 2);
    assert_eq!((bench.wakeups(), bench.muxer.connection_count()), (0, 0));
}

fn readable(muxer: &Muxer) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(muxer.epoll_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

impl Bench {
    /// How often the device is woken before it is quiet; a hundred times is for ever.
    fn wakeups(&mut self) -> usize {
        for count in 0..100 {
            if !readable(&self.muxer) {
                return count;
            }
            self.muxer.poll(self.now).unwrap();
            self.muxer.send(&mut self.rx, 10_000, self.now).unwrap();
        }
        panic!("it does not come to rest");
    }
}
