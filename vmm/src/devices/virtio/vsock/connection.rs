//! One stream connection between a socket of the guest and a UNIX socket of the host.
//!
//! # The protocol
//!
//! A connection is a pair of ports. Whoever opens it sends REQUEST and gets RESPONSE, or RST when
//! nobody listens. Then both sides send data in RW packets.
//!
//! **Flow control.** Each side has a receive buffer per connection and puts into every packet how large
//! it is (`buf_alloc`) and how many bytes have left it so far (`fwd_cnt`, which wraps). The other side
//! may send `buf_alloc - (sent - fwd_cnt)` bytes more, its *credit*. CREDIT_UPDATE carries these two
//! numbers and nothing else; CREDIT_REQUEST asks for one.
//!
//! Linux (from 6.12.92 on, among others) has a second limit, in *packets*: it resets a connection whose
//! unread packets, however small, would together need more than `buf_alloc` bytes of socket buffer
//! overhead. So unread packets are counted here too; when there are too many, bytes wait in the
//! host's socket, and the next packet is a large one. The arithmetic is in [`super::credit`].
//!
//! **End.** SHUTDOWN says that its sender will send no more, receive no more, or both. One direction may
//! end long before the other. Once both are over the receiver of the SHUTDOWN answers RST, and the
//! pair is free again. If that RST does not come, we send one after a while. RST at any other moment
//! breaks the connection. There is never an RST in answer to an RST: it could hit a new connection
//! that reuses the pair.
//!
//! # The host's side
//!
//! | the host's program        | we see on our end      | we tell the guest                        |
//! |---------------------------|------------------------|------------------------------------------|
//! | `shutdown(SHUT_WR)`       | end of the stream      | SHUTDOWN(send), after all data           |
//! | `close`, `shutdown(both)` | hang-up; then the end  | SHUTDOWN(receive); both, after all data  |
//!
//! | the guest                 | we do on our end                                                  |
//! |---------------------------|-------------------------------------------------------------------|
//! | SHUTDOWN(send)            | `shutdown(SHUT_WR)`, after all data                               |
//! | SHUTDOWN(receive)         | `shutdown(SHUT_RD)`: the host's program gets `EPIPE`              |
//! | SHUTDOWN(both), RST       | close, after all data; the guest need not wait for that           |
//!
//! # Readiness
//!
//! The socket is watched edge-triggered. `readable` remembers that it may have something, until a read
//! says otherwise. While the guest has no credit or no buffers nobody looks at it, so a stalled guest
//! or a dead peer costs nothing.

use std::io;
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use vm_memory::VolatileSlice;

use super::credit::{Credit, Window};
use super::packet::{Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::socket::{Buffer, Socket};
use crate::devices::virtio::DeviceError;

const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// How long the guest may take to answer REQUEST, and a SHUTDOWN of both directions.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// First and longest time after which a guest that gives no credit is asked for it.
const PROBE_TIMES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Most packets and bytes that one turn sends to the guest.
const MAX_TURN: (usize, u32) = (32, 128 * 1024);

/// The guest's receive buffers, in the order of the queue.
pub trait RxBuffers {
    /// Looks at the first `wanted` buffers; returns how many there are.
    fn ready(&mut self, wanted: usize) -> usize;
    /// The memory for payload of a buffer that [`RxBuffers::ready`] counted, never empty.
    fn payload(&self, index: usize) -> &[VolatileSlice<'_>];
    /// Size of that memory in bytes.
    fn capacity(&self, index: usize) -> usize;
    /// Gives the first buffer to the guest, with this header and `header.len` bytes of payload.
    fn deliver(&mut self, header: Header) -> Result<(), DeviceError>;
}

/// How a turn of [`Connection::send`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Something was sent, or there was nothing to send.
    Done,
    /// The guest has no buffer.
    NoBuffer,
}

/// Whether a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// It does.
    Open,
    /// It is over for the guest.
    Ended {
        /// Whether the guest has to be told by RST.
        reset: bool,
    },
}

/// Both ports of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    /// Port of the host.
    pub local: u32,
    /// Port of the guest.
    pub guest: u32,
}

/// A connection from its REQUEST to its end, and on until all data of the guest is with the host.
#[derive(Debug)]
pub struct Connection {
    pair: Pair,
    guest_cid: u64,
    /// The caller's number of a connection that the guest has not answered yet.
    request: Option<u64>,
    socket: Option<Socket>,

    // To the guest.
    readable: bool,
    /// How many buffers a read is likely to fill.
    appetite: usize,
    credit: Credit,

    // From the guest.
    window: Window,
    buffer: Buffer,

    // Who still does what.
    guest_sends: bool,
    guest_receives: bool,
    host_sends: bool,
    host_receives: bool,
    /// Flags of the SHUTDOWN that the guest has got.
    shutdown_told: u32,
    over: bool,

    // What the guest has to be told.
    greeting: Option<Op>,
    credit_update: bool,
    credit_request: bool,

    deadline: Option<Instant>,
    probe: Duration,
}

impl Connection {
    /// A connection that the host opens; `request` is the caller's number.
    #[must_use]
    pub fn request(pair: Pair, guest_cid: u64, request: u64, buf_alloc: u32, now: Instant) -> Self {
        Self {
            request: Some(request),
            greeting: Some(Op::Request),
            deadline: now.checked_add(ANSWER_TIMEOUT),
            ..Self::new(pair, guest_cid, buf_alloc)
        }
    }

    /// A connection that the guest opened with `header`, accepted.
    #[must_use]
    pub fn accept(
        pair: Pair,
        guest_cid: u64,
        header: &Header,
        socket: Socket,
        buf_alloc: u32,
    ) -> Self {
        Self {
            socket: Some(socket),
            greeting: Some(Op::Response),
            credit: Credit::new(header.buf_alloc),
            ..Self::new(pair, guest_cid, buf_alloc)
        }
    }

    fn new(pair: Pair, guest_cid: u64, buf_alloc: u32) -> Self {
        Self {
            pair,
            guest_cid,
            request: None,
            socket: None,
            readable: false,
            appetite: 1,
            credit: Credit::new(0),
            window: Window::new(buf_alloc),
            buffer: Buffer::default(),
            guest_sends: true,
            guest_receives: true,
            host_sends: true,
            host_receives: true,
            shutdown_told: 0,
            over: false,
            greeting: None,
            credit_update: false,
            credit_request: false,
            deadline: None,
            probe: PROBE_TIMES.0,
        }
    }

    /// Its ports.
    pub fn pair(&self) -> Pair {
        self.pair
    }

    /// The caller's number, while the guest has not answered.
    pub fn requested(&self) -> Option<u64> {
        self.request
    }

    /// The device's end, once there is one.
    pub fn socket(&self) -> Option<&Socket> {
        self.socket.as_ref()
    }

    /// Size of the receive buffer in bytes.
    pub fn buf_alloc(&self) -> u32 {
        self.window.size()
    }

    /// Whether the socket's becoming writable matters.
    pub fn wants_writable(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// When [`Connection::timeout`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The guest answered RESPONSE to the REQUEST.
    pub fn established(&mut self, header: &Header, socket: Socket) {
        self.request = None;
        self.deadline = None;
        self.socket = Some(socket);
        self.credit = Credit::new(header.buf_alloc);
    }

    /// A packet of the guest, other than REQUEST and an awaited RESPONSE. `payload` has `len` bytes.
    pub fn packet(
        &mut self,
        header: &Header,
        op: Op,
        payload: &[VolatileSlice<'_>],
        len: usize,
    ) -> Verdict {
        if self.credit.update(header.buf_alloc, header.fwd_cnt) {
            self.probe = PROBE_TIMES.0;
        }
        match op {
            Op::Reset => Verdict::Ended { reset: false },
            Op::Request | Op::Response => Verdict::Ended { reset: true },
            // Nothing can follow a REQUEST but its answer.
            _ if self.request.is_some() => Verdict::Ended { reset: true },
            Op::ReadWrite => self.data(payload, len),
            Op::Shutdown => self.guest_shutdown(header.flags),
            Op::CreditUpdate => Verdict::Open,
            Op::CreditRequest => {
                self.credit_update = true;
                Verdict::Open
            }
        }
    }

    fn data(&mut self, payload: &[VolatileSlice<'_>], len: usize) -> Verdict {
        // Exact: what was received and has not left is in the buffer.
        let size = self.window.size() as usize;
        let free = size.saturating_sub(self.buffer.len());
        if !self.guest_sends || len > free {
            return Verdict::Ended { reset: true };
        }
        let Ok(count) = u32::try_from(len) else {
            return Verdict::Ended { reset: true };
        };
        self.window.receive(count);
        if !self.host_receives {
            self.forwarded(len);
            return Verdict::Open;
        }
        let Some(socket) = &self.socket else {
            return Verdict::Ended { reset: true };
        };
        let mut sent = 0;
        if self.buffer.is_empty() && len > 0 {
            match socket.send(payload.iter().copied()) {
                Ok(count) => sent = count,
                Err(error) if is_transient(&error) => {}
                Err(_) => {
                    self.forwarded(len);
                    self.host_stops_receiving();
                    return Verdict::Open;
                }
            }
        }
        if sent < len {
            self.buffer.push(payload, sent, size);
        }
        self.forwarded(sent);
        Verdict::Open
    }

    /// Bytes have left the receive buffer.
    fn forwarded(&mut self, count: usize) {
        // No more than `buf_alloc`, a u32, is ever in the buffer.
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if self.window.forward(count) && self.guest_sends {
            self.credit_update = true;
        }
    }

    fn guest_shutdown(&mut self, flags: u32) -> Verdict {
        if flags & SHUTDOWN_SEND != 0 && self.guest_sends {
            self.guest_sends = false;
            self.pass_end_on();
        }
        if flags & SHUTDOWN_RECEIVE != 0 && self.guest_receives {
            self.guest_receives = false;
            // Nobody will read the socket to its end any more.
            self.host_sends &= self.host_receives;
            if let Some(socket) = &self.socket {
                socket.shutdown(Shutdown::Read);
            }
        }
        if self.guest_sends || self.guest_receives {
            Verdict::Open
        } else {
            Verdict::Ended { reset: true }
        }
    }

    /// Tells the host's program that the guest sends no more, once it has all data.
    fn pass_end_on(&mut self) {
        if !self.guest_sends
            && self.buffer.is_empty()
            && let Some(socket) = &self.socket
        {
            socket.shutdown(Shutdown::Write);
        }
    }

    /// The host's program will read no more.
    fn host_stops_receiving(&mut self) {
        self.host_receives = false;
        let lost = self.buffer.len();
        self.buffer.clear();
        self.forwarded(lost);
    }

    /// The connection is over for the guest. It is to be kept until [`Connection::is_drained`].
    pub fn end(&mut self) {
        self.over = true;
        self.guest_sends = false;
        self.guest_receives = false;
        self.deadline = None;
        self.credit.close();
        if let Some(socket) = &self.socket {
            socket.shutdown(Shutdown::Read);
        }
    }

    /// Whether the connection is over and no data for the host is left.
    pub fn is_drained(&self) -> bool {
        self.over && (self.buffer.is_empty() || !self.host_receives)
    }

    /// The socket may be read (or has ended).
    pub fn socket_readable(&mut self) {
        self.readable = true;
    }

    /// The socket may be written.
    pub fn socket_writable(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let Some(socket) = &self.socket else { return };
        match self.buffer.flush(socket) {
            Ok(count) => {
                self.forwarded(count);
                self.pass_end_on();
            }
            Err(_) => self.host_stops_receiving(),
        }
    }

    /// The socket hung up: its other end is closed, or shut down in both directions.
    pub fn socket_hung_up(&mut self) {
        // What it sent before is still to be read, up to the end.
        self.readable = true;
        self.host_sends &= self.guest_receives;
        if self.host_receives {
            self.host_stops_receiving();
        }
    }

    /// The deadline has passed.
    pub fn timeout(&mut self, now: Instant) -> Verdict {
        if self.request.is_some() {
            // The guest may not have had a buffer for the REQUEST; then it knows of nothing.
            return Verdict::Ended { reset: self.greeting.is_none() };
        }
        if self.shutdown_told == SHUTDOWN_BOTH {
            return Verdict::Ended { reset: true };
        }
        self.deadline = None;
        if self.is_stalled() {
            self.credit_request = true;
            self.probe = (self.probe * 2).min(PROBE_TIMES.1);
            self.deadline = now.checked_add(self.probe);
        }
        Verdict::Open
    }

    /// Whether there is something to tell the guest, if it has a buffer.
    pub fn has_work(&self) -> bool {
        !self.over
            && (self.control().is_some() || (self.wants_to_read() && self.credit.bytes() > 0))
    }

    fn wants_to_read(&self) -> bool {
        self.readable
            && self.host_sends
            && self.guest_receives
            && self.request.is_none()
            && self.socket.is_some()
    }

    fn is_stalled(&self) -> bool {
        self.wants_to_read() && self.credit.bytes() == 0
    }

    fn shutdown_due(&self) -> u32 {
        let send = if self.host_sends { 0 } else { SHUTDOWN_SEND };
        let receive = if self.host_receives { 0 } else { SHUTDOWN_RECEIVE };
        send | receive
    }

    /// The control packet that is due, most urgent first.
    fn control(&self) -> Option<(Op, u32)> {
        if let Some(op) = self.greeting {
            return Some((op, 0));
        }
        if self.request.is_some() {
            return None;
        }
        let shutdown = self.shutdown_due();
        if shutdown != self.shutdown_told {
            return Some((Op::Shutdown, shutdown));
        }
        if self.credit_request {
            return Some((Op::CreditRequest, 0));
        }
        self.credit_update.then_some((Op::CreditUpdate, 0))
    }

    /// Sends one control packet, or one batch of data.
    pub fn send<R: RxBuffers>(&mut self, rx: &mut R, now: Instant) -> Result<Turn, DeviceError> {
        if let Some((op, flags)) = self.control() {
            if rx.ready(1) == 0 {
                return Ok(Turn::NoBuffer);
            }
            self.greeting = None;
            if op == Op::Shutdown {
                self.shutdown_told = flags;
                if flags == SHUTDOWN_BOTH {
                    self.deadline = now.checked_add(ANSWER_TIMEOUT);
                }
            }
            if op == Op::CreditRequest {
                self.credit_request = false;
            }
            let header = Header { flags, ..self.header(op) };
            rx.deliver(header)?;
            return Ok(Turn::Done);
        }
        if !self.wants_to_read() {
            return Ok(Turn::Done);
        }
        let turn = self.send_data(rx)?;
        if self.is_stalled() && self.deadline.is_none() {
            self.deadline = now.checked_add(self.probe);
        }
        Ok(turn)
    }

    fn send_data<R: RxBuffers>(&mut self, rx: &mut R) -> Result<Turn, DeviceError> {
        let credit = self.credit.bytes().min(MAX_TURN.1);
        let Some(socket) = &self.socket else { return Ok(Turn::Done) };
        if credit == 0 {
            return Ok(Turn::Done);
        }
        let most = self.credit.packets().min(self.appetite);
        let buffers = rx.ready(most).min(most);
        if buffers == 0 {
            return Ok(Turn::NoBuffer);
        }
        let mut room = credit as usize;
        let slices = (0..buffers).flat_map(|index| rx.payload(index)).map_while(|slice| {
            let len = slice.len().min(room);
            room -= len;
            if len == 0 { None } else { slice.subslice(0, len).ok() }
        });
        match socket.receive(slices) {
            Ok(0) => {
                self.host_sends = false;
                self.readable = false;
            }
            Ok(count) => {
                self.deliver_data(rx, count)?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The other end closed with unread data (`ECONNRESET`).
            Err(_) => {
                self.host_sends = false;
                self.readable = false;
                if self.host_receives {
                    self.host_stops_receiving();
                }
            }
        }
        Ok(Turn::Done)
    }

    /// Hands out `count` bytes that lie in the first buffers.
    fn deliver_data<R: RxBuffers>(&mut self, rx: &mut R, count: usize) -> Result<(), DeviceError> {
        let mut left = count;
        let mut packets = 0;
        while left > 0 {
            let part = rx.capacity(0).min(left);
            let len = u32::try_from(part).unwrap_or(u32::MAX);
            self.credit.spend(len);
            let header = Header { len, ..self.header(Op::ReadWrite) };
            rx.deliver(header)?;
            left = left.saturating_sub(part.max(1));
            packets += 1;
        }
        // All buffers were filled: there is probably more. The estimate follows the traffic, so that a
        // few bytes do not make the queue be searched for room for many.
        self.appetite =
            if packets >= self.appetite { packets.saturating_mul(4) } else { packets + 1 }
                .clamp(1, MAX_TURN.0);
        Ok(())
    }

    /// A header of this connection. It carries the newest credit, so no update is due after it.
    fn header(&mut self, op: Op) -> Header {
        let (buf_alloc, fwd_cnt) = self.window.tell();
        self.credit_update = false;
        Header {
            src_cid: super::packet::HOST_CID,
            dst_cid: self.guest_cid,
            src_port: self.pair.local,
            dst_port: self.pair.guest,
            kind: super::packet::TYPE_STREAM,
            op: op.number(),
            buf_alloc,
            fwd_cnt,
            ..Header::default()
        }
    }

    #[cfg(test)]
    pub(super) fn shift_counters(&mut self, start: u32) {
        self.credit.shift(start);
        self.window.shift(start);
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
