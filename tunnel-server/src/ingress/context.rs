//! State and settings that the listeners share, and the facts about a caller's connection.

use std::sync::Arc;

use tokio_util::task::TaskTracker;
use tunnel_process::conn_limiter::{ConnLimiter, ConnPermit};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::CallerError;
use tunnel_proto::wire::name::{NodeName, Port};

use super::caller_addr::{CallerAddr, CallerIdentity};
use super::caller_stream::{CallerClosed, CloseState};
use super::client_auth::ListenerTls;
use super::connect::basic_auth::BasicAuth;
use super::connect::dial::DirectDialer;
use super::head_memory::HeadMemory;
use super::recent_requests::RecentRequests;
use super::target_tls::TargetTls;
use crate::config::SharedLimits;
use crate::dry_run::DryRunReport;
use crate::metrics::Metrics;
use crate::routing::Routing;
use crate::routing::access_review::{AccessReviewer, ClusterUser};
use crate::routing::pod_lookup::PodResolver;
use crate::routing::routes::Routes;
use crate::running::RunningAccesses;
use tunnel_routing::destination::Scheme;
use tunnel_routing::policy::{Listener, SharedPolicy};

/// State that all listeners share.
#[derive(Debug, Clone)]
pub struct IngressContext {
    pub routes: Routes,
    /// Opens streams to agents.
    pub routing: Routing,
    /// Who may do what.
    pub policy: SharedPolicy,
    /// What a dry run of rules has found.
    pub dry_run: DryRunReport,
    /// Accesses in progress.
    pub running: RunningAccesses,
    /// Looks up the node of a Pod, for callers with delegation. Set only in a cluster.
    pub pods: Option<PodResolver>,
    /// Asks the cluster about callers. Set only in a cluster.
    pub reviewer: Option<AccessReviewer>,
    /// TLS configuration for connections to https targets.
    pub targets: Arc<TargetTls>,
    pub limits: SharedLimits,
    /// Memory for large request heads.
    pub head_memory: Arc<HeadMemory>,
    /// Limiter of callers' connections. A connection holds its permit until it ends.
    pub callers: Arc<ConnLimiter>,
    /// Limiter with additional permits. Only callers that are verified by a client certificate or
    /// connect over a Unix socket can use them.
    pub verified_callers: Arc<ConnLimiter>,
    pub metrics: Metrics,
    /// Last requests of each node, if the console is on.
    pub recent: Option<Arc<RecentRequests>>,
    /// Shutdown signals and the tasks that they cover.
    pub shutdown: Shutdown,
    /// Tracks the tasks that drive connections to targets. Each task also ends when its handle is
    /// dropped.
    pub drivers: TaskTracker,
}

/// A listener for HTTP callers and its settings.
#[derive(Debug)]
pub struct HttpListener {
    /// Name of the listener for logs: `http`, `https`, `proxy` or `connect`.
    pub name: &'static str,
    /// Scheme towards callers and towards targets.
    pub scheme: Scheme,
    /// Port of the target if Host contains none.
    pub implied_port: Option<Port>,
    /// TLS configuration. Set on HTTPS listeners, and on CONNECT listeners that authenticate
    /// callers by certificate.
    pub tls: Option<Arc<ListenerTls>>,
    /// Set only on CONNECT listeners. Their requests name the target in place of a node in Host.
    pub connect: Option<ConnectProxy>,
}

impl HttpListener {
    /// Returns the kind of the listener, for the policy.
    pub(super) fn kind(&self) -> Listener {
        match self.connect {
            Some(_) => Listener::Connect,
            None => self.scheme.into(),
        }
    }
}

/// Authentication and dialing on a CONNECT listener.
#[derive(Debug, Clone)]
pub struct ConnectProxy {
    /// Credentials for callers without a client certificate. With `None`, no credentials are
    /// required.
    pub passwords: Option<Arc<BasicAuth>>,
    /// Callers can connect without TLS as well.
    pub is_tls_optional: bool,
    /// Dialer for targets that the server reaches without an agent.
    pub direct: Arc<DirectDialer>,
}

/// A caller's connection and the facts about the caller, without the stream.
#[derive(Debug)]
pub(super) struct CallerConn {
    pub(super) addr: CallerAddr,
    pub(super) identity: CallerIdentity,
    pub(super) close_state: Arc<CloseState>,
    /// Reports that the caller has closed its direction.
    pub(super) closed: CallerClosed,
    /// Permit of the connection from the limiter of callers.
    pub(super) permit: Arc<ConnPermit>,
    /// The caller had client-certificate delegation in the handshake.
    pub(super) has_delegation: bool,
    /// The server name (SNI) from the caller's TLS handshake. Set only for callers with delegation,
    /// whose requests it can route to a node.
    pub(super) server_name: Option<NodeName>,
    /// Reason why the caller's certificate is not a caller certificate.
    pub(super) certificate_error: Option<CallerError>,
    /// The user of the cluster whose certificate the caller has.
    pub(super) cluster_user: Option<Arc<ClusterUser>>,
}
