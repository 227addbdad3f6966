//! Where an access of the guest goes: to the device at a port or an address, or nowhere.
//!
//! Memory-mapped I/O needs no search: virtio devices lie at equal distances, so the address is the index
//! (see [`crate::layout`]).

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

    fn virtio_at(&self, address: u64) -> Option<(&MmioTransport, u64)> {
        let (index, offset) = layout::virtio_at(address)?;
        Some((self.virtio.get(index)?, offset))
    }

    /// Memory without RAM is read. Absent devices read as ones, as on a real bus.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.virtio_at(address) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Memory without RAM is written.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.virtio_at(address) {
            device.write(offset, data);
        }
    }

    /// A port is read. Absent devices read as ones, as on a real bus.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        let [byte] = data else {
            return;
        };
        if let Some(offset) = serial::offset(port) {
            *byte = self.serial.read(offset);
        } else if let Some(value) = i8042::read(port) {
            *byte = value;
        }
    }

    /// A port is written; the guest may ask for a reset by it.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<Reset> {
        // String output repeats the port; every byte counts.
        if let Some(offset) = serial::offset(port) {
            for byte in data {
                self.serial.write(offset, *byte);
            }
            return None;
        }
        match data {
            [byte] => i8042::write(port, *byte),
            _ => None,
        }
    }
}
