//! Metrics of the agent's certificate.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::RenewalLabels;

tunnel_proto::metrics! {
    /// Metrics of the agent's certificate.
    pub(super) struct CredentialMetrics {
        not_after: Gauge = "certificate_not_after_seconds",
            "When the agent's certificate ends, in seconds since 1970";
        unsaved: Gauge = "certificate_unsaved",
            "1 while the certificate in use could not be written to the data directory";
        files_unusable: Gauge = "certificate_files_unusable",
            "1 while --cert-file, --key-file or --ca-file cannot be used and the last good ones \
             stay in use";
        renewals: Family<RenewalLabels, Counter> = "renewals",
            "Certificate renewals requested on sessions, by result";
    }
}
