//! Facts about the cluster for the command `doctor`. Only reads.
//!
//! [`ClusterObjects::read`] asks the API server for everything at once. What the credentials of the
//! command do not allow, or what has no answer in time, is an error in its place.
//! [`ClusterObjects::facts`] is pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher::Event;
use serde_json::Value;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::{PORT_HTTP, PORT_HTTPS};

use super::client::Connection;
use super::credentials::FollowingClient;
use super::hosts;
use super::nodes::{AliasOwners, AliasRules, FactMap, NodeObject, NodeSet, NodeStore};
use super::objects::{HTTP_PORTS_KEY, HTTPS_PORTS_KEY, RECORDS_KEY, SERVICE_NAME_LABEL};
use super::service::{self, ListenerPorts};
use super::state::{ClusterState, DerivedPorts, LocalFacts};
use super::watches::Observed;
use crate::config::{Config, KubernetesSettings, ObjectNames};
use tunnel_dns::RecordSet;

mod addons;
mod control_plane;
mod monitors;
mod reader;
mod rights;

pub(crate) use addons::AddonFacts;
use addons::{AddonObjects, SYSTEM_PODS};
#[cfg(test)]
pub(crate) use addons::{ClusterDnsFacts, RecordsMount, ServerWorkload};
pub(crate) use control_plane::{ApiServerFacts, command_words};
#[cfg(test)]
pub(crate) use monitors::{AddressRule, MonitorKind};
pub(crate) use monitors::{EndpointFacts, MonitorFacts};
pub(crate) use reader::Fact;
use reader::Reader;

/// The objects of the cluster, as the API server returned them.
#[derive(Debug)]
pub(crate) struct ClusterObjects {
    namespace: String,
    clock_ahead: Fact<i64>,
    nodes: Fact<Vec<NodeObject>>,
    services: Fact<Vec<Value>>,
    service: Fact<Option<Value>>,
    endpoint_slices: Fact<Vec<Value>>,
    dns_slices: Fact<Vec<Value>>,
    records_map: Fact<Option<ConfigMap>>,
    ports_map: Fact<Option<ConfigMap>>,
    denied: Fact<Vec<String>>,
    apiserver_pods: Fact<Vec<Value>>,
    coredns_maps: Fact<Vec<ConfigMap>>,
    addons: AddonObjects,
}

/// What the checks need to know about the cluster.
#[derive(Debug, Clone)]
pub(crate) struct ClusterFacts {
    /// Namespace of the server's objects.
    pub(crate) namespace: String,
    /// Names of the server's objects.
    pub(crate) names: ObjectNames,
    /// Seconds by which the clock of this host is ahead of the API server's.
    pub(crate) clock_ahead: Fact<i64>,
    pub(crate) nodes: Fact<NodesFacts>,
    /// Names of all Services with their namespaces, as `name.namespace`.
    pub(crate) service_names: Fact<Vec<String>>,
    /// The Service of the listeners. `None` if it does not exist.
    pub(crate) service: Fact<Option<ServiceFacts>>,
    /// Number of ready endpoints of the Service.
    pub(crate) ready_endpoints: Fact<usize>,
    /// Number of ready endpoints of the Service [`DNS_SERVICE`]. `None` if it does not exist.
    pub(crate) ready_dns_endpoints: Fact<Option<usize>>,
    pub(crate) records: Fact<RecordsFacts>,
    /// The ConfigMap of ports. `None` if it does not exist.
    pub(crate) port_lists: Fact<Option<PortListsFacts>>,
    /// Rights that the credentials of this command do not have.
    pub(crate) denied: Fact<Vec<String>>,
    pub(crate) apiservers: Fact<Vec<ApiServerFacts>>,
    /// The configuration of CoreDNS. Empty if none of its ConfigMaps exists.
    pub(crate) corefiles: Fact<Vec<Corefile>>,
    pub(crate) addons: AddonFacts,
}

/// A Corefile, or a file that one imports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Corefile {
    /// The ConfigMap in `kube-system`.
    pub(crate) config_map: String,
    pub(crate) text: String,
}

impl Corefile {
    /// Returns the files of a ConfigMap: the Corefile, and the files of k3s that it imports.
    fn all(map: ConfigMap) -> impl Iterator<Item = Self> {
        let config_map = map.metadata.name.unwrap_or_default();
        let files = map.data.unwrap_or_default().into_iter();
        let files = files.filter(|(key, _)| {
            let imported = [".server", ".override"];
            key == COREFILE_KEY || imported.iter().any(|end| key.ends_with(end))
        });
        files.map(move |(_, text)| Self {
            config_map: config_map.clone(),
            text,
        })
    }
}

/// Checks that the credentials for the API server can be read. Sends no request.
///
/// # Errors
/// Returns the file, and why it cannot be used.
pub(crate) async fn check_credentials(settings: &KubernetesSettings) -> Fact<()> {
    let client = FollowingClient::open(settings).await;
    client.map(drop).map_err(|error| error.to_string())
}

/// The Nodes of the cluster.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodesFacts {
    pub(crate) nodes: Vec<ReportedNode>,
    /// Names and host names that the server refuses, with the reasons.
    pub(crate) refused: Vec<String>,
}

/// A Node with its addresses as the kubelet reported them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReportedNode {
    pub(crate) name: String,
    pub(crate) hostname: Option<String>,
    pub(crate) internal: Vec<IpAddr>,
    pub(crate) is_edge: bool,
    /// Port of the kubelet, if the Node says so.
    pub(crate) kubelet_port: Option<u16>,
}

/// The Service of the listeners.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServiceFacts {
    pub(crate) addresses: Vec<IpAddr>,
    /// TCP ports with their targets. A target is `None` if it is the name of a port.
    pub(crate) ports: BTreeMap<u16, Option<u16>>,
    /// TCP ports with the targets that they should have.
    pub(crate) expected: BTreeMap<u16, u16>,
}

/// The records and the ConfigMap to which the server writes them, both as hosts files.
#[derive(Debug, Clone, Default)]
pub(crate) struct RecordsFacts {
    pub(crate) expected: String,
    /// `None` if the ConfigMap or its key does not exist.
    pub(crate) written: Option<String>,
}

/// The content of the ConfigMap of ports.
#[derive(Debug, Clone, Default)]
pub(crate) struct PortListsFacts {
    /// Entries that are ignored, with the reasons.
    pub(crate) mistakes: Vec<String>,
    /// Ports in the lists of both http and https.
    pub(crate) in_both: Vec<u16>,
    /// The lists of http and https without mistakes and without ports in both, by key.
    pub(crate) corrected: BTreeMap<&'static str, String>,
}

impl ClusterObjects {
    /// Reads the objects. Each of them has a time limit.
    ///
    /// # Errors
    /// Returns the reason if there is no way to an API server.
    pub(crate) async fn read(config: &Config) -> Fact<Self> {
        let settings = config.kubernetes.as_ref().ok_or(NO_CLUSTER)?;
        let client = FollowingClient::open(settings).await;
        let client = client.map_err(|error| error.to_string())?;
        let connection = Connection::new(&client, settings);
        let (reader, namespace) = (Reader::new(connection.client), connection.namespace);
        let (core, names) = (format!("/api/v1/namespaces/{namespace}"), &settings.names);
        let service = format!("{core}/services/{}", names.internal_service);
        let slices = format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices");
        let of_service = format!("{SERVICE_NAME_LABEL}={}", names.internal_service);
        let of_dns = format!("{SERVICE_NAME_LABEL}={DNS_SERVICE}");
        let records_map = format!("{core}/configmaps/{}", names.nodes_config_map);
        let maps = format!("{core}/configmaps");
        let needed = rights::needed(config, settings, &namespace);
        let (clock_ahead, nodes, services, service, endpoint_slices, dns_slices, addons) = tokio::join!(
            Box::pin(reader.clock_ahead()),
            Box::pin(reader.list("/api/v1/nodes", "")),
            Box::pin(reader.list("/api/v1/services", "")),
            Box::pin(reader.get(&service)),
            Box::pin(reader.list(&slices, &of_service)),
            Box::pin(reader.list(&slices, &of_dns)),
            Box::pin(AddonObjects::read(&reader, &namespace)),
        );
        // An API server that does not answer costs each group one limit.
        let (records_map, ports_map, denied, mut apiserver_pods, others, coredns_maps) = tokio::join!(
            Box::pin(reader.get(&records_map)),
            Box::pin(reader.find(&maps, &names.ports_config_map)),
            Box::pin(rights::denied(&reader, &needed)),
            Box::pin(reader.list(SYSTEM_PODS, APISERVER_LABELS[0])),
            Box::pin(reader.list(SYSTEM_PODS, APISERVER_LABELS[1])),
            Box::pin(coredns_maps(&reader)),
        );
        if let (Ok(pods), Ok(others)) = (&mut apiserver_pods, others) {
            for other in others {
                if !pods.contains(&other) {
                    pods.push(other);
                }
            }
        }
        Ok(Self {
            namespace,
            clock_ahead,
            nodes,
            services,
            service,
            endpoint_slices,
            dns_slices,
            records_map,
            ports_map,
            denied,
            apiserver_pods,
            coredns_maps,
            addons,
        })
    }

    /// Returns what follows from the objects. `has_agent` says which nodes have a connected agent.
    pub(crate) fn facts(
        self,
        config: &Config,
        settings: &KubernetesSettings,
        has_agent: impl Fn(&NodeName) -> bool,
    ) -> ClusterFacts {
        let set = self.nodes.map(|objects| node_set(objects, settings));
        let state = ClusterState {
            nodes: set.clone().unwrap_or_default(),
            is_listed: set.is_ok(),
            service: observed(&self.service),
            ports_map: observed(&self.ports_map),
            ..ClusterState::default()
        };
        let local_facts = LocalFacts {
            ports: config.ports.clone(),
            own_ports: Vec::new(),
            listener_ports: listener_ports(config),
        };
        let has_agent = |node: &NodeName| settings.edge_by_agent && has_agent(node);
        let derived = state.ports(&local_facts);
        let expected_records = state.records_tunnel().map(|tunnel| {
            let nodes = state.nodes.iter();
            let nodes: Vec<_> = nodes
                .map(|node| node.record(has_agent(&node.name)))
                .collect();
            RecordSet::new(&nodes, tunnel)
        });
        let port_lists = (self.ports_map.as_ref())
            .map(|map| map.as_ref().map(|map| port_lists(&derived, map)))
            .map_err(Clone::clone);
        let expected = expected_ports(config, self.ports_map.is_ok().then_some(&derived));
        let has_dns = self.services.as_ref().is_ok_and(|services| {
            let name = format!("{DNS_SERVICE}.{}", self.namespace);
            service_names(services).contains(&name)
        });
        let ready_dns_endpoints = self
            .dns_slices
            .map(|slices| (has_dns || !slices.is_empty()).then(|| ready_endpoints(&slices)));
        ClusterFacts {
            ready_dns_endpoints,
            namespace: self.namespace,
            names: settings.names.clone(),
            clock_ahead: self.clock_ahead,
            records: records(expected_records, &set, &self.service, self.records_map),
            nodes: set.map(|set| reported(&set)),
            service_names: self.services.map(|services| service_names(&services)),
            service: (self.service).map(|found| found.map(|it| service_facts(&it, expected))),
            ready_endpoints: self.endpoint_slices.map(|slices| ready_endpoints(&slices)),
            port_lists,
            denied: self.denied,
            apiservers: (self.apiserver_pods)
                .map(|pods| pods.iter().filter_map(ApiServerFacts::of_pod).collect()),
            corefiles: (self.coredns_maps)
                .map(|maps| maps.into_iter().flat_map(Corefile::all).collect()),
            addons: self.addons.facts(&settings.names.nodes_config_map),
        }
    }
}

/// Reads the ConfigMaps of CoreDNS that exist, all at the same time.
async fn coredns_maps(reader: &Reader) -> Fact<Vec<ConfigMap>> {
    let [coredns, rke2, custom] = COREDNS_MAPS;
    let (coredns, rke2, custom) =
        tokio::join!(reader.get(coredns), reader.get(rke2), reader.get(custom));
    let maps = [coredns?, rke2?, custom?];
    Ok(maps.into_iter().flatten().collect())
}

fn listener_ports(config: &Config) -> ListenerPorts {
    let (http, https) = (config.listeners.http, config.listeners.https);
    ListenerPorts {
        http: http.map_or(PORT_HTTP, |address| address.port()),
        https: https.map_or(PORT_HTTPS, |address| address.port()),
    }
}

/// Returns an object as the server would have observed it.
fn observed<T: Clone>(object: &Fact<Option<T>>) -> Observed<Arc<T>> {
    match object {
        Ok(Some(object)) => Observed::Present(Arc::new(object.clone())),
        Ok(None) => Observed::Absent,
        Err(_unknown) => Observed::Unknown,
    }
}

fn node_set(objects: Vec<NodeObject>, settings: &KubernetesSettings) -> NodeSet {
    let aliases = AliasRules {
        patterns: settings.record_names.clone(),
        owners: AliasOwners::new(),
    };
    let mut store = NodeStore::new(settings.edge_label.clone(), FactMap::new(), aliases);
    let listed = objects.into_iter().map(Event::InitApply);
    let events = std::iter::once(Event::Init).chain(listed);
    store.apply(events.chain([Event::InitDone]).collect());
    store.nodes()
}

fn reported(set: &NodeSet) -> NodesFacts {
    let nodes = set.facts().into_iter().map(|(name, facts)| ReportedNode {
        name: name.into(),
        hostname: facts.hostname.map(String::from),
        internal: facts.internal,
        is_edge: facts.is_edge,
        kubelet_port: facts.kubelet_port,
    });
    NodesFacts {
        nodes: nodes.collect(),
        refused: set.refused().collect(),
    }
}

/// Returns the ports that the Service should have. Without `derived` the extra ports are not known.
fn expected_ports(config: &Config, derived: Option<&DerivedPorts>) -> BTreeMap<u16, u16> {
    let (http, https) = (config.listeners.http, config.listeners.https);
    let kubelet = [(KUBELET_HTTP, http), (KUBELET_HTTPS, https)];
    let mut expected: BTreeMap<u16, u16> = kubelet
        .into_iter()
        .filter_map(|(port, listener)| Some((port, listener?.port())))
        .collect();
    if let Some(derived) = derived {
        let extra = service::desired_ports(&derived.policy, listener_ports(config));
        expected.extend(extra.into_iter().map(|(port, target)| (port.get(), target)));
    }
    expected
}

fn service_facts(service: &Value, expected: BTreeMap<u16, u16>) -> ServiceFacts {
    let ports = service["spec"]["ports"].as_array();
    let number = |value: &Value| value.as_u64().and_then(|number| u16::try_from(number).ok());
    let tcp = ports
        .into_iter()
        .flatten()
        .filter(|port| port["protocol"].as_str().is_none_or(|name| name == "TCP"));
    let ports = tcp.filter_map(|port| {
        let own = number(&port["port"])?;
        let target = match &port["targetPort"] {
            Value::Null => Some(own),
            target => number(target),
        };
        Some((own, target))
    });
    ServiceFacts {
        addresses: service::addresses(service),
        ports: ports.collect(),
        expected,
    }
}

/// Counts the ready endpoints. An endpoint without the condition is ready.
fn ready_endpoints(slices: &[Value]) -> usize {
    slices
        .iter()
        .filter_map(|slice| slice["endpoints"].as_array())
        .flatten()
        .filter(|endpoint| endpoint["conditions"]["ready"] != false)
        .count()
}

fn service_names(services: &[Value]) -> Vec<String> {
    let names = services.iter().filter_map(|service| {
        let metadata = &service["metadata"];
        let (name, namespace) = (metadata["name"].as_str()?, metadata["namespace"].as_str()?);
        Some(format!("{name}.{namespace}"))
    });
    names.collect()
}

/// Returns the records, if all that they follow from could be read.
fn records(
    expected: Option<RecordSet>,
    nodes: &Fact<NodeSet>,
    service: &Fact<Option<Value>>,
    written: Fact<Option<ConfigMap>>,
) -> Fact<RecordsFacts> {
    nodes.as_ref().map_err(Clone::clone)?;
    service.as_ref().map_err(Clone::clone)?;
    let written = written?;
    let expected = expected
        .ok_or(NO_RECORDS)?
        .hosts_within(hosts::capacity(written.as_ref()))
        .text;
    Ok(RecordsFacts {
        expected,
        written: written.and_then(|map| value_of(map, RECORDS_KEY)),
    })
}

fn value_of(map: ConfigMap, key: &str) -> Option<String> {
    map.data?.remove(key)
}

fn port_lists(derived: &DerivedPorts, map: &ConfigMap) -> PortListsFacts {
    let (http, https) = (&derived.lists.http, &derived.lists.https);
    let in_both = http.ports().filter(|port| https.contains(*port));
    PortListsFacts {
        mistakes: derived.mistakes.clone(),
        in_both: in_both.map(|port| port.get()).collect(),
        corrected: corrected_lists(map),
    }
}

/// Returns the lists of http and https with the ports that count.
fn corrected_lists(map: &ConfigMap) -> BTreeMap<&'static str, String> {
    let ports = |key: &str| -> Vec<u16> {
        let text = map.data.as_ref().and_then(|data| data.get(key));
        let entries = text.into_iter().flat_map(|text| text.split(','));
        let ports = entries.filter_map(|entry| entry.trim().parse::<u16>().ok());
        ports.filter(|port| *port > 0).collect()
    };
    let (mut http, https) = (ports(HTTP_PORTS_KEY), ports(HTTPS_PORTS_KEY));
    http.retain(|port| !https.contains(port));
    let join = |ports: &[u16]| {
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        ports.join(", ")
    };
    BTreeMap::from([
        (HTTP_PORTS_KEY, join(&http)),
        (HTTPS_PORTS_KEY, join(&https)),
    ])
}

/// The Service of the manifests that leads to the DNS of the servers.
pub(crate) const DNS_SERVICE: &str = "tunnel-dns";
const NO_CLUSTER: &str = "no cluster is configured; give --kubeconfig FILE";
const NO_RECORDS: &str = "there are no records without an address of the Service and a Node";
/// Labels of the Pods of kube-apiserver: kubeadm's, and kops'.
const APISERVER_LABELS: [&str; 2] = ["component=kube-apiserver", "k8s-app=kube-apiserver"];
/// The ConfigMaps of CoreDNS: of kubeadm and k3s, of RKE2, and the files that k3s imports.
const COREDNS_MAPS: [&str; 3] = [
    "/api/v1/namespaces/kube-system/configmaps/coredns",
    "/api/v1/namespaces/kube-system/configmaps/rke2-coredns-rke2-coredns",
    "/api/v1/namespaces/kube-system/configmaps/coredns-custom",
];
const COREFILE_KEY: &str = "Corefile";
/// Ports of the Service that lead to the HTTP and the HTTPS listener.
const KUBELET_HTTP: u16 = 10255;
const KUBELET_HTTPS: u16 = 10250;

#[cfg(test)]
mod tests;
