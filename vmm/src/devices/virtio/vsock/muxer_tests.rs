use std::time::Duration;

use super::super::connection::ANSWER_TIMEOUT;
use super::super::handle::BACKLOG;
use super::super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::super::testing::{Bench, GUEST_CID, Stream, header};
use super::*;

const PORT: u32 = 80;
const GUEST: u32 = 1234;

fn refused(bench: &mut Bench, header: Header, data: &[u8]) -> Header {
    bench.packet(header, data);
    let packets = bench.packets();
    assert_eq!(packets.len(), 1, "{packets:?}");
    assert_eq!(packets[0].0.op, Op::Reset.number());
    assert!(bench.event().is_none());
    packets[0].0
}

// Opening.

#[test]
fn the_guest_reaches_a_registered_port() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.data(PORT, GUEST, b"ping");
    assert_eq!(stream.read(), (b"ping".to_vec(), false));
    stream.write(b"pong");
    let packets = bench.packets();
    assert_eq!(packets.len(), 1);
    let (header, data) = &packets[0];
    assert_eq!(data, b"pong");
    assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, GUEST_CID));
    assert_eq!((header.src_port, header.dst_port), (PORT, GUEST));
    assert_eq!((header.kind, header.op, header.len), (TYPE_STREAM, 5, 4));
    assert_eq!((header.buf_alloc, header.fwd_cnt), (LARGE_BUFFER, 4));
}

#[test]
fn a_port_can_be_registered_later() {
    let mut bench = Bench::new(&[]);
    refused(&mut bench, header(Op::Request, PORT, GUEST), &[]);
    bench.handle.listen(PORT).unwrap();
    bench.run();
    bench.guest_opens(PORT, GUEST);
}

#[test]
fn the_host_reaches_a_port_of_the_guest() {
    let mut bench = Bench::new(&[]);
    let (local, mut stream) = bench.host_opens(GUEST);
    assert!(local >= FIRST_PORT);
    stream.write(b"hello");
    assert_eq!(bench.packets()[0].1, b"hello");
    bench.data(local, GUEST, b"world");
    assert_eq!(stream.read().0, b"world");
}

#[test]
fn the_guest_refuses() {
    let mut bench = Bench::new(&[]);
    bench.handle.connect(5, GUEST).unwrap();
    let local = bench.packets()[0].0.src_port;
    bench.op(Op::Reset, local, GUEST, 0);
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 5, .. })));
    assert_eq!(bench.ops(), []);
    assert_eq!(bench.muxer.connection_count(), 0);
}

#[test]
fn a_guest_that_does_not_answer_is_given_up() {
    let mut bench = Bench::new(&[]);
    bench.handle.connect(5, GUEST).unwrap();
    assert_eq!(bench.ops(), [Op::Request]);
    bench.pass(ANSWER_TIMEOUT - Duration::from_millis(1));
    assert!(bench.event().is_none());
    bench.pass(Duration::from_millis(1));
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 5, .. })));
    // The guest may accept yet; it must not keep half a connection.
    assert_eq!(bench.ops(), [Op::Reset]);
    let late = header(Op::Response, FIRST_PORT, GUEST);
    refused(&mut bench, late, &[]);
}

#[test]
fn a_request_that_never_got_out_is_not_reset() {
    let mut bench = Bench::new(&[]);
    bench.handle.connect(5, GUEST).unwrap();
    bench.run();
    bench.pass(ANSWER_TIMEOUT);
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 5, .. })));
    assert_eq!(bench.ops(), []);
}

#[test]
fn local_ports_count_up_and_skip_live_pairs() {
    let mut bench = Bench::new(&[]);
    let (first, _a) = bench.host_opens(GUEST);
    let (second, _b) = bench.host_opens(GUEST);
    assert_eq!((first, second), (FIRST_PORT, FIRST_PORT + 1));
    assert!(bench.muxer.set_next_port(LAST_PORT));
    let (third, _c) = bench.host_opens(GUEST);
    // Around the end, where two pairs are still alive.
    let (fourth, _d) = bench.host_opens(GUEST);
    assert_eq!((third, fourth), (LAST_PORT, FIRST_PORT + 2));
    assert!(!bench.muxer.set_next_port(FIRST_PORT - 1));
}

// What is refused.

#[test]
fn strangers_get_a_reset_and_a_reset_gets_nothing() {
    let mut bench = Bench::new(&[PORT]);
    for op in [Op::Response, Op::Shutdown, Op::CreditUpdate, Op::CreditRequest, Op::ReadWrite] {
        let reset = refused(&mut bench, header(op, PORT, GUEST), &[]);
        assert_eq!((reset.src_port, reset.dst_port), (PORT, GUEST));
    }
    bench.op(Op::Reset, PORT, GUEST, 0);
    assert_eq!(bench.ops(), []);
}

#[test]
fn wrong_addresses_types_and_operations_are_refused_alike() {
    let mut bench = Bench::new(&[PORT]);
    let good = header(Op::Request, PORT, GUEST);
    for bad in [
        Header { src_cid: 4, ..good },
        Header { dst_cid: 1, ..good },
        Header { dst_cid: u64::MAX, ..good },
        Header { kind: 0, ..good },
        Header { kind: 2, ..good },
        Header { op: 0, ..good },
        Header { op: 8, ..good },
        Header { op: u16::MAX, ..good },
        Header { len: 1, ..good },
        Header { dst_port: PORT + 1, ..good },
        Header { dst_port: u32::MAX, ..good },
    ] {
        let reset = refused(&mut bench, bad, &[]);
        // Mirrored, so that the guest finds the socket.
        assert_eq!(
            (reset.src_cid, reset.dst_cid, reset.kind),
            (bad.dst_cid, bad.src_cid, bad.kind)
        );
    }
    refused(&mut bench, good, b"data in a request");
    for bad in
        [Header { src_cid: 4, ..good }, Header { len: 1, ..good }, Header { kind: 2, ..good }]
    {
        bench.packet(Header { op: Op::Reset.number(), ..bad }, &[]);
        assert_eq!(bench.ops(), []);
    }
}

#[test]
fn a_length_that_is_not_the_chains_ends_the_connection() {
    for (len, data) in [(4, &b"abc"[..]), (2, b"abc"), (u32::MAX, b"abc"), (0, b"abc")] {
        let mut bench = Bench::new(&[PORT]);
        let mut stream = bench.guest_opens(PORT, GUEST);
        bench.packet(Header { len, ..header(Op::ReadWrite, PORT, GUEST) }, data);
        assert_eq!(bench.ops(), [Op::Reset]);
        assert_eq!(stream.read(), (Vec::new(), true));
        assert_eq!(bench.muxer.connection_count(), 0);
    }
}

#[test]
fn data_before_the_answer_breaks_a_request() {
    let mut bench = Bench::new(&[]);
    bench.handle.connect(5, GUEST).unwrap();
    let local = bench.packets()[0].0.src_port;
    bench.data(local, GUEST, b"too early");
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 5, .. })));
    assert_eq!(bench.ops(), [Op::Reset]);
}

#[test]
fn a_second_response_breaks_the_connection() {
    let mut bench = Bench::new(&[]);
    let (local, mut stream) = bench.host_opens(GUEST);
    bench.op(Op::Response, local, GUEST, 0);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert_eq!(stream.read(), (Vec::new(), true));
}

#[test]
fn a_request_for_a_live_pair_replaces_it() {
    let mut bench = Bench::new(&[PORT]);
    let mut old = bench.guest_opens(PORT, GUEST);
    let mut new = bench.guest_opens(PORT, GUEST);
    assert_eq!(old.read(), (Vec::new(), true));
    bench.data(PORT, GUEST, b"new");
    assert_eq!(new.read(), (b"new".to_vec(), false));
}

#[test]
fn an_old_reset_does_not_hit_a_new_connection() {
    let mut bench = Bench::new(&[PORT]);
    bench.guest_opens(PORT, GUEST);
    bench.op(Op::Response, PORT, GUEST, 0);
    // The RST waits for a buffer while the guest opens the pair again.
    bench.op(Op::Request, PORT, GUEST, 0);
    assert_eq!(bench.ops(), [Op::Response]);
}

// Bounds.

#[test]
fn connections_are_capped() {
    let mut bench = Bench::new(&[PORT]);
    let mut streams = Vec::new();
    for port in 0..u32::try_from(MAX_CONNECTIONS).unwrap() {
        streams.push(bench.guest_opens(PORT, port));
    }
    refused(&mut bench, header(Op::Request, PORT, 5000), &[]);
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

// The end.

#[test]
fn the_guest_closes() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.data(PORT, GUEST, b"bye");
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert_eq!(stream.read(), (b"bye".to_vec(), true));
    assert_eq!(bench.muxer.connection_count(), 0);
}

#[test]
fn a_slow_reader_gets_all_after_the_guest_closed() {
    for op in [Op::Shutdown, Op::Reset] {
        let mut bench = Bench::new(&[PORT]);
        let mut stream = bench.guest_opens(PORT, GUEST);
        // More than the socket takes.
        let data: Vec<u8> = (0..400_000_u32).map(|n| (n % 251) as u8).collect();
        for part in data.chunks(60_000) {
            bench.data(PORT, GUEST, part);
        }
        bench.op(op, PORT, GUEST, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
        // The guest does not wait for the reader, and its port is free.
        assert_eq!(bench.ops(), if op == Op::Shutdown { vec![Op::Reset] } else { vec![] });
        assert_eq!(bench.muxer.connection_count(), 1);
        let mut second = bench.guest_opens(PORT, GUEST);
        assert!(read_to_end(&mut bench, &mut stream) == data);
        bench.data(PORT, GUEST, b"second");
        assert_eq!(second.read(), (b"second".to_vec(), false));
        assert_eq!(bench.muxer.connection_count(), 1);
    }
}

#[test]
fn leftovers_go_when_their_reader_goes() {
    let mut bench = Bench::new(&[PORT]);
    let stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    bench.op(Op::Reset, PORT, GUEST, 0);
    assert_eq!(bench.muxer.connection_count(), 1);
    drop(stream);
    bench.run();
    assert_eq!(bench.muxer.connection_count(), 0);
}

#[test]
fn the_guest_half_closes() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.data(PORT, GUEST, b"question");
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND);
    assert_eq!(stream.read(), (b"question".to_vec(), true));
    stream.write(b"answer");
    assert_eq!(bench.packets()[0].1, b"answer");
    // Data after the end is against the rules.
    bench.data(PORT, GUEST, b"more");
    assert_eq!(bench.ops(), [Op::Reset]);
}

#[test]
fn the_guests_end_comes_after_its_data() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND);
    assert_eq!(read_to_end(&mut bench, &mut stream).len(), 420_000);
}

#[test]
fn shutdown_flags_add_up() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_RECEIVE);
    bench.op(Op::Shutdown, PORT, GUEST, 0);
    assert_eq!(bench.ops(), []);
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert_eq!(stream.read(), (Vec::new(), true));
}

#[test]
fn a_guest_that_receives_no_more_breaks_the_hosts_pipe() {
    use std::io::Write;
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_RECEIVE);
    assert_eq!(stream.0.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    bench.data(PORT, GUEST, b"still sending");
    assert_eq!(stream.read(), (b"still sending".to_vec(), false));
    drop(stream);
    let packets = bench.packets();
    assert_eq!(packets.len(), 1);
    assert_eq!((packets[0].0.op, packets[0].0.flags), (Op::Shutdown.number(), 3));
}

#[test]
fn the_host_half_closes() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    stream.write(b"question");
    stream.0.shutdown(std::net::Shutdown::Write).unwrap();
    let packets = bench.packets();
    assert_eq!(packets[0].1, b"question");
    assert_eq!((packets[1].0.op, packets[1].0.flags), (Op::Shutdown.number(), SHUTDOWN_SEND));
    assert_eq!(packets.len(), 2);
    bench.data(PORT, GUEST, b"answer");
    assert_eq!(stream.read(), (b"answer".to_vec(), false));
    bench.op(Op::Shutdown, PORT, GUEST, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert_eq!(stream.read(), (Vec::new(), true));
}

#[test]
fn the_host_closes_and_its_data_arrives_first() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    stream.write(b"last words");
    drop(stream);
    let packets = bench.packets();
    let ops: Vec<_> = packets.iter().map(|(header, _)| (header.op, header.flags)).collect();
    // At once that nobody listens any more; the end after the data.
    assert_eq!(ops, [(4, SHUTDOWN_RECEIVE), (5, 0), (4, SHUTDOWN_RECEIVE | SHUTDOWN_SEND)]);
    assert_eq!(packets[1].1, b"last words");
    // What was on its way is no mistake.
    bench.data(PORT, GUEST, b"crossing");
    assert_eq!(bench.ops(), []);
    bench.op(Op::Reset, PORT, GUEST, 0);
    assert_eq!((bench.ops(), bench.muxer.connection_count()), (vec![], 0));
}

#[test]
fn a_guest_that_does_not_confirm_the_end_gets_a_reset() {
    let mut bench = Bench::new(&[PORT]);
    drop(bench.guest_opens(PORT, GUEST));
    assert!(bench.ops().contains(&Op::Shutdown));
    bench.pass(ANSWER_TIMEOUT);
    assert_eq!(bench.ops(), [Op::Reset]);
    assert_eq!(bench.muxer.connection_count(), 0);
}

#[test]
fn a_reader_that_dies_ends_the_transfer() {
    let mut bench = Bench::new(&[PORT]);
    let stream = bench.guest_opens(PORT, GUEST);
    for _ in 0..7 {
        bench.data(PORT, GUEST, &[1; 60_000]);
    }
    drop(stream);
    let packets = bench.packets();
    assert_eq!(packets[0].0.flags, SHUTDOWN_RECEIVE);
    // All of it counts as taken, so that the guest is not stuck before it hears of it.
    assert_eq!(packets[0].0.fwd_cnt, 420_000);
}

#[test]
fn a_reset_of_the_device_forgets_all() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    bench.handle.connect(4, 1).unwrap();
    assert_eq!(bench.ops(), [Op::Request]);
    bench.muxer.reset();
    assert!(matches!(bench.event(), Some(VsockEvent::Refused { id: 4, .. })));
    assert_eq!(stream.read(), (Vec::new(), true));
    assert_eq!(bench.ops(), []);
    // Registered ports stay, and so does the handle.
    let _accepted = bench.guest_opens(PORT, GUEST);
    bench.host_opens(GUEST);
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

fn readable(muxer: &Muxer) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(&muxer.epoll, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// Reads all up to the end of the stream, which must come.
fn read_to_end(bench: &mut Bench, stream: &mut Stream) -> Vec<u8> {
    let mut all = Vec::new();
    for _ in 0..100 {
        let (part, ended) = stream.read();
        all.extend(part);
        if ended {
            return all;
        }
        bench.run();
    }
    panic!("no end after {} bytes", all.len());
}
