//! The first steps of a connection that another server has dialed.

use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tunnel_proto::transport::{Session, h2};
use tunnel_proto::wire::header::StreamKind;
use tunnel_proto::wire::name::ReplicaId;

use super::endpoint::PeerEndpoint;
use super::link::{Control, LinkError, exchange_hello};

/// A connection that is ready.
pub(super) struct Accepted {
    pub(super) session: Arc<dyn Session>,
    pub(super) replica: ReplicaId,
    pub(super) control: Control,
}

/// Accepts a connection: TLS, the control stream and the first messages.
pub(super) async fn accept(
    endpoint: &PeerEndpoint,
    socket: TcpStream,
) -> Result<Accepted, LinkError> {
    let tls = TlsAcceptor::from(endpoint.tls.server.clone());
    let stream = tls.accept(h2::ReadAhead::new(socket)).await;
    let stream = stream.map_err(LinkError::Tls)?;
    let session = h2::accept_peer(stream, &endpoint.settings).await?;
    match handshake(endpoint, &session).await {
        Ok((replica, control)) => Ok(Accepted {
            session,
            replica,
            control,
        }),
        Err(error) => {
            session.close(error.code(), &error.to_string()).await;
            Err(error)
        }
    }
}

/// Accepts the control stream and exchanges the first messages. Returns the name of the server.
async fn handshake(
    endpoint: &PeerEndpoint,
    session: &Arc<dyn Session>,
) -> Result<(ReplicaId, Control), LinkError> {
    let peers = &endpoint.peers;
    let Some(replica) = session.peer().replica().cloned() else {
        // The verifier accepts only servers. This check is a second line of defense.
        return Err(LinkError::protocol("not a server"));
    };
    if replica == *peers.own() {
        let detail =
            format!("another server has the name of this one, {replica}; set --replica-name");
        return Err(LinkError::protocol(&detail));
    }
    let incoming = session.accept().await?;
    let deadline = Instant::now() + endpoint.handshake_timeout;
    let (header, mut stream) = incoming.header(deadline).await?;
    let StreamKind::Control { .. } = header.kind else {
        return Err(LinkError::protocol(
            "the first stream is not the control stream",
        ));
    };
    stream.accept("").await?;
    let control = exchange_hello(stream, peers.hello(), &replica).await?;
    Ok((replica, control))
}
