//! Boots a Linux kernel in this process: `boot KERNEL [DISK]...`
//!
//! The kernel is an uncompressed `vmlinux`; the first disk, if any, holds the root file system. Prints
//! the guest's console when the guest has ended, and why it did.

use std::error::Error;
use std::fs::File;
use std::io::Write;

use casulo_vmm::{Disk, MachineConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let kernel = arguments.next().ok_or("usage: boot KERNEL [DISK]...")?;

    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let mut config = MachineConfig::new(kvm, File::open(kernel)?);
    config.cpus = 2;
    config.memory_mib = 256;
    config.cmdline.push_str(" root=/dev/vda ro");
    for disk in arguments {
        config.disks.push(Disk { file: File::open(disk)?, read_only: true });
    }

    let vm = config.build()?;
    vm.start();
    let end = vm.wait();
    let mut out = std::io::stdout();
    write!(out, "{}", vm.console.tail(usize::MAX))?;
    writeln!(out, "{}", end.reason)?;
    Ok(())
}
