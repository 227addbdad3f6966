//! The threads that own the virtio devices.
//!
//! Each device has a [`Worker`]; [`serve`] runs one or several on a thread. Devices whose work is short share
//! a thread, because each thread costs a boot half a millisecond (its system call filter).
//!
//! The transport sends it commands; kicks of queues and the device's own descriptor are waited for only
//! while the device is active. A device that fails is marked `NEEDS_RESET` and left alone until the driver
//! resets it; the reason goes to the console ring, once per activation, so that a hostile guest cannot make
//! the host log without bound.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::page::{RegisterPage, STATUS_NEEDS_RESET};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::devices::serial::Console;

const TOKEN_WAKE: u32 = u32::MAX;
const TOKEN_DEVICE: u32 = u32::MAX - 1;

/// What the transport tells a worker.
enum Command {
    Activate(Activation),
    /// Answered when the device no longer touches guest memory.
    Reset(SyncSender<()>),
}

/// The transport's end of a worker.
pub struct WorkerHandle {
    commands: Sender<Command>,
    wake: EventFd,
}

impl WorkerHandle {
    /// Hands the queues to the device.
    pub fn activate(&self, activation: Activation) -> io::Result<()> {
        self.send(Command::Activate(activation))
    }

    /// Takes the queues from the device; returns when it has stopped using them.
    pub fn reset(&self) -> io::Result<()> {
        let (done, wait) = sync_channel(1);
        self.send(Command::Reset(done))?;
        wait.recv().map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn send(&self, command: Command) -> io::Result<()> {
        self.commands.send(command).map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.wake.write(1)
    }
}

/// The state of the thread.
pub struct Worker {
    device: Box<dyn VirtioDevice>,
    commands: Receiver<Command>,
    wake: EventFd,
    kicks: Arc<[EventFd]>,
    page: Arc<RegisterPage>,
    interrupt: Interrupt,
    console: Console,
    active: bool,
    device_fd: Option<RawFd>,
    /// The transport is gone: the VM has ended.
    orphaned: bool,
}

impl Worker {
    /// A worker for `device`; `kicks` holds one eventfd for each queue.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        kicks: Arc<[EventFd]>,
        page: Arc<RegisterPage>,
        interrupt: Interrupt,
        console: Console,
    ) -> io::Result<(Self, WorkerHandle)> {
        let (sender, commands) = channel();
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let handle = WorkerHandle { commands: sender, wake: wake.try_clone()? };
        let worker = Self {
            device,
            commands,
            wake,
            kicks,
            page,
            interrupt,
            console,
            active: false,
            device_fd: None,
            orphaned: false,
        };
        Ok((worker, handle))
    }

    fn command(&mut self, ops: &mut EventOps<'_>) {
        // Non-blocking; the counter only wakes, the channel says what is to be done.
        let _ = self.wake.read();
        loop {
            match self.commands.try_recv() {
                Ok(Command::Activate(activation)) => {
                    if let Err(error) = self.activate(activation, ops) {
                        self.fail(&error, ops);
                    }
                }
                Ok(Command::Reset(done)) => {
                    self.deactivate(ops);
                    self.device.reset();
                    // The transport waits; it cannot be gone.
                    let _ = done.send(());
                }
                Err(std::sync::mpsc::TryRecvError::Empty) => return,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                    self.orphaned = true;
                    return;
                }
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
        // A kick from before now is still in the counter, so none is lost.
        for (kick, token) in self.kicks.iter().zip(0..) {
            ops.add(Events::with_data(kick, token, EventSet::IN)).map_err(epoll_error)?;
        }
        if let Some(fd) = self.device.poll_fd() {
            ops.add(Events::with_data_raw(fd, TOKEN_DEVICE, EventSet::IN)).map_err(epoll_error)?;
            self.device_fd = Some(fd);
        }
        Ok(())
    }

    fn deactivate(&mut self, ops: &mut EventOps<'_>) {
        for kick in self.kicks.iter() {
            if self.active {
                // They were added at activation, or activation failed half-way.
                let _ = ops.remove(Events::empty(kick));
            }
            let _ = kick.read();
        }
        if let Some(fd) = self.device_fd.take() {
            let _ = ops.remove(Events::empty_raw(fd));
        }
        self.active = false;
    }

    fn fail(&mut self, error: &DeviceError, ops: &mut EventOps<'_>) {
        self.deactivate(ops);
        // Writing to the ring cannot fail.
        let kind = self.device.device_type();
        let _ = writeln!(self.console, "casulo-vmm: virtio device of type {kind} failed: {error}");
        self.page.update_status(|status| status | STATUS_NEEDS_RESET);
        let _ = self.interrupt.signal_config();
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
                self.command(ops);
                return;
            }
            // Failed or reset by an earlier event of the same round.
            _ if !self.active => return,
            TOKEN_DEVICE => self.device.poll_event(),
            token => {
                let queue = usize::try_from(token).unwrap_or(usize::MAX);
                if let Some(kick) = self.kicks.get(queue) {
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
