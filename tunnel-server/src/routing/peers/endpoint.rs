//! This server's end of the connections to the others: what dialing and accepting share.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustls::{ClientConfig, ServerConfig};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::stream_record::StreamRecord;
use tunnel_proto::transport::{SessionSettings, Stream};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_proto::wire::order::NodeOrder;

use super::Peers;
use super::forward_policy::ForwardPolicy;
use crate::routing::registry::Registry;

/// A callback that receives orders about nodes that another server announced. It must not block.
pub type OnOrders = Box<dyn Fn(&ReplicaId, Vec<NodeOrder>) + Send + Sync>;

/// A callback that serves an enrollment of an agent which dialed another server. The stream is
/// accepted, and the name is that of the other server.
pub type OnEnroll = Box<dyn Fn(Stream, ReplicaId) -> BoxFuture<'static, ()> + Send + Sync>;

/// A callback that receives the record of each stream which another server, at this address, has
/// opened.
pub type OnStream = Box<dyn Fn(&StreamRecord) + Send + Sync>;

/// A function that returns what this server knows of the certificates of agents. It may block.
pub type KnownCertificates = Box<dyn Fn() -> Vec<NodeCertificate> + Send + Sync>;

/// The TLS configurations for both directions.
#[derive(Debug)]
pub struct PeerTls {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
}

/// What the connections to the other servers need.
pub struct PeerEndpoint {
    pub peers: Arc<Peers>,
    pub registry: Arc<Registry>,
    pub tls: PeerTls,
    /// Windows and limits of the sessions between servers.
    pub settings: SessionSettings,
    /// Time from the start of a connection to the first message of the other server.
    pub handshake_timeout: Duration,
    /// The targets that this server allows, whatever the other server allows.
    pub policy: ForwardPolicy,
    /// Time for which the list of a lost connection stays.
    pub list_linger: Duration,
    /// Time to open a forwarded stream to an agent, up to its reply.
    pub open_timeout: Duration,
    pub shutdown: Shutdown,
    pub on_orders: OnOrders,
    pub on_stream: OnStream,
    pub known_certificates: KnownCertificates,
    /// `None` if this server issues no certificates for other servers.
    pub on_enroll: Option<OnEnroll>,
}

tunnel_process::partial_debug!(PeerEndpoint { peers });
