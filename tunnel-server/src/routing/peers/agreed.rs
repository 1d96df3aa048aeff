//! What all servers of an installation agree on, as this server and the others know it.

use std::sync::Arc;

use tunnel_proto::identity::sha256;
use tunnel_proto::wire::order::{NodeOrder, Order};
use tunnel_proto::wire::peer::StateDigest;

use crate::routing::clock::ClockReading;

/// What this server knows of what all servers agree on.
#[derive(Debug, Clone)]
pub(super) struct AgreedState {
    pub(super) digest: StateDigest,
    /// The orders about nodes, ordered by node.
    pub(super) orders: Arc<[NodeOrder]>,
}

impl Default for AgreedState {
    fn default() -> Self {
        let digest = StateDigest {
            orders: digest_of(&[]),
            ..StateDigest::default()
        };
        Self {
            digest,
            orders: Arc::default(),
        }
    }
}

/// What another server announced, over any of its connections.
#[derive(Debug, Default)]
pub(super) struct AnnouncedState {
    pub(super) connections: usize,
    pub(super) digest: Option<StateDigest>,
    pub(super) clock: Option<ClockReading>,
}

/// Returns the digest of orders, which are ordered by node.
pub(super) fn digest_of(orders: &[NodeOrder]) -> [u8; 32] {
    let mut content = Vec::new();
    for NodeOrder { node, order } in orders {
        let Order {
            counter,
            is_revoked,
            at,
            generation,
            reissued_at,
            ends_at,
        } = *order;
        content.extend_from_slice(node.as_str().as_bytes());
        content.push(0);
        let is_revoked = u64::from(is_revoked);
        for number in [counter, is_revoked, at, generation, reissued_at, ends_at] {
            content.extend_from_slice(&number.to_be_bytes());
        }
    }
    sha256(&content)
}
