//! Where an access of the guest goes: to the device at a port or an address, or nowhere.
//!
//! # Locks
//!
//! Every vCPU comes through here with its exits, and none waits for another. The locks behind it are held
//! for one register each: the serial port's, the console's ring, a status register's. Only a driver that
//! resets its device waits, for a second at most, until the worker has let go of the queues; meanwhile other
//! writes to the registers of that device wait too. Reads never do: they come from a page.
//!
//! Memory-mapped I/O needs no search: virtio devices lie at equal distances, so the address is the index
//! (see [`crate::layout`]).

use casulo_protocol::vmm::DeviceState;

use super::i8042::{self, Reset};
use super::serial::{self, SerialPort};
use super::virtio::mmio::MmioTransport;
use crate::layout;

/// The devices of the machine, as the exits of all vCPUs see them.
pub struct Bus {
    serial: SerialPort,
    /// In the order of their addresses.
    virtio: Vec<MmioTransport>,
}

impl Bus {
    /// A machine with a serial console and these virtio devices.
    #[must_use]
    pub fn new(serial: SerialPort, virtio: Vec<MmioTransport>) -> Self {
        Self { serial, virtio }
    }

    /// The virtio devices as their drivers left them; takes no lock.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceState> {
        self.virtio.iter().map(MmioTransport::device_state).collect()
    }

    fn virtio_at(&self, address: u64) -> Option<(&MmioTransport, u64)> {
        let (index, offset) = layout::virtio_at(address)?;
        Some((self.virtio.get(index)?, offset))
    }

    /// Memory without RAM is read. Absent devices read as ones, as on a real bus; gives whether one was
    /// there.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((device, offset)) = self.virtio_at(address) else {
            data.fill(0xff);
            return false;
        };
        device.read(offset, data);
        true
    }

    /// Memory without RAM is written; gives whether a device was there.
    pub fn mmio_write(&self, address: u64, data: &[u8]) -> bool {
        let Some((device, offset)) = self.virtio_at(address) else {
            return false;
        };
        device.write(offset, data);
        true
    }

    /// A port is read. Absent devices read as ones; gives whether one was there.
    pub fn port_read(&self, port: u16, data: &mut [u8]) -> bool {
        data.fill(0xff);
        let value = match serial::offset(port) {
            Some(offset) => Some(self.serial.read(offset)),
            None => i8042::read(port),
        };
        // The devices have registers of one byte; of a wider read the rest is nobody's.
        if let (Some(value), [byte]) = (value, data) {
            *byte = value;
        }
        value.is_some()
    }

    /// A port is written; the guest may ask for a reset by it. `None`: no device was there.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<Option<Reset>> {
        if let Some(offset) = serial::offset(port) {
            // String output repeats the port; every byte counts.
            for byte in data {
                self.serial.write(offset, *byte);
            }
            return Some(None);
        }
        i8042::is_port(port).then(|| match data {
            [byte] => i8042::write(port, *byte),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::serial::Console;
    use crate::devices::virtio::page::register;
    use crate::devices::virtio::rng::RngDevice;
    use crate::devices::virtio::worker::serve;
    use crate::layout::virtio;
    use std::num::NonZeroUsize;
    use std::sync::Arc;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    const RESETS: usize = 5;

    fn line() -> Arc<EventFd> {
        Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
    }

    #[test]
    fn a_vcpu_that_waits_for_a_device_holds_up_no_other() {
        let pages = crate::memory::map_pages(NonZeroUsize::new(2 * 4096).unwrap()).unwrap();
        let memory = crate::memory::map(32).unwrap();
        let console = Console::default();
        let device = |index| {
            let device = Box::new(RngDevice::new());
            let (memory, pages, console) = (memory.clone(), pages.clone(), console.clone());
            MmioTransport::new(device, memory, pages, index, line(), console).unwrap()
        };
        let ((first, _stuck), (second, other)) = (device(0), device(1));
        // Nobody serves the first worker, as if it were in a call to a host that does not come back.
        std::thread::spawn(move || serve(vec![other]).unwrap());
        let bus = Bus::new(SerialPort::new(line(), console.clone()), vec![first, second]);
        let write = |index, register, value: u32| {
            bus.mmio_write(virtio(index) + register, &value.to_le_bytes())
        };
        let read = |index, register| {
            let mut bytes = [0; 4];
            bus.mmio_read(virtio(index) + register, &mut bytes);
            u32::from_le_bytes(bytes)
        };
        let set_up = |index| {
            for status in [1, 3] {
                write(index, register::STATUS, status);
            }
            write(index, register::DRIVER_FEATURES_SEL, 1);
            write(index, register::DRIVER_FEATURES, 1);
            for status in [0xb, 0xf] {
                write(index, register::STATUS, status);
            }
        };
        set_up(0);
        std::thread::scope(|threads| {
            // The reset gives up waiting after a while, so a slow machine may need another try.
            let overtaken = (0..RESETS).any(|_| {
                let reset = threads.spawn(|| write(0, register::STATUS, 0));
                // Another device, a port, and the registers of the very device that is waited for.
                for _ in 0..10 {
                    write(1, register::STATUS, 0);
                    set_up(1);
                    assert_eq!(read(1, register::STATUS) & 0xf, 0xf);
                    assert_eq!(read(0, register::DEVICE_ID), 4);
                    assert!(read(0, register::STATUS) & 4 != 0);
                    bus.port_write(0x3f8, b"x");
                    assert_eq!(bus.devices().len(), 2);
                }
                !reset.is_finished()
            });
            assert!(overtaken);
        });
    }
}
