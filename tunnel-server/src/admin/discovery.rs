//! The document of `/sd/prometheus`: the nodes as targets for Prometheus' HTTP service discovery. All
//! functions are pure.

use std::collections::BTreeMap;

use serde::Serialize;
use tunnel_process::query::{RepeatedParameter, parameters, set_once};
use tunnel_proto::wire::name::{Port, PortError, ReplicaId};

use crate::admin::status::ListedNode;
use crate::config::underscored;
use crate::routing::routes::NodeLabels;
use tunnel_routing::policy::{PortPolicy, PortPolicyError};

/// A request for the document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscoveryQuery {
    /// Port of the targets.
    port: Port,
    /// Scheme with which Prometheus scrapes the targets; its configuration decides if absent.
    scheme: Option<&'static str>,
    /// Whether nodes without a connected agent are left out.
    is_connected_only: bool,
}

/// Reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    #[error("parameter port is missing; use ?port=9100")]
    MissingPort,
    #[error("parameter port is not valid: {0}")]
    InvalidPort(PortError),
    #[error("parameter scheme is not valid; use http or https")]
    InvalidScheme,
    #[error("parameter connected is not valid; use true or false")]
    InvalidConnected,
    #[error(transparent)]
    Repeated(#[from] RepeatedParameter),
    /// The name comes from the caller and is not repeated.
    #[error("unknown parameter; use port, scheme and connected")]
    Unknown,
}

impl DiscoveryQuery {
    /// Parses the query of a request target. No valid value contains a character that has to be
    /// percent-encoded, so nothing is decoded.
    ///
    /// # Errors
    /// Returns a [`DiscoveryError`] for the first parameter that is not valid.
    pub fn parse(query: &str) -> Result<Self, DiscoveryError> {
        let (mut port, mut scheme, mut connected) = (None, None, None);
        for (name, value) in parameters(query) {
            match name {
                "port" => {
                    let number = value.parse::<Port>();
                    let number = number.map_err(DiscoveryError::InvalidPort)?;
                    set_once(&mut port, number, "port")?;
                }
                "scheme" => {
                    let known = ["http", "https"].into_iter().find(|known| *known == value);
                    let known = known.ok_or(DiscoveryError::InvalidScheme)?;
                    set_once(&mut scheme, known, "scheme")?;
                }
                "connected" => {
                    let is_connected = value.parse::<bool>();
                    let is_connected =
                        is_connected.map_err(|_not_bool| DiscoveryError::InvalidConnected)?;
                    set_once(&mut connected, is_connected, "connected")?;
                }
                _ => return Err(DiscoveryError::Unknown),
            }
        }
        Ok(Self {
            port: port.ok_or(DiscoveryError::MissingPort)?,
            scheme,
            is_connected_only: connected.unwrap_or(false),
        })
    }

    /// Checks that callers may reach the port on some listener.
    ///
    /// # Errors
    /// Returns the [`PortPolicyError`] of the listeners.
    pub fn authorize(&self, policy: &PortPolicy) -> Result<(), PortPolicyError> {
        policy.entry(self.port).map(drop)
    }
}

/// The targets of one node. Prometheus' HTTP service discovery calls this a target group.
#[derive(Debug, Serialize)]
pub(crate) struct TargetGroup {
    targets: [String; 1],
    labels: TargetLabels,
}

/// Labels of a target. Those of the Kubernetes discovery have its names, so that relabel rules for it
/// apply. An empty label is an absent one to Prometheus.
#[derive(Debug, Serialize)]
struct TargetLabels {
    #[serde(rename = "__meta_kubernetes_node_name")]
    node: String,
    #[serde(rename = "__meta_kubernetes_pod_node_name")]
    pod_node: String,
    #[serde(rename = "__meta_tunnel_edge")]
    edge: &'static str,
    #[serde(rename = "__meta_tunnel_server")]
    server: String,
    #[serde(rename = "__meta_tunnel_transport")]
    transport: String,
    #[serde(rename = "__scheme__", skip_serializing_if = "Option::is_none")]
    scheme: Option<&'static str>,
    /// The labels of the Node, and which of them it has: their values may be empty.
    #[serde(flatten)]
    node_labels: BTreeMap<String, String>,
}

/// Returns the group of a node, or `None` if the query leaves the node out. The target is the node's
/// name and the port, so nodes with the same address stay apart. `own` is the name of this server.
pub(crate) fn target_group(
    query: &DiscoveryQuery,
    node: &impl ListedNode,
    own: &ReplicaId,
) -> Option<TargetGroup> {
    let summary = node.summary();
    if query.is_connected_only && !summary.is_connected {
        return None;
    }
    let own = Some(own.as_str()).filter(|_| summary.is_connected);
    Some(TargetGroup {
        targets: [format!("{}:{}", summary.name, query.port)],
        labels: TargetLabels {
            node: summary.name.to_owned(),
            pod_node: summary.name.to_owned(),
            edge: if summary.is_edge { "true" } else { "false" },
            server: summary.replica.or(own).unwrap_or_default().to_owned(),
            transport: summary.transport.unwrap_or_default().to_owned(),
            scheme: query.scheme,
            node_labels: node_labels(&node.labels()),
        },
    })
}

/// Returns the labels of a Node with the names that Prometheus' Kubernetes discovery gives them.
fn node_labels(labels: &NodeLabels) -> BTreeMap<String, String> {
    let labels = labels.iter().flat_map(|(key, value)| {
        let name = underscored(key);
        [
            (
                format!("__meta_kubernetes_node_label_{name}"),
                value.as_ref().to_owned(),
            ),
            (
                format!("__meta_kubernetes_node_labelpresent_{name}"),
                "true".to_owned(),
            ),
        ]
    });
    labels.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use tunnel_routing::policy::PortLists;

    use super::*;
    use crate::admin::status::NodeStatus;

    fn node(name: &str, transport: Option<&str>, replica: Option<&str>) -> NodeStatus {
        NodeStatus {
            node: name.into(),
            connected: transport.or(replica).is_some(),
            transport: transport.map(Into::into),
            replica: replica.map(Into::into),
            is_edge: true,
            ..NodeStatus::default()
        }
    }

    fn groups(query: &str, nodes: &[NodeStatus]) -> serde_json::Value {
        let query = DiscoveryQuery::parse(query).unwrap();
        let own = "server-1".parse().unwrap();
        let groups = nodes.iter();
        let groups = groups.filter_map(|node| target_group(&query, node, &own));
        json!(groups.collect::<Vec<_>>())
    }

    #[test]
    fn each_node_is_a_group_with_its_labels() {
        let cloud = NodeStatus {
            is_edge: false,
            ..node("cloud-1", None, None)
        };
        let nodes = [
            cloud,
            node("edge-1", Some("quic"), None),
            node("edge-2", None, Some("server-2")),
        ];
        let group = |name: &str, edge: &str, server: &str, transport: &str| {
            json!({
                "targets": [format!("{name}:9100")],
                "labels": {
                    "__meta_kubernetes_node_name": name,
                    "__meta_kubernetes_pod_node_name": name,
                    "__meta_tunnel_edge": edge,
                    "__meta_tunnel_server": server,
                    "__meta_tunnel_transport": transport,
                },
            })
        };
        let expected = json!([
            group("cloud-1", "false", "", ""),
            group("edge-1", "true", "server-1", "quic"),
            group("edge-2", "true", "server-2", ""),
        ]);
        assert_eq!(groups("port=9100", &nodes), expected);
        assert_eq!(groups("port=9100&connected=false", &nodes), expected);
        let connected = groups("connected=true&port=9100&scheme=https", &nodes);
        let names = |at: usize| &connected[at]["labels"]["__meta_kubernetes_node_name"];
        assert_eq!((names(0), names(1)), (&json!("edge-1"), &json!("edge-2")));
        assert_eq!(connected.as_array().map(Vec::len), Some(2));
        assert_eq!(connected[0]["labels"]["__scheme__"], "https");
    }

    #[test]
    fn labels_of_the_node_have_the_names_of_the_kubernetes_discovery() {
        let labels = [
            ("topology.kubernetes.io/zone".into(), "north-1".into()),
            ("empty".into(), "".into()),
        ];
        let node = NodeStatus {
            labels: labels.into(),
            ..node("edge-1", Some("quic"), None)
        };
        let group = groups("port=9100", std::slice::from_ref(&node))[0].clone();
        for (name, value) in [
            ("label_topology_kubernetes_io_zone", "north-1"),
            ("labelpresent_topology_kubernetes_io_zone", "true"),
            ("label_empty", ""),
            ("labelpresent_empty", "true"),
        ] {
            let name = format!("__meta_kubernetes_node_{name}");
            assert_eq!(group["labels"][&name], value, "{group}");
        }
    }

    #[test]
    fn document_without_nodes_is_an_empty_list() {
        assert_eq!(groups("port=9100", &[]), json!([]));
        let away = [node("edge-1", None, None)];
        assert_eq!(groups("port=9100&connected=true", &away), json!([]));
    }

    #[test]
    fn document_of_5000_nodes_has_the_same_bytes_each_time() {
        let nodes: Vec<_> = (0..5000)
            .map(|number| node(&format!("edge-{number:05}"), Some("h2"), None))
            .collect();
        let first = groups("port=9100", &nodes);
        assert_eq!(first.as_array().map(Vec::len), Some(5000));
        let again = groups("port=9100", &nodes).to_string();
        assert_eq!(first.to_string(), again);
    }

    #[test]
    fn queries_that_are_not_valid_are_refused_with_the_reason() {
        for (query, expected) in [
            ("", DiscoveryError::MissingPort),
            ("scheme=http", DiscoveryError::MissingPort),
            ("port", DiscoveryError::InvalidPort(PortError)),
            ("port=0", DiscoveryError::InvalidPort(PortError)),
            ("port=65536", DiscoveryError::InvalidPort(PortError)),
            ("port=%39100", DiscoveryError::InvalidPort(PortError)),
            (
                "port=9100&port=9100",
                DiscoveryError::Repeated(RepeatedParameter("port")),
            ),
            ("port=9100&scheme=ftp", DiscoveryError::InvalidScheme),
            ("port=9100&connected=yes", DiscoveryError::InvalidConnected),
            ("port=9100&job=a", DiscoveryError::Unknown),
            ("port=9100&\u{202e}", DiscoveryError::Unknown),
        ] {
            assert_eq!(DiscoveryQuery::parse(query), Err(expected), "{query}");
        }
        assert!(DiscoveryQuery::parse("&port=9100&").is_ok());
    }

    #[test]
    fn ports_that_callers_may_not_reach_are_refused() {
        let lists = PortLists {
            http: "9100".parse().unwrap(),
            ..PortLists::default()
        };
        let policy = PortPolicy::of_lists(lists, vec![Port::new(10264).unwrap()]);
        let authorize = |query: &str| DiscoveryQuery::parse(query).unwrap().authorize(&policy);
        assert_eq!(authorize("port=9100"), Ok(()));
        assert_eq!(authorize("port=10250"), Ok(()), "the kubelet");
        let port = |number| Port::new(number).unwrap();
        let refused = authorize("port=9256");
        assert_eq!(refused, Err(PortPolicyError::NotListed(port(9256))));
        let refused = authorize("port=10264");
        assert_eq!(refused, Err(PortPolicyError::OwnPort(port(10264))));
    }
}
