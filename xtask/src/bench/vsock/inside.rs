//! The part of `bench vsock` that runs beside the microVMs.
//!
//! The guest's program is `vmm/examples/vsock_guest`. Each contender boots once, and they are measured in turns.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::super::trace::Counter;
use parent::{Guest, Parent};
use wire::{ECHO, Order, SERVICE, SINK, SOURCE};

#[path = "../../../../vmm/tests/common/parent.rs"]
mod parent;
#[path = "../../../../vmm/examples/vsock_guest/wire.rs"]
mod wire;

/// Memory of every guest.
const MEMORY_MIB: u32 = 128;
const FIRECRACKER_CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 pci=off i8042.noaux i8042.nomux \
    i8042.nopnp i8042.dumbkbd random.trust_cpu=on tsc=reliable no_timer_check root=/dev/vda \
    rootfstype=erofs ro init=/init";
/// How long a transfer may stand still, and a guest may take to boot.
const PATIENCE: Duration = Duration::from_secs(120);

/// All contenders, ours first.
pub(super) const CONTENDERS: [&str; 2] = ["casulo-vmm", "Firecracker 1.12.1"];

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to do, as JSON
    plan: PathBuf,
}

/// What is to be measured. A rival that is missing is a reason.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) vmm: PathBuf,
    pub(super) kernel: PathBuf,
    /// What every guest boots from.
    pub(super) volume: PathBuf,
    pub(super) firecracker: Result<PathBuf, String>,
    pub(super) runs: u32,
}

/// One figure of one contender; a line on standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) contender: String,
    pub(super) measure: String,
    /// Nanoseconds of each run.
    pub(super) times: Result<Vec<u64>, String>,
    /// VM exits of one run.
    pub(super) exits: Result<u64, String>,
}

/// Something to be measured.
pub(super) struct Measure {
    pub(super) name: &'static str,
    kind: u32,
    /// Bytes of each write, on the side that writes.
    size: u32,
    /// Bytes in all, or round trips.
    count: u64,
}

const MIB: u64 = 1 << 20;
/// All of them, in the order in which they are measured.
pub(super) const MEASURES: [Measure; 5] = [
    Measure { name: "host -> guest, 64 KiB writes", kind: SINK, size: 65536, count: 32 * MIB },
    Measure { name: "guest -> host, 64 KiB writes", kind: SOURCE, size: 65536, count: 32 * MIB },
    Measure { name: "host -> guest, 4 KiB writes", kind: SINK, size: 4096, count: 8 * MIB },
    Measure { name: "guest -> host, 4 KiB writes", kind: SOURCE, size: 4096, count: 8 * MIB },
    Measure { name: "1 byte there and back", kind: ECHO, size: 1, count: 300 },
];

impl Measure {
    /// MiB, or round trips.
    pub(super) fn amount(&self) -> f64 {
        match self.kind {
            ECHO => self.count as f64,
            _ => self.count as f64 / MIB as f64,
        }
    }

    /// A rate in words.
    pub(super) fn format(&self, rate: f64, second: &str) -> String {
        match self.kind {
            ECHO => format!("{:.1} µ{second}", 1e6 / rate),
            _ => format!("{rate:.0} MiB/{second}"),
        }
    }

    /// One run on a fresh connection.
    fn once(&self, vm: &dyn Vm) -> Result<Duration> {
        let mut stream = vm.connect()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let order = Order { kind: self.kind, size: 65536, bytes: self.count, millis: 0, seed: 0 };
        let order = if self.kind == SOURCE { Order { size: self.size, ..order } } else { order };
        stream.write_all(&order.to_bytes())?;
        let begin = Instant::now();
        match self.kind {
            SINK => {
                let data = vec![7; self.size as usize];
                let mut left = self.count;
                while left > 0 {
                    stream.write_all(&data)?;
                    left = left.saturating_sub(data.len() as u64);
                }
                stream.read_exact(&mut [0])?;
            }
            SOURCE => {
                let mut data = vec![0; 65536];
                let mut left = self.count;
                while left > 0 {
                    let count = stream.read(&mut data)?;
                    ensure!(count > 0, "the guest closed {left} bytes too early");
                    left = left.saturating_sub(count as u64);
                }
            }
            _ => {
                for _ in 0..self.count {
                    stream.write_all(&[1])?;
                    stream.read_exact(&mut [0])?;
                }
            }
        }
        Ok(begin.elapsed())
    }

    fn exits(&self, vm: &dyn Vm) -> Result<u64> {
        let counter = Counter::start().context("the tracepoint kvm:kvm_exit cannot be used")?;
        self.once(vm)?;
        Ok(counter.read()?.total())
    }
}

/// A running guest.
trait Vm {
    /// A connection to [`SERVICE`].
    fn connect(&self) -> io::Result<UnixStream>;

    /// What there is to say of a guest with which something went wrong.
    fn words(&self) -> String;
}

pub(crate) fn run(args: Args) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(&args.plan)?)?;
    let work = tempfile::tempdir()?;
    let copy = |from: &Path, name: &str| -> Result<PathBuf> {
        let to = work.path().join(name);
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(to)
    };
    let vmm = copy(&plan.vmm, "casulo-vmm")?;
    let kernel = copy(&plan.kernel, "vmlinux")?;
    let volume = copy(&plan.volume, "guest.erofs")?;
    let started: [Result<Box<dyn Vm>>; 2] = [
        casulo(&vmm, &kernel, &volume),
        plan.firecracker
            .clone()
            .map_err(anyhow::Error::msg)
            .and_then(|program| copy(&program, "firecracker"))
            .and_then(|program| firecracker(&program, &kernel, &volume, work.path())),
    ];
    for measure in &MEASURES {
        eprintln!("measuring {}", measure.name);
        let mut times = started.each_ref().map(|vm| match vm {
            Ok(_) => Ok(Vec::new()),
            Err(error) => Err(format!("{error:#}")),
        });
        // In turns, so that whatever else the machine does meets both alike; the first is not counted.
        for round in 0..=plan.runs {
            for (vm, times) in started.iter().zip(&mut times) {
                let (Ok(vm), Ok(list)) = (vm, &mut *times) else { continue };
                match measure.once(&**vm) {
                    Ok(time) if round > 0 => list.push(u64::try_from(time.as_nanos())?),
                    Ok(_) => {}
                    Err(error) => *times = Err(format!("{error:#} {}", vm.words())),
                }
            }
        }
        for ((contender, vm), times) in CONTENDERS.into_iter().zip(&started).zip(times) {
            let exits = match (vm, &times) {
                (Ok(vm), Ok(_)) => measure.exits(&**vm).map_err(|error| format!("{error:#}")),
                _ => Err("it does not run".to_owned()),
            };
            let (contender, measure) = (contender.to_owned(), measure.name.to_owned());
            let mut text = serde_json::to_vec(&Measured { contender, measure, times, exits })?;
            text.push(b'\n');
            io::stdout().write_all(&text)?;
        }
    }
    Ok(())
}

impl Vm for Parent {
    fn connect(&self) -> io::Result<UnixStream> {
        Parent::connect(self, SERVICE)
    }

    fn words(&self) -> String {
        self.console().unwrap_or_else(|error| error.to_string())
    }
}

fn casulo(vmm: &Path, kernel: &Path, volume: &Path) -> Result<Box<dyn Vm>> {
    let guest = Guest { vmm, kernel, volume, cpus: 1, memory_mib: MEMORY_MIB, listen: Vec::new() };
    let parent = Parent::start(&guest)?;
    let begin = Instant::now();
    while let Err(error) = Vm::connect(&parent) {
        ensure!(begin.elapsed() < PATIENCE, "the guest does not listen: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Box::new(parent))
}

/// A running Firecracker.
struct Firecracker {
    child: Child,
    socket: PathBuf,
}

impl Vm for Firecracker {
    fn connect(&self) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // In one piece: it gives up on a line that is not whole when it looks.
        stream.write_all(format!("CONNECT {SERVICE}\n").as_bytes())?;
        // It says "OK" and a port in a line before anything else; the guest speaks only when asked.
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        match line.starts_with("OK ") {
            true => Ok(stream),
            false => Err(io::Error::new(io::ErrorKind::ConnectionRefused, line)),
        }
    }

    fn words(&self) -> String {
        String::new()
    }
}

impl Drop for Firecracker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn firecracker(program: &Path, kernel: &Path, volume: &Path, work: &Path) -> Result<Box<dyn Vm>> {
    let socket = work.join("vsock");
    let config = serde_json::json!({
        "boot-source": { "kernel_image_path": kernel, "boot_args": FIRECRACKER_CMDLINE },
        "drives": [{
            "drive_id": "root",
            "path_on_host": volume,
            "is_root_device": true,
            "is_read_only": true,
        }],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY_MIB },
        "vsock": { "guest_cid": 3, "uds_path": socket },
    });
    let file = work.join("firecracker.json");
    fs::write(&file, serde_json::to_vec(&config)?)?;
    let mut command = Command::new(program);
    command.args(["--no-api", "--level", "Error", "--config-file"]).arg(file);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let console = child.stdout.take();
    let vm = Firecracker { child, socket };
    // A connection that is asked for before the guest has a driver never comes about there.
    let mut lines = BufReader::new(console.context("no standard output")?).lines();
    let ready = lines.any(|line| line.is_ok_and(|line| line.contains("vsock_guest: ready")));
    ensure!(ready, "the guest ended");
    std::thread::spawn(move || lines.count());
    Ok(Box::new(vm))
}
