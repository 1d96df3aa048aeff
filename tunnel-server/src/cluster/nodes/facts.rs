//! Node objects, pruned on arrival to the facts that the server uses.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};
use tunnel_process::networks::{Cidr, effective_ip, forbidden_kind};
use tunnel_proto::wire::name::NodeName;

use crate::cluster::objects::EDGE_VALUE;
use crate::config::{LabelKey, NodeLabel, is_label_value};
use crate::routing::routes::NodeLabels;

/// Maximum number of addresses of each type that are read. Kubelets write a few.
const ADDRESSES_MAX: usize = 32;
/// Maximum number of Pod networks that are read. The API allows one per family.
const NETWORKS_MAX: usize = 2;

/// The part of a Node object that the server uses. The parser skips the rest, most of which is the
/// list of images.
#[derive(Debug, Clone, Default, Deserialize)]
pub(in crate::cluster) struct NodeObject {
    #[serde(default)]
    pub(super) metadata: ObjectMeta,
    #[serde(default)]
    spec: Option<Spec>,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Spec {
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    addresses: Option<Vec<Address>>,
    daemon_endpoints: Option<DaemonEndpoints>,
}

#[derive(Debug, Clone, Deserialize)]
struct Address {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DaemonEndpoints {
    kubelet_endpoint: Option<Endpoint>,
}

#[derive(Debug, Clone, Deserialize)]
struct Endpoint {
    #[serde(rename = "Port")]
    port: i32,
}

impl Resource for NodeObject {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Facts about a Node, in memory and on disk. The texts are not validated. [`super::NodeStore::new`]
/// validates them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::cluster) struct NodeFacts {
    pub(in crate::cluster) hostname: Option<Box<str>>,
    pub(in crate::cluster) internal: Vec<IpAddr>,
    pub(super) external: Vec<IpAddr>,
    pub(in crate::cluster) is_edge: bool,
    pub(in crate::cluster) kubelet_port: Option<u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pod_networks: Vec<Box<str>>,
    /// Creation time of the object in seconds of Unix time. The API server sets it, not the
    /// kubelet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) created: Option<i64>,
    /// The labels of the cloud targets that the Node has. Those on disk hold from a start of the
    /// server to its first list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) cloud_labels: Vec<Box<str>>,
    /// The labels of `--node-label` that the Node has.
    #[serde(skip_serializing_if = "NodeLabels::is_empty")]
    pub(super) labels: NodeLabels,
}

/// Returns those of the labels that the object has.
pub(super) fn matching(metadata: &ObjectMeta, labels: &[NodeLabel]) -> Vec<Box<str>> {
    let own = metadata.labels.as_ref();
    let labels = labels.iter().filter(|label| {
        let value = own.and_then(|own| own.get(label.key()));
        value.is_some_and(|value| value == label.value())
    });
    labels.map(|label| label.as_str().into()).collect()
}

/// Returns the labels with these keys. A value that Kubernetes would refuse is left out.
pub(super) fn selected_labels(metadata: &ObjectMeta, keys: &[LabelKey]) -> NodeLabels {
    let own = metadata.labels.as_ref();
    let selected = keys.iter().filter_map(|key| {
        let value = own?.get(key.as_str())?;
        is_label_value(value).then(|| (key.as_str().into(), value.as_str().into()))
    });
    selected.collect()
}

impl NodeFacts {
    pub(super) fn of(object: NodeObject, edge_label: &str) -> Self {
        let labels = object.metadata.labels.unwrap_or_default();
        let status = object.status.unwrap_or_default();
        let addresses = status.addresses.unwrap_or_default();
        let of_kind = |kind: &str| -> Vec<IpAddr> {
            let texts = addresses.iter().filter(|address| address.kind == kind);
            texts
                .filter_map(|address| address.address.parse::<IpAddr>().ok())
                .map(|address| address.to_canonical())
                .filter(|address| is_valid_node_address(*address))
                .take(ADDRESSES_MAX)
                .collect()
        };
        let hostname = addresses.iter().find(|address| address.kind == "Hostname");
        let pod_networks = object.spec.and_then(|spec| spec.pod_cidrs);
        let endpoint = status.daemon_endpoints.and_then(|all| all.kubelet_endpoint);
        Self {
            internal: of_kind("InternalIP"),
            external: of_kind("ExternalIP"),
            is_edge: labels
                .get(edge_label)
                .is_some_and(|value| value == EDGE_VALUE),
            kubelet_port: endpoint.and_then(|endpoint| u16::try_from(endpoint.port).ok()),
            hostname: hostname.map(|address| address.address.as_str().into()),
            pod_networks: pod_networks
                .into_iter()
                .flatten()
                .filter(|network| network.parse::<Cidr>().is_ok())
                .take(NETWORKS_MAX)
                .map(String::into_boxed_str)
                .collect(),
            created: object
                .metadata
                .creation_timestamp
                .map(|at| at.0.as_second()),
            cloud_labels: Vec::new(),
            labels: NodeLabels::new(),
        }
    }

    pub(super) fn has_cloud_label(&self, label: &NodeLabel) -> bool {
        let mut labels = self.cloud_labels.iter();
        labels.any(|own| **own == *label.as_str())
    }

    /// Removes other labels, and values that Kubernetes would refuse.
    pub(super) fn retain_labels(&mut self, keys: &[LabelKey]) {
        self.labels.retain(|own, value| {
            keys.iter().any(|key| key.as_str() == &**own) && is_label_value(value)
        });
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.internal.iter().chain(&self.external).copied()
    }

    pub(super) fn networks(&self) -> impl Iterator<Item = Cidr> {
        let texts = self.pod_networks.iter();
        texts.filter_map(|network| network.parse().ok())
    }
}

/// Node facts by object name.
pub(in crate::cluster) type FactMap = BTreeMap<Box<str>, NodeFacts>;

/// A Node with a valid name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cluster) struct ClusterNode {
    pub(in crate::cluster) name: NodeName,
    /// The host name that the node claims and may have.
    pub(super) claim: Option<NodeName>,
    /// The host name that the node has.
    pub(in crate::cluster) hostname: Option<NodeName>,
    pub(in crate::cluster) facts: NodeFacts,
}

/// Rejects addresses that cannot belong to a node. A record with such an address would lead callers
/// to themselves, or to the credentials of their cloud.
fn is_valid_node_address(address: IpAddr) -> bool {
    !address.is_loopback() && effective_ip(address) == address && forbidden_kind(address).is_none()
}
