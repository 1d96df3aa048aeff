//! Sessions of agents: what all of them share. `session/admission.rs` admits a session, and
//! `session/session_loop.rs` runs it afterwards.

use std::sync::Arc;
use std::time::Duration;

use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::session::LivenessLimits;
use tunnel_proto::tls::AgentTrust;

use crate::ca::renewal::Renewals;
use crate::ca::revocation::Revocations;
use crate::metrics::Metrics;
use crate::routing::known_nodes::KnownNodes;
use crate::routing::registry::Registry;

pub mod acceptor;
mod admission;
mod admission_rate;
mod renewal;
mod session_loop;

pub use admission_rate::AdmissionRate;

/// State of the server that all sessions share.
#[derive(Debug, Clone)]
pub struct Sessions {
    /// Registry of admitted sessions.
    pub registry: Arc<Registry>,
    /// Known nodes. The connection of an admitted session is recorded here.
    pub nodes: Arc<KnownNodes>,
    /// Metrics of the server.
    pub metrics: Metrics,
    /// Shutdown signals and the tasks that they cover.
    pub shutdown: Shutdown,
    /// Addresses of servers that agents can dial.
    pub advertised: Vec<String>,
    /// Limits of a session.
    pub limits: SessionLimits,
    /// Rate limit for the sessions that a node opens.
    pub admission_rate: Arc<AdmissionRate>,
    /// Credentials that were revoked.
    pub revocations: Arc<Revocations>,
    /// CAs whose certificates are accepted.
    pub trust: Option<Arc<AgentTrust>>,
    /// Issues renewed certificates. With `None`, operators replace the certificates of agents.
    pub renewals: Option<Arc<Renewals>>,
}

/// Limits of a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// Time from the end of the handshake to Hello.
    pub handshake: Duration,
    /// Streams that can be open at once.
    pub streams: u32,
    /// Time that the agent has to dial a target.
    pub target_dial: Duration,
    /// Time for which open streams can continue after a drain began.
    pub drain: Duration,
    /// Silence after which an agent is suspect, and after which it is dead.
    pub liveness: LivenessLimits,
    /// Time for which a session can continue after its certificate has ended.
    pub expiry_grace: Duration,
}
