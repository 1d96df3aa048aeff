//! HTTP/2 over TLS over TCP (RFC 9113) with reversed roles: the agent dials and is h2's server. The
//! server's end opens streams, and offers streams that the agent's end may open (`offers.rs`). This
//! transport is for networks that block UDP.
//!
//! h2 is used without hyper. A driver takes DATA out of h2 at once, because an unread small frame
//! uses up a budget of the whole connection. The driver releases window as bytes are read. Reset
//! codes on the wire are our codes + 0x1000. GOAWAY cannot carry a close message, so a separate
//! stream carries it, and the reports of a shortage.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_rustls::{client, server};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::flow::{FlowSettings, FlowTransport, ReceiveWindows, StreamWindow};
use super::{HandshakeError, Session, SessionSettings, Traffic};
use crate::identity::{IdentityError, PeerIdentity};
use crate::tls;
use crate::wire::code::CloseCode;

mod bulk_queue;
mod connection;
mod control_rate;
mod dialer;
mod driver;
mod io;
mod offers;
mod path_meter;
mod pump;
mod read_ahead;
mod session;
mod stream;

use connection::Connection;
use control_rate::PREFACE_BYTES;
pub use dialer::H2Dialer;
use driver::Driver;
use io::ConnIo;
pub use read_ahead::ReadAhead;
use session::{CLOSE_STREAM_URI, Commands, H2Session, SessionShared};
use stream::StreamShared;

/// Budget for small frames, in bytes. Each frame below 256 bytes inside h2 uses up to 256 bytes of
/// the budget until the driver takes it out, which happens at least every 256 KiB.
const DATA_FRAME_BUDGET: usize = 16 << 20;
/// Bytes of one stream that may wait inside h2 for the connection.
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Largest payload of a frame that this end accepts: a full buffer of a relay. Such a frame is one
/// write and four TLS records. With HTTP/2's default of 16 KiB, each frame would be a write of its
/// own, and its last 9 bytes a TLS record of their own. One frame delays those of other streams by
/// 3 ms at 200 Mbit/s.
const FRAME_MAX_BYTES: u32 = (64 << 10) - 9;
/// Size to which the window of each stream grows on a long path. TCP needs it where segments are
/// lost: data behind a lost segment is not read until the segment arrives again.
const STREAM_WINDOW_MAX_BYTES: u32 = 8 << 20;
/// Memory of unread bytes, in percent of their number.
const MEMORY_PERCENT: u64 = 150;
/// Maximum size of a header block. Ours are a few dozen bytes (RFC 9113, section 10.5.1).
const HEADER_LIST_BYTES: u32 = 64 << 10;
/// Maximum number of remembered streams that this end has reset and of which the peer may not know
/// yet.
const RESET_STREAMS_MAX: usize = 4096;
/// Time for which reset streams are remembered: the longest partition that a session survives.
const RESET_STREAM_DURATION: Duration = Duration::from_secs(90);
/// Maximum number of frames on forgotten streams, over a session's life. Above it the peer is
/// treated as an attacker (CVE-2025-8671).
const LOCAL_ERROR_RESETS_MAX: usize = 1 << 16;
/// Streams that the peer may reset in one burst before they are accepted, even if the stream limit
/// is small.
const PENDING_RESETS_MIN: usize = 10_240;
/// The server name that agents send. Verification uses the chain and the role (see `tls`), not this
/// name.
const SERVER_NAME: &str = "tunnel-server.culvert";

/// Creates the server's session on a TCP connection with a completed TLS handshake.
///
/// # Errors
/// When the peer has no valid identity or violates the protocol.
pub async fn accept(
    stream: server::TlsStream<ReadAhead>,
    settings: &SessionSettings,
) -> Result<Arc<dyn Session>, HandshakeError> {
    let (socket, tls) = stream.get_ref();
    let peer_info = PeerInfo {
        peer: PeerIdentity::from_agent_certificate(leaf(tls.peer_certificates())?)?,
        chain: tls::issuer_path(tls.peer_certificates().unwrap_or_default()),
        remote: address(socket.socket())?,
    };
    start_client(stream, peer_info, settings).await
}

/// Creates the session of a server that has dialed another server, on a connection with a completed
/// TLS handshake. The session can open streams.
///
/// # Errors
/// When the other server has no valid identity or violates the protocol.
pub async fn connect_peer(
    stream: client::TlsStream<ReadAhead>,
    settings: &SessionSettings,
) -> Result<Arc<dyn Session>, HandshakeError> {
    let (socket, tls) = stream.get_ref();
    let peer_info = PeerInfo::of_server(socket, tls.peer_certificates())?;
    start_client(stream, peer_info, settings).await
}

/// Creates the session of a server that another server has dialed, on a connection with a completed
/// TLS handshake. The session accepts streams.
///
/// # Errors
/// When the other server has no valid identity or violates the protocol.
pub async fn accept_peer(
    stream: server::TlsStream<ReadAhead>,
    settings: &SessionSettings,
) -> Result<Arc<dyn Session>, HandshakeError> {
    let (socket, tls) = stream.get_ref();
    let peer_info = PeerInfo::of_server(socket, tls.peer_certificates())?;
    start_server(stream, peer_info, settings).await
}

/// Starts a session whose end opens streams.
async fn start_client<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    peer_info: PeerInfo,
    settings: &SessionSettings,
) -> Result<Arc<dyn Session>, HandshakeError> {
    let (io, conn_state) = ConnIo::new(stream, 0);
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(settings.stream_window)
        .max_frame_size(FRAME_MAX_BYTES)
        .max_header_list_size(HEADER_LIST_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(RESET_STREAMS_MAX)
        .reset_stream_duration(RESET_STREAM_DURATION)
        .max_local_error_reset_streams(Some(LOCAL_ERROR_RESETS_MAX))
        .max_pending_accept_reset_streams(0)
        .data_frame_budget(DATA_FRAME_BUDGET)
        .enable_push(false)
        .max_concurrent_streams(0);
    let (opener, connection) = builder
        .handshake::<_, Bytes>(io)
        .await
        .map_err(|error| HandshakeError::Transport(error.to_string()))?;
    let shared = SessionShared::new(conn_state, Some(opener));
    let close_stream = shared
        .request(CLOSE_STREAM_URI, BytesMut::new(), Arc::default())
        .await
        .map_err(|error| HandshakeError::Transport(error.to_string()))?;
    let connection = Connection::Client(connection);
    Ok(start(
        connection,
        Some(close_stream),
        shared,
        peer_info,
        settings,
    ))
}

/// Starts a session whose end accepts streams.
async fn start_server<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    peer_info: PeerInfo,
    settings: &SessionSettings,
) -> Result<Arc<dyn Session>, HandshakeError> {
    let (io, conn_state) = ConnIo::new(stream, PREFACE_BYTES);
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(settings.stream_window)
        .max_frame_size(FRAME_MAX_BYTES)
        .max_header_list_size(HEADER_LIST_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_streams(settings.streams)
        .max_concurrent_reset_streams(RESET_STREAMS_MAX)
        .reset_stream_duration(RESET_STREAM_DURATION)
        .max_local_error_reset_streams(Some(LOCAL_ERROR_RESETS_MAX))
        .max_pending_accept_reset_streams(max_pending_resets(settings.streams))
        .data_frame_budget(DATA_FRAME_BUDGET);
    let connection = builder
        .handshake::<_, Bytes>(io)
        .await
        .map_err(|error| handshake_failure(Some(conn_state.alert()), error.to_string()))?;
    let shared = SessionShared::new(conn_state, None);
    let connection = Connection::Server(connection);
    let session = start(connection, None, shared.clone(), peer_info, settings);
    match shared.established().await {
        Ok(()) => Ok(session),
        Err(reason) if tls::is_certificate_rejection(reason.code) => Err(
            HandshakeError::CertificateRejected(reason.code, reason.reason),
        ),
        Err(reason) if reason.code == CloseCode::Dead => Err(HandshakeError::Connect(
            std::io::Error::other(reason.reason),
        )),
        Err(reason) => Err(HandshakeError::Transport(reason.reason)),
    }
}

/// The identity and address of the peer.
struct PeerInfo {
    peer: PeerIdentity,
    /// Set at the accepting end, whose trusted roots may change.
    chain: Vec<CertificateDer<'static>>,
    remote: SocketAddr,
}

impl PeerInfo {
    fn of_server(
        socket: &ReadAhead,
        certificates: Option<&[CertificateDer<'static>]>,
    ) -> Result<Self, HandshakeError> {
        Ok(Self {
            peer: PeerIdentity::from_certificate(leaf(certificates)?)?,
            chain: tls::issuer_path(certificates.unwrap_or_default()),
            remote: address(socket.socket())?,
        })
    }
}

/// The transport of a session's flow control.
struct H2Flow(Weak<SessionShared>);

impl H2Flow {
    fn send_command(&self, write: impl FnOnce(&mut Commands)) {
        if let Some(shared) = self.0.upgrade() {
            shared.send_command(write);
        }
    }
}

impl FlowTransport for H2Flow {
    fn set_windows(&self, windows: ReceiveWindows) {
        self.send_command(|commands| commands.windows = Some(windows));
    }

    fn times_blocked(&self) -> Option<u64> {
        None
    }

    fn report_shortage(&self) {
        self.send_command(|commands| commands.report_shortage = true);
    }

    fn report_waiting(&self) {
        self.send_command(|commands| commands.report_waiting = true);
    }

    /// The operating system keeps what was sent.
    fn congestion_window(&self) -> Option<u64> {
        None
    }

    fn set_send_window(&self, _bytes: u64) {}
}

/// Starts a session and its driver. `close_stream` is set at the end that opens the close stream.
fn start<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    connection: Connection<S>,
    close_stream: Option<Arc<StreamShared>>,
    shared: Arc<SessionShared>,
    peer_info: PeerInfo,
    settings: &SessionSettings,
) -> Arc<dyn Session> {
    let stream_window = StreamWindow::growing(
        settings.stream_window,
        STREAM_WINDOW_MAX_BYTES,
        settings.streams,
    );
    let flow_settings = FlowSettings {
        stream_window,
        memory_percent: MEMORY_PERCENT,
        peer_opens: matches!(connection, Connection::Server(_)),
    };
    let flow = (settings.pool).session(flow_settings, H2Flow(Arc::downgrade(&shared)));
    let (accepted, incoming) = mpsc::channel(max_pending_resets(settings.streams));
    let driver = Driver::new(connection, shared.clone(), flow.clone(), accepted, settings)
        .with_close_stream(close_stream);
    let driver = TaskTracker::new().spawn(driver);
    Arc::new(H2Session {
        shared,
        peer: peer_info.peer,
        chain: peer_info.chain,
        remote: peer_info.remote,
        traffic: Arc::<Traffic>::default(),
        flow,
        opening: AtomicBool::new(true),
        incoming: AsyncMutex::new(incoming),
        _driver: AbortOnDropHandle::new(driver),
    })
}

/// Returns the error of a handshake. The server may reject the certificate at any time after the
/// client's part of the handshake.
fn handshake_failure(alert: Option<u8>, text: String) -> HandshakeError {
    match alert.and_then(tls::alert_meaning) {
        Some((code, reason)) => HandshakeError::CertificateRejected(code, reason.to_owned()),
        None => HandshakeError::Transport(text),
    }
}

fn leaf<'a>(
    chain: Option<&'a [CertificateDer<'static>]>,
) -> Result<&'a CertificateDer<'static>, IdentityError> {
    chain
        .and_then(|chain| chain.first())
        .ok_or(IdentityError::NoCertificate)
}

fn address(socket: &TcpStream) -> Result<SocketAddr, HandshakeError> {
    let address = socket
        .peer_addr()
        .map_err(|error| HandshakeError::Local(error.to_string()))?;
    Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// Returns the number of streams that the peer may open and reset at once. A burst of that size
/// must not look like an attack (CVE-2023-44487).
fn max_pending_resets(streams: u32) -> usize {
    usize::try_from(streams)
        .unwrap_or(usize::MAX)
        .saturating_mul(2)
        .clamp(PENDING_RESETS_MIN, 1 << 18)
}

#[cfg(test)]
mod tests;
