//! The probe of a live session, before another agent process can take over its name.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::transport::{Session, TransportKind};

/// Returns whether the peer of a session shows a sign of life within 1 s, or within three round
/// trips if that is longer.
pub async fn answers_probe(session: &Arc<dyn Session>) -> bool {
    let before = session.stats();
    session.probe();
    let deadline = Instant::now() + PROBE_TIMEOUT_MIN.max(before.rtt * 3);
    let mut interval = tokio::time::interval(PROBE_POLL_INTERVAL);
    // On h2 the answer waits behind bulk data. Bytes that still arrive after half of the time are a
    // sign of life as well, because data in kernel buffers has been read by then.
    let half = Instant::now() + PROBE_TIMEOUT_MIN / 2;
    let bulk = session.transport() == TransportKind::H2;
    let mut received = before.received;
    loop {
        tokio::select! {
            _ = session.closed() => return false,
            now = interval.tick() => {
                let stats = session.stats();
                let still_sends = bulk && now > half && stats.received > received;
                received = stats.received;
                if stats.acknowledged > before.acknowledged || still_sends {
                    return true;
                }
                if now >= deadline {
                    return false;
                }
            }
        }
    }
}

/// Shortest time for which the server probes a session.
const PROBE_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// Interval at which the server checks for the answer to a probe.
const PROBE_POLL_INTERVAL: Duration = Duration::from_millis(20);
