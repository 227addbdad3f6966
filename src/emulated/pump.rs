//! Runs the job in the emulated machine and carries its bytes, as process 1.
//!
//! One thread for each direction, all blocking: a reader that waits is how back-pressure reaches
//! the writer, through the pipe, the port and QEMU's socket. Closing an output is told on the
//! control port and ends the pipe's reader, so that the job gets SIGPIPE as it would natively.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use casulo_protocol::stream::{Channel, Decoder, Frame, HEADER, data_header};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Gid, Pid, Resource, Rlimit, Signal, Uid, WaitOptions};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use super::guest::display;
use super::job::GuestJob;

/// The driver of the port takes 32 KiB at a time: a frame that fits goes out in one piece.
const FRAME: usize = 32 * 1024;
/// How long the other side may take to end this machine after the last frame.
const LINGER: Duration = Duration::from_secs(10);

/// Writing end of the data port, a frame at a time.
#[derive(Clone)]
struct Port(Arc<Mutex<File>>);

impl Port {
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes)
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.write(&bytes)
    }
}

/// A started job and this side of its stdin, stdout and stderr.
struct Started {
    pid: Pid,
    input: File,
    outputs: Vec<(Channel, File)>,
    terminal: Option<OwnedFd>,
}

/// Runs the job to its end and reports it.
pub(super) fn run(job: &GuestJob, data: File, control: File) -> io::Result<()> {
    let input_port = data.try_clone()?;
    let port = Port(Arc::new(Mutex::new(data)));
    let started = match start(job) {
        Ok(started) => started,
        Err(error) => return refuse(job, &port, &error),
    };
    port.send(&Frame::Open(0))?;

    let mut closers: Vec<(Channel, PipeWriter)> = Vec::new();
    let mut readers: Vec<JoinHandle<io::Result<()>>> = Vec::new();
    for (channel, source) in started.outputs {
        let (closed, closer) = io::pipe()?;
        closers.push((channel, closer));
        let port = port.clone();
        readers.push(std::thread::spawn(move || carry_output(channel, source, &closed, &port)));
    }
    let input = started.input;
    std::thread::spawn(move || carry_input(input_port, input));
    let (pid, terminal) = (started.pid, started.terminal);
    std::thread::spawn(move || obey(control, pid, terminal, closers));

    let status = wait_for(pid)?;
    // What the job left behind ends with it, and with that its outputs end.
    // ESRCH: there was nothing left.
    let _ = rustix::process::kill_process_group(Pid::INIT, Signal::KILL);
    for reader in readers {
        match reader.join() {
            Ok(carried) => carried?,
            Err(_) => return Err(io::Error::other("an output thread panicked")),
        }
    }
    rustix::fs::sync();
    port.send(&Frame::Exit(status))?;
    // The other side ends QEMU now.
    std::thread::sleep(LINGER);
    Ok(())
}

/// Reports a job that could not be started the way a shell does.
fn refuse(job: &GuestJob, port: &Port, error: &io::Error) -> io::Result<()> {
    let program = job.argv.first().map(super::job::Bytes::to_os).unwrap_or_default();
    let code: u32 = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    let message = format!("casulo: cannot run {}: {error}\n", display(&program));
    port.send(&Frame::Open(0))?;
    port.send(&Frame::Data(Channel::Stderr, message.into_bytes()))?;
    port.send(&Frame::Exit(code << 8))?;
    std::thread::sleep(LINGER);
    Ok(())
}

fn start(job: &GuestJob) -> io::Result<Started> {
    let mut words = job.argv.iter().map(super::job::Bytes::to_os);
    let program = words.next().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(words).env_clear().current_dir(job.cwd.to_path());
    for (key, value) in &job.env {
        command.env(key.to_os(), value.to_os());
    }
    let (uid, gid) = (Uid::from_raw(job.uid), Gid::from_raw(job.gid));
    let groups: Vec<Gid> = job.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let (soft, hard) = job.open_files;
    let umask = rustix::fs::Mode::from_bits_truncate(job.umask);
    let has_terminal = job.terminal.is_some();
    let prepare = move || -> io::Result<()> {
        rustix::process::setsid()?;
        if has_terminal {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        rustix::process::umask(umask);
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: soft, maximum: hard })?;
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only; it neither allocates nor
    // takes a lock.
    unsafe { command.pre_exec(prepare) };
    match job.terminal {
        Some((rows, columns)) => start_in_terminal(command, rows, columns, uid),
        None => start_with_pipes(command),
    }
}

fn pid_of(child: &std::process::Child) -> io::Result<Pid> {
    let raw = i32::try_from(child.id()).map_err(io::Error::other)?;
    Pid::from_raw(raw).ok_or_else(|| io::Error::other("the job has no process id"))
}

fn start_with_pipes(mut command: Command) -> io::Result<Started> {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let missing = || io::Error::other("the job has no pipes");
    let input = OwnedFd::from(child.stdin.take().ok_or_else(missing)?);
    let stdout = OwnedFd::from(child.stdout.take().ok_or_else(missing)?);
    let stderr = OwnedFd::from(child.stderr.take().ok_or_else(missing)?);
    Ok(Started {
        pid: pid_of(&child)?,
        input: input.into(),
        outputs: vec![(Channel::Stdout, stdout.into()), (Channel::Stderr, stderr.into())],
        terminal: None,
    })
}

fn start_in_terminal(
    mut command: Command,
    rows: u16,
    columns: u16,
    owner: Uid,
) -> io::Result<Started> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    resize(&master, rows, columns)?;
    let name = OsString::from_vec(rustix::pty::ptsname(&master, Vec::new())?.into_bytes());
    let slave = OpenOptions::new().read(true).write(true).open(name)?;
    rustix::fs::fchown(&slave, Some(owner), None)?;
    let child = command
        .stdin(Stdio::from(slave.try_clone()?))
        .stdout(Stdio::from(slave.try_clone()?))
        .stderr(Stdio::from(slave))
        .spawn()?;
    // The command still holds the terminal's other end, which must go for the output to end.
    drop(command);
    Ok(Started {
        pid: pid_of(&child)?,
        input: master.try_clone()?.into(),
        outputs: vec![(Channel::Stdout, master.try_clone()?.into())],
        terminal: Some(master),
    })
}

fn resize(terminal: impl AsFd, rows: u16, columns: u16) -> rustix::io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size)
}

/// Reaps every child; gives the job's wait status when it is its turn.
fn wait_for(job: Pid) -> io::Result<u32> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == job => return Ok(status.as_raw().cast_unsigned()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends what comes from the job, until its end or until the other side wants no more.
fn carry_output(
    channel: Channel,
    mut source: File,
    closed: &PipeReader,
    port: &Port,
) -> io::Result<()> {
    let mut frame = vec![0; FRAME];
    loop {
        let mut fds = [PollFd::new(&source, PollFlags::IN), PollFd::new(closed, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        if fds.last().is_some_and(|fd| !fd.revents().is_empty()) {
            return Ok(());
        }
        let Some(payload) = frame.get_mut(HEADER..) else { return Ok(()) };
        let length = match source.read(payload) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // A terminal whose other end nobody holds reads as EIO.
            Err(_) => break,
        };
        let head = data_header(channel, length).map_err(io::Error::other)?;
        if let Some(place) = frame.first_chunk_mut::<HEADER>() {
            *place = head;
        }
        port.write(frame.get(..HEADER + length).unwrap_or_default())?;
    }
    port.send(&Frame::End(channel))
}

/// Reads whole frames from a port until it ends.
fn frames(mut port: File, mut take: impl FnMut(Frame)) {
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; FRAME];
    while let Ok(length @ 1..) = port.read(&mut buffer) {
        decoder.feed(buffer.get(..length).unwrap_or_default());
        while let Ok(Some(frame)) = decoder.next_frame() {
            take(frame);
        }
    }
}

/// Gives the job its stdin. What it does not want any more is thrown away.
fn carry_input(port: File, input: File) {
    let mut input = Some(input);
    frames(port, |frame| match frame {
        Frame::Data(Channel::Stdin, bytes) => {
            // `take_if` closes the pipe of a job that does not read it any more.
            input.take_if(|file| file.write_all(&bytes).is_err());
        }
        Frame::End(Channel::Stdin) => input = None,
        _ => {}
    });
}

/// Does what the control port says.
fn obey(port: File, job: Pid, terminal: Option<OwnedFd>, mut closers: Vec<(Channel, PipeWriter)>) {
    frames(port, |frame| match frame {
        Frame::Signal(number) => {
            let signal = i32::try_from(number).ok().and_then(Signal::from_named_raw);
            if let Some(signal) = signal {
                // The job may have ended meanwhile.
                let _ = rustix::process::kill_process_group(job, signal);
            }
        }
        Frame::WindowSize(rows, columns) => {
            if let Some(terminal) = &terminal {
                let _ = resize(terminal, rows, columns);
            }
        }
        Frame::Reset(channel) => closers.retain(|(c, _)| *c != channel),
        _ => {}
    });
}
