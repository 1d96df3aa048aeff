//! QUIC (quinn): endpoints with sized UDP buffers, finite windows and keys that outlive the process; sessions over
//! connections.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    Connection, ConnectionError, Endpoint, EndpointConfig, ReadError, StoppedError,
    TransportConfig, VarInt, WriteError,
};
use rustls_pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::stream::{IncomingStream, RawStream, Stream, StreamCut, Traffic};
use super::{
    Acceptor, CloseReason, ClosedBy, Dialer, Handshake, HandshakeError, Health, Session,
    SessionError, TransportKind,
};
use crate::identity::PeerIdentity;
use crate::wire::code::{CloseCode, ResetCode};
use crate::wire::header::StreamHeader;

/// UDP buffers asked for, bytes. 10,000 handshakes at once dropped 2 % as many packets with these as with the default.
const UDP_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// Streams a peer may open before it is known how many are needed. quinn keeps some 80 bytes for each allowed stream.
const STREAMS_ALLOWED_AT_FIRST: u32 = 32;
/// Datagrams only carry 1-byte probes, so their buffers are small.
const DATAGRAM_BUFFER_BYTES: usize = 1024;
/// How long `close` waits for the peer to have what was sent, and `wait_idle` for it to have the close frame.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Packets of unknown connections are answered by a stateless reset at most this often. quinn's default of 20 ms would
/// let 200 agents of a restarted server wait for seconds.
const MIN_RESET_INTERVAL: Duration = Duration::from_micros(100);
/// The server name that agents send; the chain and the role are what is verified (see `tls`), not this name.
const SERVER_NAME: &str = "tunnel-server.culvert";

/// Windows and timers of QUIC sessions.
#[derive(Debug, Clone)]
pub struct QuicSettings {
    /// Receive window of one stream, bytes; 2 MiB keep quinn's assembler below its limit on gaps.
    pub stream_window: u32,
    /// Receive window of the connection, bytes: no less than all stream windows together, so that stalled readers
    /// cannot use it up.
    pub connection_window: u64,
    /// Sends a PING after this long without traffic; `None` leaves it to the peer.
    pub keep_alive: Option<Duration>,
    /// Ends a session after this long without a packet from the peer.
    pub idle_timeout: Duration,
}

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
        settings: &QuicSettings,
    ) -> io::Result<Self> {
        let crypto = QuicServerConfig::try_from(tls).map_err(io::Error::other)?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(Arc::new(transport_config(settings, 0)));
        let reset = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, &keys.reset);
        let mut config = EndpointConfig::new(Arc::new(reset));
        let connection_id = keys.connection_id;
        config.cid_generator(move || {
            Box::new(quinn_proto::HashedConnectionIdGenerator::from_key(
                connection_id,
            ))
        });
        config.min_reset_interval(MIN_RESET_INTERVAL);
        let socket = udp_socket(address)?;
        let endpoint = Endpoint::new(config, Some(server), socket, Arc::new(quinn::TokioRuntime))?;
        Ok(Self { endpoint })
    }
}

#[async_trait]
impl Acceptor for QuicAcceptor {
    async fn accept(&self) -> Option<(SocketAddr, Handshake)> {
        let incoming = self.endpoint.accept().await?;
        let remote = incoming.remote_address();
        let handshake = async move {
            let connection = incoming
                .await
                .map_err(|error| HandshakeError::Transport(error.to_string()))?;
            QuicSession::start(connection)
        };
        Some((remote, Box::pin(handshake)))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    async fn wait_idle(&self) {
        let _best_effort = tokio::time::timeout(FLUSH_LIMIT, self.endpoint.wait_idle()).await;
    }
}

/// Dials QUIC sessions, all from one UDP socket.
pub struct QuicDialer {
    endpoint: Endpoint,
    crypto: Arc<QuicClientConfig>,
    settings: QuicSettings,
    ipv6: bool,
}

impl std::fmt::Debug for QuicDialer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("QuicDialer")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl QuicDialer {
    /// Binds an ephemeral socket. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When no socket can be bound or the TLS configuration does not suit QUIC.
    pub fn new(tls: Arc<rustls::ClientConfig>, settings: QuicSettings) -> io::Result<Self> {
        let crypto = Arc::new(QuicClientConfig::try_from(tls).map_err(io::Error::other)?);
        let any_v6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let (socket, ipv6) = match udp_socket(any_v6) {
            Ok(socket) => (socket, true),
            Err(_no_ipv6) => (udp_socket(SocketAddr::from(([0, 0, 0, 0], 0)))?, false),
        };
        let endpoint = Endpoint::new(
            EndpointConfig::default(),
            None,
            socket,
            Arc::new(quinn::TokioRuntime),
        )?;
        Ok(Self {
            endpoint,
            crypto,
            settings,
            ipv6,
        })
    }
}

#[async_trait]
impl Dialer for QuicDialer {
    async fn dial(&self, address: SocketAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let mut config = quinn::ClientConfig::new(self.crypto.clone());
        let mut settings = self.settings.clone();
        // +- 20 %, so that agents of one start do not beat in step.
        settings.keep_alive = settings
            .keep_alive
            .map(|interval| interval.mul_f64(rand::random_range(0.8..1.2)));
        config.transport_config(Arc::new(transport_config(
            &settings,
            STREAMS_ALLOWED_AT_FIRST,
        )));
        let address = match address {
            SocketAddr::V4(v4) if self.ipv6 => {
                SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port()))
            }
            other => other,
        };
        let connecting = self
            .endpoint
            .connect_with(config, address, SERVER_NAME)
            .map_err(|error| HandshakeError::Local(error.to_string()))?;
        let connection = connecting
            .await
            .map_err(|error| HandshakeError::Transport(error.to_string()))?;
        QuicSession::start(connection)
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Quic
    }

    async fn wait_idle(&self) {
        let _best_effort = tokio::time::timeout(FLUSH_LIMIT, self.endpoint.wait_idle()).await;
    }
}

fn transport_config(settings: &QuicSettings, streams: u32) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .stream_receive_window(settings.stream_window.into())
        .receive_window(VarInt::from_u64(settings.connection_window).unwrap_or(VarInt::MAX))
        .max_concurrent_bidi_streams(streams.into())
        .max_concurrent_uni_streams(0u8.into())
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .keep_alive_interval(settings.keep_alive)
        .max_idle_timeout(quinn::IdleTimeout::try_from(settings.idle_timeout).ok());
    config
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

struct QuicSession {
    connection: Connection,
    peer: PeerIdentity,
    traffic: Arc<Traffic>,
    /// Halves that were shut down by streams that are gone, until the peer has acknowledged them.
    flushing: TaskTracker,
    opening: AtomicBool,
    allowed: AtomicU32,
    allowed_most: AtomicU32,
}

impl std::fmt::Debug for QuicSession {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("QuicSession")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl QuicSession {
    fn start(connection: Connection) -> Result<Arc<dyn Session>, HandshakeError> {
        let chain = connection
            .peer_identity()
            .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let leaf = chain.as_deref().and_then(|chain| chain.first());
        let peer = PeerIdentity::from_certificate(
            leaf.ok_or(crate::identity::IdentityError::NoCertificate)?,
        )?;
        Ok(Arc::new(Self {
            connection,
            peer,
            traffic: Arc::default(),
            flushing: TaskTracker::new(),
            opening: AtomicBool::new(true),
            allowed: AtomicU32::new(STREAMS_ALLOWED_AT_FIRST),
            allowed_most: AtomicU32::new(STREAMS_ALLOWED_AT_FIRST),
        }))
    }

    fn stream(&self, send: quinn::SendStream, recv: quinn::RecvStream) -> Box<dyn RawStream> {
        Box::new(QuicStream {
            send,
            recv,
            acknowledged: None,
            flushing: self.flushing.clone(),
        })
    }

    /// Raises the number of streams that the peer may open once half of it is in use.
    fn raise_allowance(&self) {
        let (_, _, open) = self.traffic.read();
        let (allowed, most) = (
            self.allowed.load(Ordering::Relaxed),
            self.allowed_most.load(Ordering::Relaxed),
        );
        if allowed < most && open as u64 * 2 >= u64::from(allowed) {
            let raised = allowed.saturating_mul(2).min(most);
            self.allowed.store(raised, Ordering::Relaxed);
            self.connection.set_max_concurrent_bi_streams(raised.into());
        }
    }
}

#[async_trait]
impl Session for QuicSession {
    async fn open(
        &self,
        header: &StreamHeader,
        reply_within: Duration,
    ) -> Result<Stream, SessionError> {
        if !self.opening.load(Ordering::Relaxed) {
            return Err(SessionError::NotOpening);
        }
        let mut buffer = BytesMut::new();
        header
            .encode(&mut buffer)
            .map_err(|error| SessionError::Header(Arc::new(error)))?;
        let (send, recv) = self.connection.open_bi().await.map_err(close_reason)?;
        // From here on the reset on drop makes the call cancel-safe.
        let mut raw = self.stream(send, recv);
        let written = tokio::io::AsyncWriteExt::write_all(&mut raw, &buffer).await;
        let stream = Stream::opened(raw, self.traffic.clone(), reply_within);
        match written {
            Ok(()) => Ok(stream),
            // A peer that stops a stream in its first bytes has replied or reset: reading tells which.
            Err(_stopped) if self.connection.close_reason().is_none() => Ok(stream),
            Err(_lost) => Err(self.closed().await.into()),
        }
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let (send, recv) = self.connection.accept_bi().await.map_err(close_reason)?;
        let incoming = IncomingStream::new(self.stream(send, recv), self.traffic.clone());
        self.raise_allowance();
        Ok(incoming)
    }

    fn probe(&self) {
        // A full or closed datagram buffer means that probes are already on their way or no use.
        let _best_effort = self.connection.send_datagram(Bytes::from_static(&[0]));
    }

    fn health(&self) -> Health {
        let stats = self.connection.stats();
        let rx = &stats.frame_rx;
        let heard = rx.acks
            + rx.crypto
            + rx.datagram
            + rx.max_data
            + rx.max_stream_data
            + rx.max_streams_bidi
            + rx.ping
            + rx.reset_stream
            + rx.stop_sending
            + rx.stream
            + rx.path_challenge
            + rx.path_response
            + rx.new_connection_id
            + rx.retire_connection_id
            + rx.stream_data_blocked
            + rx.streams_blocked_bidi;
        let (bytes_in, bytes_out, streams) = self.traffic.read();
        let remote = self.connection.remote_address();
        Health {
            heard,
            acknowledged: rx.acks,
            rtt: self.connection.rtt(),
            remote: SocketAddr::new(remote.ip().to_canonical(), remote.port()),
            streams,
            bytes_in,
            bytes_out,
        }
    }

    fn stop_opening(&self) {
        self.opening.store(false, Ordering::Relaxed);
    }

    fn allow_streams(&self, count: u32) {
        self.allowed_most.store(count, Ordering::Relaxed);
        self.raise_allowance();
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        self.stop_opening();
        self.flushing.close();
        let _patience_over = tokio::time::timeout(FLUSH_LIMIT, self.flushing.wait()).await;
        self.connection
            .close(code.number().into(), reason.as_bytes());
    }

    async fn closed(&self) -> CloseReason {
        close_reason(self.connection.closed().await)
    }

    fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Quic
    }
}

fn close_reason(error: ConnectionError) -> CloseReason {
    let (by, code) = match &error {
        ConnectionError::ApplicationClosed(close) => {
            let code = CloseCode::from_number(
                u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX),
            );
            let reason = crate::wire::header::one_line(&String::from_utf8_lossy(&close.reason));
            return CloseReason {
                by: ClosedBy::Peer,
                code,
                reason,
            };
        }
        ConnectionError::LocallyClosed => (ClosedBy::Local, CloseCode::Normal),
        ConnectionError::TimedOut => (ClosedBy::Network, CloseCode::Dead),
        ConnectionError::Reset => (ClosedBy::Network, CloseCode::Dead),
        ConnectionError::ConnectionClosed(_)
        | ConnectionError::TransportError(_)
        | ConnectionError::VersionMismatch
        | ConnectionError::CidsExhausted => (ClosedBy::Network, CloseCode::Protocol),
    };
    CloseReason {
        by,
        code,
        reason: error.to_string(),
    }
}

type Acknowledged =
    Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync>>;

struct QuicStream {
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    /// Set when the sent half was finished: resolves when the peer has it.
    acknowledged: Option<Acknowledged>,
    flushing: TaskTracker,
}

impl RawStream for QuicStream {
    fn reset(&mut self, code: ResetCode) {
        self.acknowledged = None;
        let _already_ended = self.send.reset(code.number().into());
        self.stop(code);
    }

    fn stop(&mut self, code: ResetCode) {
        let _already_ended = self.recv.stop(code.number().into());
    }
}

impl AsyncRead for QuicStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.recv
            .poll_read_buf(cx, out)
            .map_err(|error| match error {
                ReadError::Reset(code) => StreamCut::Reset(reset_code(code)).into(),
                ReadError::ConnectionLost(_) => StreamCut::SessionLost.into(),
                ReadError::ClosedStream
                | ReadError::IllegalOrderedRead
                | ReadError::ZeroRttRejected => {
                    io::Error::from(StreamCut::Reset(ResetCode::Dropped))
                }
            })
    }
}

impl AsyncWrite for QuicStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.send)
            .poll_write(cx, data)
            .map_err(|error| match error {
                WriteError::Stopped(code) => StreamCut::Stopped(reset_code(code)).into(),
                WriteError::ConnectionLost(_) => StreamCut::SessionLost.into(),
                WriteError::ClosedStream | WriteError::ZeroRttRejected => {
                    io::ErrorKind::BrokenPipe.into()
                }
            })
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let acknowledged = this.acknowledged.get_or_insert_with(|| {
            // An error means stopped or reset before; the future below tells.
            let _already_ended = this.send.finish();
            Box::pin(this.send.stopped())
        });
        let outcome = ready!(acknowledged.as_mut().poll(cx));
        // The future must not be polled again; a finished half stays finished.
        this.acknowledged = Some(Box::pin(std::future::ready(outcome.clone())));
        Poll::Ready(match outcome {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(StreamCut::Stopped(reset_code(code)).into()),
            Err(_lost) => Err(StreamCut::SessionLost.into()),
        })
    }
}

impl Drop for QuicStream {
    fn drop(&mut self) {
        if let Some(acknowledged) = self.acknowledged.take()
            && !self.flushing.is_closed()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            self.flushing.spawn(async move { drop(acknowledged.await) });
        }
    }
}

fn reset_code(code: VarInt) -> ResetCode {
    ResetCode::from_number(u32::try_from(code.into_inner()).unwrap_or(u32::MAX))
}
