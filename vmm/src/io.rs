//! Positioned reads and writes between files and guest memory, without a copy.
//!
//! Positioned, because descriptors come from the parent, which may hand the same open file to several
//! VMs at once: a shared file offset would be a race.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// The kernel takes at most this many buffers in one call (`IOV_MAX`).
const MAX_BUFFERS: usize = 1024;

/// Fills all buffers from `file`, beginning at `offset`; a file that ends earlier is an error.
pub fn read_exact_at(
    file: BorrowedFd<'_>,
    buffers: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<()> {
    transfer(buffers, offset, |iovecs, offset| {
        let count = iovec_count(iovecs)?;
        // SAFETY: each element describes a guest memory slice that is alive and writable; the kernel
        // writes to nothing else.
        let done = unsafe { libc::preadv(file.as_raw_fd(), iovecs.as_ptr(), count, offset) };
        transferred(done)
    })
}

/// Writes all buffers to `file`, beginning at `offset`.
pub fn write_all_at(
    file: BorrowedFd<'_>,
    buffers: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<()> {
    transfer(buffers, offset, |iovecs, offset| {
        let count = iovec_count(iovecs)?;
        // SAFETY: each element describes a guest memory slice that is alive and readable.
        let done = unsafe { libc::pwritev(file.as_raw_fd(), iovecs.as_ptr(), count, offset) };
        transferred(done)
    })
}

fn iovec_count(iovecs: &[libc::iovec]) -> io::Result<i32> {
    i32::try_from(iovecs.len()).map_err(|_| ErrorKind::InvalidInput.into())
}

fn transferred(done: isize) -> io::Result<usize> {
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// Repeats `call` until all of `buffers` is done: one call moves at most 2 GiB or 1,024 buffers.
fn transfer(
    buffers: &[VolatileSlice<'_>],
    offset: u64,
    mut call: impl FnMut(&[libc::iovec], i64) -> io::Result<usize>,
) -> io::Result<()> {
    // Guards keep the host addresses valid for as long as they live.
    let guards: Vec<_> = buffers.iter().map(VolatileSlice::ptr_guard_mut).collect();
    let mut iovecs: Vec<libc::iovec> = guards
        .iter()
        .filter(|guard| guard.len() > 0)
        .map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() })
        .collect();
    let mut rest: &mut [libc::iovec] = &mut iovecs;
    let mut offset = i64::try_from(offset).map_err(|_| ErrorKind::InvalidInput)?;
    while !rest.is_empty() {
        let batch = rest.len().min(MAX_BUFFERS);
        let mut done = match call(rest.get(..batch).unwrap_or_default(), offset) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(done) => done,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        offset = i64::try_from(done)
            .ok()
            .and_then(|done| offset.checked_add(done))
            .ok_or(ErrorKind::InvalidInput)?;
        while let Some(first) = rest.first_mut() {
            if done < first.iov_len {
                first.iov_base = first.iov_base.wrapping_byte_add(done);
                first.iov_len -= done;
                break;
            }
            done -= first.iov_len;
            rest = rest.get_mut(1..).unwrap_or_default();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::fd::AsFd;

    fn slices(bytes: &mut [u8], size: usize) -> Vec<VolatileSlice<'_>> {
        bytes.chunks_mut(size).map(VolatileSlice::from).collect()
    }

    #[test]
    fn more_buffers_than_one_call_takes() {
        let mut file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..9000u32).map(|n| n as u8).collect();
        file.write_all(&data).unwrap();
        file.seek(SeekFrom::Start(7)).unwrap();
        let mut read = vec![0; 8990];
        read_exact_at(file.as_fd(), &slices(&mut read, 3), 10).unwrap();
        assert_eq!(read, &data[10..]);
        assert_eq!(file.stream_position().unwrap(), 7);

        let out = tempfile::tempfile().unwrap();
        write_all_at(out.as_fd(), &slices(&mut read, 3), 1).unwrap();
        let mut back = vec![0; 8991];
        read_exact_at(out.as_fd(), &slices(&mut back, 8991), 0).unwrap();
        assert_eq!(back[0], 0);
        assert_eq!(&back[1..], read);
    }

    #[test]
    fn the_end_of_the_file_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abc").unwrap();
        let mut read = [0; 4];
        let error = read_exact_at(file.as_fd(), &slices(&mut read, 2), 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn empty_buffers_and_huge_offsets() {
        let file = tempfile::tempfile().unwrap();
        let mut nothing = [];
        read_exact_at(file.as_fd(), &[VolatileSlice::from(&mut nothing[..])], 5).unwrap();
        let mut byte = [0];
        assert!(read_exact_at(file.as_fd(), &slices(&mut byte, 1), u64::MAX).is_err());
        assert!(write_all_at(file.as_fd(), &slices(&mut byte, 1), i64::MAX as u64).is_err());
    }
}
