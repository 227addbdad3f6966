//! The sandboxes of one gateway: fresh ones for single calls, kept ones under unguessable ids.
//!
//! A kept sandbox ends when its caller destroys it, when nobody called it for the idle time, when it
//! is too old, or with the gateway. Another caller's, expired and unknown ids give the same error.

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::spec::SandboxSpec;

use super::admission::{Full, Place, Places, Rate};
use super::limits::{Limits, PATIENCE};
use super::processes::Processes;
use super::server::capacity;
use super::tools::args::Language;
use crate::{Files, Output, Runtime, Sandbox};

/// Who calls: whoever holds the token of that name, or the one client on standard input and output.
/// Callers do not see each other's sandboxes.
pub(super) type Caller = Arc<str>;

/// A running sandbox and its place among the allowed ones.
pub(super) struct Held {
    pub(super) id: String,
    pub(super) sandbox: Arc<Sandbox>,
    pub(super) processes: Mutex<Processes>,
    turns: Mutex<HashMap<Language, Arc<tokio::sync::Mutex<()>>>>,
    owner: Caller,
    created: Instant,
    used: Mutex<Instant>,
    calls: std::sync::atomic::AtomicUsize,
    _place: Place,
}

impl Held {
    /// Waits until no other call uses the interpreter of `language`.
    pub(super) async fn turn(&self, language: Language) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = Arc::clone(lock(&self.turns).entry(language).or_default());
        turn.lock_owned().await
    }
}

/// A call in a kept sandbox: while it lives the sandbox is not idle.
pub(super) struct Call(Arc<Held>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        *lock(&self.0.used) = Instant::now();
    }
}

impl std::ops::Deref for Call {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.0
    }
}

/// All sandboxes of a gateway.
pub(super) struct Sandboxes {
    runtime: Arc<Runtime>,
    template: SandboxSpec,
    output: Option<PathBuf>,
    pub(super) limits: Limits,
    places: Arc<Places>,
    calls: Arc<Places>,
    rate: Rate,
    kept: Mutex<HashMap<String, Arc<Held>>>,
    names: Mutex<HashMap<(Caller, String), NameSlot>>,
}

/// The id of the sandbox of one name; locked while it is made.
type NameSlot = Arc<tokio::sync::Mutex<String>>;

/// A poisoned lock means that another call panicked; the map itself is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_id() -> Result<String, TaskError> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(
        |error| TaskError {
            class: ErrorClass::Internal,
            message: format!("cannot make a sandbox id: no random bytes from the kernel: {error}"),
            retry: Retry::Yes,
        },
    )?;
    Ok(bytes.iter().fold(String::from("sb_"), |id, byte| format!("{id}{byte:02x}")))
}

impl Sandboxes {
    pub(super) fn new(
        runtime: Arc<Runtime>,
        mut template: SandboxSpec,
        limits: Limits,
    ) -> Arc<Self> {
        let output = template.output.take();
        let places = Places::new(limits.places(template.memory_mib), limits.sandboxes_per_caller);
        let calls = Places::new(limits.calls, limits.calls_per_caller);
        let rate = Rate::new(limits.calls_per_minute, limits.burst);
        Arc::new(Self {
            runtime,
            template,
            output,
            limits,
            places,
            calls,
            rate,
            kept: Mutex::default(),
            names: Mutex::default(),
        })
    }

    /// Lets a call of `caller` run: at once, or when it is its turn.
    pub(super) async fn admit(&self, caller: &Caller) -> Result<Place, TaskError> {
        self.rate.take(caller, Instant::now()).map_err(|wait| {
            capacity(format!(
                "you have made more than {} calls a minute; try again in {} seconds",
                self.limits.calls_per_minute,
                wait.as_secs().saturating_add(1)
            ))
        })?;
        self.calls.take(caller, PATIENCE).await.map_err(|full| {
            capacity(match full {
                Full::Yours(each) => format!(
                    "{each} of your calls have been running for {} seconds; try again when one of \
                     them has ended",
                    PATIENCE.as_secs()
                ),
                Full::All(total) => format!(
                    "{total} calls have been running for {} seconds; try again later",
                    PATIENCE.as_secs()
                ),
            })
        })
    }

    /// Boots a sandbox for one call of `caller`, when there is a place for it.
    pub(super) async fn fresh(&self, caller: &Caller) -> Result<Held, TaskError> {
        let place = self.places.take(caller, PATIENCE).await.map_err(|full| self.full(full))?;
        self.boot(caller, place).await
    }

    fn full(&self, full: Full) -> TaskError {
        capacity(match full {
            Full::Yours(each) => format!(
                "you have {each} sandboxes, and cannot have more; destroy one with destroy_sandbox"
            ),
            Full::All(total) if total < self.limits.sandboxes => format!(
                "all {total} sandboxes that fit into the memory for sandboxes are in use; destroy \
                 one with destroy_sandbox, or try again later"
            ),
            Full::All(total) => format!(
                "all {total} sandboxes are in use; destroy one with destroy_sandbox, or try again \
                 later"
            ),
        })
    }

    async fn boot(&self, caller: &Caller, place: Place) -> Result<Held, TaskError> {
        let id = new_id()?;
        let mut spec = self.template.clone();
        if let Some(output) = &self.output {
            let folder = output.join(&id);
            DirBuilder::new().mode(0o700).create(&folder).map_err(|error| TaskError {
                class: ErrorClass::Internal,
                message: format!("cannot make the output folder {}: {error}", folder.display()),
                retry: Retry::Yes,
            })?;
            spec.output = Some(folder);
        }
        let sandbox = self.runtime.sandbox(spec).await.map_err(TaskError::from)?;
        let now = Instant::now();
        Ok(Held {
            id,
            sandbox: Arc::new(sandbox),
            processes: Mutex::default(),
            turns: Mutex::default(),
            owner: Arc::clone(caller),
            created: now,
            used: Mutex::new(now),
            calls: std::sync::atomic::AtomicUsize::new(0),
            _place: place,
        })
    }

    /// The id of `caller`'s sandbox of that name, which is booted if there is none, and whether it
    /// was. Without a name it is always booted.
    pub(super) async fn create(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<(String, bool), TaskError> {
        if name.is_empty() {
            return Ok((self.keep(caller).await?, true));
        }
        let slot = {
            let mut names = lock(&self.names);
            // Names that nobody makes a sandbox for, and whose sandbox is gone, are forgotten.
            names.retain(|_, slot| {
                Arc::strong_count(slot) > 1
                    || slot.try_lock().is_ok_and(|id| lock(&self.kept).contains_key(id.as_str()))
            });
            Arc::clone(names.entry((Arc::clone(caller), name.to_owned())).or_default())
        };
        // Whoever else asks for the name meanwhile waits, and gets the same.
        let mut id = slot.lock().await;
        if self.get(caller, &id).is_ok() {
            return Ok((id.clone(), false));
        }
        *id = self.keep(caller).await?;
        Ok((id.clone(), true))
    }

    async fn keep(&self, caller: &Caller) -> Result<String, TaskError> {
        let place = self.places.try_take(caller).map_err(|full| {
            let mut error = self.full(full);
            error.message.push_str(&self.live(caller));
            error
        })?;
        let held = self.boot(caller, place).await?;
        let id = held.id.clone();
        lock(&self.kept).insert(id.clone(), Arc::new(held));
        Ok(id)
    }

    /// A sentence that names the caller's sandboxes.
    fn live(&self, caller: &Caller) -> String {
        let kept = lock(&self.kept);
        let mut ids: Vec<&str> = kept
            .values()
            .filter(|held| held.owner == *caller)
            .map(|held| held.id.as_str())
            .collect();
        ids.sort_unstable();
        if ids.is_empty() {
            return "; none of them is kept by you".to_owned();
        }
        format!("; yours are {}", ids.join(", "))
    }

    /// The kept sandbox of that id, if it is `caller`'s.
    pub(super) fn get(&self, caller: &Caller, id: &str) -> Result<Call, TaskError> {
        let mut kept = lock(&self.kept);
        let held = kept.get(id).filter(|held| held.owner == *caller).ok_or_else(not_found)?;
        if !held.sandbox.is_alive() {
            // Who was in it has been told; it only waits to be cleared away.
            if let Some(held) = kept.remove(id) {
                tokio::spawn(async move { held.sandbox.close(Files::Ignore).await.map(drop) });
            }
            return Err(not_found());
        }
        held.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Call(Arc::clone(held)))
    }

    /// Ends the kept sandbox of that id, if it is `caller`'s; calls that run in it end with
    /// `guest_lost`. Tells what came out of it.
    pub(super) async fn destroy(&self, caller: &Caller, id: &str) -> Result<Output, TaskError> {
        let held = {
            let mut kept = lock(&self.kept);
            match kept.get(id) {
                Some(held) if held.owner == *caller => kept.remove(id),
                _ => None,
            }
        }
        .ok_or_else(not_found)?;
        held.sandbox.close(Files::List).await.map_err(TaskError::from)
    }

    /// How many there are, and how many of them are kept.
    #[cfg(feature = "http")]
    pub(super) fn count(&self) -> (usize, usize) {
        (self.places.taken(), lock(&self.kept).len())
    }

    /// Ends every sandbox that is idle, too old or lost.
    pub(super) fn reap(&self) {
        let now = Instant::now();
        let mut ended = Vec::new();
        lock(&self.kept).retain(|_, held| {
            let busy = held.calls.load(std::sync::atomic::Ordering::Relaxed) > 0;
            let idle = now.duration_since(*lock(&held.used)) >= self.limits.idle && !busy;
            let old = now.duration_since(held.created) >= self.limits.life;
            let lost = !held.sandbox.is_alive();
            if idle || old || lost {
                ended.push(Arc::clone(held));
            }
            !(idle || old || lost)
        });
        for held in ended {
            // Nobody is there to be told what came out.
            tokio::spawn(async move { held.sandbox.close(Files::Ignore).await.map(drop) });
        }
    }

    /// Ends every kept sandbox, and makes what they wrote safe to read.
    pub(super) async fn close(&self) {
        let all: Vec<_> = lock(&self.kept).drain().collect();
        for (_, held) in &all {
            held.sandbox.kill();
        }
        for (_, held) in all {
            // Nobody is there to be told.
            let _ = held.sandbox.close(Files::Ignore).await;
        }
    }
}

fn not_found() -> TaskError {
    TaskError {
        class: ErrorClass::SandboxNotFound,
        message: "no such sandbox: it was never made, was destroyed or has expired; make one with \
                  create_sandbox"
            .to_owned(),
        retry: Retry::No,
    }
}
