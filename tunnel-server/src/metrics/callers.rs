//! Metrics of callers, and of their requests and streams.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tunnel_proto::process::metrics::{StaticLabel, with_series};

use super::labels::{DirectionLabel, OutcomeLabel, ResultLabel};

/// Upper bounds of the buckets for opening a stream, in seconds: from one local round trip to the
/// open timeout.
const OPEN_SECONDS: [f64; 10] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];

/// Results of a password check.
const PASSWORD_RESULTS: [&str; 4] = ["right", "wrong", "missing", "waiting"];

tunnel_proto::metrics! {
    /// Metrics of callers, and of their requests and streams.
    pub(super) struct CallerMetrics {
        streams_open: Gauge = "streams_open", "Streams open to agents";
        direct_open: Gauge = "connect_direct_open",
            "Open connections that the server dialed directly for callers of the CONNECT listeners";
        streams: Family<OutcomeLabel, Counter> = "streams",
            "Finished requests and streams of callers by result";
        bytes: Family<DirectionLabel, Counter> = "stream_bytes",
            "Payload bytes of ended streams; in is from agents, out is to agents";
        open_seconds: Histogram = "open_duration_seconds",
            "Time to open a stream at the server's end", Histogram::new(OPEN_SECONDS);
        evicted: Counter = "callers_evicted",
            "Idle caller connections that were evicted in favor of newer ones \
             (limits.callersTotal, limits.callersPerSource)";
        refused: Counter = "callers_refused",
            "Caller connections that were refused because no idle connection could be evicted \
             (limits.callersTotal, limits.callersPerSource)";
        passwords: Family<ResultLabel, Counter> = "connect_passwords",
            "Requests at the CONNECT listener by result of the password check; waiting: refused \
             before the check",
            with_series(PASSWORD_RESULTS.map(|result| ResultLabel {
                result: StaticLabel(result),
            }));
    }
}
