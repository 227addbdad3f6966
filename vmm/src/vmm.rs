//! The life of a VMM: wait for the parent's word, build, serve until the guest or the parent ends.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Instant;

use casulo_protocol::vmm::{Counters, ExitReason, Message, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::MachineConfig;
use crate::control::{Control, ControlError, ParentWatch};
use crate::devices::virtio::vsock::VsockEvent;
use crate::halt::{self, HaltWatch};
use crate::vm::Vm;

/// Bytes of the console that come with the end of the guest.
const CONSOLE_AT_END: usize = 16 * 1024;

/// Serves one VM; returns when the process is to end. An error means that the parent is gone or broke the
/// protocol.
pub fn run(control: &mut Control, began: Instant) -> Result<(), ControlError> {
    let vm = match start(control)? {
        Ok(vm) => vm,
        Err(failed) => return control.send(&failed, None),
    };
    let build_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    if control.is_closed() {
        return Err(ControlError::Closed);
    }
    control.send(&Message::Started, None)?;
    vm.start();
    serve(control, &vm, build_us)
}

/// Receives the first request and builds the VM; the inner error is the answer to send.
fn start(control: &mut Control) -> Result<Result<Vm, Message>, ControlError> {
    let (config, descriptors) = match control.receive() {
        Ok((Request::Start(config), descriptors)) => (config, descriptors),
        Ok((other, _)) => {
            return Ok(Err(failed("protocol", &format!("{other:?} before the start of the VM"))));
        }
        Err(error @ ControlError::Version(_)) => return Ok(Err(failed("version", &error))),
        Err(error @ ControlError::Packet(_)) => return Ok(Err(failed("protocol", &error))),
        Err(error) => return Err(error),
    };
    let watch = ParentWatch::start(control)?;
    let built = MachineConfig::from_request(config, descriptors).and_then(MachineConfig::build);
    // No thread outside of the jail is left when the guest starts.
    watch.end();
    Ok(built.map_err(|error| failed(error.phase(), &error)))
}

fn failed(phase: &str, error: &dyn std::fmt::Display) -> Message {
    Message::Failed { phase: phase.to_owned(), error: error.to_string() }
}

fn serve(control: &mut Control, vm: &Vm, build_us: u64) -> Result<(), ControlError> {
    let mut halt = HaltWatch::new(vm);
    let period = Timespec::try_from(halt::PERIOD).map_err(std::io::Error::other)?;
    loop {
        let mut fds = [
            PollFd::new(&*control, PollFlags::IN),
            PollFd::from_borrowed_fd(vm.ended_fd(), PollFlags::IN),
            PollFd::new(&vm.vsock_events, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&period)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(std::io::Error::from(error).into()),
        }
        let [asked, ended, connected] = fds.map(|fd| !fd.revents().is_empty());
        let end = if ended { vm.try_wait() } else { None };
        let halted = || halt.look(vm).map(|vcpu| vm.end(ExitReason::Halted, Some(vcpu)));
        if let Some(end) = end.or_else(halted) {
            tell_files(control, vm)?;
            let console = vm.console.tail(CONSOLE_AT_END);
            let message = Message::Exited { end, console, counters: counters(vm, build_us) };
            return control.send(&message, None);
        }
        if connected {
            while let Some(event) = vm.vsock_events.next() {
                tell(control, event)?;
            }
        }
        if asked {
            answer(control, vm, build_us)?;
        }
    }
}

/// Passes on a connection.
fn tell(control: &Control, event: VsockEvent) -> Result<(), ControlError> {
    match event {
        VsockEvent::Connected { id, stream } => {
            control.send(&Message::Connected { id }, Some(stream.as_fd()))
        }
        VsockEvent::Refused { id, error } => control.send(&Message::Refused { id, error }, None),
        VsockEvent::Accepted { port, stream } => {
            control.send(&Message::Accepted { port }, Some(stream.as_fd()))
        }
    }
}

fn answer(control: &mut Control, vm: &Vm, build_us: u64) -> Result<(), ControlError> {
    let (request, descriptors): (Request, Vec<OwnedFd>) = control.receive()?;
    drop(descriptors);
    match request {
        Request::Report => {
            let console = vm.console.tail(CONSOLE_AT_END);
            control.send(&Message::Report { console, counters: counters(vm, build_us) }, None)
        }
        Request::Files => tell_files(control, vm),
        Request::Diagnose => control.send(&Message::Diagnosis(vm.diagnose()), None),
        Request::Connect { id, port } => vm.vsock.connect(id, port).map_err(ControlError::Io),
        Request::Listen { port } => vm.vsock.listen(port).map_err(ControlError::Io),
        Request::Start(_) => Err(ControlError::Packet("a VM is started once".into())),
    }
}

/// Tells which files the guest has read and written.
fn tell_files(control: &Control, vm: &Vm) -> Result<(), ControlError> {
    vm.files.parts().into_iter().try_for_each(|part| control.send(&part, None))
}

fn counters(vm: &Vm, build_us: u64) -> Counters {
    let exits = vm.exits();
    let mut counters = Counters {
        build_us,
        exits: exits.all,
        mmio_exits: exits.mmio,
        pio_exits: exits.pio,
        ..Counters::default()
    };
    counters.limit_hit = vm.limit_hit.load(Ordering::Relaxed);
    let usage = usage();
    counters.page_faults = u64::try_from(usage.ru_minflt).unwrap_or(0);
    counters.max_rss_kib = u64::try_from(usage.ru_maxrss).unwrap_or(0);
    counters
}

fn usage() -> libc::rusage {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one rusage to a place of that size; it cannot fail for this process.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: it was zeroed, and every bit pattern is a value.
    unsafe { usage.assume_init() }
}
