//! Metrics of the certificates that the server uses.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::{FilesLabel, ReloadLabel};

tunnel_proto::metrics! {
    /// Metrics of the certificates that the server uses.
    pub(super) struct CredentialMetrics {
        own_not_after: Gauge<f64, AtomicU64> = "certificate_not_after_seconds",
            "Unix time at which the server's own certificate expires";
        reloads: Family<ReloadLabel, Counter> = "credential_reloads",
            "Number of reloads of certificate files, by result";
        unusable: Family<FilesLabel, Gauge> = "credential_files_unusable",
            "1 while certificate files are unusable and the previous ones stay in use";
        not_after: Family<FilesLabel, Gauge<f64, AtomicU64>> = "credential_not_after_seconds",
            "Unix time at which a configured certificate expires";
    }
}
