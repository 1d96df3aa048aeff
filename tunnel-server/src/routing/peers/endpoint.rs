//! This server's end of the connections to the others: what dialing and accepting share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rustls::{ClientConfig, ServerConfig};
use tracing::info;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::{SessionSettings, Stream};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{HeldNode, RevokedNode};

use super::Peers;
use crate::routing::directory::Claim;
use crate::routing::registry::Registry;

/// A callback that receives the revocations of another server. It must not block.
pub type OnRevoked = Box<dyn Fn(Vec<RevokedNode>) + Send + Sync>;

/// A callback that serves an enrollment of an agent which dialed another server. The stream is
/// accepted, and the name is that of the other server.
pub type OnEnroll = Box<dyn Fn(Stream, ReplicaId) -> BoxFuture<'static, ()> + Send + Sync>;

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
    pub handshake_limit: Duration,
    /// Time for which the list of a lost connection stays.
    pub list_linger: Duration,
    /// Time to open a forwarded stream to an agent, up to its reply.
    pub open_limit: Duration,
    pub shutdown: Shutdown,
    pub on_revoked: OnRevoked,
    /// `None` if this server issues no certificates for other servers.
    pub on_enroll: Option<OnEnroll>,
}

impl fmt::Debug for PeerEndpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PeerEndpoint")
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}

impl PeerEndpoint {
    /// Closes the sessions of nodes that another server holds with another agent process, if the
    /// agent was admitted there first. The admissions crossed: neither server knew of the other. An
    /// entry from before that server gave up the node does not count.
    pub(super) fn resolve_crossed(&self, replica: &ReplicaId, held_node: &[HeldNode]) {
        for other in held_node {
            let mut all = self.registry.of_node(&other.node);
            all.retain(|agent| !agent.has_yielded());
            let mut sessions = all.clone();
            sessions.retain(|agent| agent.instance != other.instance && !agent.is_withdrawn());
            // As in `Registry::held`, a session that was replaced counts: both servers must compare
            // the same times.
            let of_process = all.iter().filter(|agent| {
                let mut rivals = sessions.iter();
                rivals.any(|rival| rival.instance == agent.instance)
            });
            let Some(since) = of_process.map(|agent| agent.since).min() else {
                continue;
            };
            let own = Claim::new(since, self.peers.own());
            if !own.yields_to(&Claim::new(other.since, replica)) {
                continue;
            }
            if self.peers.is_yielded(replica, other) {
                continue;
            }
            for agent in sessions {
                info!(
                    agent = %agent.node, session = %agent.id, peer = %replica,
                    "another server admitted an agent of this name first, closing the session"
                );
                agent.yield_node();
                let reason =
                    format!("another agent of this name was admitted by server {replica} first");
                self.shutdown.spawn_service(async move {
                    agent.close(CloseCode::NameInUse, &reason).await;
                });
            }
        }
    }
}
