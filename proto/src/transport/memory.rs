//! In-process sessions for tests: the semantics of a transport without a network, and faults that a
//! test sets. With a paused clock, hours of outage take milliseconds.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Buf;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::flow::ReadMonitor;
use super::stream::{CutSignal, IncomingStream, RawStream, Stream, StreamCut, Traffic};
use super::{
    CloseReason, ClosedBy, Dialer, HandshakeError, Session, SessionError, SessionStats,
    TransportKind, encode_header,
};
use crate::identity::{PeerIdentity, Role, TrustDomain};
use crate::tcp::ServerAddr;
use crate::wire::code::{CloseCode, ResetCode};
use crate::wire::header::StreamHeader;

/// Bytes that one direction buffers unread before its writer waits.
const WINDOW_BYTES: usize = 256 * 1024;
/// Number of streams that wait for the peer to accept them.
const ACCEPT_BACKLOG: usize = 4096;

/// Returns the ends of a new session between a server and the agent of worker-1: the server's end,
/// then the agent's end.
#[expect(clippy::unwrap_used, reason = "the node name is valid")]
pub fn pair() -> (Arc<MemorySession>, Arc<MemorySession>) {
    let (to_agent, from_server) = mpsc::channel(ACCEPT_BACKLOG);
    let (to_server, from_agent) = mpsc::channel(ACCEPT_BACKLOG);
    let end_of_session = Arc::<SessionEnd>::default();
    let session = |peer_role, outgoing, incoming, end| {
        Arc::new(MemorySession {
            peer: PeerIdentity {
                domain: TrustDomain::Tunnel,
                role: peer_role,
                generation: 0,
                not_before: SystemTime::UNIX_EPOCH,
                not_after: SystemTime::now() + Duration::from_secs(30 * 86400),
            },
            outgoing,
            incoming: AsyncMutex::new(incoming),
            end,
            closed: end_of_session.clone(),
            opening: AtomicBool::new(true),
            probes: AtomicU64::new(0),
            answered: Mutex::new((0, Instant::now())),
            traffic: Arc::default(),
            script: Mutex::default(),
        })
    };
    let agent = Role::Agent("worker-1".parse().unwrap());
    (
        session(agent, to_agent, from_agent, 0),
        session(Role::Server, to_server, from_server, 1),
    )
}

/// Returns a stream whose peer has sent `bytes` and sends nothing more. If `panics` is set, a read
/// beyond `bytes` panics, as a bug would.
pub fn incoming_stream(bytes: &[u8], panics: bool) -> IncomingStream {
    let (stream, peer) = MemoryStream::pair(WINDOW_BYTES, &Arc::default());
    let mut pipe = peer.outbound.lock();
    pipe.bytes.extend(bytes);
    pipe.panics = panics;
    IncomingStream::new(Box::new(stream), Arc::default(), Arc::default())
}

/// The behavior of one end of a session, as a test sets it.
#[derive(Debug, Default)]
pub struct Script {
    /// Whether answers to this end's probes are withheld. They arrive when the silence ends.
    pub is_silent: bool,
    /// Whether stalled readers hold too much, see [`Session::has_room`].
    pub is_full: bool,
    /// Whether what is written to a stream that is opened waits, because its source holds the most of
    /// what the peer is short of.
    pub is_peer_short: bool,
    /// Whether opening a stream panics, as a bug would.
    pub is_panicking: bool,
    /// Whether closing takes one second, as a transport may take to deliver its last data.
    pub is_slow_to_close: bool,
    /// Bytes that each direction of the next opened stream buffers unread. Default 256 KiB.
    pub next_window: Option<usize>,
    /// Transport that the session reports. Default [`TransportKind::Memory`].
    pub transport: Option<TransportKind>,
    /// Round-trip time that the session reports. Default zero, as before the first measurement.
    pub rtt: Duration,
}

/// One end of an in-process session.
#[derive(Debug)]
pub struct MemorySession {
    peer: PeerIdentity,
    outgoing: mpsc::Sender<MemoryStream>,
    incoming: AsyncMutex<mpsc::Receiver<MemoryStream>>,
    end: u8,
    closed: Arc<SessionEnd>,
    opening: AtomicBool,
    probes: AtomicU64,
    /// The number of answered probes, and the time of the last answer.
    answered: Mutex<(u64, Instant)>,
    traffic: Arc<Traffic>,
    script: Mutex<Script>,
}

/// The end that closed a session, and its code and reason.
type Closed = Option<(u8, CloseCode, String)>;

/// The end of a session, which wakes all of its streams.
#[derive(Debug, Default)]
struct SessionEnd {
    closed: watch::Sender<Closed>,
    pipes: Mutex<Vec<Weak<Pipe>>>,
}

impl SessionEnd {
    fn closed(&self) -> Closed {
        self.closed.borrow().clone()
    }

    fn is_closed(&self) -> bool {
        self.closed.borrow().is_some()
    }

    /// Ends the session, unless it has ended.
    fn close(&self, end: u8, code: CloseCode, reason: &str) {
        self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            if first {
                *closed = Some((end, code, reason.to_owned()));
            }
            first
        });
        let pipes = std::mem::take(&mut *self.pipes.lock());
        for pipe in pipes.iter().filter_map(Weak::upgrade) {
            pipe.lock().wake();
        }
    }

    fn add(&self, pipes: [&Arc<Pipe>; 2]) {
        let mut all = self.pipes.lock();
        all.retain(|pipe| pipe.strong_count() > 0);
        all.extend(pipes.map(Arc::downgrade));
    }
}

impl MemorySession {
    /// Returns the behavior of this end, for a test to change.
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    /// Returns the number of probes that the peer has answered, and the time of the last answer.
    fn answered(&self) -> (u64, Instant) {
        let is_silent = self.script().is_silent;
        let probes = self.probes.load(Ordering::Relaxed);
        let mut answered = self.answered.lock();
        if !is_silent && answered.0 != probes {
            *answered = (probes, Instant::now());
        }
        *answered
    }

    fn reason(&self, (end, code, reason): (u8, CloseCode, String)) -> CloseReason {
        let by = if end == self.end {
            ClosedBy::Local
        } else {
            ClosedBy::Peer
        };
        CloseReason { by, code, reason }
    }
}

#[async_trait]
impl Session for MemorySession {
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError> {
        assert!(!self.script().is_panicking, "as a bug would");
        let buffer = encode_header(&self.opening, header)?;
        if let Some(closed) = self.closed.closed() {
            return Err(self.reason(closed).into());
        }
        let window = self.script().next_window.take().unwrap_or(WINDOW_BYTES);
        let (ours, theirs) = MemoryStream::pair(window, &self.closed);
        if self.outgoing.send(theirs).await.is_err() {
            return Err(self.closed().await.into());
        }
        let read_monitor = Arc::<ReadMonitor>::default();
        if self.script().is_peer_short {
            read_monitor.hold();
        }
        let mut stream = Stream::opened(
            Box::new(ours),
            self.traffic.clone(),
            read_monitor,
            reply_timeout,
        );
        // A window that is narrower than the header is read by the peer in the meantime. The
        // stream's reader receives the error of a cut.
        let _cut = stream.write_header(&buffer).await;
        Ok(stream)
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let mut incoming = self.incoming.lock().await;
        tokio::select! {
            stream = incoming.recv() => match stream {
                Some(stream) => Ok(IncomingStream::new(Box::new(stream), self.traffic.clone(), Arc::default())),
                None => Err(self.closed().await.into()),
            },
            reason = self.closed() => Err(reason.into()),
        }
    }

    fn probe(&self) {
        self.probes.fetch_add(1, Ordering::Relaxed);
        self.answered();
    }

    fn stats(&self) -> SessionStats {
        let (bytes_in, bytes_out, streams) = self.traffic.read();
        let (answered, received_at) = self.answered();
        SessionStats {
            received: answered,
            received_at,
            acknowledged: answered,
            undelivered: None,
            rtt: self.script().rtt,
            remote: SocketAddr::from(([127, 0, 0, 1], 0)),
            streams,
            bytes_in,
            bytes_out,
        }
    }

    fn stop_opening(&self) {
        self.opening.store(false, Ordering::Relaxed);
    }

    /// Does nothing. In-process sessions have no limit.
    fn set_max_concurrent_streams(&self, _count: u32) {}

    fn has_room(&self) -> bool {
        !self.script().is_full
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        let is_slow = self.script().is_slow_to_close;
        if is_slow {
            sleep(Duration::from_secs(1)).await;
        }
        self.closed.close(self.end, code, reason);
    }

    async fn closed(&self) -> CloseReason {
        let mut watch = self.closed.closed.subscribe();
        let ended = watch
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|reason| reason.clone());
        self.reason(ended.unwrap_or_else(|| (2, CloseCode::Dead, "gone".into())))
    }

    fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    fn transport(&self) -> TransportKind {
        self.script().transport.unwrap_or(TransportKind::Memory)
    }
}

/// The outcome of dials of a [`MemoryDialer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// The server answers at once.
    Open,
    /// The server answers after this time.
    Slow(Duration),
    /// No answer arrives. Packets are repeated after 1, 3 and 7 s at the latest, so a path that
    /// opens is found.
    Silent,
    /// The peer answers "Connection refused".
    Refused,
    /// The peer answers with a TLS alert.
    Alert,
}

/// A transport whose dials end as the test specifies.
#[derive(Debug)]
pub struct MemoryDialer {
    transport: TransportKind,
    path: Mutex<Path>,
    dials: Mutex<Vec<Instant>>,
    connections: mpsc::Sender<MemoryConnection>,
}

/// A connection of a [`MemoryDialer`].
#[derive(Debug)]
pub struct MemoryConnection {
    /// Name that the agent dialed.
    pub name: String,
    /// Server's end of the session.
    pub server: Arc<MemorySession>,
    /// Agent's end of the session, which the dial returned.
    pub agent: Arc<MemorySession>,
}

impl MemoryDialer {
    /// Creates a dialer that reports to be `transport`, and whose path is open.
    pub fn new(transport: TransportKind, connections: mpsc::Sender<MemoryConnection>) -> Arc<Self> {
        Arc::new(Self {
            transport,
            path: Mutex::new(Path::Open),
            dials: Mutex::default(),
            connections,
        })
    }

    /// Sets the outcome of dials, also of those that are running.
    pub fn set(&self, path: Path) {
        *self.path.lock() = path;
    }

    /// Returns and clears the times of the dials.
    pub fn dials(&self) -> Vec<Instant> {
        std::mem::take(&mut *self.dials.lock())
    }
}

#[async_trait]
impl Dialer for MemoryDialer {
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let began = Instant::now();
        self.dials.lock().push(began);
        for repeat in [0, 1, 3, 7, 15, 31, 63] {
            sleep_until(began + Duration::from_secs(repeat)).await;
            let path = *self.path.lock();
            match path {
                Path::Silent => continue,
                Path::Open => {}
                Path::Slow(delay) => sleep(delay).await,
                Path::Refused => {
                    let refused = io::ErrorKind::ConnectionRefused.into();
                    return Err(HandshakeError::Connect(refused));
                }
                Path::Alert => {
                    let text = "received fatal alert: CertificateRevoked".to_owned();
                    return Err(HandshakeError::Transport(text));
                }
            }
            let (server, agent) = pair();
            agent.script().transport = Some(self.transport);
            let connection = MemoryConnection {
                name: remote.name.clone(),
                server,
                agent: agent.clone(),
            };
            let _test_has_ended = self.connections.send(connection).await;
            return Ok(agent);
        }
        Err(HandshakeError::Timeout)
    }

    fn transport(&self) -> TransportKind {
        self.transport
    }

    async fn wait_idle(&self) {}
}

/// One direction of a stream.
#[derive(Debug, Default)]
struct Pipe(Mutex<PipeState>);

#[derive(Debug, Default)]
struct PipeState {
    bytes: VecDeque<u8>,
    finished: bool,
    drained: bool,
    reset: Option<ResetCode>,
    stopped: Option<ResetCode>,
    /// Whether a read beyond `bytes` panics.
    panics: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, PipeState> {
        self.0.lock()
    }
}

impl PipeState {
    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()]
            .into_iter()
            .flatten()
        {
            waker.wake();
        }
    }
}

#[derive(Debug)]
struct MemoryStream {
    inbound: Arc<Pipe>,
    outbound: Arc<Pipe>,
    window: usize,
    closed: Arc<SessionEnd>,
}

impl MemoryStream {
    /// Returns the two ends of a stream that buffers `window` bytes in each direction.
    fn pair(window: usize, closed: &Arc<SessionEnd>) -> (Self, Self) {
        let (there, back) = (Arc::<Pipe>::default(), Arc::<Pipe>::default());
        closed.add([&there, &back]);
        let end = |inbound: &Arc<Pipe>, outbound: &Arc<Pipe>| Self {
            inbound: inbound.clone(),
            outbound: outbound.clone(),
            window,
            closed: closed.clone(),
        };
        (end(&back, &there), end(&there, &back))
    }
}

impl RawStream for MemoryStream {
    fn cut_now(&mut self, code: ResetCode) {
        let mut outbound = self.outbound.lock();
        if !outbound.drained {
            outbound.reset.get_or_insert(code);
            outbound.bytes.clear();
        }
        outbound.wake();
        drop(outbound);
        self.stop(code);
    }

    fn cut_behind(&mut self, code: ResetCode) {
        let mut outbound = self.outbound.lock();
        if !outbound.finished {
            outbound.reset.get_or_insert(code);
        }
        outbound.wake();
        drop(outbound);
        self.stop(code);
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut pipe = self.inbound.lock();
        if let Some(code) = pipe.reset {
            return Poll::Ready(StreamCut::Reset(code).into());
        }
        if self.closed.is_closed() && !pipe.finished {
            return Poll::Ready(StreamCut::SessionLost.into());
        }
        pipe.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut pipe = self.outbound.lock();
        if let Some(code) = pipe.stopped {
            return Poll::Ready(StreamCut::Stopped(code).into());
        }
        if self.closed.is_closed() && !pipe.finished {
            return Poll::Ready(StreamCut::SessionLost.into());
        }
        pipe.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    fn cut_signal(&self) -> Arc<dyn CutSignal> {
        Arc::new(MemoryCutSignal(self.inbound.clone(), self.closed.clone()))
    }

    fn stop(&mut self, code: ResetCode) {
        let mut inbound = self.inbound.lock();
        if !inbound.drained {
            inbound.stopped.get_or_insert(code);
        }
        inbound.wake();
    }
}

#[derive(Debug)]
struct MemoryCutSignal(Arc<Pipe>, Arc<SessionEnd>);

impl CutSignal for MemoryCutSignal {
    fn is_cut(&self) -> bool {
        let pipe = self.0.lock();
        pipe.reset.is_some() || (!pipe.finished && self.1.is_closed())
    }
}

impl AsyncRead for MemoryStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.inbound.lock();
        if pipe.bytes.is_empty() {
            if let Some(code) = pipe.reset {
                return Poll::Ready(Err(StreamCut::Reset(code).into()));
            }
            if pipe.finished {
                pipe.drained = true;
                pipe.wake();
                return Poll::Ready(Ok(()));
            }
            if self.closed.is_closed() {
                return Poll::Ready(Err(StreamCut::SessionLost.into()));
            }
            assert!(!pipe.panics, "as a bug would");
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let (front, _) = pipe.bytes.as_slices();
        let count = front.len().min(out.remaining());
        out.put_slice(&front[..count]);
        pipe.bytes.advance(count);
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MemoryStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut pipe = self.outbound.lock();
        if let Some(code) = pipe.stopped {
            return Poll::Ready(Err(StreamCut::Stopped(code).into()));
        }
        if self.closed.is_closed() {
            return Poll::Ready(Err(StreamCut::SessionLost.into()));
        }
        if pipe.finished || pipe.reset.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = data.len().min(self.window.saturating_sub(pipe.bytes.len()));
        if count == 0 && !data.is_empty() {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        pipe.bytes.extend(&data[..count]);
        pipe.wake();
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = self.outbound.lock();
        if let Some(code) = pipe.stopped.filter(|_| !pipe.drained) {
            return Poll::Ready(Err(StreamCut::Stopped(code).into()));
        }
        pipe.finished = true;
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}
