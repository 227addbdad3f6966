//! All connections of one guest: who is connected, whose turn it is, and who may not be.
//!
//! Every packet of the guest goes through [`Muxer::packet`], which finds its connection or refuses it.
//! Packets to the guest are not queued: a connection that has something to say stands in `ready`, and
//! [`Muxer::send`] lets each of them write straight into the guest's buffers, one turn each. The one
//! exception are RSTs, whose connections are gone or never were; they wait in `resets`, which is
//! bounded. If a guest provokes more RSTs than it makes room for, it does not get them.
//!
//! A connection is known by a number that is never used again, so that an event of the epoll set cannot
//! reach a later connection by mistake. `pairs` leads from ports to numbers; a connection that is over for
//! the guest, but still has data for the host, is only in `connections`.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use vm_memory::VolatileSlice;

use super::connection::{Connection, Pair, RxBuffers, Turn, Verdict};
use super::handle::{Command, Commands, EventSender, VsockEvent};
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};
use super::socket::Socket;
use crate::devices::virtio::DeviceError;

/// Most connections at a time, those included that the guest has not answered yet or that only
/// have data for the host left.
pub const MAX_CONNECTIONS: usize = 1023;

/// Most RSTs that wait for a buffer of the guest.
const MAX_RESETS: usize = 1024;

/// Receive buffers: the first connections get a large one, which keeps a fast writer going; more than
/// that share a guest too small to fill them all. Together at most 76 MiB.
const LARGE_BUFFER: u32 = 256 * 1024;
const SMALL_BUFFER: u32 = 64 * 1024;
const MAX_LARGE: usize = 64;

/// Ports of the host for connections that the host opens. No well-known port is here.
const FIRST_PORT: u32 = 1 << 30;
const LAST_PORT: u32 = (1 << 31) - 1;

/// Data of the epoll set's entries; connections count from [`FIRST_ID`] on.
const TOKEN_COMMANDS: u64 = 0;
const TOKEN_TIMER: u64 = 1;
const FIRST_ID: u64 = 2;

/// Most events that one call takes from the epoll set.
const MAX_EVENTS: usize = 64;

/// All connections of one guest.
#[derive(Debug)]
pub struct Muxer {
    guest_cid: u64,
    connections: HashMap<u64, Entry>,
    pairs: HashMap<Pair, u64>,
    listening: HashSet<u32>,
    /// Connections that have something to tell the guest; each stands here once.
    ready: VecDeque<u64>,
    resets: VecDeque<Header>,
    /// Deadlines of connections.
    deadlines: BTreeSet<(Instant, u64)>,
    /// What `timer` is set to.
    alarm: Option<Instant>,
    large: usize,
    next_id: u64,
    next_port: u32,
    epoll: OwnedFd,
    timer: OwnedFd,
    commands: Commands,
    events: EventSender,
}

/// A connection and where it is known.
#[derive(Debug)]
struct Entry {
    connection: Connection,
    queued: bool,
    watches_writable: bool,
    deadline: Option<Instant>,
}

impl Muxer {
    /// No connections.
    pub(super) fn new(
        guest_cid: u64,
        listen: &[u32],
        commands: Commands,
        events: EventSender,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        epoll::add(&epoll, &commands, EventData::new_u64(TOKEN_COMMANDS), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TOKEN_TIMER), EventFlags::IN)?;
        Ok(Self {
            guest_cid,
            connections: HashMap::new(),
            pairs: HashMap::new(),
            listening: listen.iter().copied().collect(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            deadlines: BTreeSet::new(),
            alarm: None,
            large: 0,
            next_id: FIRST_ID,
            next_port: FIRST_PORT,
            epoll,
            timer,
            commands,
            events,
        })
    }

    /// Readable when [`Muxer::poll`] has something to do.
    pub fn poll_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Makes [`Muxer::poll_fd`] readable.
    pub fn wake(&self) {
        self.commands.wake();
    }

    /// Whether a buffer of the guest is needed.
    pub fn has_work(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// The port for the next connection that the host opens, for a snapshot.
    pub fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Takes back what [`Muxer::next_port`] gave. False: it is no such port.
    pub fn set_next_port(&mut self, port: u32) -> bool {
        let valid = (FIRST_PORT..=LAST_PORT).contains(&port);
        if valid {
            self.next_port = port;
        }
        valid
    }

    /// Does what the epoll set says is due: commands, timers, sockets. Never waits.
    pub fn poll(&mut self, now: Instant) -> io::Result<()> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); MAX_EVENTS];
        let (events, _) =
            match epoll::wait(&self.epoll, &mut events[..], Some(&Timespec::default())) {
                Err(rustix::io::Errno::INTR) => return Ok(()),
                other => other?,
            };
        for event in events {
            match event.data.u64() {
                TOKEN_COMMANDS => self.run_commands(now),
                TOKEN_TIMER => self.run_timer(now)?,
                id => self.socket_event(id, event.flags)?,
            }
        }
        self.set_alarm(now)
    }

    fn run_commands(&mut self, now: Instant) {
        self.commands.clear();
        while let Some(command) = self.commands.next() {
            match command {
                Command::Connect { id, port } => self.connect(id, port, now),
                Command::Listen { port } => {
                    self.listening.insert(port);
                }
            }
        }
    }

    fn connect(&mut self, request: u64, port: u32, now: Instant) {
        let pair = self.free_pair(port);
        let Some(pair) = pair.filter(|_| self.connections.len() < MAX_CONNECTIONS) else {
            self.refused(
                request,
                format!("port {port}: the guest has {MAX_CONNECTIONS} connections"),
            );
            return;
        };
        let buffer = self.take_buffer();
        self.insert(Connection::request(pair, self.guest_cid, request, buffer, now));
    }

    /// The next port of the host that has no connection with this port of the guest.
    fn free_pair(&mut self, guest: u32) -> Option<Pair> {
        for _ in 0..=MAX_CONNECTIONS {
            let local = self.next_port;
            self.next_port = if local >= LAST_PORT { FIRST_PORT } else { local + 1 };
            let pair = Pair { local, guest };
            if !self.pairs.contains_key(&pair) && !self.listening.contains(&local) {
                return Some(pair);
            }
        }
        None
    }

    fn take_buffer(&mut self) -> u32 {
        if self.large < MAX_LARGE {
            self.large += 1;
            LARGE_BUFFER
        } else {
            SMALL_BUFFER
        }
    }

    fn insert(&mut self, connection: Connection) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.pairs.insert(connection.pair(), id);
        let entry = Entry { connection, queued: false, watches_writable: false, deadline: None };
        self.connections.insert(id, entry);
        self.schedule(id);
        id
    }

    fn refused(&self, id: u64, error: String) {
        self.events.send(VsockEvent::Refused { id, error });
    }

    /// A packet of the guest. `payload` holds `payload_len` bytes, whatever the header says.
    pub fn packet(
        &mut self,
        header: &Header,
        payload: &[VolatileSlice<'_>],
        payload_len: usize,
    ) -> io::Result<()> {
        let op = Op::from_number(header.op);
        let pair = Pair { local: header.dst_port, guest: header.src_port };
        let addressed = header.src_cid == self.guest_cid
            && header.dst_cid == HOST_CID
            && header.kind == TYPE_STREAM;
        let id = if addressed { self.pairs.get(&pair).copied() } else { None };
        let fits = usize::try_from(header.len) == Ok(payload_len)
            && (payload_len == 0 || op == Some(Op::ReadWrite));
        let Some(op) = op.filter(|_| addressed && fits) else {
            // What is malformed ends the connection that it names.
            if let Some(id) = id {
                return self.settle(id, Verdict::Ended { reset: header.op != Op::Reset.number() });
            }
            self.refuse(header);
            return Ok(());
        };
        if op == Op::Request {
            if let Some(id) = id {
                // The guest would not ask if it still had that connection.
                self.settle(id, Verdict::Ended { reset: false })?;
            }
            return self.guest_connects(header, pair);
        }
        let Some(id) = id else {
            self.refuse(header);
            return Ok(());
        };
        let Some(entry) = self.connections.get_mut(&id) else { return Ok(()) };
        if op == Op::Response
            && let Some(request) = entry.connection.requested()
        {
            return self.guest_accepts(header, id, request);
        }
        let verdict = entry.connection.packet(header, op, payload, payload_len);
        self.settle(id, verdict)
    }

    fn guest_connects(&mut self, header: &Header, pair: Pair) -> io::Result<()> {
        // An RST for an earlier connection of these ports must not hit this one.
        self.resets.retain(|reset| {
            (reset.src_port, reset.dst_port) != (pair.local, pair.guest)
                || reset.src_cid != HOST_CID
        });
        // Counted before anything is made.
        if !self.listening.contains(&pair.local)
            || self.connections.len() >= MAX_CONNECTIONS
            || !self.events.has_room()
        {
            self.refuse(header);
            return Ok(());
        }
        // Out of descriptors, most likely: that is this connection's trouble only.
        let Ok((socket, stream)) = Socket::pair() else {
            self.refuse(header);
            return Ok(());
        };
        let buffer = self.take_buffer();
        let id = self.insert(Connection::accept(pair, self.guest_cid, header, socket, buffer));
        if self.watch(id).is_err() {
            return self.settle(id, Verdict::Ended { reset: true });
        }
        self.events.send(VsockEvent::Accepted { port: pair.local, stream });
        Ok(())
    }

    fn guest_accepts(&mut self, header: &Header, id: u64, request: u64) -> io::Result<()> {
        let Some(entry) = self.connections.get_mut(&id) else { return Ok(()) };
        match Socket::pair() {
            Ok((socket, stream)) => {
                entry.connection.established(header, socket);
                if let Err(error) = self.watch(id) {
                    self.refused(request, format!("port {}: {error}", header.src_port));
                    return self.settle(id, Verdict::Ended { reset: true });
                }
                self.events.send(VsockEvent::Connected { id: request, stream });
                self.settle(id, Verdict::Open)
            }
            Err(error) => self.end(id, true, &error.to_string()),
        }
    }

    /// Answers a packet that belongs to no connection by RST, unless it is one.
    fn refuse(&mut self, header: &Header) {
        if header.op != Op::Reset.number() {
            self.push_reset(header.refusal());
        }
    }

    fn push_reset(&mut self, reset: Header) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(reset);
        }
    }

    /// Adds a connection's socket to the epoll set.
    fn watch(&self, id: u64) -> io::Result<()> {
        if let Some(socket) = self.connections.get(&id).and_then(|entry| entry.connection.socket())
        {
            let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
            epoll::add(&self.epoll, socket, EventData::new_u64(id), flags)?;
        }
        Ok(())
    }

    fn socket_event(&mut self, id: u64, flags: EventFlags) -> io::Result<()> {
        // Gone since: the kernel forgets the socket with its descriptor, but not this event.
        let Some(entry) = self.connections.get_mut(&id) else { return Ok(()) };
        let connection = &mut entry.connection;
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            connection.socket_hung_up();
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP) {
            connection.socket_readable();
        }
        if flags.contains(EventFlags::OUT) {
            connection.socket_writable();
        }
        self.settle(id, Verdict::Open)
    }

    pub(super) fn run_timer(&mut self, now: Instant) -> io::Result<()> {
        // Only makes the descriptor unreadable; `deadlines` knows what is due.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.alarm = None;
        while let Some((at, id)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            let Some(entry) = self.connections.get_mut(&id) else { continue };
            entry.deadline = None;
            match entry.connection.timeout(now) {
                Verdict::Open => self.settle(id, Verdict::Open)?,
                Verdict::Ended { reset } => self.end(id, reset, "the guest did not answer")?,
            }
        }
        Ok(())
    }

    /// Sets the timer to the next deadline.
    fn set_alarm(&mut self, now: Instant) -> io::Result<()> {
        let next = self.deadlines.first().map(|(at, _)| *at);
        // A timer that is early costs one look at `deadlines`.
        let Some(next) = next.filter(|next| self.alarm.is_none_or(|alarm| *next < alarm)) else {
            return Ok(());
        };
        // Zero would switch it off.
        let wait = next.saturating_duration_since(now).max(std::time::Duration::from_micros(1));
        let value = Timespec::try_from(wait).map_err(io::Error::other)?;
        let spec = Itimerspec { it_interval: Timespec::default(), it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)?;
        self.alarm = Some(next);
        Ok(())
    }

    /// Acts on what has happened to a connection.
    fn settle(&mut self, id: u64, verdict: Verdict) -> io::Result<()> {
        match verdict {
            Verdict::Open => {
                self.schedule(id);
                self.update_watch(id)
            }
            Verdict::Ended { reset } => self.end(id, reset, "the guest refused the connection"),
        }
    }

    /// Ends a connection for the guest; `reset` says whether by RST.
    fn end(&mut self, id: u64, reset: bool, reason: &str) -> io::Result<()> {
        let Some(entry) = self.connections.get_mut(&id) else { return Ok(()) };
        let pair = entry.connection.pair();
        let request = entry.connection.requested();
        entry.connection.end();
        self.pairs.remove(&pair);
        if reset {
            self.push_reset(Header {
                src_cid: HOST_CID,
                dst_cid: self.guest_cid,
                src_port: pair.local,
                dst_port: pair.guest,
                kind: TYPE_STREAM,
                op: Op::Reset.number(),
                ..Header::default()
            });
        }
        if let Some(request) = request {
            self.refused(request, format!("port {}: {reason}", pair.guest));
        }
        self.schedule(id);
        self.update_watch(id)
    }

    /// Puts a connection where it belongs: the ready queue, the deadlines, or away.
    fn schedule(&mut self, id: u64) {
        let Some(entry) = self.connections.get_mut(&id) else { return };
        let deadline = entry.connection.deadline();
        if deadline != entry.deadline {
            if let Some(old) = entry.deadline {
                self.deadlines.remove(&(old, id));
            }
            if let Some(new) = deadline {
                self.deadlines.insert((new, id));
            }
            entry.deadline = deadline;
        }
        if entry.connection.is_drained() {
            if entry.connection.buf_alloc() == LARGE_BUFFER {
                self.large = self.large.saturating_sub(1);
            }
            if entry.queued {
                // Else a guest without receive buffers could fill the queue with the dead.
                self.ready.retain(|ready| *ready != id);
            }
            self.connections.remove(&id);
        } else if !entry.queued && entry.connection.has_work() {
            entry.queued = true;
            self.ready.push_back(id);
        }
    }

    /// Watches for the socket to become writable only while there is something to write: every read
    /// of the host's program would wake us otherwise.
    fn update_watch(&mut self, id: u64) -> io::Result<()> {
        let Some(entry) = self.connections.get_mut(&id) else { return Ok(()) };
        let wants = entry.connection.wants_writable();
        if wants != entry.watches_writable
            && let Some(socket) = entry.connection.socket()
        {
            let mut flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
            flags.set(EventFlags::OUT, wants);
            epoll::modify(&self.epoll, socket, EventData::new_u64(id), flags)?;
            entry.watches_writable = wants;
        }
        Ok(())
    }

    /// Gives the guest what there is for it, as far as it has buffers, in at most `budget` turns.
    pub fn send<R: RxBuffers>(
        &mut self,
        rx: &mut R,
        budget: usize,
        now: Instant,
    ) -> Result<Turn, SendError> {
        let turn = self.take_turns(rx, budget, now)?;
        self.set_alarm(now)?;
        Ok(turn)
    }

    fn take_turns<R: RxBuffers>(
        &mut self,
        rx: &mut R,
        budget: usize,
        now: Instant,
    ) -> Result<Turn, SendError> {
        for _ in 0..budget {
            if let Some(reset) = self.resets.front() {
                if rx.ready(1) == 0 {
                    return Ok(Turn::NoBuffer);
                }
                rx.deliver(*reset)?;
                self.resets.pop_front();
                continue;
            }
            let Some(id) = self.ready.front().copied() else { break };
            let Some(entry) = self.connections.get_mut(&id) else {
                self.ready.pop_front();
                continue;
            };
            if entry.connection.has_work() && entry.connection.send(rx, now)? == Turn::NoBuffer {
                return Ok(Turn::NoBuffer);
            }
            // To the end of the queue, if it has more.
            entry.queued = false;
            self.ready.pop_front();
            self.settle(id, Verdict::Open)?;
        }
        Ok(Turn::Done)
    }

    /// The driver is gone, and with it all connections.
    pub fn reset(&mut self) {
        for entry in self.connections.values() {
            if let Some(id) = entry.connection.requested() {
                self.events.send(VsockEvent::Refused {
                    id,
                    error: "the guest reset its vsock device".into(),
                });
            }
        }
        self.connections.clear();
        self.pairs.clear();
        self.ready.clear();
        self.resets.clear();
        self.deadlines.clear();
        self.large = 0;
    }

    #[cfg(test)]
    pub(super) fn epoll_fd(&self) -> &OwnedFd {
        &self.epoll
    }

    #[cfg(test)]
    pub(super) fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Lets the counters of all connections begin at `start`.
    #[cfg(test)]
    pub(super) fn shift_counters(&mut self, start: u32) {
        for entry in self.connections.values_mut() {
            entry.connection.shift_counters(start);
        }
    }
}

/// Why nothing can be sent any more.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The receive queue.
    #[error(transparent)]
    Queue(#[from] DeviceError),
    /// The epoll set or the timer.
    #[error("host I/O failed: {0}")]
    Io(#[from] io::Error),
}

#[cfg(test)]
#[path = "muxer_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "muxer_flow_tests.rs"]
mod flow_tests;
