//! The device: queues and configuration space around the [`Server`].
//!
//! Queue 0 has priority (the driver sends FORGETs there), queue 1 takes all other requests. A chain of
//! descriptors is one request: what the driver lets us read, then where the reply goes.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::{GuestMemoryBackend, VolatileSlice};

use super::server::Server;
use super::{FsError, Record, Share};
use crate::devices::virtio::chain::Chain;
use crate::devices::virtio::queue::Virtqueue;
use crate::devices::virtio::{Activation, DeviceError, GuestMemory, VirtioDevice};

/// `VIRTIO_ID_FS`
const DEVICE_ID: u32 = 26;
/// Bytes of the tag in the configuration space.
const TAG_SIZE: usize = 36;
/// Sizes of the queues. The guest's kernel makes requests as large as fit into the second one: 512
/// lets it use all of the 256 pages that the server takes.
const QUEUE_SIZES: [u16; 2] = [64, 512];
/// Most descriptors of one request, a request and its reply of 1 MiB in pages and some more.
const MAX_DESCRIPTORS: usize = 1024;

/// The virtio-fs device of a VM.
pub struct FsDevice {
    config: Vec<u8>,
    server: Server,
    active: Option<Activation>,
}

impl FsDevice {
    /// A device with the given tag, by which the guest mounts it, and shares. `proc_fd` is an `O_PATH`
    /// descriptor of `/proc`. Sets the umask of the process to 0.
    ///
    /// # Errors
    /// See [`FsError`].
    pub fn new(tag: &str, shares: Vec<Share>, proc_fd: OwnedFd) -> Result<Self, FsError> {
        if tag.is_empty() || tag.len() > TAG_SIZE {
            return Err(FsError::Tag(tag.to_owned()));
        }
        let mut config = tag.as_bytes().to_vec();
        config.resize(TAG_SIZE, 0);
        // Request queues beside the one with priority.
        config.extend_from_slice(&1_u32.to_le_bytes());
        Ok(Self { config, server: Server::new(shares, proc_fd)?, active: None })
    }

    /// Becomes true when the guest met the limit of a share, or the host's disk was full.
    #[must_use]
    pub fn limit_hit(&self) -> Arc<AtomicBool> {
        self.server.limit_hit()
    }

    /// Which files the guest reads and writes.
    #[must_use]
    pub fn record(&self) -> Arc<Record> {
        self.server.record()
    }
}

impl VirtioDevice for FsDevice {
    fn device_type(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> Vec<u16> {
        QUEUE_SIZES.to_vec()
    }

    fn config(&self) -> Vec<u8> {
        self.config.clone()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        if activation.queues.len() != QUEUE_SIZES.len() {
            return Err(DeviceError::Driver("a file system has two queues".to_owned()));
        }
        self.active = Some(activation);
        Ok(())
    }

    fn queue_event(&mut self, queue: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let memory = active.memory.as_ref();
        let Some(queue) = active.queues.get_mut(queue) else {
            return Err(DeviceError::Driver(format!("queue {queue} does not exist")));
        };
        let server = &mut self.server;
        queue.serve(memory, &active.interrupt, |chain| {
            let written = match slices(memory, chain)? {
                Some((request, reply)) => server.handle(&request, &reply),
                None => 0,
            };
            // A reply has at most `MAX_DATA` and a header.
            Ok(u32::try_from(written).unwrap_or(u32::MAX))
        })
    }

    fn reset(&mut self) {
        self.active = None;
        self.server.reset();
    }

    fn queues(&self) -> Vec<&Virtqueue> {
        self.active.iter().flat_map(|active| &active.queues).collect()
    }

    fn save(&self) -> Result<serde_json::Value, DeviceError> {
        // Nodes are the host's files: they cannot be saved, so the guest unmounts first.
        if self.server.is_mounted() {
            return Err(DeviceError::State("the guest has the shares mounted".to_owned()));
        }
        Ok(serde_json::Value::Null)
    }

    fn restore(&mut self, state: serde_json::Value) -> Result<(), DeviceError> {
        if !state.is_null() {
            return Err(DeviceError::State("a file system has no state of its own".to_owned()));
        }
        self.server.reset();
        Ok(())
    }
}

/// Slices of guest memory: what to read, and where to write.
type Slices<'a> = (Vec<VolatileSlice<'a>>, Vec<VolatileSlice<'a>>);

/// The memory of a chain; `None` if it breaks a rule for which the driver is not given up: too many
/// descriptors, or something to read behind something to write.
fn slices<'a>(
    memory: &'a GuestMemory,
    chain: Chain<'_>,
) -> Result<Option<Slices<'a>>, DeviceError> {
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    for (count, descriptor) in chain.enumerate() {
        let descriptor = descriptor?;
        let readable = !descriptor.is_write_only();
        if count >= MAX_DESCRIPTORS || (readable && !reply.is_empty()) {
            return Ok(None);
        }
        let size = descriptor.len() as usize;
        let list = if readable { &mut request } else { &mut reply };
        for slice in memory.get_slices(descriptor.addr(), size) {
            list.push(slice?);
        }
    }
    Ok(Some((request, reply)))
}
