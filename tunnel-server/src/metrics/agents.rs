//! Metrics of agents, of their sessions and of the nodes.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tunnel_proto::process::metrics::{StaticLabel, with_series};
use tunnel_proto::transport::TransportKind;

use super::labels::{CodeLabel, ResultLabel, TransportLabel};

tunnel_proto::metrics! {
    /// Metrics of agents, of their sessions and of the nodes.
    pub(super) struct AgentMetrics {
        connected: Family<TransportLabel, Gauge> = "agents", "Connected agent sessions",
            with_series([TransportKind::Quic, TransportKind::H2].map(|transport| TransportLabel {
                transport: StaticLabel(transport.label()),
            }));
        suspect: Gauge = "sessions_suspect",
            "Agent sessions that are suspect; suspect sessions get no new streams";
        session_ends: Family<CodeLabel, Counter> = "session_ends",
            "Closed agent sessions by close code";
        handshakes: Family<ResultLabel, Counter> = "handshakes",
            "Handshakes and admissions of agents by result";
        enrollments: Family<ResultLabel, Counter> = "enrollments",
            "Enrollment requests by result";
        renewals: Family<ResultLabel, Counter> = "renewals",
            "Certificate renewal requests on live sessions, by result";
        known_nodes: Gauge = "known_nodes", "Nodes that may be addressed";
        address_conflicts: Gauge = "address_conflicts", "Addresses shared by several nodes";
    }
}
