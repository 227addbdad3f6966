//! The stream of events of one sandbox, from the request to its end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use casulo_protocol::event::{Event, Phase};
use tokio::sync::watch;

/// Most events kept; a sandbox that runs thousands of commands drops its newest ones.
const MOST: usize = 4096;

/// Writing side, shared by the parts of a sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    begin: Instant,
    events: Arc<Mutex<Vec<Event>>>,
    count: watch::Sender<usize>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { begin: Instant::now(), events: Arc::default(), count: watch::Sender::new(0) }
    }

    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        // A push is whole or not there, even if a thread panicked.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Microseconds since the sandbox was asked for.
    pub(crate) fn now_us(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(crate) fn phase(&self, phase: Phase) {
        self.push(Event::Phase { phase, at_us: self.now_us() });
    }

    pub(crate) fn push(&self, event: Event) {
        let mut events = self.events();
        if events.len() < MOST {
            events.push(event);
            self.count.send_replace(events.len());
        }
    }

    pub(crate) fn all(&self) -> Vec<Event> {
        self.events().clone()
    }

    pub(crate) fn subscribe(&self) -> Events {
        Events { events: Arc::clone(&self.events), next: 0, count: self.count.subscribe() }
    }
}

/// Every event of a sandbox, from the first on, as they happen.
#[derive(Debug)]
pub struct Events {
    events: Arc<Mutex<Vec<Event>>>,
    next: usize,
    count: watch::Receiver<usize>,
}

impl Events {
    /// The next event; `None` when the sandbox is gone.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            let event = {
                let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
                events.get(self.next).cloned()
            };
            if let Some(event) = event {
                self.next = self.next.saturating_add(1);
                return Some(event);
            }
            self.count.changed().await.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn subscribers_see_everything() {
        let log = Log::new();
        log.phase(Phase::Prepared);
        let mut events = log.subscribe();
        assert!(matches!(events.next().await, Some(Event::Phase { phase: Phase::Prepared, .. })));
        log.phase(Phase::Ready);
        assert!(matches!(events.next().await, Some(Event::Phase { phase: Phase::Ready, .. })));
        drop(log);
        assert_eq!(events.next().await, None);
    }

    #[test]
    fn bounded() {
        let log = Log::new();
        (0..MOST + 10).for_each(|_| log.phase(Phase::Closed));
        assert_eq!(log.all().len(), MOST);
    }
}
