//! The call of a command that streams its output: both halves of it, its time limit, and why a guest
//! was lost.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use casulo_protocol::agent::{CommandResult, STREAM_PORT, tool};
use casulo_protocol::spec::RunSpec;

use super::{AgentCall, Sandbox};
use crate::agent::exec::{Progress, Stdio, pump};
use crate::agent::quote;
use crate::boot::describe;
use crate::error::Error;
use crate::evidence::Evidence;
use crate::vm::control::End;

/// Most output taken after a command's limit: what was on the way, and not a guest that never ends.
const LATE_BYTES: u64 = 64 << 20;
/// How long one half of an answer is waited for when the other half says that all is over.
const SETTLE: Duration = Duration::from_secs(10);

/// How long the reason for a lost guest is waited for.
const END_WAIT: Duration = Duration::from_secs(1);
const END_WAIT_EMULATED: Duration = Duration::from_secs(20);

impl Sandbox {
    /// Both halves of a streamed command: the stream, and the call that started it.
    pub(super) async fn streamed(
        &self,
        spec: &RunSpec,
        request: &AgentCall,
        token: u64,
        stdio: Stdio,
        progress: &Progress,
        cancel: impl Future<Output = ()>,
    ) -> Result<CommandResult, Error> {
        let call = async {
            match request {
                AgentCall::Command(command) => self.ask(tool::RUN_COMMAND, command).await,
                AgentCall::Code(code) => self.ask(tool::EXECUTE_CODE, code).await,
            }
        };
        let stream = async {
            match self.control.connect(STREAM_PORT).await {
                Ok(Ok(stream)) => pump(stream, token, stdio, progress).await,
                Ok(Err(refusal)) => Err(std::io::Error::other(quote(&refusal))),
                Err(e) => Err(e),
            }
        };
        let watchdog = self.watchdog(spec.timeout_ms, progress);
        tokio::pin!(stream, watchdog, cancel);
        // In a box, so that it can be dropped before its end.
        let mut call = Box::pin(call);
        let mut answer: Option<CommandResult> = None;
        let mut streamed = false;
        loop {
            // Once one half is over, the other must follow; while the host itself is slow to take
            // output it may take its time.
            let settle = async {
                if answer.is_none() && !streamed {
                    return std::future::pending().await;
                }
                loop {
                    let before = progress.bytes();
                    tokio::time::sleep(SETTLE).await;
                    if progress.bytes() == before && !progress.blocked.load(Ordering::Relaxed) {
                        return;
                    }
                }
            };
            tokio::select! {
                biased;
                result = &mut call, if answer.is_none() => {
                    let result: CommandResult = result?;
                    // A program that could not be started has no stream to wait for.
                    if streamed || result.start_error.is_some() {
                        return Ok(result);
                    }
                    answer = Some(result);
                }
                result = &mut stream, if !streamed => {
                    if let Err(e) = result {
                        return Err(self.lost(format!("the stream broke: {e}")).await);
                    }
                    if let Some(answer) = answer {
                        return Ok(answer);
                    }
                    streamed = true;
                }
                () = settle => {
                    let text = "the guest agent fell silent at the end of a command";
                    return Err(self.lost(text.into()).await);
                }
                () = &mut cancel => {
                    // That cancels it at the agent, which hears it also when it does not listen to the
                    // stream, or has none yet; the end of the stream tells that it has obeyed.
                    drop(call);
                    progress.discard();
                    if answer.is_none()
                        && !streamed
                        && tokio::time::timeout(self.grace(), stream).await.is_err()
                    {
                        self.kill();
                    }
                    return Err(Error::Cancelled);
                }
                () = &mut watchdog => {
                    self.kill();
                    return Ok(CommandResult { timed_out: true, ..CommandResult::default() });
                }
            }
        }
    }

    /// Ends when a command is so far beyond its limit that the guest must be dead or hostile.
    async fn watchdog(&self, timeout_ms: Option<u64>, progress: &Progress) {
        let Some(ms) = timeout_ms else { return std::future::pending().await };
        tokio::time::sleep(Duration::from_millis(ms)).await;
        let taken = progress.bytes();
        // Time in which the host's side does not take the output is not the guest's fault.
        let mut left = self.grace();
        let step = Duration::from_millis(100);
        while !left.is_zero() {
            let began = tokio::time::Instant::now();
            tokio::time::sleep(step).await;
            if progress.bytes().saturating_sub(taken) > LATE_BYTES {
                return;
            }
            if !progress.blocked.load(Ordering::Relaxed) {
                // On a slow machine a step takes longer than it should.
                left = left.saturating_sub(began.elapsed());
            }
        }
    }

    /// The error of a guest that was lost for `reason`, with what is known.
    pub(super) async fn lost(&self, mut reason: String) -> Error {
        // A stream breaks a moment before the control socket tells why.
        let wait = if self.emulated { END_WAIT_EMULATED } else { END_WAIT };
        let mut evidence = Box::<Evidence>::default();
        if self.killed.load(Ordering::Relaxed) {
            return Error::GuestLost { reason: "it was ended".into(), evidence };
        }
        if let Ok(end) = tokio::time::timeout(wait, self.control.end()).await {
            reason = describe(&end);
            if let End::Exited { end, console } = end {
                *evidence = Evidence::of_end(*end, console);
            } else if let End::Lost { .. } = end {
                reason = self.last_words(reason).await;
            }
        }
        // One that has gone silent or talks nonsense is of no use to anybody.
        self.kill();
        Error::GuestLost { reason, evidence }
    }

    async fn last_words(&self, reason: String) -> String {
        // Give the process time to end before the lock is taken, which is never held across a wait.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        let fate =
            process.fate().map_or_else(String::new, |f| format!("; casulo-vmm ended with {f}"));
        let words = process.last_words();
        let words = if words.is_empty() { words } else { format!(": {}", quote(&words)) };
        format!("{reason}{fate}{words}")
    }
}
