//! Places for connections that nobody vouches for: bounded in all and for each source, oldest out first.
//!
//! Nobody is refused a place. A source that has all of its own loses its oldest; when all places of the listener are
//! taken, the source with the most of them does. So a flood from one address pushes out its own connections, and a
//! newcomer from the same address, who needs a moment only, is served between them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    #[must_use]
    pub fn enter(self: &Arc<Self>, peer: IpAddr) -> Place {
        let source = source(peer);
        let evicted = CancellationToken::new();
        let mut taken = self.lock();
        if taken.of(source) >= self.limits.per_source {
            taken.evict(source);
        } else if taken.all >= self.limits.total
            && let Some(crowd) = taken.crowd()
        {
            taken.evict(crowd);
        }
        let number = taken.add(source, evicted.clone());
        drop(taken);
        Place {
            places: self.clone(),
            source,
            number,
            evicted,
        }
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
}

impl Place {
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
    sources: HashMap<IpAddr, BTreeMap<u64, CancellationToken>>,
    /// Sources by how many places they have.
    by_size: BTreeSet<(usize, IpAddr)>,
}

impl Taken {
    fn of(&self, source: IpAddr) -> usize {
        self.sources.get(&source).map_or(0, BTreeMap::len)
    }

    /// The source with the most places.
    fn crowd(&self) -> Option<IpAddr> {
        self.by_size.last().map(|(_, source)| *source)
    }

    fn add(&mut self, source: IpAddr, evicted: CancellationToken) -> u64 {
        let number = self.next;
        self.next += 1;
        self.change(source, |places| {
            places.insert(number, evicted);
        });
        number
    }

    fn evict(&mut self, source: IpAddr) {
        self.change(source, |places| {
            if let Some((_, evicted)) = places.pop_first() {
                evicted.cancel();
            }
        });
    }

    fn remove(&mut self, source: IpAddr, number: u64) {
        self.change(source, |places| {
            places.remove(&number);
        });
    }

    fn change(
        &mut self,
        source: IpAddr,
        change: impl FnOnce(&mut BTreeMap<u64, CancellationToken>),
    ) {
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
    use std::time::Duration;

    use super::*;

    fn of(per_source: usize, total: usize) -> Arc<Places> {
        Places::new(PlaceLimits { per_source, total })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn is_evicted(place: &Place) -> bool {
        place.evicted.is_cancelled()
    }

    fn evicted(places: &[Place]) -> Vec<usize> {
        (0..places.len())
            .filter(|index| is_evicted(&places[*index]))
            .collect()
    }

    #[test]
    fn source_at_its_limit_loses_its_own_oldest() {
        let places = of(3, 100);
        let other = places.enter(ip("10.0.0.9"));
        let mut crowd: Vec<_> = (0..3).map(|_| places.enter(ip("10.0.0.1"))).collect();
        assert!(evicted(&crowd).is_empty(), "at the limit");
        crowd.push(places.enter(ip("10.0.0.1")));
        assert_eq!(evicted(&crowd), [0], "one above it");
        assert!(!is_evicted(&other));
        assert_eq!(places.taken(), 4);
        drop(crowd.remove(1));
        crowd.push(places.enter(ip("10.0.0.1")));
        assert_eq!(evicted(&crowd), [0], "one left by itself");
        drop(crowd);
        assert_eq!(places.taken(), 1);
    }

    #[test]
    fn full_listener_takes_from_the_source_with_the_most() {
        let places = of(100, 5);
        let alone = places.enter(ip("10.0.0.9"));
        let crowd: Vec<_> = (0..4).map(|_| places.enter(ip("10.0.0.1"))).collect();
        assert!(evicted(&crowd).is_empty(), "at the limit");
        let newcomer = places.enter(ip("10.0.0.5"));
        assert_eq!(evicted(&crowd), [0]);
        assert!(!is_evicted(&alone) && !is_evicted(&newcomer));
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
        let first = places.enter(ip("10.0.0.1"));
        let wait = tokio::time::timeout(Duration::from_secs(1), first.evicted());
        assert!(wait.await.is_err(), "nobody else is there");
        let _second = places.enter(ip("10.0.0.1"));
        first.evicted().await;
    }
}
