//! Whether a guest of some size can exist on this host at all.
//!
//! Guest memory is taken from the host as the guest touches it, so several guests may together be larger
//! than the host. One alone must not be: the host could never give it what it was promised, and KVM spends
//! seconds and gigabytes on tables for it before anything fails.

use crate::error::Error;

/// Refuses guest memory of `mib` MiB that is more than this host's memory and swap together.
///
/// # Errors
/// [`Error::Invalid`], which names the host's memory.
pub(crate) fn check(mib: u32) -> Result<(), Error> {
    let host = rustix::system::sysinfo();
    let unit = u64::from(host.mem_unit.max(1));
    let bytes = |units: u64| units.saturating_mul(unit);
    compare(mib, bytes(host.totalram), bytes(host.totalswap))
}

/// See [`check`]; the host has `ram` and `swap` bytes.
fn compare(mib: u32, ram: u64, swap: u64) -> Result<(), Error> {
    if u64::from(mib) << 20 <= ram.saturating_add(swap) {
        return Ok(());
    }
    let swap = if swap == 0 { String::new() } else { format!(" and {} MiB of swap", swap >> 20) };
    Err(Error::Invalid(format!(
        "memory is {mib} MiB, but this host has only {} MiB{swap}; ask for less memory",
        ram >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_guest_as_large_as_the_host_is_allowed_and_a_larger_one_is_not() {
        assert!(compare(32, 24 * GIB, 0).is_ok());
        assert!(compare(24 << 10, 24 * GIB, 0).is_ok());
        assert!(compare((24 << 10) + 1, 24 * GIB, 0).is_err());
        assert!(compare(26 << 10, 24 * GIB, 2 * GIB).is_ok());
        assert!(compare((26 << 10) + 1, 24 * GIB, 2 * GIB).is_err());
        assert!(compare(u32::MAX, u64::MAX, u64::MAX).is_ok());
    }

    #[test]
    fn the_error_names_the_host() {
        let text = |swap| compare(1 << 20, 24 * GIB, swap).unwrap_err().to_string();
        let expected =
            "memory is 1048576 MiB, but this host has only 24576 MiB; ask for less memory";
        assert_eq!(text(0), expected);
        assert!(text(2 * GIB).contains("24576 MiB and 2048 MiB of swap"));
    }

    #[test]
    fn the_smallest_guest_fits_here() {
        assert!(check(32).is_ok());
    }
}
