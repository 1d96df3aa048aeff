//! Counts of log lines that were not written: a metric, and a log line when the output accepts
//! lines again.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use tracing::warn;

/// The `target` of the line that reports dropped lines.
pub(super) const NOTICE: &str = module_path!();

/// A process has one log, so it has one set of counters.
pub(super) static DROPPED: DropCounters = DropCounters::new();
/// The counters of the audit log, whose events are no lines of the log.
pub(super) static AUDIT_DROPPED: DropCounters = DropCounters::new();

#[derive(Debug)]
pub(super) struct DropCounters {
    access: AtomicU64,
    other: AtomicU64,
    limited: AtomicU64,
}

/// Counts of lines that the output did not accept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DroppedCounts {
    pub(super) access: u64,
    pub(super) other: u64,
}

impl DropCounters {
    pub(super) const fn new() -> Self {
        Self {
            access: AtomicU64::new(0),
            other: AtomicU64::new(0),
            limited: AtomicU64::new(0),
        }
    }

    pub(super) fn add_access(&self) {
        self.access.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add_other(&self) {
        self.other.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a line that a [`LogRateLimit`](super::LogRateLimit) or a
    /// [`SourceBudget`](super::SourceBudget) suppressed.
    pub(super) fn add_limited(&self) {
        self.limited.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts of lines that the output did not accept since the start.
    pub(super) fn snapshot(&self) -> DroppedCounts {
        DroppedCounts {
            access: self.access.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        }
    }
}

impl DroppedCounts {
    /// Returns the counts of lines that were dropped after `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            access: self.access.saturating_sub(earlier.access),
            other: self.other.saturating_sub(earlier.other),
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Logs how many lines are missing before this one.
    pub(super) fn report(self) {
        warn!(
            lines = self.access.saturating_add(self.other),
            access_lines = self.access,
            "log lines were lost: their output was blocked; check the reader or the storage of the log"
        );
    }
}

/// The collector that exports the counts as `log_lines_dropped_total`, by kind.
#[derive(Debug)]
pub struct DroppedLines;

impl Collector for DroppedLines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Number of log lines that were not written, by kind: access and other lines while standard error was blocked, \
                    lines suppressed by the limits of repeated lines and of the lines of a source, audit events while \
                    their output was blocked or failed, and audit events of refused requests above the limit of a source";
        let mut family =
            encoder.encode_descriptor("log_lines_dropped", help, None, MetricType::Counter)?;
        let kinds = [
            ("access", &DROPPED.access),
            ("other", &DROPPED.other),
            ("limited", &DROPPED.limited),
            ("audit", &AUDIT_DROPPED.other),
            ("audit_limited", &AUDIT_DROPPED.limited),
        ];
        for (kind, count) in kinds {
            let labels = [("kind", kind)];
            let counter = ConstCounter::new(count.load(Ordering::Relaxed));
            counter.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_lines_are_shown_by_kind_from_the_start() {
        let mut registry = prometheus_client::registry::Registry::with_prefix("x");
        registry.register_collector(Box::new(DroppedLines));
        let mut shown = String::new();
        prometheus_client::encoding::text::encode(&mut shown, &registry).unwrap();
        for kind in ["access", "other", "limited", "audit", "audit_limited"] {
            let series = format!("x_log_lines_dropped_total{{kind=\"{kind}\"}} ");
            assert!(shown.contains(&series), "{shown}");
        }
    }

    #[test]
    fn lost_lines_are_those_since_the_last_report() {
        let lines = DropCounters::new();
        lines.add_access();
        let earlier = lines.snapshot();
        assert!(lines.snapshot().since(earlier).is_empty());
        lines.add_access();
        lines.add_other();
        let lost = lines.snapshot().since(earlier);
        assert_eq!((lost.access, lost.other), (1, 1));
    }
}
