//! DNS records of a standalone server: the known nodes, which are all edge nodes, and the names of
//! the configuration.

use std::collections::BTreeSet;
use std::sync::Arc;

use prometheus_client::registry::Registry as MetricsRegistry;
use tunnel_proto::wire::name::NodeName;

use super::context::ServerContext;
use crate::cluster::dns_snapshot::{persist, restore};
use tunnel_dns::{
    Dns, DnsInputs, DnsLimits, DnsMetrics, DnsSettings, DnsSockets, Node, NodeLocation, RecordSet,
};
use tunnel_store::known_nodes::NodeMap;

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
        limits,
        metrics: DnsMetrics::new(metrics_registry, context.records.clone()),
    };
    // Load the records before the first query: an unknown name would be forwarded to other
    // resolvers.
    if context.config.kubernetes.is_some() {
        // The watcher of the cluster's Nodes updates the records as soon as the API server answers.
        restore(&context.data, &context.records);
        persist(&context.data, &context.records, &context.shutdown);
    } else {
        follow_nodes(settings, context);
    }
    Some(Dns::start(inputs, &context.shutdown))
}

/// Updates the records whenever the known nodes change. If a name is in both sources, the
/// configuration's record is used.
fn follow_nodes(settings: &DnsSettings, context: &ServerContext) {
    let (nodes, records) = (context.nodes.clone(), context.records.clone());
    let fixed: BTreeSet<NodeName> = settings
        .fixed
        .iter()
        .map(|node| node.name.clone())
        .collect();
    let mut following = RecordSet::new(&settings.fixed, settings.answer);
    let mut handled = NodeMap::default();
    let mut changed = nodes.changed();
    let mut update = move || {
        let known = nodes.snapshot();
        let changed = known.changed_from(&handled).into_iter();
        for name in changed.filter(|name| !fixed.contains(name)) {
            if known.contains_key(name) {
                following.insert(&Node {
                    name: name.clone(),
                    hostname: None,
                    location: NodeLocation::Edge,
                });
            } else {
                following.remove(name);
            }
        }
        handled = known;
        records.publish(Arc::new(following.clone()));
    };
    update();
    context.shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            update();
        }
    });
}
