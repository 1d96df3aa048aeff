//! What people and programs are told about nodes: the list behind `/nodes`, the verb `nodes` and the metrics.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::name::NodeName;

use crate::nodes::KnownNodes;
use crate::registry::Registry;

/// One node of the list; connected or not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// The node's name.
    pub node: String,
    /// Whether an agent is connected for it.
    pub connected: bool,
    /// The session's transport.
    pub transport: Option<String>,
    /// Where the agent connects from.
    pub address: Option<String>,
    /// The agent's software.
    pub version: Option<String>,
    /// When the session was admitted, RFC 3339.
    pub connected_since: Option<String>,
    /// Smoothed round trip time.
    pub rtt_millis: Option<u64>,
    /// Streams open now, with the control stream left out.
    pub streams: u64,
    /// Payload bytes received from the agent in this session.
    pub bytes_in: u64,
    /// Payload bytes sent to the agent in this session.
    pub bytes_out: u64,
    /// End of the agent's certificate, RFC 3339.
    pub certificate_not_after: Option<String>,
    /// Addresses that an operator gave the node; only these count for routing.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// The address that the agent takes for its own; shown only.
    #[serde(default)]
    pub claimed_address: Option<String>,
    /// Those of its addresses that other nodes have too, with the names of all of them.
    #[serde(default)]
    pub address_conflicts: BTreeMap<IpAddr, Vec<String>>,
}

/// Every known node, by name.
#[must_use]
pub fn list(nodes: &KnownNodes, registry: &Registry) -> Vec<NodeStatus> {
    let conflicts = nodes.conflicts();
    let known = nodes.snapshot();
    known
        .iter()
        .map(|(name, node)| {
            let mut status = NodeStatus {
                node: name.to_string(),
                addresses: node.addresses.clone(),
                certificate_not_after: node.certificate_not_after.map(timestamp),
                address_conflicts: node
                    .addresses
                    .iter()
                    .filter_map(|address| Some((*address, names(conflicts.get(address)?))))
                    .collect(),
                ..NodeStatus::default()
            };
            if let Some(agent) = registry.of_node(name).first() {
                let health = agent.session.health();
                status.connected = true;
                status.transport = Some(agent.session.transport().to_string());
                status.address = Some(health.remote.to_string());
                status.version = Some(agent.software.clone());
                status.connected_since = Some(timestamp(agent.since));
                status.rtt_millis = u64::try_from(health.rtt.as_millis()).ok();
                status.streams = health.streams.saturating_sub(1) as u64;
                status.bytes_in = health.bytes_in;
                status.bytes_out = health.bytes_out;
                status.certificate_not_after = Some(timestamp(agent.session.peer().not_after));
                status.claimed_address =
                    Some(agent.claimed_address.clone()).filter(|text| !text.is_empty());
            }
            status
        })
        .collect()
}

fn names(nodes: &[NodeName]) -> Vec<String> {
    nodes.iter().map(NodeName::to_string).collect()
}

fn timestamp(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}
