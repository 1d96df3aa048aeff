//! Metrics of sessions and of the dials for them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::{ConnectLabels, TransportLabels};

tunnel_proto::metrics! {
    /// Metrics of sessions and of the dials for them.
    pub(super) struct SessionMetrics {
        connected: Family<TransportLabels, Gauge> = "session_connected",
            "Sessions to servers that are ready, by transport";
        suspect: Gauge = "sessions_suspect",
            "Ready sessions whose server is silent, or reports that this agent is silent";
        promotions: Counter = "promotions", "Number of upgrades from h2 to QUIC";
        fallbacks: Counter = "fallbacks", "Number of fallbacks from QUIC to h2";
        connect_attempts: Family<ConnectLabels, Counter> = "connect_attempts",
            "Session dials, by transport and result";
    }
}
