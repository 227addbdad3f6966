//! As much of the keyboard controller as Linux needs to reset the machine (`reboot=k`).

const STATUS_PORT: u16 = 0x64;
const DATA_PORT: u16 = 0x60;
const COMMAND_RESET: u8 = 0xfe;

/// The guest reset the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset;

/// Whether the controller listens at this port.
#[must_use]
pub fn is_port(port: u16) -> bool {
    matches!(port, STATUS_PORT | DATA_PORT)
}

/// Reads a port of the controller. Status 0: nothing to read, ready for a command.
#[must_use]
pub fn read(port: u16) -> Option<u8> {
    is_port(port).then_some(0)
}

/// Writes a port of the controller.
#[must_use]
pub fn write(port: u16, value: u8) -> Option<Reset> {
    (port == STATUS_PORT && value == COMMAND_RESET).then_some(Reset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_reset_command_resets() {
        assert_eq!(write(0x64, 0xfe), Some(Reset));
        assert_eq!(write(0x60, 0xfe), None);
        assert_eq!(write(0x64, 0xd1), None);
        assert_eq!(read(0x64), Some(0));
        assert_eq!(read(0x61), None);
    }
}
