//! Nodes with the labels that targets of the cloud name. The controllers of the cluster follow the
//! Node objects and replace the shared map.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::wire::name::NodeName;

use crate::config::{CloudNodes, CloudTargetSettings, NodeLabel};

/// The nodes with each label.
pub type NodesByLabel = HashMap<NodeLabel, HashSet<NodeName>>;

/// The labels of the settings, and the nodes that have them. Clones share the map of nodes.
#[derive(Debug, Clone, Default)]
pub struct LabeledNodes {
    labels: Arc<[NodeLabel]>,
    nodes: Arc<ArcSwap<NodesByLabel>>,
}

impl LabeledNodes {
    /// Creates the map for the labels of these targets, without nodes.
    #[must_use]
    pub fn new(targets: &[CloudTargetSettings]) -> Self {
        let labels = targets.iter().filter_map(|target| match &target.nodes {
            CloudNodes::Labeled(label) => Some(label.clone()),
            CloudNodes::All | CloudNodes::Named(_) => None,
        });
        let labels: HashSet<NodeLabel> = labels.collect();
        Self {
            labels: labels.into_iter().collect(),
            nodes: Arc::default(),
        }
    }

    /// Returns each label once.
    #[must_use]
    pub fn labels(&self) -> &[NodeLabel] {
        &self.labels
    }

    /// Replaces the nodes of all labels.
    pub fn replace(&self, nodes: NodesByLabel) {
        self.nodes.store(Arc::new(nodes));
    }

    pub(super) fn has_label(&self, node: &NodeName, label: &NodeLabel) -> bool {
        let nodes = self.nodes.load();
        nodes.get(label).is_some_and(|nodes| nodes.contains(node))
    }
}
