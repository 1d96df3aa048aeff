//! Scripted in-memory transports to a scripted server.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::transport::memory::{MemoryConnection, MemoryDialer, Path};
use tunnel_proto::transport::{CloseReason, Session, Stream, TransportKind};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Hello, Welcome};
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{Port, SessionId};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN};

/// Longer than any wait in a test, on the paused clock.
pub(crate) const AGES: Duration = Duration::from_secs(3600 * 24);

/// A server and the two transports to it.
pub(crate) struct FakeNetwork {
    pub(crate) quic: Arc<MemoryDialer>,
    pub(crate) h2: Arc<MemoryDialer>,
    connections: mpsc::Receiver<MemoryConnection>,
}

impl FakeNetwork {
    pub(crate) fn new() -> Self {
        let (sender, connections) = mpsc::channel(64);
        Self {
            quic: MemoryDialer::new(TransportKind::Quic, sender.clone()),
            h2: MemoryDialer::new(TransportKind::H2, sender),
            connections,
        }
    }

    /// Sets the outcome of dials over both transports.
    pub(crate) fn set(&self, path: Path) {
        self.quic.set(path);
        self.h2.set(path);
    }

    /// Returns the agent's next connection after its handshake.
    pub(crate) async fn arrival(&mut self) -> MemoryConnection {
        let received = timeout(AGES, self.connections.recv()).await;
        received.unwrap().unwrap()
    }

    /// Returns the agent's next connection after its admission.
    pub(crate) async fn peer(&mut self) -> Peer {
        Peer::admit(self.arrival().await).await
    }

    /// Returns whether no connection arrived that the test has not received.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.connections.try_recv().is_err()
    }
}

/// An admitted agent's connection, and the server's end of its control stream.
pub(crate) struct Peer {
    pub(crate) connection: MemoryConnection,
    reader: ControlReader,
    /// Keeps the control stream open.
    _writer: ControlWriter,
}

impl Peer {
    pub(crate) async fn admit(connection: MemoryConnection) -> Self {
        Self::admit_with(connection, welcome()).await
    }

    pub(crate) async fn admit_with(connection: MemoryConnection, welcome: Welcome) -> Self {
        let (reader, writer) = admit(&*connection.server, welcome).await;
        Self {
            connection,
            reader,
            _writer: writer,
        }
    }

    /// Returns the agent's next message, or `None` after the last one.
    pub(crate) async fn recv_control(&mut self) -> Option<ControlMessage> {
        timeout(AGES, self.reader.receive()).await.unwrap().unwrap()
    }

    /// Expects that the agent's next message says whether the server is suspect.
    pub(crate) async fn expect_suspect(&mut self, suspect: bool) {
        let expected = ControlMessage::Suspect(suspect);
        assert_eq!(self.recv_control().await, Some(expected));
    }

    pub(crate) async fn close(&self, code: CloseCode) {
        self.connection.server.close(code, "of the test").await;
    }

    pub(crate) async fn closed(&self) -> CloseReason {
        timeout(AGES, self.connection.server.closed())
            .await
            .unwrap()
    }
}

/// Opens the control stream and reads the Hello.
pub(crate) async fn hello(session: &dyn Session) -> (Hello, ControlReader, ControlWriter) {
    let kind = StreamKind::Control {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
    };
    let stream = session.open(&StreamHeader::new(kind), AGES).await;
    let (mut reader, writer) = control::split(stream.unwrap());
    match reader.receive().await.unwrap() {
        Some(ControlMessage::Hello(hello)) => (*hello, reader, writer),
        other => panic!("no Hello: {other:?}"),
    }
}

/// Runs the server's end of a session up to `welcome`.
pub(crate) async fn admit(
    session: &dyn Session,
    welcome: Welcome,
) -> (ControlReader, ControlWriter) {
    let (_, reader, mut writer) = hello(session).await;
    let welcome = ControlMessage::Welcome(welcome);
    writer.send(&welcome).await.unwrap();
    (reader, writer)
}

pub(crate) fn welcome() -> Welcome {
    Welcome {
        version: 1,
        session: SessionId(1),
        capabilities: vec![],
        streams_per_agent: 64,
        target_dial_timeout: AGES,
        replica_id: "server-1".parse().unwrap(),
        members: vec![],
    }
}

/// A stream that the agent serves, and the target's end of it.
pub(crate) struct Busy {
    pub(crate) stream: Stream,
    pub(crate) socket: TcpStream,
}

impl Busy {
    pub(crate) async fn on(session: &dyn Session) -> Self {
        let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = Port::new(target.local_addr().unwrap().port()).unwrap();
        let header = StreamHeader::new(StreamKind::Target(Target::Node(port)));
        let mut stream = session.open(&header, AGES).await.unwrap();
        let (socket, _) = target.accept().await.unwrap();
        stream.accepted().await.unwrap();
        Self { stream, socket }
    }

    /// Ends the target's answer, which arrives complete.
    pub(crate) async fn finish(mut self) {
        self.socket.write_all(&[7; 100_000]).await.unwrap();
        self.socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        self.stream.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer.len(), 100_000);
        self.stream.shutdown().await.unwrap();
    }
}
