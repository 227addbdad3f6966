//! virtio-rng: random bytes from the host's kernel.

mod device;
#[cfg(test)]
mod tests;

pub use self::device::RngDevice;
