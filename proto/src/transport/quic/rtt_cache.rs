//! What a dialer knows of the path from its last session: how long a round trip takes.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The round trip time of the last session that has ended, with which the next handshake's retransmissions begin
/// (RFC 9002, section 6.2.2): a lost first packet is sent again after three round trips, 0.15 s at least, and not after 1 s.
/// Of the last server alone.
#[derive(Debug, Clone, Default)]
pub(super) struct RttCache {
    last: Arc<Mutex<Option<(IpAddr, Duration)>>>,
}

impl RttCache {
    /// A session with `server` has ended, and this was its smoothed round trip time.
    pub(super) fn insert(&self, server: SocketAddr, rtt: Duration) {
        *self.lock() = Some((server.ip(), rtt));
    }

    /// What to take for the round trip time until there is a measurement; the first packet is sent again after three
    /// times as long, and then after twice as long each time.
    pub(super) fn initial_rtt(&self, server: SocketAddr) -> Duration {
        match *self.lock() {
            Some((cached_ip, rtt)) if cached_ip == server.ip() => {
                rtt.clamp(INITIAL_RTT_MIN, DEFAULT_INITIAL_RTT)
            }
            Some(_) | None => DEFAULT_INITIAL_RTT,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(IpAddr, Duration)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of a path that is not known (RFC 9002, section 6.2.2).
const DEFAULT_INITIAL_RTT: Duration = Duration::from_millis(333);
/// A server that a thousand agents ask at once answers late, and is not to be asked many times over by each.
const INITIAL_RTT_MIN: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_path_begins_with_its_round_trip_time_within_bounds() {
        let [server, other] = ["192.0.2.1:10262", "192.0.2.2:10262"].map(|at| at.parse().unwrap());
        let last = RttCache::default();
        assert_eq!(last.initial_rtt(server), DEFAULT_INITIAL_RTT);
        for (measured, taken) in [(1, 50), (80, 80), (2000, 333)] {
            last.insert(server, Duration::from_millis(measured));
            assert_eq!(last.initial_rtt(server), Duration::from_millis(taken));
            assert_eq!(last.initial_rtt(other), DEFAULT_INITIAL_RTT);
        }
    }
}
