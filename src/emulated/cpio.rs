//! A writer of `newc` cpio archives, the format of a Linux initial file system.
//!
//! An archive that this writes is a multiple of four bytes long and begins and ends on its own, so
//! that archives can be put one after the other: the kernel unpacks them in order. Times and owners
//! are zero: the same entries give the same bytes.

use std::io::{self, Read, Write};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const TRAILER: &str = "TRAILER!!!";

/// Writes one archive; [`Archive::finish`] ends it.
pub(crate) struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// An archive that begins at the present end of `out`, which must be a multiple of four bytes.
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Adds a folder. Parents come before their children.
    pub(crate) fn directory(&mut self, name: &str, permissions: u32) -> io::Result<()> {
        self.header(name, DIRECTORY | permissions, 2, 0)
    }

    /// Adds a file of `size` bytes, read from `content`.
    ///
    /// # Errors
    /// `InvalidInput` when `size` is 4 GiB or more (the format's limit), `UnexpectedEof` when
    /// `content` ends before `size` bytes; any error of reading and writing.
    pub(crate) fn file(
        &mut self,
        name: &str,
        permissions: u32,
        size: u64,
        content: impl Read,
    ) -> io::Result<()> {
        let length = u32::try_from(size).map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is too large for cpio"))
        })?;
        self.header(name, REGULAR | permissions, 1, length)?;
        if io::copy(&mut content.take(size), &mut self.out)? != size {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("{name} ended before its {size} bytes"),
            ));
        }
        self.pad(size)
    }

    /// Writes the end mark and gives the writer back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry(TRAILER, 0, 0, 1, 0)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn header(&mut self, name: &str, mode: u32, links: u32, size: u32) -> io::Result<()> {
        self.inode += 1;
        self.entry(name, self.inode, mode, links, size)
    }

    fn entry(
        &mut self,
        name: &str,
        inode: u32,
        mode: u32,
        links: u32,
        size: u32,
    ) -> io::Result<()> {
        let name_size = name.len() as u64 + 1;
        // magic, inode, mode, uid, gid, links, time, size, device, its minor, node, its minor,
        // size of the name, checksum (unused)
        write!(
            self.out,
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}\
             {:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}",
            0, 0, 0, 0, 0, 0, 0, 0,
        )?;
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + name_size)
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let zeros: &[u8] = match written % 4 {
            1 => &[0; 3],
            2 => &[0; 2],
            3 => &[0; 1],
            _ => &[],
        };
        self.out.write_all(zeros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an archive back: `(name, mode, content)` of each entry, the trailer not included.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * n..14 + 8 * n]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&bytes[..6], b"070701");
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            assert_eq!(bytes[110 + name_size - 1], 0);
            let data = (110 + name_size).next_multiple_of(4);
            if name == TRAILER {
                assert_eq!(bytes.len(), data);
                return entries;
            }
            entries.push((name, mode as u32, bytes[data..data + size].to_vec()));
            bytes = &bytes[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn every_alignment_is_read_back() {
        let mut archive = Archive::new(Vec::new());
        archive.directory("d", 0o755).unwrap();
        let mut expected = vec![("d".to_owned(), DIRECTORY | 0o755, Vec::new())];
        for n in 0..9usize {
            let (name, content) = ("d/".to_owned() + &"x".repeat(n + 1), vec![b'a'; n]);
            archive.file(&name, 0o644, n as u64, content.as_slice()).unwrap();
            expected.push((name, REGULAR | 0o644, content));
        }
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(read(&bytes), expected);
    }

    #[test]
    fn a_file_that_is_shorter_than_said_is_an_error() {
        let mut archive = Archive::new(Vec::new());
        let error = archive.file("f", 0o644, 10, [0u8; 4].as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_file_that_is_longer_than_said_is_cut() {
        let mut archive = Archive::new(Vec::new());
        archive.file("f", 0o644, 2, [7u8; 4].as_slice()).unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(read(&bytes)[0].2, [7, 7]);
    }
}
