//! Where Casulo's files are, and what a microVM runs on here.

use std::io::Write;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cli::options::{Host, SandboxOptions};
use crate::emulated::{self, EmulatedError, Job, Machine};
use crate::kvm::{self, KvmError};
use crate::{Error, RuntimeConfig};

/// `CASULO_HOME`, else `share/casulo` beside the folder of the program, else the XDG data folder.
pub(crate) fn home() -> PathBuf {
    if let Some(home) = std::env::var_os("CASULO_HOME").filter(|h| !h.is_empty()) {
        return std::path::absolute(&home).unwrap_or_else(|_| home.into());
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.parent()?.join("share/casulo")))
        .filter(|home| home.is_dir());
    if let Some(home) = beside {
        return home;
    }
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let data = data.or_else(|| Some(std::env::home_dir()?.join(".local/share")));
    data.unwrap_or_else(|| "/var/lib".into()).join("casulo")
}

/// The configuration of this installation; `casulo-vmm` lies beside `casulo`.
pub(crate) fn config() -> Result<RuntimeConfig, Error> {
    let exe =
        std::env::current_exe().map_err(|e| Error::io("cannot find the program's own path", e))?;
    let mut config = RuntimeConfig::in_home(&home(), exe.with_file_name("casulo-vmm"));
    if let Some(folder) = std::env::var_os("TMPDIR").map(PathBuf::from).filter(|p| p.is_absolute())
    {
        config.scratch.insert(0, folder);
    }
    config.emulated = emulated::is_emulated();
    Ok(config)
}

/// What became of the choice of a host.
pub(crate) enum Choice {
    /// Go on here.
    Native,
    /// The same command has run in the emulated host, with this exit status.
    Done(u8),
}

/// How the emulated host is connected with this one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Connection {
    /// The command has a terminal.
    pub(crate) terminal: bool,
    /// The command reads standard input.
    pub(crate) input: bool,
    /// The command listens on this address.
    pub(crate) listen: Option<SocketAddrV4>,
}

/// Chooses the host, and runs this process's own command line in the emulated one if it has to be.
pub(crate) fn choose(
    options: &SandboxOptions,
    config: &RuntimeConfig,
    connection: Connection,
) -> Result<Choice, String> {
    if config.emulated || options.host == Host::Native {
        return Ok(Choice::Native);
    }
    if options.host == Host::Auto {
        match usable(config) {
            Ok(()) => return Ok(Choice::Native),
            // Something to be put right is no reason to emulate.
            Err(Trouble::Kvm(e @ (KvmError::Permission { .. } | KvmError::Open(_)))) => {
                return Err(e.to_string());
            }
            Err(trouble) => {
                if let Err(e) = ready(config) {
                    return Err(format!("{trouble}; and {e}"));
                }
                // Nothing can be done about a standard error that does not take the notice.
                let _ = writeln!(std::io::stderr(), "{}", emulated::NOTICE);
            }
        }
    }
    if !connection.input {
        // In the emulated host standard input is a pipe, which is always passed on.
        if let Ok(null) = std::fs::File::open("/dev/null") {
            let _ = rustix::stdio::dup2_stdin(&null);
        }
    }
    match rerun(options, connection) {
        Ok(status) => Ok(Choice::Done(emulated::command::exit_code(status))),
        Err(EmulatedError::Interrupted(signal)) => {
            Ok(Choice::Done(u8::try_from(signal.saturating_add(128)).unwrap_or(125)))
        }
        Err(e) => Err(e.to_string()),
    }
}

/// Whether the emulated host can be started at all.
pub(crate) fn ready(_config: &RuntimeConfig) -> Result<(), EmulatedError> {
    let machine = Machine::new(&home());
    machine.program()?;
    for file in ["vmlinuz", "modules.cpio"] {
        let path = machine.files.join(file);
        if !path.is_file() {
            return Err(EmulatedError::NotInstalled(path));
        }
    }
    Ok(())
}

fn rerun(
    options: &SandboxOptions,
    connection: Connection,
) -> Result<std::process::ExitStatus, EmulatedError> {
    let system = |what, error| EmulatedError::System { what, error };
    let exe = std::env::current_exe().map_err(|e| system("find the program's own path", e))?;
    let argv = std::iter::once(exe.clone().into_os_string()).chain(std::env::args_os().skip(1));
    let mut job = Job::new(argv.collect()).map_err(|e| system("find the current folder", e))?;
    job.terminal = connection.terminal;
    let home = home();
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    if let Some(output) = &options.output {
        // Folders that the machine exports must exist; what else is wrong is found inside it.
        let _ = rustix::fs::mkdir(output, rustix::fs::Mode::RWXU);
    }
    let shares = options.share.iter().map(|s| (s.host.as_path(), s.writable));
    let shares = shares
        .chain(options.output.as_deref().map(|p| (p, true)))
        .chain(options.input.as_deref().map(|p| (p, false)))
        .chain([(home.as_path(), true)])
        .chain(exe.parent().map(|p| (p, false)));
    for (path, writable) in shares.filter(|(path, _)| path.exists()) {
        let list = if writable { &mut job.writable } else { &mut job.readable };
        list.push(absolute(path));
    }
    let mut machine = Machine::new(&home);
    // What the host itself needs beside the guest.
    machine.memory_mib = machine.memory_mib.max(options.memory.saturating_add(1024));
    machine.forward = connection.listen;
    emulated::run(&job, &machine)
}

/// Why this machine's KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    /// It cannot be opened.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// It can be opened, but cannot run a guest kernel.
    #[error("/dev/kvm cannot run a guest kernel: {0}")]
    SelfTest(String),
}

/// Whether KVM runs guest kernels here. Asked once after each start of the machine.
pub(crate) fn usable(config: &RuntimeConfig) -> Result<(), Trouble> {
    let kvm = kvm::open()?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let memory = config.state.join("kvm");
    if let Ok(text) = std::fs::read_to_string(&memory)
        && let Some((seen, verdict)) = text.split_once('\n')
        && !boot.trim().is_empty()
        && seen == boot.trim()
    {
        let verdict = verdict.trim();
        return if verdict == "ok" { Ok(()) } else { Err(Trouble::SelfTest(verdict.to_owned())) };
    }
    let result = self_test(config, kvm);
    let verdict = match &result {
        Ok(()) => "ok".to_owned(),
        Err(e) => e.replace('\n', " "),
    };
    // Not remembered: asked again next time.
    let _ = std::fs::create_dir_all(&config.state);
    let _ = std::fs::write(&memory, format!("{}\n{verdict}\n", boot.trim()));
    result.map_err(Trouble::SelfTest)
}

/// Has the VMM run a tiny guest with instructions that every kernel uses.
fn self_test(config: &RuntimeConfig, kvm: std::os::fd::OwnedFd) -> Result<(), String> {
    let output = Command::new(&config.vmm)
        .arg("--self-test")
        .env_clear()
        .stdin(Stdio::from(kvm))
        .output()
        .map_err(|e| format!("cannot run {}: {e}", config.vmm.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let words: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(300).collect();
    Err(if words.is_empty() { output.status.to_string() } else { words })
}
