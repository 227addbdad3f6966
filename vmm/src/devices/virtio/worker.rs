//! The threads that own the virtio devices.
//!
//! Each device has a [`Worker`]; [`serve`] runs one or several on a thread. Devices whose work is short share
//! a thread, because each thread costs a boot half a millisecond (its system call filter).
//!
//! The transport sends it commands; kicks of queues and the device's own descriptor are waited for only
//! while the device is active and not paused. A device that fails is marked `NEEDS_RESET` and forgets its
//! driver; nothing but a reset by the driver brings it back.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::page::{RegisterPage, STATUS_NEEDS_RESET};
use super::queue::Position;
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::devices::serial::Console;

const TOKEN_WAKE: u32 = u32::MAX;
const TOKEN_DEVICE: u32 = u32::MAX - 1;

/// Complaints of one device that reach the console. The guest can cause more, as often as it likes.
const MOST_COMPLAINTS: u32 = 32;
/// Longest wait for a device to pause, save or restore: it may be in a call to a slow host.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the two ends of a device share: its transport, which vCPU threads call, and its worker.
#[derive(Debug)]
pub(super) struct Shared {
    /// Names the device in the log.
    pub name: String,
    pub page: Arc<RegisterPage>,
    pub interrupt: Interrupt,
    /// One for each queue.
    pub kicks: Arc<[EventFd]>,
    pub console: Console,
    pub complaints: AtomicU32,
    /// How often the device has looked at a queue; for a diagnosis.
    pub rounds: AtomicU64,
}

impl Shared {
    /// Says on the console what the driver did, as long as it is not too often.
    pub(super) fn complain(&self, what: &dyn std::fmt::Display) {
        let count = self.complaints.fetch_add(1, Ordering::Relaxed);
        let mut console = self.console.clone();
        // Writing to the ring cannot fail.
        let _ = match count {
            0..MOST_COMPLAINTS => writeln!(console, "casulo-vmm: {}: {what}", self.name),
            MOST_COMPLAINTS => writeln!(console, "casulo-vmm: {}: and so on", self.name),
            _ => {
                self.complaints.store(MOST_COMPLAINTS + 1, Ordering::Relaxed);
                Ok(())
            }
        };
    }

    /// Marks the device as broken.
    pub(super) fn fail(&self, why: &dyn std::fmt::Display) {
        self.complain(&format_args!("needs a reset by its driver: {why}"));
        self.page.update_status(|status| status | STATUS_NEEDS_RESET);
        let _ = self.interrupt.signal_config();
    }
}

/// What a worker saves of its device.
#[derive(Debug)]
pub(super) struct Saved {
    pub device: serde_json::Value,
    /// Of each queue, if the device is active.
    pub positions: Vec<Position>,
}

/// What the transport tells a worker.
enum Command {
    Activate(Activation),
    /// Answered when the device no longer touches guest memory; the status register is 0 then.
    Reset(SyncSender<()>),
    Pause(SyncSender<Result<(), DeviceError>>),
    Resume(SyncSender<Result<(), DeviceError>>),
    Save(SyncSender<Result<Saved, DeviceError>>),
    Restore(Box<(serde_json::Value, Option<Activation>)>, SyncSender<Result<(), DeviceError>>),
}

/// The transport's end of a worker.
#[derive(Debug)]
pub(super) struct WorkerHandle {
    commands: Sender<Command>,
    wake: EventFd,
}

impl WorkerHandle {
    /// Hands the queues to the device.
    pub(super) fn activate(&self, activation: Activation) -> io::Result<()> {
        self.send(Command::Activate(activation))
    }

    /// Takes the queues from the device, which has stopped using them when there is something to receive, or
    /// nobody to send it.
    pub(super) fn reset(&self) -> io::Result<Receiver<()>> {
        let (done, wait) = sync_channel(1);
        self.send(Command::Reset(done))?;
        Ok(wait)
    }

    pub(super) fn pause(&self) -> Result<(), DeviceError> {
        self.ask(Command::Pause)
    }

    pub(super) fn resume(&self) -> Result<(), DeviceError> {
        self.ask(Command::Resume)
    }

    pub(super) fn save(&self) -> Result<Saved, DeviceError> {
        self.ask(Command::Save)
    }

    pub(super) fn restore(
        &self,
        state: serde_json::Value,
        activation: Option<Activation>,
    ) -> Result<(), DeviceError> {
        self.ask(|done| Command::Restore(Box::new((state, activation)), done))
    }

    fn ask<T>(
        &self,
        command: impl FnOnce(SyncSender<Result<T, DeviceError>>) -> Command,
    ) -> Result<T, DeviceError> {
        let (done, wait) = sync_channel(1);
        self.send(command(done))?;
        let late = |_| {
            let what = "the device waits for the host (a slow disk or file system?)";
            DeviceError::Io(io::Error::new(io::ErrorKind::TimedOut, what))
        };
        wait.recv_timeout(PATIENCE).map_err(late)?
    }

    fn send(&self, command: Command) -> io::Result<()> {
        self.commands.send(command).map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.wake.write(1)
    }
}

/// A device on its thread.
pub struct Worker {
    device: Box<dyn VirtioDevice>,
    commands: Receiver<Command>,
    wake: EventFd,
    shared: Arc<Shared>,
    active: bool,
    paused: bool,
    /// Whether kicks are waited for.
    listening: bool,
    device_fd: Option<RawFd>,
    /// The transport is gone: the VM has ended.
    orphaned: bool,
}

impl Worker {
    pub(super) fn new(
        device: Box<dyn VirtioDevice>,
        shared: Arc<Shared>,
    ) -> io::Result<(Self, WorkerHandle)> {
        let (sender, commands) = channel();
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let handle = WorkerHandle { commands: sender, wake: wake.try_clone()? };
        let worker = Self {
            device,
            commands,
            wake,
            shared,
            active: false,
            paused: false,
            listening: false,
            device_fd: None,
            orphaned: false,
        };
        Ok((worker, handle))
    }

    fn commands(&mut self, ops: &mut EventOps<'_>) {
        // Non-blocking; the counter only wakes, the channel says what is to be done.
        let _ = self.wake.read();
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.command(command, ops),
                Err(std::sync::mpsc::TryRecvError::Empty) => return,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                    self.orphaned = true;
                    return;
                }
            }
        }
    }

    /// Carries out a command. The one that sent it may have stopped waiting for the answer.
    fn command(&mut self, command: Command, ops: &mut EventOps<'_>) {
        match command {
            Command::Activate(activation) => {
                if let Err(error) = self.activate(activation, ops) {
                    self.fail(&error, ops);
                }
            }
            Command::Reset(done) => {
                self.deactivate(ops);
                self.shared.page.set_active(false);
                // Together: a driver that sees a status of 0 finds a transport that knows why.
                self.shared.page.update_status(|_| {
                    let _ = done.send(());
                    0
                });
            }
            Command::Pause(done) => {
                self.unlisten(ops);
                self.paused = true;
                let _ = done.send(if self.active { self.device.pause() } else { Ok(()) });
            }
            Command::Resume(done) => {
                self.paused = false;
                let result = if self.active { self.resume(ops) } else { Ok(()) };
                let _ = done.send(result);
            }
            Command::Save(done) => {
                let queues = self.device.queues();
                let positions = queues.into_iter().map(|queue| queue.position()).collect();
                let saved = self.device.save().map(|device| Saved { device, positions });
                let _ = done.send(saved);
            }
            Command::Restore(what, done) => {
                let (state, activation) = *what;
                let result = self.device.restore(state).and_then(|()| match activation {
                    Some(activation) => self.activate(activation, ops),
                    None => Ok(()),
                });
                let _ = done.send(result);
            }
        }
    }

    fn activate(
        &mut self,
        activation: Activation,
        ops: &mut EventOps<'_>,
    ) -> Result<(), DeviceError> {
        self.device.activate(activation)?;
        self.active = true;
        if self.paused { Ok(()) } else { self.listen(ops) }
    }

    fn resume(&mut self, ops: &mut EventOps<'_>) -> Result<(), DeviceError> {
        self.device.resume()?;
        self.listen(ops)
    }

    fn listen(&mut self, ops: &mut EventOps<'_>) -> Result<(), DeviceError> {
        self.listening = true;
        // A kick from before now is still in the counter, so none is lost.
        for (kick, token) in self.shared.kicks.iter().zip(0..) {
            ops.add(Events::with_data(kick, token, EventSet::IN)).map_err(epoll_error)?;
        }
        if let Some(fd) = self.device.poll_fd() {
            ops.add(Events::with_data_raw(fd, TOKEN_DEVICE, EventSet::IN)).map_err(epoll_error)?;
            self.device_fd = Some(fd);
        }
        Ok(())
    }

    fn unlisten(&mut self, ops: &mut EventOps<'_>) {
        if std::mem::take(&mut self.listening) {
            for kick in self.shared.kicks.iter() {
                // Fails for those that could not be added.
                let _ = ops.remove(Events::empty(kick));
            }
        }
        if let Some(fd) = self.device_fd.take() {
            let _ = ops.remove(Events::empty_raw(fd));
        }
    }

    fn deactivate(&mut self, ops: &mut EventOps<'_>) {
        self.unlisten(ops);
        for kick in self.shared.kicks.iter() {
            let _ = kick.read();
        }
        self.active = false;
        self.device.reset();
    }

    fn fail(&mut self, error: &DeviceError, ops: &mut EventOps<'_>) {
        self.deactivate(ops);
        self.shared.fail(error);
    }
}

/// Serves devices on the calling thread until the transport of one is gone.
pub fn serve(workers: Vec<Worker>) -> Result<(), event_manager::Error> {
    let mut manager = EventManager::new_with_capacity(8)?;
    let mut ids = Vec::with_capacity(workers.len());
    for worker in workers {
        ids.push(manager.add_subscriber(worker));
    }
    loop {
        for id in &ids {
            if manager.subscriber_mut(*id)?.orphaned {
                return Ok(());
            }
        }
        manager.run()?;
    }
}

fn epoll_error(error: event_manager::Error) -> DeviceError {
    DeviceError::Io(io::Error::other(error.to_string()))
}

impl MutEventSubscriber for Worker {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let result = match events.data() {
            TOKEN_WAKE => {
                self.commands(ops);
                return;
            }
            // Failed, reset or paused by an earlier event of the same round; a kick stays in its counter.
            _ if !self.listening => return,
            TOKEN_DEVICE => self.device.poll_event(),
            token => {
                self.shared.rounds.fetch_add(1, Ordering::Relaxed);
                let queue = usize::try_from(token).unwrap_or(usize::MAX);
                if let Some(kick) = self.shared.kicks.get(queue) {
                    let _ = kick.read();
                }
                self.device.queue_event(queue)
            }
        };
        if let Err(error) = result {
            self.fail(&error, ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        debug_assert!(self.wake.as_raw_fd() >= 0);
        if ops.add(Events::with_data(&self.wake, TOKEN_WAKE, EventSet::IN)).is_err() {
            // Without its wake-up the thread is of no use; the transport sees the closed channel.
            self.orphaned = true;
        }
    }
}
