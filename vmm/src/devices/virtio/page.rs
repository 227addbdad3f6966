//! The registers of a virtio-mmio device as a page that the guest reads without an exit.
//!
//! All that a driver reads is ordinary memory, mapped read-only into the guest; only its writes leave
//! the guest. A boot reads some hundred registers and every interrupt reads one, so this halves the exits
//! of a device. It needs two liberties:
//!
//! * `InterruptStatus` says "used buffers" as long as the device is active, because the device must not
//!   depend on being asked. A driver that shares its line expects to look in vain now and then.
//! * A register that depends on a selector (`DeviceFeatures`, `QueueNumMax`, `QueueReady`) changes when the
//!   selector is written. That write is an exit, so the driver never sees the old value.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

use super::{INTERRUPT_CONFIG, INTERRUPT_QUEUE};
use crate::layout::VIRTIO_SIZE;

/// Offsets of the registers, virtio 1.2, 4.2.2.
pub mod register {
    /// "virt".
    pub const MAGIC: u64 = 0x000;
    /// 2.
    pub const VERSION: u64 = 0x004;
    /// Device type.
    pub const DEVICE_ID: u64 = 0x008;
    /// Vendor.
    pub const VENDOR_ID: u64 = 0x00c;
    /// Half of the offered features.
    pub const DEVICE_FEATURES: u64 = 0x010;
    /// Which half.
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    /// Half of the accepted features.
    pub const DRIVER_FEATURES: u64 = 0x020;
    /// Which half.
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    /// Which queue the others speak of.
    pub const QUEUE_SEL: u64 = 0x030;
    /// Largest size of the queue; 0: no such queue.
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    /// Size of the queue.
    pub const QUEUE_NUM: u64 = 0x038;
    /// Whether the queue is set up.
    pub const QUEUE_READY: u64 = 0x044;
    /// Kicks a queue.
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// Why there was an interrupt.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// That it was seen.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// Device status.
    pub const STATUS: u64 = 0x070;
    /// Address of the descriptor table, low half; the high half follows.
    pub const QUEUE_DESC: u64 = 0x080;
    /// Address of the available ring.
    pub const QUEUE_DRIVER: u64 = 0x090;
    /// Address of the used ring.
    pub const QUEUE_DEVICE: u64 = 0x0a0;
    /// Length of a shared memory region, both halves; and its address, both halves.
    pub const SHM: [u64; 4] = [0x0b0, 0x0b4, 0x0b8, 0x0bc];
    /// Configuration space.
    pub const CONFIG: u64 = 0x100;
}

/// `NEEDS_RESET`, a bit of the status register.
pub const STATUS_NEEDS_RESET: u32 = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"CASU");

/// One device's page.
#[derive(Debug)]
pub struct RegisterPage {
    mapping: Arc<MmapRegion<()>>,
    offset: usize,
    /// The status register, written by vCPUs and by the device's worker.
    status: Mutex<u32>,
}

impl RegisterPage {
    /// The page number `index` of `mapping`, for a device of this type and configuration space.
    ///
    /// `None` when the mapping or the page is too small.
    #[must_use]
    pub fn new(
        mapping: Arc<MmapRegion<()>>,
        index: usize,
        device_type: u32,
        config: &[u8],
    ) -> Option<Self> {
        let size = usize::try_from(VIRTIO_SIZE).ok()?;
        let offset = index.checked_mul(size)?;
        mapping.get_slice(offset, size).ok()?;
        let page = Self { mapping, offset, status: Mutex::new(0) };
        page.set(register::MAGIC, MAGIC);
        page.set(register::VERSION, VERSION);
        page.set(register::DEVICE_ID, device_type);
        page.set(register::VENDOR_ID, VENDOR);
        for offset in register::SHM {
            // A length of -1: there is no such region.
            page.set(offset, u32::MAX);
        }
        page.slice()?.write_slice(config, usize::try_from(register::CONFIG).ok()?).ok()?;
        Some(page)
    }

    fn slice(&self) -> Option<VolatileSlice<'_>> {
        self.mapping.get_slice(self.offset, usize::try_from(VIRTIO_SIZE).ok()?).ok()
    }

    /// Sets a register.
    pub fn set(&self, register: u64, value: u32) {
        if let (Some(page), Ok(offset)) = (self.slice(), usize::try_from(register)) {
            // Cannot fail: every register is an aligned word of the page.
            let _ = page.store(value.to_le(), offset, Ordering::SeqCst);
        }
    }

    /// Reads bytes as the guest sees them; beyond the page are zeros.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Some(page), Ok(offset)) = (self.slice(), usize::try_from(offset)) {
            read_volatile(&page, offset, data);
        }
    }

    /// The status register.
    #[must_use]
    pub fn status(&self) -> u32 {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the status register.
    pub fn update_status(&self, change: impl FnOnce(u32) -> u32) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        *status = change(*status);
        self.set(register::STATUS, *status);
    }

    /// Says whether the driver may find used buffers, until the next reset.
    pub fn set_active(&self, active: bool) {
        self.set(register::INTERRUPT_STATUS, if active { INTERRUPT_QUEUE } else { 0 });
    }

    /// Tells the driver to look at status and configuration, until the next reset.
    pub fn announce_config(&self) {
        self.set(register::INTERRUPT_STATUS, INTERRUPT_QUEUE | INTERRUPT_CONFIG);
    }
}

fn read_volatile<B: BitmapSlice>(page: &VolatileSlice<'_, B>, offset: usize, data: &mut [u8]) {
    // A read that crosses the end of the page leaves zeros.
    let _ = page.read_slice(data, offset);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    fn pages(count: usize) -> Arc<MmapRegion<()>> {
        crate::memory::map_pages(NonZeroUsize::new(count * 4096).unwrap()).unwrap()
    }

    fn word(page: &RegisterPage, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        page.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn constant_registers_and_configuration() {
        let mapping = pages(2);
        let page = RegisterPage::new(mapping.clone(), 1, 26, b"config").unwrap();
        assert_eq!(word(&page, register::MAGIC), 0x7472_6976);
        assert_eq!(word(&page, register::VERSION), 2);
        assert_eq!(word(&page, register::DEVICE_ID), 26);
        assert_eq!(word(&page, 0xb0), u32::MAX);
        let mut config = [0; 7];
        page.read(register::CONFIG, &mut config);
        assert_eq!(&config, b"config\0");
        assert!(RegisterPage::new(mapping, 2, 1, &[]).is_none());
    }

    #[test]
    fn a_configuration_that_does_not_fit_is_refused() {
        assert!(RegisterPage::new(pages(1), 0, 1, &[0; 3840]).is_some());
        assert!(RegisterPage::new(pages(1), 0, 1, &[0; 3841]).is_none());
    }

    #[test]
    fn reads_beyond_the_page_are_zero() {
        let page = RegisterPage::new(pages(1), 0, 1, &[]).unwrap();
        let mut bytes = [1; 8];
        page.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0; 8]);
    }
}
