//! A chain of descriptors: one by one as the driver linked them, or as two lists of guest buffers, what the
//! device may read and what it may write.

use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions, VolatileSlice};

use super::queue::QueueError;
use super::{DeviceError, GuestMemory};

/// A descriptor of a chain.
pub type Descriptor = virtio_queue::desc::split::Descriptor;

/// Bytes of a descriptor in a table.
const DESCRIPTOR_SIZE: u32 = 16;
/// Most descriptors of a chain, however large its indirect table is. No driver makes longer ones; it is
/// the limit of other VMMs too, and that of `readv`.
pub const MAX_CHAIN: u32 = 1024;

/// The descriptors of a chain, each looked at once, as the driver linked them. The first error is the last
/// item.
#[derive(Debug)]
pub struct Chain<'m> {
    memory: &'m GuestMemory,
    head: u16,
    table: GuestAddress,
    entries: u32,
    /// The next descriptor; `None` behind the last one and after an error.
    next: Option<u16>,
    /// How many more there may be.
    left: u32,
    limit: u32,
    bytes: u32,
    indirect: Indirect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Indirect {
    /// Not negotiated.
    Refused,
    Allowed,
    /// The chain is in such a table.
    Inside,
}

impl<'m> Chain<'m> {
    /// The chain that begins at `head` of a table of `size` entries.
    pub(super) fn new(
        memory: &'m GuestMemory,
        table: GuestAddress,
        size: u16,
        head: u16,
        indirect: bool,
    ) -> Result<Self, QueueError> {
        let entries = u32::from(size);
        if head >= size {
            return Err(QueueError::Descriptor { index: head, entries });
        }
        let limit = entries.min(MAX_CHAIN);
        let indirect = if indirect { Indirect::Allowed } else { Indirect::Refused };
        Ok(Self {
            memory,
            head,
            table,
            entries,
            next: Some(head),
            left: limit,
            limit,
            bytes: 0,
            indirect,
        })
    }

    /// The number by which the chain is returned.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    fn read(&mut self, index: u16) -> Result<Descriptor, QueueError> {
        let descriptor = self.entry(index)?;
        if !descriptor.refers_to_indirect_table() {
            return self.checked(descriptor);
        }
        // The write flag of a descriptor that refers to a table is to be ignored (2.7.5.3.2).
        match self.indirect {
            Indirect::Refused => return Err(QueueError::IndirectRefused),
            Indirect::Inside => return Err(QueueError::IndirectNested),
            Indirect::Allowed => {}
        }
        if descriptor.has_next() {
            return Err(QueueError::IndirectNext);
        }
        let bytes = descriptor.len();
        if bytes == 0 || !bytes.is_multiple_of(DESCRIPTOR_SIZE) {
            return Err(QueueError::IndirectSize(bytes));
        }
        self.indirect = Indirect::Inside;
        self.table = descriptor.addr();
        self.entries = bytes / DESCRIPTOR_SIZE;
        self.limit = self.entries.min(MAX_CHAIN);
        self.left = self.limit;
        let first = self.entry(0)?;
        if first.refers_to_indirect_table() {
            return Err(QueueError::IndirectNested);
        }
        self.checked(first)
    }

    /// Reads the table; nothing is believed yet.
    fn entry(&self, index: u16) -> Result<Descriptor, QueueError> {
        if u32::from(index) >= self.entries {
            return Err(QueueError::Descriptor { index, entries: self.entries });
        }
        let at = self
            .table
            .checked_add(u64::from(index) * u64::from(DESCRIPTOR_SIZE))
            .ok_or(virtio_queue::Error::AddressOverflow)?;
        Ok(self.memory.read_obj(at)?)
    }

    fn checked(&mut self, descriptor: Descriptor) -> Result<Descriptor, QueueError> {
        self.left = self.left.checked_sub(1).ok_or(QueueError::Length(self.limit))?;
        if descriptor.len() == 0 {
            return Err(QueueError::Empty);
        }
        self.bytes = self.bytes.checked_add(descriptor.len()).ok_or(QueueError::Bytes)?;
        self.next = descriptor.has_next().then(|| descriptor.next());
        Ok(descriptor)
    }
}

impl Iterator for Chain<'_> {
    type Item = Result<Descriptor, QueueError>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next.take()?;
        Some(self.read(index))
    }
}

/// Buffers in the guest, as one stream of bytes.
#[derive(Default)]
pub struct Buffers<'a> {
    slices: Vec<VolatileSlice<'a>>,
    length: u64,
}

impl<'a> Buffers<'a> {
    /// Bytes in all.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The pieces in order; some may be empty.
    #[must_use]
    pub fn slices(&self) -> &[VolatileSlice<'a>] {
        &self.slices
    }

    fn push(
        &mut self,
        memory: &'a GuestMemory,
        descriptor: Descriptor,
        access: Permissions,
    ) -> Result<(), DeviceError> {
        let length = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
        for slice in memory.get_slices(descriptor.addr(), length, access)? {
            let slice = slice?;
            self.length = self.length.saturating_add(slice.len() as u64);
            self.slices.push(slice);
        }
        Ok(())
    }

    /// Takes the first `count` bytes; `None`, and nothing changes, when there are fewer.
    pub fn take_front(&mut self, count: u64) -> Option<Buffers<'a>> {
        let rest = self.length.checked_sub(count)?;
        let tail = self.split_off(count)?;
        let front = std::mem::replace(self, tail);
        debug_assert_eq!(self.length, rest);
        Some(front)
    }

    /// Keeps the first `at` bytes and returns the others.
    pub fn split_off(&mut self, at: u64) -> Option<Buffers<'a>> {
        let tail_length = self.length.checked_sub(at)?;
        let mut left = at;
        let mut index = 0;
        let mut tail = Vec::new();
        for (n, slice) in self.slices.iter_mut().enumerate() {
            let length = slice.len() as u64;
            if left >= length {
                left -= length;
                index = n + 1;
                continue;
            }
            let middle = usize::try_from(left).ok()?;
            let (head, rest) = slice.split_at(middle).ok()?;
            index = n;
            if middle > 0 {
                *slice = head;
                tail.push(rest);
                index = n + 1;
            }
            break;
        }
        tail.extend(self.slices.drain(index..));
        self.length = at;
        Some(Buffers { slices: tail, length: tail_length })
    }

    /// Copies the first `N` bytes out; `None` when there are fewer.
    pub fn read_array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let front = self.take_front(N as u64)?;
        let mut bytes = [0; N];
        let mut rest = bytes.as_mut_slice();
        for slice in &front.slices {
            let done = slice.copy_to(rest);
            rest = rest.get_mut(done..)?;
        }
        Some(bytes)
    }

    /// Copies as many of `bytes` in as there is room for; returns their number.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let count = self.length.min(bytes.len() as u64);
        let mut rest = bytes;
        if let Some(front) = self.take_front(count) {
            for slice in &front.slices {
                let count = rest.len().min(slice.len());
                let (now, later) = rest.split_at(count);
                slice.copy_from(now);
                rest = later;
            }
        }
        bytes.len() - rest.len()
    }
}

/// Splits a chain into its readable and its writable buffers.
///
/// Every buffer must lie in guest memory, and readable ones come first (virtio 1.2, 2.7.4.2).
pub fn split_chain(
    memory: &GuestMemory,
    chain: impl Iterator<Item = Result<Descriptor, QueueError>>,
) -> Result<(Buffers<'_>, Buffers<'_>), DeviceError> {
    let (mut readable, mut writable) = (Buffers::default(), Buffers::default());
    for descriptor in chain {
        let descriptor = descriptor?;
        if descriptor.is_write_only() {
            writable.push(memory, descriptor, Permissions::Write)?;
        } else if writable.slices.is_empty() {
            readable.push(memory, descriptor, Permissions::Read)?;
        } else {
            return Err(QueueError::Order.into());
        }
    }
    Ok((readable, writable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use virtio_bindings::bindings::virtio_ring::VRING_DESC_F_WRITE;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap()
    }

    fn descriptor(address: u64, length: u32, writable: bool) -> Descriptor {
        let flags = if writable { VRING_DESC_F_WRITE as u16 } else { 0 };
        Descriptor::new(address, length, flags, 0)
    }

    #[test]
    fn split_headers_are_put_together() {
        let memory = memory();
        memory.write_slice(b"abcdefgh", GuestAddress(0x1000)).unwrap();
        let chain = [(0x1000, 3), (0x1003, 0), (0x1003, 4)].map(|(a, n)| descriptor(a, n, false));
        let (mut readable, writable) = split_chain(&memory, chain.into_iter().map(Ok)).unwrap();
        assert!(writable.is_empty());
        assert_eq!(readable.read_array::<5>().unwrap(), *b"abcde");
        assert_eq!(readable.len(), 2);
        assert_eq!(readable.read_array::<3>(), None);
        assert_eq!(readable.read_array::<2>().unwrap(), *b"fg");
    }

    #[test]
    fn writes_go_to_the_right_pieces() {
        let memory = memory();
        let chain = [(0x1000, 2), (0x2000, 3)].map(|(a, n)| descriptor(a, n, true));
        let (_, mut writable) = split_chain(&memory, chain.into_iter().map(Ok)).unwrap();
        let mut status = writable.split_off(4).unwrap();
        assert_eq!(writable.write(b"wxyzQ"), 4);
        assert_eq!(status.write(b"S"), 1);
        assert_eq!(status.write(b"T"), 0);
        let mut found = [0; 2];
        memory.read_slice(&mut found, GuestAddress(0x1000)).unwrap();
        assert_eq!(&found, b"wx");
        let mut found = [0; 4];
        memory.read_slice(&mut found, GuestAddress(0x2000)).unwrap();
        assert_eq!(&found, b"yzS\0");
    }

    #[test]
    fn bad_chains_are_errors() {
        let memory = memory();
        let split =
            |chain: &[Descriptor]| split_chain(&memory, chain.iter().copied().map(Ok)).is_err();
        assert!(split(&[descriptor(0, 1, true), descriptor(0, 1, false)]));
        assert!(split(&[descriptor(0x3fff, 2, false)]));
        assert!(split(&[descriptor(u64::MAX, 2, true)]));
        assert!(split(&[descriptor(0, u32::MAX, true)]));
    }

    proptest! {
        #[test]
        fn splitting_keeps_every_byte(lengths in prop::collection::vec(0u32..9, 0..6), at in 0u64..60) {
            let memory = memory();
            let chain = lengths.iter().map(|length| Ok(descriptor(0x100, *length, true)));
            let (_, mut front) = split_chain(&memory, chain).unwrap();
            let total = front.len();
            match front.split_off(at) {
                None => {
                    prop_assert!(at > total);
                    prop_assert_eq!(front.len(), total);
                }
                Some(tail) => {
                    prop_assert_eq!(front.len(), at);
                    prop_assert_eq!(tail.len(), total - at);
                    let sum = |b: &Buffers<'_>| b.slices().iter().map(|s| s.len() as u64).sum::<u64>();
                    prop_assert_eq!(sum(&front), at);
                    prop_assert_eq!(sum(&tail), total - at);
                }
            }
        }
    }
}
