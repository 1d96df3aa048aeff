//! DNS records of a standalone server: the known nodes, which are all edge nodes, and the names of
//! the configuration.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tunnel_proto::process::shutdown::Shutdown;

use crate::config::Config;
use crate::dns::{
    Dns, DnsInputs, DnsLimits, DnsMetrics, DnsSettings, DnsSockets, Node, NodeLocation, RecordSet,
    Records, restore,
};
use crate::routing::known_nodes::KnownNodes;
use crate::store::data_dir::DataDir;

/// The server state that the embedded DNS uses.
pub(super) struct DnsContext<'a> {
    pub(super) data: &'a DataDir,
    pub(super) nodes: &'a Arc<KnownNodes>,
    pub(super) records: &'a Records,
    pub(super) metrics: &'a mut Registry,
    pub(super) shutdown: &'a Shutdown,
    /// Limits of the DNS, or `None` if the DNS is not configured.
    pub(super) limits: Option<DnsLimits>,
}

/// Starts the embedded DNS and the tasks that update its records, if the DNS is configured.
pub(super) fn serve(
    sockets: Option<DnsSockets>,
    config: &Config,
    context: DnsContext<'_>,
) -> Option<Dns> {
    let (sockets, settings, limits) = (sockets?, config.dns.as_ref()?, context.limits?);
    let parts = DnsInputs {
        sockets,
        settings,
        records: context.records.clone(),
        data: context.data,
        limits,
        metrics: DnsMetrics::new(context.metrics, context.records.clone()),
    };
    // Load the records before the first query: an unknown name would be forwarded to other
    // resolvers.
    if config.kubernetes.is_some() {
        // The watcher of the cluster's Nodes updates the records as soon as the API server answers.
        restore(context.data, context.records);
    } else {
        follow_nodes(context.nodes, settings, context.records, context.shutdown);
    }
    Some(Dns::start(parts, context.shutdown))
}

/// Updates the records whenever the known nodes change. If a name is in both sources, the
/// configuration's record is used.
fn follow_nodes(
    nodes: &Arc<KnownNodes>,
    settings: &DnsSettings,
    records: &Records,
    shutdown: &Shutdown,
) {
    let (nodes, settings, records) = (nodes.clone(), settings.clone(), records.clone());
    let mut changed = nodes.changed();
    let rebuild = move || {
        let known = nodes.snapshot();
        let edges = known.keys().map(|name| Node {
            name: name.clone(),
            hostname: None,
            location: NodeLocation::Edge,
        });
        let all: Vec<_> = edges.chain(settings.fixed.iter().cloned()).collect();
        records.replace(RecordSet::new(&all, settings.answer));
    };
    rebuild();
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            rebuild();
        }
    });
}
