//! The transport seam: sessions between two authenticated peers, and the streams in them.
//!
//! One meaning on every transport (checked by one suite, `transport/contract.rs`):
//! - a stream exists for its peer only after its first byte, so [`Session::open`] writes the header;
//! - the opener may send data right behind it; the acceptor answers a [`StreamReply`](crate::wire::header::StreamReply)
//!   that the opener's first read takes in; a refusal surfaces as [`Refusal`](crate::wire::header::Refusal);
//! - a half ends cleanly only by `shutdown`; a stream dropped before that is reset, and a reset alone means a cut.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustls_pki_types::CertificateDer;

use crate::identity::PeerIdentity;
use crate::tcp::ServerAddr;
use crate::wire::code::CloseCode;
use crate::wire::header::StreamHeader;

#[cfg(test)]
mod contract;
pub mod control;
mod flow;
pub mod h2;
pub mod liveness;
#[cfg(any(test, feature = "test-util"))]
pub mod memory;
pub mod quic;
mod settings;
mod stream;

pub use flow::{BufferPool, ReadMonitor};
pub use settings::{CongestionControl, SessionSettings};
pub use stream::{
    ByteCount, IncomingStream, RawStream, Stream, StreamCut, Traffic, find_cause, read_frame,
};

/// A multiplexed, authenticated connection to one peer.
#[async_trait]
pub trait Session: Send + Sync + std::fmt::Debug + 'static {
    /// Opens a stream and writes its header. `reply_timeout` bounds the wait for the peer's reply, from now.
    ///
    /// Cancel-safe: if dropped earlier, the stream is reset.
    ///
    /// # Errors
    /// [`SessionError`] when the session has ended, or no longer opens streams.
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError>;

    /// The next stream of the peer. Its header is read by [`IncomingStream::header`], in the stream's own task.
    ///
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`SessionError::Closed`] when the session has ended.
    async fn accept(&self) -> Result<IncomingStream, SessionError>;

    /// Asks the peer for a sign of life, which shows in [`Health::acknowledged`].
    fn probe(&self);

    /// What is known of the connection at this moment.
    fn health(&self) -> Health;

    /// Makes every later [`Session::open`] fail; open streams go on.
    fn stop_opening(&self);

    /// How many streams the peer may have open at once.
    fn set_max_concurrent_streams(&self, count: u32);

    /// Whether the memory that stalled readers hold leaves room for new streams, see [`BufferPool`].
    fn has_room(&self) -> bool;

    /// Closes the session after everything that was shut down has reached the peer (at most 1 s); open streams are cut.
    /// With [`CloseCode::Dead`] at once: nobody is there to hear it.
    ///
    /// Not cancel-safe: dropped early, the session may stay open until its last handle goes.
    async fn close(&self, code: CloseCode, reason: &str);

    /// Waits for the end of the session. Cancel-safe.
    async fn closed(&self) -> CloseReason;

    /// Who the peer proved to be.
    fn peer(&self) -> &PeerIdentity;

    /// The certificates that the peer proved it with, leaf first; none where there is no TLS.
    fn peer_chain(&self) -> Vec<CertificateDer<'static>> {
        Vec::new()
    }

    /// Which transport carries the session.
    fn transport(&self) -> TransportKind;
}

/// A transport by name, as in logs and metric labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// QUIC over UDP (RFC 9000).
    Quic,
    /// HTTP/2 over TLS over TCP (RFC 9113), for where UDP does not pass.
    H2,
    /// In-process, for tests.
    Memory,
}

impl TransportKind {
    /// The word for logs and labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::H2 => "h2",
            Self::Memory => "memory",
        }
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.label())
    }
}

/// A reading of a session. The two counters only ever grow: compare two readings.
#[derive(Debug, Clone, Copy)]
pub struct Health {
    /// Authenticated units received (QUIC: frames; h2: bytes inside TLS).
    pub received: u64,
    /// Acknowledgements of ours received (QUIC: ACK frames; h2: answers to PING).
    pub acknowledged: u64,
    /// Smoothed round trip time.
    pub rtt: Duration,
    /// Where the peer is now; it may move on QUIC.
    pub remote: SocketAddr,
    /// Streams open at this moment, both openers', without the control stream: the requests that wait.
    pub streams: usize,
    /// Stream bytes received, without headers.
    pub bytes_in: u64,
    /// Stream bytes sent, without headers.
    pub bytes_out: u64,
}

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{by} closed the session ({code}): {reason}")]
pub struct CloseReason {
    /// Whose doing it was.
    pub by: ClosedBy,
    /// The code; [`CloseCode::Dead`] when nothing was heard for too long.
    pub code: CloseCode,
    /// One line for people.
    pub reason: String,
}

/// Who ended a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClosedBy {
    /// This end.
    Local,
    /// The peer, on purpose.
    Peer,
    /// The network, or the peer without a word.
    Network,
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

/// Why a session cannot do what was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SessionError {
    /// It has ended.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// [`Session::stop_opening`] was called.
    #[error("session no longer opens streams")]
    NotOpening,
    /// The header does not fit.
    #[error("stream header cannot be sent")]
    Header(#[source] Arc<crate::wire::frame::FrameError>),
}

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// It took longer than allowed.
    #[error("handshake did not finish in time")]
    Timeout,
    /// No connection to the server, or to the proxy in front of it.
    #[error("cannot connect")]
    Connect(#[source] std::io::Error),
    /// The server, or somebody on the way, takes no new connection now.
    #[error("server accepts no new connections; retry later")]
    Refused,
    /// TLS or the transport failed; the peer's alert is in the text.
    #[error("handshake failed: {0}")]
    Transport(String),
    /// The server judged this agent's certificate: revoked, or not valid at the server's time.
    #[error("{1}")]
    CertificateRejected(CloseCode, String),
    /// The peer's certificate gives it no role here.
    #[error("peer certificate has no role here")]
    Identity(#[from] crate::identity::IdentityError),
    /// The local socket or configuration does not allow the attempt.
    #[error("cannot start the connection: {0}")]
    Local(String),
}

impl HandshakeError {
    /// What the peer gave as the reason.
    #[must_use]
    pub fn code(&self) -> Option<CloseCode> {
        match self {
            Self::CertificateRejected(code, _) => Some(*code),
            Self::Refused => Some(CloseCode::Overloaded),
            Self::Timeout
            | Self::Connect(_)
            | Self::Transport(_)
            | Self::Identity(_)
            | Self::Local(_) => None,
        }
    }
}

/// A connection whose handshake runs when awaited; to be awaited in a task of its own, never in the accept loop.
pub type Handshake = Pin<Box<dyn Future<Output = Result<Arc<dyn Session>, HandshakeError>> + Send>>;

/// The server's side of a transport.
#[async_trait]
pub trait Acceptor: Send + Sync + 'static {
    /// The next connection and where it comes from, or `None` when the endpoint is closed. Cancel-safe.
    async fn accept(&self) -> Option<(SocketAddr, Handshake)>;
    /// The address really bound.
    fn local_addr(&self) -> std::io::Result<SocketAddr>;
    /// Waits until all closed connections have said so to their peers, at most 1 s.
    async fn wait_idle(&self);
}

/// The agent's side of a transport.
#[async_trait]
pub trait Dialer: Send + Sync + 'static {
    /// Connects to a server. Cancel-safe: dropped early, the attempt is abandoned.
    ///
    /// # Errors
    /// [`HandshakeError`].
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError>;
    /// Which transport this is.
    fn transport(&self) -> TransportKind;
    /// As [`Acceptor::wait_idle`].
    async fn wait_idle(&self);
}
