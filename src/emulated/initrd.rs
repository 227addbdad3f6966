//! The initial file system of the emulated machine, put together in memory.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::MemfdFlags;

use super::cpio::Archive;
use super::guest::INIT;
use super::job::GuestJob;

/// A memory file: the installed archive of modules, then one with this binary and the job.
pub(super) fn build(modules: &Path, job: &GuestJob) -> io::Result<OwnedFd> {
    let mut initrd = File::from(rustix::fs::memfd_create("casulo-initrd", MemfdFlags::CLOEXEC)?);
    io::copy(&mut File::open(modules)?, &mut initrd)?;
    // An archive must begin at a multiple of four; one of ours ends at one.
    let end = initrd.stream_position()?;
    let padding = end.next_multiple_of(4) - end;
    io::copy(&mut io::Read::take(io::repeat(0), padding), &mut initrd)?;

    let mut archive = Archive::new(io::BufWriter::with_capacity(1 << 16, initrd));
    for folder in ["proc", "sys", "dev", "newroot", "overlay"] {
        archive.directory(folder, 0o755)?;
    }
    let binary = File::open("/proc/self/exe")?;
    let size = binary.metadata()?.len();
    archive.file(INIT.trim_start_matches('/'), 0o755, size, binary)?;
    let job = serde_json::to_vec(job)?;
    archive.file("job.json", 0o400, job.len() as u64, job.as_slice())?;
    let mut initrd = archive.finish()?.into_inner().map_err(|e| e.into_error())?;
    initrd.flush()?;
    Ok(initrd.into())
}
