//! How the rest of the process talks to the device: commands in, events out.
//!
//! Both ways are a channel and an eventfd that says that there is something in it, so that either side
//! can wait for it in an epoll set.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use rustix::event::{EventfdFlags, eventfd};

/// Most connections of the guest that wait in [`VsockEvents`]; more are reset. It bounds the
/// descriptors that a guest can make the process hold while nobody takes them.
pub const BACKLOG: usize = 128;

/// What the device is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    Connect { id: u64, port: u32 },
    Listen { port: u32 },
}

/// What the device tells.
#[derive(Debug)]
pub enum VsockEvent {
    /// The guest accepted; this is the connected stream (in blocking mode).
    Connected {
        /// From [`VsockHandle::connect`].
        id: u64,
        /// One end of a UNIX stream socket pair.
        stream: OwnedFd,
    },
    /// The guest refused the connection or did not answer in time.
    Refused {
        /// From [`VsockHandle::connect`].
        id: u64,
        /// One sentence.
        error: String,
    },
    /// The guest dialled a registered port; this is the connected stream (in blocking mode).
    Accepted {
        /// From [`VsockHandle::listen`].
        port: u32,
        /// One end of a UNIX stream socket pair.
        stream: OwnedFd,
    },
}

/// Gives commands to the device, from any thread.
#[derive(Clone, Debug)]
pub struct VsockHandle {
    sender: Sender<Command>,
    wake: Wake,
}

impl VsockHandle {
    /// Opens a connection to a port of the guest. The answer is [`VsockEvent::Connected`] or
    /// [`VsockEvent::Refused`] with this `id`. A connection asked for before the guest has a driver
    /// waits for it.
    ///
    /// # Errors
    /// The device is gone.
    pub fn connect(&self, id: u64, port: u32) -> io::Result<()> {
        self.send(Command::Connect { id, port })
    }

    /// Lets the guest dial this port of the host from now on; each connection becomes
    /// [`VsockEvent::Accepted`].
    ///
    /// # Errors
    /// The device is gone.
    pub fn listen(&self, port: u32) -> io::Result<()> {
        self.send(Command::Listen { port })
    }

    fn send(&self, command: Command) -> io::Result<()> {
        self.sender.send(command).map_err(|_| io::Error::other("the vsock device is gone"))?;
        self.wake.set();
        Ok(())
    }
}

/// The device's end of the commands.
#[derive(Debug)]
pub(super) struct Commands {
    receiver: Receiver<Command>,
    wake: Wake,
}

impl Commands {
    /// The next command, if there is one.
    pub(super) fn next(&self) -> Option<Command> {
        self.receiver.try_recv().ok()
    }

    /// Makes the descriptor unreadable; to be called before [`Commands::next`].
    pub(super) fn clear(&self) {
        self.wake.clear();
    }

    /// Makes the descriptor readable, for the device to come back to itself.
    pub(super) fn wake(&self) {
        self.wake.set();
    }
}

impl AsFd for Commands {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.0.as_fd()
    }
}

/// Takes what the device tells.
#[derive(Debug)]
pub struct VsockEvents {
    receiver: Receiver<VsockEvent>,
    wake: Wake,
    waiting: Arc<AtomicUsize>,
}

impl VsockEvents {
    /// The next event, if there is one. Wait for the descriptor ([`AsFd`]) to be readable, then call
    /// this until it gives `None`.
    #[must_use]
    pub fn next(&self) -> Option<VsockEvent> {
        let event = self.receiver.try_recv().or_else(|_| {
            // Empty, so clear the wake-up; look again for what came in between.
            self.wake.clear();
            self.receiver.try_recv()
        });
        let event = event.ok()?;
        if matches!(event, VsockEvent::Accepted { .. }) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        Some(event)
    }
}

impl AsFd for VsockEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.0.as_fd()
    }
}

/// The device's end of the events.
#[derive(Debug)]
pub(super) struct EventSender {
    sender: Sender<VsockEvent>,
    wake: Wake,
    waiting: Arc<AtomicUsize>,
}

impl EventSender {
    /// Whether one more connection of the guest may wait.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < BACKLOG
    }

    /// Tells an event. Nobody may be left to hear it: then its stream closes.
    pub(super) fn send(&self, event: VsockEvent) {
        let accepted = matches!(event, VsockEvent::Accepted { .. });
        if accepted {
            self.waiting.fetch_add(1, Ordering::Relaxed);
        }
        if self.sender.send(event).is_ok() {
            self.wake.set();
        }
    }
}

/// All four ends.
pub(super) fn channels() -> io::Result<(VsockHandle, Commands, EventSender, VsockEvents)> {
    let (commands, command_receiver) = mpsc::channel();
    let (events, event_receiver) = mpsc::channel();
    let (command_wake, event_wake) = (Wake::new()?, Wake::new()?);
    let waiting = Arc::new(AtomicUsize::new(0));
    Ok((
        VsockHandle { sender: commands, wake: command_wake.clone() },
        Commands { receiver: command_receiver, wake: command_wake },
        EventSender { sender: events, wake: event_wake.clone(), waiting: waiting.clone() },
        VsockEvents { receiver: event_receiver, wake: event_wake, waiting },
    ))
}

/// An eventfd as a flag.
#[derive(Clone, Debug)]
struct Wake(Arc<OwnedFd>);

impl Wake {
    fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(fd)))
    }

    fn set(&self) {
        // The only failure is a full counter, and then the flag is set.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        // The only failure is that the flag is clear.
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn readable(fd: &impl AsFd) -> bool {
        poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn commands_wake_the_device() {
        let (handle, commands, _sender, _events) = channels().unwrap();
        assert!(!readable(&commands));
        handle.connect(7, 80).unwrap();
        handle.clone().listen(81).unwrap();
        assert!(readable(&commands));
        commands.clear();
        assert!(!readable(&commands));
        assert!(matches!(commands.next(), Some(Command::Connect { id: 7, port: 80 })));
        assert!(matches!(commands.next(), Some(Command::Listen { port: 81 })));
        assert!(commands.next().is_none());
        drop(commands);
        assert!(handle.listen(82).is_err());
    }

    #[test]
    fn events_wake_the_owner_until_taken() {
        let (_handle, _commands, sender, events) = channels().unwrap();
        sender.send(VsockEvent::Refused { id: 1, error: "no".into() });
        sender.send(VsockEvent::Refused { id: 2, error: "no".into() });
        assert!(readable(&events));
        assert!(matches!(events.next(), Some(VsockEvent::Refused { id: 1, .. })));
        assert!(readable(&events));
        assert!(matches!(events.next(), Some(VsockEvent::Refused { id: 2, .. })));
        assert!(events.next().is_none());
        assert!(!readable(&events));
    }

    #[test]
    fn the_backlog_counts_what_nobody_took() {
        let (_handle, _commands, sender, events) = channels().unwrap();
        let stream = || crate::devices::virtio::vsock::socket::Socket::pair().unwrap().1;
        for _ in 0..BACKLOG {
            assert!(sender.has_room());
            sender.send(VsockEvent::Accepted { port: 1, stream: stream() });
        }
        assert!(!sender.has_room());
        assert!(events.next().is_some());
        assert!(sender.has_room());
    }
}
