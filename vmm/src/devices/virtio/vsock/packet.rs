//! What crosses the virtqueues: a 44-byte header, then the payload.
//!
//! A packet is one descriptor chain. Nothing ties its layout to the descriptors: the header may be
//! split over several of them or share one with data, and guest kernels from 6.17 on send a packet as
//! up to 18 of them. So a chain is first turned into a flat list of memory slices, which is then cut
//! at byte 44. Payload is never copied here; it goes between guest memory and a socket directly.
//!
//! Layout and constants: virtio 1.2, section 5.10.6.

use std::ops::Range;

use vm_memory::{GuestMemory as _, Permissions, VolatileSlice};

use crate::devices::virtio::{DeviceError, GuestMemory, chain};

/// Size of the packet header in bytes.
pub const HEADER_LEN: usize = 44;

/// Most slices of guest memory that one packet may consist of. Linux needs 18: a header and
/// `MAX_SKB_FRAGS`.
const MAX_SLICES: usize = 256;

/// The host's CID.
pub const HOST_CID: u64 = 2;

/// Stream sockets, the only type that this device offers.
pub const TYPE_STREAM: u16 = 1;

/// Shutdown flag: the sender will receive no more data.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Shutdown flag: the sender will send no more data.
pub const SHUTDOWN_SEND: u32 = 2;

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Open a connection.
    Request = 1,
    /// The connection is accepted.
    Response = 2,
    /// The connection is refused or gone.
    Reset = 3,
    /// The sender will receive or send no more, see the flags.
    Shutdown = 4,
    /// Data.
    ReadWrite = 5,
    /// `buf_alloc` and `fwd_cnt` have changed.
    CreditUpdate = 6,
    /// Answer with a credit update.
    CreditRequest = 7,
}

impl Op {
    /// The operation with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::ReadWrite,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    /// The number of this operation.
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// The header as it lies in memory; all fields are little-endian.
#[repr(C, packed)]
struct Layout {
    src_cid: u64,
    dst_cid: u64,
    src_port: u32,
    dst_port: u32,
    len: u32,
    kind: u16,
    op: u16,
    flags: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
}

const _: () = assert!(size_of::<Layout>() == HEADER_LEN);
const _: () = assert!(std::mem::offset_of!(Layout, len) == 24);
const _: () = assert!(std::mem::offset_of!(Layout, kind) == 28);
const _: () = assert!(std::mem::offset_of!(Layout, fwd_cnt) == 40);

/// A packet header in the host's byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// CID of the sender.
    pub src_cid: u64,
    /// CID of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Length of the payload in bytes.
    pub len: u32,
    /// Type of socket, [`TYPE_STREAM`].
    pub kind: u16,
    /// Number of an [`Op`].
    pub op: u16,
    /// Flags of [`Op::Shutdown`].
    pub flags: u32,
    /// Size of the sender's receive buffer for this connection in bytes.
    pub buf_alloc: u32,
    /// Bytes that the sender has taken out of that buffer since the connection began; it wraps.
    pub fwd_cnt: u32,
}

macro_rules! field {
    ($bytes:ident, $field:ident, $type:ty) => {{
        const AT: usize = std::mem::offset_of!(Layout, $field);
        let mut field = [0; size_of::<$type>()];
        field.copy_from_slice(&$bytes[AT..AT + size_of::<$type>()]);
        <$type>::from_le_bytes(field)
    }};
}

macro_rules! set_field {
    ($bytes:ident, $field:ident, $value:expr) => {{
        const AT: usize = std::mem::offset_of!(Layout, $field);
        let value = $value.to_le_bytes();
        $bytes[AT..AT + value.len()].copy_from_slice(&value);
    }};
}

impl Header {
    /// Reads a header. Any bytes are a header; what it says is for the receiver to judge.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        Self {
            src_cid: field!(bytes, src_cid, u64),
            dst_cid: field!(bytes, dst_cid, u64),
            src_port: field!(bytes, src_port, u32),
            dst_port: field!(bytes, dst_port, u32),
            len: field!(bytes, len, u32),
            kind: field!(bytes, kind, u16),
            op: field!(bytes, op, u16),
            flags: field!(bytes, flags, u32),
            buf_alloc: field!(bytes, buf_alloc, u32),
            fwd_cnt: field!(bytes, fwd_cnt, u32),
        }
    }

    /// The header as the guest reads it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        set_field!(bytes, src_cid, self.src_cid);
        set_field!(bytes, dst_cid, self.dst_cid);
        set_field!(bytes, src_port, self.src_port);
        set_field!(bytes, dst_port, self.dst_port);
        set_field!(bytes, len, self.len);
        set_field!(bytes, kind, self.kind);
        set_field!(bytes, op, self.op);
        set_field!(bytes, flags, self.flags);
        set_field!(bytes, buf_alloc, self.buf_alloc);
        set_field!(bytes, fwd_cnt, self.fwd_cnt);
        bytes
    }

    /// The reset that refuses this packet. It mirrors addresses and type, right or wrong, because the
    /// sender finds its socket by them.
    #[must_use]
    pub fn refusal(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Op::Reset.number(),
            ..Self::default()
        }
    }
}

/// Which way the memory of a chain is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads: a packet from the guest.
    Read,
    /// The device writes: room for a packet to the guest.
    Write,
}

/// A chain, flattened: where header and payload lie in a list of slices.
#[derive(Clone, Debug)]
pub struct Chain {
    /// Index of the chain's head, to give it back.
    pub head: u16,
    /// The slices that hold the header, [`HEADER_LEN`] bytes together.
    pub header: Range<usize>,
    /// The slices after the header.
    pub payload: Range<usize>,
    /// Bytes after the header.
    pub payload_len: usize,
}

/// Appends the slices of a chain to `slices`, cut behind the header, and says where they lie. `None`: the
/// chain is shorter than a header, has too many parts, or has a descriptor that points the wrong way; nothing
/// was appended then.
///
/// # Errors
/// The chain is broken or leaves guest memory.
pub fn flatten<'m>(
    memory: &'m GuestMemory,
    chain: chain::Chain<'_>,
    access: Access,
    slices: &mut Vec<VolatileSlice<'m>>,
) -> Result<Option<Chain>, DeviceError> {
    let start = slices.len();
    let flat = append(memory, chain, access, slices);
    if !matches!(flat, Ok(Some(_))) {
        slices.truncate(start);
    }
    flat
}

/// A part of a slice that lies in it; cannot fail.
fn bad(error: vm_memory::VolatileMemoryError) -> DeviceError {
    vm_memory::GuestMemoryError::from(error).into()
}

fn append<'m>(
    memory: &'m GuestMemory,
    chain: chain::Chain<'_>,
    access: Access,
    slices: &mut Vec<VolatileSlice<'m>>,
) -> Result<Option<Chain>, DeviceError> {
    let head = chain.head();
    let start = slices.len();
    let permissions = match access {
        Access::Read => Permissions::Read,
        Access::Write => Permissions::Write,
    };
    let mut header_left = HEADER_LEN;
    let mut header_end = start;
    let mut payload_len = 0_usize;
    for (count, descriptor) in chain.enumerate() {
        let descriptor = descriptor?;
        if count >= MAX_SLICES || descriptor.is_write_only() != (access == Access::Write) {
            return Ok(None);
        }
        let len = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
        for slice in memory.get_slices(descriptor.addr(), len, permissions)? {
            let mut slice = slice?;
            if header_left > 0 {
                let part = slice.subslice(0, header_left.min(slice.len())).map_err(bad)?;
                header_left = header_left.saturating_sub(part.len());
                slice = slice.offset(part.len()).map_err(bad)?;
                slices.push(part);
                header_end = slices.len();
            }
            if !slice.is_empty() {
                payload_len = payload_len.saturating_add(slice.len());
                slices.push(slice);
            }
            if slices.len() - start > MAX_SLICES {
                return Ok(None);
            }
        }
    }
    Ok((header_left == 0).then_some(Chain {
        head,
        header: start..header_end,
        payload: header_end..slices.len(),
        payload_len,
    }))
}

/// Reads a header from the slices that hold one.
#[must_use]
pub fn read_header(slices: &[VolatileSlice<'_>]) -> Header {
    let mut bytes = [0; HEADER_LEN];
    let mut rest = &mut bytes[..];
    for slice in slices {
        let part = slice.copy_to(rest);
        rest = &mut rest[part..];
    }
    Header::from_bytes(&bytes)
}

/// Writes a header into the slices made for one.
pub fn write_header(slices: &[VolatileSlice<'_>], header: Header) {
    let bytes = header.to_bytes();
    let mut rest = &bytes[..];
    for slice in slices {
        let (part, after) = rest.split_at(slice.len().min(rest.len()));
        slice.copy_from(part);
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};

    const READ: u16 = 0;
    const WRITE: u16 = 2;
    const DATA: u64 = 0x1_0000;

    fn memory() -> GuestMemory {
        // Two adjacent regions: a buffer may lie across their border.
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x2_0000), (GuestAddress(0x2_0000), 0x2_0000)])
            .unwrap()
    }

    /// Flattens one chain of (address, length, flags).
    fn flat(
        memory: &GuestMemory,
        parts: &[(u64, u32, u16)],
        access: Access,
    ) -> Option<(Chain, Vec<usize>)> {
        let queue = MockSplitQueue::new(memory, 256);
        let descriptors: Vec<_> = parts
            .iter()
            .map(|&(addr, len, flags)| RawDescriptor::from(Descriptor::new(addr, len, flags, 0)))
            .collect();
        queue.build_desc_chain(&descriptors).unwrap();
        let chain = chain::Chain::new(memory, queue.desc_table_addr(), 256, 0, true).unwrap();
        let mut slices = Vec::new();
        let result = flatten(memory, chain, access, &mut slices).ok().flatten();
        if result.is_none() {
            assert!(slices.is_empty());
        }
        result.map(|chain| (chain, slices.iter().map(VolatileSlice::len).collect()))
    }

    fn sample() -> Header {
        Header {
            src_cid: 0x0102_0304_0506_0708,
            dst_cid: 2,
            src_port: 0x1112_1314,
            dst_port: 0x2122_2324,
            len: 0x3132_3334,
            kind: 0x4142,
            op: 0x5152,
            flags: 0x6162_6364,
            buf_alloc: 0x7172_7374,
            fwd_cnt: 0x8182_8384,
        }
    }

    #[test]
    fn fields_lie_where_the_specification_says() {
        let bytes = sample().to_bytes();
        assert_eq!(bytes[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[8..16], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..20], [0x14, 0x13, 0x12, 0x11]);
        assert_eq!(bytes[20..24], [0x24, 0x23, 0x22, 0x21]);
        assert_eq!(bytes[24..28], [0x34, 0x33, 0x32, 0x31]);
        assert_eq!(bytes[28..32], [0x42, 0x41, 0x52, 0x51]);
        assert_eq!(bytes[32..36], [0x64, 0x63, 0x62, 0x61]);
        assert_eq!(bytes[36..40], [0x74, 0x73, 0x72, 0x71]);
        assert_eq!(bytes[40..44], [0x84, 0x83, 0x82, 0x81]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header(bytes in prop::array::uniform32(any::<u8>()), tail: [u8; 12]) {
            let mut all = [0; HEADER_LEN];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            prop_assert_eq!(Header::from_bytes(&all).to_bytes(), all);
        }

        #[test]
        fn any_split_of_the_header_reads_the_same(cuts in prop::collection::vec(1_usize..20, 0..12)) {
            let mut bytes = sample().to_bytes();
            let mut slices = Vec::new();
            let mut rest = &mut bytes[..];
            for cut in cuts {
                let (part, after) = rest.split_at_mut(cut.min(rest.len()));
                slices.push(VolatileSlice::from(part));
                rest = after;
            }
            slices.push(VolatileSlice::from(rest));
            prop_assert_eq!(read_header(&slices), sample());
            write_header(&slices, Header { op: 9, ..sample() });
            prop_assert_eq!(read_header(&slices), Header { op: 9, ..sample() });
        }
    }

    #[test]
    fn one_descriptor_holds_header_and_data() {
        let (chain, lens) = flat(&memory(), &[(DATA, 4096, WRITE)], Access::Write).unwrap();
        assert_eq!((chain.header, chain.payload, chain.payload_len), (0..1, 1..2, 4052));
        assert_eq!(lens, [44, 4052]);
    }

    #[test]
    fn header_split_over_three_descriptors() {
        let parts = [(DATA, 10, READ), (DATA + 64, 30, READ), (DATA + 128, 9, READ)];
        let (chain, lens) = flat(&memory(), &parts, Access::Read).unwrap();
        assert_eq!((chain.header, chain.payload, chain.payload_len), (0..3, 3..4, 5));
        assert_eq!(lens, [10, 30, 4, 5]);
    }

    #[test]
    fn many_descriptors_as_guest_kernels_from_6_17_send_them() {
        let mut parts = vec![(DATA, 44, READ)];
        parts.extend((0..17).map(|n| (DATA + 4096 * n, 4096, READ)));
        let (chain, _) = flat(&memory(), &parts, Access::Read).unwrap();
        assert_eq!((chain.header, chain.payload_len), (0..1, 17 * 4096));
    }

    #[test]
    fn a_buffer_across_two_regions_becomes_two_slices() {
        let (chain, lens) = flat(&memory(), &[(0x1_ff00, 0x200, READ)], Access::Read).unwrap();
        assert_eq!(chain.payload_len, 0x200 - 44);
        assert_eq!(lens, [44, 0x100 - 44, 0x100]);
    }

    #[test]
    fn bad_chains_are_refused() {
        let memory = memory();
        let refused = |parts: &[(u64, u32, u16)], access| flat(&memory, parts, access).is_none();
        // Shorter than a header.
        assert!(refused(&[(DATA, 43, READ)], Access::Read));
        assert!(refused(&[(DATA, 0, READ)], Access::Read));
        // Wrong direction, alone or behind a right one.
        assert!(refused(&[(DATA, 64, WRITE)], Access::Read));
        assert!(refused(&[(DATA, 64, READ)], Access::Write));
        assert!(refused(&[(DATA, 64, READ), (DATA, 64, WRITE)], Access::Read));
        // Outside of memory: wholly, in part, and past the end of the address space.
        assert!(refused(&[(0x4_0000, 64, READ)], Access::Read));
        assert!(refused(&[(0x3_fff0, 64, READ)], Access::Read));
        assert!(refused(&[(u64::MAX - 8, 64, READ)], Access::Read));
        assert!(refused(&[(DATA, u32::MAX, READ)], Access::Read));
        // Too many parts, empty or not.
        let many: Vec<_> = (0..200).map(|n| (0x1_ff00 + n, 0x200, READ)).collect();
        assert!(refused(&many, Access::Read));
    }

    #[test]
    fn a_refusal_mirrors_the_addresses() {
        let refusal = sample().refusal();
        assert_eq!((refusal.src_cid, refusal.dst_cid), (2, 0x0102_0304_0506_0708));
        assert_eq!((refusal.src_port, refusal.dst_port), (0x2122_2324, 0x1112_1314));
        assert_eq!((refusal.kind, refusal.op, refusal.len), (0x4142, 3, 0));
    }

    #[test]
    fn unknown_operations_have_no_name() {
        for number in 0..=u16::MAX {
            match Op::from_number(number) {
                Some(op) => assert_eq!(op.number(), number),
                None => assert!(number == 0 || number > 7),
            }
        }
    }

    #[test]
    fn headers_are_read_from_guest_memory() {
        let memory = memory();
        memory.write_slice(&sample().to_bytes(), GuestAddress(DATA)).unwrap();
        let queue = MockSplitQueue::new(&memory, 16);
        let parts = [RawDescriptor::from(Descriptor::new(DATA, 44, READ, 0))];
        queue.build_desc_chain(&parts).unwrap();
        let chain = chain::Chain::new(&memory, queue.desc_table_addr(), 16, 0, true).unwrap();
        let mut slices = Vec::new();
        let chain = flatten(&memory, chain, Access::Read, &mut slices).unwrap().unwrap();
        assert_eq!(read_header(&slices[chain.header]), sample());
    }
}
