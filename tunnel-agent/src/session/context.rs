//! What the connector gives to each session: the state that all sessions share, and the link back.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::label::Labels;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};

use super::lost::LostSessions;
use crate::config::Limits;
use crate::credentials::RotatingCredentials;
use crate::diag::AgentFacts;
use crate::egress::Egress;
use crate::handover::HostLock;
use crate::ingress::sessions::CloudSessions;
use crate::metrics::Metrics;
use crate::node_ip::NodeIpLookup;

/// State shared by all sessions of an agent.
#[derive(Debug)]
pub(crate) struct SessionContext {
    pub(crate) node: NodeName,
    pub(crate) node_ip: Arc<NodeIpLookup>,
    pub(crate) labels: Labels,
    pub(crate) instance: InstanceId,
    pub(crate) limits: Limits,
    /// The facts that a server may ask for. `None` with `--remote-diag off`.
    pub(crate) facts: Option<Arc<AgentFacts>>,
    pub(crate) egress: Arc<Egress>,
    /// The sessions that open streams to targets of the cloud.
    pub(crate) cloud_sessions: Arc<CloudSessions>,
    pub(crate) lost_sessions: LostSessions,
    pub(crate) host_lock: Arc<HostLock>,
    pub(crate) metrics: Metrics,
    pub(crate) shutdown: Shutdown,
    /// Credentials, which sessions renew.
    pub(crate) rotating_credentials: Arc<RotatingCredentials>,
    /// Canceled when the drain is over and sessions should end.
    pub(crate) graceful_shutdown: CancellationToken,
}

/// The number of a dial, and of the session that it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct DialId(pub(crate) u64);

/// The link between a session's task and the connectors.
#[derive(Debug, Clone)]
pub(crate) struct SessionHandle {
    pub(crate) id: DialId,
    /// Canceled when another session takes the new streams, or when the attempt is abandoned.
    pub(crate) retire: CancellationToken,
    pub(crate) session_event: mpsc::Sender<(DialId, SessionEvent)>,
    /// Changes with the servers of the installation.
    pub(crate) members_changed: watch::Receiver<()>,
}

/// Events of a session for the connectors. `Answered` and `Admitted` arrive in this order. The end of
/// the task reports the end of the session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionEvent {
    Answered,
    /// Welcome arrived, with the servers of the installation. The session is served, or declined.
    Admitted {
        replica: ReplicaId,
        members: Vec<Member>,
    },
    /// The server is suspect: it was silent for too long, or reports that it receives nothing from
    /// this end.
    Suspect,
    /// Data arrives from the server again.
    Live,
    /// The server is stopping, and this agent should have another session within this time. Sent at
    /// most once.
    Draining {
        move_within: Duration,
    },
    /// The servers of the installation have changed.
    Members(Vec<Member>),
    /// The transport has measured the path. Sent once a minute while the session is live.
    RoundTripTime(Duration),
}

impl SessionHandle {
    /// Sends an event to the connectors. Cancel-safe: no event is sent if the future is dropped early.
    pub(crate) async fn send(&self, session_event: SessionEvent) {
        let _connector_may_be_gone = self.session_event.send((self.id, session_event)).await;
    }
}
