//! Metrics of streams and of the dials to their targets.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::{DialLabels, DirectionLabels, StreamLabels};

tunnel_proto::metrics! {
    /// Metrics of streams and of the dials to their targets.
    pub(super) struct StreamMetrics {
        open: Gauge = "streams_open", "Streams that are being served";
        ended: Family<StreamLabels, Counter> = "streams", "Streams that ended, by result";
        bytes: Family<DirectionLabels, Counter> = "stream_bytes",
            "Bytes relayed to and from targets";
        dials: Family<DialLabels, Counter> = "dials",
            "Attempts to connect to an address of a target, by result";
    }
}
