//! QUIC (quinn): endpoints with sized UDP buffers, finite windows, and keys that persist across
//! restarts.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use quinn::congestion::{BbrConfig, ControllerFactory, CubicConfig};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, TransportConfig};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{
    CongestionControl, Dialer, Handshake, HandshakeError, Session, SessionSettings, TransportKind,
    flow,
};
use crate::identity::PeerIdentity;
use crate::tcp::ServerAddr;

mod backlog;
mod connection_id;
mod cuts;
mod delivery;
mod dial_endpoints;
mod error;
mod flood_detector;
#[cfg(test)]
mod hostile_cuts;
mod receive_clock;
#[cfg(test)]
mod regressions;
mod rtt_cache;
mod runtime;
mod session;
mod socket;
mod stateless_reset;
mod stream;
mod timer;

use connection_id::PrefixedCidGenerator;
use delivery::DeliveryControllers;
use dial_endpoints::DialEndpoints;
use error::{dial_error, handshake_error};
use receive_clock::SessionSampler;
use rtt_cache::RttCache;
use runtime::{EndpointRuntime, delivery_clock};
use session::{FLUSH_LIMIT, INITIAL_STREAM_LIMIT, QuicSession, window};
pub use socket::UDP_BUFFER_BYTES;
use socket::udp_socket;
use stateless_reset::ResetSender;
pub use stateless_reset::ResetTarget;

/// Size of the datagram buffers, in bytes. Datagrams are probes and reports of one byte.
const DATAGRAM_BUFFER_BYTES: usize = 1024;
/// Bytes that may wait for one handshake that has not begun: several times a ClientHello. quinn's
/// default is 10 MiB.
const INCOMING_BUFFER_BYTES: u64 = 64 * 1024;
/// Bytes that may wait for all such handshakes. quinn's default is 100 MiB.
const INCOMING_BUFFERS_BYTES: u64 = 16 * 1024 * 1024;
/// Minimum time between stateless resets, which answer packets of unknown connections. With quinn's
/// default of 20 ms, 200 agents of a restarted server would wait for seconds.
const MIN_RESET_INTERVAL: Duration = Duration::from_micros(100);
/// Number of concurrent handshakes from which a new peer must prove its address first, because an
/// attacker may spoof it.
const RETRY_THRESHOLD: usize = 256;
/// Number of handshakes that are computed concurrently. If ten thousand agents reconnected at once
/// without this limit, they would share the processor until each of them timed out. A waiting
/// handshake costs nothing yet.
const HANDSHAKES_MAX: usize = 128;
/// Time that a handshake holds its permit. A handshake that takes longer waits for its peer, not
/// for the processor.
const HANDSHAKE_PERMIT_TIMEOUT: Duration = Duration::from_millis(100);
/// Streams that an agent may open before the server calls [`Session::set_max_concurrent_streams`].
const AGENT_STREAM_LIMIT: u32 = 0;
/// The server name that agents send. Verification uses the chain and the role (see `tls`), not this
/// name.
const SERVER_NAME: &str = "tunnel-server.culvert";

/// The secrets that make stateless resets and connection ids survive a restart. Only one process at
/// a time may use them.
#[derive(Clone)]
pub struct QuicKeys {
    reset: [u8; 64],
    connection_id: u64,
}

impl QuicKeys {
    /// The length of the stored form, in bytes.
    pub const LEN: usize = 72;

    /// Creates the keys from their stored form: 72 random bytes.
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

tunnel_process::partial_debug!(QuicKeys);

/// An acceptor of QUIC sessions on one UDP socket.
#[derive(Debug)]
pub struct QuicAcceptor {
    endpoint: Endpoint,
    reset_sender: ResetSender,
    settings: SessionSettings,
    /// A reference for each unfinished handshake.
    half_open: Arc<()>,
    /// Permits to begin a handshake. They serialize the handshakes of many agents, so that the
    /// first ones complete in time.
    handshake_permits: Arc<Semaphore>,
}

impl QuicAcceptor {
    /// Binds the socket. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound, or the TLS configuration is not suitable for QUIC.
    pub fn bind(
        address: SocketAddr,
        tls: Arc<rustls::ServerConfig>,
        keys: &QuicKeys,
        settings: SessionSettings,
    ) -> io::Result<Self> {
        let crypto = QuicServerConfig::try_from(tls).map_err(io::Error::other)?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server
            .transport_config(Arc::new(transport_config(&settings, AGENT_STREAM_LIMIT)))
            .incoming_buffer_size(INCOMING_BUFFER_BYTES)
            .incoming_buffer_size_total(INCOMING_BUFFERS_BYTES);
        let reset = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &keys.reset);
        let mut config = EndpointConfig::new(Arc::new(reset));
        let connection_id = keys.connection_id;
        config.cid_generator(move || Box::new(PrefixedCidGenerator::from_key(connection_id)));
        config.min_reset_interval(MIN_RESET_INTERVAL);
        let socket = udp_socket(address)?;
        let reset_sender = ResetSender::new(&socket, &keys.reset)?;
        let endpoint = Endpoint::new(
            config,
            Some(server),
            socket,
            Arc::new(EndpointRuntime::default()),
        )?;
        Ok(Self {
            endpoint,
            reset_sender,
            settings,
            half_open: Arc::default(),
            handshake_permits: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
        })
    }

    /// Waits for the next connection. Returns the remote address and the handshake, or `None` when
    /// the endpoint is closed. Cancel-safe.
    pub async fn accept(&self) -> Option<(SocketAddr, Handshake)> {
        let incoming = self.incoming().await?;
        let remote = incoming.remote_address();
        let (settings, half_open) = (self.settings.clone(), self.half_open.clone());
        let handshake_permits = self.handshake_permits.clone();
        let handshake = async move {
            let permit = handshake_permits.acquire_owned().await;
            let (sampler, connecting) = SessionSampler::attach(|| incoming.into_future());
            let mut connecting = std::pin::pin!(connecting);
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
                AGENT_STREAM_LIMIT,
                PeerIdentity::from_agent_certificate,
                None,
                &sampler,
            )
        };
        Some((remote, Box::pin(handshake)))
    }

    /// Returns the address that the endpoint is bound to.
    ///
    /// # Errors
    /// The error of the system.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Waits until every closed connection has delivered its close message to the peer, at most 1 s.
    /// Cancel-safe.
    pub async fn wait_idle(&self) {
        let _best_effort = timeout(FLUSH_LIMIT, self.endpoint.wait_idle()).await;
    }

    /// Sends stateless resets to the peers of an earlier process with the same keys, 2,000 a second.
    /// A peer whose connection has another token ignores its reset. Cancel-safe: resets that were
    /// not sent are lost, and those peers notice the restart later.
    pub async fn reset(&self, targets: &[ResetTarget]) {
        self.reset_sender.send(targets).await;
    }

    /// Waits for the next connection. If many handshakes are unfinished, a peer without a validated
    /// address must return a token first (RFC 9000, section 8.1.2), which costs a round trip and no
    /// memory.
    async fn incoming(&self) -> Option<quinn::Incoming> {
        loop {
            let incoming = self.endpoint.accept().await?;
            if incoming.remote_address_validated() || self.half_open() < RETRY_THRESHOLD {
                return Some(incoming);
            }
            // `retry` fails only for a validated address, and the condition above excludes that.
            let _sent = incoming.retry();
        }
    }

    fn half_open(&self) -> usize {
        Arc::strong_count(&self.half_open) - 1
    }
}

/// A dialer of QUIC sessions.
pub struct QuicDialer {
    crypto: Arc<QuicClientConfig>,
    settings: SessionSettings,
    endpoints: DialEndpoints,
    rtt_cache: RttCache,
}

tunnel_process::partial_debug!(QuicDialer { endpoints });

impl QuicDialer {
    /// Creates a dialer with the credential in `tls`.
    ///
    /// # Errors
    /// When the TLS configuration is not suitable for QUIC.
    pub fn new(tls: Arc<rustls::ClientConfig>, settings: SessionSettings) -> io::Result<Self> {
        let crypto = Arc::new(QuicClientConfig::try_from(tls).map_err(io::Error::other)?);
        Ok(Self {
            crypto,
            settings,
            endpoints: DialEndpoints::default(),
            rtt_cache: RttCache::default(),
        })
    }
}

#[async_trait]
impl Dialer for QuicDialer {
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let local = |error: &dyn std::fmt::Display| HandshakeError::Local(error.to_string());
        let address = remote.address().map_err(|error| local(&error))?;
        let mut config = quinn::ClientConfig::new(self.crypto.clone());
        let mut settings = self.settings.clone();
        // +- 20 %, so that agents that start together do not send in step.
        settings.keep_alive = settings
            .keep_alive
            .map(|interval| interval.mul_f64(rand::random_range(0.8..1.2)));
        let mut transport = transport_config(&settings, INITIAL_STREAM_LIMIT);
        transport.initial_rtt(self.rtt_cache.initial_rtt(address));
        config.transport_config(Arc::new(transport));
        let dial = self
            .endpoints
            .dial(address)
            .map_err(|error| local(&error))?;
        let (sampler, connecting) =
            SessionSampler::attach(|| dial.endpoint.connect_with(config, address, SERVER_NAME));
        let connecting = connecting.map_err(|error| local(&error))?;
        let connection = connecting.await.map_err(dial_error)?;
        let rtt_cache = Some(self.rtt_cache.clone());
        QuicSession::start(
            connection,
            &settings,
            INITIAL_STREAM_LIMIT,
            PeerIdentity::from_server_certificate,
            rtt_cache,
            &sampler,
        )
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Quic
    }

    async fn wait_idle(&self) {
        let endpoints = self.endpoints.all();
        let all = async {
            for endpoint in &endpoints {
                endpoint.wait_idle().await;
            }
        };
        let _best_effort = timeout(FLUSH_LIMIT, all).await;
    }
}

fn transport_config(settings: &SessionSettings, streams: u32) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(settings.stream_window.into())
        .receive_window(window(flow::BASE_WINDOW))
        .send_window(flow::SEND_BASE_WINDOW)
        .max_concurrent_bidi_streams(streams.into())
        .max_concurrent_uni_streams(cuts::ANNOUNCEMENTS_MAX.into())
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .keep_alive_interval(settings.keep_alive)
        .max_idle_timeout(quinn::IdleTimeout::try_from(settings.idle_timeout).ok());
    let inner: Arc<dyn ControllerFactory + Send + Sync> = match settings.congestion {
        CongestionControl::Cubic => Arc::new(CubicConfig::default()),
        CongestionControl::Bbr => Arc::new(BbrConfig::default()),
    };
    config.congestion_controller_factory(Arc::new(DeliveryControllers {
        inner,
        clock: delivery_clock,
    }));
    config
}
