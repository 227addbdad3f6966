//! Port I/O: the legacy devices and everything that is not there.
//!
//! Memory-mapped I/O needs no bus: virtio devices lie at equal distances, so the address is the index
//! (see [`crate::memory::VIRTIO_START`]).

use super::i8042::{self, Reset};
use super::serial::{self, SerialPort};

/// The ports of the machine.
pub struct Ports {
    serial: SerialPort,
}

impl Ports {
    /// Ports with a serial console.
    #[must_use]
    pub fn new(serial: SerialPort) -> Self {
        Self { serial }
    }

    /// A port is read. Absent devices read as ones, as on a real bus.
    pub fn read(&self, port: u16, data: &mut [u8]) {
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
    pub fn write(&self, port: u16, data: &[u8]) -> Option<Reset> {
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
