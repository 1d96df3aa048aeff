//! Scripted in-memory transports to a scripted server. With a paused clock, hours of outage take
//! milliseconds.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tunnel_proto::identity::PeerIdentity;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::transport::{
    CloseReason, Dialer, HandshakeError, Health, IncomingStream, RawStream, Session, SessionError,
    Stream, TransportKind,
};
use tunnel_proto::wire::code::{CloseCode, ResetCode};
use tunnel_proto::wire::control::{ControlMessage, Welcome};
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{Port, SessionId};

use super::sessions;

/// Longer than any wait in a test, on the paused clock.
pub(crate) const AGES: Duration = Duration::from_secs(3600 * 24);

/// The outcome of dials over a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
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
pub(crate) struct FakeDialer {
    kind: TransportKind,
    path: watch::Sender<Path>,
    dials: Mutex<Vec<Instant>>,
    arrivals: mpsc::Sender<Arrival>,
}

impl FakeDialer {
    fn new(kind: TransportKind, arrivals: mpsc::Sender<Arrival>) -> Arc<Self> {
        Arc::new(Self {
            kind,
            path: watch::Sender::new(Path::Open),
            dials: Mutex::default(),
            arrivals,
        })
    }

    pub(crate) fn set(&self, path: Path) {
        self.path.send_replace(path);
    }

    /// Returns and clears the times of the dials.
    pub(crate) fn dials(&self) -> Vec<Instant> {
        std::mem::take(&mut *self.dials.lock())
    }
}

#[async_trait]
impl Dialer for FakeDialer {
    async fn dial(&self, remote: &ServerAddr) -> Result<Arc<dyn Session>, HandshakeError> {
        let began = Instant::now();
        self.dials.lock().push(began);
        for repeat in [0, 1, 3, 7, 15, 31, 63] {
            sleep_until(began + Duration::from_secs(repeat)).await;
            let path = *self.path.borrow();
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
            let (server, agent) = sessions();
            let fake_session = FakeSession::new(self.kind, agent);
            let arrival = Arrival {
                transport: self.kind,
                name: remote.name.clone(),
                session: server,
                fake_session: fake_session.clone(),
            };
            self.arrivals.send(arrival).await.unwrap();
            return Ok(fake_session);
        }
        Err(HandshakeError::Timeout)
    }

    fn transport(&self) -> TransportKind {
        self.kind
    }

    async fn wait_idle(&self) {}
}

/// A server and the two transports to it.
pub(crate) struct FakeNetwork {
    pub(crate) quic: Arc<FakeDialer>,
    pub(crate) h2: Arc<FakeDialer>,
    arrivals: mpsc::Receiver<Arrival>,
}

impl FakeNetwork {
    pub(crate) fn new() -> Self {
        let (sender, arrivals) = mpsc::channel(64);
        Self {
            quic: FakeDialer::new(TransportKind::Quic, sender.clone()),
            h2: FakeDialer::new(TransportKind::H2, sender),
            arrivals,
        }
    }

    /// Returns the agent's next connection after its handshake.
    pub(crate) async fn arrival(&mut self) -> Arrival {
        timeout(AGES, self.arrivals.recv()).await.unwrap().unwrap()
    }

    /// Returns the agent's next connection after its admission.
    pub(crate) async fn peer(&mut self) -> Peer {
        self.arrival().await.welcome().await
    }

    /// Returns whether no connection arrived that the test has not received.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.arrivals.try_recv().is_err()
    }
}

/// The server's end of a connection.
pub(crate) struct Arrival {
    pub(crate) transport: TransportKind,
    /// Name that the agent dialed.
    pub(crate) name: String,
    pub(crate) session: Arc<dyn Session>,
    pub(crate) fake_session: Arc<FakeSession>,
}

impl Arrival {
    /// Opens the control stream and reads the Hello.
    pub(crate) async fn hello(&self) -> (ControlReader, ControlWriter) {
        let kind = StreamKind::Control {
            version_min: 1,
            version_max: 1,
        };
        let stream = self.session.open(&StreamHeader::new(kind), AGES).await;
        let (mut reader, writer) = control::split(stream.unwrap());
        let hello = reader.receive().await.unwrap();
        assert!(matches!(hello, Some(ControlMessage::Hello(_))), "{hello:?}");
        (reader, writer)
    }

    pub(crate) async fn welcome(self) -> Peer {
        let (reader, mut writer) = self.hello().await;
        let welcome = ControlMessage::Welcome(Welcome {
            version: 1,
            session: SessionId(1),
            capabilities: vec![],
            streams_per_agent: 64,
            replicas: vec![],
            target_dial_timeout: AGES,
        });
        writer.send(&welcome).await.unwrap();
        Peer {
            transport: self.transport,
            session: self.session,
            fake_session: self.fake_session,
            reader,
            writer,
        }
    }

    pub(crate) async fn reject(self, code: CloseCode) {
        let (mut reader, mut writer) = self.hello().await;
        let message = ControlMessage::NotAdmitted(code, "not now".into());
        writer.send(&message).await.unwrap();
        while let Ok(Some(_)) = reader.receive().await {}
    }
}

/// The server's end of an admitted session.
pub(crate) struct Peer {
    pub(crate) transport: TransportKind,
    pub(crate) session: Arc<dyn Session>,
    pub(crate) fake_session: Arc<FakeSession>,
    pub(crate) reader: ControlReader,
    writer: ControlWriter,
}

impl Peer {
    pub(crate) async fn open(&self, port: Port) -> Stream {
        let kind = StreamKind::Target(Target::Node(port));
        let opened = self.session.open(&StreamHeader::new(kind), AGES).await;
        opened.unwrap()
    }

    /// Returns the agent's next message, or `None` after the last one.
    pub(crate) async fn recv_control(&mut self) -> Option<ControlMessage> {
        timeout(AGES, self.reader.receive()).await.unwrap().unwrap()
    }

    /// Sends that the server receives nothing from the agent.
    pub(crate) async fn doubts(&mut self) {
        let message = ControlMessage::Suspect(true);
        self.writer.send(&message).await.unwrap();
    }

    /// Sends that the server is stopping.
    pub(crate) async fn send_drain(&mut self) {
        let message = ControlMessage::Drain(Duration::from_secs(30));
        self.writer.send(&message).await.unwrap();
    }

    pub(crate) async fn closed(&self) -> CloseReason {
        timeout(AGES, self.session.closed()).await.unwrap()
    }
}

/// The agent's end of a session whose path can be cut. A cut looks as if the server sent nothing.
#[derive(Debug)]
pub(crate) struct FakeSession {
    kind: TransportKind,
    session: Arc<dyn Session>,
    cut: AtomicBool,
    last: Mutex<Health>,
    offered: Mutex<Option<DuplexStream>>,
}

impl FakeSession {
    pub(crate) fn new(kind: TransportKind, session: Arc<dyn Session>) -> Arc<Self> {
        Arc::new(Self {
            kind,
            cut: AtomicBool::new(false),
            last: Mutex::new(session.health()),
            offered: Mutex::default(),
            session,
        })
    }

    /// Sets the next stream that the agent accepts.
    pub(crate) fn offer(&self, stream: DuplexStream) {
        *self.offered.lock() = Some(stream);
    }

    pub(crate) fn cut(&self, cut: bool) {
        self.health();
        self.cut.store(cut, Ordering::Relaxed);
    }
}

#[async_trait]
impl Session for FakeSession {
    async fn open(&self, header: &StreamHeader, within: Duration) -> Result<Stream, SessionError> {
        self.session.open(header, within).await
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let offered = self.offered.lock().take();
        if let Some(stream) = offered {
            let raw = Box::new(DuplexRawStream(stream));
            return Ok(IncomingStream::new(raw, Arc::default(), Arc::default()));
        }
        self.session.accept().await
    }

    fn probe(&self) {
        self.session.probe();
    }

    fn health(&self) -> Health {
        let now = self.session.health();
        let mut last = self.last.lock();
        let received = if self.cut.load(Ordering::Relaxed) {
            *last
        } else {
            now
        };
        *last = Health {
            received: received.received,
            acknowledged: received.acknowledged,
            ..now
        };
        *last
    }

    fn stop_opening(&self) {
        self.session.stop_opening();
    }

    fn set_max_concurrent_streams(&self, count: u32) {
        self.session.set_max_concurrent_streams(count);
    }

    fn has_room(&self) -> bool {
        self.session.has_room()
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        self.session.close(code, reason).await;
    }

    async fn closed(&self) -> CloseReason {
        self.session.closed().await
    }

    fn peer(&self) -> &PeerIdentity {
        self.session.peer()
    }

    fn transport(&self) -> TransportKind {
        self.kind
    }
}

/// A stream without a transport. Only a test that fills the stream needs one.
struct DuplexRawStream(DuplexStream);

impl RawStream for DuplexRawStream {
    fn reset(&mut self, _code: ResetCode) {}
    fn stop(&mut self, _code: ResetCode) {}
}

impl AsyncRead for DuplexRawStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, out)
    }
}

impl AsyncWrite for DuplexRawStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
