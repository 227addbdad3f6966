//! From the kernel's `execve` of process 1 to an agent that listens.
//!
//! 1. [`root`]: mounts the layers and the writable layer, and makes them the root file system, with
//!    the kernel's file systems, the cgroup of the workload and the loopback interface.
//! 2. Dials the host and says Hello. A template is taken here: nothing before depends on the task.
//! 3. While the host answers, prepares what needs no answer.
//! 4. [`personal`]: applies the answer: entropy, clock, name, limits, shares.
//! 5. Says Ready and serves.
//!
//! A failure before 2 is told on the console and the machine is reset, so that the VMM sees an
//! orderly end; a failure after it is told to the host.

pub mod personal;
pub mod root;
mod sys;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use casulo_protocol::agent::{
    BOOT_PORT, Hello, MAX_LINE, MCP_PORT, Personalise, Personalised, STREAM_PORT, VERSION,
};
use serde::Serialize;
use tokio::runtime::Runtime;
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener, VsockStream};

use crate::exec::cgroup::Cgroups;
use crate::reaper::Reaper;
use crate::shares::Shares;

/// A step of the boot that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {error}")]
pub struct BootError {
    /// What was to be done.
    pub what: String,
    /// Why it failed.
    pub error: io::Error,
}

pub(crate) fn step<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> BootError {
    move |error| BootError { what: what.into(), error: error.into() }
}

/// What the kernel passes on from behind `--` on its command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootArguments {
    /// Number of image layers, 1 to 24: /dev/vdb and so on, the lowest first.
    pub layers: u8,
    /// Whether the disk behind the last layer takes the writable layer.
    pub scratch: bool,
    /// Whether to print the time of each step on the console.
    pub trace: bool,
}

impl BootArguments {
    /// Reads the arguments. Words that are none of ours are the kernel's business.
    ///
    /// # Errors
    /// No sensible number of layers.
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Self, BootError> {
        let mut arguments = Self::default();
        for word in words {
            match word.as_str() {
                "scratch" => arguments.scratch = true,
                "trace" => arguments.trace = true,
                _ => {
                    if let Some(number) = word.strip_prefix("layers=") {
                        arguments.layers = number.parse().unwrap_or(0);
                    }
                }
            }
        }
        if (1..=24).contains(&arguments.layers) {
            Ok(arguments)
        } else {
            let error = io::Error::other("layers=N with N from 1 to 24 is missing");
            Err(step("understand the kernel command line")(error))
        }
    }
}

/// Times of the steps of the boot.
#[derive(Debug, Default)]
pub struct Trace(Vec<(&'static str, u64)>);

impl Trace {
    /// Notes that a step is done.
    pub fn mark(&mut self, step: &'static str) {
        self.0.push((step, sys::uptime_us()));
    }

    fn print(&self) {
        for (step, time) in &self.0 {
            say(&format!("{time:>9} us  {step}"));
        }
    }
}

/// What process 1 has when the boot is over.
pub struct Booted {
    /// The rest.
    pub prepared: Prepared,
    /// Kept open for the life of the VM.
    pub boot_channel: VsockStream,
    /// Where commands are put.
    pub cgroups: Cgroups,
}

/// What serving needs.
pub struct Prepared {
    /// Listens on [`MCP_PORT`].
    pub mcp: VsockListener,
    /// Listens on [`STREAM_PORT`].
    pub streams: VsockListener,
    /// What to flush after each command.
    pub shares: Shares,
    /// Tells of dead children.
    pub signals: OwnedFd,
    /// The event loop.
    pub runtime: Runtime,
}

/// Boots. On failure the host has been told if it could be.
///
/// # Errors
/// A step failed.
pub fn boot(arguments: BootArguments) -> Result<Booted, BootError> {
    let started_us = sys::uptime_us();
    let mut trace = Trace::default();
    trace.mark("agent runs");
    root::make(arguments, &mut trace)?;
    sys::loopback_up().map_err(step("bring up the loopback interface"))?;
    trace.mark("loopback is up");
    let cgroups = Cgroups::prepare(Path::new("/sys/fs/cgroup"), "workload")
        .map_err(step("make the cgroup of the workload"))?;
    trace.mark("cgroup is made");

    let mut channel = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, BOOT_PORT)
        .map_err(step("dial the host"))?;
    let hello = Hello {
        protocol: VERSION,
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        started_us,
        dialled_us: sys::uptime_us(),
    };
    say_line(&mut channel, &hello).map_err(step("greet the host"))?;
    trace.mark("host is greeted");

    match prepare(&mut channel, &cgroups, &mut trace) {
        Ok(prepared) => {
            let ready = Personalised::Ready { ready_us: sys::uptime_us() };
            say_line(&mut channel, &ready)
                .map_err(step("tell the host that the agent is ready"))?;
            trace.mark("host knows that we are ready");
            if arguments.trace {
                trace.print();
            }
            Ok(Booted { prepared, boot_channel: channel, cgroups })
        }
        Err(error) => {
            // Best effort: the console gets it in any case. Then the host ends the VM; a reset at
            // once could overtake the line, which the kernel sends in its own time.
            let _ = say_line(&mut channel, &Personalised::Failed { error: error.to_string() });
            let _ = channel.set_read_timeout(Some(Duration::from_secs(2)));
            let _ = io::Read::read(&mut channel, &mut [0]);
            Err(error)
        }
    }
}

/// What is between Hello and Ready.
fn prepare(
    channel: &mut VsockStream,
    cgroups: &Cgroups,
    trace: &mut Trace,
) -> Result<Prepared, BootError> {
    // While the host answers.
    let listen = |port| {
        VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port)
            .map_err(step(format!("listen on port {port}")))
    };
    let (mcp, streams) = (listen(MCP_PORT)?, listen(STREAM_PORT)?);
    let signals = Reaper::signals().map_err(step("watch for dead children"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .thread_stack_size(256 << 10)
        .build()
        .map_err(step("start the event loop"))?;
    trace.mark("the rest is prepared");

    let line = read_line(channel).map_err(step("hear the host"))?;
    let personalise: Personalise = serde_json::from_slice(&line)
        .map_err(|e| step("understand the host")(io::Error::other(e)))?;
    trace.mark("host has answered");
    if personalise.protocol != VERSION {
        let theirs = personalise.protocol;
        return Err(step("work with this host")(io::Error::other(format!(
            "it speaks version {theirs} of the agent protocol, the agent speaks {VERSION}"
        ))));
    }
    let shares = personal::apply(&personalise, cgroups, trace)?;
    Ok(Prepared { mcp, streams, shares, signals, runtime })
}

fn say_line(channel: &mut impl io::Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    channel.write_all(&line)
}

/// Reads a line of at most [`MAX_LINE`] bytes, without what ends it.
fn read_line(channel: &mut impl io::Read) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let length = match channel.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            length => length?,
        };
        let new = buffer.get(..length).unwrap_or_default();
        // The host says one line and then waits, so nothing can be behind it.
        if let Some(end) = new.iter().position(|b| *b == b'\n') {
            line.extend_from_slice(new.get(..end).unwrap_or_default());
            return Ok(line);
        }
        line.extend_from_slice(new);
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if line.len() > MAX_LINE {
            return Err(io::Error::other("the line is too long"));
        }
    }
}

/// Says something on the console.
pub fn say(message: &str) {
    let line = format!("casulo-agent: {message}\n");
    if io::Write::write_all(&mut io::stderr(), line.as_bytes()).is_err() {
        let _ = std::fs::write("/dev/kmsg", line);
    }
}

/// Says why on the console and resets the machine. For process 1 only.
pub fn give_up(why: &str) -> ! {
    say(why);
    let error = rustix::system::reboot(rustix::system::RebootCommand::Restart);
    say(&format!("cannot reset the machine: {error:?}"));
    // The kernel panics when process 1 ends, and `panic=-1` resets too.
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<BootArguments> {
        BootArguments::parse(line.split(' ').map(str::to_owned)).ok()
    }

    #[test]
    fn arguments_are_the_number_of_layers_and_flags() {
        let plain = BootArguments { layers: 2, ..BootArguments::default() };
        assert_eq!(parse("layers=2"), Some(plain));
        assert_eq!(parse("foo layers=2 scratch"), Some(BootArguments { scratch: true, ..plain }));
        for bad in ["", "layers=0", "layers=25", "layers=-1", "layers=", "layers=999"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_line_is_read_to_its_end_and_no_further_than_its_limit() {
        assert_eq!(read_line(&mut &b"abc\n"[..]).unwrap(), b"abc");
        assert!(read_line(&mut &b"abc"[..]).is_err());
        assert!(read_line(&mut &vec![b'a'; MAX_LINE + 5000][..]).is_err());
    }
}
