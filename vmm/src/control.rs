//! The control socket: requests of the parent in, messages and descriptors out.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::thread::JoinHandle;

use casulo_protocol::vmm::{CONTROL_FD, Diagnosis, MAX_FDS, MAX_PACKET, Message, Request, VERSION};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Most bytes of the console in a report.
const CONSOLE_IN_REPORT: usize = 16 * 1024;

/// Why the control socket is of no use.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Descriptor 3 is no such socket.
    #[error(
        "casulo-vmm is started by casulo, which passes it a control socket (SOCK_SEQPACKET) as \
         descriptor {fd}; it is of no use by itself",
        fd = CONTROL_FD
    )]
    NoSocket,
    /// The parent is gone.
    #[error("the control socket was closed")]
    Closed,
    /// A packet is no request.
    #[error("bad control packet: {0}")]
    Packet(String),
    /// The parent speaks another version.
    #[error(
        "casulo and casulo-vmm do not match: this casulo-vmm speaks version {VERSION} of their \
         protocol, the caller version {0}; install both from one release"
    )]
    Version(String),
    /// The socket failed.
    #[error("the control socket failed: {0}")]
    Io(#[from] io::Error),
}

/// The VMM's end of the control socket.
pub struct Control {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Control {
    /// Takes over the inherited descriptor. Call it once, at the start.
    pub fn inherited() -> Result<Self, ControlError> {
        // SAFETY: the number is only looked at; a closed one gives EBADF.
        let borrowed = unsafe { BorrowedFd::borrow_raw(CONTROL_FD) };
        if rustix::net::sockopt::socket_type(borrowed) != Ok(SocketType::SEQPACKET) {
            return Err(ControlError::NoSocket);
        }
        // SAFETY: the descriptor is open and inherited; nothing else in this process owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
        let flags = rustix::io::FdFlags::CLOEXEC;
        rustix::io::fcntl_setfd(&socket, flags).map_err(io::Error::from)?;
        Ok(Self::new(socket))
    }

    /// A control socket that is at hand.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, buffer: Vec::new() }
    }

    /// Waits for a request and the descriptors beside it.
    pub fn receive(&mut self) -> Result<(Request, Vec<OwnedFd>), ControlError> {
        self.buffer.resize(MAX_PACKET, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut slices = [IoSliceMut::new(&mut self.buffer)];
            match rustix::net::recvmsg(
                &self.socket,
                &mut slices,
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Err(ControlError::Closed),
                other => break other.map_err(io::Error::from)?,
            }
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        if received.bytes == 0 {
            return Err(ControlError::Closed);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            let what =
                format!("longer than {MAX_PACKET} bytes or with more than {MAX_FDS} descriptors");
            return Err(ControlError::Packet(what));
        }
        let packet = self.buffer.get(..received.bytes).unwrap_or_default();
        let request = parse(packet)?;
        // Later requests are small.
        self.buffer = Vec::new();
        Ok((request, descriptors))
    }

    /// Sends a message, with a descriptor beside it.
    pub fn send(&self, message: &Message, fd: Option<BorrowedFd<'_>>) -> Result<(), ControlError> {
        let packet = encode(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        }
        loop {
            match rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(&packet)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(ControlError::Closed);
                }
                other => return other.map(drop).map_err(|error| io::Error::from(error).into()),
            }
        }
    }

    /// Whether the parent is gone; does not wait.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok()
            && fds[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR)
    }
}

/// Ends the process when the parent goes, while the thread of the control socket is busy: building a VM
/// may wait for a slow disk.
pub struct ParentWatch {
    over: EventFd,
    thread: JoinHandle<()>,
}

impl ParentWatch {
    /// Watches until [`Self::end`].
    pub fn start(control: &Control) -> io::Result<Self> {
        const STACK: usize = 64 * 1024;
        let socket = control.socket.try_clone()?;
        let over = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let told = over.try_clone()?;
        let thread = std::thread::Builder::new().name("parent".into()).stack_size(STACK);
        let thread = thread.spawn(move || watch(&socket, &told))?;
        Ok(Self { over, thread })
    }

    /// Stops watching; returns when the thread is gone.
    pub fn end(self) {
        // A counter that is written once has room; the thread cannot panic.
        let _ = self.over.write(1);
        let _ = self.thread.join();
    }
}

fn watch(socket: &OwnedFd, over: &EventFd) {
    use rustix::event::{PollFd, PollFlags, poll};
    // SAFETY: the event is open as long as its borrow, which outlives this one.
    let over = unsafe { BorrowedFd::borrow_raw(over.as_raw_fd()) };
    loop {
        // Requests may wait to be read: only the end of the socket counts.
        let mut fds =
            [PollFd::new(socket, PollFlags::RDHUP), PollFd::from_borrowed_fd(over, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            // The build goes on unwatched; its end looks at the socket too.
            Err(_) => return,
        }
        let [gone, over] = fds.map(|fd| !fd.revents().is_empty());
        if over {
            return;
        }
        if gone {
            // There is nobody to tell, and nothing to keep.
            std::process::exit(0);
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Parses a request. The version is looked at first: another version may have other fields.
fn parse(packet: &[u8]) -> Result<Request, ControlError> {
    let bad = |error: serde_json::Error| ControlError::Packet(error.to_string());
    let value: serde_json::Value = serde_json::from_slice(packet).map_err(bad)?;
    if let Some(version) = value.get("version")
        && version.as_u64() != Some(VERSION.into())
    {
        return Err(ControlError::Version(version.to_string()));
    }
    serde_json::from_value(value).map_err(bad)
}

/// A message as a packet. Escapes can make a console larger than a packet: then less of it is sent.
fn encode(message: &Message) -> Result<Vec<u8>, ControlError> {
    let mut message = message.clone();
    let mut most = CONSOLE_IN_REPORT;
    loop {
        if let Message::Report { console, .. }
        | Message::Exited { console, .. }
        | Message::Diagnosis(Diagnosis { console, .. }) = &mut message
        {
            let start = console.len().saturating_sub(most);
            let start = (start..=console.len()).find(|at| console.is_char_boundary(*at));
            console.drain(..start.unwrap_or_default());
        }
        let packet = serde_json::to_vec(&message)
            .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        if packet.len() <= MAX_PACKET || most == 0 {
            return Ok(packet);
        }
        most /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use casulo_protocol::vmm::Counters;
    use rustix::net::{AddressFamily, SocketFlags, socketpair};

    fn pair() -> (Control, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        (Control::new(ours), theirs)
    }

    fn send(socket: &OwnedFd, bytes: &[u8]) {
        rustix::net::send(socket, bytes, SendFlags::empty()).unwrap();
    }

    #[test]
    fn requests_arrive() {
        let (mut control, parent) = pair();
        send(&parent, br#"{"request":"listen","port":7}"#);
        let (request, fds) = control.receive().unwrap();
        assert_eq!(request, Request::Listen { port: 7 });
        assert!(fds.is_empty());
        assert!(!control.is_closed());
        drop(parent);
        assert!(control.is_closed());
        assert!(matches!(control.receive(), Err(ControlError::Closed)));
        assert!(matches!(control.send(&Message::Started, None), Err(ControlError::Closed)));
    }

    #[test]
    fn descriptors_arrive_and_leave() {
        let (mut control, parent) = pair();
        let file = tempfile::tempfile().unwrap();
        control.send(&Message::Connected { id: 1 }, Some(file.as_fd())).unwrap();
        let mut other = Control::new(parent);
        assert!(matches!(other.receive(), Err(ControlError::Packet(_))));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd(), file.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let packet = IoSlice::new(br#"{"request":"report"}"#);
        rustix::net::sendmsg(&other.socket, &[packet], &mut ancillary, SendFlags::empty()).unwrap();
        assert_eq!(control.receive().unwrap().1.len(), 2);
    }

    #[test]
    fn another_version_is_named_even_with_unknown_fields() {
        let error = parse(br#"{"request":"start","version":99,"new":true}"#).unwrap_err();
        assert!(matches!(&error, ControlError::Version(version) if version == "99"));
        assert!(error.to_string().contains(&format!("version {VERSION}")));
    }

    #[test]
    fn garbage_is_an_error() {
        for packet in ["", "null", "{", r#"{"request":"fly"}"#] {
            assert!(matches!(parse(packet.as_bytes()), Err(ControlError::Packet(_))), "{packet}");
        }
    }

    #[test]
    fn a_report_fits_in_a_packet() {
        let console = "\u{1}".repeat(64 * 1024);
        let report = Message::Report { console, counters: Counters::default() };
        assert!(encode(&report).unwrap().len() <= MAX_PACKET);
        let console = "é".repeat(CONSOLE_IN_REPORT);
        let report = Message::Report { console, counters: Counters::default() };
        let packet = encode(&report).unwrap();
        assert!(packet.len() > CONSOLE_IN_REPORT && packet.len() < 2 * CONSOLE_IN_REPORT);
    }
}
