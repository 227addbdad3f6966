//! Devices of the machine, and how virtio devices are attached to it.

pub mod bus;
pub mod i8042;
pub mod serial;
pub mod virtio;

use std::num::NonZeroUsize;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::serial::Console;
use self::virtio::mmio::MmioTransport;
use self::virtio::page::register;
use self::virtio::worker::Worker;
use self::virtio::{GuestMemory, VirtioDevice};
use crate::arch::x86_64::boot::MmioDevice;
use crate::builder::BuildError;
use crate::irq::{Lines, VIRTIO_LINES};
use crate::jail::seccomp::Kind;
use crate::kvm::refused;
use crate::layout::{self, VIRTIO_SIZE};
use crate::memory::map_pages;

/// Virtio devices in their places.
pub struct Attached {
    /// The pages that the guest reads registers from.
    pub pages: Arc<MmapRegion<()>>,
    /// Where each device is, for the command line.
    pub places: Vec<MmioDevice>,
    /// The transports, in the order of their addresses.
    pub transports: Vec<MmioTransport>,
    /// The threads to start, and the devices that each serves.
    pub threads: Vec<(Kind, Vec<Worker>)>,
}

impl Attached {
    /// Attaches devices in order.
    pub fn new(
        vm: &VmFd,
        devices: Vec<(Box<dyn VirtioDevice>, Kind)>,
        memory: &Arc<GuestMemory>,
        console: &Console,
        lines: &mut Lines,
    ) -> Result<Self, BuildError> {
        let (count, most) = (devices.len(), VIRTIO_LINES.len());
        let too_many = || {
            BuildError::Config(format!(
                "{count} devices, a VM has room for {most}; use fewer disks"
            ))
        };
        let size = devices.len().max(1) * usize::try_from(VIRTIO_SIZE).unwrap_or(4096);
        let pages = map_pages(NonZeroUsize::new(size).unwrap_or(NonZeroUsize::MIN))?;
        let mut attached =
            Self { pages, places: Vec::new(), transports: Vec::new(), threads: Vec::new() };
        for (index, (device, kind)) in devices.into_iter().enumerate() {
            let irq = lines.virtio().ok_or_else(too_many)?;
            attached.attach(vm, index, device, kind, irq, memory, console)?;
        }
        Ok(attached)
    }

    #[expect(clippy::too_many_arguments, reason = "called once, with what a device is made of")]
    fn attach(
        &mut self,
        vm: &VmFd,
        index: usize,
        device: Box<dyn VirtioDevice>,
        kind: Kind,
        irq: u8,
        memory: &Arc<GuestMemory>,
        console: &Console,
    ) -> Result<(), BuildError> {
        let address = layout::virtio(index);
        let line = Arc::new(event()?);
        vm.register_irqfd(&line, irq.into()).map_err(refused("connect an interrupt"))?;
        let (transport, worker) = MmioTransport::new(
            device,
            memory.clone(),
            self.pages.clone(),
            index,
            line,
            console.clone(),
        )
        .map_err(BuildError::Device)?;
        for (kick, number) in transport.kicks().iter().zip(0u32..) {
            let place = IoEventAddress::Mmio(address + register::QUEUE_NOTIFY);
            vm.register_ioevent(kick, &place, number).map_err(refused("connect a queue"))?;
        }
        // Acknowledgements of interrupts have no effect (see the register page): they end in KVM, in a
        // counter that nobody reads.
        let sink = event()?;
        let place = IoEventAddress::Mmio(address + register::INTERRUPT_ACK);
        vm.register_ioevent(&sink, &place, NoDatamatch).map_err(refused("connect a queue"))?;
        self.places.push(MmioDevice { address, size: VIRTIO_SIZE, irq });
        self.transports.push(transport);
        match self.threads.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, workers)) => workers.push(worker),
            None => self.threads.push((kind, vec![worker])),
        }
        Ok(())
    }
}

fn event() -> Result<EventFd, BuildError> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(BuildError::Device)
}
