//! Where an access of the guest goes: to the device at a port or an address, or nowhere.
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
