//! Whether the peer acknowledges full packets. A path whose MTU falls below what QUIC needs passes
//! small packets only: keep-alives and probes are answered, and data is lost for ever. quinn counts
//! acknowledgements and not what they acknowledge. A congestion controller sees both, so the one of a
//! connection is wrapped.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

use crate::transport::Undelivered;

/// Size of a packet above which it counts as full: QUIC's minimum of 1,200 bytes (RFC 9000, section
/// 14), less what a frame that does not fit may leave empty.
const FULL_PACKET_BYTES: u64 = 1150;
/// Time between two lost packets after which the second one begins another observation. The data of
/// the first one is gone, since QUIC repeats data more often as long as anything is acknowledged.
const GAP_MAX: Duration = Duration::from_secs(10);

/// The full packets that this end of a connection has lost since the peer last acknowledged one.
#[derive(Debug)]
pub(super) struct DeliveryClock {
    origin: Instant,
    /// Microseconds from `origin` to the oldest full packet without an acknowledgement.
    sent: AtomicU64,
    /// The same for the first and the last lost packet since then, by the time at which they were
    /// sent.
    first_lost: AtomicU64,
    last_lost: AtomicU64,
}

/// There is no such packet.
const NONE: u64 = u64::MAX;

impl Default for DeliveryClock {
    fn default() -> Self {
        Self {
            origin: Instant::now(),
            sent: AtomicU64::new(NONE),
            first_lost: AtomicU64::new(NONE),
            last_lost: AtomicU64::new(NONE),
        }
    }
}

impl DeliveryClock {
    /// Records a packet, or a batch of packets of the same size.
    fn record_sent(&self, now: Instant, bytes: u64) {
        if bytes >= FULL_PACKET_BYTES && self.sent.load(Ordering::Relaxed) == NONE {
            self.sent.store(self.micros(now), Ordering::Relaxed);
        }
    }

    fn record_acknowledged(&self, bytes: u64) {
        if bytes >= FULL_PACKET_BYTES {
            for at in [&self.sent, &self.first_lost, &self.last_lost] {
                at.store(NONE, Ordering::Relaxed);
            }
        }
    }

    /// Records lost packets, of which the last one was sent at `sent`.
    fn record_lost(&self, sent: Instant, bytes: u64) {
        let sent = self.micros(sent);
        if bytes < FULL_PACKET_BYTES || self.sent.load(Ordering::Relaxed) > sent {
            return;
        }
        let last = self.last_lost.swap(sent, Ordering::Relaxed);
        let gap = u64::try_from(GAP_MAX.as_micros()).unwrap_or(u64::MAX);
        if last == NONE || sent.saturating_sub(last) > gap {
            self.first_lost.store(sent, Ordering::Relaxed);
        }
    }

    /// Returns the time over which full packets were lost and none was acknowledged.
    pub(super) fn undelivered(&self) -> Option<Undelivered> {
        Some(Undelivered {
            since: self.time(&self.first_lost)?,
            until: self.time(&self.last_lost)?,
        })
    }

    fn micros(&self, at: Instant) -> u64 {
        let micros = at.saturating_duration_since(self.origin).as_micros();
        u64::try_from(micros).unwrap_or(NONE - 1)
    }

    fn time(&self, micros: &AtomicU64) -> Option<tokio::time::Instant> {
        match micros.load(Ordering::Relaxed) {
            NONE => None,
            micros => Some((self.origin + Duration::from_micros(micros)).into()),
        }
    }
}

/// Builds the controllers of all connections, which report to the clock of their connection.
pub(super) struct DeliveryControllers {
    pub(super) inner: Arc<dyn ControllerFactory + Send + Sync>,
    /// Returns the clock of the connection for which a controller is built. A connection has another
    /// controller for each path.
    pub(super) clock: fn() -> Arc<DeliveryClock>,
}

impl ControllerFactory for DeliveryControllers {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(DeliveryController {
            inner: self.inner.clone().build(now, current_mtu),
            clock: (self.clock)(),
        })
    }
}

/// A congestion controller that decides as `inner` does.
struct DeliveryController {
    inner: Box<dyn Controller>,
    clock: Arc<DeliveryClock>,
}

impl Controller for DeliveryController {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.clock.record_sent(now, bytes);
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.clock.record_acknowledged(bytes);
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.inner
            .on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.clock.record_lost(sent, lost_bytes);
        self.inner
            .on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            clock: self.clock.clone(),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self.inner.into_any()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens to packets of a size.
    enum Event {
        Sent(u64),
        Acknowledged(u64),
        /// With the time in seconds at which the last lost packet was sent.
        Lost(u64, u64),
    }

    use Event::{Acknowledged, Lost, Sent};

    const FULL: u64 = 1200;
    const SMALL: u64 = 60;

    /// Each event has its time in seconds.
    #[test]
    fn time_without_an_acknowledged_full_packet_counts_from_loss_to_loss() {
        for (what, events, undelivered) in [
            ("nothing sent", vec![], None),
            ("sent only", vec![(0, Sent(FULL)), (9, Sent(FULL))], None),
            (
                "lost",
                vec![(0, Sent(FULL)), (2, Lost(0, FULL)), (7, Lost(6, FULL))],
                Some((0, 6)),
            ),
            (
                "small packets are acknowledged",
                vec![
                    (0, Sent(FULL)),
                    (1, Lost(0, FULL)),
                    (5, Acknowledged(SMALL)),
                    (6, Lost(5, FULL)),
                ],
                Some((0, 5)),
            ),
            (
                "a full packet is acknowledged",
                vec![(0, Sent(FULL)), (1, Lost(0, FULL)), (5, Acknowledged(FULL))],
                None,
            ),
            (
                "small packets are lost",
                vec![
                    (0, Sent(SMALL)),
                    (1, Lost(0, SMALL)),
                    (6, Lost(5, 30 * SMALL)),
                ],
                None,
            ),
            (
                "loss of what was sent before a full packet",
                vec![(3, Sent(FULL)), (4, Lost(2, FULL))],
                None,
            ),
            (
                "the data of the first loss is gone",
                vec![(0, Sent(FULL)), (1, Lost(0, FULL)), (30, Lost(29, FULL))],
                Some((29, 29)),
            ),
        ] {
            let clock = DeliveryClock::default();
            let at = |seconds| clock.origin + Duration::from_secs(seconds);
            for (seconds, event) in events {
                match event {
                    Sent(bytes) => clock.record_sent(at(seconds), bytes),
                    Acknowledged(bytes) => clock.record_acknowledged(bytes),
                    Lost(sent, bytes) => clock.record_lost(at(sent), bytes),
                }
            }
            let expected = undelivered.map(|(since, until)| Undelivered {
                since: at(since).into(),
                until: at(until).into(),
            });
            assert_eq!(clock.undelivered(), expected, "{what}");
        }
    }
}
