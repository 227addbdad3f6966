//! The part of `bench fs` that runs beside the microVMs.
//!
//! Every contender gets the same two folders, one to write to and one to read from, on a tmpfs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::super::inside::copy_casulo;
use super::pvh;
use super::workload::{self, Line, MARK, MEASURES};

/// Memory of every guest.
const MEMORY_MIB: u32 = 256;
/// How long a contender may be silent.
const PATIENCE: Duration = Duration::from_secs(1200);
/// Name of the virtio-fs device.
const TAG: &str = "bench";

/// All contenders, in the order in which they are measured.
pub(super) const CONTENDERS: [Contender; 5] = [
    Contender { name: "host", kind: Kind::Host },
    Contender { name: "casulo run", kind: Kind::Casulo(&[]) },
    Contender { name: "casulo run --input-live", kind: Kind::Casulo(&["--input-live"]) },
    Contender { name: "virtiofsd cache=auto", kind: Kind::Virtiofsd("auto") },
    Contender { name: "virtiofsd cache=always", kind: Kind::Virtiofsd("always") },
];

/// Something to be measured.
pub(super) struct Contender {
    pub(super) name: &'static str,
    kind: Kind,
}

enum Kind {
    Host,
    /// With these options.
    Casulo(&'static [&'static str]),
    /// In this cache mode, without a thread pool.
    Virtiofsd(&'static str),
}

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to do, as JSON
    plan: PathBuf,
}

/// What is to be measured. A rival that is missing is a reason.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// Folder of `casulo`, `casulo-vmm` and `xtask`.
    pub(super) programs: PathBuf,
    /// `CASULO_HOME`.
    pub(super) home: PathBuf,
    /// A volume whose process 1 is `xtask`.
    pub(super) volume: PathBuf,
    pub(super) virtiofsd: Result<PathBuf, String>,
    pub(super) runs: u32,
    pub(super) emulated: bool,
    /// Only contenders with this in their names.
    pub(super) only: Option<String>,
    /// Only these measures; none: all.
    pub(super) measures: Vec<usize>,
}

impl Plan {
    /// Options of the workload.
    fn options(&self) -> Vec<String> {
        let mut options = vec!["--runs".to_owned(), self.runs.to_string()];
        if !self.measures.is_empty() {
            let numbers: Vec<String> = self.measures.iter().map(usize::to_string).collect();
            options.extend(["--measures".to_owned(), numbers.join(",")]);
        }
        options
    }
}

/// What was measured of one contender; a line on standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) contender: String,
    /// Lines of its report.
    pub(super) lines: Result<Vec<Line>, String>,
    /// Ticks in a second.
    pub(super) frequency: f64,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(&args.plan)?)?;
    let folder = tempfile::tempdir()?;
    let work = folder.path();
    copy_casulo(&plan.programs, &plan.home, work)?;
    let (readable, shared) = (work.join("shared/ro"), work.join("shared"));
    fs::create_dir_all(&readable)?;
    workload::prepare(&readable)?;
    fs::create_dir(shared.join("rw"))?;
    // Inside the folder to read from, so that it is there in every guest.
    fs::copy(plan.programs.join("xtask"), readable.join("xtask"))?;
    let bench = Bench { plan: &plan, work, shared };
    let begin = (Instant::now(), workload::ticks());
    for contender in &CONTENDERS {
        if plan.only.as_ref().is_some_and(|only| !contender.name.contains(only)) {
            continue;
        }
        eprintln!("measuring {}", contender.name);
        let lines = bench.measure(contender).map_err(|e| format!("{e:#}"));
        let seconds = begin.0.elapsed().as_secs_f64();
        let frequency = workload::ticks().saturating_sub(begin.1) as f64 / seconds;
        let measured = Measured { contender: contender.name.to_owned(), lines, frequency };
        let mut text = serde_json::to_vec(&measured)?;
        text.push(b'\n');
        std::io::stdout().write_all(&text)?;
    }
    Ok(())
}

struct Bench<'a> {
    plan: &'a Plan,
    work: &'a Path,
    /// With the folders `ro` and `rw`.
    shared: PathBuf,
}

impl Bench<'_> {
    fn measure(&self, contender: &Contender) -> Result<Vec<Line>> {
        match &contender.kind {
            Kind::Host => {
                let mut command = Command::new(self.shared.join("ro/xtask"));
                command.args(["bench", "fs-workload"]).args(self.plan.options());
                command.args([self.shared.join("rw"), self.shared.join("ro")]);
                report(&mut command)
            }
            Kind::Casulo(options) => report(&mut self.casulo(options)),
            Kind::Virtiofsd(cache) => self.virtiofsd(cache),
        }
    }

    fn casulo(&self, options: &[&str]) -> Command {
        let mut command = Command::new(self.work.join("casulo"));
        command.env("CASULO_HOME", self.work.join("home"));
        if self.plan.emulated {
            command.env("CASULO_EMULATED", "1");
        }
        // As root, who may have the kernel forget what it has read.
        command.args(["run", "--host", "native", "--cold", "--user", "root", "--memory"]);
        command.arg(MEMORY_MIB.to_string()).args(options);
        command.arg("--input").arg(self.shared.join("ro"));
        command.arg("--output").arg(self.shared.join("rw"));
        command.args(["--", "/workspace/input/xtask", "bench", "fs-workload"]);
        command.args(self.plan.options());
        if !options.is_empty() {
            command.arg("--only-read");
        }
        command.args(["/workspace/output", "/workspace/input"]);
        command
    }

    /// QEMU's lightest machine with the same kernel, and virtiofsd behind its device.
    fn virtiofsd(&self, cache: &str) -> Result<Vec<Line>> {
        let program = self.plan.virtiofsd.clone().map_err(anyhow::Error::msg)?;
        let kernel = self.work.join("vmlinux-pvh");
        pvh::convert(&self.work.join("home/kernel/vmlinux"), &kernel)?;
        let volume = self.work.join("guest.erofs");
        fs::copy(&self.plan.volume, &volume)?;
        let socket = self.work.join("virtiofsd.sock");
        let _ = fs::remove_file(&socket);
        let mut daemon = Command::new(program);
        daemon.arg(format!("--socket-path={}", socket.display())).args([
            "-f",
            "-o",
            "log_level=err",
        ]);
        // Its default; with a pool of 64 threads it ended in the middle of the measures.
        daemon.arg("--thread-pool-size=0");
        daemon.args(["-o", &format!("cache={cache}"), "-o", "sandbox=chroot", "-o"]);
        daemon.arg(format!("source={}", self.shared.display()));
        let mut daemon =
            Ended(daemon.stdin(Stdio::null()).spawn().context("cannot start virtiofsd")?);
        let begin = Instant::now();
        while !socket.exists() {
            let ended = daemon.0.try_wait()?;
            ensure!(ended.is_none(), "virtiofsd ended with {}", ended.unwrap_or_default());
            ensure!(begin.elapsed() < PATIENCE, "virtiofsd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        let memory = format!("{MEMORY_MIB}M");
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-M", "microvm,accel=kvm,acpi=off,isa-serial=on,memory-backend=memory"]);
        qemu.args(["-cpu", "host", "-smp", "1", "-m", &memory, "-nodefaults", "-no-user-config"]);
        qemu.args(["-display", "none", "-no-reboot", "-serial", "stdio"]);
        qemu.args(["-global", "virtio-mmio.force-legacy=false", "-object"]);
        qemu.arg(format!("memory-backend-memfd,id=memory,size={memory},share=on"));
        qemu.arg("-chardev").arg(format!("socket,id=fs,path={}", socket.display()));
        qemu.args(["-device", &format!("vhost-user-fs-device,chardev=fs,tag={TAG}"), "-drive"]);
        qemu.arg(format!("id=root,if=none,format=raw,readonly=on,file={}", volume.display()));
        qemu.args(["-device", "virtio-blk-device,drive=root", "-kernel"]).arg(&kernel);
        // QEMU appends the devices, so that no `--` may stand before the arguments of process 1: the
        // kernel passes on what it does not know.
        qemu.arg("-append").arg(format!(
            "console=ttyS0 quiet reboot=t panic=-1 random.trust_cpu=on tsc=reliable no_timer_check \
             noreplace-smp 8250.nr_uarts=1 root=/dev/vda rootfstype=erofs ro init=/init bench \
             fs-workload {} --mount {TAG} /run/rw /run/ro",
            self.plan.options().join(" ")
        ));
        report(&mut qemu)
    }
}

/// A process that is killed when this is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program to the end of its report.
fn report(command: &mut Command) -> Result<Vec<Line>> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(PATIENCE))?;
    command.stdin(Stdio::null()).stdout(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
    let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let _child = Ended(child);
    // Only the child has the other end now.
    command.stdout(Stdio::null());
    let mut lines = Vec::new();
    let mut rest = Vec::new();
    for line in BufReader::new(ours).lines() {
        let line = line.context("the report stopped")?;
        let Some((_, json)) = line.split_once(MARK) else {
            rest.push(line);
            continue;
        };
        let line: Line = serde_json::from_str(json).context("the report is broken")?;
        let Some(measure) = MEASURES.get(line.measure) else { return Ok(lines) };
        eprintln!("  {}", measure.name);
        lines.push(line);
    }
    bail!("the report ended too early: {}", rest.join(" | "))
}
