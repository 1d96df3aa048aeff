//! Dials the servers as `run` would, and ends each connection after its handshake: no session is
//! admitted and no token is sent.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::{AlertDescription, CertificateError, ClientConfig, Error};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel_doctor::NO_ANSWER;
use tunnel_process::errors::causes;
use tunnel_proto::identity::{PresentedCertificate, validity};
use tunnel_proto::tcp::{Connect, ServerAddr};
use tunnel_proto::tls;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{Dialer, HandshakeError};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::{ALPN_ENROLL, ALPN_SESSION, ALPN_SESSION_TCP};

use super::credential::Identity;
use crate::config::{Config, ServerAddress, TransportChoice};
use crate::connector::endpoint::resolve;
use crate::credentials::TrustRoots;
use crate::enroll::SERVER_NAME;
use crate::proxy::ProxyChoice;

/// A configured server, and its addresses.
#[derive(Debug)]
pub(super) struct ServerFacts {
    /// Host and port as configured.
    pub(super) name: String,
    /// Proxy for TCP connections.
    pub(super) proxy: Option<String>,
    /// The addresses, or why the name has none.
    pub(super) endpoints: Result<Vec<EndpointFacts>, String>,
}

/// What the dials of one address gave.
#[derive(Debug)]
pub(super) struct EndpointFacts {
    /// The address, or the server's name behind a proxy.
    pub(super) address: String,
    pub(super) tcp: TcpFacts,
    /// The certificate that was presented over TCP, if this end did not accept it.
    pub(super) presented: Option<PresentedCertificate>,
    /// The result over UDP, if QUIC was dialed.
    pub(super) quic: Option<QuicFacts>,
}

/// The result over TCP.
#[derive(Debug)]
pub(super) enum TcpFacts {
    /// There is no connection to the server, or to the proxy.
    Failed(String),
    /// The proxy wants another authentication.
    NotAuthenticated(String),
    /// There is a connection. TLS was not tried, because this node has no credential.
    Connected,
    /// TLS failed on the connection.
    Refused(TlsFailure),
    /// The handshake is complete. The server's certificate is valid from this time on.
    Ready {
        not_before: SystemTime,
        /// Time from the end of the handshake to the server's first byte: a round trip. `None`
        /// without a certificate of the agent.
        round_trip: Option<Duration>,
    },
}

/// The result over UDP.
#[derive(Debug)]
pub(super) enum QuicFacts {
    Ready,
    /// The server answered, and TLS failed.
    Refused(String),
    NoAnswer(String),
}

/// The reason why TLS failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TlsFailure {
    /// No trusted CA issued the certificate, or it is not that of a server.
    UnknownIssuer,
    /// A certificate of the server is outside its validity by this host's clock.
    OutsideValidity(String),
    /// The server accepts no agents on this port.
    OtherProtocol,
    /// The server rejected the agent's certificate.
    Rejected(CloseCode, &'static str),
    /// The connection ended, or gave no answer.
    Ended(String),
    Other(String),
}

impl TlsFailure {
    /// Returns whether this end ended TLS, or the other end speaks another protocol: what it presents
    /// then says who it is.
    fn is_about_server(&self) -> bool {
        match self {
            Self::UnknownIssuer
            | Self::OutsideValidity(_)
            | Self::OtherProtocol
            | Self::Other(_) => true,
            Self::Rejected(..) | Self::Ended(_) => false,
        }
    }

    fn new(error: &io::Error) -> Self {
        let cause = error.get_ref();
        let Some(tls_error) = cause.and_then(|cause| cause.downcast_ref::<Error>()) else {
            return Self::Ended(error.to_string());
        };
        match tls_error {
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => Self::OutsideValidity(tls::describe(error)),
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => Self::Other(tls::describe(error)),
            // A CA of the same name with another key did not sign the certificate, and those of other
            // programs have no role, are CAs, or have a form that the verifier does not take.
            Error::InvalidCertificate(_) => Self::UnknownIssuer,
            // A proxy that opens TLS may have no TLS 1.3.
            Error::AlertReceived(AlertDescription::ProtocolVersion)
            | Error::PeerIncompatible(_)
            | Error::NoApplicationProtocol
            | Error::InvalidMessage(_)
            | Error::AlertReceived(AlertDescription::NoApplicationProtocol) => Self::OtherProtocol,
            Error::AlertReceived(alert) => match tls::alert_meaning(u8::from(*alert)) {
                Some((code, text)) => Self::Rejected(code, text),
                None => Self::Other(tls::describe(error)),
            },
            _ => Self::Other(tls::describe(error)),
        }
    }
}

/// Dials servers with a credential, or only connects without one.
#[derive(Debug, Clone)]
pub(super) struct Prober {
    proxy: ProxyChoice,
    /// Time limit of each step.
    within: Duration,
    tls: Option<TcpTls>,
    quic: Option<Arc<QuicDialer>>,
}

/// The settings of TLS over TCP.
#[derive(Debug, Clone)]
struct TcpTls {
    config: Arc<ClientConfig>,
    alpn: &'static [u8],
    /// Whether the agent presents a certificate, which the server accepts or rejects.
    has_certificate: bool,
}

impl Prober {
    /// Creates a prober that presents `identity`. Without one it only connects.
    ///
    /// # Errors
    /// Returns the reason why the credential cannot be used for TLS.
    pub(super) fn new(
        config: &Config,
        identity: Option<Identity>,
        within: Duration,
    ) -> Result<Self, String> {
        let (tls, quic) = match identity {
            None => (None, None),
            Some(Identity::Enroll(trust)) => {
                let tls = TcpTls {
                    config: tls::enroll_client(trust).map_err(|error| error.to_string())?,
                    alpn: ALPN_ENROLL,
                    has_certificate: false,
                };
                (Some(tls), None)
            }
            Some(Identity::Certificate(credentials)) => {
                let ca = config.ca.clone().map(TrustRoots::new).transpose();
                let ca = ca.map_err(|error| format!("--ca-file: {error}"))?;
                let client = |alpn| {
                    let (own, trust) = (credentials.own.clone(), credentials.trust(ca.as_ref()));
                    tls::session_client(own, trust, alpn).map_err(|error| error.to_string())
                };
                let tls = TcpTls {
                    config: client(ALPN_SESSION_TCP)?,
                    alpn: ALPN_SESSION_TCP,
                    has_certificate: true,
                };
                let quic = match config.transport {
                    TransportChoice::H2 => None,
                    TransportChoice::Auto | TransportChoice::Quic => {
                        let dialer = QuicDialer::new(
                            client(ALPN_SESSION)?,
                            config.session_settings(config.buffer_pool()),
                        );
                        Some(Arc::new(dialer.map_err(|error| error.to_string())?))
                    }
                };
                (Some(tls), quic)
            }
        };
        Ok(Self {
            proxy: config.proxy.clone(),
            within,
            tls,
            quic,
        })
    }

    /// Dials all servers at the same time.
    pub(super) async fn probe(self, servers: &[ServerAddress]) -> Vec<ServerFacts> {
        let mut probes = JoinSet::new();
        for server in servers {
            probes.spawn(self.clone().server(server.clone()));
        }
        let facts = probes.join_all().await;
        if let Some(dialer) = &self.quic {
            dialer.wait_idle().await;
        }
        facts
    }

    async fn server(self, server: ServerAddress) -> ServerFacts {
        let name = server.to_string();
        let proxy = self.proxy.proxy_for(&server).map(ToString::to_string);
        let resolved = resolve(&server, self.within).await;
        let addresses: Vec<Option<SocketAddr>> = match resolved {
            Ok(addresses) if proxy.is_none() => addresses.into_iter().map(Some).collect(),
            // The proxy resolves the name, and QUIC is dialed without it.
            Ok(addresses) => vec![addresses.first().copied()],
            Err(_unresolved) if proxy.is_some() => vec![None],
            Err(error) => {
                return ServerFacts {
                    name,
                    proxy,
                    endpoints: Err(causes(&error)),
                };
            }
        };
        let mut probes = JoinSet::new();
        for address in addresses {
            let tcp_address = address.filter(|_| proxy.is_none());
            probes.spawn(self.clone().endpoint(name.clone(), tcp_address, address));
        }
        let endpoints = Ok(probes.join_all().await);
        ServerFacts {
            name,
            proxy,
            endpoints,
        }
    }

    async fn endpoint(
        self,
        name: String,
        tcp_address: Option<SocketAddr>,
        udp_address: Option<SocketAddr>,
    ) -> EndpointFacts {
        let remote = |address| ServerAddr {
            name: name.clone(),
            address,
        };
        let (over_tcp, over_udp) = (remote(tcp_address), remote(udp_address));
        let (tcp, quic) = tokio::join!(
            Box::pin(self.tcp(&over_tcp)),
            Box::pin(self.quic(&over_udp)),
        );
        let presented = match &tcp {
            TcpFacts::Refused(failure) if failure.is_about_server() => {
                Box::pin(self.presented(&over_tcp)).await
            }
            TcpFacts::Refused(_)
            | TcpFacts::Failed(_)
            | TcpFacts::NotAuthenticated(_)
            | TcpFacts::Connected
            | TcpFacts::Ready { .. } => None,
        };
        EndpointFacts {
            address: over_tcp.to_string(),
            tcp,
            presented,
            quic,
        }
    }

    /// Returns the certificate that the other end presents to a client that accepts any.
    async fn presented(&self, remote: &ServerAddr) -> Option<PresentedCertificate> {
        // Servers ask for no certificate of an agent that enrolls.
        let config = tls::inspecting_client(ALPN_ENROLL).ok()?;
        let name = ServerName::try_from(SERVER_NAME).ok()?;
        let handshake = async {
            let socket = self.proxy.connect(remote).await?;
            let connector = TlsConnector::from(config);
            let mut stream = connector.connect(name, socket).await?;
            let _best_effort = stream.shutdown().await;
            Ok(stream)
        };
        let stream = limited(self.within, handshake).await.ok()?;
        let leaf = stream.get_ref().1.peer_certificates()?.first()?;
        PresentedCertificate::read(leaf).ok()
    }

    async fn tcp(&self, remote: &ServerAddr) -> TcpFacts {
        let socket = match limited(self.within, self.proxy.connect(remote)).await {
            Ok(socket) => socket,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return TcpFacts::NotAuthenticated(error.to_string());
            }
            Err(error) => return TcpFacts::Failed(error.to_string()),
        };
        let Some(tls) = &self.tls else {
            return TcpFacts::Connected;
        };
        match limited(self.within, tls.handshake(socket)).await {
            Ok((not_before, round_trip)) => TcpFacts::Ready {
                not_before,
                round_trip,
            },
            Err(error) => TcpFacts::Refused(TlsFailure::new(&error)),
        }
    }

    async fn quic(&self, remote: &ServerAddr) -> Option<QuicFacts> {
        let dialer = self.quic.as_ref()?;
        let result = match timeout(self.within, dialer.dial(remote)).await {
            Ok(Ok(session)) => {
                session.close(CloseCode::Normal, CLOSE_REASON).await;
                QuicFacts::Ready
            }
            Ok(Err(
                HandshakeError::Transport(text)
                | HandshakeError::Certificate(_, text)
                | HandshakeError::UnknownIssuer(text)
                | HandshakeError::CertificateRejected(_, text),
            )) => QuicFacts::Refused(text),
            Ok(Err(HandshakeError::Identity(error))) => QuicFacts::Refused(error.to_string()),
            Ok(Err(
                error @ (HandshakeError::Timeout
                | HandshakeError::Connect(_)
                | HandshakeError::Refused
                | HandshakeError::Local(_)),
            )) => QuicFacts::NoAnswer(causes(&error)),
            Err(_elapsed) => QuicFacts::NoAnswer(NO_ANSWER.to_owned()),
        };
        Some(result)
    }
}

impl TcpTls {
    /// Runs the handshake, waits for the server's answer to the agent's certificate, and returns
    /// the begin of the server's certificate, with the time that the answer took.
    async fn handshake(&self, socket: TcpStream) -> io::Result<(SystemTime, Option<Duration>)> {
        let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
        let connector = TlsConnector::from(self.config.clone());
        let mut stream = connector.connect(name, socket).await?;
        let connection = stream.get_ref().1;
        if connection.alpn_protocol() != Some(self.alpn) {
            return Err(io::Error::other(Error::NoApplicationProtocol));
        }
        let leaf = connection.peer_certificates().and_then(<[_]>::first);
        let leaf = leaf.ok_or_else(|| io::Error::other(Error::NoCertificatesPresented))?;
        let (not_before, _not_after) = validity(leaf).map_err(io::Error::other)?;
        let began = Instant::now();
        if self.has_certificate {
            recv_verdict(&mut stream).await?;
        }
        let round_trip = self.has_certificate.then(|| began.elapsed());
        let _best_effort = stream.shutdown().await;
        Ok((not_before, round_trip))
    }
}

/// Waits for the first byte of a session. With TLS 1.3 the server verifies the agent's certificate
/// after the handshake has ended for the agent. It then sends an alert, or begins the session.
async fn recv_verdict(stream: &mut TlsStream<TcpStream>) -> io::Result<()> {
    match stream.read(&mut [0]).await? {
        0 => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server closed the connection after the handshake",
        )),
        _ => Ok(()),
    }
}

/// Runs a step of a dial, for at most `within`.
pub(super) async fn limited<T>(
    within: Duration,
    step: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let no_answer = || io::Error::new(io::ErrorKind::TimedOut, NO_ANSWER);
    let answer = timeout(within, step).await;
    answer.unwrap_or_else(|_elapsed| Err(no_answer()))
}

/// Reason in the server's log.
const CLOSE_REASON: &str = "tunnel-agent doctor";

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(error: Error) -> TlsFailure {
        TlsFailure::new(&io::Error::other(error))
    }

    #[test]
    fn failure_of_tls_is_classified_by_its_cause() {
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert_eq!(failure(unknown), TlsFailure::UnknownIssuer);
        let self_signed = Error::InvalidCertificate(CertificateError::UnhandledCriticalExtension);
        assert_eq!(failure(self_signed), TlsFailure::UnknownIssuer);
        let name = failure(Error::InvalidCertificate(CertificateError::NotValidForName));
        assert!(matches!(name, TlsFailure::Other(_)));
        let expired = failure(Error::InvalidCertificate(CertificateError::Expired));
        assert!(matches!(expired, TlsFailure::OutsideValidity(_)));
        let other = Error::AlertReceived(AlertDescription::NoApplicationProtocol);
        assert_eq!(failure(other), TlsFailure::OtherProtocol);
        let revoked = failure(Error::AlertReceived(AlertDescription::CertificateRevoked));
        assert!(matches!(
            revoked,
            TlsFailure::Rejected(CloseCode::CredentialRevoked, _)
        ));
        let reset = TlsFailure::new(&io::ErrorKind::ConnectionReset.into());
        assert!(matches!(reset, TlsFailure::Ended(_)));
    }
}
