//! Orders of this server that nobody has confirmed. A server with a new disk and without connections
//! numbers its orders below those that others know, and a merge would undo them without a word.

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::order::{NodeOrder, Order};

/// What was ordered here about a node, and is unknown to other servers and to the shared document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OwnOrder {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_revoked: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_reissued: bool,
}

impl OwnOrder {
    /// Adds a revocation, or its end. The end is never repeated: what others order stays in force.
    pub(super) fn revoke(&mut self, is_revoked: bool) {
        self.is_revoked = is_revoked;
    }

    /// Adds the end of the certificates of the node.
    pub(super) fn reissue(&mut self) {
        self.is_reissued = true;
    }

    /// Merges another order into `ours`, which has this one, and repeats this one on top if the other
    /// undoes it. A reissue is repeated once, so that two servers do not exceed each other in turn.
    pub(super) fn merge(&mut self, ours: Order, other: Order, now: u64) -> Order {
        let mut merged = ours.merge(other);
        if self.is_revoked && !merged.is_revoked {
            merged = merged.with_revoked(true, now);
        }
        let is_same = (other.generation, other.reissued_at) == (ours.generation, ours.reissued_at);
        if self.is_reissued && other.generation >= ours.generation && !is_same {
            merged = merged.reissued(now);
            self.is_reissued = false;
        }
        merged
    }
}

/// Returns whether another server has announced exactly these orders.
pub(super) struct PeerCheck(pub(super) Box<IsHeld>);

type IsHeld = dyn Fn(&[NodeOrder]) -> bool + Send + Sync;

/// SHA-256 over all orders of a server.
pub(super) type OrdersDigest = [u8; 32];

/// Returns what another server announced last.
pub(super) struct AnnouncedOrders(pub(super) Box<DigestOf>);

type DigestOf = dyn Fn(&ReplicaId) -> Option<OrdersDigest> + Send + Sync;

tunnel_process::partial_debug!(AnnouncedOrders);

tunnel_process::partial_debug!(PeerCheck);
