//! The control socket: requests to the VMM, and one task that takes its messages apart.
//!
//! A VMM may have been taken over by its guest, so a message that breaks the protocol ends the VM
//! and nothing else.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use casulo_protocol::vmm::{
    Counters, Diagnosis, FileRecord, FileUse, GuestEnd, MAX_FDS, MAX_FILES, MAX_PACKET, Message,
    Request,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::watched;
use crate::agent::quote;

/// Most accepted connections that wait to be taken.
const BACKLOG: usize = 16;

/// Where the VM stands.
#[derive(Clone, Debug)]
pub(crate) enum Status {
    /// The VMM has not answered yet.
    Building,
    /// The vCPUs run.
    Running,
    /// It is over.
    Ended(End),
}

/// How a VM ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// The VMM could not build or start it.
    Failed {
        /// Step that failed.
        phase: String,
        /// Why.
        error: String,
    },
    /// The guest ended.
    Exited {
        /// Why, and where it was.
        end: Box<GuestEnd>,
        /// Last lines of its console.
        console: String,
    },
    /// The VMM closed its socket without a word, or broke the protocol.
    Lost {
        /// What happened.
        reason: String,
    },
}

/// The parent's end of the control socket.
#[derive(Debug)]
pub(crate) struct Control {
    shared: Arc<Shared>,
    status: watch::Receiver<Status>,
    pump: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    socket: AsyncFd<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    connects: HashMap<u64, oneshot::Sender<Result<UnixStream, String>>>,
    reports: VecDeque<oneshot::Sender<(String, Counters)>>,
    diagnoses: VecDeque<oneshot::Sender<Diagnosis>>,
    /// Counters that came with the end.
    last: Option<Counters>,
    record: Record,
}

/// The record of the files that the guest has used, which comes in parts.
#[derive(Debug, Default)]
struct Record {
    /// Parts of one that is not whole yet.
    parts: Vec<FileUse>,
    waiting: VecDeque<oneshot::Sender<FileRecord>>,
    /// The last whole one that nobody had asked for: the guest has ended.
    last: Option<FileRecord>,
}

impl Record {
    /// Takes one more part.
    fn add(&mut self, files: Vec<FileUse>, left_out: u64, more: bool) -> io::Result<()> {
        self.parts.extend(files);
        if self.parts.len() > MAX_FILES {
            return Err(io::Error::other("a record of too many files"));
        }
        if !more {
            let whole = FileRecord { files: std::mem::take(&mut self.parts), left_out };
            match self.waiting.pop_front() {
                // The one who asked may have given up.
                Some(waiting) => drop(waiting.send(whole)),
                None => self.last = Some(whole),
            }
        }
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is a single insertion or removal, so it is whole even if a
        // thread panicked while it held the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections that the guest opened.
pub(crate) type Accepted = mpsc::Receiver<(u32, UnixStream)>;

impl Control {
    /// A control socket, the VMM's end of it, and the connections that the guest will open.
    pub(crate) fn new() -> io::Result<(Self, OwnedFd, Accepted)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Only our end is non-blocking: the flag belongs to the end, not to the pair.
        rustix::io::ioctl_fionbio(&ours, true)?;
        let shared =
            Arc::new(Shared { socket: watched(ours)?, state: Mutex::new(State::default()) });
        let (status_in, status) = watch::channel(Status::Building);
        let (accepted_in, accepted) = mpsc::channel(BACKLOG);
        let pump = tokio::spawn(pump(Arc::clone(&shared), status_in, accepted_in)).abort_handle();
        Ok((Self { shared, status, pump }, theirs, accepted))
    }

    /// Sends a request with descriptors beside it.
    pub(crate) async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let packet = serde_json::to_vec(request)?;
        if packet.len() > MAX_PACKET || fds.len() > MAX_FDS {
            let kind = io::ErrorKind::InvalidInput;
            return Err(io::Error::new(kind, "too many shares, or their names are too long"));
        }
        loop {
            let mut guard = self.shared.socket.writable().await?;
            match guard.try_io(|socket| send_once(socket.get_ref(), &packet, fds)) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    /// Opens a connection to a port of the guest. The inner error is the VMM's refusal.
    pub(crate) async fn connect(&self, port: u32) -> io::Result<Result<UnixStream, String>> {
        let (answer_in, answer) = oneshot::channel();
        let id = {
            let mut state = self.shared.state();
            state.next_id = state.next_id.wrapping_add(1);
            let id = state.next_id;
            state.connects.insert(id, answer_in);
            id
        };
        self.send(&Request::Connect { id, port }, &[]).await?;
        answer.await.map_err(|_| ended())
    }

    /// The console and the counters of a running VM.
    pub(crate) async fn report(&self) -> io::Result<(String, Counters)> {
        let (answer_in, answer) = oneshot::channel();
        self.shared.state().reports.push_back(answer_in);
        self.send(&Request::Report, &[]).await?;
        answer.await.map_err(|_| ended())
    }

    /// Which files the guest has read and written; also of a guest that has ended by itself.
    pub(crate) async fn files(&self) -> io::Result<FileRecord> {
        let (answer_in, answer) = oneshot::channel();
        if let Some(last) = &self.shared.state().record.last {
            return Ok(last.clone());
        }
        self.shared.state().record.waiting.push_back(answer_in);
        self.send(&Request::Files, &[]).await?;
        answer.await.map_err(|_| ended())
    }

    /// Where a guest stands that does not do what it should.
    pub(crate) async fn diagnose(&self) -> io::Result<Diagnosis> {
        let (answer_in, answer) = oneshot::channel();
        self.shared.state().diagnoses.push_back(answer_in);
        self.send(&Request::Diagnose, &[]).await?;
        answer.await.map_err(|_| ended())
    }

    /// Counters that a VM left when it ended.
    pub(crate) fn last_counters(&self) -> Option<Counters> {
        self.shared.state().last
    }

    /// Waits until the vCPUs run, or the VM has ended.
    pub(crate) async fn started(&self) -> Result<(), End> {
        let mut status = self.status.clone();
        match status.wait_for(|s| !matches!(s, Status::Building)).await.as_deref() {
            Ok(Status::Running) => Ok(()),
            Ok(Status::Ended(end)) => Err(end.clone()),
            Ok(Status::Building) | Err(_) => Err(End::Lost { reason: "it is closed".into() }),
        }
    }

    /// Waits until the VM has ended.
    pub(crate) async fn end(&self) -> End {
        let mut status = self.status.clone();
        match status.wait_for(|s| matches!(s, Status::Ended(_))).await.as_deref() {
            Ok(Status::Ended(end)) => end.clone(),
            _ => End::Lost { reason: "it is closed".into() },
        }
    }

    /// Whether the VM has not ended yet.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(*self.status.borrow(), Status::Ended(_))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.pump.abort();
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the VM has ended")
}

fn send_once(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one packet"));
    }
    // NOSIGNAL: a VMM that is gone must not kill its parent with SIGPIPE.
    rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

async fn pump(
    shared: Arc<Shared>,
    status: watch::Sender<Status>,
    accepted: mpsc::Sender<(u32, UnixStream)>,
) {
    let end = loop {
        let (message, fd) = match receive(&shared.socket).await {
            Ok(Some(packet)) => packet,
            Ok(None) => break End::Lost { reason: "the VMM ended without a word".into() },
            Err(e) => break broken(&e),
        };
        match handle(&shared, message, fd, &status, &accepted) {
            Ok(None) => {}
            Ok(Some(end)) => break end,
            Err(e) => break broken(&e),
        }
    };
    status.send_replace(Status::Ended(end));
    // Whoever waits for an answer learns that none will come.
    let mut state = shared.state();
    state.connects.clear();
    state.reports.clear();
    state.record.waiting.clear();
    state.diagnoses.clear();
}

/// The end of a VM whose VMM may be its guest by now: the error may repeat what it said.
fn broken(error: &io::Error) -> End {
    End::Lost { reason: quote(&format!("the VMM broke the protocol: {error}")) }
}

fn handle(
    shared: &Shared,
    message: Message,
    fd: Option<OwnedFd>,
    status: &watch::Sender<Status>,
    accepted: &mpsc::Sender<(u32, UnixStream)>,
) -> io::Result<Option<End>> {
    match message {
        Message::Started => {
            status.send_replace(Status::Running);
        }
        Message::Failed { phase, error } => return Ok(Some(End::Failed { phase, error })),
        Message::Connected { id } => {
            // The one who asked may have given up; then the stream is closed here.
            let waiting = shared.state().connects.remove(&id);
            let stream = stream(fd)?;
            if let Some(waiting) = waiting {
                let _ = waiting.send(Ok(stream));
            }
        }
        Message::Refused { id, error } => {
            if let Some(waiting) = shared.state().connects.remove(&id) {
                let _ = waiting.send(Err(error));
            }
        }
        Message::Accepted { port } => {
            // More than the backlog are closed at once.
            let _ = accepted.try_send((port, stream(fd)?));
        }
        Message::Report { console, counters } => {
            if let Some(waiting) = shared.state().reports.pop_front() {
                let _ = waiting.send((console, counters));
            }
        }
        Message::Files { files, left_out, more } => {
            shared.state().record.add(files, left_out, more)?;
        }
        Message::Diagnosis(diagnosis) => {
            if let Some(waiting) = shared.state().diagnoses.pop_front() {
                let _ = waiting.send(diagnosis);
            }
        }
        Message::Exited { end, console, counters } => {
            shared.state().last = Some(counters);
            return Ok(Some(End::Exited { end: Box::new(end), console }));
        }
    }
    Ok(None)
}

fn stream(fd: Option<OwnedFd>) -> io::Result<UnixStream> {
    let fd = fd.ok_or_else(|| io::Error::other("a connection without a descriptor"))?;
    let stream = std::os::unix::net::UnixStream::from(fd);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// The next message; `None` at the end of the socket.
async fn receive(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<(Message, Option<OwnedFd>)>> {
    let mut buffer = vec![0u8; MAX_PACKET];
    let (bytes, fd) = loop {
        let mut guard = socket.readable().await?;
        match guard.try_io(|socket| receive_once(socket.as_fd(), &mut buffer)) {
            Ok(result) => break result?,
            Err(_would_block) => {}
        }
    };
    let packet = buffer.get(..bytes).unwrap_or_default();
    if packet.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(packet)?, fd)))
}

fn receive_once(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    // Room for one descriptor; the kernel closes what does not fit and says so.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            // A VMM that was killed with requests unread.
            Err(rustix::io::Errno::CONNRESET) => return Ok((0, None)),
            other => other?,
        };
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = message {
            fds.extend(list);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::other("a packet is too long"));
    }
    // The room is rounded up, so a second one may have fitted.
    if fds.len() > 1 {
        return Err(io::Error::other("more than one descriptor beside a packet"));
    }
    Ok((received.bytes, fds.pop()))
}

#[cfg(test)]
mod tests {
    use casulo_protocol::vmm::ExitReason;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Plays the VMM on the other end, which is blocking.
    struct Peer(OwnedFd);

    impl Peer {
        fn receive(&self) -> Request {
            let mut buffer = vec![0; MAX_PACKET];
            let n = rustix::io::read(&self.0, &mut buffer).unwrap();
            serde_json::from_slice(&buffer[..n]).unwrap()
        }

        fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) {
            self.raw(&serde_json::to_vec(message).unwrap(), fds);
        }

        fn raw(&self, packet: &[u8], fds: &[BorrowedFd<'_>]) {
            send_once(&self.0, packet, fds).unwrap();
        }
    }

    fn ended_by(reason: ExitReason) -> GuestEnd {
        GuestEnd { reason, vcpu: None, devices: vec![], accesses: vec![] }
    }

    fn pair() -> (Control, Peer, Accepted) {
        let (control, theirs, accepted) = Control::new().unwrap();
        (control, Peer(theirs), accepted)
    }

    #[tokio::test]
    async fn connects_by_descriptor() {
        let (control, peer, _accepted) = pair();
        let vmm = std::thread::spawn(move || {
            let Request::Connect { id, port: 7 } = peer.receive() else { panic!() };
            let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
            peer.send(&Message::Connected { id }, &[a.as_fd()]);
            let Request::Connect { id, port: 8 } = peer.receive() else { panic!() };
            peer.send(&Message::Refused { id, error: "nobody".into() }, &[]);
            (b, peer)
        });
        let mut stream = control.connect(7).await.unwrap().unwrap();
        assert_eq!(control.connect(8).await.unwrap().unwrap_err(), "nobody");
        let (mut other, _peer) = vmm.join().unwrap();
        stream.write_all(b"hi").await.unwrap();
        let mut got = [0; 2];
        io::Read::read_exact(&mut other, &mut got).unwrap();
        assert_eq!(&got, b"hi");
    }

    #[tokio::test]
    async fn accepts_and_reports() {
        let (control, peer, mut accepted) = pair();
        peer.send(&Message::Started, &[]);
        control.started().await.unwrap();
        let (a, mut b) = std::os::unix::net::UnixStream::pair().unwrap();
        peer.send(&Message::Accepted { port: 9 }, &[a.as_fd()]);
        let (port, mut stream) = accepted.recv().await.unwrap();
        io::Write::write_all(&mut b, b"x").unwrap();
        assert_eq!((port, stream.read_u8().await.unwrap()), (9, b'x'));
        let vmm = std::thread::spawn(move || {
            assert_eq!(peer.receive(), Request::Report);
            let counters = Counters { exits: 5, ..Counters::default() };
            peer.send(&Message::Report { console: "boot".into(), counters }, &[]);
            peer
        });
        let (console, counters) = control.report().await.unwrap();
        assert_eq!((console.as_str(), counters.exits), ("boot", 5));
        let _peer = vmm.join().unwrap();
        assert!(control.is_alive());
    }

    #[tokio::test]
    async fn the_record_of_files_comes_in_parts_and_outlives_the_guest() {
        let file = |path: &str| FileUse { path: path.into(), read: 1, ..FileUse::default() };
        let part = move |path, more| Message::Files { files: vec![file(path)], left_out: 2, more };
        let (control, peer, _accepted) = pair();
        let vmm = std::thread::spawn(move || {
            assert_eq!(peer.receive(), Request::Files);
            peer.send(&part("a", true), &[]);
            peer.send(&part("b", false), &[]);
            peer
        });
        let both = FileRecord { files: vec![file("a"), file("b")], left_out: 2 };
        assert_eq!(control.files().await.unwrap(), both);
        let peer = vmm.join().unwrap();
        peer.send(&part("c", false), &[]);
        let exited = Message::Exited {
            end: ended_by(ExitReason::Reset),
            console: String::new(),
            counters: Counters::default(),
        };
        peer.send(&exited, &[]);
        control.end().await;
        assert_eq!(control.files().await.unwrap().files, [file("c")]);
        let (control, peer, _accepted) = pair();
        let vmm = std::thread::spawn(move || {
            let part = Message::Files {
                files: vec![FileUse::default(); MAX_FILES / 8],
                left_out: 0,
                more: true,
            };
            let packet = serde_json::to_vec(&part).unwrap();
            // Until the other end has had enough.
            while send_once(&peer.0, &packet, &[]).is_ok() {}
        });
        assert!(matches!(control.end().await, End::Lost { .. }));
        drop(control);
        vmm.join().unwrap();
    }

    #[tokio::test]
    async fn every_kind_of_end_is_told() {
        let (control, peer, _accepted) = pair();
        peer.send(&Message::Failed { phase: "kernel".into(), error: "bad".into() }, &[]);
        assert!(
            matches!(control.started().await, Err(End::Failed { phase, .. }) if phase == "kernel")
        );

        let (control, peer, _accepted) = pair();
        let exited = Message::Exited {
            end: ended_by(ExitReason::Panic),
            console: "oops".into(),
            counters: Counters { exits: 3, ..Counters::default() },
        };
        peer.send(&exited, &[]);
        let End::Exited { end, console } = control.end().await else { panic!() };
        assert_eq!((end.reason, console.as_str()), (ExitReason::Panic, "oops"));
        assert_eq!(control.last_counters().map(|c| c.exits), Some(3));

        let (control, peer, _accepted) = pair();
        let waiting = control.connect(1);
        drop(peer);
        assert!(waiting.await.is_err());
        assert!(matches!(control.end().await, End::Lost { .. }));
        assert!(!control.is_alive());
    }

    #[tokio::test]
    async fn a_broken_message_ends_the_vm_only() {
        let too_long = vec![b' '; MAX_PACKET + 1];
        let unknown = format!("{{\"message\":\"\\u001b[2J{}\"}}", "rule".repeat(2000));
        let wrong: [&[u8]; 4] = [b"nonsense", unknown.as_bytes(), b"\xff\xfe", &too_long];
        for packet in wrong {
            let (control, peer, _accepted) = pair();
            peer.raw(packet, &[]);
            let end = tokio::time::timeout(std::time::Duration::from_secs(5), control.end()).await;
            let Ok(End::Lost { reason }) = end else { panic!("{:?}", packet.get(..20)) };
            assert!(!reason.contains('\u{1b}') && reason.len() <= 2000, "{reason}");
        }
        let (control, peer, _accepted) = pair();
        peer.send(&Message::Accepted { port: 1 }, &[]);
        assert!(matches!(control.end().await, End::Lost { .. }));
        let (control, peer, _accepted) = pair();
        let fds = [peer.0.as_fd(), peer.0.as_fd(), peer.0.as_fd()];
        peer.send(&Message::Started, &fds);
        assert!(matches!(control.end().await, End::Lost { .. }));
    }
}
