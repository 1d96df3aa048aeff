//! The round-trip time that a dialer remembers from its last session.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

/// The round-trip time of the last session that has ended, for its server only. The next
/// handshake's retransmissions start from this value (RFC 9002, section 6.2.2): a lost first packet
/// is sent again after three round trips, but at least 0.15 s, instead of 1 s.
#[derive(Debug, Clone, Default)]
pub(super) struct RttCache {
    last: Arc<Mutex<Option<(IpAddr, Duration)>>>,
}

impl RttCache {
    /// Records the smoothed round-trip time of a session with `server` that has ended.
    pub(super) fn insert(&self, server: SocketAddr, rtt: Duration) {
        *self.lock() = Some((server.ip(), rtt));
    }

    /// Returns the round-trip time to assume until there is a measurement. The first packet is sent
    /// again after three times this value, and then after twice as long each time.
    pub(super) fn initial_rtt(&self, server: SocketAddr) -> Duration {
        match *self.lock() {
            Some((cached_ip, rtt)) if cached_ip == server.ip() => {
                rtt.clamp(INITIAL_RTT_MIN, DEFAULT_INITIAL_RTT)
            }
            Some(_) | None => DEFAULT_INITIAL_RTT,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(IpAddr, Duration)>> {
        self.last.lock()
    }
}

/// The default for an unknown path (RFC 9002, section 6.2.2).
const DEFAULT_INITIAL_RTT: Duration = Duration::from_millis(333);
/// Minimum value. A server that a thousand agents dial at once answers late, and each agent should
/// not retransmit many times.
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
