//! The interrupt lines of the machine: the pins of KVM's IOAPIC. No other file decides a line.
//!
//! A device asks [`Lines`] for its own; the MP table names those that were given out and no others, for
//! Linux programs every line that the table names, at some 50 µs each. Each line belongs to one device:
//! a shared one would make every interrupt ask all of its devices.

/// Pins of KVM's IOAPIC.
pub const IOAPIC_PINS: u8 = 24;

/// Where every PC has COM1. Linux' 8250 driver knows the port and the line without being told.
const SERIAL: u8 = 4;

/// Lines for virtio devices, in the order in which they are given out: all that Linux does not take for
/// a device of its own, as it does 0 (timer), 1 (keyboard), 2 (cascade), 3 and 4 (COM), 8 (clock) and 13
/// (coprocessor).
pub const VIRTIO_LINES: [u8; 17] = [5, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];

/// Gives out the lines of one machine, each once.
#[derive(Debug, Default)]
pub struct Lines {
    serial: bool,
    virtio: usize,
}

impl Lines {
    /// The line of the serial console.
    pub fn serial(&mut self) -> u8 {
        self.serial = true;
        SERIAL
    }

    /// The next line for a virtio device; `None` when all are taken.
    pub fn virtio(&mut self) -> Option<u8> {
        let line = VIRTIO_LINES.get(self.virtio)?;
        self.virtio += 1;
        Some(*line)
    }

    /// The lines that were given out, for the MP table.
    #[must_use]
    pub fn in_use(&self) -> Vec<u8> {
        let virtio = VIRTIO_LINES.iter().take(self.virtio).copied();
        let mut lines: Vec<u8> = virtio.chain(self.serial.then_some(SERIAL)).collect();
        lines.sort_unstable();
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_given_out_once_and_is_a_pin() {
        let mut lines = Lines::default();
        assert!(lines.in_use().is_empty());
        let mut given = vec![lines.serial()];
        given.extend(std::iter::from_fn(|| lines.virtio()));
        assert_eq!(given.len(), 1 + VIRTIO_LINES.len());
        given.sort_unstable();
        assert_eq!(lines.in_use(), given);
        given.dedup();
        assert_eq!(given.len(), 1 + VIRTIO_LINES.len());
        assert!(given.iter().all(|line| *line < IOAPIC_PINS));
        // Timer, keyboard, cascade, COM2, clock, coprocessor.
        assert!([0, 1, 2, 3, 8, 13].iter().all(|line| !given.contains(line)));
    }

    #[test]
    fn only_lines_in_use_are_named() {
        let mut lines = Lines::default();
        lines.serial();
        assert_eq!((lines.virtio(), lines.virtio()), (Some(5), Some(6)));
        assert_eq!(lines.in_use(), [4, 5, 6]);
    }
}
