//! A VM that is coming up: from the spawned process to the agent's tools.
//!
//! A boot that fails or hangs says where. The host sees some steps itself: the VMM's answer, the agent's
//! call, its greeting. How far a silent kernel has come is told by its devices: Linux brings up its drivers
//! before it reads its root file system, and nothing reads a disk before that (the guest kernel looks for no
//! partitions).

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use casulo_protocol::agent::{BOOT_PORT, MCP_PORT, Personalise};
use casulo_protocol::event::Phase;
use casulo_protocol::vmm::{DeviceState, Request, VmConfig};
use tokio::net::UnixStream;

use crate::agent::mcp::Client;
use crate::agent::{boot, quote};
use crate::error::Error;
use crate::events::Log;
use crate::evidence::Evidence;
use crate::vm::control::{Accepted, Control, End};
use crate::vm::spawn::Process;

/// What was going on when a boot failed, in the order in which it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BootPhase {
    /// The VMM builds the VM.
    Building,
    /// The guest kernel runs; none of its drivers has set up a device.
    Kernel,
    /// Drivers have set up devices; the root file system has not been read.
    Root,
    /// The root file system has been read; the agent has not called.
    Agent,
    /// The agent has called, and said nothing.
    Greeting,
    /// The agent was told what to do, and has not said that it is done.
    Personalising,
    /// The agent is ready, but its tools do not answer.
    Connecting,
}

impl fmt::Display for BootPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Building => "building the VM",
            Self::Kernel => "booting the guest kernel, before its first driver",
            Self::Root => "booting the guest kernel, before it read its root file system",
            Self::Agent => "starting the guest agent, before it called",
            Self::Greeting => "waiting for the guest agent's greeting",
            Self::Personalising => "waiting for the guest agent to prepare the guest",
            Self::Connecting => "connecting to the guest agent",
        })
    }
}

impl BootPhase {
    /// The same, as far as the devices tell of a guest whose agent has not called.
    fn refined(self, devices: &[DeviceState]) -> Self {
        const BLOCK: u32 = 2;
        if self != Self::Kernel {
            return self;
        }
        // The first disk holds the root file system.
        let disk = devices.iter().find(|device| device.device == BLOCK);
        if disk.is_some_and(|disk| disk.rounds > 0) {
            Self::Agent
        } else if devices.iter().any(DeviceState::driver_ok) {
            Self::Root
        } else {
            Self::Kernel
        }
    }
}

/// A VM that is coming up.
pub(crate) struct Boot {
    pub(crate) control: Control,
    pub(crate) process: Process,
    accepted: Accepted,
    phase: BootPhase,
    /// Longest wait for the diagnosis of a VM that failed to boot.
    patience: Duration,
}

/// How long the end of a VM is waited for when something of it broke.
const END_WAIT: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(2);
const PATIENCE_EMULATED: Duration = Duration::from_secs(30);

impl Boot {
    pub(crate) fn new(
        control: Control,
        process: Process,
        accepted: Accepted,
        emulated: bool,
    ) -> Self {
        let patience = if emulated { PATIENCE_EMULATED } else { PATIENCE };
        Self { control, process, accepted, phase: BootPhase::Building, patience }
    }

    /// From the spawned process to the agent's tools and the boot channel.
    ///
    /// # Errors
    /// The VM did not come up within this many seconds; see [`Error::Boot`].
    pub(crate) async fn run(
        &mut self,
        seconds: u32,
        config: VmConfig,
        fds: &[BorrowedFd<'_>],
        personal: &Personalise,
        log: &Log,
    ) -> Result<(Client, UnixStream), Error> {
        let deadline = Duration::from_secs(u64::from(seconds));
        match tokio::time::timeout(deadline, self.steps(config, fds, personal, log)).await {
            Ok(Ok(ready)) => Ok(ready),
            Ok(Err(reason)) => Err(self.explain(reason).await),
            Err(_) => {
                let reason =
                    format!("it took longer than {seconds} seconds (--boot-timeout gives it more)");
                Err(self.explain(reason).await)
            }
        }
    }

    /// The error is a sentence; [`Self::explain`] adds what is known.
    async fn steps(
        &mut self,
        config: VmConfig,
        fds: &[BorrowedFd<'_>],
        personal: &Personalise,
        log: &Log,
    ) -> Result<(Client, UnixStream), String> {
        self.control.send(&Request::Start(config), fds).await.map_err(|e| e.to_string())?;
        self.control.started().await.map_err(|end| describe(&end))?;
        log.phase(Phase::KernelEntered);
        self.phase = BootPhase::Kernel;
        let mut channel = tokio::select! {
            accepted = self.accepted.recv() => match accepted {
                Some((BOOT_PORT, channel)) => channel,
                Some((port, _)) => return Err(format!("the guest dialled port {port}")),
                None => return Err(describe(&self.control.end().await)),
            },
            end = self.control.end() => return Err(describe(&end)),
        };
        log.phase(Phase::AgentUp);
        self.phase = BootPhase::Greeting;
        let phase = &mut self.phase;
        let talk = async {
            boot::hello(&mut channel).await?;
            *phase = BootPhase::Personalising;
            boot::personalise(&mut channel, personal).await
        };
        tokio::select! {
            result = talk => result.map_err(|e| e.to_string())?,
            end = self.control.end() => return Err(describe(&end)),
        }
        self.phase = BootPhase::Connecting;
        let stream = match self.control.connect(MCP_PORT).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(refusal)) => return Err(quote(&refusal)),
            Err(_) => return Err(describe(&self.control.end().await)),
        };
        log.phase(Phase::Ready);
        Ok((Client::new(stream), channel))
    }

    /// The error of a boot that failed for `reason`, with what is known of the guest.
    async fn explain(&mut self, mut reason: String) -> Error {
        let mut step = None;
        let mut evidence = Evidence::default();
        // A stream may break a moment before the control socket tells why.
        let _ = tokio::time::timeout(END_WAIT, self.control.end()).await;
        if self.control.is_alive() {
            match tokio::time::timeout(self.patience, self.control.diagnose()).await {
                Ok(Ok(found)) => evidence = Evidence::of_hang(found),
                // Nothing is wrong with a VMM that ended meanwhile, or builds.
                Ok(Err(_)) => {}
                Err(_) if self.phase == BootPhase::Building => {}
                Err(_) => reason.push_str("; the VMM does not answer"),
            }
        } else {
            match self.control.end().await {
                End::Failed { phase, .. } => step = Some(quote(&phase)),
                End::Exited { end, console } => evidence = Evidence::of_end(*end, console),
                End::Lost { .. } => reason = lost(&mut self.process, reason).await,
            }
        }
        let phase = self.phase.refined(&evidence.devices);
        Error::Boot { phase, step, reason, evidence: Box::new(evidence) }
    }
}

/// Longest wait for the end of a process whose socket is closed.
const PROCESS_WAIT: Duration = Duration::from_secs(2);

/// Adds to `reason` how the VMM process ended and what it said.
async fn lost(process: &mut Process, mut reason: String) -> String {
    // The socket closes a moment before the process can be waited for.
    let _ = tokio::time::timeout(PROCESS_WAIT, process.ended()).await;
    if let Some(fate) = process.fate() {
        reason = format!("{reason}; casulo-vmm ended with {fate}");
    }
    // Its last words may still be in the pipe.
    tokio::task::yield_now().await;
    let words = process.last_words();
    if !words.is_empty() {
        reason = format!("{reason}: {}", quote(&words));
    }
    reason
}

/// How a VM ended, in a sentence.
pub(crate) fn describe(end: &End) -> String {
    match end {
        End::Failed { error, .. } => quote(error),
        End::Exited { end, .. } => quote(&end.reason.to_string()),
        End::Lost { reason } => reason.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(states: &[(u32, u32, u64)]) -> Vec<DeviceState> {
        let state = |&(device, status, rounds)| DeviceState { device, status, rounds };
        states.iter().map(state).collect()
    }

    #[test]
    fn devices_tell_how_far_a_silent_kernel_came() {
        let phase = |states: &[_]| BootPhase::Kernel.refined(&devices(states));
        // Nothing, and a driver that was only half through.
        assert_eq!(phase(&[]), BootPhase::Kernel);
        assert_eq!(phase(&[(2, 0, 0), (4, 0xb, 0)]), BootPhase::Kernel);
        // Entropy is up and has given some; the disk was not read.
        assert_eq!(phase(&[(2, 0xf, 0), (4, 0xf, 9)]), BootPhase::Root);
        assert_eq!(phase(&[(2, 0xf, 3), (2, 0xf, 0), (4, 0xf, 9)]), BootPhase::Agent);
    }

    #[test]
    fn what_the_host_saw_itself_is_not_refined() {
        for phase in [BootPhase::Building, BootPhase::Greeting, BootPhase::Connecting] {
            assert_eq!(phase.refined(&devices(&[(2, 0xf, 3)])), phase);
        }
    }
}
