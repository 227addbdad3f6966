//! What the guest of the vsock tests and benches is told, what it tells, and the bytes that both
//! sides know. Shared by the guest and by the programs on the host.

#![allow(dead_code, unreachable_pub, reason = "each side uses its part")]

/// Port of the guest that takes orders: a connection begins with an [`Order`].
pub const SERVICE: u32 = 1;
/// Port of the host that the guest dials when an order says so; it says the seed first.
pub const DIALLED: u32 = 2000;
/// Port of the host that takes one [`Report`] per connection.
pub const REPORTS: u32 = 2001;

/// Order: read so many bytes, answer with one.
pub const SINK: u32 = 1;
/// Order: write so many bytes, by writes of `size`.
pub const SOURCE: u32 = 2;
/// Order: send back whatever comes.
pub const ECHO: u32 = 3;
/// Order: for a time write one [`Pattern`] and check another, then end as `size` says.
pub const CHECK: u32 = 4;
/// Order: dial [`DIALLED`], say the seed, and there do as in [`CHECK`].
pub const DIAL: u32 = 5;

/// How the guest ends: it sends no more, and reads on to the end of what comes.
pub const HALF_CLOSE: u32 = 0;
/// How the guest ends: it closes, whatever is on its way.
pub const ABORT: u32 = 1;

/// What the guest is to do with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// One of the orders.
    pub kind: u32,
    /// Bytes of each read or write, or how to end.
    pub size: u32,
    /// Bytes in all.
    pub bytes: u64,
    /// How long to write, in milliseconds.
    pub millis: u64,
    /// Of the patterns; each connection has its own.
    pub seed: u64,
}

impl Order {
    /// Bytes of an order.
    pub const LEN: usize = 32;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let head = u64::from(self.kind) | u64::from(self.size) << 32;
        words([head, self.bytes, self.millis, self.seed])
    }

    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [head, bytes, millis, seed] = numbers(bytes);
        Self { kind: head as u32, size: (head >> 32) as u32, bytes, millis, seed }
    }
}

/// How a connection went, as the guest saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Of the order.
    pub seed: u64,
    /// Bytes that came, and were right unless `wrong`.
    pub read: u64,
    /// Bytes that the guest wrote.
    pub written: u64,
    /// Whether the stream came to its end (not to an error), and whether a byte was wrong.
    pub ended: bool,
    /// See `ended`.
    pub wrong: bool,
}

impl Report {
    /// Bytes of a report.
    pub const LEN: usize = 32;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let flags = u64::from(self.ended) | u64::from(self.wrong) << 1;
        words([self.seed, self.read, self.written, flags])
    }

    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [seed, read, written, flags] = numbers(bytes);
        Self { seed, read, written, ended: flags & 1 != 0, wrong: flags & 2 != 0 }
    }
}

fn words(numbers: [u64; 4]) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (part, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        part.copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

fn numbers(bytes: [u8; 32]) -> [u64; 4] {
    let mut numbers = [0; 4];
    for (number, part) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = part.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    }
    numbers
}

/// An endless stream of bytes that do not repeat: any loss, doubling or reordering shows.
#[derive(Clone, Debug)]
pub struct Pattern {
    seed: u64,
    at: u64,
}

impl Pattern {
    /// What the guest writes on the connection with this seed.
    pub fn of_guest(seed: u64) -> Self {
        Self { seed: mix(seed), at: 0 }
    }

    /// What the host writes on the connection with this seed.
    pub fn of_host(seed: u64) -> Self {
        Self { seed: mix(!seed), at: 0 }
    }

    /// Bytes so far.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Goes back by so many bytes, which were not written.
    pub fn rewind(&mut self, bytes: usize) {
        self.at -= bytes as u64;
    }

    /// The next bytes.
    pub fn fill(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let word = mix(self.seed ^ (self.at / 8)).to_le_bytes();
            let from = (self.at % 8) as usize;
            let len = bytes.len().min(8 - from);
            let (part, rest) = bytes.split_at_mut(len);
            part.copy_from_slice(&word[from..from + len]);
            self.at += len as u64;
            bytes = rest;
        }
    }

    /// Whether these are the next bytes.
    pub fn check(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let word = mix(self.seed ^ (self.at / 8)).to_le_bytes();
            let from = (self.at % 8) as usize;
            let len = bytes.len().min(8 - from);
            let (part, rest) = bytes.split_at(len);
            if part != &word[from..from + len] {
                return false;
            }
            self.at += len as u64;
            bytes = rest;
        }
        true
    }
}

/// The finaliser of SplitMix64.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Sizes of writes: from one byte to 256 KiB, each order of magnitude as often as the others.
#[derive(Clone, Debug)]
pub struct Sizes(u64);

impl Sizes {
    /// Largest size.
    pub const MOST: usize = 256 * 1024;

    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub fn next(&mut self) -> usize {
        self.0 = mix(self.0);
        let bits = self.0 % 19;
        let size = 1 << bits;
        (size | (mix(self.0) & (size - 1))).min(Self::MOST as u64) as usize
    }
}
