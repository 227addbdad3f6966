//! Flow control of one connection: how much may be sent to the guest, and what the guest knows of the room
//! for its own data.
//!
//! All counters wrap at 2³². Whatever the guest says of its side is a claim: it may be old, because a
//! guest kernel may fill in the numbers of two packets in one order and queue them in the other; or
//! a lie. Neither may let us send more than `buf_alloc` bytes beyond what the guest has really taken.

use std::collections::VecDeque;

/// What one unread packet is taken to cost the guest. Linux counts 576 bytes on x86-64 (an empty
/// `sk_buff`, `SKB_TRUESIZE(0)`); kernels with debugging options have larger structures.
const PACKET_COST: u32 = 1024;

/// Most unread packets that are tracked, and so allowed, per connection.
const MAX_UNREAD: usize = 2048;

/// What may be sent to the guest.
#[derive(Debug)]
pub struct Credit {
    /// Size of the guest's receive buffer.
    buf_alloc: u32,
    /// Bytes that have left it.
    fwd_cnt: u32,
    sent: u32,
    /// Values of `sent` at the end of each packet that the guest may not have read.
    unread: VecDeque<u32>,
}

impl Credit {
    /// Nothing was sent yet.
    #[must_use]
    pub fn new(buf_alloc: u32) -> Self {
        Self { buf_alloc, fwd_cnt: 0, sent: 0, unread: VecDeque::new() }
    }

    /// The guest says how large its buffer is and how much has left it. Returns whether more has left it
    /// than was known.
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> bool {
        self.buf_alloc = buf_alloc;
        // Forward and no further than what was sent: all else is old, or a lie.
        let ahead = fwd_cnt.wrapping_sub(self.fwd_cnt);
        let outstanding = self.outstanding();
        if ahead == 0 || ahead > outstanding {
            return false;
        }
        self.fwd_cnt = fwd_cnt;
        let outstanding = outstanding - ahead;
        while let Some(end) = self.unread.front()
            && self.sent.wrapping_sub(*end) >= outstanding
        {
            self.unread.pop_front();
        }
        true
    }

    /// Bytes that the guest has not taken yet, as far as is known.
    fn outstanding(&self) -> u32 {
        self.sent.wrapping_sub(self.fwd_cnt)
    }

    /// Bytes that may be sent now.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        if self.packets() == 0 { 0 } else { self.buf_alloc.saturating_sub(self.outstanding()) }
    }

    /// Packets that may be sent now.
    #[must_use]
    pub fn packets(&self) -> usize {
        // One always, else a guest with a tiny buffer would never get anything.
        let most = usize::try_from(self.buf_alloc / PACKET_COST).unwrap_or(MAX_UNREAD);
        most.clamp(1, MAX_UNREAD).saturating_sub(self.unread.len())
    }

    /// A packet with `len` bytes was sent.
    pub fn spend(&mut self, len: u32) {
        self.sent = self.sent.wrapping_add(len);
        self.unread.push_back(self.sent);
    }

    /// Gives back the memory; nothing will be sent any more.
    pub fn close(&mut self) {
        self.unread = VecDeque::new();
    }
}

/// The receive buffer for the guest's data, as the guest knows it.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    buf_alloc: u32,
    received: u32,
    fwd_cnt: u32,
    /// The `fwd_cnt` that the guest knows.
    told: u32,
}

impl Window {
    /// A buffer of `buf_alloc` bytes, empty.
    #[must_use]
    pub fn new(buf_alloc: u32) -> Self {
        Self { buf_alloc, received: 0, fwd_cnt: 0, told: 0 }
    }

    /// Size of the buffer in bytes.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.buf_alloc
    }

    /// The guest has sent bytes.
    pub fn receive(&mut self, count: u32) {
        self.received = self.received.wrapping_add(count);
    }

    /// Bytes have left the buffer. Returns whether the guest should hear of that: early enough for it to
    /// never wait when the host reads as fast as the guest writes, but not with every packet.
    pub fn forward(&mut self, count: u32) -> bool {
        self.fwd_cnt = self.fwd_cnt.wrapping_add(count);
        let guest_sees_used = self.received.wrapping_sub(self.told);
        guest_sees_used > self.buf_alloc / 2 && self.fwd_cnt != self.told
    }

    /// `buf_alloc` and `fwd_cnt` for a packet that is sent now.
    pub fn tell(&mut self) -> (u32, u32) {
        self.told = self.fwd_cnt;
        (self.buf_alloc, self.fwd_cnt)
    }
}

#[cfg(test)]
impl Credit {
    /// Lets the counters begin at `start`.
    pub(super) fn shift(&mut self, start: u32) {
        (self.sent, self.fwd_cnt) = (start, start);
    }
}

#[cfg(test)]
impl Window {
    /// Lets the counters begin at `start`.
    pub(super) fn shift(&mut self, start: u32) {
        (self.received, self.fwd_cnt, self.told) = (start, start, start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn credit_is_the_buffer_less_what_is_on_its_way() {
        let mut credit = Credit::new(10_000);
        credit.spend(4000);
        assert_eq!(credit.bytes(), 6000);
        assert!(credit.update(10_000, 1500));
        assert_eq!(credit.bytes(), 7500);
        // A buffer made smaller than what is on its way.
        assert!(!credit.update(1000, 1500));
        assert_eq!(credit.bytes(), 0);
        assert!(credit.update(1000, 4000));
        assert_eq!(credit.bytes(), 1000);
    }

    #[test]
    fn counters_wrap() {
        let mut credit = Credit::new(10_000);
        credit.shift(u32::MAX - 2000);
        credit.spend(4000);
        assert_eq!(credit.bytes(), 6000);
        // Before the wrap, behind it, and to the end.
        for (fwd_cnt, bytes) in [(u32::MAX, 8000), (500, 8501), (1999, 10_000)] {
            assert!(credit.update(10_000, fwd_cnt));
            assert_eq!(credit.bytes(), bytes);
        }
        assert_eq!(credit.packets(), 9);
        let mut window = Window::new(1000);
        window.shift(u32::MAX - 100);
        window.receive(600);
        assert!(window.forward(600));
        assert_eq!(window.tell(), (1000, 499));
        window.receive(501);
        assert!(window.forward(501));
    }

    #[test]
    fn a_forged_count_gives_nothing() {
        for start in [0, 5000, u32::MAX - 3000] {
            let mut credit = Credit::new(10_000);
            credit.shift(start);
            credit.spend(6000);
            assert!(credit.update(10_000, start.wrapping_add(2000)));
            // Ahead of what was sent by little and by much, the same again, and old.
            for fwd_cnt in [6001, 6000 + (1 << 31), u32::MAX, 2000, 1999, 0] {
                assert!(!credit.update(10_000, start.wrapping_add(fwd_cnt)), "{fwd_cnt}");
                assert_eq!((credit.bytes(), credit.packets()), (6000, 8));
            }
        }
    }

    #[test]
    fn extreme_buffers_are_bounded() {
        let mut credit = Credit::new(0);
        assert_eq!((credit.bytes(), credit.packets()), (0, 1));
        credit.update(u32::MAX, 0);
        assert_eq!((credit.bytes(), credit.packets()), (u32::MAX, MAX_UNREAD));
        for _ in 0..MAX_UNREAD {
            credit.spend(1);
        }
        assert_eq!((credit.bytes(), credit.packets()), (0, 0));
        credit.update(0, 1);
        assert_eq!((credit.bytes(), credit.packets()), (0, 0));
    }

    #[test]
    fn packets_are_counted_until_they_are_read_whole() {
        let mut credit = Credit::new(3 * PACKET_COST);
        for left in [2, 1, 0] {
            credit.spend(10);
            assert_eq!(credit.packets(), left);
        }
        // Half of the first; the rest of it and half of the second; all.
        for (fwd_cnt, packets) in [(5, 0), (15, 1), (30, 3)] {
            credit.update(3 * PACKET_COST, fwd_cnt);
            assert_eq!(credit.packets(), packets);
        }
    }

    #[test]
    fn the_guest_hears_when_it_sees_half_of_the_buffer_used() {
        let mut window = Window::new(1000);
        window.receive(500);
        assert!(!window.forward(500));
        window.receive(1);
        assert!(window.forward(1));
        assert_eq!(window.tell(), (1000, 501));
        // Nothing new to say.
        window.receive(1000);
        assert!(!window.forward(0));
        assert!(window.forward(1));
    }

    proptest! {
        /// A guest that says anything at all never gets more than its buffer holds.
        #[test]
        fn no_claim_makes_more_credit_than_the_buffer(
            start: u32,
            steps in prop::collection::vec((any::<u32>(), any::<u32>(), 0..70_000_u32), 0..200),
        ) {
            let mut credit = Credit::new(0);
            credit.shift(start);
            let mut outstanding = 0_u64;
            for (buf_alloc, claim, len) in steps {
                let before = credit.outstanding();
                credit.update(buf_alloc, claim);
                // What is known to be taken was sent before.
                prop_assert!(credit.outstanding() <= before);
                outstanding -= u64::from(before - credit.outstanding());
                let len = len.min(credit.bytes());
                if len > 0 {
                    prop_assert!(outstanding + u64::from(len) <= u64::from(buf_alloc));
                    credit.spend(len);
                    outstanding += u64::from(len);
                }
                prop_assert!(credit.unread.len() <= MAX_UNREAD);
            }
        }
    }
}
