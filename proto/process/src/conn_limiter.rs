//! Limits the connections of a listener, in total and for each source. At a limit, the connection
//! that has been idle for the longest time is evicted. A connection in use is never evicted.
//!
//! A connection is idle from its start, and again after each use. If a source has reached its own
//! limit, or has the most connections when the total limit is reached, its longest idle connection
//! is evicted for a newer one. So a flood from one address evicts its own connections and leaves
//! others unharmed.
//!
//! A connection that has not been used yet, or on which a use begins, is protected from its own
//! source for one second. Otherwise, connections of a legitimate burst would evict each other before
//! any of them completes. Between uses a connection is not protected: if it were, a limit of
//! connections would limit the rate of uses, too. A new connection is refused if no connection can
//! be evicted.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The limits on the number of open connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnLimits {
    /// Connections from one source: an IPv4 address or an IPv6 /64.
    pub per_source: usize,
    /// Connections from all sources.
    pub total: usize,
}

/// The limiter of one listener's connections, in total and for each source.
#[derive(Debug)]
pub struct ConnLimiter {
    limits: Mutex<ConnLimits>,
    epoch: Instant,
    source_table: Mutex<SourceTable>,
}

impl ConnLimiter {
    /// Returns a limiter without any permits in use.
    pub fn new(limits: ConnLimits) -> Arc<Self> {
        Arc::new(Self {
            limits: Mutex::new(limits),
            epoch: Instant::now(),
            source_table: Mutex::default(),
        })
    }

    /// Returns a permit for a connection from `peer`. At a limit, an idle connection is evicted:
    /// its [`ConnPermit::evicted`] completes.
    ///
    /// # Errors
    /// The limit that was reached, if no connection can be evicted.
    pub fn acquire(self: &Arc<Self>, peer: IpAddr) -> Result<ConnPermit, LimitReached> {
        let (source, now, limits) = (source(peer), self.now(), *self.limits.lock());
        let mut source_table = self.source_table.lock();
        let reached = if source_table.of(source) >= limits.per_source {
            Some(LimitReached::PerSource)
        } else if source_table.all >= limits.total {
            Some(LimitReached::Total)
        } else {
            None
        };
        match reached {
            Some(LimitReached::PerSource) if !source_table.evict(source, now, false) => {
                return Err(LimitReached::PerSource);
            }
            Some(LimitReached::Total) if !source_table.evict_from_largest(source, now) => {
                return Err(LimitReached::Total);
            }
            Some(_) | None => {}
        }
        let evicted = CancellationToken::new();
        let activity = Arc::new(Activity {
            uses: AtomicUsize::new(0),
            idle_since: AtomicU64::new(now.0),
            protected_until: AtomicU64::new(now.after(PROTECTION).0),
            is_deferred: AtomicBool::new(false),
        });
        let id = source_table.add(source, now, activity.clone(), evicted.clone());
        drop(source_table);
        Ok(ConnPermit {
            limiter: self.clone(),
            source,
            id,
            activity,
            evicted,
            reached,
        })
    }

    /// Replaces the limits for later connections. Open connections keep their permits.
    pub fn set_limits(&self, limits: ConnLimits) {
        *self.limits.lock() = limits;
    }

    /// Returns the number of permits in use.
    #[cfg(any(test, feature = "test-util"))]
    pub fn permits_in_use(&self) -> usize {
        self.source_table.lock().all
    }

    fn now(&self) -> Moment {
        let since = self.epoch.elapsed().as_nanos();
        Moment(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

/// The permit of one connection. Dropping it releases it.
#[derive(Debug)]
pub struct ConnPermit {
    limiter: Arc<ConnLimiter>,
    source: IpAddr,
    id: u64,
    activity: Arc<Activity>,
    evicted: CancellationToken,
    reached: Option<LimitReached>,
}

/// The limit that a new connection reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitReached {
    /// The limit of connections from one source, [`ConnLimits::per_source`].
    PerSource,
    /// The limit of all connections together, [`ConnLimits::total`].
    Total,
}

impl ConnPermit {
    /// Returns the limit that was reached when the permit was acquired. In that case another
    /// connection was evicted.
    pub fn reached(&self) -> Option<LimitReached> {
        self.reached
    }

    /// Waits until the connection is evicted for a newer one, which may never happen. A connection
    /// that has come into use since the eviction has lost its permit, too, and should close after
    /// that use. Cancel-safe.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Marks the connection as in use until the guard is dropped. Several guards may exist at once.
    pub fn in_use(self: &Arc<Self>) -> InUseGuard {
        self.activity.uses.fetch_add(1, Ordering::SeqCst);
        InUseGuard(self.clone())
    }

    /// Protects the idle connection for a second, because the first byte of a request has arrived.
    pub fn expect_use(&self) {
        let until = self.limiter.now().after(PROTECTION);
        self.activity
            .protected_until
            .store(until.0, Ordering::Relaxed);
    }
}

impl Drop for ConnPermit {
    fn drop(&mut self) {
        self.limiter
            .source_table
            .lock()
            .remove(self.source, self.id);
    }
}

/// A guard that marks a connection as in use, see [`ConnPermit::in_use`]. The guard also holds the
/// permit.
#[derive(Debug)]
pub struct InUseGuard(Arc<ConnPermit>);

impl Drop for InUseGuard {
    fn drop(&mut self) {
        let ConnPermit {
            limiter,
            source,
            id,
            activity,
            ..
        } = &*self.0;
        let now = limiter.now();
        activity.idle_since.store(now.0, Ordering::Relaxed);
        activity.protected_until.store(0, Ordering::Relaxed);
        let was_last = activity.uses.fetch_sub(1, Ordering::SeqCst) == 1;
        if was_last && activity.is_deferred.swap(false, Ordering::SeqCst) {
            limiter.source_table.lock().queue_idle(*source, *id, now);
        }
    }
}

/// Whether a connection is in use, and the time of its last use. Requests update the fields without
/// the lock of [`ConnLimiter`].
#[derive(Debug)]
struct Activity {
    uses: AtomicUsize,
    idle_since: AtomicU64,
    /// Moment before which the own source does not evict the connection.
    protected_until: AtomicU64,
    /// The connection may become idle before the moment at which it is queued. The end of its use
    /// queues it again.
    is_deferred: AtomicBool,
}

impl Activity {
    /// Returns where a connection belongs that was queued as idle since a moment, or `None` if it
    /// is to be evicted. Protection that ends before `horizon` does not count.
    fn check(&self, idle_since: Moment, horizon: Moment) -> Option<Queued> {
        self.is_deferred.store(true, Ordering::SeqCst);
        if self.uses.load(Ordering::SeqCst) > 0 {
            return Some(Queued::InUse);
        }
        let protected_until = Moment(self.protected_until.load(Ordering::Relaxed));
        if protected_until > horizon {
            return Some(Queued::Protected(protected_until));
        }
        let since = self.idle_since();
        (since > idle_since).then_some(Queued::Idle(since))
    }

    fn idle_since(&self) -> Moment {
        Moment(self.idle_since.load(Ordering::Relaxed))
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
struct SourceTable {
    next_id: u64,
    all: usize,
    sources: HashMap<IpAddr, SourceConns>,
    /// Sources by the number of their connections.
    by_size: BTreeSet<(usize, IpAddr)>,
}

#[derive(Debug, Default)]
struct SourceConns {
    connections: HashMap<u64, ConnEntry>,
    /// Connections in the order of [`Queued::Idle`].
    idle: BTreeSet<(Moment, u64)>,
    /// Connections in the order of [`Queued::Protected`].
    protected: BTreeSet<(Moment, u64)>,
}

#[derive(Debug)]
struct ConnEntry {
    queued: Queued,
    activity: Arc<Activity>,
    evicted: CancellationToken,
}

/// The queue of a connection, as of its last check. A refused connection does not cost a check of
/// every connection.
#[derive(Debug, Clone, Copy)]
enum Queued {
    /// A lower bound of the time since which the connection is idle.
    Idle(Moment),
    /// The time before which the connection is not evicted.
    Protected(Moment),
    /// In no queue until its use ends.
    InUse,
}

impl SourceConns {
    /// Removes the connection that has been idle for the longest time, if one is not protected, or
    /// if `with_protected` says that protection does not count. If a connection was used since it
    /// was queued, the check moves it back in the queue. So evictions stay cheap however many
    /// connections are in use.
    fn pop_idle(&mut self, now: Moment, with_protected: bool) -> Option<ConnEntry> {
        while let Some(&(until, id)) = self.protected.first()
            && until <= now
        {
            self.protected.pop_first();
            let since = self.connections.get(&id)?.activity.idle_since();
            self.set_queue(id, Queued::Idle(since));
        }
        while let Some((since, id)) = self.idle.pop_first() {
            match self.connections.get(&id)?.activity.check(since, now) {
                Some(queued) => self.set_queue(id, queued),
                None => return self.connections.remove(&id),
            }
        }
        while with_protected && let Some((_, id)) = self.protected.pop_first() {
            let activity = &self.connections.get(&id)?.activity;
            match activity.check(now, Moment(u64::MAX)) {
                Some(queued) => self.set_queue(id, queued),
                None => return self.connections.remove(&id),
            }
        }
        None
    }

    /// Queues a connection that is in no queue.
    fn set_queue(&mut self, id: u64, queued: Queued) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.queued = queued;
            match queued {
                Queued::Idle(since) => self.idle.insert((since, id)),
                Queued::Protected(until) => self.protected.insert((until, id)),
                Queued::InUse => true,
            };
        }
    }

    /// Removes a connection from its queue. Returns whether the source has the connection.
    fn unqueue(&mut self, id: u64) -> bool {
        let queued = self
            .connections
            .get(&id)
            .map(|connection| connection.queued);
        match queued {
            Some(Queued::Idle(since)) => self.idle.remove(&(since, id)),
            Some(Queued::Protected(until)) => self.protected.remove(&(until, id)),
            Some(Queued::InUse) | None => true,
        };
        queued.is_some()
    }
}

/// Time for which a connection before its first use, or at the beginning of a use, is not evicted
/// in favor of its own source, or of a source of similar size.
const PROTECTION: Duration = Duration::from_secs(1);
/// Number of sources that are searched for an idle connection, the largest first.
const SOURCES_SEARCHED: usize = 64;

impl SourceTable {
    fn of(&self, source: IpAddr) -> usize {
        self.sources
            .get(&source)
            .map_or(0, |source| source.connections.len())
    }

    /// Evicts the longest idle connection of the largest source that has one. `newcomer` is the
    /// source of the connection that needs the permit.
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
            // If all sources are small, none is a flood. A connection that has just arrived is not
            // evicted for another one.
            let is_peer = size <= own + 1;
            let with_protected = !is_own && !is_peer;
            if self.evict(source, now, with_protected) {
                return true;
            }
            // A new connection of the largest source does not evict those of smaller sources.
            if is_own {
                return false;
            }
        }
        false
    }

    fn evict(&mut self, source: IpAddr, now: Moment, with_protected: bool) -> bool {
        let evicted = self.change(source, |source| source.pop_idle(now, with_protected));
        evicted.is_some_and(|connection| {
            connection.evicted.cancel();
            true
        })
    }

    fn add(
        &mut self,
        source: IpAddr,
        since: Moment,
        activity: Arc<Activity>,
        evicted: CancellationToken,
    ) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let connection = ConnEntry {
            queued: Queued::InUse,
            activity,
            evicted,
        };
        self.change(source, |source| {
            source.connections.insert(id, connection);
            source.set_queue(id, Queued::Idle(since));
        });
        id
    }

    fn remove(&mut self, source: IpAddr, id: u64) {
        self.change(source, |source| {
            source.unqueue(id);
            source.connections.remove(&id);
        });
    }

    /// Queues a connection whose use has ended.
    fn queue_idle(&mut self, source: IpAddr, id: u64, since: Moment) {
        if let Some(source) = self.sources.get_mut(&source)
            && source.unqueue(id)
        {
            source.set_queue(id, Queued::Idle(since));
        }
    }

    fn change<T>(&mut self, source: IpAddr, change: impl FnOnce(&mut SourceConns) -> T) -> T {
        let of_source = self.sources.entry(source).or_default();
        let before = of_source.connections.len();
        let changed = change(of_source);
        let after = of_source.connections.len();
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

/// Returns the source that a connection counts for. One customer has at least a whole /64 of IPv6
/// (RFC 6177).
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

    fn of(per_source: usize, total: usize) -> Arc<ConnLimiter> {
        ConnLimiter::new(ConnLimits { per_source, total })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn acquire(limiter: &Arc<ConnLimiter>, source: &str) -> Arc<ConnPermit> {
        Arc::new(limiter.acquire(ip(source)).unwrap())
    }

    fn evicted(permits: &[Arc<ConnPermit>]) -> Vec<usize> {
        (0..permits.len())
            .filter(|index| permits[*index].evicted.is_cancelled())
            .collect()
    }

    /// Acquires `count` permits for one source.
    fn permits(limiter: &Arc<ConnLimiter>, count: usize) -> Vec<Arc<ConnPermit>> {
        (0..count).map(|_| acquire(limiter, "10.0.0.1")).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn source_at_its_limit_loses_its_own_oldest() {
        let limiter = of(3, 100);
        let other = [acquire(&limiter, "10.0.0.9")];
        let mut permits = permits(&limiter, 3);
        advance(PROTECTION).await;
        assert!(evicted(&permits).is_empty(), "at the limit");
        permits.push(acquire(&limiter, "10.0.0.1"));
        assert_eq!(evicted(&permits), [0], "one above it");
        assert!(evicted(&other).is_empty());
        assert_eq!(limiter.permits_in_use(), 4);
        drop(permits.remove(1));
        permits.push(acquire(&limiter, "10.0.0.1"));
        assert_eq!(evicted(&permits), [0], "one left by itself");
        drop(permits);
        assert_eq!(limiter.permits_in_use(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn burst_of_one_source_does_not_evict_itself() {
        let limiter = of(3, 100);
        let permits = permits(&limiter, 3);
        advance(PROTECTION - Duration::from_millis(1)).await;
        let refused = limiter.acquire(ip("10.0.0.1")).err();
        assert_eq!(refused, Some(LimitReached::PerSource), "turned away");
        assert!(evicted(&permits).is_empty());
        let other = limiter.acquire(ip("10.0.0.2"));
        assert!(other.is_ok(), "others are not meant");
    }

    #[tokio::test(start_paused = true)]
    async fn full_listener_takes_from_the_source_with_the_most_however_young() {
        let limiter = of(100, 5);
        let alone = [acquire(&limiter, "10.0.0.9")];
        let permits = permits(&limiter, 4);
        let refused = limiter.acquire(ip("10.0.0.1")).err();
        assert_eq!(refused, Some(LimitReached::Total), "the crowd is full");
        let newcomer = [acquire(&limiter, "10.0.0.5")];
        assert_eq!(evicted(&permits), [0]);
        assert!(evicted(&alone).is_empty() && evicted(&newcomer).is_empty());
        assert_eq!(limiter.permits_in_use(), 5);
        drop((alone, permits, newcomer));
        assert_eq!(limiter.permits_in_use(), 0);
        let source_table = limiter.source_table.lock();
        assert!(source_table.by_size.is_empty() && source_table.sources.is_empty());
    }

    #[test]
    fn neighbors_of_a_64_are_one_source_and_mapped_addresses_are_ipv4() {
        let first = source(ip("2001:db8::1"));
        assert_eq!(first, source(ip("2001:db8::ffff:0:0:1")));
        assert_ne!(first, source(ip("2001:db8:0:1::1")));
        assert_eq!(source(ip("::ffff:10.0.0.1")), ip("10.0.0.1"));
    }

    #[tokio::test(start_paused = true)]
    async fn eviction_wakes_the_connection() {
        let limiter = of(1, 1);
        let first = acquire(&limiter, "10.0.0.1");
        let wait = timeout(PROTECTION, first.evicted());
        assert!(wait.await.is_err(), "evicted although alone");
        let _second = acquire(&limiter, "10.0.0.1");
        first.evicted().await;
    }

    #[tokio::test(start_paused = true)]
    async fn longest_idle_is_evicted_and_connections_in_use_never() {
        let limiter = of(4, 100);
        let permits = permits(&limiter, 4);
        let in_use = permits[0].in_use();
        advance(PROTECTION).await;
        drop(permits[1].in_use());
        advance(PROTECTION).await;
        let second = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [2], "idle from the start");
        drop(second);
        let _second = acquire(&limiter, "10.0.0.1");
        let _third = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [2, 3]);
        let _fourth = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [1, 2, 3], "used a second ago");
        // One is in use, the others are new.
        let refused = limiter.acquire(ip("10.0.0.1")).err();
        assert_eq!(refused, Some(LimitReached::PerSource));
        advance(Duration::from_millis(1)).await;
        drop(in_use);
        advance(PROTECTION).await;
        let _fifth = acquire(&limiter, "10.0.0.1");
        // Idle since after the fourth came.
        assert!(!permits[0].evicted.is_cancelled());
    }

    /// A Prometheus scrapes many targets, each over a connection that it keeps for the next scrape.
    #[tokio::test(start_paused = true)]
    async fn connection_between_uses_is_evicted_at_once_and_the_longest_idle_first() {
        let limiter = of(4, 100);
        let mut kept = permits(&limiter, 4);
        let scrape = Duration::from_millis(8);
        for _ in 0..1000 {
            let permit = kept.last().unwrap().in_use();
            advance(scrape / 2).await;
            drop(permit);
            kept.push(acquire(&limiter, "10.0.0.1"));
            assert_eq!(evicted(&kept).len(), 1);
            kept.retain(|permit| !permit.evicted.is_cancelled());
            assert_eq!(kept.len(), 4);
            advance(scrape / 2).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_were_checked_in_use_are_evicted_as_soon_as_they_are_idle() {
        let limiter = of(3, 100);
        let permits = permits(&limiter, 3);
        let mut uses: Vec<_> = permits.iter().map(ConnPermit::in_use).collect();
        advance(PROTECTION).await;
        assert!(limiter.acquire(ip("10.0.0.1")).is_err());
        drop(uses.remove(1));
        let _newcomer = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [1]);
        assert!(limiter.acquire(ip("10.0.0.1")).is_err());
        drop(uses);
        let _second = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [0, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_on_which_a_use_begins_is_protected_for_a_second() {
        let limiter = of(2, 100);
        let permits = permits(&limiter, 2);
        permits.iter().for_each(|permit| drop(permit.in_use()));
        permits.iter().for_each(|permit| permit.expect_use());
        advance(PROTECTION / 2).await;
        assert!(limiter.acquire(ip("10.0.0.1")).is_err());
        drop(permits[1].in_use());
        let _newcomer = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [1], "its use has ended");
        advance(PROTECTION / 2).await;
        let _second = acquire(&limiter, "10.0.0.1");
        assert_eq!(evicted(&permits), [0, 1], "too slow");
    }

    #[tokio::test(start_paused = true)]
    async fn newcomer_is_refused_while_all_are_in_use_and_takes_from_the_next_source_with_an_idle_one()
     {
        let limiter = of(100, 5);
        let permits = permits(&limiter, 4);
        let uses: Vec<_> = permits.iter().map(ConnPermit::in_use).collect();
        let idle = acquire(&limiter, "10.0.0.9");
        // Sources of one connection do not evict each other's at once.
        let refused = limiter.acquire(ip("10.0.0.5")).err();
        assert_eq!(refused, Some(LimitReached::Total));
        advance(PROTECTION).await;
        let newcomer = acquire(&limiter, "10.0.0.5");
        assert!(idle.evicted.is_cancelled());
        let _use = newcomer.in_use();
        let refused = limiter.acquire(ip("10.0.0.5")).err();
        assert_eq!(refused, Some(LimitReached::Total));
        assert!(evicted(&permits).is_empty());
        drop(uses);
        advance(PROTECTION).await;
        assert!(limiter.acquire(ip("10.0.0.5")).is_ok());
        assert_eq!(evicted(&permits).len(), 1);
    }
}
