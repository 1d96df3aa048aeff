//! Connects local sockets to targets of the cloud. One task per connection opens a stream over a
//! live session and relays.
//!
//! No byte of a connection is sent before the server has accepted the stream. A stream that a
//! server refuses because it stops, or whose session is lost or becomes suspect before that, is opened
//! over another session. A connection without a stream is reset at once: its client dials again.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;
use tunnel_process::conn_limiter::{ConnLimiter, ConnLimits, LimitReached, source};
use tunnel_process::telemetry::{LineForm, StreamLines, StreamStage};
use tunnel_proto::egress::{SocketPeer, TargetSocket, relay_socket_until};
use tunnel_proto::open_record::{OpenRecord, RecordSinks};
use tunnel_proto::stream_record::{RecordedPeer, StreamEnd, StreamRecord};
use tunnel_proto::transport::{ByteCount, source_number};
use tunnel_proto::wire::code::{RefusalCode, ResetCode};
use tunnel_proto::wire::header::{AuditId, StreamHeader, StreamKind};
use tunnel_proto::wire::name::{CloudTarget, NodeName, SessionId};

use crate::config::{Limit, Limits};
use crate::loop_detection::LoopDetector;
use crate::metrics::Metrics;

pub(crate) mod listeners;
pub(crate) mod sessions;
#[cfg(test)]
mod tests;

use sessions::{CloudSessions, OpenError, OpenedStream};

/// Serves the connections of all listeners for targets of the cloud.
#[derive(Debug)]
pub(crate) struct Ingress {
    node: NodeName,
    sessions: Arc<CloudSessions>,
    loop_detector: Arc<LoopDetector>,
    limiter: Arc<ConnLimiter>,
    metrics: Metrics,
    /// The tasks of the connections.
    conns: TaskTracker,
    /// Canceled when connections end because the agent stops.
    cut: CancellationToken,
}

/// Clients dial again at once, also while there is no session.
static LINES: StreamLines<IpAddr> = StreamLines::new(
    "connections to --cloud-listen that are reset at once",
    "access log lines of refused connections to --cloud-listen",
);

impl Ingress {
    pub(crate) fn new(
        node: NodeName,
        sessions: Arc<CloudSessions>,
        loop_detector: Arc<LoopDetector>,
        limits: &Limits,
        metrics: Metrics,
    ) -> Self {
        let total = limits.cloud_streams as usize;
        Self {
            node,
            sessions,
            loop_detector,
            limiter: ConnLimiter::new(ConnLimits {
                per_source: (total / 4 * 3).max(1),
                total,
            }),
            metrics,
            conns: TaskTracker::new(),
            cut: CancellationToken::new(),
        }
    }

    /// Waits until no connection is open. Cancel-safe.
    pub(crate) async fn wait_idle(&self) {
        self.conns.close();
        self.conns.wait().await;
    }

    /// Ends all connections, and waits until they have. Their clients dial again.
    pub(crate) async fn cut(&self) {
        let streams = self.conns.len();
        if streams > 0 {
            info!(node = %self.node, streams, "ending connections to targets of the cloud; their clients dial again");
        }
        self.cut.cancel();
        self.wait_idle().await;
    }

    /// Serves one connection to its end. Dropping the future resets the connection.
    pub(crate) async fn serve(&self, tcp: TcpStream, peer: SocketAddr, target: &CloudTarget) {
        let sinks = CloudSinks {
            ingress: self,
            client: peer.ip(),
        };
        let mut record = OpenRecord::start(Instant::now(), sinks);
        {
            let mut record = record.lock();
            record.target = target.to_string();
            record.node = Some(self.node.clone());
            record.direction = Some("edge");
            record.peer = Some(RecordedPeer::Tcp(peer));
        }
        let open_end = self.loop_detector.accepted(&tcp, peer);
        let socket = TargetSocket::new(tcp, ByteCount::default(), SocketPeer::Client);
        // Without a stream, the socket resets before the line is logged.
        match (self.limiter.acquire(peer.ip()), &open_end) {
            (Ok(_), Ok(None)) => {
                drop(socket);
                let end = StreamEnd::Refused(RefusalCode::Policy);
                record.lock().fail(end, REDIRECTED);
            }
            (Ok(_), Err(error)) => {
                drop(socket);
                let detail = error.to_string();
                record.lock().fail(StreamEnd::CutByCaller, detail);
            }
            (Ok(permit), Ok(Some(_open))) => {
                let permit = Arc::new(permit);
                let _in_use = permit.in_use();
                let _open = self.metrics.cloud_stream();
                self.connect(socket, peer.ip(), target, &mut record).await;
            }
            (Err(reached), _) => {
                drop(socket);
                self.metrics.limit(Limit::CloudStreams);
                let detail = match reached {
                    LimitReached::Total => "agent's limits.cloudStreams is reached",
                    LimitReached::PerSource => {
                        "one address has three quarters of agent's limits.cloudStreams"
                    }
                };
                let end = StreamEnd::Refused(RefusalCode::TooManyStreams);
                record.lock().fail(end, detail);
            }
        }
    }

    /// Opens a stream and relays.
    async fn connect(
        &self,
        socket: TargetSocket,
        client: IpAddr,
        target: &CloudTarget,
        record: &mut OpenRecord<CloudSinks<'_>>,
    ) {
        let audit_id = record.lock().audit_id;
        match self.open(client, target, audit_id).await {
            Ok(opened) => {
                let cut = self.cut.cancelled();
                let code = ResetCode::AgentStopping;
                record.lock().session = Some(opened.session);
                record.lock().dialed = opened.dialed;
                record.carried(opened.stream.bytes());
                record.started();
                record.relayed(relay_socket_until(opened.stream, socket, cut, code).await);
                let mut record = record.lock();
                if record.end == StreamEnd::AgentStopping {
                    STOPPING.clone_into(&mut record.detail);
                }
            }
            Err((session, error)) => {
                drop(socket);
                let mut record = record.lock();
                record.session = session;
                record.fail(error.end(), error.to_string());
            }
        }
    }

    /// Opens a stream over the newest session, or over the next one if that fails before anything
    /// was sent. Returns the last session that was tried with its error.
    async fn open(
        &self,
        client: IpAddr,
        target: &CloudTarget,
        audit_id: AuditId,
    ) -> Result<OpenedStream, (Option<SessionId>, OpenError)> {
        let mut header = StreamHeader::new(StreamKind::Cloud(target.clone()));
        header.source = source_number(&client);
        header.audit_id = Some(audit_id);
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let mut failure = (None, OpenError::NoSession);
        let candidates = self.sessions.newest_first();
        if candidates.is_empty() {
            self.sessions.want();
        }
        for (index, session) in candidates.iter().enumerate() {
            // A silent session must leave time for those after it.
            let left = deadline.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(candidates.len() - index).unwrap_or(u32::MAX);
            let opened = timeout(share, session.open(&header, OPEN_TIMEOUT)).await;
            match opened.unwrap_or(Err(OpenError::NoReply)) {
                Ok(opened) => return Ok(opened),
                Err(error) => {
                    let is_retryable = error.is_retryable();
                    failure = (Some(session.id()), error);
                    if !is_retryable {
                        break;
                    }
                }
            }
        }
        Err(failure)
    }
}

/// The sinks of the record of a connection.
struct CloudSinks<'a> {
    ingress: &'a Ingress,
    client: IpAddr,
}

impl RecordSinks for CloudSinks<'_> {
    const DROPPED: StreamEnd = StreamEnd::AgentStopping;
    const REPORTER: &'static str = "agent";

    fn has_reached_target(&self, record: &StreamRecord) -> bool {
        record.end.has_reached_target()
    }

    fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
        self.ingress.metrics.cloud_stream_ended(record.end);
        // No server was asked without a session.
        let stage = match record.session {
            Some(_) => record.end.stage(),
            None => StreamStage::Unknown,
        };
        LINES.admit(stage, record.end.label(), source(self.client))
    }
}

/// Detail of a connection that ended because the agent stops.
const STOPPING: &str = "the agent is stopping; the client dials again";
/// Detail of a connection that this agent dialed.
const REDIRECTED: &str = "the agent dialed the connection for a caller in the cloud, and a rule of this host redirects it here";
/// Time for a server to accept a stream, over all sessions. With two sessions, each has more than a
/// server's default time for a dial (5 s).
const OPEN_TIMEOUT: Duration = Duration::from_secs(15);
