//! Control messages between `casulo` and `casulo-vmm`.
//!
//! One `SOCK_SEQPACKET` socket pair, inherited by the VMM as descriptor [`CONTROL_FD`], its standard
//! input; standard output is `/dev/null`, standard error a pipe for its last words. Each packet is
//! one JSON value of at most [`MAX_PACKET`] bytes; descriptors travel beside it (`SCM_RIGHTS`). The
//! parent sends [`Request`]s, the VMM sends [`Message`]s. The first request is [`Request::Start`]; a
//! VMM whose control socket closes ends at once.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::machine::{
    AccessKind, DeviceState, Diagnosis, ExitReason, GuestEnd, Registers, UnknownAccess, VcpuState,
};

/// Version of this protocol; both sides refuse another one by name.
pub const VERSION: u32 = 2;

/// Descriptor number of the control socket in the VMM: standard input, because that is the one
/// descriptor which every way to spawn a process passes on without unsafe code in the parent.
pub const CONTROL_FD: i32 = 0;

/// Largest control packet in bytes.
pub const MAX_PACKET: usize = 64 * 1024;

/// Most descriptors beside one packet (the kernel's own limit, `SCM_MAX_FD`, is 253).
pub const MAX_FDS: usize = 64;

/// Most files of which a VMM tells what the guest did with them ([`Message::Files`]).
pub const MAX_FILES: usize = 4096;

/// The guest's vsock CID in every VM; the host is 2.
pub const GUEST_CID: u64 = 3;

/// What one microVM is made of. Descriptors are indices into the list sent beside the packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// Number of vCPUs, 1 to 32.
    pub cpus: u8,
    /// Guest memory in MiB, at least 32.
    pub memory_mib: u32,
    /// `/dev/kvm`, opened read-write.
    pub kvm_fd: usize,
    /// An uncompressed ELF `vmlinux`, opened read-only.
    pub kernel_fd: usize,
    /// `/proc`, opened `O_PATH`: the file server reopens its own descriptors through it.
    pub proc_fd: usize,
    /// Kernel command line without the devices, which the VMM appends before any `--`.
    pub cmdline: String,
    /// Arguments of process 1; they follow `--` on the command line.
    pub init_args: Vec<String>,
    /// Disks in the order in which the guest sees them: `vda`, `vdb`, …
    pub disks: Vec<DiskConfig>,
    /// Shares, the children of the root of the one virtio-fs device. Empty: no such device.
    pub shares: Vec<ShareConfig>,
    /// Ports to which the guest may dial, before any [`Request::Listen`].
    pub listen: Vec<u32>,
}

/// One virtio-blk disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// A regular file; its size, rounded down to 512 bytes, is the capacity.
    pub fd: usize,
    /// Whether the device offers `VIRTIO_BLK_F_RO` and refuses writes.
    pub read_only: bool,
}

/// One share of the virtio-fs device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// Name of the child of the synthetic root: 1 to 64 of `A-Za-z0-9_-`.
    pub name: String,
    /// The folder or regular file, opened `O_PATH`.
    pub fd: usize,
    /// Whether every change is refused (`EROFS`) by the file server.
    pub read_only: bool,
    /// Most bytes the guest may add, counted in allocated blocks; `None`: no limit of its own.
    pub limit_bytes: Option<u64>,
    /// Most names (files, folders, links) the guest may add; `None`: no limit of its own.
    pub limit_files: Option<u64>,
    /// Whether the host promises that nothing else changes the share, so that the guest may cache
    /// names, attributes, listings and pages without asking again.
    pub cache: bool,
    /// Whether extended attributes `user.*` of the host's files are shown, and may be changed where the
    /// share may.
    pub xattr: bool,
    /// User and group in the guest that own everything in the share.
    pub guest_uid: u32,
    /// See `guest_uid`.
    pub guest_gid: u32,
}

/// What the parent asks of a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Builds and starts the microVM. Answered by [`Message::Started`] or [`Message::Failed`].
    Start(VmConfig),
    /// Connects to a port of the guest. Answered by [`Message::Connected`] with one descriptor, or
    /// [`Message::Refused`]; `id` comes back in the answer.
    Connect {
        /// Chosen by the parent.
        id: u64,
        /// Port in the guest.
        port: u32,
    },
    /// Lets the guest dial a port of the host; its connections arrive as [`Message::Accepted`].
    Listen {
        /// Port on the host.
        port: u32,
    },
    /// Asks for the console ring and the counters; answered by [`Message::Report`].
    Report,
    /// Asks which files of the shares the guest has read and written; answered by one or more
    /// [`Message::Files`].
    Files,
    /// Asks where a guest stands that does not do what it should; answered by [`Message::Diagnosis`].
    /// Stops each vCPU for a moment.
    Diagnose,
}

/// What a VMM tells its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// The vCPUs are about to run.
    Started,
    /// The VM could not be built or started; the VMM ends after this.
    Failed {
        /// Step that failed, such as `kernel`, `memory` or `kvm`.
        phase: String,
        /// One sentence: what failed and why.
        error: String,
    },
    /// The guest accepted; one stream descriptor lies beside this packet.
    Connected {
        /// From the request.
        id: u64,
    },
    /// The guest refused the connection or did not answer in time.
    Refused {
        /// From the request.
        id: u64,
        /// One sentence.
        error: String,
    },
    /// The guest dialled a registered port; one stream descriptor lies beside this packet.
    Accepted {
        /// Port on the host.
        port: u32,
    },
    /// Answer to [`Request::Report`].
    Report {
        /// Last bytes of the guest's console (at most 64 KiB; at most 16 KiB are sent), lossy.
        console: String,
        /// Counters so far.
        counters: Counters,
    },
    /// A part of the answer to [`Request::Files`]; unasked before [`Message::Exited`], so that the
    /// record outlives the guest.
    Files {
        /// At most [`MAX_FILES`] in all parts, in the order in which the guest first opened them.
        files: Vec<FileUse>,
        /// How often a file was opened that is not among them, because the record was full.
        left_out: u64,
        /// Whether another part follows.
        more: bool,
    },
    /// Answer to [`Request::Diagnose`].
    Diagnosis(Diagnosis),
    /// The guest ended; the VMM ends after this.
    Exited {
        /// Why, and where the guest was.
        end: GuestEnd,
        /// Last lines of the console, lossy.
        console: String,
        /// Counters at the end.
        counters: Counters,
    },
}

/// What the guest has done with one file of a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileUse {
    /// Name of the share.
    pub share: String,
    /// Path in the share when the file was first opened under it; bytes that are not UTF-8 are
    /// replaced. Empty if the share is this one file.
    pub path: String,
    /// Bytes that the guest has fetched. Its kernel reads ahead, and reads again from its cache without
    /// asking: so this may be more or less than its programs have read.
    pub read: u64,
    /// Bytes that the guest has written.
    pub written: u64,
    /// Whether the guest made it, wrote to it or changed its size.
    pub changed: bool,
}

/// Which files of the shares a guest has read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// At most [`MAX_FILES`], in the order in which they were first opened.
    pub files: Vec<FileUse>,
    /// How often others were opened, for which the record had no room.
    pub left_out: u64,
}

/// What the VM has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Counters {
    /// Returns from `KVM_RUN`, all vCPUs.
    pub exits: u64,
    /// Of these: MMIO accesses.
    pub mmio_exits: u64,
    /// Of these: port accesses.
    pub pio_exits: u64,
    /// Minor page faults of the VMM process, guest memory included.
    pub page_faults: u64,
    /// Most resident memory of the VMM process in KiB, guest memory included.
    pub max_rss_kib: u64,
    /// Microseconds from the start of the VMM process until the VM was built.
    pub build_us: u64,
    /// Whether the guest met the limit of a share, or a full disk or quota of the host below one.
    pub limit_hit: bool,
}
