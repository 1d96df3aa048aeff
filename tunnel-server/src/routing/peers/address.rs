//! Where another server is reached.

use tunnel_proto::wire::name::ReplicaId;

/// The name of a server and the address of its peer listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddress {
    /// The name that the server's certificate must have.
    pub id: ReplicaId,
    /// Address of its `--peer-listen`, as `HOST:PORT`.
    pub address: String,
}
