//! What all servers of an installation agree on, as this server and the others know it.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use tunnel_proto::identity::sha256;
use tunnel_proto::wire::peer::{RevokedNode, StateDigest};

/// SHA-256 over the CA of a server, see [`StateDigest::ca`].
pub type CaDigest = [u8; 32];

/// What this server knows of what all servers agree on.
#[derive(Debug, Clone)]
pub(super) struct AgreedState {
    pub(super) digest: StateDigest,
    /// The revocations in force, ordered by node.
    pub(super) revoked: Arc<[RevokedNode]>,
}

impl Default for AgreedState {
    fn default() -> Self {
        let digest = StateDigest {
            revocations: digest_of(&[]),
            ..StateDigest::default()
        };
        Self {
            digest,
            revoked: Arc::default(),
        }
    }
}

/// What another server announced of its CA, over any of its connections.
#[derive(Debug, Default)]
pub(super) struct AnnouncedCa {
    pub(super) connections: usize,
    pub(super) digest: Option<CaDigest>,
}

/// Returns the digest of revocations, which are ordered by node. Servers store whole seconds.
pub(super) fn digest_of(revoked: &[RevokedNode]) -> [u8; 32] {
    let mut content = Vec::new();
    for RevokedNode { node, at } in revoked {
        let since_epoch = at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let millis = u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX);
        content.extend_from_slice(node.as_str().as_bytes());
        content.push(0);
        content.extend_from_slice(&millis.to_be_bytes());
    }
    sha256(&content)
}
