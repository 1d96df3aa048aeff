//! The status of a rotation: its stage, and the agents that it waits for.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::name::NodeName;
use tunnel_store::data_dir::time_text;
use tunnel_store::known_nodes::{EnrollmentKind, KnownNode, NodeMap};

use crate::stage::RotationStage;

/// The CA of a server and the rotation in progress, if any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RotationStatus {
    /// SHA-256 of the public key of the CA that signs, hex.
    pub signer: String,
    pub in_progress: Option<RotationProgress>,
    /// Number of other servers that share the CA. Their agents are not counted.
    pub other_servers: usize,
    /// The agents of the stage that this action ended, if it was forced or was the last one: pending
    /// agents stay behind, and so do those without a valid certificate.
    pub left_behind: Option<AgentCounts>,
}

/// A rotation in progress, and the agents that it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RotationProgress {
    pub stage: RotationStage,
    /// Time since which certificates are those of this stage.
    #[serde(with = "time_text")]
    pub since: SystemTime,
    /// Time at which every agent that is connected without interruption has renewed.
    #[serde(with = "time_text")]
    pub renewed_by: SystemTime,
    /// SHA-256 of the public key of the old CA, hex.
    pub old: String,
    /// SHA-256 of the public key of the new CA, hex.
    pub new: String,
    pub agents: AgentCounts,
}

/// The known nodes, by the certificate that they last presented. While two CAs are trusted, an agent
/// connects again after each renewal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentCounts {
    /// Agents with a certificate of this stage.
    pub renewed: usize,
    /// Agents with a valid certificate of an earlier stage. The next stage waits for them.
    pub pending: usize,
    /// Some of the pending agents.
    pub pending_nodes: Vec<String>,
    /// Agents whose certificate expired, or that never had one. They enroll again if they
    /// connect after the end of the rotation.
    pub expired: usize,
    /// Agents with the certificate of their kubelet. They trust a CA file of an operator.
    pub kubelets: usize,
}

/// Counts the nodes. A certificate of the stage was issued at `since` or later. That of a `connected`
/// node is valid, also if this server's clock says otherwise.
pub(super) fn count(
    nodes: &NodeMap,
    connected: &BTreeSet<NodeName>,
    since: SystemTime,
    now: SystemTime,
) -> AgentCounts {
    let mut counts = AgentCounts::default();
    for (name, node) in nodes.iter() {
        match node.certificate_not_after {
            Some(_) if is_kubelet(node) => counts.kubelets += 1,
            Some(end) if end <= now && !connected.contains(name) => counts.expired += 1,
            Some(_) if node.certificate_issued >= Some(since) => counts.renewed += 1,
            Some(_) => {
                counts.pending += 1;
                if counts.pending_nodes.len() < PENDING_NODES_MAX {
                    counts.pending_nodes.push(name.as_str().to_owned());
                }
            }
            None => counts.expired += 1,
        }
    }
    counts
}

/// Returns whether a node with a session has a certificate that was issued before the stage.
pub(super) fn is_due(node: &KnownNode, since: SystemTime) -> bool {
    let has_certificate = node.certificate_not_after.is_some() && !is_kubelet(node);
    has_certificate && node.certificate_issued < Some(since)
}

/// Returns how long the certificates of the nodes are valid after `since`, and a second more. The
/// lifetime may have been longer when they were issued.
pub(super) fn longest_remaining(nodes: &NodeMap, since: SystemTime) -> Duration {
    let issued_here = nodes.iter().filter(|(_name, node)| !is_kubelet(node));
    let ends = issued_here.filter_map(|(_name, node)| node.certificate_not_after);
    let remaining = ends.filter_map(|end| end.duration_since(since).ok()).max();
    remaining.unwrap_or_default() + Duration::from_secs(1)
}

fn is_kubelet(node: &KnownNode) -> bool {
    node.enrollment == Some(EnrollmentKind::Kubelet)
}

/// Maximum number of pending agents in the status, so that an operator can look at them.
const PENDING_NODES_MAX: usize = 10;
