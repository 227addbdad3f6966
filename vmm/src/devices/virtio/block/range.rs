//! Ranges of a file that are to be given up or to read as zeros.
//!
//! A host file system with holes does both without writing; one without them (9p, some FUSE) takes no
//! discards, and zeros are written.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use vm_memory::VolatileSlice;

use crate::io::write_all_at;

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

/// Zeros that are written at once.
const CHUNK: usize = 64 * 1024;

/// Whether blocks of the file can be given up; asked of a place behind its end, where there are none.
pub(super) fn can_punch(file: BorrowedFd<'_>, length: u64) -> bool {
    fallocate(file, PUNCH, length, 4096).is_ok()
}

/// Gives up the blocks of a range, which reads as zeros then.
pub(super) fn discard(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    Ok(apply(file, PUNCH, offset, length)?)
}

/// Makes a range read as zeros, and gives up its blocks if `unmap`.
pub(super) fn zero(file: BorrowedFd<'_>, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
    let how = if unmap { PUNCH } else { ZERO };
    match apply(file, how, offset, length) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => write_zeros(file, offset, length),
        other => Ok(other?),
    }
}

fn apply(
    file: BorrowedFd<'_>,
    how: FallocateFlags,
    offset: u64,
    length: u64,
) -> rustix::io::Result<()> {
    if length == 0 {
        // The kernel refuses it.
        return Ok(());
    }
    rustix::io::retry_on_intr(|| fallocate(file, how, offset, length))
}

fn write_zeros(file: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<()> {
    let mut zeros = vec![0; CHUNK];
    let mut done = 0;
    while done < length {
        let count = usize::try_from(length - done).unwrap_or(CHUNK).min(CHUNK);
        let slice = VolatileSlice::from(zeros.get_mut(..count).unwrap_or_default());
        write_all_at(file, &[slice], offset.saturating_add(done))?;
        done += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 1 << 20], 0).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut content = vec![1; 1 << 20];
        file.read_exact_at(&mut content, 0).unwrap();
        content
    }

    /// Exactly the range is zero, whichever way it became so.
    #[test]
    fn zeros_by_any_way_are_the_same() {
        let (from, to) = (512 * 3, (1 << 20) - 512);
        let ways: [&dyn Fn(&File); 4] = [
            &|file| discard(file.as_fd(), from, to - from).unwrap(),
            &|file| zero(file.as_fd(), from, to - from, true).unwrap(),
            &|file| zero(file.as_fd(), from, to - from, false).unwrap(),
            &|file| write_zeros(file.as_fd(), from, to - from).unwrap(),
        ];
        for (number, way) in ways.iter().enumerate() {
            let file = file();
            way(&file);
            let content = content(&file);
            let expected = |at: usize| if (from..to).contains(&(at as u64)) { 0 } else { 7 };
            assert!((0..1 << 20).all(|at| content[at] == expected(at)), "{number}");
            assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        }
    }

    #[test]
    fn a_hole_takes_no_room_on_the_host() {
        let file = file();
        assert!(can_punch(file.as_fd(), 1 << 20));
        let before = file.metadata().unwrap().blocks();
        discard(file.as_fd(), 0, 1 << 20).unwrap();
        assert!(file.metadata().unwrap().blocks() < before / 8);
        discard(file.as_fd(), 0, 0).unwrap();
    }

    #[test]
    fn a_file_without_holes_gets_zeros_and_takes_no_discards() {
        // The kernel knows no holes there.
        let file = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert!(!can_punch(file.as_fd(), 0));
        assert!(discard(file.as_fd(), 0, 512).is_err());
        let pipe = File::from(rustix::pipe::pipe().unwrap().1);
        assert!(!can_punch(pipe.as_fd(), 0));
    }
}
