//! `run_command` and `execute_code`.

use std::io::Cursor;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use casulo_protocol::agent::Keep;
use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::{RunResult, SandboxFate};
use casulo_protocol::spec::RunSpec;
use rmcp::model::CallToolResult;
use tokio::sync::OwnedMutexGuard;

use super::render::{self, Budget};
use super::sandboxes::Held;
use super::server::{Context, Server, capacity, invalid};
use super::tools::args::{CommandLine, Language, RunOptions, Source};
use crate::capture::Capture;
use crate::{Execution, Files, Program, Stdio};

/// Numbers the calls of a gateway, for the names of their files in a guest.
static CALLS: AtomicU64 = AtomicU64::new(1);

/// A name for the files of one call.
pub(super) fn call_name() -> String {
    format!("call-{}", CALLS.fetch_add(1, Ordering::Relaxed))
}

/// What is to be run.
enum Subject {
    Command(String),
    Code(Language, String),
}

/// A call's program, ready for a sandbox.
struct Job {
    program: Program,
    spec: RunSpec,
    /// What the program gets on its standard input. An interpreter that stays has it from the program.
    stdin: String,
    how: Execution,
    budget: Budget,
}

impl Job {
    /// `stays`: in an interpreter that keeps its variables.
    fn new(subject: Subject, options: &RunOptions, stays: bool, budget: Budget) -> Self {
        let mut spec = RunSpec::default();
        let mut stdin = options.stdin.clone();
        let program = match subject {
            Subject::Command(line) => {
                spec = RunSpec::new(["bash", "-c", &line]);
                Program::Command
            }
            Subject::Code(language, code) => {
                let language = language.name().to_owned();
                if stays {
                    Program::Session { language, code, stdin: std::mem::take(&mut stdin) }
                } else {
                    Program::Code { language, code }
                }
            }
        };
        spec.env.clone_from(&options.env.0);
        spec.timeout_ms = Some(u64::from(options.timeout_seconds) * 1000);
        spec.workdir = options.cwd.wanted();
        Self { program, spec, stdin, how: Execution::default(), budget }
    }
}

impl Server {
    pub(super) async fn run_command(
        &self,
        (subject, options): (CommandLine, RunOptions),
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        self.execute(Subject::Command(subject.command), options, context).await
    }

    pub(super) async fn execute_code(
        &self,
        (subject, options): (Source, RunOptions),
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        self.execute(Subject::Code(subject.language, subject.code), options, context).await
    }

    async fn execute(
        &self,
        subject: Subject,
        mut options: RunOptions,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(options.max_output_bytes, options.raw)?;
        if options.sandbox_id.is_empty()
            && let Some(shared) = context.or_cancelled(self.shared()).await?
        {
            options.sandbox_id = shared;
        }
        let result = if options.sandbox_id.is_empty() {
            self.in_fresh(subject, options, budget, context).await?
        } else {
            self.in_kept(subject, options, budget, context).await?
        };
        render::both(&result)
    }

    /// Dropping the sandbox when the client gives up ends its VM.
    async fn in_fresh(
        &self,
        subject: Subject,
        options: RunOptions,
        budget: Budget,
        context: &Context,
    ) -> Result<RunResult, TaskError> {
        context
            .or_cancelled(async {
                let held = self.sandboxes.fresh(&self.caller).await?;
                let job = Job::new(subject, &options, false, budget);
                let (mut result, capture) = self.one(&held, job, context).await?;
                let ended = self.sandboxes.finish(&held).await?;
                ended.add_to(&mut result);
                result.sandbox = SandboxFate::Discarded;
                Ok(render::command(result, &capture, budget))
            })
            .await
    }

    async fn in_kept(
        &self,
        subject: Subject,
        options: RunOptions,
        budget: Budget,
        context: &Context,
    ) -> Result<RunResult, TaskError> {
        let call = self.sandboxes.get(&self.caller, &options.sandbox_id)?;
        // One interpreter runs one call at a time.
        let (_turn, files) = match &subject {
            Subject::Command(_) => (None, Files::Ignore),
            Subject::Code(language, _) => {
                let turn = self.turn(&call, *language, options.timeout_seconds, context).await?;
                (Some(turn), Files::List)
            }
        };
        let mut job = Job::new(subject, &options, true, budget);
        let keep = Keep { name: call_name(), after: budget.spill_after() };
        job.how = Execution { files, keep: Some(keep) };
        let (mut result, capture) = self.one(&call, job, context).await?;
        if result.timed_out && !call.sandbox.is_alive() {
            return Err(TaskError {
                class: ErrorClass::GuestLost,
                message: "the guest did not end the call when its time was over; the sandbox and \
                          everything in it are gone"
                    .to_owned(),
                retry: Retry::Unknown,
            });
        }
        result.sandbox = SandboxFate::Kept;
        result.sandbox_id = Some(options.sandbox_id);
        Ok(render::command(result, &capture, budget))
    }

    /// Waits until no other call uses the interpreter, for as long as the call itself may take.
    async fn turn(
        &self,
        held: &Held,
        language: Language,
        seconds: u32,
        context: &Context,
    ) -> Result<OwnedMutexGuard<()>, TaskError> {
        let limit = Duration::from_secs(seconds.into());
        let turn = tokio::time::timeout(limit, held.turn(language));
        context
            .or_cancelled(async {
                turn.await.map_err(|_| {
                    capacity(format!(
                        "other calls have kept the {} interpreter of this sandbox busy for {seconds} \
                         seconds; try again when they have ended",
                        language.name(),
                    ))
                })
            })
            .await
    }

    async fn one(
        &self,
        held: &Held,
        job: Job,
        context: &Context,
    ) -> Result<(RunResult, [Capture; 2]), TaskError> {
        let Job { program, spec, stdin, how, budget } = job;
        let capture = [Capture::new(budget.bytes()), Capture::new(budget.bytes())];
        let [stdout, stderr] = &capture;
        let (stdout, stderr) = (context.tee(stdout.clone()), context.tee(stderr.clone()));
        let stdin = (!stdin.is_empty()).then(|| Box::new(Cursor::new(stdin.into_bytes())) as _);
        let stdio = Stdio { stdin, stdout, stderr, control: None };
        let cancelled = context.cancel.cancelled();
        let run = held.sandbox.execute(&spec, &program, stdio, how, cancelled);
        let mut result = context.with_progress(run).await.map_err(TaskError::from)?;
        result.host = self.host;
        Ok((result, capture))
    }

    /// Room for a result.
    pub(super) fn budget(&self, bytes: u32, raw: bool) -> Result<Budget, TaskError> {
        let most = self.sandboxes.limits.output_bytes;
        if bytes > most {
            return Err(invalid(format!(
                "max_output_bytes is {bytes}; this gateway allows at most {most}"
            )));
        }
        Ok(Budget::new(bytes, raw))
    }
}
