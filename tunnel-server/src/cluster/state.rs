//! Observed state of the cluster, the lists of ports in it, and the pure derivation of what follows
//! from it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tunnel_process::networks::Cidr;
use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::ports::PortSet;

use super::nodes::NodeSet;
use super::objects::{HTTP_PORTS_KEY, HTTPS_PORTS_KEY, LOCALHOST_PORTS_KEY, PORT_PAIRS_KEY};
use super::service::{self, ListenerPorts};
use super::watches::Observed;
use crate::config::LOCALHOST_PORTS;
use tunnel_dns::{Addresses, RecordSet};
use tunnel_routing::policy::{PortLists, PortPolicy, PortSettings};

/// What is persisted for a start without the API server, apart from the Nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PersistedState {
    /// Whether the persisted Nodes are a complete list, possibly an empty one.
    pub(super) is_listed: bool,
    pub(super) tunnel_addresses: Vec<IpAddr>,
    /// Values of the ports ConfigMap, if it existed.
    pub(super) ports: Option<BTreeMap<String, String>>,
    /// The labels of Nodes that the settings named, the edge label first.
    pub(super) labels: Vec<String>,
}

impl PersistedState {
    /// Returns the state for settings that name these labels. What is persisted of the Nodes says nothing
    /// about others, so it is no complete list for them: rules would take a label for absent.
    pub(super) fn with_labels(self, labels: Vec<String>) -> Self {
        Self {
            is_listed: self.is_listed && self.labels == labels,
            labels,
            ..self
        }
    }
}

/// The observed state of all watched objects.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterState {
    /// Nodes as observed, or as persisted before the first list.
    pub(super) nodes: NodeSet,
    /// Whether a list of Nodes was received.
    pub(super) is_listed: bool,
    pub(super) service: Observed<Arc<Value>>,
    pub(super) ports_map: Observed<Arc<ConfigMap>>,
    /// Networks of Services that pass validation, if they are watched.
    pub(super) service_networks: Arc<[Cidr]>,
    pub(super) persisted: Arc<PersistedState>,
}

/// Facts that do not come from the cluster.
#[derive(Debug, Clone)]
pub(super) struct LocalFacts {
    /// Settings of the ports. A ports ConfigMap replaces their lists while there is one.
    pub(super) ports: PortSettings,
    /// Ports of the tunnel itself.
    pub(super) own_ports: Vec<Port>,
    pub(super) listener_ports: ListenerPorts,
}

/// The ports that follow from the cluster state.
#[derive(Debug)]
pub(super) struct DerivedPorts {
    pub(super) policy: PortPolicy,
    /// The lists of the policy.
    pub(super) lists: PortLists,
    /// They are those of the ConfigMap.
    pub(super) are_of_cluster: bool,
    /// Ignored entries of the ports ConfigMap.
    pub(super) mistakes: Vec<String>,
}

/// State that the leader should write to the cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct DesiredState {
    /// The records, if all their inputs were observed.
    pub(super) records: Option<Arc<RecordSet>>,
    /// Extra ports of the Service with the listener ports that they target, if they were observed.
    pub(super) ports: Option<BTreeMap<Port, u16>>,
}

impl DesiredState {
    /// Returns whether this is the same state. Equal records that were built twice are others.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let records = match (&self.records, &other.records) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        records && self.ports == other.ports
    }
}

impl ClusterState {
    /// Creates the state before the first observation. `nodes` are the persisted nodes.
    pub(super) fn persisted(persisted: PersistedState, nodes: NodeSet) -> Self {
        Self {
            nodes,
            persisted: Arc::new(persisted),
            ..Self::default()
        }
    }

    /// Returns the addresses for the names of edge nodes. Empty if the Service has no address.
    pub(super) fn tunnel(&self) -> Vec<IpAddr> {
        match &self.service {
            Observed::Unknown => self.persisted.tunnel_addresses.clone(),
            Observed::Absent => Vec::new(),
            Observed::Present(service) => service::addresses(service),
        }
    }

    fn port_lists(&self) -> Option<&BTreeMap<String, String>> {
        match &self.ports_map {
            Observed::Unknown => self.persisted.ports.as_ref(),
            Observed::Absent => None,
            Observed::Present(map) => Some(map.data.as_ref().unwrap_or(&NO_DATA)),
        }
    }

    pub(super) fn ports(&self, local_facts: &LocalFacts) -> DerivedPorts {
        let mut settings = local_facts.ports.clone();
        let mut mistakes = Vec::new();
        if let Some(data) = self.port_lists() {
            (settings.lists, mistakes) = read_lists(data, local_facts.listener_ports.http);
        }
        DerivedPorts {
            lists: settings.lists.clone(),
            are_of_cluster: self.port_lists().is_some(),
            policy: PortPolicy::new(settings, local_facts.own_ports.clone()),
            mistakes,
        }
    }

    /// Returns the addresses of the tunnel for the records. Without an address of the Service, and
    /// before a list of Nodes, there are none, and the existing records stay.
    pub(super) fn records_tunnel(&self) -> Option<Addresses> {
        let tunnel = self.tunnel();
        let has_records = !tunnel.is_empty() && self.has_list();
        has_records.then(|| Addresses::first_of(tunnel))
    }

    /// Returns whether the nodes are a complete list, observed or persisted.
    pub(super) fn has_list(&self) -> bool {
        self.is_listed || self.persisted.is_listed
    }

    /// Returns whether the records and the ports follow from observed state rather than from
    /// persisted state.
    pub(super) fn is_observed(&self) -> (bool, bool) {
        let has_records = self.is_listed && self.service.present().is_some();
        (has_records, self.ports_map.is_known())
    }

    pub(super) fn to_persisted(&self) -> PersistedState {
        PersistedState {
            is_listed: self.has_list(),
            tunnel_addresses: self.tunnel(),
            ports: self.port_lists().cloned(),
            labels: self.persisted.labels.clone(),
        }
    }
}

static NO_DATA: BTreeMap<String, String> = BTreeMap::new();

/// Maximum number of reported entries per list. Further entries are only counted.
const MISTAKES_MAX: usize = 20;
/// Maximum number of characters shown of an entry.
const SHOWN_MAX: usize = 40;

/// Parses the values of the ConfigMap. `http_port` is the port of the HTTP listener, which pairs of
/// the deprecated key must name. Returns the ignored entries with the reasons, too.
fn read_lists(data: &BTreeMap<String, String>, http_port: u16) -> (PortLists, Vec<String>) {
    let mut mistakes = Vec::new();
    let text = |key: &str| data.get(key).map(String::as_str);
    let mut http = list(
        HTTP_PORTS_KEY,
        text(HTTP_PORTS_KEY).unwrap_or(""),
        &mut mistakes,
    );
    let pairs = text(PORT_PAIRS_KEY).unwrap_or("");
    http.extend(pair_list(pairs, http_port, &mut mistakes));
    let https = list(
        HTTPS_PORTS_KEY,
        text(HTTPS_PORTS_KEY).unwrap_or(""),
        &mut mistakes,
    );
    let localhost = text(LOCALHOST_PORTS_KEY).unwrap_or(LOCALHOST_PORTS);
    let localhost = list(LOCALHOST_PORTS_KEY, localhost, &mut mistakes);
    let lists = PortLists {
        http: PortSet::of(http),
        https: PortSet::of(https),
        localhost: PortSet::of(localhost),
    };
    (lists, mistakes)
}

/// Parses a list such as `9100, 9256`. Entries are separated by commas. Blanks around entries and
/// empty entries are ignored.
fn list(key: &str, text: &str, mistakes: &mut Vec<String>) -> BTreeSet<Port> {
    entries(key, text, mistakes, |entry| {
        entry
            .parse()
            .map_err(|_error| "not a port from 1 to 65535".to_owned())
    })
}

/// Parses pairs such as `9100=10264, 9256=10264`. A text without `=` is a plain list.
fn pair_list(text: &str, http_port: u16, mistakes: &mut Vec<String>) -> BTreeSet<Port> {
    if !text.contains('=') {
        return list(PORT_PAIRS_KEY, text, mistakes);
    }
    entries(PORT_PAIRS_KEY, text, mistakes, |entry| {
        let pair = entry.split_once('=');
        let port = pair.and_then(|(port, target_port)| {
            let is_http = target_port.trim().parse::<u16>() == Ok(http_port);
            if is_http {
                port.trim().parse().ok()
            } else {
                None
            }
        });
        port.ok_or_else(|| format!("not PORT={http_port} (the port of the HTTP listener)"))
    })
}

fn entries(
    key: &str,
    text: &str,
    mistakes: &mut Vec<String>,
    read: impl Fn(&str) -> Result<Port, String>,
) -> BTreeSet<Port> {
    let mut ports = BTreeSet::new();
    let mut bad = 0;
    for entry in text
        .split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
    {
        match read(entry) {
            Ok(port) => {
                ports.insert(port);
            }
            Err(reason) => {
                bad += 1;
                if bad <= MISTAKES_MAX {
                    let shown: String = entry.chars().take(SHOWN_MAX).collect();
                    mistakes.push(format!("{key}: {shown:?} is {reason}"));
                }
            }
        }
    }
    if bad > MISTAKES_MAX {
        mistakes.push(format!("{key}: {} more", bad - MISTAKES_MAX));
    }
    ports
}

#[cfg(test)]
mod tests {
    use tunnel_routing::policy::{Listener, PortEntry, TargetClass};

    use super::*;

    fn read_from(key: &str, text: &str) -> (PortLists, Vec<String>) {
        let data = BTreeMap::from([(key.to_owned(), text.to_owned())]);
        read_lists(&data, 10264)
    }

    /// The reading half of DNS-3.
    #[test]
    fn bad_entries_are_named_and_the_rest_applies() {
        let (lists, mistakes) = read_from("https-proxy-ports", "9100, 9100,,70000,abc, 10250");
        assert_eq!(lists.https.to_string(), "9100, 10250");
        assert_eq!(
            mistakes,
            [
                "https-proxy-ports: \"70000\" is not a port from 1 to 65535",
                "https-proxy-ports: \"abc\" is not a port from 1 to 65535",
            ]
        );
    }

    #[test]
    fn leading_zeros_signs_and_ranges_make_no_second_name() {
        let text = "09100,9100,+9100,9200-9300,0, 65536,9100=";
        let (lists, mistakes) = read_from("http-proxy-ports", text);
        assert_eq!(lists.http.to_string(), "9100");
        assert_eq!(mistakes.len(), 5, "{mistakes:?}");
    }

    #[test]
    fn pairs_count_when_they_name_the_http_listener() {
        for (text, ports, bad) in [
            ("9100=10264, 9200 = 10264", "9100, 9200", 0),
            ("9100=10263,9200=10264,x=10264", "9200", 2),
            ("9100,9200", "9100, 9200", 0),
            ("9100,9200=10264", "9200", 1),
        ] {
            let (lists, mistakes) = read_from("dnat-ports-pair", text);
            assert_eq!(lists.http.to_string(), ports, "{text}");
            assert_eq!(mistakes.len(), bad, "{text}");
        }
    }

    #[test]
    fn localhost_ports_have_a_default_only_while_the_key_is_absent() {
        let (absent, _) = read_lists(&BTreeMap::new(), 10264);
        assert_eq!(absent.localhost.to_string(), "10266, 10267");
        let (empty, _) = read_from("localhost-proxy-ports", "");
        assert_eq!(empty.localhost.to_string(), "");
    }

    #[test]
    fn floods_of_mistakes_are_counted() {
        let text = vec!["x"; 5000].join(",");
        let (_, mistakes) = read_from("http-proxy-ports", &text);
        assert_eq!(mistakes.len(), MISTAKES_MAX + 1);
        let last = mistakes.last().unwrap();
        assert_eq!(last, "http-proxy-ports: 4980 more");
    }

    #[test]
    fn config_map_replaces_the_lists_and_nothing_else() {
        let local_facts = LocalFacts {
            ports: PortSettings {
                lists: PortLists {
                    http: "9200".parse().unwrap(),
                    ..PortLists::default()
                },
                connect: "22".parse().unwrap(),
                named: BTreeMap::from([(
                    Port::new(9300).unwrap(),
                    PortEntry {
                        scheme: None,
                        class: TargetClass::Node,
                        listeners: Listener::Connect.into(),
                        names_connect: true,
                        operations: None,
                    },
                )]),
            },
            own_ports: Vec::new(),
            listener_ports: ListenerPorts {
                http: 10264,
                https: 10263,
            },
        };
        let open = |data: Option<&str>| {
            let ports = data.map(|text| {
                let http = text.to_owned();
                BTreeMap::from([(HTTP_PORTS_KEY.to_owned(), http)])
            });
            let persisted = PersistedState {
                labels: Vec::new(),
                ports,
                ..PersistedState::default()
            };
            let state = ClusterState::persisted(persisted, NodeSet::default());
            let policy = state.ports(&local_facts).policy;
            let ports = [22, 9100, 9200, 9300].map(|port| {
                let entry = policy.entry(Port::new(port).unwrap());
                entry.map_or_else(|_| "-".to_owned(), |entry| entry.listeners.to_string())
            });
            ports.join("; ")
        };
        let every = "http, https, connect";
        assert_eq!(open(None), format!("connect; -; {every}; connect"));
        let replaced = open(Some("9100, 22, 9300"));
        assert_eq!(replaced, format!("connect; {every}; -; connect"));
    }

    #[test]
    fn nodes_that_were_persisted_for_other_labels_are_no_complete_list() {
        let labels = |keys: &[&str]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
        let listed = PersistedState {
            is_listed: true,
            labels: labels(&["edge", "tier"]),
            ..PersistedState::default()
        };
        let is_listed = |keys: &[&str]| listed.clone().with_labels(labels(keys)).is_listed;
        assert!(is_listed(&["edge", "tier"]));
        assert!(!is_listed(&["edge"]));
        assert!(!is_listed(&["edge", "tier", "zone"]));
        assert!(!is_listed(&["other", "tier"]));
        let again = ClusterState::persisted(listed, NodeSet::default()).to_persisted();
        assert_eq!(again.labels, labels(&["edge", "tier"]));
    }
}
