//! Nodes with the labels that targets of the cloud name. The controllers of the cluster follow the
//! Node objects and replace the shared map.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::wire::name::NodeName;
use tunnel_tables::SharedSet;

use crate::config::{CloudNodes, CloudTargetSettings, NodeLabel};

/// The nodes with each label.
type NodesByLabel = BTreeMap<NodeLabel, SharedSet<NodeName>>;

/// The labels of the settings, and the nodes that have them. Clones share the map of nodes.
#[derive(Debug, Clone, Default)]
pub struct LabeledNodes {
    labels: Arc<[NodeLabel]>,
    nodes: Arc<ArcSwap<NodesByLabel>>,
}

impl LabeledNodes {
    /// Creates the map for the labels of these targets, without nodes.
    pub fn new(targets: &[CloudTargetSettings]) -> Self {
        let labels = targets.iter().filter_map(|target| match &target.nodes {
            CloudNodes::Labeled(label) => Some(label.clone()),
            CloudNodes::All | CloudNodes::Named(_) => None,
        });
        let labels: BTreeSet<NodeLabel> = labels.collect();
        Self {
            labels: labels.into_iter().collect(),
            nodes: Arc::default(),
        }
    }

    /// Returns each label once.
    pub fn labels(&self) -> &[NodeLabel] {
        &self.labels
    }

    /// Applies which of the labels these nodes have. With `are_all`, other nodes have none.
    pub fn update<'a>(
        &self,
        are_all: bool,
        nodes: impl IntoIterator<Item = (&'a NodeName, Vec<&'a NodeLabel>)>,
    ) {
        if self.labels.is_empty() {
            return;
        }
        let mut by_label = if are_all {
            NodesByLabel::new()
        } else {
            NodesByLabel::clone(&self.nodes.load())
        };
        for (node, own) in nodes {
            for label in self.labels.iter() {
                let nodes = by_label.entry(label.clone()).or_default();
                if own.contains(&label) {
                    nodes.insert(node.clone(), ());
                } else {
                    nodes.remove(node);
                }
            }
        }
        self.nodes.store(Arc::new(by_label));
    }

    pub(super) fn has_label(&self, node: &NodeName, label: &NodeLabel) -> bool {
        let nodes = self.nodes.load();
        nodes
            .get(label)
            .is_some_and(|nodes| nodes.contains_key(node))
    }
}
