//! A parent of `casulo-vmm` for tests and benches that boot a Linux guest of their own.

#![allow(dead_code, unreachable_pub, reason = "each user needs its part")]

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use casulo_protocol::vmm::{DiskConfig, MAX_PACKET, Message, Request, VERSION, VmConfig};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Pid, Signal, kill_process};

/// What a guest is made of.
pub struct Guest<'a> {
    /// `casulo-vmm`.
    pub vmm: &'a Path,
    /// The kernel.
    pub kernel: &'a Path,
    /// An erofs file whose `/init` is process 1.
    pub volume: &'a Path,
    /// Number of vCPUs.
    pub cpus: u8,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Ports of the host that the guest may dial.
    pub listen: Vec<u32>,
}

/// A running `casulo-vmm`; dropping it kills it.
pub struct Parent {
    child: Child,
    socket: OwnedFd,
}

impl Parent {
    /// Starts the guest.
    pub fn start(guest: &Guest<'_>) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let child = Command::new(guest.vmm).stdin(Stdio::from(theirs)).spawn()?;
        let parent = Self { child, socket };
        let config = VmConfig {
            version: VERSION,
            cpus: guest.cpus,
            memory_mib: guest.memory_mib,
            kvm_fd: 0,
            kernel_fd: 1,
            proc_fd: 2,
            cmdline: "console=ttyS0 quiet reboot=k panic=-1 root=/dev/vda rootfstype=erofs ro \
                init=/init"
                .into(),
            init_args: Vec::new(),
            disks: vec![DiskConfig { fd: 3, read_only: true }],
            shares: Vec::new(),
            listen: guest.listen.clone(),
        };
        let descriptors: [OwnedFd; 4] = [
            File::options().read(true).write(true).open("/dev/kvm")?.into(),
            File::open(guest.kernel)?.into(),
            File::open("/proc")?.into(),
            File::open(guest.volume)?.into(),
        ];
        let descriptors = descriptors.each_ref().map(AsFd::as_fd);
        let packet = serde_json::to_vec(&Request::Start(config))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&parent.socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)?;
        match parent.receive()? {
            (Message::Started, _) => Ok(parent),
            (other, _) => Err(io::Error::other(format!("the VM did not start: {other:?}"))),
        }
    }

    /// Process id of the VMM.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the VMM.
    pub fn kill(&self) {
        // The child is not reaped before `drop`, so the id is still its own.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Asks for something.
    pub fn request(&self, request: &Request) -> io::Result<()> {
        let packet = serde_json::to_vec(request)?;
        let mut none = SendAncillaryBuffer::default();
        sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut none, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits for the next message, and the stream beside it. What happens in shares, of which these
    /// guests have none, is passed over.
    pub fn receive(&self) -> io::Result<(Message, Option<UnixStream>)> {
        loop {
            match self.next()? {
                (Message::Files { .. }, _) => {}
                other => return Ok(other),
            }
        }
    }

    fn next(&self) -> io::Result<(Message, Option<UnixStream>)> {
        let mut buffer = vec![0; MAX_PACKET];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let count =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags)?.bytes;
        let stream = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut list) => list.next().map(UnixStream::from),
            _ => None,
        });
        let packet = buffer.get(..count).unwrap_or_default();
        if packet.is_empty() {
            return Err(io::Error::other("the VMM ended without a word"));
        }
        Ok((serde_json::from_slice(packet)?, stream))
    }

    /// Opens a connection, for whom nothing else goes on meanwhile. A guest that does not listen yet
    /// refuses.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        self.request(&Request::Connect { id: 0, port })?;
        match self.receive()? {
            (Message::Connected { .. }, Some(stream)) => Ok(stream),
            (Message::Refused { error, .. }, _) => {
                Err(io::Error::new(io::ErrorKind::ConnectionRefused, error))
            }
            (other, _) => Err(io::Error::other(format!("not connected: {other:?}"))),
        }
    }

    /// The guest's console, for whom nothing else goes on meanwhile.
    pub fn console(&self) -> io::Result<String> {
        self.request(&Request::Report)?;
        match self.receive()? {
            (Message::Report { console, .. }, _) => Ok(console),
            (other, _) => Err(io::Error::other(format!("no report: {other:?}"))),
        }
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
