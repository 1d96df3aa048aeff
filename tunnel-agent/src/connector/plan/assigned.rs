//! What one connector dials.

use std::sync::Arc;

use tunnel_proto::wire::name::ReplicaId;

use crate::config::ServerAddress;

/// What one connector dials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Assignment {
    /// The server to hold a session with; without one, any server will do.
    pub(super) replica: Option<ReplicaId>,
    /// The servers to dial, in this order: the server's own addresses, the configured ones, and
    /// those of servers that no other connector holds.
    pub(super) servers: Arc<[ServerAddress]>,
    /// Number of the first servers that are addresses of `replica` alone.
    pub(super) own_servers: usize,
    /// Servers of zones in which no connector has a session, if this connector's session is not the
    /// only one in its zone. Without an address of `replica`, a move to any of them will do.
    pub(super) other_zones: Arc<[ReplicaId]>,
    /// Number of known servers, which bounds the search for a free one.
    pub(super) members: usize,
    /// Changes with the reported members.
    pub(super) members_generation: u64,
    /// Number of sessions that any connector has lost.
    pub(super) losses: u64,
}

impl Assignment {
    /// Returns the addresses that lead to `replica` alone.
    pub(super) fn own_servers(&self) -> &[ServerAddress] {
        self.servers.get(..self.own_servers).unwrap_or_default()
    }

    /// Returns the servers to which the connector moves if its session is with none of them.
    pub(super) fn move_targets(&self) -> &[ReplicaId] {
        match &self.replica {
            Some(replica) if self.is_addressed() => std::slice::from_ref(replica),
            Some(_) | None => &self.other_zones,
        }
    }

    /// Returns the servers that a move dials. A load balancer selects one of all servers.
    pub(super) fn move_servers(&self) -> &[ServerAddress] {
        if self.is_addressed() {
            self.own_servers()
        } else {
            &self.servers
        }
    }

    /// Returns whether `replica` has an address of its own.
    pub(super) fn is_addressed(&self) -> bool {
        self.own_servers > 0
    }
}
