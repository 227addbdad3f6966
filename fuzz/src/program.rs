//! What a guest's driver can do to a device, as data that a fuzzer can make and change.

use arbitrary::Arbitrary;

/// How to bring a device up.
#[derive(Arbitrary, Clone, Debug)]
pub struct Setup {
    /// Which of the offered features are taken: bit n for feature 24 + n (`INDIRECT_DESC` is bit 4,
    /// `EVENT_IDX` bit 5); other features are taken if bit 0 is set.
    pub features: u8,
    /// How often the largest size of each queue is halved.
    pub halved: [u8; 3],
}

/// A guest physical address.
#[derive(Arbitrary, Clone, Debug)]
pub enum Place {
    /// Word of the data area, which ends in a hole of the guest's memory.
    Data(u16),
    /// Byte of the first 64 KiB, where the rings are.
    Ring(u16),
    /// That many bytes below the end of memory's last region.
    End(u16),
    /// That many bytes below the end of the address space.
    Last(u16),
    /// Anywhere.
    Any(u64),
}

/// Length of a buffer.
#[derive(Arbitrary, Clone, Debug)]
pub enum Length {
    /// Bytes.
    Small(u8),
    /// Bytes.
    Medium(u16),
    /// Bytes.
    Any(u32),
}

impl Length {
    /// In bytes.
    pub fn bytes(&self) -> u32 {
        match self {
            Self::Small(length) => u32::from(*length),
            Self::Medium(length) => u32::from(*length),
            Self::Any(length) => *length,
        }
    }
}

/// One buffer of a chain.
#[derive(Arbitrary, Clone, Debug)]
pub struct Buffer {
    /// Where.
    pub place: Place,
    /// How long.
    pub length: Length,
    /// Whether the device may write it.
    pub writable: bool,
}

/// Something done in the guest's memory, or a kick.
#[derive(Arbitrary, Clone, Debug)]
pub enum QueueOp {
    /// Bytes anywhere.
    Put {
        /// Where.
        place: Place,
        /// What.
        bytes: Vec<u8>,
    },
    /// A well-linked chain of any buffers, made available and kicked.
    Chain {
        /// Number of the queue.
        queue: u8,
        /// At most 16 count.
        buffers: Vec<Buffer>,
        /// Whether the buffers are in an indirect table.
        indirect: bool,
    },
    /// One raw descriptor.
    Descriptor {
        /// Number of the queue.
        queue: u8,
        /// Index in its table.
        index: u16,
        /// Its address.
        place: Place,
        /// Its length.
        length: Length,
        /// Its flags: `NEXT` 1, `WRITE` 2, `INDIRECT` 4.
        flags: u8,
        /// Index of the next one.
        next: u16,
    },
    /// One slot of the available ring.
    Slot {
        /// Number of the queue.
        queue: u8,
        /// Which slot.
        slot: u8,
        /// Head of a chain.
        head: u16,
    },
    /// Index of the available ring.
    Index {
        /// Number of the queue.
        queue: u8,
        /// The index.
        index: u16,
    },
    /// Makes so many more slots of the available ring available, whatever is in them.
    Advance {
        /// Number of the queue.
        queue: u8,
        /// How many.
        by: u8,
    },
    /// Where the driver wants its next interrupt.
    UsedEvent {
        /// Number of the queue.
        queue: u8,
        /// Index in the used ring.
        index: u16,
    },
    /// Kicks a queue, which may not exist.
    Kick(u8),
}

/// Something done to the registers.
#[derive(Arbitrary, Clone, Debug)]
pub enum RegisterOp {
    /// Writes a word.
    Word {
        /// Number of the register: its offset divided by four.
        register: u8,
        /// A small number.
        value: u8,
    },
    /// Writes up to 8 bytes anywhere.
    Write {
        /// Where.
        offset: u16,
        /// How many bytes.
        width: u8,
        /// What.
        value: u64,
    },
    /// Reads up to 8 bytes anywhere.
    Read {
        /// Where.
        offset: u16,
        /// How many bytes.
        width: u8,
    },
    /// Writes the device status.
    Status(u8),
    /// Writes both halves of the driver's features.
    Features(u64),
    /// Sets a queue up.
    Queue {
        /// Number of the queue.
        queue: u8,
        /// Its size.
        size: u16,
        /// Its descriptor table.
        desc: Place,
        /// Its available ring.
        avail: Place,
        /// Its used ring.
        used: Place,
    },
    /// A reset, and all that a good driver does then.
    BringUp(Setup),
    /// Not the driver's doing: the device is stopped, saved and goes on.
    Save,
    /// A reset.
    Reset,
}

/// What a driver can do to a device that has no messages of its own.
#[derive(Arbitrary, Clone, Debug)]
pub enum Op {
    /// Something with queues.
    Queue(QueueOp),
    /// Something with registers.
    Register(RegisterOp),
}

/// Bytes of a message.
#[derive(Arbitrary, Clone, Debug)]
pub enum Data {
    /// These.
    Bytes(Vec<u8>),
    /// So many times the same.
    Fill {
        /// Which byte.
        byte: u8,
        /// How many.
        length: u16,
    },
}

impl Data {
    /// The bytes.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes.clone(),
            Self::Fill { byte, length } => vec![*byte; usize::from(*length)],
        }
    }
}
