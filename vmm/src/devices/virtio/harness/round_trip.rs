//! Pause, save and restore of every device, behind its transport and on its thread as in a VM.
//!
//! What a snapshot needs: a driver that stood still finds its rings served on by the new device, each request
//! once, also those that it made while nobody served them.

use super::*;

use std::cell::Cell;
use std::os::unix::fs::FileExt;

use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

use crate::devices::virtio::DeviceError;
use crate::devices::virtio::balloon::BalloonDevice;
use crate::devices::virtio::block::BlockDevice;
use crate::devices::virtio::fs::FsDevice;
use crate::devices::virtio::mmio::TransportState;
use crate::devices::virtio::rng::RngDevice;
use crate::devices::virtio::vsock::VsockDevice;

/// A kind of device, and what a driver does with it.
struct Case<'a> {
    make: &'a dyn Fn() -> Box<dyn VirtioDevice>,
    /// Called when new rings are in use.
    begin: &'a dyn Fn(&mut Board),
    /// Makes request number n available, without a kick.
    offer: &'a dyn Fn(&mut Board, u64),
    /// How many used entries of each queue a request gives.
    uses: &'a [usize],
    /// Looks at the answer to request number n, which was the last one.
    check: &'a dyn Fn(&Board, u64),
    /// Called when a device was restored, before it has to serve a request.
    restored: &'a dyn Fn(&mut Board),
}

impl Case<'_> {
    fn kick(&self, board: &Board) {
        for (queue, count) in self.uses.iter().enumerate() {
            if *count > 0 {
                board.kick(queue);
            }
        }
    }

    /// Waits for the answer to one request.
    #[track_caller]
    fn finish(&self, board: &mut Board, number: u64) {
        for (queue, count) in self.uses.iter().enumerate() {
            let heads: Vec<u16> =
                board.wait_used(queue, *count).iter().map(|(head, _)| *head).collect();
            assert_eq!(heads.len(), *count, "queue {queue}");
        }
        (self.check)(board, number);
    }

    #[track_caller]
    fn serve(&self, board: &mut Board, numbers: &Cell<u64>, count: u64) {
        for _ in 0..count {
            let number = numbers.replace(numbers.get() + 1);
            (self.offer)(board, number);
            self.kick(board);
            self.finish(board, number);
        }
    }

    fn nothing_used(&self, board: &mut Board) {
        for (queue, _) in self.uses.iter().enumerate() {
            assert_eq!(board.rings[queue].used(), [], "queue {queue}");
        }
    }

    /// A new device in the place of the old one: same guest memory, same rings.
    fn replace(&self, board: Board, state: &str) -> Board {
        let rings = board.rings;
        drop(board.transport);
        let mut new = Board::start((self.make)(), board.memory);
        new.rings = rings;
        let state: TransportState = serde_json::from_str(state).unwrap();
        new.transport.restore(state).unwrap();
        new
    }

    fn start(&self, features: u64) -> Board {
        let mut board = Board::start((self.make)(), memory());
        let own = board.offered() & !TRANSPORT_FEATURES;
        board.bring_up_with(features | own);
        (self.begin)(&mut board);
        board
    }

    fn run(&self) {
        let plain = 1 << 32;
        for features in [
            TRANSPORT_FEATURES,
            plain,
            plain | 1 << VIRTIO_RING_F_EVENT_IDX,
            plain | 1 << VIRTIO_RING_F_INDIRECT_DESC,
        ] {
            self.active(features);
        }
        self.setting_up();
        self.inactive();
        self.broken();
    }

    fn active(&self, features: u64) {
        let numbers = Cell::new(0);
        let mut board = self.start(features);
        self.serve(&mut board, &numbers, 5);

        // A plain pause: a kick waits until the device goes on.
        board.transport.pause().unwrap();
        let number = numbers.replace(numbers.get() + 1);
        (self.offer)(&mut board, number);
        self.kick(&board);
        // The worker has answered a question after the kick, and yet not served it.
        board.transport.save().unwrap();
        self.nothing_used(&mut board);
        board.transport.resume().unwrap();
        self.finish(&mut board, number);
        // More than the rings are long.
        self.serve(&mut board, &numbers, 150);

        // Three generations, each with a request in its rings that the one before did not serve.
        for _ in 0..3 {
            board.transport.pause().unwrap();
            let number = numbers.replace(numbers.get() + 1);
            (self.offer)(&mut board, number);
            self.kick(&board);
            let state = board.transport.save().unwrap();
            let again = board.transport.save().unwrap();
            assert_eq!(state, again);
            self.nothing_used(&mut board);
            let registers = registers(&board);
            board = self.replace(board, &serde_json::to_string(&state).unwrap());
            assert_eq!(board_registers(&board, &state), registers);
            (self.restored)(&mut board);
            self.finish(&mut board, number);
            assert!(board.line.read().is_ok());
            self.serve(&mut board, &numbers, 20);
        }
        // The restored device takes a reset and a new driver.
        board.reset();
        let own = board.offered() & !TRANSPORT_FEATURES;
        board.bring_up_with(TRANSPORT_FEATURES | own);
        (self.begin)(&mut board);
        self.serve(&mut board, &numbers, 3);
    }

    /// A driver that was saved between two writes of its setup does not notice.
    fn setting_up(&self) {
        let numbers = Cell::new(0);
        let mut board = self.start(TRANSPORT_FEATURES);
        let own = board.offered() & !TRANSPORT_FEATURES;
        let steps = board.steps(TRANSPORT_FEATURES | own);
        for count in 0..steps.len() {
            board.reset();
            board.new_rings();
            board.write(register::QUEUE_SEL, 0);
            let (before, after) = steps.split_at(count);
            for (register, value) in before {
                board.write(*register, *value);
            }
            board.transport.pause().unwrap();
            let state = serde_json::to_string(&board.transport.save().unwrap()).unwrap();
            board = self.replace(board, &state);
            for (register, value) in after {
                board.write(*register, *value);
            }
            assert_eq!(board.status(), 15, "after {count} steps");
            (self.begin)(&mut board);
            self.serve(&mut board, &numbers, 1);
        }
    }

    fn inactive(&self) {
        let board = Board::start((self.make)(), memory());
        board.transport.pause().unwrap();
        let state = board.transport.save().unwrap();
        assert!(state.queues.iter().all(|queue| queue.position.is_none()));
        let mut board = self.replace(board, &serde_json::to_string(&state).unwrap());
        let own = board.offered() & !TRANSPORT_FEATURES;
        board.bring_up_with(TRANSPORT_FEATURES | own);
        (self.begin)(&mut board);
        self.serve(&mut board, &Cell::new(0), 1);
    }

    /// A broken device stays broken, and its new driver can reset it.
    fn broken(&self) {
        let mut board = self.start(TRANSPORT_FEATURES);
        let queue = self.uses.iter().rposition(|count| *count > 0).unwrap();
        board.rings[queue].offer(u16::MAX);
        while board.line.read().is_ok() {}
        board.kick(queue);
        board.wait_broken();
        board.transport.pause().unwrap();
        let state = serde_json::to_string(&board.transport.save().unwrap()).unwrap();
        let mut board = self.replace(board, &state);
        board.wait_broken();
        board.reset();
        let own = board.offered() & !TRANSPORT_FEATURES;
        board.bring_up_with(TRANSPORT_FEATURES | own);
        (self.begin)(&mut board);
        self.serve(&mut board, &Cell::new(0), 3);
    }
}

/// All registers that a driver can read, as it left them.
fn registers(board: &Board) -> Vec<u32> {
    (0..0x200).step_by(4).map(|offset| board.read(offset)).collect()
}

fn board_registers(board: &Board, state: &TransportState) -> Vec<u32> {
    assert_eq!(board.status(), state.status);
    registers(board)
}

const ANSWER: u64 = DATA + 0x1000;

fn nothing(_: &mut Board) {}

#[test]
fn entropy() {
    let offer = |board: &mut Board, number| {
        board.memory.write_slice(&[0; 64], GuestAddress(ANSWER)).unwrap();
        board.rings[0].chain(&[(ANSWER, 1 + number as u32 % 64, true)]);
    };
    let check = |board: &Board, number| {
        let mut bytes = [0; 64];
        board.memory.read_slice(&mut bytes, GuestAddress(ANSWER)).unwrap();
        assert!(number % 64 < 16 || bytes.iter().any(|byte| *byte != 0));
        assert!(bytes[1 + number as usize % 64..].iter().all(|byte| *byte == 0));
    };
    let make = || Box::new(RngDevice::new()) as Box<dyn VirtioDevice>;
    let (begin, restored) = (&nothing, &nothing);
    Case { make: &make, begin, offer: &offer, uses: &[1], check: &check, restored }.run();
}

#[test]
fn disk() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 * 512).unwrap();
    let make = || {
        let disk = BlockDevice::new(file.try_clone().unwrap(), false, "saved").unwrap();
        Box::new(disk) as Box<dyn VirtioDevice>
    };
    // Even ones write a sector, odd ones read it back.
    let offer = |board: &mut Board, number: u64| {
        let kind = u32::from(number.is_multiple_of(2));
        board.memory.write_obj([kind, 0], GuestAddress(DATA)).unwrap();
        board.memory.write_obj(number / 2 % 64, GuestAddress(DATA + 8)).unwrap();
        board
            .memory
            .write_slice(&[kind as u8 * (number / 2) as u8; 512], GuestAddress(ANSWER))
            .unwrap();
        board.memory.write_obj(0xffu8, GuestAddress(DATA + 16)).unwrap();
        board.rings[0].chain(&[(DATA, 16, false), (ANSWER, 512, kind == 0), (DATA + 16, 1, true)]);
    };
    let check = |board: &Board, number: u64| {
        assert_eq!(board.memory.read_obj::<u8>(GuestAddress(DATA + 16)).unwrap(), 0);
        let mut found = [0; 512];
        if number.is_multiple_of(2) {
            file.read_exact_at(&mut found, number / 2 % 64 * 512).unwrap();
        } else {
            board.memory.read_slice(&mut found, GuestAddress(ANSWER)).unwrap();
        }
        assert_eq!(found, [(number / 2) as u8; 512], "{number}");
    };
    let (begin, restored) = (&nothing, &nothing);
    Case { make: &make, begin, offer: &offer, uses: &[1], check: &check, restored }.run();
}

#[test]
fn balloon() {
    let page = DATA + 0x2_0000;
    let offer = |board: &mut Board, _| {
        board.memory.write_slice(&[7; 0x1000], GuestAddress(page)).unwrap();
        board.rings[2].chain(&[(page, 0x1000, true)]);
    };
    let check = |board: &Board, _| {
        let mut found = [1; 0x1000];
        board.memory.read_slice(&mut found, GuestAddress(page)).unwrap();
        assert_eq!(found, [0; 0x1000]);
    };
    let make = || Box::new(BalloonDevice::new()) as Box<dyn VirtioDevice>;
    let (begin, restored) = (&nothing, &nothing);
    Case { make: &make, begin, offer: &offer, uses: &[0, 0, 1], check: &check, restored }.run();
}

/// A guest socket dials a port on which nobody listens: one packet out, one in. The restored device tells
/// its driver once that connections are gone.
#[test]
fn sockets() {
    const EVENTS: u64 = DATA + 0x4000;
    let make = || {
        let (device, handle, events) = VsockDevice::new(3, &[]).unwrap();
        // The parent's ends, which live as long as the VM.
        std::mem::forget((handle, events));
        Box::new(device) as Box<dyn VirtioDevice>
    };
    let begin = |board: &mut Board| {
        for index in 0..8 {
            board.rings[2].chain(&[(EVENTS + index * 8, 4, true)]);
            board.memory.write_obj(u32::MAX, GuestAddress(EVENTS + index * 8)).unwrap();
        }
        board.kick(2);
    };
    let offer = |board: &mut Board, number: u64| {
        let mut header = [0; 44];
        header[..8].copy_from_slice(&3u64.to_le_bytes());
        header[8..16].copy_from_slice(&2u64.to_le_bytes());
        header[16..20].copy_from_slice(&(1000 + number as u32).to_le_bytes());
        header[20..24].copy_from_slice(&99u32.to_le_bytes());
        header[28..32].copy_from_slice(&[1, 0, 1, 0]);
        header[36..40].copy_from_slice(&0x4_0000u32.to_le_bytes());
        board.memory.write_slice(&header, GuestAddress(DATA)).unwrap();
        board.memory.write_slice(&[0; 44], GuestAddress(ANSWER)).unwrap();
        board.rings[0].chain(&[(ANSWER, 4096, true)]);
        board.rings[1].chain(&[(DATA, 44, false)]);
    };
    let check = |board: &Board, number: u64| {
        let mut header = [0; 44];
        board.memory.read_slice(&mut header, GuestAddress(ANSWER)).unwrap();
        let [from, to] =
            [16, 20].map(|at| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()));
        // RST
        assert_eq!((from, u64::from(to), header[30]), (99, 1000 + number, 3));
    };
    let restored = |board: &mut Board| {
        let [(head, length)] = board.wait_used(2, 1)[..] else { panic!("one event") };
        let at = GuestAddress(EVENTS + u64::from(head) * 8);
        assert_eq!((length, board.memory.read_obj::<u32>(at).unwrap()), (4, 0), "TRANSPORT_RESET");
        // The driver has handled it.
        board.rings[2].offer(head);
        board.kick(2);
    };
    Case {
        make: &make,
        begin: &begin,
        offer: &offer,
        uses: &[1, 1],
        check: &check,
        restored: &restored,
    }
    .run();
}

/// Mounts and unmounts: the host's files that a mount holds cannot be saved, and a snapshot is made before
/// the guest mounts.
#[test]
fn shares() {
    let make = || {
        let proc_root = std::fs::File::open("/proc").unwrap().into();
        Box::new(FsDevice::new("casulo", Vec::new(), proc_root).unwrap()) as Box<dyn VirtioDevice>
    };
    let request = |board: &mut Board, at: u64, opcode: u32, unique: u64, body: &[u8]| {
        let mut header = [0; 40];
        header[..4].copy_from_slice(&(40 + body.len() as u32).to_le_bytes());
        header[4..8].copy_from_slice(&opcode.to_le_bytes());
        header[8..16].copy_from_slice(&unique.to_le_bytes());
        board.memory.write_slice(&[&header[..], body].concat(), GuestAddress(DATA + at)).unwrap();
        board.memory.write_slice(&[0xff; 16], GuestAddress(ANSWER + at)).unwrap();
        let length = 40 + body.len() as u32;
        board.rings[1].chain(&[(DATA + at, length, false), (ANSWER + at, 128, true)]);
    };
    let mount = |board: &mut Board, number| {
        let version = [7u32, 38, 0, 0].map(u32::to_le_bytes).concat();
        request(board, 0, 26, number, &version);
    };
    let offer = |board: &mut Board, number| {
        mount(board, number);
        request(board, 0x200, 38, number, &[]);
    };
    let check = |board: &Board, number: u64| {
        for at in [0, 0x200] {
            let [_, error]: [u32; 2] = board.memory.read_obj(GuestAddress(ANSWER + at)).unwrap();
            let unique: u64 = board.memory.read_obj(GuestAddress(ANSWER + at + 8)).unwrap();
            assert_eq!((error, unique), (0, number));
        }
    };
    let (begin, restored) = (&nothing, &nothing);
    Case { make: &make, begin, offer: &offer, uses: &[0, 2], check: &check, restored }.run();

    // A mounted one says why it cannot be saved, and goes on.
    let mut board = Board::start(make(), memory());
    board.bring_up();
    mount(&mut board, 1);
    board.kick(1);
    board.wait_used(1, 1);
    board.transport.pause().unwrap();
    assert!(matches!(board.transport.save(), Err(DeviceError::State(_))));
    board.transport.resume().unwrap();
    request(&mut board, 0x200, 38, 2, &[]);
    board.kick(1);
    board.wait_used(1, 1);
}

/// A state that does not fit is refused with a reason, and nothing of it is believed.
#[test]
fn states_that_do_not_fit_are_refused() {
    let make = |sectors: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(sectors * 512).unwrap();
        Box::new(BlockDevice::new(file, false, "saved").unwrap())
    };
    let mut board = Board::start(make(8), memory());
    board.bring_up();
    board.transport.pause().unwrap();
    let good = board.transport.save().unwrap();
    let refused = |state: TransportState, what: &str| {
        let new = Board::start(make(8), board.memory.clone());
        let error = new.transport.restore(state).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    type Change = fn(&mut TransportState);
    let changes: &[(&str, Change)] = &[
        ("has type 4", |state| state.device_type = 4),
        ("another configuration", |state| state.config[0] += 1),
        ("had 2 queues", |state| state.queues.push(state.queues[0])),
        ("had 0 queues", |state| state.queues.clear()),
        ("not offered", |state| state.driver_features |= 1 << 60),
        ("not offered", |state| state.driver_features &= !(1 << 32)),
        ("no power of two", |state| state.queues[0].size = 3),
        ("not ready", |state| state.queues[0].ready = false),
        ("do not lie in guest memory", |state| state.queues[0].used = 1 << 40),
        ("not aligned", |state| state.queues[0].desc = 8),
        ("fit together", |state| state.queues[0].position = None),
        ("fit together", |state| state.status = 11),
        ("entries taken", |state| {
            state.queues[0].position =
                Some(crate::devices::virtio::queue::Position { next_avail: 5000, next_used: 1 });
        }),
        ("sectors", |state| state.device = 9.into()),
        ("saved", |state| state.device = serde_json::json!({"x": []})),
    ];
    for (what, change) in changes {
        let mut state = good.clone();
        change(&mut state);
        refused(state, what);
    }
    // One that is in use already.
    let new = Board::start(make(8), board.memory.clone());
    new.transport.restore(good.clone()).unwrap();
    assert!(new.transport.restore(good).is_err());
}
