//! Where another server is reached.

use tunnel_proto::wire::name::{ReplicaId, ZoneName};

/// The name of a server, the address of its peer listener, and its zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddress {
    /// The name that the server's certificate must have.
    pub id: ReplicaId,
    /// Address of its `--peer-listen`, as `HOST:PORT`.
    pub address: String,
    /// The zone that the cluster lists for the server.
    pub zone: Option<ZoneName>,
}

/// What is known of the zone of a server. What its operator wrote is preferred.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PeerZone {
    /// `--zone` of that server.
    pub(super) configured: Option<ZoneName>,
    /// The zone that the cluster lists.
    pub(super) listed: Option<ZoneName>,
}

impl PeerZone {
    /// Returns the zone, or `None` if it is unknown.
    pub(super) fn known(&self) -> Option<&ZoneName> {
        self.configured.as_ref().or(self.listed.as_ref())
    }
}
