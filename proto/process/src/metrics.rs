//! Declaration of metrics and of their label sets, and what both binaries need to update them.

use std::fmt;
use std::hash::Hash;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

mod build_info;
pub(super) mod exposition;
mod process;

use build_info::BuildInfo;
pub use build_info::COMMIT;
use process::ProcessCollector;

use crate::panics::PanicCollector;
use crate::telemetry::DroppedLines;

/// Registers the metrics that do not depend on the binary: `tunnel_build_info` and `process_*` in
/// `root`, which has no prefix, and with `prefix` the `buffers`, the panics and the dropped log lines.
/// Returns the registry with `prefix`.
pub fn register_process_metrics<'a>(
    root: &'a mut Registry,
    prefix: &str,
    buffers: impl Collector + 'static,
) -> &'a mut Registry {
    root.register_collector(Box::new(BuildInfo));
    root.register_collector(Box::new(ProcessCollector));
    let registry = root.sub_registry_with_prefix(prefix);
    registry.register_collector(Box::new(buffers));
    registry.register_collector(Box::new(PanicCollector));
    registry.register_collector(Box::new(DroppedLines));
    registry
}

/// Declares a struct of metrics once. An entry has its field, its type, its name, its help text,
/// and its first value if that is not the default of the type.
///
/// The macro defines the struct, its default, and the function `register`, which creates the
/// metrics and registers all of them.
#[macro_export]
macro_rules! metrics {
    (@initial) => { Default::default() };
    (@initial $initial:expr) => { $initial };
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $metrics:ident {
            $($field:ident: $type:ty = $name:literal, $help:literal $(, $initial:expr)?;)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone)]
        $visibility struct $metrics { $($visibility $field: $type,)+ }

        impl Default for $metrics {
            fn default() -> Self {
                Self { $($field: $crate::metrics!(@initial $($initial)?),)+ }
            }
        }

        impl $metrics {
            /// Creates the metrics and registers all of them.
            $visibility fn register(registry: &mut prometheus_client::registry::Registry) -> Self {
                let metrics = Self::default();
                $(registry.register($name, $help, metrics.$field.clone());)+
                metrics
            }
        }
    };
}

/// Declares label sets of metrics, each with its labels and their types.
#[macro_export]
macro_rules! label_sets {
    ($visibility:vis $($name:ident { $($label:ident: $type:ty),+ })+) => { $(
        #[derive(
            Debug, Clone, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelSet,
        )]
        $visibility struct $name { $($visibility $label: $type,)+ }
    )+ };
}

/// Declares the values of a label once, as an enum: [`named!`](crate::named) with `ALL` and `label`, and
/// with further items behind the name of the enum.
#[macro_export]
macro_rules! label_values {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident $(: $($item:ident),+)? {
            $($(#[$variant_attribute:meta])* $variant:ident = $text:literal,)+
        }
    ) => {
        $crate::named! {
            $(#[$attribute])*
            $visibility enum $name: ALL, label $($(, $item)+)? {
                $($(#[$variant_attribute])* $variant = $text,)+
            }
        }

        impl prometheus_client::encoding::EncodeLabelValue for $name {
            fn encode(
                &self,
                encoder: &mut prometheus_client::encoding::LabelValueEncoder<'_>,
            ) -> Result<(), std::fmt::Error> {
                prometheus_client::encoding::EncodeLabelValue::encode(&self.label(), encoder)
            }
        }
    };
}

/// A label value from the program's own text, never from a caller or a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StaticLabel(pub &'static str);

impl EncodeLabelValue for StaticLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        self.0.encode(encoder)
    }
}

/// A guard that increments a gauge, and decrements it on drop.
#[derive(Debug)]
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    /// Increments the gauge until the guard is dropped.
    pub fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Returns a family with these series. They exist from the start, so that the first increase is
/// visible.
pub fn with_series<S, M>(label_sets: impl IntoIterator<Item = S>) -> Family<S, M>
where
    S: Clone + Eq + Hash,
    M: Default,
{
    let family: Family<S, M> = Family::default();
    for labels in label_sets {
        drop(family.get_or_create(&labels));
    }
    family
}

/// Counts one in the series with these labels.
pub fn count<S: Clone + Eq + Hash>(family: &Family<S, Counter>, labels: &S) {
    family.get_or_create(labels).inc();
}

/// Sets a gauge to a number, or to the largest that it can have.
pub fn set_gauge(gauge: &Gauge, number: impl TryInto<i64>) {
    gauge.set(number.try_into().unwrap_or(i64::MAX));
}

/// Returns the seconds since 1970, as gauges of times have them.
pub fn unix_seconds(time: SystemTime) -> f64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.as_secs_f64()
}
