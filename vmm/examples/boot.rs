//! Boots a kernel in `casulo-vmm`, playing the parent, and prints the console and the counters.
//!
//! For work on the VMM itself:
//! `boot KERNEL [--memory MIB] [--cpus N] [--disk FILE]... [--until TEXT] [--cmdline TEXT]`
//! waits until the console holds TEXT, the guest ends, or a minute is over.

use std::error::Error;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use casulo_protocol::vmm::{
    CONTROL_FD, DiskConfig, MAX_PACKET, Message, Request, VERSION, VmConfig,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let kernel = arguments.next().ok_or("usage: boot KERNEL [options]")?;
    let mut cmdline =
        "console=ttyS0 reboot=k panic=-1 root=/dev/vda rootfstype=erofs ro init=/init".to_owned();
    let (mut memory_mib, mut cpus, mut until) = (128, 1, "Run /init as init process".to_owned());
    let mut descriptors: Vec<OwnedFd> = vec![
        File::options().read(true).write(true).open("/dev/kvm")?.into(),
        File::open(kernel)?.into(),
        File::open("/proc")?.into(),
    ];
    let mut disks = Vec::new();
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or("an option lacks its value")?;
        match option.as_str() {
            "--memory" => memory_mib = value.parse()?,
            "--cpus" => cpus = value.parse()?,
            "--until" => until = value,
            "--cmdline" => cmdline = value,
            "--disk" => {
                disks.push(DiskConfig { fd: descriptors.len(), read_only: true });
                descriptors.push(File::open(value)?.into());
            }
            other => return Err(format!("unknown option {other}").into()),
        }
    }
    let config = VmConfig {
        version: VERSION,
        cpus,
        memory_mib,
        kvm_fd: 0,
        kernel_fd: 1,
        proc_fd: 2,
        cmdline,
        init_args: vec!["layers=0".into()],
        disks,
        shares: Vec::new(),
        listen: vec![casulo_protocol::agent::BOOT_PORT],
    };

    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let vmm = std::env::current_exe()?.with_file_name("../casulo-vmm");
    let mut command = Command::new(vmm);
    let raw = theirs.as_raw_fd();
    let inherit = move || {
        // SAFETY: dup2 is async-signal-safe and touches only the descriptors of the child.
        match unsafe { libc::dup2(raw, CONTROL_FD) } {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // SAFETY: the closure calls nothing but dup2.
    unsafe { command.pre_exec(inherit) };
    let began = Instant::now();
    let mut child = command.spawn()?;
    drop(theirs);
    let spawned = began.elapsed();
    request(&ours, &Request::Start(config), &descriptors)?;
    let mut out = std::io::stdout();
    let mut first = true;
    while let Some(message) = receive(&ours)? {
        match message {
            Message::Accepted { .. } => {
                writeln!(out, "the agent dialled after {:?}", began.elapsed())?;
                until.clear();
            }
            Message::Report { console, counters } => {
                let done = console.contains(&until);
                if done || began.elapsed() > Duration::from_secs(60) {
                    writeln!(out, "{console}\n{counters:?}")?;
                    writeln!(out, "done={done} after {:?}", began.elapsed())?;
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
                request(&ours, &Request::Report, &[])?;
            }
            Message::Exited { reason, console, counters } => {
                writeln!(out, "{console}\n{counters:?}\n{reason:?} after {:?}", began.elapsed())?;
                break;
            }
            other => {
                writeln!(out, "{other:?} after {:?} (spawn {spawned:?})", began.elapsed())?;
                if first {
                    request(&ours, &Request::Report, &[])?;
                }
                first = false;
            }
        }
    }
    drop(ours);
    writeln!(out, "{} after {:?}", child.wait()?, began.elapsed())?;
    Ok(())
}

fn request(socket: &OwnedFd, request: &Request, fds: &[OwnedFd]) -> Result<(), Box<dyn Error>> {
    let packet = serde_json::to_vec(request)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(socket, &[IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(socket: &OwnedFd) -> Result<Option<Message>, Box<dyn Error>> {
    let mut buffer = vec![0; MAX_PACKET];
    let (count, _) = recv(socket, &mut buffer, RecvFlags::empty())?;
    let packet = buffer.get(..count).unwrap_or_default();
    if packet.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(packet)?))
}
