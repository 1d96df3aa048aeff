//! Scripted in-memory transports to a scripted server.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::transport::memory::{MemoryConnection, MemoryDialer, MemorySession};
use tunnel_proto::transport::{CloseReason, Session, Stream, TransportKind};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Welcome};
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{Port, SessionId};

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

    /// Returns the agent's next connection after its handshake.
    pub(crate) async fn arrival(&mut self) -> Arrival {
        let received = timeout(AGES, self.connections.recv()).await;
        let connection = received.unwrap().unwrap();
        Arrival {
            transport: connection.agent.transport(),
            name: connection.name,
            session: connection.server,
            agent_session: connection.agent,
        }
    }

    /// Returns the agent's next connection after its admission.
    pub(crate) async fn peer(&mut self) -> Peer {
        self.arrival().await.welcome().await
    }

    /// Returns whether no connection arrived that the test has not received.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.connections.try_recv().is_err()
    }
}

/// The server's end of a connection.
pub(crate) struct Arrival {
    pub(crate) transport: TransportKind,
    /// Name that the agent dialed.
    pub(crate) name: String,
    pub(crate) session: Arc<dyn Session>,
    /// Agent's end of the connection.
    pub(crate) agent_session: Arc<MemorySession>,
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
            agent_session: self.agent_session,
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
    /// Agent's end of the connection.
    pub(crate) agent_session: Arc<MemorySession>,
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
