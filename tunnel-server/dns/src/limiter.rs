//! Limits per client: queries per second, error replies per second, TCP connections, and forwarded
//! queries in flight.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use governor::clock::DefaultClock;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use parking_lot::Mutex;
use tunnel_process::conn_limiter;
use tunnel_process::keyed_permits::{KeyedPermit, KeyedPermits};

/// Clients that share a limit: an IPv4 address, or an IPv6 /64 network because one host has all of
/// its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ClientKey {
    One(IpAddr),
    /// All clients that arrive while [`SOURCES_MAX`] others are counted.
    Others,
}

type Rate = RateLimiter<ClientKey, HashMapStateStore<ClientKey>, DefaultClock>;

#[derive(Debug)]
pub(super) struct Limiter {
    queries: Rate,
    error_replies: Rate,
    swept: Mutex<Instant>,
    connections: KeyedPermits<ClientKey>,
    forwards: KeyedPermits<ClientKey>,
}

pub(super) type SourcePermit = KeyedPermit<ClientKey>;

impl Limiter {
    pub(super) fn new(queries_per_second: u32) -> Self {
        let per_second = NonZeroU32::new(queries_per_second).unwrap_or(NonZeroU32::MIN);
        Self {
            queries: RateLimiter::hashmap(Quota::per_second(per_second)),
            error_replies: RateLimiter::hashmap(Quota::per_second(ERROR_REPLIES_PER_SECOND)),
            swept: Mutex::new(Instant::now()),
            connections: KeyedPermits::default(),
            forwards: KeyedPermits::default(),
        }
    }

    /// Returns `true` if the client may send another query.
    pub(super) fn admit_query(&self, address: IpAddr) -> bool {
        self.check(&self.queries, address)
    }

    /// Returns `true` if the client may receive another error reply. The limit protects the owner
    /// of a forged source address from a flood of replies.
    pub(super) fn can_send_error(&self, address: IpAddr) -> bool {
        self.check(&self.error_replies, address)
    }

    /// Counts a TCP connection. Returns `None` if the client is at its limit.
    pub(super) fn admit_connection(&self, address: IpAddr) -> Option<SourcePermit> {
        let source = ClientKey::of(address);
        let permit = (self.connections).acquire(source, CONNECTIONS_PER_SOURCE, usize::MAX);
        permit.ok()
    }

    /// Counts a forwarded query. Returns `None` if the client already holds as many permits as are
    /// `free`. One client therefore never holds more than half of all permits, and the share of
    /// each client shrinks as the number of clients grows.
    pub(super) fn forward(&self, address: IpAddr, free: usize) -> Option<SourcePermit> {
        let permit = (self.forwards).acquire(ClientKey::of(address), free, usize::MAX);
        permit.ok()
    }

    fn check(&self, rate: &Rate, address: IpAddr) -> bool {
        let mut source = ClientKey::of(address);
        if rate.len() >= SOURCES_MAX {
            self.sweep();
            if rate.len() >= SOURCES_MAX {
                source = ClientKey::Others;
            }
        }
        rate.check_key(&source).is_ok()
    }

    /// Removes clients whose rate has fully recovered. Runs at most once per second.
    fn sweep(&self) {
        let now = Instant::now();
        {
            let mut swept = self.swept.lock();
            if now.duration_since(*swept) < SWEEP_PAUSE {
                return;
            }
            *swept = now;
        }
        self.queries.retain_recent();
        self.error_replies.retain_recent();
    }
}

impl ClientKey {
    fn of(address: IpAddr) -> Self {
        Self::One(conn_limiter::source(address))
    }
}

/// Maximum number of clients that are counted individually. Each needs some 100 bytes.
const SOURCES_MAX: usize = 65_536;
const SWEEP_PAUSE: Duration = Duration::from_secs(1);
/// FORMERR, NOTIMP and REFUSED replies for one client.
const ERROR_REPLIES_PER_SECOND: NonZeroU32 = NonZeroU32::new(100).unwrap();
/// A stub resolver opens one or two connections. A cache that queries over TCP opens a few more.
const CONNECTIONS_PER_SOURCE: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_is_limited_and_others_are_not() {
        let limiter = Limiter::new(3);
        let [greedy, other] = ["192.0.2.1", "192.0.2.2"].map(|text| text.parse().unwrap());
        let admitted = (0..20).filter(|_| limiter.admit_query(greedy)).count();
        assert!((3..6).contains(&admitted), "{admitted}");
        assert!(limiter.admit_query(other));
    }

    #[test]
    fn addresses_of_one_ipv6_network_share_a_limit() {
        let same =
            ["2001:db8::1", "2001:db8::ffff:2"].map(|text| ClientKey::of(text.parse().unwrap()));
        assert_eq!(same[0], same[1]);
        assert_ne!(same[0], ClientKey::of("2001:db8:0:1::1".parse().unwrap()));
        assert_eq!(
            ClientKey::of("::ffff:192.0.2.1".parse().unwrap()),
            ClientKey::of("192.0.2.1".parse().unwrap())
        );
    }

    #[test]
    fn connections_of_a_source_are_bounded_and_given_back() {
        let limiter = Limiter::new(1);
        let address = "192.0.2.1".parse().unwrap();
        let counts: Vec<_> = std::iter::from_fn(|| limiter.admit_connection(address)).collect();
        assert_eq!(counts.len(), CONNECTIONS_PER_SOURCE);
        drop(counts);
        assert!(limiter.admit_connection(address).is_some());
        assert!(limiter.connections.is_empty());
    }

    #[test]
    fn one_source_holds_half_of_the_forwards_and_leaves_the_rest_to_others() {
        let limiter = Limiter::new(1);
        let all = 512;
        let mut counts = Vec::new();
        let mut fill = |text: &str| {
            let address = text.parse().unwrap();
            let before = counts.len();
            while let Some(source_permit) = limiter.forward(address, all - counts.len()) {
                counts.push(source_permit);
            }
            counts.len() - before
        };
        assert_eq!(fill("192.0.2.1"), 256);
        assert_eq!(fill("192.0.2.2"), 128);
        assert_eq!(fill("192.0.2.3"), 64);
        drop(counts);
        assert!(limiter.forwards.is_empty());
    }

    #[test]
    fn forged_sources_do_not_fill_the_memory() {
        let limiter = Limiter::new(1);
        for number in 0..200_000_u32 {
            limiter.admit_query(IpAddr::from(number.to_be_bytes()));
        }
        assert!(limiter.queries.len() <= SOURCES_MAX + 1);
    }
}
