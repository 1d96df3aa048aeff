//! Bounds the connections of a listener, in all and for each source. At a limit the connection that has been idle for the longest
//! time is evicted, never one that is in use.
//!
//! A connection is idle from its start, and again after each use. A source that has all of its own places, or most of all
//! places when none is left, gives up its longest idle one for a newer one; so a flood from one address evicts its own
//! connections, and others are unharmed. A connection that has been idle for less than a second is not evicted by its own
//! source, or a burst of honest ones would evict each other before any is done: then the newcomer is refused. Where no
//! connection is idle the newcomer is refused, too.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How many connections may have a place at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaceLimits {
    /// From one source: an IPv4 address or an IPv6 /64.
    pub per_source: usize,
    /// From all sources.
    pub total: usize,
}

/// The places of one listener.
#[derive(Debug)]
pub struct Places {
    limits: PlaceLimits,
    epoch: Instant,
    taken: Mutex<Taken>,
}

impl Places {
    /// Free places.
    #[must_use]
    pub fn new(limits: PlaceLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            epoch: Instant::now(),
            taken: Mutex::default(),
        })
    }

    /// A place for a connection from `peer`, at the cost of an idle one where a limit is reached; that one's
    /// [`Place::evicted`] ends.
    ///
    /// # Errors
    /// The limit that was reached, when no connection can be evicted for this one.
    pub fn enter(self: &Arc<Self>, peer: IpAddr) -> Result<Place, Reached> {
        let (source, now) = (source(peer), self.now());
        let mut taken = self.lock();
        let reached = if taken.of(source) >= self.limits.per_source {
            Some(Reached::PerSource)
        } else if taken.all >= self.limits.total {
            Some(Reached::Total)
        } else {
            None
        };
        match reached {
            Some(Reached::PerSource) if !taken.evict(source, now, SETTLED) => {
                return Err(Reached::PerSource);
            }
            Some(Reached::Total) if !taken.evict_from_largest(source, now) => {
                return Err(Reached::Total);
            }
            Some(_) | None => {}
        }
        let evicted = CancellationToken::new();
        let activity = Arc::new(Activity {
            uses: AtomicUsize::new(0),
            idle_since: AtomicU64::new(now.0),
        });
        let number = taken.add(source, now, activity.clone(), evicted.clone());
        drop(taken);
        Ok(Place {
            places: self.clone(),
            source,
            number,
            activity,
            evicted,
            reached,
        })
    }

    /// How many places are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.lock().all
    }

    fn now(&self) -> Moment {
        let since = self.epoch.elapsed().as_nanos();
        Moment(u64::try_from(since).unwrap_or(u64::MAX))
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, given back when dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    source: IpAddr,
    number: u64,
    activity: Arc<Activity>,
    evicted: CancellationToken,
    reached: Option<Reached>,
}

/// Which limit a newcomer met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// [`PlaceLimits::per_source`].
    PerSource,
    /// [`PlaceLimits::total`].
    Total,
}

impl Place {
    /// The limit that was reached when the place was taken, so that another one was lost.
    #[must_use]
    pub fn reached(&self) -> Option<Reached> {
        self.reached
    }

    /// Waits until the place is lost to a newer connection, which may be never. A connection that has come into use since
    /// then has lost its place, too, and should end with that use. Cancel-safe.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Marks the connection as in use until the value is dropped; it may be in use several times at once.
    #[must_use]
    pub fn in_use(self: &Arc<Self>) -> InUse {
        self.activity.uses.fetch_add(1, Ordering::Relaxed);
        InUse(self.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().remove(self.source, self.number);
    }
}

/// See [`Place::in_use`]. Holds the place.
#[derive(Debug)]
pub struct InUse(Arc<Place>);

impl Drop for InUse {
    fn drop(&mut self) {
        let Place {
            places, activity, ..
        } = &*self.0;
        activity.idle_since.store(places.now().0, Ordering::Relaxed);
        activity.uses.fetch_sub(1, Ordering::Release);
    }
}

/// Whether a connection is in use, and since when it is not. Written without the lock of [`Places`], at each request.
#[derive(Debug)]
struct Activity {
    uses: AtomicUsize,
    idle_since: AtomicU64,
}

impl Activity {
    fn idle_since(&self) -> Option<Moment> {
        let is_idle = self.uses.load(Ordering::Acquire) == 0;
        is_idle.then(|| Moment(self.idle_since.load(Ordering::Relaxed)))
    }
}

/// Nanoseconds since the listener's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Moment(u64);

impl Moment {
    fn after(self, time: Duration) -> Self {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    all: usize,
    sources: HashMap<IpAddr, Source>,
    /// Sources by how many places they have.
    by_size: BTreeSet<(usize, IpAddr)>,
}

/// The places of one source.
#[derive(Debug, Default)]
struct Source {
    takers: HashMap<u64, Taker>,
    /// Each taker by a lower bound of the time since when it is idle, see [`Taker::queued`].
    queue: BTreeSet<(Moment, u64)>,
}

#[derive(Debug)]
struct Taker {
    /// The key in [`Source::queue`]: the connection was in use until then, or is not looked at again before.
    queued: Moment,
    activity: Arc<Activity>,
    evicted: CancellationToken,
}

impl Source {
    /// Removes the taker that has been idle for the longest time, if that is at least `least`. Each look at a connection that
    /// was used since it was queued moves it back in the queue, so that evictions stay cheap however many are in use.
    fn pop_idle(&mut self, now: Moment, least: Duration) -> Option<Taker> {
        while let Some(&(queued, number)) = self.queue.first() {
            if queued.after(least) > now {
                return None;
            }
            self.queue.pop_first();
            let taker = self.takers.get_mut(&number)?;
            let idle_since = taker.activity.idle_since();
            match idle_since {
                Some(since) if since <= queued => return self.takers.remove(&number),
                Some(since) => taker.queued = since,
                None => taker.queued = now.after(LOOK_AGAIN),
            }
            self.queue.insert((taker.queued, number));
        }
        None
    }
}

/// How long a connection is safe from its neighbours.
const SETTLED: Duration = Duration::from_secs(1);
/// A connection that was in use is looked at again after this time at the earliest: newcomers that are refused must not cost a
/// look at every connection each.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Sources that are searched for an idle connection, the largest first.
const SOURCES_SEARCHED: usize = 64;

impl Taken {
    fn of(&self, source: IpAddr) -> usize {
        self.sources
            .get(&source)
            .map_or(0, |source| source.takers.len())
    }

    /// Evicts the longest idle connection of the largest source that has one. `newcomer` is the source of the connection that
    /// needs the place.
    fn evict_from_largest(&mut self, newcomer: IpAddr, now: Moment) -> bool {
        let own = self.of(newcomer);
        let largest: Vec<(usize, IpAddr)> = self
            .by_size
            .iter()
            .rev()
            .take(SOURCES_SEARCHED)
            .copied()
            .collect();
        for (size, source) in largest {
            let is_own = source == newcomer;
            // Where all sources are small, none is a flood: a connection that has only come is not evicted for another one.
            let is_peer = size <= own + 1;
            let least = if is_own || is_peer {
                SETTLED
            } else {
                Duration::ZERO
            };
            if self.evict(source, now, least) {
                return true;
            }
            // A newcomer of the largest source does not evict those of smaller ones.
            if is_own {
                return false;
            }
        }
        false
    }

    fn evict(&mut self, source: IpAddr, now: Moment, least: Duration) -> bool {
        let evicted = self.change(source, |source| source.pop_idle(now, least));
        evicted.is_some_and(|taker| {
            taker.evicted.cancel();
            true
        })
    }

    fn add(
        &mut self,
        source: IpAddr,
        queued: Moment,
        activity: Arc<Activity>,
        evicted: CancellationToken,
    ) -> u64 {
        let number = self.next;
        self.next += 1;
        let taker = Taker {
            queued,
            activity,
            evicted,
        };
        self.change(source, |source| {
            source.queue.insert((queued, number));
            source.takers.insert(number, taker);
        });
        number
    }

    fn remove(&mut self, source: IpAddr, number: u64) {
        self.change(source, |source| {
            if let Some(taker) = source.takers.remove(&number) {
                source.queue.remove(&(taker.queued, number));
            }
        });
    }

    fn change<T>(&mut self, source: IpAddr, change: impl FnOnce(&mut Source) -> T) -> T {
        let of_source = self.sources.entry(source).or_default();
        let before = of_source.takers.len();
        let changed = change(of_source);
        let after = of_source.takers.len();
        if after == 0 {
            self.sources.remove(&source);
        }
        if before != after {
            self.by_size.remove(&(before, source));
            if after > 0 {
                self.by_size.insert((after, source));
            }
            self.all = self.all + after - before;
        }
        changed
    }
}

/// Whom a connection is counted for: one customer has at least a whole /64 of IPv6 (RFC 6177).
#[must_use]
pub fn source(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;

    fn of(per_source: usize, total: usize) -> Arc<Places> {
        Places::new(PlaceLimits { per_source, total })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn evicted(places: &[Place]) -> Vec<usize> {
        (0..places.len())
            .filter(|index| places[*index].evicted.is_cancelled())
            .collect()
    }

    /// As many as fit.
    fn crowd(places: &Arc<Places>, count: usize) -> Vec<Place> {
        (0..count)
            .map(|_| places.enter(ip("10.0.0.1")).unwrap())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn source_at_its_limit_loses_its_own_oldest() {
        let places = of(3, 100);
        let other = [places.enter(ip("10.0.0.9")).unwrap()];
        let mut crowd = crowd(&places, 3);
        advance(SETTLED).await;
        assert!(evicted(&crowd).is_empty(), "at the limit");
        crowd.push(places.enter(ip("10.0.0.1")).unwrap());
        assert_eq!(evicted(&crowd), [0], "one above it");
        assert!(evicted(&other).is_empty());
        assert_eq!(places.taken(), 4);
        drop(crowd.remove(1));
        crowd.push(places.enter(ip("10.0.0.1")).unwrap());
        assert_eq!(evicted(&crowd), [0], "one left by itself");
        drop(crowd);
        assert_eq!(places.taken(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn burst_of_one_source_does_not_push_itself_out() {
        let places = of(3, 100);
        let crowd = crowd(&places, 3);
        advance(SETTLED - Duration::from_millis(1)).await;
        assert_eq!(
            places.enter(ip("10.0.0.1")).err(),
            Some(Reached::PerSource),
            "turned away"
        );
        assert!(evicted(&crowd).is_empty());
        assert!(places.enter(ip("10.0.0.2")).is_ok(), "others are not meant");
    }

    #[tokio::test(start_paused = true)]
    async fn full_listener_takes_from_the_source_with_the_most_however_young() {
        let places = of(100, 5);
        let alone = [places.enter(ip("10.0.0.9")).unwrap()];
        let crowd = crowd(&places, 4);
        assert_eq!(
            places.enter(ip("10.0.0.1")).err(),
            Some(Reached::Total),
            "the crowd is full"
        );
        let newcomer = [places.enter(ip("10.0.0.5")).unwrap()];
        assert_eq!(evicted(&crowd), [0]);
        assert!(evicted(&alone).is_empty() && evicted(&newcomer).is_empty());
        assert_eq!(places.taken(), 5);
        drop((alone, crowd, newcomer));
        assert_eq!(places.taken(), 0);
        assert!(places.lock().by_size.is_empty() && places.lock().sources.is_empty());
    }

    #[test]
    fn neighbours_of_a_64_are_one_source_and_mapped_addresses_are_ipv4() {
        assert_eq!(
            source(ip("2001:db8::1")),
            source(ip("2001:db8::ffff:0:0:1"))
        );
        assert_ne!(source(ip("2001:db8::1")), source(ip("2001:db8:0:1::1")));
        assert_eq!(source(ip("::ffff:10.0.0.1")), ip("10.0.0.1"));
    }

    #[tokio::test(start_paused = true)]
    async fn eviction_wakes_who_waits_for_it() {
        let places = of(1, 1);
        let first = places.enter(ip("10.0.0.1")).unwrap();
        let wait = timeout(SETTLED, first.evicted());
        assert!(wait.await.is_err(), "nobody else is there");
        let _second = places.enter(ip("10.0.0.1")).unwrap();
        first.evicted().await;
    }

    #[tokio::test(start_paused = true)]
    async fn longest_idle_is_evicted_and_connections_in_use_never() {
        let places = of(4, 100);
        let crowd: Vec<_> = crowd(&places, 4).into_iter().map(Arc::new).collect();
        let evicted = || -> Vec<usize> {
            (0..4)
                .filter(|index| crowd[*index].evicted.is_cancelled())
                .collect()
        };
        let in_use = crowd[0].in_use();
        advance(SETTLED).await;
        drop(crowd[1].in_use());
        advance(SETTLED).await;
        let second = places.enter(ip("10.0.0.1")).unwrap();
        assert_eq!(evicted(), [2], "idle from the start");
        drop(second);
        let _second = places.enter(ip("10.0.0.1")).unwrap();
        let _third = places.enter(ip("10.0.0.1")).unwrap();
        assert_eq!(evicted(), [2, 3]);
        let _fourth = places.enter(ip("10.0.0.1")).unwrap();
        assert_eq!(evicted(), [1, 2, 3], "used a second ago");
        assert_eq!(
            places.enter(ip("10.0.0.1")).err(),
            Some(Reached::PerSource),
            "one is in use, the others are new"
        );
        drop(in_use);
        advance(SETTLED).await;
        let _fifth = places.enter(ip("10.0.0.1")).unwrap();
        assert!(
            !crowd[0].evicted.is_cancelled(),
            "idle since the fourth came or later"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn newcomer_is_refused_while_all_are_in_use_and_takes_from_the_next_source_with_an_idle_one()
     {
        let places = of(100, 5);
        let crowd: Vec<_> = crowd(&places, 4).into_iter().map(Arc::new).collect();
        let uses: Vec<_> = crowd.iter().map(Place::in_use).collect();
        let idle = places.enter(ip("10.0.0.9")).unwrap();
        assert_eq!(
            places.enter(ip("10.0.0.5")).err(),
            Some(Reached::Total),
            "sources of one connection do not evict each other's at once"
        );
        advance(SETTLED).await;
        let newcomer = Arc::new(places.enter(ip("10.0.0.5")).unwrap());
        assert!(idle.evicted.is_cancelled());
        let _use = newcomer.in_use();
        advance(LOOK_AGAIN).await;
        assert_eq!(places.enter(ip("10.0.0.5")).err(), Some(Reached::Total));
        assert!(crowd.iter().all(|place| !place.evicted.is_cancelled()));
        drop(uses);
        advance(SETTLED).await;
        assert!(places.enter(ip("10.0.0.5")).is_ok());
        assert_eq!(
            crowd
                .iter()
                .filter(|place| place.evicted.is_cancelled())
                .count(),
            1
        );
    }
}
