//! What the tests share: receive buffers without a queue, and a model of the guest's sockets.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use vm_memory::VolatileSlice;

use super::connection::RxBuffers;
use super::handle::{VsockEvent, VsockEvents, VsockHandle, channels};
use super::muxer::Muxer;
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};
use crate::devices::virtio::DeviceError;

/// The guest's CID in the tests.
pub(super) const GUEST_CID: u64 = 3;

/// Receive buffers in ordinary memory.
#[derive(Default)]
pub(super) struct TestRx {
    buffers: VecDeque<[VolatileSlice<'static>; 1]>,
    delivered: VecDeque<(Header, Vec<u8>)>,
}

impl TestRx {
    pub(super) fn post(&mut self, count: usize, size: usize) {
        for _ in 0..count {
            // Leaked: the tests are short, and slices without a lifetime keep them simple.
            let memory = Box::leak(vec![0; size].into_boxed_slice());
            self.buffers.push_back([VolatileSlice::from(memory)]);
        }
    }

    pub(super) fn posted(&self) -> usize {
        self.buffers.len()
    }

    pub(super) fn take(&mut self) -> Option<(Header, Vec<u8>)> {
        self.delivered.pop_front()
    }
}

impl RxBuffers for TestRx {
    fn ready(&mut self, wanted: usize) -> usize {
        self.buffers.len().min(wanted)
    }

    fn payload(&self, index: usize) -> &[VolatileSlice<'_>] {
        &self.buffers[index]
    }

    fn capacity(&self, index: usize) -> usize {
        self.buffers[index][0].len()
    }

    fn deliver(&mut self, header: Header) -> Result<(), DeviceError> {
        let [slice] = self.buffers.pop_front().unwrap();
        let mut data = vec![0; header.len as usize];
        assert!(data.len() <= slice.len());
        slice.copy_to(&mut data[..]);
        self.delivered.push_back((header, data));
        Ok(())
    }
}

/// A muxer with all that surrounds it.
pub(super) struct Bench {
    pub(super) muxer: Muxer,
    pub(super) handle: VsockHandle,
    pub(super) events: VsockEvents,
    pub(super) rx: TestRx,
    pub(super) now: Instant,
}

impl Bench {
    pub(super) fn new(listen: &[u32]) -> Self {
        let (handle, commands, sender, events) = channels().unwrap();
        let muxer = Muxer::new(GUEST_CID, listen, commands, sender).unwrap();
        Self { muxer, handle, events, rx: TestRx::default(), now: Instant::now() }
    }

    /// Lets the muxer do all it can with the buffers posted so far.
    pub(super) fn run(&mut self) {
        for _ in 0..4 {
            self.muxer.poll(self.now).unwrap();
            self.muxer.send(&mut self.rx, 10_000, self.now).unwrap();
        }
    }

    /// Like [`Bench::run`], with plenty of buffers; returns the packets.
    pub(super) fn packets(&mut self) -> Vec<(Header, Vec<u8>)> {
        let posted = self.rx.posted();
        self.rx.post(200_usize.saturating_sub(posted), 4052);
        self.run();
        std::iter::from_fn(|| self.rx.take()).collect()
    }

    /// The operations of [`Bench::packets`].
    pub(super) fn ops(&mut self) -> Vec<Op> {
        self.packets().iter().map(|(header, _)| Op::from_number(header.op).unwrap()).collect()
    }

    /// Time passes; timers that are due run. (The real timer is armed for real time, so the muxer
    /// is told directly.)
    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.muxer.run_timer(self.now).unwrap();
    }

    /// A packet of the guest.
    pub(super) fn packet(&mut self, header: Header, data: &[u8]) {
        let mut data = data.to_vec();
        let len = data.len();
        let slices = [VolatileSlice::from(&mut data[..])];
        self.muxer.packet(&header, &slices, len).unwrap();
    }

    /// A packet of the guest without data.
    pub(super) fn op(&mut self, op: Op, local: u32, guest: u32, flags: u32) {
        self.packet(Header { flags, ..header(op, local, guest) }, &[]);
    }

    /// Data of the guest.
    pub(super) fn data(&mut self, local: u32, guest: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.packet(Header { len, ..header(Op::ReadWrite, local, guest) }, data);
    }

    pub(super) fn event(&self) -> Option<VsockEvent> {
        self.events.next()
    }

    /// Nobody takes events any more.
    pub(super) fn drop_events(&mut self) {
        let (_, _, _, others) = channels().unwrap();
        self.events = others;
    }

    /// The guest dials a registered port; returns the host's end.
    pub(super) fn guest_opens(&mut self, local: u32, guest: u32) -> Stream {
        self.op(Op::Request, local, guest, 0);
        assert_eq!(self.ops(), [Op::Response]);
        match self.event() {
            Some(VsockEvent::Accepted { port, stream }) if port == local => Stream::from(stream),
            other => panic!("not accepted: {other:?}"),
        }
    }

    /// The host dials a port, on which the guest listens; returns the host's port and end.
    pub(super) fn host_opens(&mut self, guest: u32) -> (u32, Stream) {
        self.handle.connect(9, guest).unwrap();
        let packets = self.packets();
        assert_eq!(packets.len(), 1);
        let local = packets[0].0.src_port;
        assert_eq!(packets[0].0.op, Op::Request.number());
        self.op(Op::Response, local, guest, 0);
        match self.event() {
            Some(VsockEvent::Connected { id: 9, stream }) => (local, Stream::from(stream)),
            other => panic!("not connected: {other:?}"),
        }
    }
}

/// The host's end in the tests, with a timeout so that a failure does not hang.
pub(super) struct Stream(pub(super) std::os::unix::net::UnixStream);

impl From<std::os::fd::OwnedFd> for Stream {
    fn from(fd: std::os::fd::OwnedFd) -> Self {
        let stream = std::os::unix::net::UnixStream::from(fd);
        stream.set_nonblocking(true).unwrap();
        Self(stream)
    }
}

impl Stream {
    /// All that is there now; and whether the stream ended.
    pub(super) fn read(&mut self) -> (Vec<u8>, bool) {
        use std::io::Read;
        let mut all = Vec::new();
        let mut part = vec![0; 65536];
        loop {
            match self.0.read(&mut part) {
                Ok(0) => return (all, true),
                Ok(len) => all.extend(&part[..len]),
                Err(_) => return (all, false),
            }
        }
    }

    /// Writes all, which must fit.
    pub(super) fn write(&mut self, data: &[u8]) {
        use std::io::Write;
        self.0.write_all(data).unwrap();
    }
}

/// A header as a Linux guest fills it in.
pub(super) fn header(op: Op, local: u32, guest: u32) -> Header {
    Header {
        src_cid: GUEST_CID,
        dst_cid: HOST_CID,
        src_port: guest,
        dst_port: local,
        kind: TYPE_STREAM,
        op: op.number(),
        buf_alloc: 256 * 1024,
        ..Header::default()
    }
}
