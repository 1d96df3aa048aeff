//! The agent's end of a connection: dials a server over TCP.

use std::sync::Arc;

use async_trait::async_trait;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client};

use super::{PeerInfo, ReadAhead, SERVER_NAME, address, handshake_failure, leaf, start_server};
use crate::identity::PeerIdentity;
use crate::tcp::{self, Connect, ServerAddr};
use crate::tls;
use crate::transport::{Dialer, HandshakeError, Session, SessionSettings, TransportKind};

/// A dialer of h2 sessions over TCP connections.
#[derive(Debug)]
pub struct H2Dialer {
    tls: Arc<rustls::ClientConfig>,
    settings: SessionSettings,
    connect: Arc<dyn Connect>,
}

impl H2Dialer {
    /// Creates a dialer with the credential in `tls`. `connect` opens its TCP connections.
    pub fn new(
        tls: Arc<rustls::ClientConfig>,
        settings: SessionSettings,
        connect: Arc<dyn Connect>,
    ) -> Self {
        Self {
            tls,
            settings,
            connect,
        }
    }

    /// Runs the client's part of the TLS handshake.
    async fn handshake_tls(
        &self,
        socket: TcpStream,
    ) -> Result<client::TlsStream<ReadAhead>, HandshakeError> {
        let name = ServerName::try_from(SERVER_NAME)
            .map_err(|error| HandshakeError::Local(error.to_string()))?;
        TlsConnector::from(self.tls.clone())
            .connect(name, ReadAhead::new(socket))
            .await
            .map_err(|error| {
                if !tls::is_tls_error(&error) {
                    // The connection was reset or closed during the handshake, as by a server that
                    // stops.
                    return HandshakeError::Connect(error);
                }
                let text = tls::describe(&error);
                if tls::is_unknown_issuer(&error) {
                    return HandshakeError::UnknownIssuer(text);
                }
                let hint = tls::usage_hint(&error);
                handshake_failure(tls::received_alert(&error), format!("{text}{hint}"))
            })
    }
}

#[async_trait]
impl Dialer for H2Dialer {
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let socket = self
            .connect
            .connect(remote)
            .await
            .map_err(HandshakeError::Connect)?;
        tcp::configure_session(&socket)
            .map_err(|error| HandshakeError::Local(error.to_string()))?;
        let remote = address(&socket)?;
        let stream = self.handshake_tls(socket).await?;
        let peer =
            PeerIdentity::from_server_certificate(leaf(stream.get_ref().1.peer_certificates())?)?;
        let peer_info = PeerInfo {
            peer,
            chain: Vec::new(),
            remote,
        };
        start_server(stream, peer_info, &self.settings).await
    }

    fn transport(&self) -> TransportKind {
        TransportKind::H2
    }

    /// Returns at once, because the close of a session already waits for its connection.
    async fn wait_idle(&self) {}
}
