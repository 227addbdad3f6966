//! Pause, save and restore of every device.
