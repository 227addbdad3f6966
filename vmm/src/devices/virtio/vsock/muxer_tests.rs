use std::time::Duration;

use super::super::connection::ANSWER_TIMEOUT;
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

#[test]
fn a_malformed_reset_gets_no_reset_either() {
    let reset = header(Op::Reset, PORT, GUEST);
    for (bad, data) in
        [(Header { len: 5, ..reset }, &b""[..]), (Header { len: 3, ..reset }, b"abc")]
    {
        let mut bench = Bench::new(&[PORT]);
        let mut stream = bench.guest_opens(PORT, GUEST);
        bench.packet(bad, data);
        assert_eq!((bench.ops(), bench.muxer.connection_count()), (vec![], 0));
        assert!(stream.read().1);
    }
}

#[test]
fn a_packet_of_another_guest_does_not_reach_a_connection() {
    let mut bench = Bench::new(&[PORT]);
    let mut stream = bench.guest_opens(PORT, GUEST);
    for op in [Op::ReadWrite, Op::Shutdown, Op::Reset, Op::Response, Op::Request, Op::CreditUpdate]
    {
        for bad in [
            Header { src_cid: GUEST_CID + 1, flags: 3, ..header(op, PORT, GUEST) },
            Header { dst_cid: GUEST_CID, flags: 3, ..header(op, PORT, GUEST) },
            Header { kind: 2, flags: 3, ..header(op, PORT, GUEST) },
        ] {
            bench.packet(bad, &[]);
        }
    }
    bench.packets();
    bench.data(PORT, GUEST, b"still here");
    assert_eq!(stream.read(), (b"still here".to_vec(), false));
}

#[test]
fn a_connection_that_nobody_takes_any_more_is_closed() {
    // The guest dials, and the guest answers, when the parent is gone.
    let mut bench = Bench::new(&[PORT]);
    bench.handle.connect(1, GUEST).unwrap();
    let local = bench.packets()[0].0.src_port;
    bench.drop_events();
    bench.op(Op::Response, local, GUEST, 0);
    bench.op(Op::Request, PORT, GUEST, 0);
    let mut ends = bench.packets();
    ends.retain(|(header, _)| header.op == Op::Shutdown.number() && header.flags == 3);
    assert_eq!(ends.len(), 2);
    bench.op(Op::Reset, PORT, GUEST, 0);
    bench.op(Op::Reset, local, GUEST, 0);
    assert_eq!(bench.muxer.connection_count(), 0);
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
