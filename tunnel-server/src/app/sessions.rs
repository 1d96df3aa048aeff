//! The listener for agents' sessions and enrollments, port 10262.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tracing::info;
use tunnel_process::conn_limiter::ConnLimiter;
use tunnel_process::settings::ConfigError;
use tunnel_proto::tls;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::wire::ALPN_SESSION_TCP;

use super::authority::{AgentAuth, Authority};
use super::context::ServerContext;
use crate::config::Capacity;
use crate::egress::{AccessControl, CloudEgress};
use crate::node_rate::NodeRate;
use crate::session::agent_listener::{AgentListener, TcpHandler};
use crate::session::saved_connections::SavedConnections;
use crate::session::{Sessions, admission_rate};
use tunnel_ca::attestation::Attestor;
use tunnel_ca::enrollment::Enrollment;

pub(super) struct SessionInputs<'a> {
    pub(super) quic: Arc<QuicAcceptor>,
    pub(super) tcp: TcpListener,
    pub(super) agents: &'a AgentAuth,
    pub(super) authority: &'a Authority,
    pub(super) attestor: Option<Attestor>,
    pub(super) capacity: Capacity,
}

/// What of the listener for agents follows the file of the configuration.
pub(super) struct FollowedSessions {
    pub(super) cloud: Arc<CloudEgress>,
    pub(super) admission_rate: Arc<NodeRate>,
    pub(super) pre_auth: Arc<ConnLimiter>,
}

/// Starts to accept agents over UDP and TCP.
pub(super) fn start(
    inputs: SessionInputs<'_>,
    context: &ServerContext,
) -> anyhow::Result<FollowedSessions> {
    let SessionInputs {
        agents, authority, ..
    } = inputs;
    let limits = &context.config.limits;
    let tcp_handler = TcpHandler {
        session_tls: agents.session_tls(ALPN_SESSION_TCP)?,
        settings: context.session_settings.clone(),
        enroll_tls: tls::enroll_server(agents.enrollment.clone())?,
        enrollment: Enrollment {
            renewals: agents.renewals.clone(),
            tokens: authority.tokens.clone(),
            nodes: context.nodes.clone(),
            is_taken: context.is_taken(),
            attestor: inputs.attestor,
            peers: (context.config.kubernetes.is_none()).then(|| context.peers.clone() as _),
        },
    };
    let cloud = CloudEgress::new(
        &context.config.cloud,
        context.own_ports.clone(),
        context.labeled_nodes.clone(),
        context.limits.clone(),
        inputs.capacity.cloud_streams,
        context.metrics.clone(),
        context.shutdown.clone(),
        AccessControl {
            policy: context.policy.clone(),
            dry_run: context.dry_run.clone(),
            running: context.running.clone(),
        },
    );
    let cloud = Arc::new(cloud.map_err(ConfigError::mistake)?);
    let followed = FollowedSessions {
        cloud: cloud.clone(),
        admission_rate: Arc::new(admission_rate(limits.admissions_per_node)),
        pre_auth: ConnLimiter::new(inputs.capacity.half_open),
    };
    let sessions = Sessions {
        registry: context.registry.clone(),
        peers: context.peers.clone(),
        nodes: context.nodes.clone(),
        metrics: context.metrics.clone(),
        failures: context.failures.clone(),
        shutdown: context.shutdown.clone(),
        limits: context.limits.clone(),
        drain: context.config.drain_delay + context.config.drain_timeout,
        move_within: context.config.move_within(),
        saved_connections: Some(reset_earlier(&inputs.quic, context)),
        admission_rate: followed.admission_rate.clone(),
        permits: Arc::new(Semaphore::new(inputs.capacity.sessions)),
        revocations: authority.revocations.clone(),
        trust: Some(agents.trust.clone()),
        cloud: Some(cloud),
        renewals: agents.renewals.clone(),
    };
    let listener = AgentListener {
        quic: inputs.quic,
        tcp_handler: Arc::new(tcp_handler),
        sessions: Arc::new(sessions),
        pre_auth: followed.pre_auth.clone(),
        tcp_permits: Arc::new(Semaphore::new(inputs.capacity.agents_over_tcp)),
    };
    listener.start(inputs.tcp);
    Ok(followed)
}

/// Resets the connections over QUIC that an earlier process served, and returns those of this one.
fn reset_earlier(quic: &Arc<QuicAcceptor>, context: &ServerContext) -> SavedConnections {
    let (connections, earlier) = SavedConnections::take_earlier(&context.store);
    if !earlier.is_empty() {
        info!(
            count = earlier.len(),
            "resetting the QUIC connections of the previous process"
        );
        let quic = quic.clone();
        context
            .shutdown
            .spawn_service(async move { quic.reset(&earlier).await });
    }
    connections
}
