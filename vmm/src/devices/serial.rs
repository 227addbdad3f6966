//! The serial console `ttyS0`, written into a ring: it explains a boot that failed.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::NoEvents;
use vmm_sys_util::eventfd::EventFd;

/// First port of COM1.
pub const PORT: u16 = 0x3f8;
/// Bytes of console that are kept.
pub const CONSOLE_SIZE: usize = 64 * 1024;

const PORTS: u16 = 8;
/// What Linux prints when it panics.
const PANIC: &[u8] = b"Kernel panic - not syncing";

/// Register number of a port of COM1.
#[must_use]
pub fn offset(port: u16) -> Option<u8> {
    let offset = port.checked_sub(PORT).filter(|offset| *offset < PORTS)?;
    u8::try_from(offset).ok()
}

/// The last [`CONSOLE_SIZE`] bytes that the guest wrote to its console.
#[derive(Clone, Debug, Default)]
pub struct Console(Arc<Mutex<VecDeque<u8>>>);

impl Console {
    /// The last `most` bytes; invalid UTF-8 is replaced.
    #[must_use]
    pub fn tail(&self, most: usize) -> String {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let skip = ring.len().saturating_sub(most);
        let bytes: Vec<u8> = ring.iter().skip(skip).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the guest kernel said that it panicked.
    #[must_use]
    pub fn shows_panic(&self) -> bool {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.make_contiguous().windows(PANIC.len()).any(|window| window == PANIC)
    }
}

impl io::Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for byte in bytes {
            if ring.len() == CONSOLE_SIZE {
                ring.pop_front();
            }
            ring.push_back(*byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The interrupt line.
struct Line(Arc<EventFd>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        match self.0.write(1) {
            // The counter is full: the line is signalled already.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }
}

/// COM1. The lock is held for one register access only.
pub struct SerialPort(Mutex<vm_superio::Serial<Line, NoEvents, Console>>);

impl SerialPort {
    /// A port that writes to `console` and interrupts by `line`.
    #[must_use]
    pub fn new(line: Arc<EventFd>, console: Console) -> Self {
        Self(Mutex::new(vm_superio::Serial::new(Line(line), console)))
    }

    /// Reads a register.
    #[must_use]
    pub fn read(&self, offset: u8) -> u8 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).read(offset)
    }

    /// Writes a register.
    pub fn write(&self, offset: u8, value: u8) {
        // Writing to the ring and to the event counter cannot fail; a console is no reason to end a VM.
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).write(offset, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn the_ring_keeps_the_end() {
        let mut console = Console::default();
        console.write_all(&vec![b'a'; CONSOLE_SIZE]).unwrap();
        console.write_all(b"end\xff").unwrap();
        assert_eq!(console.tail(5), "aend\u{fffd}");
        assert_eq!(console.tail(usize::MAX).chars().count(), CONSOLE_SIZE);
    }

    #[test]
    fn a_panic_is_found_across_the_seam_of_the_ring() {
        let mut console = Console::default();
        assert!(!console.shows_panic());
        console.write_all(&vec![b'.'; CONSOLE_SIZE - 10]).unwrap();
        console.write_all(b"Kernel panic - not syncing: Attempted").unwrap();
        assert!(console.shows_panic());
    }

    #[test]
    fn output_reaches_the_console() {
        let console = Console::default();
        let line = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let port = SerialPort::new(line, console.clone());
        for byte in b"hi" {
            port.write(0, *byte);
        }
        assert_eq!(console.tail(9), "hi");
        // Transmitter empty: the guest never waits.
        assert_eq!(port.read(5) & 0x20, 0x20);
    }

    #[test]
    fn ports_of_com1() {
        assert_eq!(offset(0x3f8), Some(0));
        assert_eq!(offset(0x3ff), Some(7));
        assert_eq!(offset(0x400), None);
        assert_eq!(offset(0x3f7), None);
    }
}
