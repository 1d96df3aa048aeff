//! Metrics of the configured limits.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tunnel_proto::process::metrics::with_series;

use super::labels::LimitLabels;
use crate::config::Limit;

tunnel_proto::metrics! {
    /// Metrics of the configured limits.
    pub(super) struct LimitMetrics {
        reached: Family<LimitLabels, Counter> = "limits_reached",
            "Number of times a configured limit was reached, by limit",
            with_series(Limit::ALL.iter().map(|&limit| LimitLabels { limit }));
    }
}
