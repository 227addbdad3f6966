//! Starting QEMU: its command line, and what it inherits.

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::Signal;

use super::job::Export;
use super::{EmulatedError, FORWARDED, Machine, system};

const PROGRAM: &str = "qemu-system-x86_64";
/// An AMD processor with virtualisation. Without `erms` and `fsrm`: programs that see these copy
/// with `rep movsb`, which TCG emulates, and counts, byte by byte.
const CPU: &str = "EPYC-Milan,+svm,-erms,-fsrm";
/// What only costs instructions here is off: clearing memory on allocation, mitigations, self-tests
/// of ciphers, audit.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 mitigations=off init_on_alloc=0 \
                                nokaslr no_timer_check tsc=reliable random.trust_cpu=on \
                                cryptomgr.notests audit=0 apparmor=0 nowatchdog";
/// Folders of the emulated machine's firmware.
const FIRMWARE: [&str; 2] = ["/usr/share/qemu", "/usr/share/seabios"];
/// Names of the serial ports.
pub(super) const DATA_PORT: &str = "casulo.data";
pub(super) const CONTROL_PORT: &str = "casulo.control";

/// A running QEMU and this side of what it is connected to.
pub(super) struct Qemu {
    pub(super) child: Child,
    pub(super) data: OwnedFd,
    pub(super) control: OwnedFd,
    /// The console, and what QEMU says itself.
    pub(super) console: OwnedFd,
}

/// Descriptors that QEMU inherits, at the numbers they have here.
struct Inherited {
    initrd: OwnedFd,
    data: OwnedFd,
    control: OwnedFd,
    console: OwnedFd,
}

/// The QEMU that was built for the emulated host, else that of the system.
pub(super) fn find(files: &Path) -> Result<PathBuf, EmulatedError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(files.to_owned())
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(PROGRAM))
        .find(|file| file.is_file())
        .ok_or(EmulatedError::NoQemu)
}

fn pair() -> Result<(OwnedFd, OwnedFd), EmulatedError> {
    system(
        "make a socket pair",
        rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        ),
    )
}

/// Starts QEMU. It is killed when the calling thread ends, or when the [`Qemu`] is ended.
pub(super) fn start(
    machine: &Machine,
    kernel: &Path,
    initrd: OwnedFd,
    exports: &[Export],
) -> Result<Qemu, EmulatedError> {
    let program = machine.program()?;
    let (data, data_there) = pair()?;
    let (control, control_there) = pair()?;
    let (console, console_there) = pair()?;
    let stderr = system("copy a descriptor", console_there.try_clone())?;
    let inherited =
        Inherited { initrd, data: data_there, control: control_there, console: console_there };
    let mut command = Command::new(program);
    command
        .args(arguments(machine, kernel, &inherited, exports))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::from(stderr))
        // Ctrl-C is for us to pass on, not for QEMU to die of.
        .process_group(0);
    let parent = rustix::process::getpid();
    let prepare = move || -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // Had the parent ended before that call, no signal would come.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        for fd in [&inherited.initrd, &inherited.data, &inherited.control, &inherited.console] {
            rustix::io::fcntl_setfd(fd.as_fd(), FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only (prctl, getppid, fcntl);
    // it neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
    let child = system("start qemu-system-x86_64", command.spawn())?;
    Ok(Qemu { child, data, control, console })
}

fn arguments(
    machine: &Machine,
    kernel: &Path,
    inherited: &Inherited,
    exports: &[Export],
) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
    // Where Debian has firmware and option ROMs; QEMU looks for them relative to itself, and it may not be in
    // `/usr/bin`.
    for folder in FIRMWARE {
        add(&["-L", folder]);
    }
    add(&["-M", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    // One thread for all processors: with one for each, the emulation of AMD's virtualisation goes wrong about
    // once in five minutes of work with several vCPUs (a processor that idles with its global interrupt flag off,
    // timers that fire for ever), also with the patches. Guests are hardly slower for it.
    add(&["-accel", "tcg,thread=single,tb-size=512"]);
    if machine.icount {
        add(&["-icount", "shift=0,sleep=on", "-smp", "1"]);
    } else {
        add(&["-smp", &machine.cpus.to_string()]);
    }
    add(&["-cpu", CPU, "-m", &machine.memory_mib.to_string()]);
    add(&["-append", &format!("{KERNEL_ARGUMENTS} rdinit={}", super::guest::INIT)]);
    add(&["-initrd", &format!("/proc/self/fd/{}", inherited.initrd.as_raw_fd())]);
    for (name, fd) in [
        ("console", &inherited.console),
        ("data", &inherited.data),
        ("control", &inherited.control),
    ] {
        add(&["-chardev", &format!("socket,id={name},fd={}", fd.as_raw_fd())]);
    }
    add(&["-serial", "chardev:console", "-device", "virtio-rng-pci"]);
    add(&["-device", "virtio-serial-pci,max_ports=3"]);
    add(&["-device", &format!("virtserialport,nr=1,chardev=data,name={DATA_PORT}")]);
    add(&["-device", &format!("virtserialport,nr=2,chardev=control,name={CONTROL_PORT}")]);
    if let Some(address) = machine.forward {
        add(&["-netdev", &forward(address)]);
        add(&["-device", "virtio-net-pci,netdev=net,romfile="]);
    }
    list.push("-kernel".into());
    list.push(kernel.into());
    share(&mut list, "root", OsStr::new("/"), false);
    for export in exports {
        share(&mut list, &export.tag, &export.path.to_os(), export.writable);
    }
    list
}

/// A network without a way out (`restrict`), on which QEMU passes one port on.
fn forward(address: SocketAddrV4) -> String {
    let (ip, port) = (address.ip(), address.port());
    format!("user,id=net,restrict=on,ipv6=off,hostfwd=tcp:{ip}:{port}-{FORWARDED}:{port}")
}

/// A folder over 9p. Owners are as QEMU can make them: an ordinary user's files stay his own.
fn share(list: &mut Vec<OsString>, tag: &str, path: &OsStr, writable: bool) {
    let mut option = OsString::from(format!("local,id={tag},security_model=none,multidevs=remap"));
    if !writable {
        option.push(",readonly=on");
    }
    option.push(",path=");
    option.push(escape(path));
    list.push("-fsdev".into());
    list.push(option);
    list.push("-device".into());
    list.push(format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}").into());
}

/// In an option of QEMU a comma is written twice.
fn escape(path: &OsStr) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut out = Vec::with_capacity(path.len());
    for byte in path.as_bytes() {
        out.push(*byte);
        if *byte == b',' {
            out.push(b',');
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_port_is_passed_on_and_nothing_else() {
        assert_eq!(
            forward("127.0.0.1:7420".parse().unwrap()),
            "user,id=net,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:7420-10.0.2.15:7420"
        );
    }

    #[test]
    fn commas_are_doubled() {
        assert_eq!(escape(OsStr::new("/a,b/,,")), "/a,,b/,,,,");
        let mut list = Vec::new();
        share(&mut list, "t", OsStr::new("/x,y"), false);
        assert_eq!(
            list[1],
            "local,id=t,security_model=none,multidevs=remap,readonly=on,path=/x,,y"
        );
    }
}
