//! Metrics of the configured limits.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use tunnel_proto::process::metrics::with_series;
use tunnel_proto::transport::BufferPool;

use super::labels::LimitLabel;
use crate::config::Limit;

tunnel_proto::metrics! {
    /// Metrics of the configured limits.
    pub(super) struct LimitMetrics {
        reached: Family<LimitLabel, Counter> = "limits_reached",
            "Number of times a configured limit was reached, by limit",
            with_series(Limit::ALL.iter().map(|&limit| LimitLabel { limit }));
    }
}

/// Gauges for the bytes that stalled readers hold and may hold.
#[derive(Debug)]
pub(super) struct PoolGauges(pub(super) Arc<BufferPool>);

impl Collector for PoolGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut encode_gauge = |name, help, bytes: u64| {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        encode_gauge(
            "buffer_bytes",
            "Bytes that stalled readers hold, as charged to limits.bufferPool",
            self.0.charged(),
        )?;
        encode_gauge("buffer_limit_bytes", "limits.bufferPool", self.0.limit())
    }
}
