//! Publisher of derived state. The publisher updates what this server serves and the desired state
//! of the writers whenever the cluster state or the connected agents change.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tunnel_process::meta::ReadinessBlock;
use tunnel_process::networks::Cidr;
use tunnel_proto::wire::name::NodeName;

use super::metrics::ClusterMetrics;
use super::nodes::{ClusterNode, NodeSet};
use super::service;
use super::watches::Observed;
use crate::cluster::conditions::{Condition, Conditions};
use crate::cluster::state::{ClusterState, DesiredState, LocalFacts};
use crate::egress::labeled_nodes::LabeledNodes;
use crate::metrics::Metrics;
use crate::routing::Routing;
use crate::routing::routes::{RouteSource, Routes};
use tunnel_dns::{RecordSet, Records};
use tunnel_routing::dial_policy::{ClusterNetworks, LiveClusterNetworks};
use tunnel_routing::policy::{PortSettings, SharedPolicy};

/// Applies the state derived from the cluster as soon as it changes.
pub(super) struct Publisher {
    /// Blocks readiness until a list of Nodes is published.
    pub(super) waiting: Option<ReadinessBlock>,
    pub(super) local_facts: LocalFacts,
    /// Replaces the ports of `local_facts`, as the file of the configuration changes.
    pub(super) ports: watch::Receiver<PortSettings>,
    pub(super) routes: Routes,
    pub(super) labeled_nodes: LabeledNodes,
    pub(super) records: Records,
    pub(super) policy: SharedPolicy,
    pub(super) ranges: Option<LiveClusterNetworks>,
    /// Set if a connected agent makes its node an edge node. The agents of all servers count.
    pub(super) agents: Option<Routing>,
    pub(super) route_metrics: Metrics,
    pub(super) service: String,
    pub(super) conditions: Conditions,
    pub(super) metrics: ClusterMetrics,
    pub(super) desired: watch::Sender<DesiredState>,
    /// Version of the nodes that are published.
    pub(super) handled_nodes: u64,
    /// The records of these nodes.
    pub(super) following: RecordSet,
    /// Whether `following` may differ from the published records.
    pub(super) has_unpublished: bool,
    /// The records in use, of which `following` may be a later state.
    pub(super) published: Option<Arc<RecordSet>>,
    /// What the nodes contribute to the networks of direct dials.
    pub(super) networks: ClusterNetworks,
    pub(super) last_ranges: Option<RangeFacts>,
    /// Time at which conflicting claims of nodes are reported.
    pub(super) claims_due: Option<Instant>,
}

/// Inputs of the networks for direct dials.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RangeFacts {
    /// Version of the nodes.
    nodes: u64,
    services: Arc<[Cidr]>,
    own: Vec<IpAddr>,
}

impl Publisher {
    pub(super) async fn run(&mut self, mut observed: watch::Receiver<ClusterState>) {
        let mut agents = self.agents.as_ref().map(Routing::held_changed);
        // Agents may have come and gone before this.
        let mut have_agents_changed = self.agents.is_some();
        loop {
            let now = observed.borrow_and_update().clone();
            self.publish(&now, have_agents_changed);
            self.report_due_claims(&now);
            have_agents_changed = false;
            let claims_due = self.claims_due;
            let more = tokio::select! {
                changed = observed.changed() => changed.is_ok(),
                Ok(()) = self.ports.changed() => {
                    self.local_facts.ports = self.ports.borrow_and_update().clone();
                    true
                }
                () = sleep_until(claims_due.unwrap_or_else(Instant::now)), if claims_due.is_some() => true,
                changed = async {
                    match &mut agents {
                        Some(agents) => {
                            let changed = agents.changed().await;
                            have_agents_changed = true;
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

    /// Publishes what has changed. Agents that come and go cost a pass over all nodes if they decide
    /// which ones are edge nodes.
    fn publish(&mut self, observed: &ClusterState, have_agents_changed: bool) {
        self.publish_nodes(&observed.nodes);
        if have_agents_changed {
            let agents = self.agents.as_ref();
            for node in observed.nodes.iter().filter(|node| !node.is_edge()) {
                let has_agent = agents.is_some_and(|agents| agents.is_held(&node.name));
                self.has_unpublished |= self.following.insert(&node.record(has_agent));
            }
        }
        self.publish_ranges(observed);
        let derived = observed.ports(&self.local_facts);
        let (records_observed, ports_observed) = observed.is_observed();
        let lists = derived.are_of_cluster.then_some(&derived.lists);
        self.policy.replace_lists(lists);
        self.conditions.set(Condition::PortLists, derived.mistakes);
        self.conditions
            .set(Condition::Service, self.service_condition(observed));
        let records = observed.records_tunnel().map(|tunnel| {
            self.has_unpublished |= self.following.set_tunnel(tunnel);
            self.publish_records()
        });
        let ports = service::desired_ports(&derived.policy, self.local_facts.listener_ports);
        let desired = DesiredState {
            records: records.filter(|_| records_observed),
            ports: ports_observed.then_some(ports),
        };
        self.desired.send_if_modified(|last| {
            let is_other = !last.is_same(&desired);
            if is_other {
                *last = desired;
            }
            is_other
        });
        if observed.has_list() {
            self.routes.complete();
            self.waiting = None;
        }
    }

    /// Updates what follows from each node that has changed.
    fn publish_nodes(&mut self, nodes: &NodeSet) {
        // Refused Nodes have no version.
        self.conditions
            .set_first(Condition::NodeNames, nodes.refused(), nodes.refused_count());
        if nodes.version() == self.handled_nodes {
            return;
        }
        let changed = nodes.changed_since(self.handled_nodes);
        let changed: Option<Vec<_>> = changed.map(Iterator::collect);
        let are_all = changed.is_none();
        let changed = changed.unwrap_or_else(|| {
            let nodes = nodes.iter();
            nodes.map(|node| (&node.name, Some(node))).collect()
        });
        let table = if are_all {
            let nodes = nodes.iter().map(ClusterNode::route);
            self.routes.set(RouteSource::Cluster, nodes.collect())
        } else {
            let changes = changed.iter();
            let changes = changes.map(|(name, node)| {
                let name = NodeName::clone(name);
                (name, node.map(ClusterNode::route))
            });
            self.routes.update(RouteSource::Cluster, changes)
        };
        self.route_metrics.routes(table.len(), table.conflicts());
        let labels = self.labeled_nodes.labels();
        let labeled = changed.iter().map(|(name, node)| {
            let own = labels.iter();
            let own = own.filter(|label| node.is_some_and(|node| node.has_cloud_label(label)));
            (*name, own.collect())
        });
        self.labeled_nodes.update(are_all, labeled);
        if are_all {
            self.following = RecordSet::default();
            self.has_unpublished = true;
            self.networks = ClusterNetworks::default();
        }
        for (name, node) in changed {
            let pods = node.map(ClusterNode::pod_networks).unwrap_or_default();
            let cloud_addresses = node.and_then(ClusterNode::cloud_addresses);
            self.networks.set_node(name, pods, cloud_addresses);
            self.has_unpublished |= match node {
                Some(node) => {
                    let agents = self.agents.as_ref();
                    let has_agent = agents.is_some_and(|agents| agents.is_held(name));
                    self.following.insert(&node.record(has_agent))
                }
                None => self.following.remove(name),
            };
        }
        self.handled_nodes = nodes.version();
    }

    fn publish_ranges(&mut self, observed: &ClusterState) {
        let Some(ranges) = &self.ranges else { return };
        let facts = RangeFacts {
            nodes: observed.nodes.version(),
            services: observed.service_networks.clone(),
            own: observed.tunnel(),
        };
        if self.last_ranges.as_ref() == Some(&facts) {
            return;
        }
        ranges.set(ClusterNetworks {
            services: facts.services.to_vec(),
            own: facts.own.clone(),
            ..self.networks.clone()
        });
        self.claims_due
            .get_or_insert_with(|| Instant::now() + CLAIMS_PAUSE);
        self.last_ranges = Some(facts);
    }

    /// Reports claims of nodes that conflict. A claim may concern any other one, so they are all
    /// compared, for the changes of some time together.
    fn report_due_claims(&mut self, observed: &ClusterState) {
        if self.claims_due.is_some_and(|due| due <= Instant::now()) {
            self.claims_due = None;
            let lines = observed.nodes.conflicts(&observed.service_networks);
            self.conditions.set(Condition::NodeClaims, lines);
        }
    }

    /// Replaces the records in use if they may be others.
    fn publish_records(&mut self) -> Arc<RecordSet> {
        let has_unpublished = std::mem::take(&mut self.has_unpublished);
        if let Some(published) = self.published.as_ref().filter(|_| !has_unpublished) {
            return published.clone();
        }
        let records = match &self.published {
            Some(_) => {
                let records = Arc::new(self.following.clone());
                self.records.publish(records.clone());
                records
            }
            None => {
                // Those of the last run may be equal.
                self.records.replace(self.following.clone());
                self.records.load()
            }
        };
        self.metrics.records(records.len(), records.hosts_bytes());
        self.published = Some(records.clone());
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
/// Changes of nodes within this time are compared together for conflicting claims.
const CLAIMS_PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use prometheus_client::registry::Registry as MetricsRegistry;
    use serde_json::json;
    use tunnel_process::meta::Readiness;
    use tunnel_proto::transport::BufferPool;
    use tunnel_tables::visits;

    use super::super::nodes::{AliasRules, FactMap, NodeObject, NodeStore};
    use super::super::service::ListenerPorts;
    use super::super::snapshot;
    use super::*;
    use crate::cluster::dns_snapshot::row_changes;
    use crate::config::{CloudNodes, CloudTargetSettings};
    use crate::testing::POOL;

    struct Fixture {
        store: NodeStore,
        state: ClusterState,
        publisher: Publisher,
        /// The Nodes and the records that are on disk.
        persisted: (NodeSet, RecordSet),
    }

    /// What a change of one node costs.
    #[derive(Debug, PartialEq, Eq)]
    struct Cost {
        /// Entries that are visited, up to the routes, records, the desired state of the writers, and
        /// the rows on disk.
        visits: u64,
        /// Rows that are written.
        rows: usize,
    }

    const TARGET_LABEL: &str = "example.com/registry";

    fn node(number: usize, is_edge: bool) -> NodeObject {
        let address = |kind: &str, text: String| json!({"type": kind, "address": text});
        let (high, low) = (number / 250, number % 250);
        let name = format!("edge-{number:06}");
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {
                "openyurt.io/is-edge-worker": is_edge.to_string(),
                TARGET_LABEL: is_edge.to_string(),
            }},
            "status": {"addresses": [
                address("InternalIP", format!("10.{}.{}.{low}", high / 250, high % 250)),
                address("Hostname", format!("{name}.example.com")),
            ]},
        }))
        .unwrap()
    }

    impl Fixture {
        /// Publishes a list of this many edge nodes.
        fn new(nodes: usize) -> Self {
            let labeled_nodes = LabeledNodes::new(&[CloudTargetSettings {
                name: "registry".parse().unwrap(),
                addresses: Vec::new(),
                nodes: CloudNodes::Labeled(format!("{TARGET_LABEL}=true").parse().unwrap()),
            }]);
            let store = NodeStore::new(
                "openyurt.io/is-edge-worker".into(),
                FactMap::new(),
                AliasRules::default(),
            );
            let service = json!({"spec": {"clusterIP": "10.106.217.16"}});
            let metrics = ClusterMetrics::default();
            let publisher = Publisher {
                waiting: None,
                ports: watch::channel(PortSettings::default()).1,
                local_facts: LocalFacts {
                    ports: PortSettings::default(),
                    own_ports: Vec::new(),
                    listener_ports: ListenerPorts {
                        http: 10264,
                        https: 10263,
                    },
                },
                routes: Routes::default(),
                labeled_nodes: labeled_nodes.clone(),
                records: Records::default(),
                policy: SharedPolicy::default(),
                ranges: Some(LiveClusterNetworks::default()),
                agents: None,
                route_metrics: Metrics::new(&mut MetricsRegistry::default(), BufferPool::new(POOL)),
                service: "kube-system/service".to_owned(),
                conditions: Conditions::new(Readiness::default()),
                metrics,
                desired: watch::Sender::default(),
                handled_nodes: 0,
                following: RecordSet::default(),
                has_unpublished: false,
                published: None,
                networks: ClusterNetworks::default(),
                last_ranges: None,
                claims_due: None,
            };
            let mut fixture = Self {
                store: store.with_cloud_labels(labeled_nodes),
                state: ClusterState {
                    is_listed: true,
                    service: Observed::Present(Arc::new(service)),
                    ..ClusterState::default()
                },
                publisher,
                persisted: Default::default(),
            };
            let listed = (0..nodes).map(|number| Event::InitApply(node(number, true)));
            let events = std::iter::once(Event::Init).chain(listed);
            fixture.observe(events.chain([Event::InitDone]).collect());
            fixture
        }

        /// Returns the number of rows that are written.
        fn observe(&mut self, events: Vec<Event<NodeObject>>) -> usize {
            assert!(self.store.apply(events).is_changed);
            self.state.nodes = self.store.nodes();
            self.publisher.publish(&self.state, false);
            let records = self.publisher.records.load();
            let nodes = snapshot::row_changes(&self.state.nodes, &self.persisted.0);
            let rows = nodes.len() + row_changes(&records, &self.persisted.1).len();
            self.persisted = (self.state.nodes.clone(), RecordSet::clone(&records));
            rows
        }

        fn cost_of(&mut self, event: Event<NodeObject>) -> Cost {
            let before = visits::count();
            let rows = self.observe(vec![event]);
            Cost {
                visits: visits::count() - before,
                rows,
            }
        }

        fn check(&self, number: usize, address: Option<&str>) {
            let name = format!("edge-{number:06}");
            let alias = format!("{name}.example.com");
            let desired = self.publisher.desired.borrow().records.clone().unwrap();
            for name in [name, alias] {
                let name = name.parse().unwrap();
                assert_eq!(self.publisher.routes.load().knows(&name), address.is_some());
                let expected = address.map(|address| vec![address.parse::<IpAddr>().unwrap()]);
                for records in [&desired, &self.publisher.records.load()] {
                    let found = records.get(&name);
                    assert_eq!(found.map(|found| found.iter().collect()), expected);
                }
            }
        }
    }

    #[test]
    fn node_event_among_20000_nodes_visits_and_writes_as_many_entries_as_among_1000() {
        let costs = [1000, 20_000].map(|nodes| {
            let mut fixture = Fixture::new(nodes);
            fixture.check(7, Some("10.106.217.16"));
            let flip = fixture.cost_of(Event::Apply(node(7, false)));
            fixture.check(7, Some("10.0.0.7"));
            let added = fixture.cost_of(Event::Apply(node(nodes, true)));
            fixture.check(nodes, Some("10.106.217.16"));
            let removed = fixture.cost_of(Event::Delete(node(8, true)));
            fixture.check(8, None);
            // A pass over all nodes is counted.
            fixture.persisted = Default::default();
            let all = fixture.cost_of(Event::Apply(node(7, true)));
            assert!(all.visits > nodes as u64 && all.rows > nodes, "{all:?}");
            [flip, added, removed]
        });
        assert_eq!(costs[0], costs[1]);
        // A row of the Node, one of its name and one of its host name.
        assert!(costs[0].iter().all(|cost| cost.rows == 3), "{costs:?}");
    }

    /// Prints the time of a flip between edge and cloud.
    #[test]
    #[ignore = "prints a time, which depends on the machine"]
    #[expect(clippy::print_stdout, reason = "the purpose of this test")]
    fn time_of_a_flip_among_100000_nodes() {
        let mut fixture = Fixture::new(100_000);
        let began = Instant::now();
        let flips = 1000;
        for flip in 0..flips {
            let number = flip % 10 * 9_999;
            fixture.observe(vec![Event::Apply(node(number, flip / 10 % 2 == 1))]);
        }
        println!(
            "{:?} for each flip",
            began.elapsed() / u32::try_from(flips).unwrap()
        );
    }
}
