//! The transport abstraction: sessions between two authenticated peers, and the streams in a
//! session.
//!
//! Every transport has the same semantics. One suite checks them (`transport/contract.rs`):
//! - Either end may open streams.
//! - A stream exists for the peer only after its first byte, so [`Session::open`] writes the
//!   header.
//! - The opener may send data directly after the header. The accepting end answers with a
//!   [`StreamReply`](crate::wire::header::StreamReply), which the opener's first read consumes. A
//!   refusal becomes a [`Refusal`](crate::wire::header::Refusal) error.
//! - A half ends cleanly only by `shutdown`. A stream that is dropped before that is cut.
//! - A cut stays behind the bytes that were written before it, for as long as the reader takes bytes
//!   (5 s at most). A reader that is busy elsewhere can ask whether the stream was cut.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;

use crate::identity::PeerIdentity;
use crate::tcp::ServerAddr;
use crate::tls::CertificateAlert;
use crate::wire::code::CloseCode;
use crate::wire::header::{StreamHeader, StreamKind};

#[cfg(test)]
mod contract;
mod flow;
pub mod h2;
#[cfg(any(test, feature = "test-util"))]
pub mod memory;
pub mod quic;
mod settings;
mod stream;

use flow::SessionFlow;
pub use flow::{BufferPool, PoolGauges, PoolPermit, ReadMonitor, source_number};
pub use settings::{CongestionControl, SessionSettings};
pub use stream::{
    ByteCount, CutSignal, IncomingStream, RawStream, Stream, StreamCut, StreamWatch, Traffic,
    find_cause, read_frame,
};

/// Longest time in which the bytes before a cut are delivered. Then they are discarded.
pub const CUT_LIMIT: Duration = Duration::from_secs(5);
/// A reader that takes no byte for this time gets no further bytes before a cut, if some of them
/// wait in this process. Those in its socket have [`CUT_LIMIT`].
pub const CUT_STALL_LIMIT: Duration = Duration::from_secs(1);

/// The time until which a reader gets the bytes before a cut: [`CUT_LIMIT`] after the cut, and
/// [`CUT_STALL_LIMIT`] after the last byte that it took.
#[derive(Debug, Clone, Copy)]
pub struct CutDeadline(Instant);

impl CutDeadline {
    /// Creates the deadline of a cut that happened, or was noticed, at this time.
    pub fn of_cut_at(cut_at: Instant) -> Self {
        Self(cut_at + CUT_LIMIT)
    }

    /// Returns the end for a reader that has taken nothing since `stalled_since`, or that takes bytes.
    pub fn end(self, stalled_since: Option<Instant>) -> Instant {
        stalled_since.map_or(self.0, |since| self.0.min(since + CUT_STALL_LIMIT))
    }
}

/// A multiplexed, authenticated connection to one peer.
#[async_trait]
pub trait Session: Send + Sync + std::fmt::Debug + 'static {
    /// Opens a stream and writes its header. Waits while the peer admits no more streams.
    /// `reply_timeout` limits the wait for the peer's reply. The timeout starts when the peer has
    /// admitted the stream.
    ///
    /// Cancel-safe: if the future is dropped, the stream is reset.
    ///
    /// # Errors
    /// [`SessionError`] when the session has ended, or no longer opens streams.
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError>;

    /// Waits for the next stream that the peer opens. Call [`IncomingStream::header`] in the
    /// stream's own task to read the header.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`SessionError::Closed`] when the session has ended.
    async fn accept(&self) -> Result<IncomingStream, SessionError>;

    /// Sends a probe. [`SessionStats::acknowledged`] counts the peer's acknowledgement.
    fn probe(&self);

    /// Returns the statistics of the session.
    fn stats(&self) -> SessionStats;

    /// Makes every later [`Session::open`] fail. Open streams continue.
    fn stop_opening(&self);

    /// Sets how many streams the peer may have open at once. Over QUIC it may have up to a seventh
    /// more, and one. Until the server's end calls this function, its agent may open none.
    fn set_max_concurrent_streams(&self, count: u32);

    /// Returns whether the memory held by stalled readers leaves room for new streams, see
    /// [`BufferPool`]. If not, a stream that was just accepted must be refused, too. A stream is then
    /// recorded as waiting, so the question is for a session that would carry one.
    /// [`Session::open`] refuses the sources that hold the most earlier.
    fn has_room(&self) -> bool;

    /// Closes the session after the peer has received everything that was shut down, or after 1 s.
    /// Open streams are cut. With [`CloseCode::Dead`] the session closes at once, because the peer
    /// does not answer.
    ///
    /// Not cancel-safe: if the future is dropped, the session may stay open until its last handle
    /// is dropped.
    async fn close(&self, code: CloseCode, reason: &str);

    /// Waits until the session has ended. Cancel-safe.
    async fn closed(&self) -> CloseReason;

    /// Returns the peer's verified identity.
    fn peer(&self) -> &PeerIdentity;

    /// Returns the peer of a QUIC connection for a stateless reset by a later process. The agent's
    /// end, and other transports, have none.
    fn reset_target(&self) -> Option<quic::ResetTarget> {
        None
    }

    /// Returns the peer's verified certificate chain, leaf first. The chain is empty for a
    /// transport without TLS.
    fn peer_chain(&self) -> Vec<CertificateDer<'static>> {
        Vec::new()
    }

    /// Returns the transport that carries the session.
    fn transport(&self) -> TransportKind;
}

tunnel_process::named! {
    /// The kind of a transport, as named in logs and metric labels.
    pub enum TransportKind: label, Display {
        /// QUIC over UDP (RFC 9000).
        Quic = "quic",
        /// HTTP/2 over TLS over TCP (RFC 9113), for networks that block UDP.
        H2 = "h2",
        /// In-process transport for tests.
        Memory = "memory",
    }
}

/// Statistics of a session. `received` and `acknowledged` only increase; compare two samples.
#[derive(Debug, Clone, Copy)]
pub struct SessionStats {
    /// Authenticated units received (QUIC: frames; h2: bytes inside TLS).
    pub received: u64,
    /// Time at which `received` last increased, up to 250 ms late. The begin of the session until
    /// then.
    pub received_at: Instant,
    /// Acknowledgements received for data or probes that this end sent (QUIC: ACK frames; h2:
    /// answers to PING).
    pub acknowledged: u64,
    /// The data that this end cannot deliver, although the peer acknowledges other packets.
    pub undelivered: Option<Undelivered>,
    /// Smoothed round-trip time of the connection.
    pub rtt: Duration,
    /// Current address of the peer. It can change on QUIC.
    pub remote: SocketAddr,
    /// Number of open streams in both directions, without the control stream. These are the pending
    /// requests.
    pub streams: usize,
    /// Stream bytes received, without headers.
    pub bytes_in: u64,
    /// Stream bytes sent, without headers.
    pub bytes_out: u64,
}

/// The time over which data was lost while none was acknowledged: from the first to the last lost
/// packet, each by the time at which it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Undelivered {
    /// Time of the first loss.
    pub since: Instant,
    /// Time of the last loss.
    pub until: Instant,
}

/// The reason why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} ({code}): {reason}", .by.sentence())]
pub struct CloseReason {
    /// The end that closed the session.
    pub by: ClosedBy,
    /// The close code; [`CloseCode::Dead`] when the peer was silent for too long.
    pub code: CloseCode,
    /// A one-line reason for people.
    pub reason: String,
}

impl CloseReason {
    /// Creates the reason of a session that this end closed.
    pub fn local(code: CloseCode, reason: impl Into<String>) -> Self {
        Self::new(ClosedBy::Local, code, reason.into())
    }

    /// Creates the reason of a session that the peer closed with a close message.
    pub fn peer(code: CloseCode, reason: impl Into<String>) -> Self {
        Self::new(ClosedBy::Peer, code, reason.into())
    }

    /// Creates the reason of a session that ended without a close message.
    pub fn network(code: CloseCode, reason: impl Into<String>) -> Self {
        Self::new(ClosedBy::Network, code, reason.into())
    }

    fn new(by: ClosedBy, code: CloseCode, reason: String) -> Self {
        Self { by, code, reason }
    }
}

/// The end that closed a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedBy {
    /// This end closed the session.
    Local,
    /// The peer closed the session with a close message.
    Peer,
    /// The network failed, or the peer ended without a close message.
    Network,
}

impl ClosedBy {
    fn sentence(self) -> &'static str {
        match self {
            Self::Local => "this end closed the session",
            Self::Peer => "the peer closed the session",
            Self::Network => "the connection ended",
        }
    }
}

impl std::fmt::Display for ClosedBy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Local => "this end",
            Self::Peer => "the peer",
            Self::Network => "the network",
        })
    }
}

/// The reason why a session cannot open or accept a stream.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SessionError {
    /// The session has ended.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// The session opens no more streams, because [`Session::stop_opening`] was called.
    #[error("session no longer opens streams")]
    NotOpening,
    /// The pool has no memory for what the peer may send on the stream.
    #[error("no memory for the stream")]
    NoRoom,
    /// The stream header cannot be encoded.
    #[error("stream header cannot be sent")]
    Header(#[source] Arc<crate::wire::frame::FrameError>),
}

/// The reason why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The handshake exceeded its timeout.
    #[error("handshake did not finish in time")]
    Timeout,
    /// The connection to the server, or to the proxy in front of it, failed.
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    /// The server, or a device on the path, accepts no new connections at the moment.
    #[error("server accepts no new connections; retry later")]
    Refused,
    /// TLS or the transport failed. The text contains the peer's alert.
    #[error("handshake failed: {0}")]
    Transport(String),
    /// An alert about a certificate ended the handshake. At the accepting end only.
    #[error("handshake failed: {1}")]
    Certificate(CertificateAlert, String),
    /// This end does not trust the CA of the peer's certificate.
    #[error("handshake failed: {0}")]
    UnknownIssuer(String),
    /// The server rejected this agent's certificate as revoked, or as not valid at the server's
    /// time.
    #[error("{1}")]
    CertificateRejected(CloseCode, String),
    /// The peer's certificate has no role for this connection.
    #[error("peer certificate has no role here")]
    Identity(#[from] crate::identity::IdentityError),
    /// The local socket or configuration prevents the attempt.
    #[error("cannot start the connection: {0}")]
    Local(String),
}

impl HandshakeError {
    /// Returns the close code that the peer's refusal stands for, if there is one.
    pub fn code(&self) -> Option<CloseCode> {
        match self {
            Self::CertificateRejected(code, _) => Some(*code),
            Self::Refused => Some(CloseCode::Overloaded),
            Self::Timeout
            | Self::Connect(_)
            | Self::Transport(_)
            | Self::Certificate(..)
            | Self::UnknownIssuer(_)
            | Self::Identity(_)
            | Self::Local(_) => None,
        }
    }
}

/// A connection whose handshake runs when the future is awaited. Await it in its own task, never in
/// the accept loop.
pub type Handshake = Pin<Box<dyn Future<Output = Result<Arc<dyn Session>, HandshakeError>> + Send>>;

/// The agent's half of a transport.
#[async_trait]
pub trait Dialer: Send + Sync + 'static {
    /// Connects to a server. Cancel-safe: if the future is dropped, the attempt is abandoned.
    ///
    /// # Errors
    /// [`HandshakeError`].
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError>;
    /// Returns the kind of this transport.
    fn transport(&self) -> TransportKind;
    /// Waits until every closed session has delivered its close message to the peer, at most 1 s.
    async fn wait_idle(&self);
}

/// Returns the encoded header of a stream that a session opens, or the error of a session that opens no
/// more.
fn encode_header(opening: &AtomicBool, header: &StreamHeader) -> Result<BytesMut, SessionError> {
    if !opening.load(Ordering::Relaxed) {
        return Err(SessionError::NotOpening);
    }
    let mut encoded = BytesMut::new();
    header
        .encode(&mut encoded)
        .map_err(|error| SessionError::Header(Arc::new(error)))?;
    Ok(encoded)
}

/// Returns the monitor of a stream that a session opens.
fn open_monitor(
    flow: &SessionFlow,
    header: &StreamHeader,
) -> Result<Arc<ReadMonitor>, SessionError> {
    match header.kind {
        // Always read, and part of the session's base window.
        StreamKind::Control { .. } => Ok(Arc::default()),
        StreamKind::Target(_)
        | StreamKind::Cloud(_)
        | StreamKind::Forward { .. }
        | StreamKind::Enroll => flow.open(header.source).ok_or(SessionError::NoRoom),
    }
}
