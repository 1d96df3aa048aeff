//! What both ends of a connection between servers share: the first messages, the queue of messages
//! to send, and the handle over which streams are opened.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::{sleep, timeout};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::session::control::{self, PeerReader, PeerWriter};
use tunnel_proto::transport::{HandshakeError, Session, SessionError, Stream};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::negotiate_version;
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_proto::wire::peer::{PeerHello, PeerMessage};
use tunnel_routing::directory::LinkState;

use super::monitor::LinkCheck;

/// Limits the log lines about servers that violate the protocol.
pub(super) static VIOLATIONS: LogRateLimit = LogRateLimit::new("violations by other servers");

/// A connection that this server has dialed and over which it opens streams.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) replica: ReplicaId,
    pub(super) session: Arc<dyn Session>,
    /// Permits for open streams (`limits.peerStreams`).
    permits: Arc<Semaphore>,
    permits_max: usize,
    pub(super) asks: mpsc::Sender<PendingAsk>,
    is_suspect: watch::Sender<bool>,
}

/// A question for the other server: does it hold this node with a session that answers?
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub(super) node: NodeName,
    /// This server's agent process. The question is about other processes.
    pub(super) instance: InstanceId,
    /// Whether this server has admitted that process.
    pub(super) is_admitted: bool,
}

/// A question that waits for its answer.
#[derive(Debug)]
pub(super) enum PendingAsk {
    Holds {
        question: Question,
        answer: oneshot::Sender<bool>,
    },
    /// Which certificates have the agents that the other server knows?
    Certificates(oneshot::Sender<Result<Vec<NodeCertificate>, FetchError>>),
}

/// The reason why it is not known which certificates another server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    #[error("no answer in time")]
    NoAnswer,
    /// An answer that is not complete is not used.
    #[error("more nodes than limits.directoryNodes")]
    TooManyNodes,
}

impl Link {
    /// Creates the handle of a connection, and the receiver of the questions to send over it.
    pub(super) fn new(
        replica: ReplicaId,
        session: Arc<dyn Session>,
        streams: usize,
    ) -> (Arc<Self>, mpsc::Receiver<PendingAsk>) {
        let (asks, pending) = mpsc::channel(QUEUE_MESSAGES);
        let permits_max = streams.min(Semaphore::MAX_PERMITS);
        let link = Self {
            replica,
            session,
            permits: Arc::new(Semaphore::new(permits_max)),
            permits_max,
            asks,
            is_suspect: watch::Sender::new(false),
        };
        (Arc::new(link), pending)
    }

    /// Returns whether the server answers. New streams prefer connections that are live.
    pub(super) fn state(&self) -> LinkState {
        if *self.is_suspect.borrow() {
            LinkState::Suspect
        } else {
            LinkState::Live
        }
    }

    /// Records the result of a check of the connection.
    pub(super) fn record_check(&self, check: LinkCheck) {
        let is_suspect = match check {
            LinkCheck::Live | LinkCheck::Probe => false,
            LinkCheck::Suspect | LinkCheck::Dead => true,
        };
        self.is_suspect
            .send_if_modified(|recorded| std::mem::replace(recorded, is_suspect) != is_suspect);
    }

    /// Waits until the server does not answer.
    ///
    /// Cancel-safe.
    pub(super) async fn suspected(&self) {
        let mut receiver = self.is_suspect.subscribe();
        // The sender lives as long as this link.
        let _is_suspect = receiver.wait_for(|is_suspect| *is_suspect).await;
    }

    pub(super) fn has_permit(&self) -> bool {
        self.permits.available_permits() > 0
    }

    /// Returns whether at most a quarter of the streams are open.
    pub(super) fn has_spare(&self) -> bool {
        self.permits.available_permits() >= self.permits_max - self.permits_max / 4
    }

    /// Acquires the permit of one more stream.
    pub(super) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        self.permits.clone().try_acquire_owned().ok()
    }

    /// Asks whether the server holds a node with another agent process, which answers and keeps the
    /// name. If not, the server gives up the node. Returns `None` without an answer.
    pub(super) async fn ask(&self, question: Question) -> Option<bool> {
        let (answer, answered) = oneshot::channel();
        let ask = PendingAsk::Holds { question, answer };
        // With a full queue the server is not asked: its answers take too long anyway.
        self.asks.try_send(ask).ok()?;
        timeout(ASK_TIMEOUT, answered).await.ok()?.ok()
    }
}

/// Reason why a connection to another server was not established, or has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("TLS handshake failed: {0}")]
    Tls(io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("no connection within limits.handshakeTimeout")]
    Timeout,
    #[error("control stream failed: {0}")]
    Control(#[from] io::Error),
    #[error("{1}")]
    Refused(CloseCode, String),
}

impl LinkError {
    /// Returns the code with which this end closes the session.
    pub(super) fn code(&self) -> CloseCode {
        match self {
            Self::Refused(code, _) => *code,
            Self::Timeout => CloseCode::HandshakeTimeout,
            Self::Connect(_)
            | Self::Tls(_)
            | Self::Handshake(_)
            | Self::Session(_)
            | Self::Control(_) => CloseCode::Protocol,
        }
    }

    /// Returns whether the other server sent what it must not send.
    pub(super) fn is_violation(&self) -> bool {
        match self {
            Self::Refused(code, _) => *code == CloseCode::Protocol,
            Self::Control(error) => error.kind() == io::ErrorKind::InvalidData,
            Self::Connect(_)
            | Self::Tls(_)
            | Self::Handshake(_)
            | Self::Session(_)
            | Self::Timeout => false,
        }
    }

    /// Returns the reason of a connection that ends with this process.
    pub(super) fn stopping() -> Self {
        Self::Refused(CloseCode::Draining, "server is stopping".to_owned())
    }

    pub(super) fn protocol(detail: &str) -> Self {
        Self::Refused(CloseCode::Protocol, detail.to_owned())
    }
}

/// The control stream of a connection after both ends have sent their first message.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) reader: PeerReader,
    pub(super) writer: PeerWriter,
    pub(super) hello: PeerHello,
}

/// Sends this server's first message and receives that of `replica`, the name in the other server's
/// certificate.
pub(super) async fn exchange_hello(
    stream: Stream,
    own: PeerHello,
    replica: &ReplicaId,
) -> Result<Control, LinkError> {
    let (mut reader, mut writer) = control::split(stream);
    writer.send(&PeerMessage::Hello(own)).await?;
    let Some(PeerMessage::Hello(hello)) = reader.receive().await? else {
        return Err(LinkError::protocol("the first message is not PeerHello"));
    };
    if hello.replica != *replica {
        let detail = format!(
            "server claims to be {}, its certificate is for {replica}",
            hello.replica
        );
        return Err(LinkError::protocol(&detail));
    }
    let (min, max) = hello.versions;
    if negotiate_version(min, max).is_none() {
        let detail =
            format!("server speaks protocol versions {min} to {max}; upgrade the older one");
        return Err(LinkError::Refused(CloseCode::Version, detail));
    }
    Ok(Control {
        reader,
        writer,
        hello,
    })
}

/// Creates the queue of a connection's messages, and the future that sends them. The future ends
/// with the error of a message that cannot be sent, or when the last sender is dropped.
pub(super) fn outbox(
    writer: PeerWriter,
) -> (
    mpsc::Sender<PeerMessage>,
    impl Future<Output = io::Result<()>>,
) {
    let (sender, queue) = mpsc::channel(QUEUE_MESSAGES);
    (sender, send_all(writer, queue))
}

async fn send_all(
    mut writer: PeerWriter,
    mut queue: mpsc::Receiver<PeerMessage>,
) -> io::Result<()> {
    while let Some(message) = queue.recv().await {
        writer.send(&message).await?;
    }
    writer.finish().await
}

/// Waits until a connection that was replaced has had no streams for a moment, at most
/// [`RUN_OUT_MAX`].
pub(super) async fn run_out(session: &dyn Session) {
    let polling = async {
        let mut was_idle = false;
        loop {
            let is_idle = session.stats().streams == 0;
            if is_idle && was_idle {
                return;
            }
            was_idle = is_idle;
            sleep(RUN_OUT_POLL).await;
        }
    };
    let _elapsed = timeout(RUN_OUT_MAX, polling).await;
}

/// Messages that wait to be sent on one connection, and questions that wait for a message.
const QUEUE_MESSAGES: usize = 256;
/// Time for the answer to a question. The other server probes its session for about as long.
const ASK_TIMEOUT: Duration = Duration::from_millis(1500);
/// Time after which the streams of a connection that was replaced are cut. Followed logs and
/// terminals must not keep it forever.
const RUN_OUT_MAX: Duration = Duration::from_secs(300);
/// Interval at which the streams of a connection that was replaced are counted. A stream that was
/// about to be opened when the connection was replaced is open at the next count.
const RUN_OUT_POLL: Duration = Duration::from_secs(1);
