//! Publisher of derived state. The publisher updates what this server serves and the desired state
//! of the writers whenever the cluster state or the connected agents change.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tunnel_proto::process::networks::Cidr;
use tunnel_proto::wire::name::NodeName;

use super::metrics::ClusterMetrics;
use super::nodes;
use super::service;
use super::watches::Observed;
use crate::cluster::conditions::{Condition, Conditions};
use crate::cluster::state::{ClusterState, DesiredState, LocalFacts};
use crate::dns::{RecordSet, Records};
use crate::egress::labeled_nodes::LabeledNodes;
use crate::metrics::Metrics;
use crate::policy::SharedPortPolicy;
use crate::routing::Routing;
use crate::routing::dial_policy::{ClusterNetworks, LiveClusterNetworks};
use crate::routing::routes::{RouteSource, Routes};

/// Applies the state derived from the cluster as soon as it changes.
pub(super) struct Publisher {
    pub(super) local_facts: LocalFacts,
    pub(super) routes: Routes,
    pub(super) labeled_nodes: LabeledNodes,
    pub(super) records: Records,
    pub(super) policy: SharedPortPolicy,
    pub(super) ranges: Option<LiveClusterNetworks>,
    /// Set if a connected agent makes its node an edge node. The agents of all servers count.
    pub(super) agents: Option<Routing>,
    pub(super) route_metrics: Metrics,
    pub(super) service: String,
    pub(super) conditions: Conditions,
    pub(super) metrics: ClusterMetrics,
    pub(super) desired: watch::Sender<DesiredState>,
    pub(super) last_nodes: Option<Arc<nodes::NodeSet>>,
    pub(super) last_ranges: Option<RangeFacts>,
}

/// Inputs of the networks for direct dials.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RangeFacts {
    nodes: Arc<nodes::NodeSet>,
    services: Arc<[Cidr]>,
    own: Vec<IpAddr>,
}

impl Publisher {
    pub(super) async fn run(&mut self, mut observed: watch::Receiver<ClusterState>) {
        let mut agents = self.agents.as_ref().map(Routing::held_changed);
        loop {
            let now = observed.borrow_and_update().clone();
            self.publish(&now);
            let more = tokio::select! {
                changed = observed.changed() => changed.is_ok(),
                changed = async {
                    match &mut agents {
                        Some(agents) => {
                            let changed = agents.changed().await;
                            // When a site reconnects, many agents connect in a row.
                            tokio::time::sleep(AGENTS_PAUSE).await;
                            changed
                        }
                        None => std::future::pending().await,
                    }
                } => changed,
            };
            if !more {
                return;
            }
        }
    }

    fn publish(&mut self, observed: &ClusterState) {
        let is_same = |last: &Arc<nodes::NodeSet>| Arc::ptr_eq(last, &observed.nodes);
        if !self.last_nodes.as_ref().is_some_and(is_same) {
            self.last_nodes = Some(observed.nodes.clone());
            let table = self
                .routes
                .set(RouteSource::Cluster, observed.nodes.routes());
            let labels = self.labeled_nodes.labels();
            self.labeled_nodes.replace(observed.nodes.by_label(labels));
            self.route_metrics
                .routes(table.len(), table.conflicts().len());
            self.conditions
                .set(Condition::NodeNames, observed.nodes.refused().to_vec());
        }
        self.publish_ranges(observed);
        let agents = self.agents.clone();
        let derived = observed.derive(&self.local_facts, |node: &NodeName| {
            agents.as_ref().is_some_and(|agents| agents.is_held(node))
        });
        let (records_observed, ports_observed) = observed.is_observed();
        self.policy.replace(derived.policy.clone());
        self.conditions.set(Condition::PortLists, derived.mistakes);
        self.conditions
            .set(Condition::Service, self.service_condition(observed));
        let records = derived.records.map(|records| self.put(records));
        let ports = service::desired_ports(&derived.policy, self.local_facts.listener_ports);
        let desired = DesiredState {
            records: records.filter(|_| records_observed),
            ports: ports_observed.then_some(ports),
        };
        self.desired.send_if_modified(|last| {
            let is_other = *last != desired;
            if is_other {
                *last = desired;
            }
            is_other
        });
    }

    fn publish_ranges(&mut self, observed: &ClusterState) {
        let Some(ranges) = &self.ranges else { return };
        let facts = RangeFacts {
            nodes: observed.nodes.clone(),
            services: observed.service_networks.clone(),
            own: observed.tunnel(),
        };
        if self.last_ranges.as_ref() == Some(&facts) {
            return;
        }
        ranges.set(ClusterNetworks {
            services: facts.services.to_vec(),
            own: facts.own.clone(),
            ..facts.nodes.ranges()
        });
        self.conditions.set(
            Condition::NodeClaims,
            facts.nodes.conflicts(&facts.services),
        );
        self.last_ranges = Some(facts);
    }

    fn put(&self, records: RecordSet) -> Arc<RecordSet> {
        self.records.replace(records);
        let records = self.records.load();
        self.metrics.records(records.len(), records.hosts().len());
        records
    }

    fn service_condition(&self, observed: &ClusterState) -> Vec<String> {
        let reason = match &observed.service {
            Observed::Unknown => None,
            Observed::Absent => Some("is missing"),
            Observed::Present(_) if observed.tunnel().is_empty() => Some("has no cluster address"),
            Observed::Present(_) => None,
        };
        let line = reason.map(|what| {
            format!(
                "Service {} {what}; DNS records are not updated until the Service has a cluster address",
                self.service
            )
        });
        line.into_iter().collect()
    }
}

/// Agent changes within this time are handled together.
const AGENTS_PAUSE: Duration = Duration::from_millis(200);
