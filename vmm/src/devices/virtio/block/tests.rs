//! Requests, good and bad, against a disk of eight sectors.

use std::fs::File;
use std::sync::Arc;

use proptest::prelude::*;
use virtio_bindings::bindings::virtio_blk::*;
use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::Queue;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::BlockDevice;
use super::device::{QUEUE_SIZE, SEG_MAX};
use crate::devices::serial::Console;
use crate::devices::virtio::chain::Descriptor;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, Interrupt, VirtioDevice};

const SECTORS: u64 = 8;
const HEADER: u64 = 0x10_0000;
const DATA: u64 = 0x11_0000;
const STATUS_AT: u64 = 0x12_0000;
const READ: bool = false;
const WRITE: bool = true;

struct World {
    memory: Arc<GuestMemory>,
    device: BlockDevice,
    file: File,
    line: Arc<EventFd>,
    console: Console,
}

impl World {
    fn new(read_only: bool) -> Self {
        let file = tempfile::tempfile().unwrap();

        let content: Vec<u8> = (0..SECTORS * 512).map(|n| (n / 512 + 1) as u8).collect();
        std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
        // An incomplete sector at the end is not part of the disk.
        file.set_len(SECTORS * 512 + 100).unwrap();
        Self::of(file, read_only)
    }

    fn of(file: File, read_only: bool) -> Self {
        let console = Console::default();
        let device = BlockDevice::new(file.try_clone().unwrap(), read_only, "serial").unwrap();
        let device = device.log_to(console.clone());
        let memory = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0), 0x20_0000)]).unwrap());
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        Self { memory, device, file, line, console }
    }

    fn header(&self, kind: u32, sector: u64) {
        self.memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
        self.memory.write_obj(0u32, GuestAddress(HEADER + 4)).unwrap();
        self.memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
        self.memory.write_obj(0xaau8, GuestAddress(STATUS_AT)).unwrap();
    }

    /// Serves one chain of (address, length, writable); returns the used length.
    fn serve(&mut self, chain: &[(u64, u32, bool)]) -> Result<u32, DeviceError> {
        let mock = MockSplitQueue::new(&*self.memory, QUEUE_SIZE);
        let descriptors: Vec<RawDescriptor> = chain
            .iter()
            .map(|(address, length, writable)| {
                let flags = if *writable { VRING_DESC_F_WRITE as u16 } else { 0 };
                Descriptor::new(*address, *length, flags, 0).into()
            })
            .collect();
        mock.build_desc_chain(&descriptors).unwrap();
        let queue: Queue = mock.create_queue().unwrap();
        let interrupt = Interrupt::new(Arc::default(), self.line.clone());
        let memory = self.memory.clone();
        self.device.activate(Activation {
            memory,
            features: 0,
            queues: vec![Virtqueue::new(queue, 0)],
            interrupt,
        })?;
        self.device.queue_event(0)?;
        assert_eq!(mock.used().idx().load(), 1);
        assert_eq!(self.line.read().unwrap(), 1);
        Ok(mock.used().ring().ref_at(0).unwrap().load().len())
    }

    /// One usual request; returns used length and status byte.
    fn request(&mut self, kind: u32, sector: u64, data: (u32, bool)) -> (u32, u8) {
        self.header(kind, sector);
        let chain = [(HEADER, 16, READ), (DATA, data.0, data.1), (STATUS_AT, 1, WRITE)];
        let chain: Vec<_> = chain.into_iter().filter(|(_, length, _)| *length > 0).collect();
        let used = self.serve(&chain).unwrap();
        (used, self.status())
    }

    fn status(&self) -> u8 {
        self.memory.read_obj(GuestAddress(STATUS_AT)).unwrap()
    }

    fn data(&self, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
        data
    }

    fn disk(&self, offset: u64) -> u8 {
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&self.file, &mut byte, offset).unwrap();
        byte[0]
    }
}

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const ERROR: u8 = VIRTIO_BLK_S_IOERR as u8;

#[test]
fn reads_come_from_their_place() {
    let mut world = World::new(true);
    assert_eq!(world.request(VIRTIO_BLK_T_IN, 2, (1024, WRITE)), (1025, OK));
    let data = world.data(1024);
    assert!(data[..512].iter().all(|byte| *byte == 3));
    assert!(data[512..].iter().all(|byte| *byte == 4));
}

#[test]
fn writes_go_to_their_place() {
    let mut world = World::new(false);
    world.memory.write_slice(&[9; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(world.request(VIRTIO_BLK_T_OUT, 7, (512, READ)), (1, OK));
    assert_eq!((world.disk(7 * 512 - 1), world.disk(7 * 512), world.disk(8 * 512 - 1)), (7, 9, 9));
    assert_eq!(world.request(VIRTIO_BLK_T_FLUSH, 0, (0, READ)), (1, OK));
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let mut world = World::new(true);
    assert_ne!(world.device.features() & (1 << VIRTIO_BLK_F_RO), 0);
    assert_eq!(world.request(VIRTIO_BLK_T_OUT, 0, (512, READ)), (1, ERROR));
    assert_eq!(world.disk(0), 1);
    assert_eq!(World::new(false).device.features() & (1 << VIRTIO_BLK_F_RO), 0);
}

#[test]
fn requests_beyond_the_disk_or_not_of_whole_sectors_fail() {
    let mut world = World::new(false);
    for kind in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT] {
        let writable = kind == VIRTIO_BLK_T_IN;
        for (sector, length) in [
            (8, 512),
            (7, 1024),
            (0, 511),
            (0, 513),
            (u64::MAX, 512),
            (u64::MAX / 512, 512),
            (1 << 55, 0x1000),
        ] {
            let answer = world.request(kind, sector, (length, writable));
            assert_eq!(answer, (1, ERROR), "{kind} {sector} {length}");
        }
    }
    assert_eq!(world.file.metadata().unwrap().len(), SECTORS * 512 + 100);
    assert_eq!(world.request(VIRTIO_BLK_T_IN, 8, (0, WRITE)), (1, OK));
}

#[test]
fn a_file_that_shrank_is_an_error_and_the_disk_goes_on() {
    let mut world = World::new(true);
    world.file.set_len(1024).unwrap();
    assert_eq!(world.request(VIRTIO_BLK_T_IN, 1, (1024, WRITE)), (1, ERROR));
    assert!(world.console.tail(200).contains("disk serial: read failed on the host"));
    assert_eq!(world.request(VIRTIO_BLK_T_IN, 1, (512, WRITE)), (513, OK));
    // It is told some times, not each time.
    for _ in 0..20 {
        assert_eq!(world.request(VIRTIO_BLK_T_IN, 2, (512, WRITE)), (1, ERROR));
    }
    assert_eq!(world.console.tail(9000).lines().count(), 8);
}

#[test]
fn a_host_without_room_is_an_error_and_the_disk_goes_on() {
    let file = memfd();
    // Nothing can be added: the same to the writer as a full disk, and no more than EPERM.
    file.set_len(SECTORS * 512).unwrap();
    let seals = rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::FUTURE_WRITE;
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    let mut world = World::of(file, false);
    assert_eq!(world.request(VIRTIO_BLK_T_OUT, 0, (512, READ)), (1, ERROR));
    let log = world.console.tail(300);
    assert!(log.contains("write failed on the host: Operation not permitted"), "{log}");
    assert_eq!(world.request(VIRTIO_BLK_T_IN, 0, (512, WRITE)), (513, OK));
    // `/dev/full` gives ENOSPC for every write, but has no size.
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let mut world = World::of(full, false);
    assert_eq!(world.request(VIRTIO_BLK_T_OUT, 0, (0, READ)), (1, OK));
}

fn memfd() -> File {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("disk", flags).unwrap().into()
}

const UNMAP: u32 = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

impl World {
    /// A request with ranges of (sector, count, flags); returns the status.
    fn ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let bytes: Vec<u8> = ranges
            .iter()
            .flat_map(|(sector, count, flags)| {
                [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
            })
            .collect();
        self.memory.write_slice(&bytes, GuestAddress(DATA)).unwrap();
        // The sector of the header means nothing.
        let (used, status) = self.request(kind, u64::MAX, (bytes.len() as u32, READ));
        assert_eq!(used, 1);
        status
    }

    /// First byte of each sector.
    fn sectors(&self) -> [u8; SECTORS as usize] {
        std::array::from_fn(|sector| self.disk(sector as u64 * 512))
    }
}

#[test]
fn discarded_sectors_are_zero_and_the_others_as_they_were() {
    let mut world = World::new(false);
    assert_ne!(world.device.features() & 1 << VIRTIO_BLK_F_DISCARD, 0);
    assert_eq!(world.ranges(VIRTIO_BLK_T_DISCARD, &[(1, 2, 0), (5, 1, 0), (8, 0, 0)]), OK);
    assert_eq!(world.sectors(), [1, 0, 0, 4, 5, 0, 7, 8]);
    assert_eq!(world.ranges(VIRTIO_BLK_T_DISCARD, &[]), OK);
    assert_eq!(world.ranges(VIRTIO_BLK_T_DISCARD, &[(0, 8, 0)]), OK);
    assert_eq!(world.sectors(), [0; 8]);
    assert_eq!(world.file.metadata().unwrap().len(), SECTORS * 512 + 100);
}

#[test]
fn zeroed_sectors_are_zero_whether_they_may_be_given_up_or_not() {
    let mut world = World::new(false);
    assert_eq!(world.ranges(VIRTIO_BLK_T_WRITE_ZEROES, &[(1, 2, 0)]), OK);
    assert_eq!(world.ranges(VIRTIO_BLK_T_WRITE_ZEROES, &[(7, 1, UNMAP)]), OK);
    assert_eq!(world.sectors(), [1, 0, 0, 4, 5, 6, 7, 0]);
    assert_eq!(world.file.metadata().unwrap().len(), SECTORS * 512 + 100);
}

#[test]
fn bad_ranges_change_nothing() {
    let mut world = World::new(false);
    const DISCARD: u32 = VIRTIO_BLK_T_DISCARD;
    const ZEROES: u32 = VIRTIO_BLK_T_WRITE_ZEROES;
    let unsupported = VIRTIO_BLK_S_UNSUPP as u8;
    type Bad<'a> = (u32, &'a [(u64, u32, u32)], u8);
    let bad: &[Bad<'_>] = &[
        (DISCARD, &[(7, 2, 0)], ERROR),
        (DISCARD, &[(0, 1, 0), (8, 1, 0)], ERROR),
        (DISCARD, &[(u64::MAX, 1, 0)], ERROR),
        (DISCARD, &[(u64::MAX / 512, 1, 0)], ERROR),
        (DISCARD, &[(0, u32::MAX, 0)], ERROR),
        (DISCARD, &[(0, 1, 0); 33], ERROR),
        // Flags that mean nothing here, and reserved ones.
        (DISCARD, &[(0, 1, UNMAP)], unsupported),
        (DISCARD, &[(0, 1, 2)], unsupported),
        (ZEROES, &[(0, 1, 1 << 31)], unsupported),
        (ZEROES, &[(0, 1, 0), (1, 1, 0)], ERROR),
        (ZEROES, &[(8, 1, 0)], ERROR),
        (ZEROES, &[(0, (1 << 16) + 1, 0)], ERROR),
    ];
    for (kind, ranges, status) in bad {
        assert_eq!(world.ranges(*kind, ranges), *status, "{kind} {ranges:?}");
    }
    for length in [1, 15, 17, 31] {
        assert_eq!(world.request(DISCARD, 0, (length, READ)), (1, ERROR), "{length}");
        assert_eq!(world.request(ZEROES, 0, (length, READ)), (1, ERROR), "{length}");
    }
    assert_eq!(world.sectors(), [1, 2, 3, 4, 5, 6, 7, 8]);
    let mut read_only = World::new(true);
    let changes = 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
    assert_eq!(read_only.device.features() & changes, 0);
    for kind in [DISCARD, ZEROES] {
        assert_eq!(read_only.ranges(kind, &[(0, 1, 0)]), ERROR);
    }
    assert_eq!(read_only.sectors(), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_disk_whose_host_has_no_holes_takes_no_discards_but_zeros() {
    // A device file: it has a size of zero, and no holes.
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let mut world = World::of(full, false);
    assert_eq!(world.device.features() & 1 << VIRTIO_BLK_F_DISCARD, 0);
    assert_ne!(world.device.features() & 1 << VIRTIO_BLK_F_WRITE_ZEROES, 0);
    assert_eq!(world.ranges(VIRTIO_BLK_T_DISCARD, &[]), VIRTIO_BLK_S_UNSUPP as u8);
}

/// Offsets of `struct virtio_blk_config` in Linux, include/uapi/linux/virtio_blk.h.
#[test]
fn the_configuration_space_tells_the_limits() {
    let config = World::new(false).device.config();
    assert_eq!(config.len(), 60);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!([word(12), word(36), word(40), word(44)], [126, 1 << 22, 32, 8]);
    assert_eq!([word(48), word(52), word(56)], [1 << 16, 1, 1]);
    assert_eq!([word(8), word(16), word(20), word(32)], [0; 4]);
}

#[test]
fn serial_number_and_unknown_requests() {
    let mut world = World::new(true);
    assert_eq!(world.request(VIRTIO_BLK_T_GET_ID, 0, (20, WRITE)), (21, OK));
    assert_eq!(&world.data(7), b"serial\0");
    assert_eq!(world.request(VIRTIO_BLK_T_GET_ID, 0, (3, WRITE)), (4, OK));
    for kind in [2, 14, 99, u32::MAX] {
        assert_eq!(world.request(kind, 0, (512, WRITE)), (1, VIRTIO_BLK_S_UNSUPP as u8));
    }
}

#[test]
fn header_data_and_status_may_be_split_anywhere() {
    let mut world = World::new(true);
    world.header(VIRTIO_BLK_T_IN, 1);
    // Status byte in the last descriptor of the data.
    let chain =
        [(HEADER, 7, READ), (HEADER + 7, 9, READ), (DATA, 100, WRITE), (DATA + 100, 413, WRITE)];
    assert_eq!(world.serve(&chain).unwrap(), 513);
    let data = world.data(513);
    assert!(data[..512].iter().all(|byte| *byte == 2));
    assert_eq!(data[512], OK);
}

#[test]
fn a_request_of_as_many_buffers_as_offered() {
    let mut world = World::new(true);
    world.header(VIRTIO_BLK_T_IN, 0);
    let mut chain = vec![(HEADER, 16, READ)];
    let pieces = u64::from(SEG_MAX);
    for piece in 0..pieces - 1 {
        chain.push((DATA + piece * 8, 8, WRITE));
    }
    let last = 4096 - (pieces - 1) * 8;
    chain.push((DATA + (pieces - 1) * 8, last as u32, WRITE));
    chain.push((STATUS_AT, 1, WRITE));
    assert_eq!(world.serve(&chain).unwrap(), 4097);
    assert_eq!(world.data(4096)[4095], 8);
}

#[test]
fn chains_that_break_the_rules_fail_the_device() {
    let bad: [&[(u64, u32, bool)]; 6] = [
        // No status, no header, a short header.
        &[(HEADER, 16, READ), (DATA, 512, READ)],
        &[(DATA, 512, WRITE), (STATUS_AT, 1, WRITE)],
        &[(HEADER, 15, READ), (STATUS_AT, 1, WRITE)],
        // A readable buffer after a writable one.
        &[(HEADER, 16, READ), (STATUS_AT, 1, WRITE), (DATA, 512, READ)],
        // Outside of memory.
        &[(HEADER, 16, READ), (0x20_0000, 512, WRITE), (STATUS_AT, 1, WRITE)],
        &[(u64::MAX - 3, 16, READ), (STATUS_AT, 1, WRITE)],
    ];
    for chain in bad {
        let mut world = World::new(true);
        world.header(VIRTIO_BLK_T_IN, 0);
        assert!(world.serve(chain).is_err(), "{chain:x?}");
    }
}

#[test]
fn the_capacity_is_part_of_a_saved_state() {
    let mut world = World::new(true);
    let state = world.device.save().unwrap();
    world.device.restore(state).unwrap();
    assert!(world.device.restore(9.into()).is_err());
    assert_eq!(&world.device.config()[..8], SECTORS.to_le_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Random descriptors in a random table: errors, but no panic and no access beyond the disk.
    #[test]
    fn random_chains(
        table in prop::collection::vec((0u64..0x21_0000, 0u32..0x1200, 0u16..8, 0u16..12), 1..10),
        kind in 0u32..14,
        sector in 0u64..10,
    ) {
        let mut world = World::new(false);
        world.header(kind, sector);
        let mock = MockSplitQueue::new(&*world.memory, QUEUE_SIZE);
        for (index, (address, length, flags, next)) in table.iter().enumerate() {
            let address = if index == 0 { HEADER } else { *address & !0xf };
            let flags = if index == 0 { VRING_DESC_F_NEXT as u16 } else { *flags };
            let descriptor = Descriptor::new(address, *length, flags, *next);
            mock.desc_table().store(index as u16, descriptor.into()).unwrap();
        }
        let memory = world.memory.clone();
        memory.write_obj(1u16, mock.avail_addr().0.checked_add(2).map(GuestAddress).unwrap()).unwrap();
        let queue: Queue = mock.create_queue().unwrap();
        let interrupt = Interrupt::new(Arc::default(), world.line.clone());
        let activation = Activation { memory: memory.clone(), features: 0, queues: vec![Virtqueue::new(queue, 0)], interrupt };
        world.device.activate(activation).unwrap();
        let _ = world.device.queue_event(0);
        prop_assert_eq!(world.file.metadata().unwrap().len(), SECTORS * 512 + 100);
    }
}
