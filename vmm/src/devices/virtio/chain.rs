//! A descriptor chain as two lists of guest buffers: what the device may read, and what it may write.

use vm_memory::{GuestMemory as _, Permissions, VolatileSlice};

use super::{DeviceError, GuestMemory};

/// A descriptor of a chain.
pub type Descriptor = virtio_queue::desc::split::Descriptor;

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
    chain: impl Iterator<Item = Descriptor>,
) -> Result<(Buffers<'_>, Buffers<'_>), DeviceError> {
    let (mut readable, mut writable) = (Buffers::default(), Buffers::default());
    for descriptor in chain {
        if descriptor.is_write_only() {
            writable.push(memory, descriptor, Permissions::Write)?;
        } else if writable.slices.is_empty() {
            readable.push(memory, descriptor, Permissions::Read)?;
        } else {
            return Err(DeviceError::Driver("a readable buffer follows a writable one".into()));
        }
    }
    Ok((readable, writable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use virtio_bindings::bindings::virtio_ring::VRING_DESC_F_WRITE;
    use vm_memory::{Bytes, GuestAddress};

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
        let (mut readable, writable) = split_chain(&memory, chain.into_iter()).unwrap();
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
        let (_, mut writable) = split_chain(&memory, chain.into_iter()).unwrap();
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
        let split = |chain: &[Descriptor]| split_chain(&memory, chain.iter().copied()).is_err();
        assert!(split(&[descriptor(0, 1, true), descriptor(0, 1, false)]));
        assert!(split(&[descriptor(0x3fff, 2, false)]));
        assert!(split(&[descriptor(u64::MAX, 2, true)]));
        assert!(split(&[descriptor(0, u32::MAX, true)]));
    }

    proptest! {
        #[test]
        fn splitting_keeps_every_byte(lengths in prop::collection::vec(0u32..9, 0..6), at in 0u64..60) {
            let memory = memory();
            let chain = lengths.iter().map(|length| descriptor(0x100, *length, true));
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
