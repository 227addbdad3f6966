//! What is measured of a file system: this same program, as a process of the host or of a guest, or as
//! process 1 of a guest that has nothing else.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::{Advice, Mode, OFlags, Timespec, Timestamps};
use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};

use super::confine;

/// Bytes of the large file.
const BIG: usize = 16 << 20;
/// Accesses to random places in it.
const RANDOM: u64 = 1000;
/// Small files, in so many folders.
const SMALL: usize = 500;
const FOLDERS: usize = 20;
/// Where a guest that has nothing else mounts the share; the volume has this folder.
const MOUNTED: &str = "/run";
/// Begins each line of the report; the rest is JSON.
pub(super) const MARK: &str = "fs-workload: ";

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder to write to
    writable: PathBuf,
    /// Folder that was prepared, to read from
    readable: PathBuf,
    /// Runs of each measure, after one that is not counted
    #[arg(long, default_value_t = 3)]
    runs: u32,
    /// Mount this virtio-fs device at `/run` first, and end the machine at the end
    #[arg(long)]
    mount: Option<String>,
    /// Measure only what is read
    #[arg(long)]
    only_read: bool,
    /// Numbers of the only measures to take
    #[arg(long, value_delimiter = ',')]
    measures: Vec<usize>,
}

/// What a measure's amount is counted in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Mebibytes,
    Operations,
}

/// One measure.
pub(super) struct Measure {
    pub(super) name: &'static str,
    pub(super) unit: Unit,
    pub(super) amount: f64,
    /// Whether it works in the folder to read from, instead of that to write to.
    pub(super) reads: bool,
    work: fn(&Files) -> Result<u64>,
}

const fn stream(name: &'static str, reads: bool, work: fn(&Files) -> Result<u64>) -> Measure {
    Measure { name, unit: Unit::Mebibytes, amount: (BIG >> 20) as f64, reads, work }
}

const fn operations(
    name: &'static str,
    amount: usize,
    reads: bool,
    work: fn(&Files) -> Result<u64>,
) -> Measure {
    Measure { name, unit: Unit::Operations, amount: amount as f64, reads, work }
}

/// All of them, in the order in which they are measured. "Cold" is after the guest forgot what it had
/// read; "again" is the same once more right after that.
pub(super) const MEASURES: [Measure; 13] = [
    stream("write, 64 KiB each", false, |_| write(64 << 10)),
    stream("write, 1 MiB each", false, |_| write(1 << 20)),
    stream("read, 64 KiB each, cold", true, |_| read(64 << 10)),
    stream("read, 1 MiB each, cold", true, |_| read(1 << 20)),
    operations("write 4 KiB at random", RANDOM as usize, false, |_| random_write()),
    operations("read 4 KiB at random, cold", RANDOM as usize, true, |_| random_read()),
    operations("open, read, close, cold", SMALL, true, |f| cold(|| open_read_close(f))),
    operations("open, read, close, again", SMALL, true, open_read_close),
    operations("stat, cold", SMALL, true, |f| cold(|| stat(f))),
    operations("stat, again", SMALL, true, stat),
    operations("list folders, cold", SMALL, true, |_| cold(list)),
    operations("unpack small files", SMALL, false, unpack),
    operations("remove them", SMALL, false, |_| remove()),
];

/// The small files, below the folder in which a measure works.
struct Files(Vec<PathBuf>);

/// A line of the report.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Line {
    /// Index of the measure; beyond the last one: the end.
    pub(super) measure: usize,
    /// Ticks of the processor's clock, which runs as fast in the guest as on the host.
    pub(super) ticks: Result<Vec<u64>, String>,
}

/// Fills a folder to read from.
pub(super) fn prepare(folder: &Path) -> Result<()> {
    fs::write(folder.join("big"), pattern(BIG))?;
    for path in small_files(folder) {
        fs::create_dir_all(path.parent().context("no parent")?)?;
        fs::write(&path, pattern(small_size(&path)))?;
    }
    Ok(())
}

pub(crate) fn run(args: Args) -> Result<()> {
    let Some(tag) = &args.mount else {
        return report(&args, &mut io::stdout());
    };
    let none = MountFlags::empty();
    rustix::mount::mount("dev", "/dev", "devtmpfs", none, None::<&CStr>).or_else(|e| {
        // The kernel may have done that.
        if e == rustix::io::Errno::BUSY { Ok(()) } else { Err(e) }
    })?;
    let mut console = File::options().write(true).open("/dev/ttyS0")?;
    rustix::mount::mount("proc", "/proc", "proc", none, None::<&CStr>)?;
    confine::as_an_agent_does()?;
    let result = rustix::mount::mount(tag.as_str(), MOUNTED, "virtiofs", none, None::<&CStr>)
        .with_context(|| format!("cannot mount {tag}"))
        .and_then(|()| report(&args, &mut console));
    if let Err(error) = result {
        writeln!(console, "error: {error:#}")?;
    }
    rustix::system::reboot(rustix::system::RebootCommand::Restart)?;
    Ok(())
}

fn report(args: &Args, out: &mut impl Write) -> Result<()> {
    let files = Files(small_files(Path::new("")));
    for (index, measure) in MEASURES.iter().enumerate() {
        let chosen = args.measures.is_empty() || args.measures.contains(&index);
        if !chosen || (args.only_read && !measure.reads) {
            continue;
        }
        // Paths are relative, so that what lies above the share does not count: overlays, mounts.
        let folder = if measure.reads { &args.readable } else { &args.writable };
        std::env::set_current_dir(folder)
            .with_context(|| format!("cannot go to {}", folder.display()))?;
        let once = |_| (measure.work)(&files);
        // The first one is not counted, and what follows the removal needs something to remove.
        let ticks = match measure.name {
            "unpack small files" => runs(args.runs, |_| {
                let ticks = unpack(&files)?;
                remove()?;
                Ok(ticks)
            }),
            "remove them" => runs(args.runs, |_| {
                unpack(&files)?;
                remove()
            }),
            _ => runs(args.runs, once),
        };
        say(out, &Line { measure: index, ticks: ticks.map_err(|e| format!("{e:#}")) })?;
    }
    say(out, &Line { measure: MEASURES.len(), ticks: Ok(Vec::new()) })
}

fn runs(count: u32, mut once: impl FnMut(u32) -> Result<u64>) -> Result<Vec<u64>> {
    once(0)?;
    (0..count).map(once).collect()
}

fn say(out: &mut impl Write, line: &Line) -> Result<()> {
    // In one piece: a console may have other writers.
    let text = format!("{MARK}{}\n", serde_json::to_string(line)?);
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// The processor's time stamp counter.
pub(super) fn ticks() -> u64 {
    // SAFETY: the instruction only reads a counter, and every x86-64 has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let begin = ticks();
    work()?;
    Ok(ticks().saturating_sub(begin))
}

/// Has the kernel forget what it has read; on a tmpfs that changes nothing.
fn forget() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop caches")?;
    // Whoever serves the files is told of what was forgotten behind the guest's back.
    std::thread::sleep(Duration::from_millis(50));
    Ok(())
}

fn cold(work: impl FnOnce() -> Result<u64>) -> Result<u64> {
    forget()?;
    work()
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(31) >> 3) as u8).collect()
}

fn small_files(folder: &Path) -> Vec<PathBuf> {
    let name = |n: usize| format!("small/folder-{:02}/file-{n:03}.txt", n % FOLDERS);
    let mut list: Vec<PathBuf> = (0..SMALL).map(|n| folder.join(name(n))).collect();
    // Folder by folder, as tools go.
    list.sort();
    list
}

/// 1 to 8 KiB.
fn small_size(path: &Path) -> usize {
    let sum: usize = path
        .file_name()
        .unwrap_or_default()
        .as_encoded_bytes()
        .iter()
        .map(|b| usize::from(*b))
        .sum();
    1024 + sum.wrapping_mul(2_654_435_761) % 7168
}

fn write(block: usize) -> Result<u64> {
    let path = Path::new("written");
    let data = pattern(block);
    let ticks = timed(|| {
        let mut file = File::create(path)?;
        for _ in 0..BIG / block {
            file.write_all(&data)?;
        }
        // A file system may keep what was written until then.
        drop(file);
        Ok(())
    })?;
    fs::remove_file(path)?;
    Ok(ticks)
}

fn read(block: usize) -> Result<u64> {
    forget()?;
    let mut data = vec![0; block];
    timed(|| {
        let file = File::open("big")?;
        for at in (0..BIG).step_by(block) {
            file.read_exact_at(&mut data, at as u64)?;
        }
        Ok(())
    })
}

/// Offsets of pages, the same in each run.
fn random_pages() -> impl Iterator<Item = u64> {
    let pages = (BIG / 4096) as u64;
    (0..RANDOM).scan(1u64, move |state, _| {
        // Knuth's MMIX generator; its upper bits are good enough.
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((*state >> 33) % pages * 4096)
    })
}

fn random_read() -> Result<u64> {
    forget()?;
    let mut data = [0; 4096];
    timed(|| {
        let file = File::open("big")?;
        rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
        for at in random_pages() {
            file.read_exact_at(&mut data, at)?;
        }
        Ok(())
    })
}

fn random_write() -> Result<u64> {
    let path = Path::new("random");
    fs::write(path, pattern(BIG))?;
    let data = pattern(4096);
    let ticks = timed(|| {
        let file = File::options().write(true).open(path)?;
        for at in random_pages() {
            file.write_all_at(&data, at)?;
        }
        drop(file);
        Ok(())
    })?;
    fs::remove_file(path)?;
    Ok(ticks)
}

fn open_read_close(files: &Files) -> Result<u64> {
    let mut data = vec![0; 16 << 10];
    timed(|| {
        for path in &files.0 {
            let file = File::open(path)?;
            while rustix::io::read(&file, &mut data)? > 0 {}
        }
        Ok(())
    })
}

fn stat(files: &Files) -> Result<u64> {
    timed(|| {
        for path in &files.0 {
            fs::symlink_metadata(path)?;
        }
        Ok(())
    })
}

fn list() -> Result<u64> {
    timed(|| {
        for folder in fs::read_dir("small")? {
            for entry in fs::read_dir(folder?.path())? {
                entry?.metadata()?;
            }
        }
        Ok(())
    })
}

/// As `tar x` does: folders, files with their contents, times and modes.
fn unpack(files: &Files) -> Result<u64> {
    let data = pattern(16 << 10);
    timed(|| {
        fs::create_dir("small")?;
        for n in 0..FOLDERS {
            fs::create_dir(format!("small/folder-{n:02}"))?;
        }
        let time = Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        for path in &files.0 {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
            let size = small_size(path);
            rustix::io::write(&file, data.get(..size).context("too little data")?)?;
            rustix::fs::futimens(file.as_fd(), &times)?;
            rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))?;
        }
        Ok(())
    })
}

fn remove() -> Result<u64> {
    timed(|| Ok(fs::remove_dir_all("small")?))
}
