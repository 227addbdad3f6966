//! The device's end of a host connection: a UNIX stream socket that is never waited for.
//!
//! Data moves between the socket and guest memory without a copy in between. Guest memory may change
//! while the kernel reads or writes it, so no reference to it may exist; the system calls get raw
//! pointers, and these two calls are all the `unsafe` there is in this device.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType,
};
use vm_memory::VolatileSlice;

/// Most slices of guest memory in one system call; what lies beyond waits for the next one.
const MAX_IOVECS: usize = 64;

/// The device's end. The other end was handed out.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// A connected pair: the device's end and the one to hand out. The latter blocks, as descriptors
    /// do unless told otherwise; whoever gets it may change that, because the mode belongs to each end.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (fd, other) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self { fd }, other))
    }

    /// Reads into guest memory; 0 is the end of the stream.
    pub fn receive<'a>(&self, into: impl Iterator<Item = VolatileSlice<'a>>) -> io::Result<usize> {
        let mut vectors = Vectors::new();
        for slice in into {
            // The guard does nothing for plain mappings; memory is held by the slice's lifetime.
            if !vectors.push(slice.ptr_guard_mut().as_ptr(), slice.len()) {
                break;
            }
        }
        let mut message = vectors.message();
        // SAFETY: the vectors point to guest memory that the slices keep mapped, and no Rust reference
        // to it exists; the message has neither name nor control buffer.
        let result =
            unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Writes from guest memory.
    pub fn send<'a>(&self, from: impl Iterator<Item = VolatileSlice<'a>>) -> io::Result<usize> {
        let mut vectors = Vectors::new();
        for slice in from {
            if !vectors.push(slice.ptr_guard().as_ptr().cast_mut(), slice.len()) {
                break;
            }
        }
        let message = vectors.message();
        // SAFETY: as in `receive`; the kernel only reads through the vectors.
        let result = unsafe {
            libc::sendmsg(
                self.fd.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        usize::try_from(result).map_err(|_| io::Error::last_os_error())
    }

    /// Ends one direction or both. The other end may be gone already, which is as good.
    pub fn shutdown(&self, how: Shutdown) {
        let _ = rustix::net::shutdown(&self.fd, how);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An array of vectors for a system call.
struct Vectors {
    vectors: [MaybeUninit<libc::iovec>; MAX_IOVECS],
    count: usize,
}

impl Vectors {
    fn new() -> Self {
        Self { vectors: [MaybeUninit::uninit(); MAX_IOVECS], count: 0 }
    }

    /// Adds one vector, unless the array is full.
    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        let Some(vector) = self.vectors.get_mut(self.count) else { return false };
        vector.write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.count += 1;
        true
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all fields of `msghdr` are integers or pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.vectors.as_mut_ptr().cast();
        message.msg_iovlen = self.count;
        message
    }
}

/// Data of the guest that the socket has not taken yet. Nothing is allocated before it is needed, and
/// then at once as much as may ever be needed, because the guest decides how much comes.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: VecDeque<u8>,
}

impl Buffer {
    /// Bytes that wait.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether none wait.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends the bytes of `slices` behind the first `skip`. `limit` is the most that this buffer will
    /// ever hold; the caller has checked that the bytes fit.
    pub fn push(&mut self, slices: &[VolatileSlice<'_>], mut skip: usize, limit: usize) {
        if self.bytes.capacity() == 0 {
            self.bytes.reserve_exact(limit);
        }
        let mut chunk = [0; 4096];
        for slice in slices {
            let mut at = skip.min(slice.len());
            skip -= at;
            while let Ok(rest) = slice.offset(at)
                && !rest.is_empty()
            {
                let len = rest.copy_to(&mut chunk[..]);
                self.bytes.extend(&chunk[..len]);
                at += len;
            }
        }
    }

    /// Gives the socket as much as it takes; returns how much that was.
    pub fn flush(&mut self, socket: &Socket) -> io::Result<usize> {
        let mut total = 0;
        while !self.bytes.is_empty() {
            let (front, back) = self.bytes.as_slices();
            let sent = rustix::net::sendmsg(
                socket,
                &[IoSlice::new(front), IoSlice::new(back)],
                &mut SendAncillaryBuffer::default(),
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(sent) => {
                    self.bytes.drain(..sent);
                    total += sent;
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(total)
    }

    /// Forgets all bytes and gives the memory back.
    pub fn clear(&mut self) {
        self.bytes = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn pair() -> (Socket, UnixStream) {
        let (socket, other) = Socket::pair().unwrap();
        (socket, UnixStream::from(other))
    }

    #[test]
    fn data_goes_through_scattered_memory_both_ways() {
        let (socket, mut other) = pair();
        let (mut a, mut b) = (*b"hel", *b"lo");
        let slices = [VolatileSlice::from(&mut a[..]), VolatileSlice::from(&mut b[..])];
        assert_eq!(socket.send(slices.iter().copied()).unwrap(), 5);
        let mut got = [0; 5];
        other.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
        other.write_all(b"byebye").unwrap();
        assert_eq!(socket.receive(slices.iter().copied()).unwrap(), 5);
        assert_eq!((&a, &b), (b"bye", b"by"));
    }

    #[test]
    fn nothing_waits_and_nothing_signals() {
        let (socket, other) = pair();
        let mut memory = [0; 4096];
        let slice = VolatileSlice::from(&mut memory[..]);
        let blocked = |result: io::Result<usize>| result.unwrap_err().kind();
        assert_eq!(blocked(socket.receive([slice].into_iter())), io::ErrorKind::WouldBlock);
        while socket.send([slice].into_iter()).is_ok() {}
        assert_eq!(blocked(socket.send([slice].into_iter())), io::ErrorKind::WouldBlock);
        drop(other);
        let mut buffer = Buffer::default();
        buffer.push(&[slice], 0, 4096);
        // The runtime ignores SIGPIPE, but a signal that is blocked is kept even then.
        let pending = while_blocked(libc::SIGPIPE, || {
            assert_eq!(blocked(socket.send([slice].into_iter())), io::ErrorKind::BrokenPipe);
            assert!(buffer.flush(&socket).is_err());
        });
        assert!(!pending, "SIGPIPE");
    }

    /// Runs `what` with a signal blocked in this thread; returns whether it came.
    fn while_blocked(signal: libc::c_int, what: impl FnOnce()) -> bool {
        // SAFETY: a signal set is plain data, for which zero is a value.
        let (mut set, mut pending): (libc::sigset_t, libc::sigset_t) =
            unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a signal set.
        unsafe { libc::sigaddset(&raw mut set, signal) };
        // SAFETY: both are signal sets, and only this thread's mask changes.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut pending) };
        what();
        // SAFETY: `pending` is a signal set.
        unsafe { libc::sigpending(&raw mut pending) };
        // SAFETY: as above. The thread ends with its test, so its mask stays.
        unsafe { libc::sigismember(&raw const pending, signal) == 1 }
    }

    #[test]
    fn more_slices_than_a_call_takes_are_a_short_write() {
        let (socket, _other) = pair();
        let mut memory = [7; 100];
        let slices: Vec<_> = memory.chunks_mut(1).map(VolatileSlice::from).collect();
        assert_eq!(socket.send(slices.iter().copied()).unwrap(), MAX_IOVECS);
    }

    #[test]
    fn the_buffer_keeps_order_around_its_end() {
        let (socket, mut other) = pair();
        let mut buffer = Buffer::default();
        let mut expected = Vec::new();
        let mut got = vec![0; 700];
        for round in 0..50_u8 {
            let mut memory = vec![round; 350];
            let (a, b) = memory.split_at_mut(20);
            let slices = [VolatileSlice::from(a), VolatileSlice::from(b)];
            buffer.push(&slices, 50, 1000);
            buffer.push(&slices, 0, 1000);
            expected.extend(vec![round; 650]);
            assert_eq!(buffer.len(), 650);
            assert_eq!(buffer.flush(&socket).unwrap(), 650);
            other.read_exact(&mut got[..650]).unwrap();
            assert!(got[..650].iter().all(|&byte| byte == round));
        }
        assert!(buffer.is_empty());
        assert!(buffer.bytes.capacity() < 2000);
    }

    #[test]
    fn flushing_into_a_full_socket_keeps_the_rest() {
        let (socket, mut other) = pair();
        let mut memory = vec![3; 1 << 20];
        let mut buffer = Buffer::default();
        buffer.push(&[VolatileSlice::from(&mut memory[..])], 0, 1 << 20);
        let sent = buffer.flush(&socket).unwrap();
        assert!(sent > 0 && sent < 1 << 20);
        assert_eq!(buffer.flush(&socket).unwrap(), 0);
        let mut got = vec![0; sent];
        other.read_exact(&mut got).unwrap();
        assert!(buffer.flush(&socket).unwrap() > 0);
        drop(other);
        assert!(buffer.flush(&socket).is_err());
    }
}
