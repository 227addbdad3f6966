//! A cgroup for each command below one for the whole workload.
//!
//! The workload's group holds the limits, so that commands share what the VM has and the agent,
//! which stays in the root group, keeps a reserve. A command's group is what makes "kill all of it"
//! and "was a process of it killed for want of memory" exact, whatever the processes do.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

const CONTROLLERS: &[u8] = b"+memory +pids";

/// The workload's group.
#[derive(Clone, Debug)]
pub struct Cgroups {
    workload: Arc<OwnedFd>,
    next: Arc<AtomicU64>,
}

impl Cgroups {
    /// Makes the workload's group `name` below the cgroup v2 folder `root`.
    ///
    /// # Errors
    /// The folder is no cgroup v2, not writable, or lacks the memory and pids controllers.
    pub fn prepare(root: &Path, name: &str) -> io::Result<Self> {
        let root = rustix::fs::openat(CWD, root, folder_flags(), Mode::empty())?;
        write_at(root.as_fd(), "cgroup.subtree_control", CONTROLLERS)?;
        match rustix::fs::mkdirat(&root, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let workload = rustix::fs::openat(&root, name, folder_flags(), Mode::empty())?;
        write_at(workload.as_fd(), "cgroup.subtree_control", CONTROLLERS)?;
        Ok(Self { workload: Arc::new(workload), next: Arc::new(AtomicU64::new(0)) })
    }

    /// Limits the workload as a whole: memory in bytes, and number of processes and threads.
    ///
    /// # Errors
    /// The kernel refuses a value.
    pub fn limit(&self, memory: u64, processes: u32) -> io::Result<()> {
        let workload = self.workload.as_fd();
        write_at(workload, "memory.max", memory.to_string().as_bytes())?;
        write_at(workload, "pids.max", processes.to_string().as_bytes())
    }

    /// Makes a group for one command.
    ///
    /// # Errors
    /// The kernel is out of memory or of groups.
    pub fn create(&self) -> io::Result<CommandGroup> {
        let name = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        rustix::fs::mkdirat(&self.workload, &name, Mode::from_raw_mode(0o755))?;
        let folder = rustix::fs::openat(&self.workload, &name, folder_flags(), Mode::empty())?;
        Ok(CommandGroup { workload: Arc::clone(&self.workload), name, folder })
    }
}

/// The group of one command. Dropping it kills what is in it and removes it if that is possible at
/// once.
#[derive(Debug)]
pub struct CommandGroup {
    workload: Arc<OwnedFd>,
    name: String,
    folder: OwnedFd,
}

impl CommandGroup {
    /// Kills every process in it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn kill(&self) -> io::Result<()> {
        write_at(self.folder.as_fd(), "cgroup.kill", b"1")
    }

    /// Whether a live process is in it.
    ///
    /// # Errors
    /// The file of the kernel cannot be read.
    pub fn populated(&self) -> io::Result<bool> {
        Ok(value_of(&read_at(self.folder.as_fd(), "cgroup.events")?, "populated") != 0)
    }

    /// How many processes of it the kernel killed for want of memory.
    ///
    /// # Errors
    /// The file of the kernel cannot be read.
    pub fn oom_kills(&self) -> io::Result<u64> {
        Ok(value_of(&read_at(self.folder.as_fd(), "memory.events")?, "oom_kill"))
    }

    /// Kills what is left and waits until nothing is.
    ///
    /// # Errors
    /// A process does not go within `patience` (it hangs in the kernel).
    pub async fn clear(&self, patience: Duration) -> io::Result<()> {
        let began = tokio::time::Instant::now();
        let mut pause = Duration::from_micros(200);
        while self.populated()? {
            if began.elapsed() > patience {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "a killed process of the command does not end",
                ));
            }
            // Again each time round: a fork may have been under way.
            self.kill()?;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl AsFd for CommandGroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

impl Drop for CommandGroup {
    fn drop(&mut self) {
        if rustix::fs::unlinkat(&self.workload, &self.name, AtFlags::REMOVEDIR).is_err() {
            // Processes that are still dying keep the empty group; it costs a few kilobytes.
            let _ = self.kill();
            let _ = rustix::fs::unlinkat(&self.workload, &self.name, AtFlags::REMOVEDIR);
        }
    }
}

fn folder_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC
}

fn write_at(folder: BorrowedFd<'_>, name: &str, value: &[u8]) -> io::Result<()> {
    let file = rustix::fs::openat(folder, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value)?;
    Ok(())
}

fn read_at(folder: BorrowedFd<'_>, name: &str) -> io::Result<String> {
    let file = rustix::fs::openat(folder, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = [0; 1024];
    let length = rustix::io::read(&file, &mut buffer)?;
    Ok(String::from_utf8_lossy(buffer.get(..length).unwrap_or_default()).into_owned())
}

/// The number after `key` in a flat keyed file; 0 when it is not there.
fn value_of(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(k, _)| *k == key)
        .and_then(|(_, v)| v.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_keyed_files_are_read_by_key() {
        let text = "low 0\noom 2\noom_kill 3\noom_group_kill 1\n";
        assert_eq!(value_of(text, "oom_kill"), 3);
        assert_eq!(value_of(text, "oom"), 2);
        assert_eq!(value_of(text, "populated"), 0);
        assert_eq!(value_of("populated x", "populated"), 0);
    }

    #[test]
    fn a_folder_that_is_no_cgroup_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Cgroups::prepare(folder.path(), "w").is_err());
    }
}
