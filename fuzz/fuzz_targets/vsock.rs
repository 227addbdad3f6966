//! Vsock: packets of the guest, and what the host does with its ends of the connections meanwhile.
#![no_main]

use std::os::fd::OwnedFd;

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::{Data, Op, Setup};
use casulo_vmm::devices::virtio::vsock::{VsockDevice, VsockEvent, VsockEvents, VsockHandle};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

/// Queue with room for packets to the guest.
const RX: usize = 0;
/// Queue with packets of the guest.
const TX: usize = 1;
const HEADER: usize = 44;
const GUEST: u64 = 3;
const HOST: u64 = 2;
/// Ports of the host that the guest may dial from the start.
const LISTEN: [u32; 2] = [1, 2];
/// A port that no program can register.
const DEAF: u32 = 70_000;
/// Most ends of connections that the host keeps.
const STREAMS: usize = 300;

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    /// Buffers in the receive queue at first.
    room: u8,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// A packet of the guest.
    Packet(Packet),
    /// Buffers for packets to the guest, each in so many pieces.
    Room { count: u8, length: u16, pieces: u8, indirect: bool },
    /// Something that the host does.
    Host(HostOp),
    /// Anything else.
    Other(Op),
}

#[derive(Arbitrary, Debug)]
struct Packet {
    ports: Ports,
    operation: Operation,
    flags: u8,
    credit: Credit,
    data: Data,
    /// The length in the header, if it is not that of the data.
    length: Option<u32>,
    /// Anything wrong with addresses or type.
    wrong: Wrong,
    /// Where the packet is cut in two, and whether the chain is indirect.
    cut: u8,
}

#[derive(Arbitrary, Debug)]
enum Ports {
    /// Those of a packet that the guest got, answered.
    Seen(u8),
    /// Port of the guest, port of the host.
    New(u8, u8),
    /// The same, any.
    Any(u32, u32),
}

#[derive(Arbitrary, Debug)]
enum Operation {
    Request,
    Response,
    Reset,
    Shutdown,
    ReadWrite,
    CreditUpdate,
    CreditRequest,
    Any(u16),
}

#[derive(Arbitrary, Debug)]
enum Credit {
    /// A buffer of 256 KiB, and all that came is taken out of it.
    Good,
    /// A buffer of so many bytes, and all that came is taken out of it.
    Size(u16),
    /// Anything: size, bytes taken.
    Any(u32, u32),
}

#[derive(Arbitrary, Debug)]
enum Wrong {
    Nothing,
    Kind(u16),
    SourceCid(u64),
    TargetCid(u64),
}

#[derive(Arbitrary, Debug)]
enum HostOp {
    Connect(u8),
    Listen(u8),
    /// Takes what the device tells.
    Take,
    Write {
        stream: u8,
        data: Data,
    },
    Read {
        stream: u8,
        most: u16,
    },
    Shutdown {
        stream: u8,
        how: u8,
    },
    Close {
        stream: u8,
    },
}

/// Both sides of the device.
struct World {
    machine: Machine,
    handle: VsockHandle,
    events: VsockEvents,
    streams: Vec<OwnedFd>,
    /// Packets that the guest got: its port, the host's port.
    seen: Vec<(u32, u32)>,
    /// Bytes of data that the guest got.
    taken: u32,
    connects: u64,
}

impl World {
    /// Offers buffers.
    fn room(&mut self, count: u8, length: u32, pieces: u8, indirect: bool) {
        let pieces = u32::from(pieces % 4) + 1;
        for _ in 0..count {
            let address = self.machine.room(length);
            let piece = length / pieces;
            let buffers: Vec<_> = (0..pieces)
                .map(|n| {
                    let last = if n + 1 == pieces { length % pieces } else { 0 };
                    (address + u64::from(n * piece), piece + last, true)
                })
                .collect();
            self.machine.offer(RX, &buffers, indirect);
        }
        self.machine.kick(RX);
    }

    /// Looks at the packets that came.
    fn take_packets(&mut self) -> Vec<[u8; HEADER]> {
        let mut headers = Vec::new();
        for used in self.machine.used(RX) {
            let bytes = self.machine.chain_bytes(RX, used.head, HEADER);
            let Some(header) = bytes.first_chunk::<HEADER>() else { continue };
            self.seen.push((word(header, 20), word(header, 16)));
            self.taken = self.taken.wrapping_add(used.length.saturating_sub(HEADER as u32));
            headers.push(*header);
        }
        let extra = self.seen.len().saturating_sub(64);
        self.seen.drain(..extra);
        headers
    }

    fn packet(&mut self, packet: &Packet) {
        self.take_packets();
        let (guest, host) = match packet.ports {
            Ports::Seen(n) => {
                let newest = self.seen.len().checked_sub(usize::from(n) + 1);
                newest.and_then(|n| self.seen.get(n)).copied().unwrap_or((9, 1))
            }
            Ports::New(guest, host) => (u32::from(guest), u32::from(host)),
            Ports::Any(guest, host) => (guest, host),
        };
        let operation = match packet.operation {
            Operation::Request => 1,
            Operation::Response => 2,
            Operation::Reset => 3,
            Operation::Shutdown => 4,
            Operation::ReadWrite => 5,
            Operation::CreditUpdate => 6,
            Operation::CreditRequest => 7,
            Operation::Any(number) => number,
        };
        let data = packet.data.bytes();
        let (size, taken) = match packet.credit {
            Credit::Good => (256 << 10, self.taken),
            Credit::Size(size) => (u32::from(size), self.taken),
            Credit::Any(size, taken) => (size, taken),
        };
        let length = packet.length.unwrap_or(data.len() as u32);
        let mut bytes =
            header([guest, host], operation, length, u32::from(packet.flags), size, taken);
        match packet.wrong {
            Wrong::Nothing => {}
            Wrong::Kind(kind) => bytes[28..30].copy_from_slice(&kind.to_le_bytes()),
            Wrong::SourceCid(cid) => bytes[..8].copy_from_slice(&cid.to_le_bytes()),
            Wrong::TargetCid(cid) => bytes[8..16].copy_from_slice(&cid.to_le_bytes()),
        }
        bytes.extend(data);
        let (first, second) = bytes.split_at(usize::from(packet.cut / 2).min(bytes.len()));
        self.machine.request(TX, &[first, second], &[], packet.cut % 2 == 1);
    }

    fn stream(&self, number: u8) -> Option<&OwnedFd> {
        self.streams.get(usize::from(number))
    }

    fn host(&mut self, op: &HostOp) {
        match op {
            HostOp::Connect(port) => {
                self.connects += 1;
                self.handle.connect(self.connects, u32::from(*port)).expect("a device");
            }
            HostOp::Listen(port) => self.handle.listen(u32::from(*port)).expect("a device"),
            HostOp::Take => {
                while let Some(event) = self.events.next() {
                    match event {
                        VsockEvent::Connected { id, stream } => {
                            assert!((1..=self.connects).contains(&id));
                            self.keep(stream);
                        }
                        VsockEvent::Refused { id, .. } => {
                            assert!((1..=self.connects).contains(&id));
                        }
                        VsockEvent::Accepted { port, stream } => {
                            assert!(port < 256, "port {port} was never registered");
                            self.keep(stream);
                        }
                    }
                }
            }
            HostOp::Write { stream, data } => {
                if let Some(stream) = self.stream(*stream) {
                    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                    let _ = send(stream, &data.bytes(), flags);
                }
            }
            HostOp::Read { stream, most } => {
                if let Some(stream) = self.stream(*stream) {
                    let mut buffer = vec![0; usize::from(*most)];
                    let _ = recv(stream, &mut *buffer, RecvFlags::DONTWAIT);
                }
            }
            HostOp::Shutdown { stream, how } => {
                let how = [Shutdown::Read, Shutdown::Write, Shutdown::Both][usize::from(how % 3)];
                if let Some(stream) = self.stream(*stream) {
                    let _ = shutdown(stream, how);
                }
            }
            HostOp::Close { stream } => {
                if usize::from(*stream) < self.streams.len() {
                    self.streams.swap_remove(usize::from(*stream));
                }
            }
        }
        self.machine.settle();
    }

    fn keep(&mut self, stream: OwnedFd) {
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        }
    }
}

fn header(
    [guest, host]: [u32; 2],
    operation: u16,
    length: u32,
    flags: u32,
    size: u32,
    taken: u32,
) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER);
    bytes.extend(GUEST.to_le_bytes());
    bytes.extend(HOST.to_le_bytes());
    for word in [guest, host, length] {
        bytes.extend(word.to_le_bytes());
    }
    // Stream.
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend(operation.to_le_bytes());
    for word in [flags, size, taken] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

fn word(header: &[u8; HEADER], at: usize) -> u32 {
    header[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    let limits = Limits::new();
    let (device, handle, events) = VsockDevice::new(GUEST, &LISTEN).expect("a device");
    let machine = Machine::new(Box::new(device));
    let streams = Vec::with_capacity(STREAMS);
    let (seen, taken, connects) = (Vec::new(), 0, 0);
    let mut world = World { machine, handle, events, streams, seen, taken, connects };
    world.machine.bring_up(&program.setup);
    world.room(program.room % 64, 4096 + HEADER as u32, 0, false);
    for step in &program.steps {
        match step {
            Step::Packet(packet) => {
                if world.machine.recover(&program.setup) {
                    world.room(program.room % 64, 4096 + HEADER as u32, 0, false);
                }
                world.packet(packet);
            }
            Step::Room { count, length, pieces, indirect } => {
                world.room(count % 64, u32::from(*length), *pieces, *indirect);
            }
            Step::Host(op) => world.host(op),
            Step::Other(op) => world.machine.run(op),
        }
    }

    // Whatever happened, a driver can reset the device and use it: a port that nobody listens to says so.
    world.machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    world.room(250, 512, 1, true);
    world.take_packets();
    let dial = header([5, DEAF], 1, 0, 0, 4096, 0);
    assert!(world.machine.request(TX, &[&dial], &[], true).is_some(), "a packet is taken");
    let reset = world.take_packets().into_iter().any(|header| {
        let operation = u16::from_le_bytes([header[30], header[31]]);
        operation == 3 && word(&header, 16) == DEAF && word(&header, 20) == 5
    });
    assert!(reset, "a dial to nobody is refused");
    drop(world);
    limits.check();
});
