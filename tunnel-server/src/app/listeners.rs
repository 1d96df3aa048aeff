//! The listeners for callers, without the CONNECT listeners.

use std::sync::Arc;

use tokio::net::TcpListener;
use tunnel_process::conn_limiter::ConnLimiter;

use super::cluster::ClusterServices;
use super::context::ServerContext;
use crate::config::Capacity;
use crate::ingress::head_memory::HeadMemory;
use crate::ingress::target_tls::TargetTls;
use crate::ingress::{IngressContext, ListenerKind};

/// Starts the listeners. Returns the state that they share with the CONNECT listeners.
pub(super) fn start(
    listeners: Vec<(TcpListener, ListenerKind)>,
    targets: Arc<TargetTls>,
    cluster: &ClusterServices,
    capacity: Capacity,
    context: &ServerContext,
) -> Arc<IngressContext> {
    let ingress = Arc::new(IngressContext {
        routes: context.routes.clone(),
        routing: context.routing(),
        policy: context.policy.clone(),
        dry_run: context.dry_run.clone(),
        running: context.running.clone(),
        pods: cluster.pods.clone(),
        reviewer: cluster.reviewer.clone(),
        targets,
        limits: context.limits.clone(),
        head_memory: HeadMemory::new(context.session_settings.pool.clone()),
        callers: ConnLimiter::new(capacity.callers),
        verified_callers: ConnLimiter::new(capacity.verified_callers),
        metrics: context.metrics.clone(),
        recent: context.recent.clone(),
        shutdown: context.shutdown.clone(),
        drivers: context.drivers.clone(),
    });
    for (listener, kind) in listeners {
        ingress.start(listener, kind);
    }
    ingress
}
