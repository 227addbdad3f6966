//! The sandboxes of one gateway: fresh ones for single calls, kept ones under unguessable ids.
//!
//! A kept sandbox ends when its caller destroys it, when nobody called it for the idle time, when it
//! is too old, or with the gateway. Another caller's, expired and unknown ids give the same error. What
//! came out of it is kept for a while ([`Store`]).

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use casulo_protocol::error::{ErrorClass, Retry, TaskError};
use casulo_protocol::result::RunResult;
use casulo_protocol::spec::SandboxSpec;
use rustix::fs::{Mode, OFlags};
use tokio_util::task::TaskTracker;

use super::admission::{Full, Place, Places, Rate};
use super::artifacts::{Outcome, Room, Source, Store, uri};
use super::limits::{Limits, PATIENCE};
use super::processes::Processes;
use super::server::{capacity, internal};
use super::tools::args::Language;
use crate::{Error, Files, Output, Runtime, Sandbox};

/// Most names that a guest can make in an output folder that the operator has not asked for, unless
/// there is another limit.
const LIVE_NAMES: u64 = 200_000;

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
    /// Where its output is, if that is to be kept; until it ends.
    output: Mutex<Option<Source>>,
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

/// What came out of a sandbox that has ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    pub(super) output: Output,
    /// What is kept of it, if anything is to be.
    pub(super) outcome: Option<Outcome>,
}

impl Ended {
    /// Puts what came out into the result of the call that the sandbox was for; what is kept is named by
    /// its URI.
    pub(super) fn add_to(self, result: &mut RunResult) {
        let Self { mut output, outcome } = self;
        if let Some(Outcome { kept, .. }) = outcome {
            for file in &mut output.files {
                let found = kept.find(file.path.as_bytes());
                file.uri = found.map(|artifact| uri::of(&kept.id, &artifact.path));
            }
        }
        output.add_to(result);
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
    #[cfg(feature = "http")]
    downloads: Arc<Places>,
    /// What came out of those that have ended; none if nothing is kept.
    pub(super) store: Option<Arc<Store>>,
    /// Sandboxes that are being ended.
    ending: TaskTracker,
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
    ) -> Result<Arc<Self>, Error> {
        let output = template.output.take();
        let store = store(&runtime, &template, &limits)?;
        if store.is_some() && output.is_none() {
            template.output_files.get_or_insert(LIVE_NAMES);
        }
        let places = Places::new(limits.places(template.memory_mib), limits.sandboxes_per_caller);
        let calls = Places::new(limits.calls, limits.calls_per_caller);
        #[cfg(feature = "http")]
        let downloads = Places::new(limits.calls, limits.calls_per_caller);
        let rate = Rate::new(limits.calls_per_minute, limits.burst);
        Ok(Arc::new(Self {
            runtime,
            template,
            output,
            limits,
            places,
            calls,
            rate,
            #[cfg(feature = "http")]
            downloads,
            store: store.map(Arc::new),
            ending: TaskTracker::new(),
            kept: Mutex::default(),
            names: Mutex::default(),
        }))
    }

    /// Checks what sandboxes are made after, as their first one would be.
    pub(super) async fn check(&self) -> Result<(), Error> {
        let mut spec = self.template.clone();
        spec.output.clone_from(&self.output);
        let live = match (&self.store, &self.output) {
            (Some(store), None) => Some(
                store.live("check").map_err(|e| Error::io("cannot make an output folder", e))?,
            ),
            _ => None,
        };
        if let Some(live) = &live {
            spec.output = Some(live.path().to_owned());
        }
        self.runtime.check(&spec).await
    }

    /// Counts a call of `caller`, unless there have been too many.
    pub(super) fn count_call(&self, caller: &Caller) -> Result<(), TaskError> {
        self.rate.take(caller, Instant::now()).map_err(|wait| {
            capacity(format!(
                "you have made more than {} calls a minute; try again in {} seconds",
                self.limits.calls_per_minute,
                wait.as_secs().saturating_add(1)
            ))
        })
    }

    /// Lets a download of `caller` begin, if it can do so at once.
    #[cfg(feature = "http")]
    pub(super) fn download(&self, caller: &Caller) -> Result<Place, TaskError> {
        self.count_call(caller)?;
        self.downloads.try_take(caller).map_err(|full| {
            capacity(match full {
                Full::Yours(each) => format!(
                    "{each} of your downloads are running; try again when one of them has ended"
                ),
                Full::All(total) => format!("{total} downloads are running; try again later"),
            })
        })
    }

    /// Lets a call of `caller` run: at once, or when it is its turn.
    pub(super) async fn admit(&self, caller: &Caller) -> Result<Place, TaskError> {
        self.count_call(caller)?;
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
        let failed = |folder: &Path, error: std::io::Error| TaskError {
            class: ErrorClass::Internal,
            message: format!("cannot make the output folder {}: {error}", folder.display()),
            retry: Retry::Yes,
        };
        let mut source = None;
        if let Some(output) = &self.output {
            let folder = output.join(&id);
            DirBuilder::new().mode(0o700).create(&folder).map_err(|e| failed(&folder, e))?;
            if self.store.is_some() {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let root = rustix::fs::open(&folder, flags, Mode::empty());
                source = Some(Source::Operator(root.map_err(|e| failed(&folder, e.into()))?));
            }
            spec.output = Some(folder);
        } else if let Some(store) = &self.store {
            let live = store.live(&id).map_err(|e| failed(Path::new("of the sandbox"), e))?;
            spec.output = Some(live.path().to_owned());
            source = Some(Source::Live(live));
        }
        let private = matches!(source, Some(Source::Live(_)));
        let sandbox = self.runtime.sandbox_with(spec, private).await.map_err(TaskError::from)?;
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
            output: Mutex::new(source),
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
                self.end(held);
            }
            return Err(not_found());
        }
        held.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Call(Arc::clone(held)))
    }

    /// Whether `caller` has a kept sandbox of that id.
    pub(super) fn is_live(&self, caller: &Caller, id: &str) -> bool {
        lock(&self.kept).get(id).is_some_and(|held| held.owner == *caller)
    }

    /// Ends the kept sandbox of that id, if it is `caller`'s; calls that run in it end with
    /// `guest_lost`. Tells what came out of it.
    pub(super) async fn destroy(&self, caller: &Caller, id: &str) -> Result<Ended, TaskError> {
        let held = {
            let mut kept = lock(&self.kept);
            match kept.get(id) {
                Some(held) if held.owner == *caller => kept.remove(id),
                _ => None,
            }
        }
        .ok_or_else(not_found)?;
        // Also when nobody waits for it any more.
        self.end(held).await.map_err(|e| internal(format!("the end of the sandbox failed: {e}")))?
    }

    /// Ends a sandbox in the background, and keeps what came out of it.
    fn end(&self, held: Arc<Held>) -> tokio::task::JoinHandle<Result<Ended, TaskError>> {
        let store = self.store.clone();
        self.ending.spawn(async move {
            let output = held.sandbox.close(Files::List).await.map_err(TaskError::from)?;
            keep(store, &held, output).await
        })
    }

    /// Ends a fresh sandbox, and keeps what came out of it.
    pub(super) async fn finish(&self, held: &Held) -> Result<Ended, TaskError> {
        let nothing = matches!(&*lock(&held.output), Some(Source::Live(live)) if live.is_empty());
        if nothing && !self.template.shares.iter().any(|share| share.writable) {
            // Then nobody needs to wait until the VM is gone.
            held.sandbox.kill();
            return Ok(Ended::default());
        }
        let output = held.sandbox.finish(Files::List).await.map_err(TaskError::from)?;
        keep(self.store.clone(), held, output).await
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
            self.end(held);
        }
        if let Some(store) = self.store.clone() {
            self.ending.spawn_blocking(move || store.sweep());
        }
    }

    /// Ends every kept sandbox, and makes what they wrote safe to read. Nothing is kept any more.
    pub(super) async fn close(&self) {
        let all: Vec<_> = lock(&self.kept).drain().collect();
        for (_, held) in &all {
            held.sandbox.kill();
        }
        for (_, held) in all {
            // Nobody is there to be told.
            let _ = held.sandbox.close(Files::Ignore).await;
        }
        self.ending.close();
        self.ending.wait().await;
        if let Some(store) = self.store.clone() {
            // An error here means that the runtime ends; then the next server tidies up.
            let _ = tokio::task::spawn_blocking(move || store.clear()).await;
        }
    }
}

fn store(
    runtime: &Runtime,
    template: &SandboxSpec,
    limits: &Limits,
) -> Result<Option<Store>, Error> {
    let ttl = limits.artifact_ttl;
    if ttl.is_zero() {
        return Ok(None);
    }
    let mut folders = runtime.config().scratch.clone();
    if runtime.config().emulated {
        // There the disk is another machine's.
        folders.reverse();
    }
    let shares = template.shares.iter().map(|share| share.host.as_path());
    let shared: Vec<&Path> = shares.chain(template.input.as_deref()).collect();
    let room = Room { ttl, files: limits.artifacts, bytes: limits.artifact_bytes };
    Store::new(&folders, &shared, room).map(Some).map_err(Error::Artifacts)
}

/// Keeps what came out of a sandbox that has ended.
async fn keep(
    store: Option<Arc<Store>>,
    held: &Held,
    mut output: Output,
) -> Result<Ended, TaskError> {
    let released = std::mem::take(&mut output.released);
    let (Some(store), Some(source)) = (store, lock(&held.output).take()) else {
        return Ok(Ended { output, outcome: None });
    };
    let (owner, id) = (Arc::clone(&held.owner), held.id.clone());
    let keep = move || store.keep(&owner, &id, source, released);
    let outcome = tokio::task::spawn_blocking(keep).await;
    let outcome = outcome.map_err(|e| internal(format!("cannot keep the artifacts: {e}")))?;
    Ok(Ended { output, outcome: Some(outcome) })
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
