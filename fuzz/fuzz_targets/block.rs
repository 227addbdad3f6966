//! Disks, read-only and writable.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::{Length, Op, Setup};
use casulo_vmm::devices::virtio::block::BlockDevice;
use rustix::fs::{MemfdFlags, memfd_create};

/// Sectors of the disk.
const SECTORS: u64 = 16;
/// Size of its file, which does not end with a sector.
const SIZE: usize = 16 * 512 + 100;

#[derive(Arbitrary, Debug)]
struct Program {
    read_only: bool,
    setup: Setup,
    ops: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// A request with a whole header.
    Request {
        kind: Kind,
        sector: Sector,
        /// Where the header is cut in two, if it is.
        cut: u8,
        /// What follows the header.
        data: Vec<u8>,
        /// Room for the device to write, and then for the status byte if that is apart.
        room: Vec<Length>,
        indirect: bool,
    },
    /// Whole sectors.
    Sectors { kind: Kind, sector: Sector, count: u8, indirect: bool },
    /// Anything else.
    Other(Op),
}

#[derive(Arbitrary, Debug)]
enum Kind {
    In,
    Out,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Any(u32),
}

impl Kind {
    fn number(&self) -> u32 {
        match self {
            Self::In => 0,
            Self::Out => 1,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::Discard => 11,
            Self::WriteZeroes => 13,
            Self::Any(kind) => *kind,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Sector {
    Near(u8),
    Any(u64),
}

fn header(kind: &Kind, sector: &Sector) -> Vec<u8> {
    let sector = match sector {
        Sector::Near(sector) => u64::from(*sector),
        Sector::Any(sector) => *sector,
    };
    let mut bytes = kind.number().to_le_bytes().to_vec();
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&sector.to_le_bytes());
    bytes
}

fn content() -> [u8; SIZE] {
    std::array::from_fn(|at| (at / 512 + at % 251) as u8)
}

fn disk() -> &'static File {
    static DISK: OnceLock<File> = OnceLock::new();
    DISK.get_or_init(|| memfd_create("disk", MemfdFlags::CLOEXEC).expect("a file").into())
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    let disk = disk();
    disk.set_len(SIZE as u64).expect("its size");
    disk.write_all_at(&content(), 0).expect("its content");
    let limits = Limits::new();
    let file = disk.try_clone().expect("a descriptor");
    let device = BlockDevice::new(file, program.read_only, "fuzz").expect("a device");
    let mut machine = Machine::new(Box::new(device));
    machine.bring_up(&program.setup);
    for step in &program.ops {
        if !matches!(step, Step::Other(_)) {
            machine.recover(&program.setup);
        }
        match step {
            Step::Request { kind, sector, cut, data, room, indirect } => {
                let header = header(kind, sector);
                let (start, end) = header.split_at(usize::from(*cut).min(header.len()));
                let rooms: Vec<u32> = room.iter().take(8).map(Length::bytes).collect();
                machine.request(0, &[start, end, data], &rooms, *indirect);
            }
            Step::Sectors { kind, sector, count, indirect } => {
                let header = header(kind, sector);
                let length = u32::from(*count % 24) * 512;
                let data = vec![0x5a; length as usize];
                if matches!(kind, Kind::In) {
                    machine.request(0, &[&header], &[length, 1], *indirect);
                } else {
                    machine.request(0, &[&header, &data], &[1], *indirect);
                }
            }
            Step::Other(op) => machine.run(op),
        }
    }

    let mut found = [0; SIZE];
    disk.read_exact_at(&mut found, 0).expect("a file that is not shorter");
    assert_eq!(disk.metadata().expect("its size").len(), SIZE as u64);
    assert_eq!(found[SECTORS as usize * 512..], content()[SECTORS as usize * 512..]);
    assert!(!program.read_only || found == content(), "a read-only disk was changed");

    // Whatever happened, a driver can reset the device and use it.
    machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    let last = header(&Kind::In, &Sector::Any(SECTORS - 1));
    let (written, answer) = machine.request(0, &[&last], &[500, 13], true).expect("an answer");
    assert_eq!((written, answer[512]), (513, 0));
    assert_eq!(answer[..512], found[SIZE - 612..SIZE - 100]);
    drop(machine);
    limits.check();
});
