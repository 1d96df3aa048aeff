//! Places for connections that nobody vouches for: bounded in all and for each source, oldest out first.
//!
//! A source that has all of its own places, or most of all places when none is left, gives up its oldest for a newer one;
//! so a flood from one address pushes out its own connections, and others are unharmed. A connection that is younger than
//! a second is not pushed out by its neighbours, or a burst of honest ones would push each other out before any is done:
//! then the newcomer is turned away.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
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
    taken: Mutex<Taken>,
}

impl Places {
    /// Free places.
    #[must_use]
    pub fn new(limits: PlaceLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            taken: Mutex::default(),
        })
    }

    /// A place for a connection from `peer`, at the cost of an older one where a limit is reached; that one's
    /// [`Place::evicted`] ends.
    ///
    /// # Errors
    /// The limit that was reached, when the older one would be one of its own source's that has only just come.
    pub fn enter(self: &Arc<Self>, peer: IpAddr) -> Result<Place, Reached> {
        let (source, now) = (source(peer), Instant::now());
        let mut taken = self.lock();
        let gives_way = if taken.of(source) >= self.limits.per_source {
            Some((source, Reached::PerSource))
        } else if taken.all >= self.limits.total {
            taken.crowd().map(|crowd| (crowd, Reached::Total))
        } else {
            None
        };
        if let Some((crowd, reached)) = gives_way {
            if crowd == source && !taken.oldest_is_settled(source, now) {
                return Err(reached);
            }
            taken.evict(crowd);
        }
        let evicted = CancellationToken::new();
        let number = taken.add(source, now, evicted.clone());
        drop(taken);
        Ok(Place {
            places: self.clone(),
            source,
            number,
            evicted,
            reached: gives_way.map(|(_, reached)| reached),
        })
    }

    /// How many places are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.lock().all
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

    /// Waits until the place is lost to a newer connection, which may be never. Cancel-safe.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Gives the place back early: somebody vouches for the connection now.
    pub fn leave(&self) {
        self.places.lock().remove(self.source, self.number);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    all: usize,
    /// Places of each source by number, oldest first.
    sources: HashMap<IpAddr, BTreeMap<u64, Taker>>,
    /// Sources by how many places they have.
    by_size: BTreeSet<(usize, IpAddr)>,
}

#[derive(Debug)]
struct Taker {
    since: Instant,
    evicted: CancellationToken,
}

/// How long a connection is safe from its neighbours.
const SETTLED: Duration = Duration::from_secs(1);

impl Taken {
    fn of(&self, source: IpAddr) -> usize {
        self.sources.get(&source).map_or(0, BTreeMap::len)
    }

    /// The source with the most places.
    fn crowd(&self) -> Option<IpAddr> {
        self.by_size.last().map(|(_, source)| *source)
    }

    fn oldest_is_settled(&self, source: IpAddr, now: Instant) -> bool {
        let places = self.sources.get(&source);
        let oldest = places.and_then(|places| places.first_key_value());
        oldest.is_some_and(|(_, oldest)| now - oldest.since >= SETTLED)
    }

    fn add(&mut self, source: IpAddr, since: Instant, evicted: CancellationToken) -> u64 {
        let number = self.next;
        self.next += 1;
        self.change(source, |places| {
            places.insert(number, Taker { since, evicted });
        });
        number
    }

    fn evict(&mut self, source: IpAddr) {
        self.change(source, |places| {
            if let Some((_, oldest)) = places.pop_first() {
                oldest.evicted.cancel();
            }
        });
    }

    fn remove(&mut self, source: IpAddr, number: u64) {
        self.change(source, |places| {
            places.remove(&number);
        });
    }

    fn change(&mut self, source: IpAddr, change: impl FnOnce(&mut BTreeMap<u64, Taker>)) {
        let places = self.sources.entry(source).or_default();
        let before = places.len();
        change(places);
        let after = places.len();
        if after == 0 {
            self.sources.remove(&source);
        }
        self.by_size.remove(&(before, source));
        if after > 0 {
            self.by_size.insert((after, source));
        }
        self.all = self.all + after - before;
    }
}

/// Whom a connection is counted for: one customer has at least a whole /64 of IPv6 (RFC 6177).
fn source(peer: IpAddr) -> IpAddr {
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
}
