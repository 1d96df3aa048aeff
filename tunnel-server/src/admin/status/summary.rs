//! What lists of nodes are selected, counted and sorted by. Pure.

use std::borrow::Cow;
use std::time::SystemTime;

use super::{NodeState, NodeStatus};
use crate::routing::routes::NodeLabels;
use tunnel_store::known_nodes::EnrollmentKind;

/// A node of a list.
pub(crate) trait ListedNode {
    fn summary(&self) -> NodeSummary<'_>;

    /// Returns the labels of the join token and of the Node object.
    fn labels(&self) -> Cow<'_, NodeLabels>;

    /// Returns the labels that the agent gives its node.
    fn claimed_labels(&self) -> Option<&NodeLabels>;

    /// Returns the labels by which operators select the node.
    fn selectable_labels(&self) -> Cow<'_, NodeLabels> {
        match self.claimed_labels().filter(|claimed| !claimed.is_empty()) {
            None => self.labels(),
            Some(claimed) => {
                let mut labels = claimed.clone();
                labels.extend(self.labels().into_owned());
                Cow::Owned(labels)
            }
        }
    }
}

/// The values of [`NodeStatus`] with the same names.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NodeSummary<'a> {
    pub(crate) name: &'a str,
    pub(crate) is_connected: bool,
    pub(crate) is_edge: bool,
    pub(crate) is_pending: bool,
    /// The node is revoked and not connected.
    pub(crate) is_revoked: bool,
    /// The server that held the node last is gone.
    pub(crate) is_server_gone: bool,
    /// `None` without a session of which more is known.
    pub(crate) is_suspect: Option<bool>,
    pub(crate) enrollment: Option<EnrollmentKind>,
    pub(crate) replica: Option<&'a str>,
    pub(crate) transport: Option<&'a str>,
    pub(crate) version: Option<&'a str>,
    pub(crate) last_seen: Option<SystemTime>,
    pub(crate) rtt_millis: Option<u64>,
    pub(crate) streams: u64,
}

impl NodeSummary<'_> {
    pub(crate) fn state(&self) -> NodeState {
        match self.is_suspect {
            Some(true) => NodeState::Suspect,
            Some(false) => NodeState::Live,
            None if self.is_connected => NodeState::Connected,
            None if self.is_revoked => NodeState::Revoked,
            None if self.is_server_gone => NodeState::Unknown,
            None if self.is_pending => NodeState::Pending,
            None if !self.is_edge => NodeState::NotEdge,
            None if self.last_seen.is_none() && self.enrollment.is_some() => NodeState::Enrolled,
            None => NodeState::Away,
        }
    }
}

impl NodeState {
    pub fn of(status: &NodeStatus) -> Self {
        status.summary().state()
    }
}

impl ListedNode for NodeStatus {
    fn summary(&self) -> NodeSummary<'_> {
        let time = |text: &String| humantime::parse_rfc3339(text).ok();
        NodeSummary {
            name: &self.node,
            is_connected: self.connected,
            is_edge: self.is_edge,
            is_pending: self.is_pending,
            is_revoked: self.is_revoked(),
            is_server_gone: self.gone_server.is_some(),
            is_suspect: (self.state.as_deref())
                .filter(|_| self.connected)
                .map(|state| state == "suspect"),
            enrollment: self.enrollment,
            replica: self.replica.as_deref(),
            transport: self.transport.as_deref(),
            version: self.version.as_deref(),
            last_seen: self.last_seen.as_ref().and_then(time),
            rtt_millis: self.rtt_millis,
            streams: self.streams,
        }
    }

    fn labels(&self) -> Cow<'_, NodeLabels> {
        Cow::Borrowed(&self.labels)
    }

    fn claimed_labels(&self) -> Option<&NodeLabels> {
        Some(&self.claimed_labels)
    }
}
