//! Plays the parent of the real `casulo-vmm`, with guests of a few hand-written instructions.
//!
//! Such guests run on any KVM, also on one that cannot run a Linux kernel.

#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests"
)]

pub mod code;

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub use code::{AVAIL, CODE, Code, USED};

use casulo_protocol::vmm::{CONTROL_FD, Message, Request, VERSION, VmConfig};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};

/// Longest that anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whether `/dev/kvm` can be opened; says so when not.
pub fn has_kvm() -> bool {
    let found = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if !found {
        eprintln!("no access to /dev/kvm: not tested");
    }
    found
}

/// The code as a kernel.
pub fn elf(code: Code) -> OwnedFd {
    kernel_file(&code.elf())
}

/// A file of these bytes.
pub fn kernel_file(bytes: &[u8]) -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.into()
}

/// A small VM; descriptors 0 to 2 are those of [`descriptors`].
pub fn config() -> VmConfig {
    VmConfig {
        version: VERSION,
        cpus: 1,
        memory_mib: 32,
        kvm_fd: 0,
        kernel_fd: 1,
        proc_fd: 2,
        cmdline: "quiet".into(),
        init_args: Vec::new(),
        disks: Vec::new(),
        shares: Vec::new(),
        listen: Vec::new(),
    }
}

/// KVM, the kernel and `/proc`.
pub fn descriptors(kernel: OwnedFd) -> Vec<OwnedFd> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm").unwrap();
    vec![kvm.into(), kernel, File::open("/proc").unwrap().into()]
}

/// A running `casulo-vmm`.
pub struct Vmm {
    pub child: Child,
    pub socket: Option<OwnedFd>,
}

impl Vmm {
    pub fn spawn() -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        assert_eq!(CONTROL_FD, 0);
        let child = Command::new(env!("CARGO_BIN_EXE_casulo-vmm"))
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        let patience = Some(PATIENCE);
        rustix::net::sockopt::set_socket_timeout(
            &ours,
            rustix::net::sockopt::Timeout::Recv,
            patience,
        )
        .unwrap();
        Self { child, socket: Some(ours) }
    }

    /// Starts a VM that runs this code.
    pub fn start(config: VmConfig, code: Code) -> Self {
        Self::start_with(config, code, Vec::new())
    }

    /// Starts a VM with more descriptors, from number 3 on.
    pub fn start_with(config: VmConfig, code: Code, more: Vec<OwnedFd>) -> Self {
        let vmm = Self::spawn();
        let mut all = descriptors(elf(code));
        all.extend(more);
        vmm.request(&Request::Start(config), &all);
        assert_eq!(vmm.receive(), Some(Message::Started));
        vmm
    }

    pub fn request(&self, request: &Request, fds: &[OwnedFd]) {
        self.packet(&serde_json::to_vec(request).unwrap(), fds);
    }

    pub fn packet(&self, packet: &[u8], fds: &[OwnedFd]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let socket = self.socket.as_ref().unwrap();
        sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    }

    /// The next message; `None` when the VMM closed the socket. What the guest did to its shares is passed
    /// over: these guests have none.
    pub fn receive(&self) -> Option<Message> {
        let mut buffer = vec![0; casulo_protocol::vmm::MAX_PACKET];
        loop {
            let (count, _) =
                recv(self.socket.as_ref().unwrap(), &mut buffer, RecvFlags::empty()).unwrap();
            let message = (count > 0).then(|| serde_json::from_slice(&buffer[..count]).unwrap());
            if !matches!(message, Some(Message::Files { .. })) {
                return message;
            }
        }
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "casulo-vmm does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.socket = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
