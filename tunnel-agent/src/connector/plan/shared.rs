//! What the connectors of a plan share: the actions for the driver, and the dials.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use tokio::time::Instant;
use tunnel_proto::wire::name::ReplicaId;

use crate::config::Limit;
use crate::connector::endpoint::Endpoints;
use crate::connector::happy_eyeballs::DialFailure;
use crate::connector::report::ConnectionLog;
use crate::connector::session_task::ConnectError;
use crate::connector::status::ConnectorId;
use crate::connector::transport_policy::SessionTransport;
use crate::credentials::Refusal;
use crate::handover::LockState;
use crate::metrics::Metrics;
use crate::session::{DialId, SessionSummary};

/// What the driver does.
#[derive(Debug)]
pub(in crate::connector) enum Action {
    /// Start the task of a session.
    Dial {
        id: DialId,
        transport: SessionTransport,
        endpoints: Endpoints,
    },
    /// Serve the streams of an admitted session.
    Serve(DialId),
    /// Close an admitted session: another one is with its server.
    Decline(DialId),
    /// Let a session end with its last stream, or abandon its dial.
    Retire(DialId),
    /// Notify the sessions that the servers have changed.
    MembersChanged,
    /// Record what a dial with the credentials of this generation has shown of them.
    Credentials(u64, CredentialOutcome),
}

/// What a dial has shown of the credentials that it used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::connector) enum CredentialOutcome {
    /// A session is ready with them.
    Accepted,
    /// The handshake failed, probably because of a certificate.
    Failed,
    Refused(Refusal),
    /// The agent does not trust the server's CA.
    ServerUntrusted,
}

/// What the connectors of a plan share.
pub(super) struct Shared {
    pub(super) actions: VecDeque<Action>,
    /// Dials in progress and sessions, also of connectors that have retired.
    pub(super) dials: HashMap<DialId, Dial>,
    pub(super) next_dial: u64,
    pub(super) random: SmallRng,
    pub(super) metrics: Metrics,
    pub(super) log: ConnectionLog,
    pub(super) quic_head_start: Duration,
    /// Generation of the newest credentials.
    pub(super) credentials: u64,
    pub(super) lock: LockState,
    /// Transport of the newest session of any connector: whether UDP gets through.
    pub(super) transport: Option<SessionTransport>,
    /// Number of sessions that connectors have lost.
    pub(super) losses: u64,
    /// Time from which a client may make the next dial due.
    pub(super) wanted_at: Instant,
    /// Whether a connector other than that of the event has a live session.
    pub(super) has_other_live: bool,
    /// Whether servers must be assigned again.
    pub(super) is_changed: bool,
    pub(super) is_draining: bool,
}

/// A dial in progress, or the session that it led to.
pub(super) struct Dial {
    pub(super) connector: ConnectorId,
    pub(super) transport: SessionTransport,
    pub(super) credentials: u64,
    /// The only acceptable servers, if this is a move to one of them.
    pub(super) only: Option<Arc<[ReplicaId]>>,
}

impl Shared {
    /// Returns a random number from 0 to 1.
    pub(super) fn random(&mut self) -> f64 {
        self.random.random()
    }

    /// Starts a dial and returns its number.
    pub(super) fn dial(&mut self, dial: Dial, endpoints: Endpoints) -> DialId {
        let id = DialId(self.next_dial);
        self.next_dial += 1;
        let transport = dial.transport;
        self.dials.insert(id, dial);
        self.actions.push_back(Action::Dial {
            id,
            transport,
            endpoints,
        });
        id
    }

    pub(super) fn retire(&mut self, id: DialId) {
        self.actions.push_back(Action::Retire(id));
    }

    pub(super) fn record_credentials(&mut self, generation: u64, outcome: CredentialOutcome) {
        let outcome = Action::Credentials(generation, outcome);
        self.actions.push_back(outcome);
    }

    /// Records the end of a session or dial that no connector needs.
    pub(super) fn record_end(
        &self,
        transport: SessionTransport,
        outcome: &Result<SessionSummary, ConnectError>,
    ) {
        match outcome {
            Ok(summary) => self.log.ended(transport, summary),
            Err(error) => self.record_failure(transport, error),
        }
    }

    /// Counts the failure of one transport.
    pub(super) fn record_failure(&self, transport: SessionTransport, error: &ConnectError) {
        if error.failure() == DialFailure::Timeout {
            self.metrics.limit(Limit::HandshakeTimeout);
        }
        let result = error.result();
        self.metrics.connect_attempt(transport.transport(), result);
    }
}
