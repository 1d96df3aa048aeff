//! The status of a rotation: its stage, and the agents that it waits for.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_store::data_dir::time_text;

use crate::stage::RotationStage;

/// The CA of a server and the rotation in progress, if any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RotationStatus {
    /// SHA-256 of the public key of the CA that signs, hex.
    pub signer: String,
    pub in_progress: Option<RotationProgress>,
    /// Number of other servers that share the CA.
    pub other_servers: usize,
    /// Those of them that do not answer, or that know more nodes than `limits.directoryNodes` of this one,
    /// so that agents which only they know are not counted. Empty where no agents are counted.
    #[serde(default)]
    pub not_counted: Vec<String>,
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

/// The nodes that this server and those that answer know, each once, by the certificate that they last
/// presented. While two CAs are trusted, an agent
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
