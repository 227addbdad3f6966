//! What a driver may and may not put into its rings.

use super::*;

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::devices::virtio::chain::{Descriptor, MAX_CHAIN};
use crate::devices::virtio::harness::{
    DATA, END, INDIRECT, NEXT, Ring, SECOND, WRITE, memory, put_descriptor,
};

const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const BOTH: u64 = EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// An indirect table.
const TABLE: u64 = DATA + 0x8000;

fn ring(size: u16) -> (Arc<GuestMemory>, Ring) {
    let memory = memory();
    let ring = Ring::new(&memory, 0, size);
    (memory, ring)
}

/// All descriptors of the next chain, or the first error.
fn walk(ring: &Ring, features: u64) -> Result<Vec<Descriptor>, QueueError> {
    let mut queue = Virtqueue::new(ring.queue(), features);
    queue.pop(&ring.memory)?.expect("a chain").collect()
}

/// The only descriptor is an indirect one of `bytes`; the table has these entries.
fn indirect(bytes: u32, flags: u16, entries: &[(u64, u32, u16, u16)]) -> Ring {
    let (memory, mut ring) = ring(8);
    for (number, (address, length, flags, next)) in entries.iter().enumerate() {
        put_descriptor(&memory, TABLE + 16 * number as u64, *address, *length, *flags, *next);
    }
    ring.descriptor(0, TABLE, bytes, INDIRECT | flags, 1);
    ring.descriptor(1, DATA, 8, 0, 0);
    ring.offer(0);
    ring
}

#[test]
fn a_chain_is_its_descriptors_in_the_order_of_their_links() {
    let (memory, mut ring) = ring(8);
    ring.descriptor(7, DATA, 1, NEXT, 3);
    ring.descriptor(3, DATA + 0x10, 2, NEXT | WRITE, 0);
    ring.descriptor(0, SECOND, 3, WRITE, 5);
    ring.offer(7);
    let mut queue = Virtqueue::new(ring.queue(), 0);
    let chain = queue.pop(&memory).unwrap().unwrap();
    assert_eq!(chain.head(), 7);
    let parts: Vec<_> = chain.map(|d| d.unwrap()).map(|d| (d.addr().0, d.len())).collect();
    assert_eq!(parts, [(DATA, 1), (DATA + 0x10, 2), (SECOND, 3)]);
    assert!(queue.pop(&memory).unwrap().is_none());
    // As many as the table has, and no more.
    for index in 0..8 {
        ring.descriptor(index, DATA, 1, NEXT, index + 1);
    }
    ring.descriptor(7, DATA, 1, 0, 0);
    ring.offer(0);
    assert_eq!(queue.pop(&memory).unwrap().unwrap().map(Result::unwrap).count(), 8);
}

#[test]
fn circles_end_in_an_error_and_not_in_a_shorter_chain() {
    for (from, to) in [(7, 0), (0, 0), (3, 2)] {
        let (_, mut ring) = ring(8);
        for index in 0..8 {
            ring.descriptor(index, DATA, 1, NEXT, index + 1);
        }
        ring.descriptor(7, DATA, 1, 0, 0);
        ring.descriptor(from, DATA, 1, NEXT, to);
        ring.offer(0);
        assert!(matches!(walk(&ring, 0), Err(QueueError::Length(8))), "{from} to {to}");
    }
}

#[test]
fn numbers_beyond_the_table_are_errors() {
    for head in [8, 9, u16::MAX] {
        let (_, mut ring) = ring(8);
        ring.offer(head);
        let error = walk(&ring, 0).unwrap_err();
        assert!(matches!(error, QueueError::Descriptor { index, entries: 8 } if index == head));
    }
    for next in [8, u16::MAX] {
        let (_, mut ring) = ring(8);
        ring.descriptor(0, DATA, 1, NEXT, next);
        ring.offer(0);
        let error = walk(&ring, 0).unwrap_err();
        assert!(matches!(error, QueueError::Descriptor { index, .. } if index == next));
    }
}

#[test]
fn empty_buffers_and_four_gibibytes_are_errors() {
    let (_, mut one) = ring(8);
    one.descriptor(0, DATA, 1, NEXT, 1);
    one.descriptor(1, DATA, 0, 0, 0);
    one.offer(0);
    assert!(matches!(walk(&one, 0), Err(QueueError::Empty)));
    let (_, mut two) = ring(8);
    two.descriptor(0, DATA, u32::MAX, NEXT, 1);
    two.descriptor(1, DATA, 1, 0, 0);
    two.offer(0);
    assert!(matches!(walk(&two, 0), Err(QueueError::Bytes)));
}

#[test]
fn the_available_index_stays_within_a_queue_of_the_used_one() {
    for (start, index, fits) in [
        (0, 8, true),
        (0, 9, false),
        (0, u16::MAX, false),
        (0, 0x8000, false),
        // Across the end of the numbers.
        (0xfffc, 4, true),
        (0xfffc, 5, false),
        (0xfffc, 0xfffb, false),
    ] {
        let (memory, ring) = ring(8);
        let mut raw = ring.queue();
        raw.set_next_avail(start);
        raw.set_next_used(start);
        let mut queue = Virtqueue::new(raw, 0);
        ring.descriptor(0, DATA, 1, 0, 0);
        ring.set_half(Ring::AVAIL + 2, index);
        assert_eq!(queue.pop(&memory).is_ok(), fits, "{start} {index}");
    }
}

#[test]
fn the_available_index_counts_what_was_taken_and_does_not_go_back() {
    let (memory, mut ring) = ring(4);
    ring.descriptor(0, DATA, 1, 0, 0);
    for _ in 0..4 {
        ring.offer(0);
    }
    let mut queue = Virtqueue::new(ring.queue(), 0);
    for _ in 0..4 {
        queue.pop(&memory).unwrap().unwrap();
    }
    assert!(queue.pop(&memory).unwrap().is_none());
    // A fifth, although all four are with the device.
    ring.offer(0);
    assert!(matches!(queue.pop(&memory), Err(QueueError::AvailableIndex { .. })));
    ring.set_half(Ring::AVAIL + 2, 3);
    assert!(matches!(queue.pop(&memory), Err(QueueError::AvailableIndex { .. })));
    queue.put_back(1);
    assert!(queue.pop(&memory).unwrap().is_none(), "it was never made available");
    ring.set_half(Ring::AVAIL + 2, 4);
    assert!(queue.pop(&memory).unwrap().is_some());
    queue.add_used(&memory, 0, 0).unwrap();
    ring.set_half(Ring::AVAIL + 2, 5);
    assert!(queue.pop(&memory).unwrap().is_some());
}

#[test]
fn a_chain_may_end_in_an_indirect_table() {
    let (memory, mut ring) = ring(4);
    ring.descriptor(2, DATA, 1, NEXT, 1);
    // The write flag of this descriptor means nothing.
    ring.descriptor(1, TABLE, 3 * 16, INDIRECT | WRITE, 0);
    put_descriptor(&memory, TABLE, DATA + 1, 2, NEXT, 2);
    put_descriptor(&memory, TABLE + 32, DATA + 2, 3, NEXT | WRITE, 1);
    put_descriptor(&memory, TABLE + 16, DATA + 3, 4, WRITE, 0);
    ring.offer(2);
    let parts = walk(&ring, BOTH).unwrap();
    let parts: Vec<_> = parts.iter().map(|d| (d.len(), d.is_write_only())).collect();
    assert_eq!(parts, [(1, false), (2, false), (3, true), (4, true)]);
    assert!(matches!(walk(&ring, EVENT_IDX), Err(QueueError::IndirectRefused)));
}

#[test]
fn an_indirect_table_may_be_longer_than_the_queue() {
    let entries: Vec<_> =
        (0..100).map(|n| (DATA, 1, if n < 99 { NEXT } else { 0 }, n + 1)).collect();
    assert_eq!(walk(&indirect(1600, 0, &entries), BOTH).unwrap().len(), 100);
}

#[test]
fn bad_indirect_tables_are_errors() {
    let one = [(DATA, 1, 0, 0)];
    for bytes in [0, 1, 15, 17, 24, u32::MAX] {
        let error = walk(&indirect(bytes, 0, &one), BOTH).unwrap_err();
        assert!(matches!(error, QueueError::IndirectSize(found) if found == bytes), "{bytes}");
    }
    let chained = indirect(16, NEXT, &one);
    assert!(matches!(walk(&chained, BOTH), Err(QueueError::IndirectNext)));
    for entries in
        [&[(TABLE, 32, INDIRECT, 0)][..], &[(DATA, 1, NEXT, 1), (TABLE, 32, INDIRECT, 0)]]
    {
        let nested = indirect(32, 0, entries);
        assert!(matches!(walk(&nested, BOTH), Err(QueueError::IndirectNested)));
    }
    let beyond = indirect(16, 0, &[(DATA, 1, NEXT, 1)]);
    let error = walk(&beyond, BOTH).unwrap_err();
    assert!(matches!(error, QueueError::Descriptor { index: 1, entries: 1 }));
    let circle = indirect(32, 0, &[(DATA, 1, NEXT, 1), (DATA, 1, NEXT, 0)]);
    assert!(matches!(walk(&circle, BOTH), Err(QueueError::Length(2))));
    let empty = indirect(32, 0, &[(DATA, 1, NEXT, 1), (DATA, 0, 0, 0)]);
    assert!(matches!(walk(&empty, BOTH), Err(QueueError::Empty)));
    // A table of 256 MiB is not read to its end.
    let endless = indirect(u32::MAX - 15, 0, &[(DATA, 1, NEXT, 0)]);
    assert!(matches!(walk(&endless, BOTH), Err(QueueError::Length(MAX_CHAIN))));
}

#[test]
fn indirect_tables_lie_in_guest_memory() {
    for (table, bytes) in [
        (END, 16),
        (END - 8, 16),
        (SECOND - 16, 16),
        (u64::MAX - 15, 16),
        (u64::MAX - 7, 16),
        (1 << 63, 16),
    ] {
        let (_, mut ring) = ring(8);
        ring.descriptor(0, table, bytes, INDIRECT, 0);
        ring.offer(0);
        assert!(matches!(walk(&ring, BOTH), Err(QueueError::Memory(_))), "{table:#x}");
    }
    // The first entry is inside, the second is not.
    let (memory, mut ring) = ring(8);
    put_descriptor(&memory, END - 16, DATA, 1, NEXT, 1);
    ring.descriptor(0, END - 16, 32, INDIRECT, 0);
    ring.offer(0);
    assert!(matches!(walk(&ring, BOTH), Err(QueueError::Memory(_))));
}

#[test]
fn with_event_idx_the_driver_says_at_which_used_entry_it_wants_an_interrupt() {
    let (memory, mut ring) = ring(8);
    ring.descriptor(0, DATA, 1, 0, 0);
    let mut queue = Virtqueue::new(ring.queue(), EVENT_IDX);
    let mut use_some = |ring: &mut Ring, count: u16, event: u16| {
        ring.set_used_event(event);
        for _ in 0..count {
            ring.offer(0);
            let head = queue.pop(&memory).unwrap().unwrap().head();
            queue.add_used(&memory, head, 0).unwrap();
        }
        queue.needs_notification(&memory).unwrap()
    };
    // Entry 0 is wanted and there.
    assert!(use_some(&mut ring, 1, 0));
    // Entry 3 is wanted: 1 and 2 are not it, then it is among 3 and 4.
    assert!(!use_some(&mut ring, 2, 3));
    assert!(use_some(&mut ring, 2, 3));
    // An old wish, and one far ahead.
    assert!(!use_some(&mut ring, 1, 3));
    assert!(!use_some(&mut ring, 1, 0x8000));
    assert!(!use_some(&mut ring, 0, 6));
    // Across the end of the numbers.
    for number in 7..u16::MAX {
        assert!(!use_some(&mut ring, 1, u16::MAX), "{number}");
    }
    assert!(use_some(&mut ring, 1, u16::MAX));
    assert!(use_some(&mut ring, 1, 0));
}

#[test]
fn with_event_idx_the_device_says_at_which_available_entry_it_wants_a_kick() {
    let (memory, mut ring) = ring(8);
    ring.descriptor(0, DATA, 1, 0, 0);
    let mut queue = Virtqueue::new(ring.queue(), EVENT_IDX);
    assert!(!queue.enable_notification(&memory).unwrap());
    assert_eq!(ring.avail_event(), 0);
    ring.offer(0);
    ring.offer(0);
    queue.pop(&memory).unwrap().unwrap();
    // While it works it does not move its wish, so the driver does not kick for the second.
    queue.disable_notification(&memory).unwrap();
    assert_eq!(ring.avail_event(), 0);
    // It stops early and learns that no kick will come for what is there.
    assert!(queue.enable_notification(&memory).unwrap());
    assert_eq!(ring.avail_event(), 1);
    queue.pop(&memory).unwrap().unwrap();
    assert!(!queue.enable_notification(&memory).unwrap());
    assert_eq!(ring.avail_event(), 2);
}

#[test]
fn without_event_idx_flags_suppress_kicks_and_interrupts() {
    let (memory, mut ring) = ring(8);
    ring.descriptor(0, DATA, 1, 0, 0);
    let mut queue = Virtqueue::new(ring.queue(), 0);
    queue.disable_notification(&memory).unwrap();
    assert_eq!(ring.used_flags(), 1);
    queue.enable_notification(&memory).unwrap();
    assert_eq!(ring.used_flags(), 0);
    for (flags, wanted) in [(0, true), (1, false), (2, true)] {
        ring.set_half(Ring::AVAIL, flags);
        ring.offer(0);
        let head = queue.pop(&memory).unwrap().unwrap().head();
        queue.add_used(&memory, head, 0).unwrap();
        assert_eq!(queue.needs_notification(&memory).unwrap(), wanted, "{flags}");
    }
}

/// A driver can make chains available as fast as they are served.
#[test]
fn one_call_serves_at_most_a_queue_of_chains_and_asks_for_another() {
    let (memory, mut ring) = ring(8);
    ring.descriptor(0, DATA, 1, 0, 0);
    let kicks: Arc<[EventFd]> =
        [EventFd::new(EFD_NONBLOCK).unwrap(), EventFd::new(EFD_NONBLOCK).unwrap()].into();
    let mut queue = Virtqueue::new(ring.queue(), BOTH).with_kick(kicks.clone(), 1);
    let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let interrupt = Interrupt::new(Arc::default(), line.clone());
    ring.offer(0);
    let mut count = 0;
    queue
        .serve(&memory, &interrupt, |_| {
            count += 1;
            ring.offer(0);
            Ok(0)
        })
        .unwrap();
    assert_eq!(count, 8);
    assert!(kicks[1].read().is_ok() && kicks[0].read().is_err());
    // The driver learns of what was used so far.
    assert!(line.read().is_ok());
    assert_eq!(ring.used().len(), 8);
    queue.serve(&memory, &interrupt, |_| Ok(0)).unwrap();
    assert_eq!(ring.used().len(), 1);
    assert!(kicks[1].read().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    /// Whatever lies in the tables: at most so many descriptors, none of them empty or an indirect one, and
    /// less than 4 GiB.
    #[test]
    fn no_chain_is_endless(
        table in prop::collection::vec(
            (prop::sample::select(vec![TABLE, TABLE + 16, DATA, END - 8, u64::MAX - 8]),
             prop::sample::select(vec![0u32, 1, 15, 16, 32, 64, 1 << 31, u32::MAX]),
             0u16..8, 0u16..10), 16),
        head in 0u16..9,
    ) {
        let (memory, mut ring) = ring(8);
        for (index, (address, length, flags, next)) in table.iter().enumerate() {
            let at = if index < 8 { ring.base } else { TABLE - 8 * 16 } + 16 * index as u64;
            put_descriptor(&memory, at, *address, *length, *flags, *next);
        }
        ring.offer(head);
        if let Ok(parts) = walk(&ring, BOTH) {
            prop_assert!(!parts.is_empty() && parts.len() <= 8 + MAX_CHAIN as usize);
            prop_assert!(parts.iter().all(|d| d.len() > 0 && !d.refers_to_indirect_table()));
            prop_assert!(parts.iter().map(|d| u64::from(d.len())).sum::<u64>() < 1 << 32);
        }
    }
}
