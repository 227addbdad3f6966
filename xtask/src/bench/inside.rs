//! The part of `bench boot` that runs beside the microVMs, in the emulated host or right here.
//!
//! Everything that a contender reads is copied to one folder first (in the emulated host one in
//! memory, as its root lies on a network file system), and each runs once before it is measured.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use casulo_protocol::image::Manifest;
use serde::{Deserialize, Serialize};

use super::measure::{Measure, Run};
use super::memory::{self, Process};
use super::rivals;
use super::trace::{Counter, Exits};

/// Memory of every guest.
pub(super) const MEMORY_MIB: u64 = 128;
/// Firecracker's documented settings for a fast boot, and what Casulo gives its own kernel. The
/// serial port is what tells that the guest is up.
const FIRECRACKER_CMDLINE: &str = "console=ttyS0 quiet reboot=k panic=-1 pci=off \
    8250.nr_uarts=1 i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd random.trust_cpu=on \
    tsc=reliable no_timer_check root=/dev/vda rootfstype=erofs ro init=/init";

const PROCESS: &str = "no microVM: busybox echo";
const CASULO: &str = "casulo run -- /bin/echo";
const CASULO_TRUE: &str = "casulo run -- /bin/true";
const FIRECRACKER: &str = "Firecracker 1.12.1, static init";
const MICROSANDBOX: &str = "msb run -- /bin/echo (0.7.11)";
/// All contenders, in the order in which they are measured.
pub(super) const ALL: [&str; 5] = [PROCESS, CASULO, CASULO_TRUE, FIRECRACKER, MICROSANDBOX];

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to do, as JSON
    plan: PathBuf,
}

/// What is to be measured. Something that a rival lacks is a reason.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    /// Folder of `casulo` and `casulo-vmm`.
    pub(super) programs: PathBuf,
    /// `CASULO_HOME`.
    pub(super) home: PathBuf,
    pub(super) firecracker: Result<PathBuf, String>,
    /// What Firecracker boots from.
    pub(super) volume: Result<PathBuf, String>,
    pub(super) microsandbox: Result<PathBuf, String>,
    pub(super) runs: u32,
    pub(super) emulated: bool,
}

/// A line on standard output: what is known so far does not depend on what comes after.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Line {
    Row(Row),
    /// What `casulo run --timings --json` says, run by run.
    Timings(Result<Vec<serde_json::Value>, String>),
}

/// What was measured of one contender. What could not be is a reason.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) runs: Result<Vec<Run>, String>,
    pub(super) exits: Result<Exits, String>,
    pub(super) memory: Result<Vec<Process>, String>,
}

/// Something to be measured.
struct Contender {
    name: &'static str,
    /// Written to stdout when the result is there.
    marker: Option<&'static str>,
    /// The command; with `true`, one whose guest stays when it has written the marker.
    command: Box<dyn Fn(bool) -> Command>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(&args.plan)?)?;
    let measure = Measure::adopting()?;
    let work = tempfile::tempdir()?;
    let bench = Bench { measure, plan, work: work.path().to_owned() };
    for folder in ["input", "output", "user"] {
        fs::create_dir(work.path().join(folder))?;
    }
    rivals::root(&work.path().join("root"))?;
    copy_casulo(&bench.plan.programs, &bench.plan.home, work.path())?;
    say(&Line::Row(bench.row(bench.process())))?;
    say(&Line::Row(bench.row(bench.casulo("/bin/echo", Some("x\n")))))?;
    say(&Line::Row(bench.row(bench.casulo("/bin/true", None))))?;
    say(&Line::Timings(bench.timings().map_err(|e| format!("{e:#}"))))?;
    say(&Line::Row(match bench.firecracker() {
        Ok(contender) => bench.row(contender),
        Err(reason) => missing(FIRECRACKER, &format!("{reason:#}")),
    }))?;
    say(&Line::Row(match bench.microsandbox() {
        Ok(contender) => bench.row(contender),
        Err(reason) => missing(MICROSANDBOX, &format!("{reason:#}")),
    }))
}

fn say(line: &Line) -> Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(std::io::stdout().write_all(&text)?)
}

/// Copies the programs, and kernel, agent and base image to a folder `home`.
pub(super) fn copy_casulo(programs: &Path, home: &Path, work: &Path) -> Result<()> {
    let copy = |from: &Path, to: &Path| -> Result<()> {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy(from, to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        Ok(())
    };
    for program in ["casulo", "casulo-vmm"] {
        copy(&programs.join(program), &work.join(program))?;
    }
    let to = work.join("home");
    let base = fs::read_link(home.join("images/names/base")).context("there is no image base")?;
    let digest = base.file_name().context("the image base has no digest")?;
    let manifest = Path::new("images").join(digest).join("image.json");
    let mut files: Vec<PathBuf> = ["kernel/vmlinux", "kernel/kernel.json"]
        .into_iter()
        .chain(["agent/boot.erofs", "agent/agent.json"])
        .map(PathBuf::from)
        .collect();
    let image: Manifest = serde_json::from_slice(&fs::read(home.join(&manifest))?)?;
    let layers = Path::new("images/layers");
    files.extend(image.layers.iter().map(|l| layers.join(format!("{}.erofs", l.sha256))));
    files.push(manifest);
    for file in files {
        copy(&home.join(&file), &to.join(&file))?;
    }
    fs::create_dir_all(to.join("images/names"))?;
    Ok(symlink(&base, to.join("images/names/base"))?)
}

/// A row without figures.
pub(super) fn missing(name: &str, reason: &str) -> Row {
    Row {
        name: name.to_owned(),
        runs: Err(reason.to_owned()),
        exits: Err(reason.to_owned()),
        memory: Err(reason.to_owned()),
    }
}

/// Where and what.
struct Bench {
    measure: Measure,
    plan: Plan,
    work: PathBuf,
}

impl Bench {
    fn row(&self, contender: Contender) -> Row {
        eprintln!("measuring {}", contender.name);
        let result = self.runs(&contender);
        let Ok(runs) = result else {
            return Row {
                name: contender.name.to_owned(),
                exits: Err("it does not run".to_owned()),
                memory: Err("it does not run".to_owned()),
                runs: result.map_err(|e| format!("{e:#}")),
            };
        };
        Row {
            name: contender.name.to_owned(),
            runs: Ok(runs),
            exits: self.exits(&contender).map_err(|e| format!("{e:#}")),
            memory: self.memory(&contender).map_err(|e| format!("{e:#}")),
        }
    }

    fn once(&self, contender: &Contender) -> Result<Run> {
        let errors = self.work.join("stderr");
        self.measure.once(&mut (contender.command)(false), contender.marker, &errors)
    }

    fn runs(&self, contender: &Contender) -> Result<Vec<Run>> {
        self.once(contender)?;
        (0..self.plan.runs).map(|_| self.once(contender)).collect()
    }

    fn exits(&self, contender: &Contender) -> Result<Exits> {
        let counter = Counter::start().context("the tracepoint kvm:kvm_exit cannot be used")?;
        self.once(contender)?;
        Ok(counter.read()?)
    }

    /// Memory of everything that this process has started, once the guest is up.
    fn memory(&self, contender: &Contender) -> Result<Vec<Process>> {
        let Some(marker) = contender.marker else { return Ok(Vec::new()) };
        let errors = self.work.join("stderr");
        let mut list = Vec::new();
        self.measure.hold(&mut (contender.command)(true), marker, &errors, || {
            list = memory::tree(std::process::id(), MEMORY_MIB)?.split_off(1);
            Ok(())
        })?;
        Ok(list)
    }

    /// The least that starting a program costs.
    fn process(&self) -> Contender {
        let busybox = self.work.join("root/bin/busybox");
        let command = move |hold: bool| {
            let mut command = Command::new(&busybox);
            match hold {
                true => command.args(["sh", "-c", "echo x; sleep 2"]),
                false => command.args(["echo", "x"]),
            };
            command
        };
        Contender { name: PROCESS, marker: Some("x\n"), command: Box::new(command) }
    }

    fn casulo_command(&self) -> Command {
        let mut command = Command::new(self.work.join("casulo"));
        command.env("CASULO_HOME", self.work.join("home"));
        if self.plan.emulated {
            command.env("CASULO_EMULATED", "1");
        }
        command.args(["run", "--host", "native", "--cold", "--memory", &MEMORY_MIB.to_string()]);
        command.arg("--input").arg(self.work.join("input"));
        command.arg("--output").arg(self.work.join("output"));
        command
    }

    fn casulo(&self, program: &'static str, marker: Option<&'static str>) -> Contender {
        let base = self.casulo_command();
        let command = move |hold: bool| {
            let mut command = copy_of(&base);
            command.arg("--");
            match hold {
                true => command.args(["/bin/sh", "-c", "echo x; sleep 2"]),
                false => command.args([program, "x"]),
            };
            command
        };
        let name = if marker.is_some() { CASULO } else { CASULO_TRUE };
        Contender { name, marker, command: Box::new(command) }
    }

    fn firecracker(&self) -> Result<Contender> {
        let known = |part: &Result<PathBuf, String>| part.clone().map_err(anyhow::Error::msg);
        let program = self.work.join("firecracker");
        fs::copy(known(&self.plan.firecracker)?, &program)?;
        let volume = self.work.join("init.erofs");
        fs::copy(known(&self.plan.volume)?, &volume)?;
        let config = |arguments: &str, name: &str| -> Result<PathBuf> {
            let file = self.work.join(name);
            let config = serde_json::json!({
                "boot-source": {
                    "kernel_image_path": self.work.join("home/kernel/vmlinux"),
                    "boot_args": format!("{FIRECRACKER_CMDLINE}{arguments}"),
                },
                "drives": [{
                    "drive_id": "root",
                    "path_on_host": volume,
                    "is_root_device": true,
                    "is_read_only": true,
                }],
                "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY_MIB },
            });
            fs::write(&file, serde_json::to_vec(&config)?)?;
            Ok(file)
        };
        let (ends, stays) = (config("", "ends.json")?, config(" -- stay", "stays.json")?);
        let command = move |hold: bool| {
            let mut command = Command::new(&program);
            command.args(["--no-api", "--level", "Error", "--config-file"]);
            command.arg(if hold { &stays } else { &ends });
            command
        };
        // The serial port turns one into the other.
        Ok(Contender { name: FIRECRACKER, marker: Some("x\r\n"), command: Box::new(command) })
    }

    fn microsandbox(&self) -> Result<Contender> {
        let from = self.plan.microsandbox.clone().map_err(anyhow::Error::msg)?;
        let bundle = from.parent().and_then(Path::parent).context("msb lies in no folder")?;
        let to = self.work.join("msb");
        for folder in ["bin", "lib"] {
            fs::create_dir_all(to.join(folder))?;
            for entry in fs::read_dir(bundle.join(folder))? {
                let entry = entry?;
                fs::copy(entry.path(), to.join(folder).join(entry.file_name()))?;
            }
        }
        let (program, root) = (to.join("bin/msb"), self.work.join("root"));
        let home = self.work.join("user");
        let command = move |hold: bool| {
            let mut command = Command::new(&program);
            command.env("HOME", &home);
            command.args(["run", "--no-net", "--quiet", "--no-stdin", "--cpus", "1", "--memory"]);
            command.arg(format!("{MEMORY_MIB}M")).arg(&root).arg("--");
            match hold {
                true => command.args(["/bin/sh", "-c", "echo x; sleep 2"]),
                false => command.args(["/bin/echo", "x"]),
            };
            command
        };
        Ok(Contender { name: MICROSANDBOX, marker: Some("x\n"), command: Box::new(command) })
    }

    /// Where Casulo's time goes, in its own words.
    fn timings(&self) -> Result<Vec<serde_json::Value>> {
        eprintln!("measuring Casulo's phases");
        (0..self.plan.runs)
            .map(|_| {
                let mut command = self.casulo_command();
                command.args(["--timings", "--json", "--", "/bin/true"]).stdin(Stdio::null());
                let output = command.output()?;
                let text = String::from_utf8_lossy(&output.stderr);
                let line = text.lines().find(|line| line.starts_with('{'));
                let line = line.with_context(|| format!("no timings but {text:?}"))?;
                Ok(serde_json::from_str(line)?)
            })
            .collect()
    }
}

/// The same program, arguments and environment.
fn copy_of(base: &Command) -> Command {
    let mut command = Command::new(base.get_program());
    command.args(base.get_args());
    command.envs(base.get_envs().filter_map(|(key, value)| Some((key, value?))));
    command
}
