//! Who may do how much at once, and how often: so that one caller's work does not keep another's out.
//!
//! A place is given to the caller whose turn it is, not to who asks most: callers with something
//! waiting take turns, and none can hold more than its share.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::sandboxes::Caller;

/// Most that may wait for a caller.
const MAX_WAITING: usize = 256;

/// Places that callers share.
#[derive(Debug)]
pub(super) struct Places {
    total: usize,
    each: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    callers: BTreeMap<Caller, Account>,
    /// Who got the last place that had to be waited for.
    last: Option<Caller>,
}

#[derive(Debug, Default)]
struct Account {
    taken: usize,
    waiting: VecDeque<oneshot::Sender<Place>>,
}

/// A place; dropping it gives it back.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    caller: Caller,
}

/// Why there is no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The caller holds all that it may.
    Yours(usize),
    /// All are taken.
    All(usize),
}

impl Places {
    /// `total` places, of which one caller can hold `each`.
    pub(super) fn new(total: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { total, each: each.min(total), state: Mutex::default() })
    }

    #[cfg(any(test, feature = "http"))]
    pub(super) fn taken(&self) -> usize {
        self.state().taken
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The counts are right at every point at which the lock is given back.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place if one is free.
    pub(super) fn try_take(self: &Arc<Self>, caller: &Caller) -> Result<Place, Full> {
        let mut state = self.state();
        self.room(&state, caller)?;
        Ok(self.count(&mut state, caller))
    }

    /// Takes a place, waiting for one if need be.
    pub(super) async fn take(
        self: &Arc<Self>,
        caller: &Caller,
        patience: Duration,
    ) -> Result<Place, Full> {
        let wait = {
            let mut state = self.state();
            let (full, nobody_waits) = (
                self.room(&state, caller).err(),
                state.callers.values().all(|account| account.waiting.is_empty()),
            );
            match full {
                None if nobody_waits => return Ok(self.count(&mut state, caller)),
                Some(full) if patience.is_zero() => return Err(full),
                _ => {}
            }
            let account = state.callers.entry(Arc::clone(caller)).or_default();
            account.waiting.retain(|waiter| !waiter.is_closed());
            if account.waiting.len() >= MAX_WAITING {
                return Err(Full::Yours(self.each));
            }
            let (give, wait) = oneshot::channel();
            account.waiting.push_back(give);
            wait
        };
        self.give();
        match tokio::time::timeout(patience, wait).await {
            Ok(Ok(place)) => Ok(place),
            _ => Err(self.room(&self.state(), caller).err().unwrap_or(Full::All(self.total))),
        }
    }

    fn room(&self, state: &State, caller: &Caller) -> Result<(), Full> {
        if state.callers.get(caller).is_some_and(|account| account.taken >= self.each) {
            return Err(Full::Yours(self.each));
        }
        if state.taken >= self.total { Err(Full::All(self.total)) } else { Ok(()) }
    }

    fn count(self: &Arc<Self>, state: &mut State, caller: &Caller) -> Place {
        state.taken = state.taken.saturating_add(1);
        let account = state.callers.entry(Arc::clone(caller)).or_default();
        account.taken = account.taken.saturating_add(1);
        Place { places: Arc::clone(self), caller: Arc::clone(caller) }
    }

    /// Gives free places to those who wait, caller by caller.
    fn give(self: &Arc<Self>) {
        loop {
            let (place, waiter) = {
                let mut state = self.state();
                let Some(caller) = self.turn(&mut state) else { return };
                let account = state.callers.get_mut(&caller);
                let Some(waiter) = account.and_then(|a| a.waiting.pop_front()) else { return };
                state.last = Some(Arc::clone(&caller));
                (self.count(&mut state, &caller), waiter)
            };
            // One who has given up meanwhile gives it back, outside of the lock.
            drop(waiter.send(place));
        }
    }

    /// The next caller, after the last, who waits and may have a place.
    fn turn(&self, state: &mut State) -> Option<Caller> {
        for account in state.callers.values_mut() {
            account.waiting.retain(|waiter| !waiter.is_closed());
        }
        if state.taken >= self.total {
            return None;
        }
        let may = |(_, account): &(&Caller, &Account)| {
            !account.waiting.is_empty() && account.taken < self.each
        };
        let after = state
            .callers
            .iter()
            .filter(may)
            .find(|(caller, _)| Some(*caller) > state.last.as_ref());
        after.or_else(|| state.callers.iter().find(may)).map(|(caller, _)| Arc::clone(caller))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        {
            let mut state = self.places.state();
            state.taken = state.taken.saturating_sub(1);
            let empty = state.callers.get_mut(&self.caller).is_some_and(|account| {
                account.taken = account.taken.saturating_sub(1);
                account.taken == 0 && account.waiting.is_empty()
            });
            if empty {
                state.callers.remove(&self.caller);
            }
        }
        self.places.give();
    }
}

/// How often each caller may call: a bucket of `burst` calls that fills at `per_minute`.
#[derive(Debug)]
pub(super) struct Rate {
    per_minute: u32,
    burst: u32,
    buckets: Mutex<BTreeMap<Caller, (f64, Instant)>>,
}

impl Rate {
    pub(super) fn new(per_minute: u32, burst: u32) -> Self {
        // A whole minute's calls are the most that may come at once.
        Self { per_minute, burst: burst.min(per_minute), buckets: Mutex::default() }
    }

    /// Whether `caller` may call at `now`; if not, how long until it may.
    pub(super) fn take(&self, caller: &Caller, now: Instant) -> Result<(), Duration> {
        let burst = f64::from(self.burst);
        let per_second = f64::from(self.per_minute) / 60.0;
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, filled) = buckets.entry(Arc::clone(caller)).or_insert((burst, now));
        *left =
            (*left + now.saturating_duration_since(*filled).as_secs_f64() * per_second).min(burst);
        *filled = now;
        if *left < 1.0 {
            return Err(Duration::try_from_secs_f64((1.0 - *left) / per_second)
                .unwrap_or(Duration::from_secs(60)));
        }
        *left -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(name: &str) -> Caller {
        name.into()
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_given_up_to_each_limit_and_not_beyond() {
        let places = Places::new(3, 2);
        let (a, b) = (caller("a"), caller("b"));
        let held = [places.try_take(&a).unwrap(), places.try_take(&a).unwrap()];
        assert_eq!(places.try_take(&a).unwrap_err(), Full::Yours(2));
        let third = places.try_take(&b).unwrap();
        assert_eq!(places.try_take(&b).unwrap_err(), Full::All(3));
        assert_eq!(places.take(&b, Duration::ZERO).await.unwrap_err(), Full::All(3));
        let late = places.take(&a, Duration::from_secs(5)).await;
        assert_eq!(late.unwrap_err(), Full::Yours(2));
        drop((held, third));
        assert_eq!(places.taken(), 0);
        assert!(places.state().callers.is_empty(), "nothing is left of callers who are done");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_asks_for_everything_does_not_starve_another() {
        let places = Places::new(2, 2);
        let (greedy, modest) = (caller("a"), caller("b"));
        let first = places.try_take(&greedy).unwrap();
        let second = places.try_take(&greedy).unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let queue = |who: &Caller| {
            let (places, who, order) = (Arc::clone(&places), Arc::clone(who), Arc::clone(&order));
            tokio::spawn(async move {
                let place = places.take(&who, Duration::from_secs(60)).await.unwrap();
                order.lock().unwrap().push(who.to_string());
                tokio::time::sleep(Duration::from_secs(1)).await;
                drop(place);
            })
        };
        let mut all: Vec<_> = (0..20).map(|_| queue(&greedy)).collect();
        tokio::task::yield_now().await;
        // The modest one comes last, and does not wait for the twenty.
        all.extend((0..3).map(|_| queue(&modest)));
        tokio::task::yield_now().await;
        drop((first, second));
        for one in all {
            one.await.unwrap();
        }
        let order = order.lock().unwrap().join("");
        assert_eq!(order.len(), 23);
        assert!(order[..6].matches('b').count() == 3, "{order}");
        assert_eq!(places.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_leaves_no_hole() {
        let places = Places::new(1, 1);
        let a = caller("a");
        let held = places.try_take(&a).unwrap();
        for _ in 0..1000 {
            let gone = places.take(&a, Duration::from_secs(3600));
            assert!(tokio::time::timeout(Duration::from_millis(1), gone).await.is_err());
        }
        let waits = {
            let (places, a) = (Arc::clone(&places), Arc::clone(&a));
            tokio::spawn(async move { places.take(&a, Duration::from_secs(60)).await.is_ok() })
        };
        tokio::task::yield_now().await;
        drop(held);
        assert!(waits.await.unwrap());
        assert_eq!(places.taken(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_of_a_caller_is_bounded() {
        let places = Places::new(1, 1);
        let a = caller("a");
        let held = places.try_take(&a).unwrap();
        let queue = || {
            let (places, a) = (Arc::clone(&places), Arc::clone(&a));
            tokio::spawn(async move { places.take(&a, Duration::from_secs(60)).await.is_ok() })
        };
        let waiting: Vec<_> = (0..MAX_WAITING).map(|_| queue()).collect();
        while places.state().callers.get(&a).map_or(0, |a| a.waiting.len()) < MAX_WAITING {
            tokio::task::yield_now().await;
        }
        let one_more = places.take(&a, Duration::from_secs(60)).await;
        assert_eq!(one_more.unwrap_err(), Full::Yours(1));
        drop(held);
        for one in waiting {
            assert!(one.await.unwrap());
        }
    }

    #[test]
    fn no_more_calls_come_at_once_than_in_a_minute() {
        let (rate, a, now) = (Rate::new(20, 200), caller("a"), Instant::now());
        let taken = (0..200).filter(|_| rate.take(&a, now).is_ok()).count();
        assert_eq!(taken, 20);
    }

    #[test]
    fn the_rate_of_a_caller_is_its_own_and_comes_back_with_time() {
        let rate = Rate::new(60, 3);
        let (a, b, now) = (caller("a"), caller("b"), Instant::now());
        for _ in 0..3 {
            rate.take(&a, now).unwrap();
        }
        let wait = rate.take(&a, now).unwrap_err();
        assert!(wait > Duration::from_millis(900) && wait <= Duration::from_secs(1));
        rate.take(&b, now).unwrap();
        assert!(rate.take(&a, now + Duration::from_millis(900)).is_err());
        rate.take(&a, now + Duration::from_millis(1001)).unwrap();
        // What is not used does not add up beyond the burst.
        let later = now + Duration::from_secs(3600);
        for _ in 0..3 {
            rate.take(&a, later).unwrap();
        }
        assert!(rate.take(&a, later).is_err());
    }
}
