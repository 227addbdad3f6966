//! This machine's side of a job in the emulated host.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use casulo_protocol::stream::{Channel, Decoder, Frame, HEADER, data_header};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PidfdFlags, Signal};
use signal_hook::SigId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGWINCH};

use super::console::Console;
use super::job::GuestJob;
use super::terminal::{self, RawMode};
use super::{EmulatedError, Job, Machine, initrd, qemu, system};

/// How long the job may take to heed a signal before the machine is ended.
const GRACE: Duration = Duration::from_secs(10);
const BUFFER: usize = 64 * 1024;

/// Ends QEMU whichever way [`run`] is left.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a job in an emulated machine, with this process's stdin, stdout and stderr, and gives its
/// exit status.
///
/// Blocks the calling thread until the job has ended. Meanwhile SIGINT, SIGTERM, SIGHUP and SIGQUIT
/// to this process are passed on to the job; a second one, or a job that does not end within ten
/// seconds, ends the machine.
///
/// # Errors
/// The machine cannot be started, does not start the job in time, or ends before it.
pub fn run(job: &Job, machine: &Machine) -> Result<ExitStatus, EmulatedError> {
    let kernel = machine.files.join("vmlinuz");
    let modules = machine.files.join("modules.cpio");
    for file in [&kernel, &modules] {
        if !file.is_file() {
            return Err(EmulatedError::NotInstalled(file.clone()));
        }
    }
    let size = job.terminal.then(|| terminal::size().unwrap_or((24, 80)));
    let guest = GuestJob::new(job, size)?;
    let initrd = system("put the initial file system together", initrd::build(&modules, &guest))?;
    let qemu = qemu::start(machine, &kernel, initrd, &guest.exports)?;
    let started = Instant::now();
    let mut console = Console::new(qemu.console);
    let child = KillOnDrop(qemu.child);

    let (stop, stopper) = system("make a pipe", io::pipe())?;
    let control = Control(Arc::new(Mutex::new(File::from(qemu.control))));
    let signals = Signals::watch(&child.0, control.clone(), &stop, job.terminal)?;
    let raw = if job.terminal { RawMode::enter() } else { None };
    let input_socket = system("copy a descriptor", qemu.data.try_clone())?;
    let input_stop = system("copy a descriptor", stop.try_clone())?;
    let input = std::thread::spawn(move || send_input(input_socket, &input_stop));

    let deadline = started + machine.boot_timeout;
    let end = receive(qemu.data, &control, deadline);
    drop(stopper);
    drop(raw);
    drop(child);
    // It has been told to stop and cannot panic.
    let _ = input.join();
    let interrupted = signals.finish();
    match end {
        End::Exit(status) => Ok(ExitStatus::from_raw(status.cast_signed())),
        _ if interrupted != 0 => Err(EmulatedError::Interrupted(interrupted)),
        End::TooLate => Err(EmulatedError::BootTimeout {
            after: machine.boot_timeout,
            console: console.last_lines(),
        }),
        End::Closed => Err(EmulatedError::Died { console: console.last_lines() }),
        End::Broken(error) => {
            Err(EmulatedError::System { what: "understand the emulated machine", error })
        }
    }
}

/// How the data port ended.
enum End {
    Exit(u32),
    Closed,
    TooLate,
    Broken(io::Error),
}

/// The control port, written to by several threads.
#[derive(Clone)]
struct Control(Arc<Mutex<File>>);

impl Control {
    fn send(&self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        // It fails when the machine has ended; whoever waits for the data port learns that.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&bytes);
    }
}

/// Waits until `fd` is readable, or until the deadline: then `false`.
fn wait_readable(fd: BorrowedFd<'_>, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let timeout = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes what comes from the job until its exit status comes.
fn receive(socket: OwnedFd, control: &Control, deadline: Instant) -> End {
    let mut socket = File::from(socket);
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; BUFFER];
    let mut outputs = Outputs::new();
    let mut open = false;
    loop {
        match wait_readable(socket.as_fd(), (!open).then_some(deadline)) {
            Ok(true) => {}
            Ok(false) => return End::TooLate,
            Err(error) => return End::Broken(error),
        }
        match socket.read(&mut buffer) {
            Ok(length @ 1..) => decoder.feed(buffer.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // ECONNRESET: QEMU ended with bytes of ours unread.
            _ => return End::Closed,
        }
        loop {
            match decoder.next_frame() {
                Ok(Some(Frame::Open(_))) => open = true,
                Ok(Some(Frame::Data(channel, bytes))) => outputs.write(channel, &bytes, control),
                Ok(Some(Frame::Exit(status))) => return End::Exit(status),
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => return End::Broken(io::Error::other(error)),
            }
        }
    }
}

/// This process's stdout and stderr, without buffers; `None` when nobody reads it any more.
struct Outputs {
    stdout: Option<File>,
    stderr: Option<File>,
}

impl Outputs {
    fn new() -> Self {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().ok().map(File::from);
        Self { stdout: copy(rustix::stdio::stdout()), stderr: copy(rustix::stdio::stderr()) }
    }

    fn write(&mut self, channel: Channel, bytes: &[u8], control: &Control) {
        let output = match channel {
            Channel::Stdout => &mut self.stdout,
            Channel::Stderr => &mut self.stderr,
            Channel::Stdin => return,
        };
        let Some(file) = output else { return };
        if write_all(file, bytes).is_err() {
            // The reader is gone: the job shall learn it, as it would from a pipe.
            *output = None;
            control.send(&Frame::Reset(channel));
        }
    }
}

/// `write_all` that also waits on a descriptor that somebody made non-blocking (a terminal shared
/// with another program).
fn write_all(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = bytes.get(length..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                rustix::event::poll(&mut [PollFd::new(&*file, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends this process's stdin, until its end or until `stop` is closed.
fn send_input(socket: OwnedFd, stop: &PipeReader) {
    let mut socket = File::from(socket);
    let mut frame = vec![0; BUFFER];
    let stdin = rustix::stdio::stdin();
    loop {
        let mut fds = [PollFd::new(&stdin, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        if fds.last().is_some_and(|fd| !fd.revents().is_empty()) {
            return;
        }
        let Some(payload) = frame.get_mut(HEADER..) else { return };
        let length = match rustix::io::read(stdin, payload) {
            Ok(length) => length,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => continue,
            Err(_) => 0,
        };
        if length == 0 {
            let mut end = Vec::new();
            Frame::End(Channel::Stdin).encode(&mut end);
            let _ = socket.write_all(&end);
            return;
        }
        let (Ok(head), Some(place)) =
            (data_header(Channel::Stdin, length), frame.first_chunk_mut::<HEADER>())
        else {
            return;
        };
        *place = head;
        if socket.write_all(frame.get(..HEADER + length).unwrap_or_default()).is_err() {
            return;
        }
    }
}

/// Passes this process's signals on to the job for as long as it runs.
struct Signals {
    registered: Vec<SigId>,
    thread: JoinHandle<()>,
    /// The signal that ended the machine, 0 for none.
    fatal: Arc<AtomicI32>,
}

impl Signals {
    fn watch(
        qemu: &Child,
        control: Control,
        stop: &PipeReader,
        has_terminal: bool,
    ) -> Result<Self, EmulatedError> {
        const WHAT: &str = "watch for signals";
        let pid = i32::try_from(qemu.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = system(WHAT, pid.ok_or(io::ErrorKind::InvalidInput))?;
        let qemu = system(WHAT, rustix::process::pidfd_open(pid, PidfdFlags::empty()))?;
        let mut wanted = vec![SIGINT, SIGTERM, SIGHUP, SIGQUIT];
        if has_terminal {
            wanted.push(SIGWINCH);
        }
        let mut registered = Vec::new();
        let mut sources = Vec::new();
        for signal in wanted {
            let (source, writer) = system(WHAT, UnixStream::pair())?;
            registered.push(system(WHAT, signal_hook::low_level::pipe::register(signal, writer))?);
            sources.push((signal, source));
        }
        let fatal = Arc::new(AtomicI32::new(0));
        let shared = Arc::clone(&fatal);
        let stop = system(WHAT, stop.try_clone())?;
        let thread = std::thread::spawn(move || {
            let number = pass_signals(&mut sources, &stop, &control);
            if number != 0 {
                shared.store(number, Ordering::Relaxed);
                // It may have ended just now.
                let _ = rustix::process::pidfd_send_signal(qemu, Signal::KILL);
            }
        });
        Ok(Self { registered, thread, fatal })
    }

    /// Ends the watch; gives the signal that ended the machine, or 0.
    fn finish(self) -> i32 {
        for id in self.registered {
            signal_hook::low_level::unregister(id);
        }
        // It has been told to stop and cannot panic.
        let _ = self.thread.join();
        self.fatal.load(Ordering::Relaxed)
    }
}

/// Passes signals on until `stop` closes (0), or until one has to end the machine (its number).
fn pass_signals(sources: &mut [(i32, UnixStream)], stop: &PipeReader, control: &Control) -> i32 {
    let mut first: Option<(i32, Instant)> = None;
    loop {
        let timeout = first.map(|(_, at)| (at + GRACE).saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().map(|(_, s)| PollFd::new(s, PollFlags::IN)).collect();
        fds.push(PollFd::new(stop, PollFlags::IN));
        match (rustix::event::poll(&mut fds, timeout.as_ref()), first) {
            (Ok(0), Some((signal, _))) => return signal,
            (Ok(_), _) => {}
            (Err(rustix::io::Errno::INTR), _) => continue,
            (Err(_), _) => return 0,
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.last() == Some(&true) {
            return 0;
        }
        for ((signal, source), ready) in sources.iter_mut().zip(ready) {
            if !ready || source.read(&mut [0; 64]).is_err() {
                continue;
            }
            if *signal == SIGWINCH {
                if let Some((rows, columns)) = terminal::size() {
                    control.send(&Frame::WindowSize(rows, columns));
                }
                continue;
            }
            if first.is_some() {
                return *signal;
            }
            first = Some((*signal, Instant::now()));
            control.send(&Frame::Signal(signal.unsigned_abs()));
        }
    }
}
