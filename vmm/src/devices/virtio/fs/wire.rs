//! Requests and replies in guest memory.
//!
//! A message lies in a list of slices of guest memory, which the guest may change at any time. Small
//! parts are copied out once, before they are checked; file data goes straight between the file and
//! guest memory (`preadv2`, `pwritev2`), never through a buffer here.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use vm_memory::VolatileSlice;

use super::abi::Wire;

/// Most memory segments in one system call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// A position in a list of slices of guest memory.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    slices: &'a [VolatileSlice<'a>],
    /// Bytes of the first slice that are used up.
    skip: usize,
    /// Bytes up to the end.
    left: usize,
}

impl<'a> Cursor<'a> {
    /// The start of `slices`.
    pub(super) fn new(slices: &'a [VolatileSlice<'a>]) -> Self {
        let left = slices.iter().fold(0_usize, |sum, slice| sum.saturating_add(slice.len()));
        Self { slices, skip: 0, left }
    }

    /// Bytes up to the end.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Moves the end: at most `left` bytes are left after this.
    pub(super) fn truncate(&mut self, left: usize) {
        self.left = self.left.min(left);
    }

    /// The rest of the first slice that has any, and moves past slices that have none.
    fn front(&mut self) -> Option<VolatileSlice<'a>> {
        while self.left > 0 {
            let (first, rest) = self.slices.split_first()?;
            if self.skip < first.len() {
                let part = first.offset(self.skip).ok()?;
                let size = part.len().min(self.left);
                return part.subslice(0, size).ok();
            }
            self.slices = rest;
            self.skip = 0;
        }
        None
    }

    /// Moves on by `count` bytes, at most to the end.
    pub(super) fn advance(&mut self, count: usize) {
        let mut count = count.min(self.left);
        while count > 0 {
            let Some(front) = self.front() else { return };
            let step = front.len().min(count);
            self.skip = self.skip.saturating_add(step);
            self.left = self.left.saturating_sub(step);
            count = count.saturating_sub(step);
        }
    }

    /// Copies out exactly `buffer.len()` bytes.
    ///
    /// # Errors
    /// `EINVAL` if there are fewer.
    pub(super) fn read(&mut self, mut buffer: &mut [u8]) -> Result<(), Errno> {
        if buffer.len() > self.left {
            return Err(Errno::INVAL);
        }
        while !buffer.is_empty() {
            let front = self.front().ok_or(Errno::INVAL)?;
            let copied = front.copy_to(buffer);
            self.advance(copied);
            buffer = buffer.get_mut(copied..).ok_or(Errno::INVAL)?;
        }
        Ok(())
    }

    /// Copies out one part with a fixed layout.
    pub(super) fn take<T: Wire>(&mut self) -> Result<T, Errno> {
        // The largest part has 88 bytes.
        let mut buffer = [0_u8; 128];
        let part = buffer.get_mut(..T::SIZE).ok_or(Errno::INVAL)?;
        self.read(part)?;
        T::parse(part).ok_or(Errno::INVAL)
    }

    /// Copies out all that is left.
    ///
    /// # Errors
    /// `ENAMETOOLONG` if that is more than `most` bytes.
    pub(super) fn take_rest(&mut self, most: usize) -> Result<Vec<u8>, Errno> {
        if self.left > most {
            return Err(Errno::NAMETOOLONG);
        }
        let mut buffer = vec![0; self.left];
        self.read(&mut buffer)?;
        Ok(buffer)
    }

    /// Copies `bytes` into guest memory; what does not fit is left out.
    pub(super) fn write(&mut self, mut bytes: &[u8]) {
        while let Some(front) = self.front() {
            let size = front.len().min(bytes.len());
            let Some((now, later)) = bytes.split_at_checked(size) else { return };
            if now.is_empty() {
                return;
            }
            front.copy_from(now);
            self.advance(size);
            bytes = later;
        }
    }

    /// The next segments for a system call: at most `most` bytes.
    fn segments(&self, most: usize) -> Vec<libc::iovec> {
        let mut cursor = self.clone();
        cursor.truncate(most);
        let mut segments = Vec::new();
        while segments.len() < MAX_SEGMENTS
            && let Some(front) = cursor.front()
        {
            let iov_base = front.ptr_guard_mut().as_ptr().cast();
            segments.push(libc::iovec { iov_base, iov_len: front.len() });
            cursor.advance(front.len());
        }
        segments
    }

    /// Reads from `file` at `offset` into guest memory: `size` bytes, or fewer at the end of the file
    /// or of the memory. Moves on, and returns how many bytes were read.
    pub(super) fn fill_from(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        size: usize,
    ) -> Result<usize, Errno> {
        let size = size.min(self.left);
        let mut done = 0_usize;
        while done < size {
            let segments = self.segments(size.saturating_sub(done));
            let asked: usize = segments.iter().map(|segment| segment.iov_len).sum();
            let position = position(offset, done)?;
            let count = libc::c_int::try_from(segments.len()).map_err(|_| Errno::INVAL)?;
            // SAFETY: every segment lies in a slice that is borrowed for longer than this call, and
            // its bytes are only ever accessed as raw memory, so that the guest may race with it.
            let read =
                unsafe { libc::preadv2(file.as_raw_fd(), segments.as_ptr(), count, position, 0) };
            match check(read) {
                Ok(0) => break,
                Ok(read) => {
                    self.advance(read);
                    done = done.saturating_add(read);
                    // A read that ends within a page has come to the end of the file; at the end of one it
                    // may be what the host's file system reads at a time.
                    let end = u64::try_from(done).map_or(0, |done| offset.saturating_add(done));
                    if read < asked && !end.is_multiple_of(4096) {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                // What was read is worth more than the error, which the next request meets again.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Writes guest memory to `file` at `offset`, or at the file's end: at most `size` bytes. Moves
    /// on, and returns how many bytes were written.
    pub(super) fn drain_to(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        size: usize,
        append: bool,
    ) -> Result<usize, Errno> {
        let size = size.min(self.left);
        let flags = if append { libc::RWF_APPEND } else { 0 };
        let mut done = 0_usize;
        while done < size {
            let segments = self.segments(size.saturating_sub(done));
            let position = position(offset, done)?;
            let count = libc::c_int::try_from(segments.len()).map_err(|_| Errno::INVAL)?;
            // SAFETY: as in `fill_from`; the kernel only reads here.
            let written = unsafe {
                libc::pwritev2(file.as_raw_fd(), segments.as_ptr(), count, position, flags)
            };
            match check(written) {
                Ok(0) => break,
                Ok(written) => {
                    self.advance(written);
                    done = done.saturating_add(written);
                }
                Err(Errno::INTR) => {}
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}

/// `offset + done` as a file position.
fn position(offset: u64, done: usize) -> Result<i64, Errno> {
    u64::try_from(done)
        .ok()
        .and_then(|done| offset.checked_add(done))
        .and_then(|position| i64::try_from(position).ok())
        .ok_or(Errno::INVAL)
}

/// The result of a system call of the C library.
fn check(result: isize) -> Result<usize, Errno> {
    usize::try_from(result)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn copies_span_slices_and_end_with_them() {
        let (mut a, mut b, mut c) = ([1_u8, 2, 3], [0_u8; 0], [4_u8, 5]);
        let slices = [
            VolatileSlice::from(&mut a[..]),
            VolatileSlice::from(&mut b[..]),
            VolatileSlice::from(&mut c[..]),
        ];
        let mut cursor = Cursor::new(&slices);
        let mut out = [0; 4];
        cursor.read(&mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        assert_eq!(cursor.left(), 1);
        assert_eq!(cursor.read(&mut out), Err(Errno::INVAL));
        let mut cursor = Cursor::new(&slices);
        cursor.write(&[9; 9]);
        assert_eq!(cursor.left(), 0);
        assert_eq!((a, c), ([9; 3], [9; 2]));
    }

    #[test]
    fn file_data_goes_through_more_segments_than_one_call_takes() {
        let mut file: File = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..5000_u32).map(|value| (value % 251) as u8).collect();
        let mut memory = data.clone();
        let slices: Vec<_> = memory.chunks_mut(2).map(VolatileSlice::from).collect();
        assert_eq!(Cursor::new(&slices).drain_to(file.as_fd(), 3, 5000, false), Ok(5000));
        drop(slices);
        let mut on_disk = Vec::new();
        file.read_to_end(&mut on_disk).unwrap();
        assert_eq!(on_disk[3..], data);
        memory.fill(0);
        let slices: Vec<_> = memory.chunks_mut(2).map(VolatileSlice::from).collect();
        assert_eq!(Cursor::new(&slices).fill_from(file.as_fd(), 3, 9000), Ok(5000));
        drop(slices);
        assert_eq!(memory, data);
        file.write_all(b"x").unwrap();
    }

    #[test]
    fn offsets_beyond_the_signed_range_are_refused() {
        let file: File = tempfile::tempfile().unwrap();
        let mut memory = [0_u8; 4];
        let slices = [VolatileSlice::from(&mut memory[..])];
        assert!(Cursor::new(&slices).fill_from(file.as_fd(), u64::MAX, 4).is_err());
        assert!(Cursor::new(&slices).drain_to(file.as_fd(), u64::MAX - 1, 4, false).is_err());
    }
}
