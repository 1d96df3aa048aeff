//! A scripted server with its own CA: enrollment over TCP, and sessions over both transports on one
//! port.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use rcgen::KeyPair;
use rustls::sign::SingleCertAndKey;
use rustls_pki_types::PrivateKeyDer;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tunnel_proto::identity::spki_sha256;
use tunnel_proto::tls;
use tunnel_proto::transport::quic::{QuicAcceptor, QuicKeys};
use tunnel_proto::transport::{
    BufferPool, CongestionControl, Session, SessionSettings, h2, read_frame,
};
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, JoinToken, TOKEN_SECRET_BYTES};
use tunnel_proto::wire::frame::ENROLL_MESSAGE_MAX;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};

use super::Ca;

pub(crate) struct Server {
    pub(crate) ca: Ca,
    identity: Arc<SingleCertAndKey>,
    tcp: TcpListener,
    quic: QuicAcceptor,
    sessions_tcp: TlsAcceptor,
    settings: SessionSettings,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let ca = Ca::new();
        let key = KeyPair::generate().unwrap();
        let leaf = ca.issue(&key, "culvert://server");
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let own = tls::certified_key(vec![leaf, ca.der().clone()], key).unwrap();
        let identity = Arc::new(SingleCertAndKey::from(own));
        let roots = tls::roots([ca.der().clone()]).unwrap();
        let tls =
            |alpn| tls::session_server_of_roots(identity.clone(), roots.clone(), alpn).unwrap();
        let settings = SessionSettings {
            stream_window: 2 << 20,
            streams: 64,
            keep_alive: None,
            idle_timeout: Duration::from_secs(75),
            congestion: CongestionControl::default(),
            pool: BufferPool::new(64 << 20),
        };
        let keys = QuicKeys::from_bytes(&[3; QuicKeys::LEN]);
        // A free TCP port is nearly always a free UDP port too.
        loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = tcp.local_addr().unwrap();
            let quic = QuicAcceptor::bind(address, tls(ALPN_SESSION), &keys, settings.clone());
            if let Ok(quic) = quic {
                return Self {
                    sessions_tcp: tls(ALPN_SESSION_TCP).into(),
                    ca,
                    identity,
                    tcp,
                    quic,
                    settings,
                };
            }
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.tcp.local_addr().unwrap()
    }

    /// Returns a token that pins this server's CA.
    pub(crate) fn token(&self) -> JoinToken {
        let hash = spki_sha256(self.ca.der()).unwrap();
        JoinToken::new("abcdef012345", &[0xa5; TOKEN_SECRET_BYTES], Some(hash)).unwrap()
    }

    /// Handles one connection for enrollment. Returns an error if the client gave up in the
    /// handshake.
    pub(crate) async fn enrollment(
        &self,
        answer: impl FnOnce(EnrollRequest) -> Option<EnrollReply>,
    ) -> std::io::Result<()> {
        let (socket, _) = self.tcp.accept().await?;
        let config = tls::enroll_server(self.identity.clone()).unwrap();
        let mut stream = TlsAcceptor::from(config).accept(socket).await?;
        let request = read_frame(&mut stream, ENROLL_MESSAGE_MAX).await?;
        if let Some(reply) = answer(EnrollRequest::decode(&request).unwrap()) {
            let mut framed = BytesMut::new();
            reply.encode(&mut framed).unwrap();
            stream.write_all(&framed).await?;
            stream.shutdown().await?;
        }
        Ok(())
    }

    /// Issues a certificate to the key in `data_dir`, where agents store their key before a
    /// request.
    pub(crate) fn issue(&self, data_dir: &Path, uri: &str) -> EnrollReply {
        self.ca.reply(&stored_key(data_dir), uri)
    }

    /// Like [`Self::issue`] for worker-1, by another CA.
    pub(crate) fn issue_by(&self, ca: &Ca, data_dir: &Path) -> EnrollReply {
        ca.reply(&stored_key(data_dir), "culvert://agent/worker-1")
    }

    /// Returns the next session of an agent over TCP.
    pub(crate) async fn session_over_tcp(&self) -> Arc<dyn Session> {
        let (socket, _) = self.tcp.accept().await.unwrap();
        let socket = h2::ReadAhead::new(socket);
        let stream = self.sessions_tcp.accept(socket).await.unwrap();
        h2::accept(stream, &self.settings).await.unwrap()
    }

    /// Returns the next session of an agent over QUIC.
    pub(crate) async fn session(&self) -> Arc<dyn Session> {
        let (_, handshake) = self.quic.accept().await.unwrap();
        handshake.await.unwrap()
    }
}

fn stored_key(data_dir: &Path) -> KeyPair {
    let pem = std::fs::read_to_string(data_dir.join("agent.key")).unwrap();
    KeyPair::from_pem(&pem).unwrap()
}
