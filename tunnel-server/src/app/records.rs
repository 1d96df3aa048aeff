//! DNS records of a standalone server: the known nodes, which are all edge nodes, and the names of
//! the configuration.

use prometheus_client::registry::Registry as MetricsRegistry;

use super::context::ServerContext;
use crate::dns::{
    Dns, DnsInputs, DnsLimits, DnsMetrics, DnsSettings, DnsSockets, Node, NodeLocation, RecordSet,
    restore,
};

/// Starts the embedded DNS and the tasks that update its records, if the DNS is configured.
pub(super) fn start(
    sockets: Option<DnsSockets>,
    limits: Option<DnsLimits>,
    metrics_registry: &mut MetricsRegistry,
    context: &ServerContext,
) -> Option<Dns> {
    let (sockets, settings, limits) = (sockets?, context.config.dns.as_ref()?, limits?);
    let inputs = DnsInputs {
        sockets,
        settings,
        records: context.records.clone(),
        data: &context.data,
        limits,
        metrics: DnsMetrics::new(metrics_registry, context.records.clone()),
    };
    // Load the records before the first query: an unknown name would be forwarded to other
    // resolvers.
    if context.config.kubernetes.is_some() {
        // The watcher of the cluster's Nodes updates the records as soon as the API server answers.
        restore(&context.data, &context.records);
    } else {
        follow_nodes(settings, context);
    }
    Some(Dns::start(inputs, &context.shutdown))
}

/// Updates the records whenever the known nodes change. If a name is in both sources, the
/// configuration's record is used.
fn follow_nodes(settings: &DnsSettings, context: &ServerContext) {
    let (nodes, records) = (context.nodes.clone(), context.records.clone());
    let settings = settings.clone();
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
    context.shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            rebuild();
        }
    });
}
