//! What a run is, and the model of everything that is not the product's own code.
//!
//! - A message between agent and server takes [`ONE_WAY`], one between servers [`PEER_DELAY`].
//! - A server completes a number of handshakes each second. Others wait in its queue, at most
//!   [`PRE_AUTH_TOTAL`], and the next one is refused. A dial ends after [`HANDSHAKE_TIMEOUT`].
//! - In all cases but one each replica has an address of its own. The configured address belongs to
//!   a load balancer that selects any ready replica.
//! - A server announces changes in batches, as the product does, and withdrawn sessions when it
//!   polls its registry.
//! - A killed server resets its connections. A lost one is silent: agents notice by their
//!   keep-alives, other servers by theirs, and a stream that is forwarded to it gets no answer.

use std::time::Duration;

/// A run of the simulation.
#[derive(Debug, Clone)]
pub struct ScaleOptions {
    pub case: ScaleCase,
    pub nodes: usize,
    pub replicas: usize,
    /// Number of sessions that each agent wants (`--replicas` of the agent).
    pub k: usize,
    /// Number of handshakes that a server completes in a second.
    pub handshakes_per_second: u32,
    pub seed: u64,
}

/// An event in the life of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ScaleCase {
    /// All agents start in the same second, with all servers up.
    ColdStart,
    /// A server's process ends; its host resets the connections.
    ReplicaKilled,
    /// The host of a server is lost and stays silent.
    ReplicaLost,
    /// A third of the servers, which are one of three zones, are lost at once and stay silent.
    ZoneLost,
    /// The same, while servers and agents do not know the zones.
    UnknownZoneLost,
    /// Each server is replaced by one of another name, one after the other, with a drain.
    RollingRestart,
    /// A server is killed and restarts in its pod, while the lists of servers and of endpoints are
    /// frozen.
    ApiServerAway,
    /// All agents start in the same second, with one address for all servers.
    RandomPlacement,
}

impl ScaleCase {
    /// Returns the zone of a server if the servers know it.
    pub(super) fn zone(self, server: usize, replicas: usize) -> Option<usize> {
        match self {
            Self::ZoneLost => Some((server / zone_size(replicas)).min(ZONES - 1)),
            Self::ColdStart
            | Self::ReplicaKilled
            | Self::ReplicaLost
            | Self::UnknownZoneLost
            | Self::RollingRestart
            | Self::ApiServerAway
            | Self::RandomPlacement => None,
        }
    }
}

/// Returns the number of servers in the first zone.
pub(super) fn zone_size(replicas: usize) -> usize {
    (replicas / ZONES).max(1)
}

/// The number of zones that the servers are in.
const ZONES: usize = 3;

/// Half of a round trip between agent and server.
pub(super) const ONE_WAY: Duration = Duration::from_millis(25);
/// Delay of a message between servers of one site.
pub(super) const PEER_DELAY: Duration = Duration::from_millis(5);
/// Time from the server's work on a handshake to Welcome at the agent: two and a half round trips,
/// for the end of the handshake, the control stream, Hello and Welcome.
pub(super) const ADMISSION: Duration = Duration::from_millis(125);

/// `limits.preAuthTotal` of the server.
pub(super) const PRE_AUTH_TOTAL: usize = 4096;
/// `limits.handshakeTimeout` of the agent.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// `limits.directoryNodes` of the server.
pub(super) const DIRECTORY_NODES: usize = 250_000;

/// Time in which a server collects changes before it announces them.
pub(super) const BATCH: Duration = Duration::from_millis(100);
/// Interval at which a server notices withdrawn sessions.
pub(super) const POLL: Duration = Duration::from_secs(1);
/// Time for which the list of a lost connection between servers stays.
pub(super) const LIST_LINGER: Duration = Duration::from_secs(5);
/// Longest time until another server prefers other connections to that to a lost server.
pub(super) const PEER_SUSPECT: Duration = Duration::from_millis(7500);
/// Longest time until another server closes the connection to a lost one.
pub(super) const PEER_DEAD: Duration = Duration::from_millis(12_500);
/// Longest wait between two dials of another server.
pub(super) const PEER_RETRY: Duration = Duration::from_secs(5);

/// Least time until an agent suspects a silent session.
pub(super) const SUSPECT_MIN: Duration = Duration::from_secs(1);
/// Longest time until an agent suspects a silent session: 1.2 x `keepAlive` (5 s), and 1 s.
pub(super) const SUSPECT_MAX: Duration = Duration::from_secs(7);

/// Time over which the agents start.
pub(super) const START_WITHIN: Duration = Duration::from_secs(1);
/// Time until servers and the load balancer know of a change of the endpoints.
pub(super) const ENDPOINTS_DELAY: Duration = Duration::from_secs(1);
/// Time until Kubernetes considers a silent host as lost.
pub(super) const HOST_LOST_AFTER: Duration = Duration::from_secs(40);
/// Time from the start of a server to its readiness.
pub(super) const READY_AFTER: Duration = Duration::from_secs(5);
/// Time until the kubelet restarts a process.
pub(super) const RESTART_AFTER: Duration = Duration::from_secs(10);

/// Time within which agents move from a server that stops.
pub(super) const MOVE_WITHIN: Duration = Duration::from_secs(10);
/// Time for which the listeners of a server that stops accept calls.
pub(super) const DRAIN_DELAY: Duration = Duration::from_secs(5);
/// Time from the begin of a drain to the end of the process.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time from the start of one server of a rollout to the start of the next.
pub(super) const ROLLOUT_STEP: Duration = Duration::from_secs(35);

/// A run ends here, even if agents still dial.
pub(super) const RUN_MAX: Duration = Duration::from_secs(2 * 3600);
