//! A session over one QUIC connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use quinn::{Connection, ConnectionError, ConnectionStats, VarInt};
use rustls_pki_types::CertificateDer;
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::connection_id::CONNECTION_ID_BYTES;
use super::cuts::{AnnouncedCut, receive_cuts};
use super::delivery::DeliveryClock;
use super::error;
use super::flood_detector::{FLOOD_REASON, FloodDetector, FrameCounts};
use super::receive_clock::{ReceiveClock, SessionSampler, received_frames};
use super::rtt_cache::RttCache;
use super::stateless_reset::ResetTarget;
use super::stream::{QuicStream, StreamSession};
use crate::identity::{IdentityError, PeerIdentity};
use crate::transport::flow::{
    FlowSettings, FlowTransport, ReceiveWindows, SessionFlow, StreamWindow,
};
use crate::transport::{
    CloseReason, HandshakeError, IncomingStream, RawStream, Session, SessionError, SessionSettings,
    SessionStats, Stream, Traffic, TransportKind, encode_header, open_monitor,
};
use crate::wire::code::CloseCode;
use crate::wire::header::StreamHeader;

/// A function that reads the peer's identity from a certificate that the handshake has verified.
pub(super) type Identify = fn(&CertificateDer<'_>) -> Result<PeerIdentity, IdentityError>;

pub(super) struct QuicSession {
    connection: Connection,
    peer: PeerIdentity,
    traffic: Arc<Traffic>,
    flow: Arc<SessionFlow>,
    streams: StreamSession,
    _receiver: AbortOnDropHandle<()>,
    opening: AtomicBool,
    stream_limit: AtomicU32,
    stream_limit_max: AtomicU32,
    receive_clock: Mutex<ReceiveClock>,
    delivery_clock: Arc<DeliveryClock>,
    /// The id of the server's end to which the agent sends.
    connection_id: Option<[u8; CONNECTION_ID_BYTES]>,
    flood_detector: Mutex<FloodDetector>,
    /// Whether the session was closed because of a flood.
    is_flooded: AtomicBool,
    /// Receives the round-trip time when the session ends.
    rtt_cache: Option<RttCache>,
}

tunnel_process::partial_debug!(QuicSession { peer });

fn chain_of(connection: &Connection) -> Vec<CertificateDer<'static>> {
    let any = connection.peer_identity();
    let chain = any.and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
    chain.map(|chain| *chain).unwrap_or_default()
}

/// The transport of the session's flow control.
struct QuicFlow(Connection);

impl FlowTransport for QuicFlow {
    fn set_windows(&self, windows: ReceiveWindows) {
        self.0.set_receive_window(window(windows.connection));
    }

    fn times_blocked(&self) -> Option<u64> {
        Some(self.0.stats().frame_rx.data_blocked)
    }

    fn report_shortage(&self) {
        // A report that is lost, or for which the buffer has no space, is repeated.
        let _best_effort = self.0.send_datagram(Bytes::from_static(SHORTAGE_REPORT));
    }

    fn report_waiting(&self) {
        // As above.
        let _best_effort = self.0.send_datagram(Bytes::from_static(WAITING_REPORT));
    }

    fn congestion_window(&self) -> Option<u64> {
        Some(self.0.stats().path.cwnd)
    }

    fn set_send_window(&self, bytes: u64) {
        self.0.set_send_window(bytes);
    }
}

/// Receives the peer's reports about memory until the session ends. Other datagrams are probes.
async fn receive_reports(connection: Connection, flow: Weak<SessionFlow>) {
    while let Ok(datagram) = connection.read_datagram().await {
        let report: fn(&SessionFlow) = match &*datagram {
            SHORTAGE_REPORT => SessionFlow::set_peer_short,
            WAITING_REPORT => SessionFlow::set_peer_waits,
            _ => continue,
        };
        if let Some(flow) = flow.upgrade() {
            report(&flow);
        }
    }
}

impl QuicSession {
    /// Starts a session on a connection whose peer may open `stream_limit` streams. `sampler` is the
    /// one of the connection's task.
    pub(super) fn start(
        connection: Connection,
        settings: &SessionSettings,
        stream_limit: u32,
        identify: Identify,
        rtt_cache: Option<RttCache>,
        sampler: &SessionSampler,
    ) -> Result<Arc<dyn Session>, HandshakeError> {
        let chain = chain_of(&connection);
        let peer = identify(chain.first().ok_or(IdentityError::NoCertificate)?)?;
        let flow_settings = FlowSettings {
            stream_window: StreamWindow::fixed(settings.stream_window),
            memory_percent: MEMORY_PERCENT,
            peer_opens: stream_limit > 0,
        };
        let flow = settings
            .pool
            .session(flow_settings, QuicFlow(connection.clone()));
        let (received, now) = (received_frames(&connection.stats()), Instant::now());
        let streams = StreamSession {
            connection: connection.clone(),
            announced_cuts: Arc::default(),
            flushing: TaskTracker::new(),
        };
        let receiving_cuts = receive_cuts(connection.clone(), streams.announced_cuts.clone());
        let receiving_reports = receive_reports(connection.clone(), Arc::downgrade(&flow));
        let receiving = async move {
            tokio::join!(receiving_cuts, receiving_reports);
        };
        let session = Arc::new(Self {
            connection,
            peer,
            flow,
            traffic: Arc::default(),
            streams,
            _receiver: AbortOnDropHandle::new(TaskTracker::new().spawn(receiving)),
            opening: AtomicBool::new(true),
            stream_limit: AtomicU32::new(stream_limit),
            stream_limit_max: AtomicU32::new(stream_limit),
            receive_clock: Mutex::new(ReceiveClock::new(received, now)),
            delivery_clock: sampler.delivery_clock().clone(),
            connection_id: sampler.connection_id(),
            flood_detector: Mutex::new(FloodDetector::new(now)),
            is_flooded: AtomicBool::new(false),
            rtt_cache,
        });
        let sampled = Arc::downgrade(&session);
        sampler.start(move |run_at| {
            if let Some(session) = sampled.upgrade() {
                session.sample(run_at);
            }
        });
        Ok(session)
    }

    /// Records what the connection has received up to a run of its task, which was at `run_at`.
    fn sample(&self, run_at: Instant) {
        let connection_stats = self.connection.stats();
        let received = received_frames(&connection_stats);
        self.receive_clock.lock().record(received, run_at);
        let (bytes_in, bytes_out, _) = self.traffic.read();
        let stream_bytes = bytes_in.saturating_add(bytes_out);
        self.close_on_flood(&connection_stats, received, stream_bytes);
    }

    fn remote(&self) -> SocketAddr {
        let remote = self.connection.remote_address();
        SocketAddr::new(remote.ip().to_canonical(), remote.port())
    }

    fn stream(
        &self,
        send: quinn::SendStream,
        recv: quinn::RecvStream,
        announced_cut: Arc<AnnouncedCut>,
    ) -> Box<dyn RawStream> {
        Box::new(QuicStream::new(
            send,
            recv,
            announced_cut,
            self.streams.clone(),
        ))
    }

    /// Closes a session whose peer floods it with frames. The check runs whenever the session's
    /// statistics are read, and while the connection's task runs.
    fn close_on_flood(&self, connection_stats: &ConnectionStats, received: u64, stream_bytes: u64) {
        let rx = &connection_stats.frame_rx;
        let silent = rx.data_blocked + rx.streams_blocked_uni + rx.max_streams_uni;
        let counts = FrameCounts {
            frames: received + silent,
            retired: rx.retire_connection_id,
            received: connection_stats.udp_rx.bytes,
            stream_bytes,
        };
        let mut flood_detector = self.flood_detector.lock();
        if flood_detector.check(counts, Instant::now()) {
            self.is_flooded.store(true, Ordering::Relaxed);
            self.connection
                .close(CloseCode::Protocol.number().into(), FLOOD_REASON.as_bytes());
        }
    }

    fn close_reason(&self, error: ConnectionError) -> CloseReason {
        if error == ConnectionError::LocallyClosed && self.is_flooded.load(Ordering::Relaxed) {
            return CloseReason::local(CloseCode::Protocol, FLOOD_REASON);
        }
        error::close_reason(error)
    }

    /// Raises the number of streams that the peer may open when half of it is in use.
    fn raise_stream_limit(&self) {
        let (_, _, open) = self.traffic.read();
        let (stream_limit, most) = (
            self.stream_limit.load(Ordering::Relaxed),
            self.stream_limit_max.load(Ordering::Relaxed),
        );
        if stream_limit < most && open as u64 * 2 >= u64::from(stream_limit) {
            let raised = stream_limit
                .saturating_mul(2)
                .max(INITIAL_STREAM_LIMIT)
                .min(most);
            self.stream_limit.store(raised, Ordering::Relaxed);
            self.connection.set_max_concurrent_bi_streams(raised.into());
        }
    }
}

#[async_trait]
impl Session for QuicSession {
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError> {
        let buffer = encode_header(&self.opening, header)?;
        let read_monitor = open_monitor(&self.flow, header)?;
        let opened = self.connection.open_bi().await;
        let (send, recv) = opened.map_err(|error| self.close_reason(error))?;
        // From this point on, the call is cancel-safe, because dropping the stream resets it.
        let announced_cut = self.streams.announced_cuts.opened(recv.id());
        let mut stream = Stream::opened(
            self.stream(send, recv, announced_cut),
            self.traffic.clone(),
            read_monitor,
            reply_timeout,
        );
        match stream.write_header(&buffer).await {
            Ok(()) => Ok(stream),
            // A peer that stops a stream in its first bytes has replied or reset it. Reading shows
            // which.
            Err(_stopped) if self.connection.close_reason().is_none() => Ok(stream),
            Err(_lost) => Err(self.closed().await.into()),
        }
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let accepted = self.connection.accept_bi().await;
        let (send, recv) = accepted.map_err(|error| self.close_reason(error))?;
        let announced_cut = self.streams.announced_cuts.accepted(recv.id());
        let incoming = IncomingStream::new(
            self.stream(send, recv, announced_cut),
            self.traffic.clone(),
            self.flow.accept(),
        );
        self.raise_stream_limit();
        Ok(incoming)
    }

    fn probe(&self) {
        // If the datagram buffer is full, probes are already queued. If it is closed, a probe has
        // no use.
        let _best_effort = self.connection.send_datagram(Bytes::from_static(PROBE));
    }

    fn stats(&self) -> SessionStats {
        let connection_stats = self.connection.stats();
        let received = received_frames(&connection_stats);
        let received_at = self
            .receive_clock
            .lock()
            .received_at(received, Instant::now());
        let (bytes_in, bytes_out, streams) = self.traffic.read();
        self.close_on_flood(
            &connection_stats,
            received,
            bytes_in.saturating_add(bytes_out),
        );
        SessionStats {
            received,
            received_at,
            acknowledged: connection_stats.frame_rx.acks,
            undelivered: self.delivery_clock.undelivered(),
            rtt: self.connection.rtt(),
            remote: self.remote(),
            streams,
            bytes_in,
            bytes_out,
        }
    }

    fn stop_opening(&self) {
        self.opening.store(false, Ordering::Relaxed);
    }

    fn set_max_concurrent_streams(&self, count: u32) {
        // quinn announces streams that have become free only when they are more than an eighth of the
        // limit. Without the addition, a peer with seven eighths in use could open no more.
        let limit = count.saturating_add(count / 7 + 1);
        if count > 0 {
            self.flow.set_peer_opens();
        }
        self.stream_limit_max.store(limit, Ordering::Relaxed);
        self.raise_stream_limit();
    }

    fn has_room(&self) -> bool {
        self.flow.has_room()
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        self.stop_opening();
        self.streams.flushing.close();
        // A dead peer acknowledges nothing.
        if code != CloseCode::Dead {
            let _elapsed = tokio::time::timeout(FLUSH_LIMIT, self.streams.flushing.wait()).await;
        }
        self.connection
            .close(code.number().into(), reason.as_bytes());
    }

    async fn closed(&self) -> CloseReason {
        let error = self.connection.closed().await;
        if let Some(rtt_cache) = &self.rtt_cache {
            rtt_cache.insert(self.connection.remote_address(), self.connection.rtt());
        }
        self.close_reason(error)
    }

    fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    fn peer_chain(&self) -> Vec<CertificateDer<'static>> {
        chain_of(&self.connection)
    }

    fn reset_target(&self) -> Option<ResetTarget> {
        self.connection_id.map(|connection_id| ResetTarget {
            remote: self.remote(),
            connection_id,
        })
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Quic
    }
}

pub(super) fn window(bytes: u64) -> VarInt {
    VarInt::from_u64(bytes).unwrap_or(VarInt::MAX)
}

/// The datagram of a probe.
const PROBE: &[u8] = &[0];
/// The datagram that reports a shortage.
const SHORTAGE_REPORT: &[u8] = &[1];
/// The datagram that reports a stream that waits for memory of the other end.
const WAITING_REPORT: &[u8] = &[2];
/// Memory of unread bytes, in percent of their number.
const MEMORY_PERCENT: u64 = 280;
/// Streams that a peer may open at first, if it may open any. quinn uses some 80 bytes for each
/// allowed stream.
pub(super) const INITIAL_STREAM_LIMIT: u32 = 32;
/// Time that `close` waits until the peer has received the sent data, and `wait_idle` until it has
/// received the close frame.
pub(super) const FLUSH_LIMIT: Duration = Duration::from_secs(1);
