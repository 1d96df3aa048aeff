//! Metrics of the cluster controllers.

use std::sync::atomic::AtomicU64;
use std::time::SystemTime;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_process::metrics::{StaticLabel, count, set_gauge, unix_seconds};

use super::failure::ApiErrorKind;
use super::objects::Object;

tunnel_process::metrics! {
    /// Metrics of the cluster controllers. Clones share them.
    pub(super) struct ClusterMetrics {
        leader: Gauge = "kubernetes_leader",
            "1 while this server holds the leader Lease and writes to the cluster";
        synced: Family<ObjectLabel, Gauge<f64, AtomicU64>> = "kubernetes_synced_timestamp_seconds",
            "Unix time of the last successful reconciliation, by object";
        writes: Family<WriteLabel, Counter> = "kubernetes_writes",
            "Writes to the cluster by result: ok, conflict, forbidden, throttled, invalid, too_large, timeout, unavailable";
        watch_failures: Family<WriteLabel, Counter> = "kubernetes_watch_failures",
            "Failures to list or watch by kind";
        records: Gauge = "kubernetes_records", "Names with a record";
        records_bytes: Gauge = "kubernetes_records_bytes", "Size of the records in the ConfigMap";
        records_left_out: Gauge = "kubernetes_records_left_out",
            "Names whose records do not fit into the ConfigMap; only the leader counts them";
    }
}

tunnel_process::label_sets! {
    pub(super)
    ObjectLabel { object: StaticLabel }
    WriteLabel { object: StaticLabel, result: StaticLabel }
}

impl ClusterMetrics {
    /// Registers all metrics under `tunnel_server_`.
    pub(super) fn new(root: &mut Registry) -> Self {
        Self::register(root.sub_registry_with_prefix("tunnel_server"))
    }

    pub(super) fn leader(&self, is_leader: bool) {
        self.leader.set(is_leader.into());
    }

    pub(super) fn synced(&self, object: Object) {
        let object = StaticLabel(object.label());
        let synced = self.synced.get_or_create(&ObjectLabel { object });
        synced.set(unix_seconds(SystemTime::now()));
    }

    /// Counts a write. `result` is `ok` or the kind of the failure.
    pub(super) fn record_write(&self, object: Object, result: &'static str) {
        let [object, result] = [object.label(), result].map(StaticLabel);
        count(&self.writes, &WriteLabel { object, result });
    }

    pub(super) fn watch_failed(&self, object: Object, kind: ApiErrorKind) {
        let [object, result] = [object.label(), kind.label()].map(StaticLabel);
        count(&self.watch_failures, &WriteLabel { object, result });
    }

    pub(super) fn records(&self, names: usize, bytes: usize) {
        set_gauge(&self.records, names);
        set_gauge(&self.records_bytes, bytes);
    }

    pub(super) fn records_left_out(&self, names: usize) {
        set_gauge(&self.records_left_out, names);
    }
}

/// Registers the metrics with a series of each, for the reference.
#[cfg(feature = "test-util")]
pub fn register_example_metrics(root: &mut Registry) {
    let metrics = ClusterMetrics::new(root);
    metrics.synced(Object::Nodes);
    metrics.record_write(Object::Nodes, "ok");
    metrics.watch_failed(Object::Nodes, ApiErrorKind::Conflict);
}
