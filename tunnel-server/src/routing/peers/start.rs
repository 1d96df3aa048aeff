//! Starts the connections to the other servers, in both directions.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing::warn;
use tunnel_process::accept::RetryingListener;
use tunnel_proto::tcp::configure_session;

use super::PeerAddress;
use super::announce::{HeldNodes, follow_registry};
use super::dial::dial_all;
use super::endpoint::PeerEndpoint;
use super::serve::PeerListener;

impl PeerEndpoint {
    /// Accepts other servers on `listener`, and dials those of `membership`, until the process
    /// stops. If the sender of the membership is dropped, the last list stays in force.
    pub fn start(self, listener: TcpListener, membership: watch::Receiver<Arc<[PeerAddress]>>) {
        if let Err(error) = configure_session(&listener) {
            warn!(%error, "cannot set options of a listener");
        }
        let listener = RetryingListener::new(listener, "peers");
        let shutdown = self.shutdown.clone();
        let endpoint = Arc::new(self);
        let (held_nodes, announced) = watch::channel(HeldNodes::default());
        shutdown.spawn_service(follow_registry(endpoint.registry.clone(), held_nodes));
        let accepting = PeerListener::new(endpoint.clone(), announced);
        shutdown.spawn_listener(accepting.run(listener));
        shutdown.spawn_service(dial_all(endpoint, membership));
    }
}
