//! The system calls of the boot that no safe wrapper offers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Microseconds since the kernel started.
pub(super) fn uptime_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let micros = u64::try_from(now.tv_nsec).unwrap_or(0) / 1000;
    seconds.saturating_mul(1_000_000).saturating_add(micros)
}

/// Sets IFF_UP of `lo`; the kernel then gives it 127.0.0.1 and ::1 by itself.
pub(super) fn loopback_up() -> io::Result<()> {
    // SAFETY: all zeroes is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: SIOCSIFFLAGS reads one ifreq.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes of one [`add_entropy`].
pub(super) const MAX_ENTROPY: usize = 512;

/// Adds `bytes` to the kernel's pool, credits them, and has all its generators take new keys.
pub(super) fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    // asm-generic/ioctl.h: _IOW('R', 0x03, int[2]) and _IO('R', 0x07) of linux/random.h.
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

    /// `struct rand_pool_info` with its buffer.
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        buffer: [u8; MAX_ENTROPY],
    }

    let mut info = PoolInfo { entropy_bits: 0, size: 0, buffer: [0; MAX_ENTROPY] };
    let size = bytes.len().min(MAX_ENTROPY);
    for (to, from) in info.buffer.iter_mut().zip(bytes) {
        *to = *from;
    }
    info.size = libc::c_int::try_from(size).unwrap_or(0);
    info.entropy_bits = info.size.saturating_mul(8);
    let device = File::options().write(true).open("/dev/urandom")?;
    // SAFETY: RNDADDENTROPY reads the two numbers and `size` bytes behind them, which are there.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const info) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: RNDRESEEDCRNG has no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Limits that the workload inherits: as many open files as in a distribution (the kernel's own
/// limit is 4096), and no limit of processes beside that of its cgroup (the kernel's own depends on
/// the memory and would come first in a small VM).
pub(super) fn set_limits() -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Nofile, Rlimit { current: Some(1024), maximum: Some(524_288) })?;
    setrlimit(Resource::Nproc, Rlimit { current: None, maximum: None })?;
    Ok(())
}
