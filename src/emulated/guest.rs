//! Process 1 of the emulated machine: this same binary, started by its kernel as [`INIT`].
//!
//! It loads the modules, puts the root file system together and hands over to [`pump`]. What goes
//! wrong before the job has started is written to the console, which ends up in the error message
//! on this machine's side.

use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};
use rustix::system::RebootCommand;

use super::FORWARDED;
use super::idle_vm::IdleVm;
use super::job::{Export, GuestJob};
use super::pump;
use super::qemu::{CONTROL_PORT, DATA_PORT};

/// Path in the initial file system, and how this binary knows what it is to be.
pub(super) const INIT: &str = "/casulo-emulated-init";
const NEW_ROOT: &str = "/newroot";
/// How long the serial ports may take to appear.
const PORTS_DEADLINE: Duration = Duration::from_secs(60);

/// Whether this process is process 1 of an emulated machine. Then `main` must call [`init`] before
/// anything else.
pub fn is_init() -> bool {
    rustix::process::getpid().is_init() && std::env::args_os().next().is_some_and(|a| a == INIT)
}

/// Runs the emulated machine, from its first process to power-off.
pub fn init() -> ! {
    if let Err(error) = machine() {
        report(&format!("casulo: emulated host: {error}"));
    }
    rustix::fs::sync();
    // It does not return; if it fails, ending process 1 makes the kernel panic, which ends QEMU.
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    std::process::exit(1)
}

fn report(message: &str) {
    for console in ["/dev/ttyS0", "/dev/console"] {
        if let Ok(mut file) = OpenOptions::new().write(true).open(console)
            && writeln!(file, "{message}").is_ok()
        {
            return;
        }
    }
}

/// Says in an error what was tried.
trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> io::Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> io::Result<T> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            io::Error::new(error.kind(), format!("{}: {error}", what()))
        })
    }
}

fn machine() -> io::Result<()> {
    mount("proc", Path::new("/proc"), "proc", MountFlags::empty(), "")?;
    mount("sysfs", Path::new("/sys"), "sysfs", MountFlags::empty(), "")?;
    mount("devtmpfs", Path::new("/dev"), "devtmpfs", MountFlags::empty(), "")?;
    load_modules(Path::new("/modules"))?;
    let job: GuestJob = serde_json::from_slice(&fs::read("/job.json")?)?;
    let data = open_port(DATA_PORT)?;
    let control = open_port(CONTROL_PORT)?;
    root_file_system(&job.exports)?;
    network().context(|| "cannot set the network up".to_owned())?;
    let hostname = job.hostname.to_os();
    rustix::system::sethostname(hostname.as_bytes())
        .context(|| "cannot set the host name".to_owned())?;
    // Without KVM in the emulated machine the job will say so itself.
    let idle_vm = IdleVm::new();
    if let Err(error) = &idle_vm {
        report(&format!("casulo: no idle VM: {error}"));
    }
    let result = pump::run(&job, data, control);
    drop(idle_vm);
    result
}

fn mount(source: &str, target: &Path, kind: &str, flags: MountFlags, data: &str) -> io::Result<()> {
    let data = CString::new(data)?;
    rustix::mount::mount(source, target, kind, flags, data.as_c_str())
        .context(|| format!("cannot mount {source} on {}", target.display()))
}

/// Loads the modules in the order of their file names. One that does not load is reported, and left
/// to whoever misses it: it may belong to a device that is not there.
fn load_modules(folder: &Path) -> io::Result<()> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .context(|| "the initial file system has no modules".to_owned())?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<io::Result<_>>()?;
    files.sort();
    for file in files {
        match rustix::system::finit_module(File::open(&file)?, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => report(&format!("casulo: cannot load {}: {error}", file.display())),
        }
    }
    Ok(())
}

/// Opens the serial port of this name once the other side is connected.
fn open_port(name: &str) -> io::Result<File> {
    let deadline = Instant::now() + PORTS_DEADLINE;
    let mut port: Option<File> = None;
    while Instant::now() < deadline {
        if port.is_none() {
            port = find_port(name)?;
        }
        if let Some(open) = port.take_if(|p| is_connected(p)) {
            return Ok(open);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("there is no serial port {name}")))
}

fn find_port(name: &str) -> io::Result<Option<File>> {
    let Ok(entries) = fs::read_dir("/sys/class/virtio-ports") else { return Ok(None) };
    for entry in entries {
        let entry = entry?;
        let found = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        let device = Path::new("/dev").join(entry.file_name());
        if found.trim() == name && device.exists() {
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&device)
                .map(Some)
                .context(|| format!("cannot open {}", device.display()));
        }
    }
    Ok(None)
}

/// A port whose other side is not there yet hangs up, and reads as if it had ended.
fn is_connected(port: &File) -> bool {
    let mut fds = [PollFd::new(port, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = rustix::event::poll(&mut fds, Some(&now));
    polled.is_ok() && fds.iter().all(|fd| !fd.revents().contains(PollFlags::HUP))
}

/// Mounts everything below [`NEW_ROOT`] and makes that the root.
fn root_file_system(exports: &[Export]) -> io::Result<()> {
    let root = Path::new(NEW_ROOT);
    let nothing = MountFlags::empty();
    let private = MountFlags::NOSUID | MountFlags::NODEV;
    mount_9p("root", root, false, Cache::Loose)?;
    mount("proc", &root.join("proc"), "proc", nothing, "")?;
    mount("sysfs", &root.join("sys"), "sysfs", nothing, "")?;
    mount("cgroup2", &root.join("sys/fs/cgroup"), "cgroup2", nothing, "")?;
    let dev = root.join("dev");
    mount("devtmpfs", &dev, "devtmpfs", nothing, "mode=755")?;
    for folder in ["pts", "shm", "mqueue"] {
        fs::create_dir_all(dev.join(folder))?;
    }
    mount("devpts", &dev.join("pts"), "devpts", nothing, "gid=5,mode=620,ptmxmode=666")?;
    mount("tmpfs", &dev.join("shm"), "tmpfs", private, "mode=1777")?;
    mount("mqueue", &dev.join("mqueue"), "mqueue", nothing, "")?;
    mount("tmpfs", &root.join("run"), "tmpfs", private, "mode=755")?;
    fs::create_dir_all(root.join("run/lock"))?;
    fs::set_permissions(root.join("run/lock"), fs::Permissions::from_mode(0o1777))?;
    devices(&dev)?;

    let changes = Path::new("/overlay");
    mount("tmpfs", changes, "tmpfs", nothing, "mode=755")?;
    for (index, folder) in ["tmp", "var/tmp"].into_iter().enumerate() {
        let target = root.join(folder);
        if target.symlink_metadata().is_ok_and(|m| m.is_dir()) {
            overlay(&target, &changes.join(index.to_string()))?;
        }
    }
    for export in exports {
        let path = export.path.to_path();
        let target = root.join(path.strip_prefix("/").unwrap_or(&path));
        // Only where a file system of this machine hides the folder is there something to create.
        fs::create_dir_all(&target).context(|| format!("cannot mount on {}", path.display()))?;
        mount_9p(&export.tag, &target, export.writable, Cache::Through)?;
    }

    rustix::process::chdir(root)?;
    rustix::mount::mount_move(".", "/").context(|| "cannot move the root".to_owned())?;
    rustix::process::chroot(".").context(|| "cannot change the root".to_owned())?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// How freely a 9p file system is cached.
#[derive(Clone, Copy)]
enum Cache {
    /// As if nobody else changed it.
    Loose,
    /// What is read is what is there, and what is written is there at once.
    Through,
}

fn mount_9p(tag: &str, target: &Path, writable: bool, cache: Cache) -> io::Result<()> {
    let flags = if writable { MountFlags::empty() } else { MountFlags::RDONLY };
    let cache = match cache {
        Cache::Loose => "loose",
        Cache::Through => "mmap",
    };
    let data = format!("trans=virtio,version=9p2000.L,msize=512000,cache={cache}");
    mount(tag, target, "9p", flags, &data)
}

/// Lets `target` be written to; the changes are kept below `changes`.
fn overlay(target: &Path, changes: &Path) -> io::Result<()> {
    let (upper, work) = (changes.join("upper"), changes.join("work"));
    fs::create_dir_all(&upper)?;
    fs::create_dir_all(&work)?;
    fs::set_permissions(&upper, fs::Permissions::from_mode(0o1777))?;
    let data = format!(
        "lowerdir={},upperdir={},workdir={}",
        target.display(),
        upper.display(),
        work.display()
    );
    mount("overlay", target, "overlay", MountFlags::empty(), &data)
}

/// What udev would do: names that programs expect, and KVM for every user.
fn devices(dev: &Path) -> io::Result<()> {
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, dev.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    for name in ["kvm", "fuse", "net/tun", "vhost-vsock"] {
        let device = dev.join(name);
        if device.exists() {
            fs::set_permissions(&device, fs::Permissions::from_mode(0o666))?;
        }
    }
    Ok(())
}

/// Brings loopback up, and where QEMU passes a port on, the interface that it comes from.
fn network() -> io::Result<()> {
    const LOOPBACK: u32 = 1;
    link_up(LOOPBACK)?;
    // There is one if this machine was started with it.
    if let Ok(index) = fs::read_to_string("/sys/class/net/eth0/ifindex") {
        let index = index.trim().parse().map_err(io::Error::other)?;
        add_address(index, FORWARDED, 24)?;
        link_up(index)?;
    }
    Ok(())
}

/// `ip link set up`: RTM_NEWLINK with IFF_UP.
fn link_up(index: u32) -> io::Result<()> {
    const RTM_NEWLINK: u16 = 16;
    const IFF_UP: u32 = 1;
    // ifinfomsg: family and padding, type, index, flags, mask of changed flags
    let mut message = vec![0; 4];
    message.extend(index.to_ne_bytes());
    message.extend(IFF_UP.to_ne_bytes());
    message.extend(IFF_UP.to_ne_bytes());
    netlink(RTM_NEWLINK, 0, &message)
}

/// `ip address add`: RTM_NEWADDR.
fn add_address(index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    const RTM_NEWADDR: u16 = 20;
    const NLM_F_CREATE: u16 = 0x400;
    const AF_INET: u8 = 2;
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    // ifaddrmsg: family, length of the prefix, flags, scope, index; then two attributes of 8 bytes
    let mut message = vec![AF_INET, prefix, 0, 0];
    message.extend(index.to_ne_bytes());
    for attribute in [IFA_LOCAL, IFA_ADDRESS] {
        message.extend(8u16.to_ne_bytes());
        message.extend(attribute.to_ne_bytes());
        message.extend(address.octets());
    }
    netlink(RTM_NEWADDR, NLM_F_CREATE, &message)
}

/// Sends one message to the kernel's routing tables, and reads whether it was done.
fn netlink(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    const HEADER: u32 = 16;
    const NLM_F_REQUEST: u16 = 1;
    const NLM_F_ACK: u16 = 4;
    // Protocol 0 is NETLINK_ROUTE.
    let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?.saturating_add(HEADER);
    // nlmsghdr: length, type, flags, sequence, port
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &kernel)?;
    // nlmsgerr: after the header, 0 or a negative error number.
    let mut answer = [0; 64];
    let (got, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    match answer.get(..got).and_then(|answer| answer.get(16..20)) {
        Some(&[a, b, c, d]) => match i32::from_ne_bytes([a, b, c, d]) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        },
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// For error messages.
pub(super) fn display(text: &OsStr) -> std::path::Display<'_> {
    Path::new(text).display()
}
