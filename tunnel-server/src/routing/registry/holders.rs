//! The names of the nodes that this server may hold in another way than before, for what announces
//! them to other servers.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tunnel_proto::wire::name::NodeName;

/// Nodes whose sessions were registered, withdrawn or removed. One task at a time takes them.
#[derive(Debug, Default)]
pub(super) struct ChangedNodes {
    /// `None` until a task takes them, so that the names are bounded.
    names: Mutex<Option<BTreeSet<NodeName>>>,
    added: Notify,
}

impl ChangedNodes {
    pub(super) fn add(&self, node: &NodeName) {
        if let Some(names) = &mut *self.names.lock()
            && names.insert(node.clone())
        {
            self.added.notify_one();
        }
    }

    /// Returns the names since the last call, or `None` for the first call.
    pub(super) fn take(&self) -> Option<BTreeSet<NodeName>> {
        self.names.lock().replace(BTreeSet::new())
    }

    /// Returns the number of names since the last [`Self::take`].
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.names.lock().as_ref().map_or(0, BTreeSet::len)
    }

    /// Waits until names were added. Cancel-safe.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }
}
