//! QUIC (quinn): endpoints with sized UDP buffers, finite windows and keys that outlive the process.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, TransportConfig, VarInt, congestion};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

use super::{
    Acceptor, CongestionControl, Dialer, Handshake, HandshakeError, Session, SessionSettings,
    TransportKind, flow,
};
use crate::identity::PeerIdentity;
use crate::tcp::ServerAddr;
use crate::tls;
use crate::wire::code::CloseCode;

mod backlog;
mod connection_id;
mod flood_detector;
#[cfg(test)]
mod regressions;
mod rtt_cache;
mod runtime;
mod session;
mod stream;

use connection_id::PrefixedCidGenerator;
use rtt_cache::RttCache;
use runtime::EndpointRuntime;
use session::QuicSession;

/// UDP buffers asked for, bytes. 10,000 handshakes at once dropped 2 % as many packets with these as with the default.
const UDP_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// Streams a peer may open before it is known how many are needed. quinn keeps some 80 bytes for each allowed stream.
const INITIAL_STREAM_LIMIT: u32 = 32;
/// Datagrams only carry 1-byte probes, so their buffers are small.
const DATAGRAM_BUFFER_BYTES: usize = 1024;
/// What may wait for one handshake that has not begun, bytes: a ClientHello, some times. quinn would take 10 MiB.
const INCOMING_BUFFER_BYTES: u64 = 64 * 1024;
/// What may wait for all of them. quinn would take 100 MiB.
const INCOMING_BUFFERS_BYTES: u64 = 16 * 1024 * 1024;
/// How long `close` waits for the peer to have what was sent, and `wait_idle` for it to have the close frame.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Packets of unknown connections are answered by a stateless reset at most this often. quinn's default of 20 ms would
/// let 200 agents of a restarted server wait for seconds.
const MIN_RESET_INTERVAL: Duration = Duration::from_micros(100);
/// With this many handshakes under way, a new peer has to prove its address first: an attacker may have invented it.
const RETRY_THRESHOLD: usize = 256;
/// Handshakes that are computed beside each other. Ten thousand agents that come back at once would share the processor
/// until each has given up; those that wait here cost nothing yet.
const HANDSHAKES_MAX: usize = 128;
/// How long a handshake keeps its turn. What still is not done waits for its peer, not for the processor.
const HANDSHAKE_PERMIT_TIMEOUT: Duration = Duration::from_millis(100);
/// The server name that agents send; the chain and the role are what is verified (see `tls`), not this name.
const SERVER_NAME: &str = "tunnel-server.culvert";

/// The secrets that make stateless resets and connection ids survive a restart; one process at a time may use them.
#[derive(Clone)]
pub struct QuicKeys {
    reset: [u8; 64],
    connection_id: u64,
}

impl QuicKeys {
    /// Length of the stored form.
    pub const LEN: usize = 72;

    /// From the stored form: 72 random bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let mut reset = [0; 64];
        reset.copy_from_slice(&bytes[..64]);
        let mut connection_id = [0; 8];
        connection_id.copy_from_slice(&bytes[64..]);
        Self {
            reset,
            connection_id: u64::from_le_bytes(connection_id),
        }
    }
}

impl std::fmt::Debug for QuicKeys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("QuicKeys(..)")
    }
}

/// Accepts QUIC sessions on one UDP socket.
#[derive(Debug)]
pub struct QuicAcceptor {
    endpoint: Endpoint,
    settings: SessionSettings,
    /// Handshakes under way.
    half_open: Arc<()>,
    /// Handshakes that may begin, so that a crowd's are done one after the other and not all too late.
    handshake_permits: Arc<Semaphore>,
}

impl QuicAcceptor {
    /// Binds the socket. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound or the TLS configuration does not suit QUIC.
    pub fn bind(
        address: SocketAddr,
        tls: Arc<rustls::ServerConfig>,
        keys: &QuicKeys,
        settings: SessionSettings,
    ) -> io::Result<Self> {
        let crypto = QuicServerConfig::try_from(tls).map_err(io::Error::other)?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server
            .transport_config(Arc::new(transport_config(&settings, 0)))
            .incoming_buffer_size(INCOMING_BUFFER_BYTES)
            .incoming_buffer_size_total(INCOMING_BUFFERS_BYTES);
        let reset = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &keys.reset);
        let mut config = EndpointConfig::new(Arc::new(reset));
        let connection_id = keys.connection_id;
        config.cid_generator(move || Box::new(PrefixedCidGenerator::from_key(connection_id)));
        config.min_reset_interval(MIN_RESET_INTERVAL);
        let socket = udp_socket(address)?;
        let endpoint = Endpoint::new(
            config,
            Some(server),
            socket,
            Arc::new(EndpointRuntime::default()),
        )?;
        Ok(Self {
            endpoint,
            settings,
            half_open: Arc::default(),
            handshake_permits: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
        })
    }

    /// The next connection whose address is known to be its own, as far as that matters now: with many handshakes under
    /// way, others are sent back for a token first (RFC 9000, section 8.1.2), which costs a round trip and no memory.
    async fn incoming(&self) -> Option<quinn::Incoming> {
        loop {
            let incoming = self.endpoint.accept().await?;
            if incoming.remote_address_validated() || self.half_open() < RETRY_THRESHOLD {
                return Some(incoming);
            }
            // An address that is valid already is handled above, the only error that there is.
            let _sent = incoming.retry();
        }
    }

    fn half_open(&self) -> usize {
        Arc::strong_count(&self.half_open) - 1
    }
}

#[async_trait]
impl Acceptor for QuicAcceptor {
    async fn accept(&self) -> Option<(SocketAddr, Handshake)> {
        let incoming = self.incoming().await?;
        let remote = incoming.remote_address();
        let (settings, half_open) = (self.settings.clone(), self.half_open.clone());
        let handshake_permits = self.handshake_permits.clone();
        let handshake = async move {
            let permit = handshake_permits.acquire_owned().await;
            let mut connecting = std::pin::pin!(incoming.into_future());
            let connected = match timeout(HANDSHAKE_PERMIT_TIMEOUT, connecting.as_mut()).await {
                Ok(connected) => connected,
                Err(_elapsed) => {
                    drop(permit);
                    connecting.await
                }
            };
            let connection = connected.map_err(handshake_error)?;
            drop(half_open);
            QuicSession::start(
                connection,
                &settings,
                PeerIdentity::from_agent_certificate,
                None,
            )
        };
        Some((remote, Box::pin(handshake)))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    async fn wait_idle(&self) {
        let _best_effort = timeout(FLUSH_LIMIT, self.endpoint.wait_idle()).await;
    }
}

/// Dials QUIC sessions, each from a socket of its own: a path that a firewall has come to drop stays dropped, and a new
/// port is a new path.
pub struct QuicDialer {
    crypto: Arc<QuicClientConfig>,
    settings: SessionSettings,
    /// Endpoints whose sessions may still have something to say.
    endpoints: Mutex<Vec<Endpoint>>,
    rtt_cache: RttCache,
}

impl std::fmt::Debug for QuicDialer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("QuicDialer")
            .field("endpoints", &self.endpoints)
            .finish_non_exhaustive()
    }
}

impl QuicDialer {
    /// A dialer of sessions with this credential.
    ///
    /// # Errors
    /// When the TLS configuration does not suit QUIC.
    pub fn new(tls: Arc<rustls::ClientConfig>, settings: SessionSettings) -> io::Result<Self> {
        let crypto = Arc::new(QuicClientConfig::try_from(tls).map_err(io::Error::other)?);
        Ok(Self {
            crypto,
            settings,
            endpoints: Mutex::default(),
            rtt_cache: RttCache::default(),
        })
    }

    fn endpoint(&self, server: SocketAddr) -> io::Result<Endpoint> {
        let any = match server {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let endpoint = Endpoint::new(
            EndpointConfig::default(),
            None,
            udp_socket(any)?,
            Arc::new(EndpointRuntime::default()),
        )?;
        let mut endpoints = self.lock();
        endpoints.retain(|old| old.open_connections() > 0);
        endpoints.push(endpoint.clone());
        drop(endpoints);
        Ok(endpoint)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Endpoint>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Dialer for QuicDialer {
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let local = |error: &dyn std::fmt::Display| HandshakeError::Local(error.to_string());
        let address = remote.address().map_err(|error| local(&error))?;
        let mut config = quinn::ClientConfig::new(self.crypto.clone());
        let mut settings = self.settings.clone();
        // +- 20 %, so that agents of one start do not beat in step.
        settings.keep_alive = settings
            .keep_alive
            .map(|interval| interval.mul_f64(rand::random_range(0.8..1.2)));
        let mut transport = transport_config(&settings, INITIAL_STREAM_LIMIT);
        transport.initial_rtt(self.rtt_cache.initial_rtt(address));
        config.transport_config(Arc::new(transport));
        let connecting = self
            .endpoint(address)
            .map_err(|error| local(&error))?
            .connect_with(config, address, SERVER_NAME)
            .map_err(|error| local(&error))?;
        let connection = connecting.await.map_err(dial_error)?;
        let rtt_cache = Some(self.rtt_cache.clone());
        QuicSession::start(
            connection,
            &settings,
            PeerIdentity::from_server_certificate,
            rtt_cache,
        )
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Quic
    }

    async fn wait_idle(&self) {
        let endpoints = self.lock().clone();
        let all = async {
            for endpoint in &endpoints {
                endpoint.wait_idle().await;
            }
        };
        let _best_effort = timeout(FLUSH_LIMIT, all).await;
    }
}

/// What the end of a dial means. Only a verdict about a certificate is the server's own; anything else on the path can
/// answer a QUIC packet, and must not keep the agent from TCP.
fn dial_error(error: quinn::ConnectionError) -> HandshakeError {
    let code = match &error {
        quinn::ConnectionError::TransportError(ours) => Some(u64::from(ours.code)),
        quinn::ConnectionError::ConnectionClosed(theirs) => Some(u64::from(theirs.error_code)),
        quinn::ConnectionError::TimedOut => return HandshakeError::Timeout,
        _ => None,
    };
    let alert = code
        .and_then(|code| code.checked_sub(CRYPTO_ERROR))
        .is_some_and(|alert| CERTIFICATE_ALERTS.contains(&alert) || alert == CERTIFICATE_REQUIRED);
    let reported = matches!(error, quinn::ConnectionError::ConnectionClosed(_));
    if let Some((code, reason)) = code.filter(|_| reported).and_then(verdict) {
        HandshakeError::CertificateRejected(code, reason.to_owned())
    } else if alert {
        let expired = code == Some(CRYPTO_ERROR + u64::from(tls::CERTIFICATE_EXPIRED));
        let hint = if expired { tls::CLOCK_HINT } else { "" };
        HandshakeError::Transport(format!("{error}{hint}"))
    } else if reported && code == Some(CONNECTION_REFUSED) {
        HandshakeError::Refused
    } else {
        HandshakeError::Connect(io::Error::new(
            io::ErrorKind::ConnectionRefused,
            error.to_string(),
        ))
    }
}

/// What the server says of this agent's certificate, when that is what a QUIC error code means.
fn verdict(code: u64) -> Option<(CloseCode, &'static str)> {
    let alert = code.checked_sub(CRYPTO_ERROR)?;
    tls::alert_meaning(u8::try_from(alert).ok()?)
}

/// The transport error of a server that takes no new connection now (RFC 9000, section 20.1).
const CONNECTION_REFUSED: u64 = 0x2;
/// TLS alerts as QUIC error codes (RFC 9001, section 4.8).
const CRYPTO_ERROR: u64 = 0x100;
/// From handshake_failure to decrypt_error: what is said of certificates and their keys (RFC 8446, section 6.2).
const CERTIFICATE_ALERTS: std::ops::RangeInclusive<u64> = 40..=51;
/// The alert certificate_required.
const CERTIFICATE_REQUIRED: u64 = 116;

fn handshake_error(error: quinn::ConnectionError) -> HandshakeError {
    match error {
        quinn::ConnectionError::TimedOut => HandshakeError::Timeout,
        other => HandshakeError::Transport(other.to_string()),
    }
}

fn transport_config(settings: &SessionSettings, streams: u32) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(settings.stream_window.into())
        .receive_window(window(flow::connection_window(settings.stream_window, 0)))
        .max_concurrent_bidi_streams(streams.into())
        .max_concurrent_uni_streams(0u8.into())
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .keep_alive_interval(settings.keep_alive)
        .max_idle_timeout(quinn::IdleTimeout::try_from(settings.idle_timeout).ok());
    match settings.congestion {
        CongestionControl::Cubic => {
            config.congestion_controller_factory(Arc::new(congestion::CubicConfig::default()))
        }
        CongestionControl::Bbr => {
            config.congestion_controller_factory(Arc::new(congestion::BbrConfig::default()))
        }
    };
    config
}

fn window(bytes: u64) -> VarInt {
    VarInt::from_u64(bytes).unwrap_or(VarInt::MAX)
}

/// Binds a UDP socket with large buffers and says once per process when the system grants less.
fn udp_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // The kernel silently grants at most net.core.rmem_max and wmem_max; what it granted is read back (Linux doubles it).
    let _capped = socket.set_recv_buffer_size(UDP_BUFFER_BYTES);
    let _capped = socket.set_send_buffer_size(UDP_BUFFER_BYTES);
    let (receive, send) = (
        socket.recv_buffer_size()? / 2,
        socket.send_buffer_size()? / 2,
    );
    static WARNED: AtomicBool = AtomicBool::new(false);
    if receive.min(send) < UDP_BUFFER_BYTES && !WARNED.swap(true, Ordering::Relaxed) {
        warn!(
            receive_bytes = receive,
            send_bytes = send,
            wanted_bytes = UDP_BUFFER_BYTES,
            "UDP buffers are small; raise net.core.rmem_max and net.core.wmem_max for many agents or fast links"
        );
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use quinn::ConnectionError;
    use quinn_proto::{TransportError, TransportErrorCode};

    use super::*;
    use crate::identity::Role;
    use crate::tls::{self, test_ca::TestCa};
    use crate::wire::ALPN_SESSION;

    fn settings() -> SessionSettings {
        SessionSettings {
            stream_window: 1 << 20,
            streams: 4,
            keep_alive: None,
            idle_timeout: Duration::from_secs(60),
            congestion: CongestionControl::default(),
            pool: super::super::BufferPool::new(64 << 20),
        }
    }

    /// A new peer is asked for a token exactly when many handshakes are under way (S26).
    #[tokio::test]
    async fn s26_crowd_has_new_peers_prove_their_address() {
        let ca = TestCa::new();
        let tls = tls::session_server(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION);
        let keys = QuicKeys::from_bytes(&[7; QuicKeys::LEN]);
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let acceptor = QuicAcceptor::bind(any, tls.unwrap(), &keys, settings()).unwrap();
        let address = acceptor.local_addr().unwrap();
        let role = Role::Agent("worker-1".parse().unwrap());
        let trust = tls::Trust::Roots(ca.roots());
        let mut guards = vec![acceptor.half_open.clone(); RETRY_THRESHOLD - 1];
        for proves in [false, true] {
            let tls = tls::session_client(ca.key(&role), trust.clone(), ALPN_SESSION).unwrap();
            let dialer = QuicDialer::new(tls, settings()).unwrap();
            let server = ServerAddr {
                name: address.to_string(),
                address: Some(address),
            };
            let accept = async {
                let incoming = acceptor.incoming().await.unwrap();
                let proven = incoming.remote_address_validated();
                let connection = incoming.await.unwrap();
                (proven, connection)
            };
            let ((proven, _connection), dialed) = tokio::join!(accept, dialer.dial(&server));
            dialed.unwrap();
            assert_eq!(proven, proves, "with {} handshakes under way", guards.len());
            guards.push(acceptor.half_open.clone());
        }
    }

    #[test]
    fn only_a_verdict_about_a_certificate_is_an_alert() {
        let reported = |code| {
            dial_error(ConnectionError::TransportError(TransportError {
                code,
                frame: None,
                reason: String::new(),
            }))
        };
        for alert in [42, 46, 48, 116] {
            let error = reported(TransportErrorCode::crypto(alert));
            assert!(matches!(error, HandshakeError::Transport(_)), "{alert}");
        }
        // no_application_protocol: some other service has the port.
        let others = [
            TransportErrorCode::crypto(120),
            TransportErrorCode::CONNECTION_REFUSED,
            TransportErrorCode::PROTOCOL_VIOLATION,
        ];
        for other in others {
            assert!(
                matches!(reported(other), HandshakeError::Connect(_)),
                "{other}"
            );
        }
        let silent = dial_error(ConnectionError::TimedOut);
        assert!(matches!(silent, HandshakeError::Timeout));
        let mismatch = dial_error(ConnectionError::VersionMismatch);
        assert!(matches!(mismatch, HandshakeError::Connect(_)));
    }
}
