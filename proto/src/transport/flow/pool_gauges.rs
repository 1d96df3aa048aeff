//! Metrics of the pool.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

use super::BufferPool;

/// Gauges for the memory that is reserved for unread data, and that can be.
#[derive(Debug)]
pub struct PoolGauges(pub Arc<BufferPool>);

impl Collector for PoolGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut encode_gauge = |name, help, bytes: u64| {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        encode_gauge(
            "buffer_bytes",
            "Bytes of memory reserved from limits.bufferPool for data that peers may send unread",
            self.0.reserved(),
        )?;
        encode_gauge("buffer_limit_bytes", "limits.bufferPool", self.0.limit())
    }
}
