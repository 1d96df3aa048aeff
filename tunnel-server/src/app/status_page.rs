//! The status page: its TLS configuration, and the state that it shows.

use std::sync::Arc;

use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;

use super::admin::node_list;
use super::authority::Authority;
use super::context::ServerContext;
use super::serving::{CallerCa, listener_tls};
use crate::admin::page::{self, PageSources};

/// Starts the status page if it is on. `certificates` are those of the HTTPS listener.
pub(super) fn start(
    listener: Option<TcpListener>,
    certificates: Arc<dyn ResolvesServerCert>,
    authority: &Authority,
    context: &ServerContext,
) -> anyhow::Result<()> {
    let (Some(listener), Some(settings), Some(recent)) =
        (listener, &context.config.status_page, &context.recent)
    else {
        return Ok(());
    };
    let callers = settings.client_ca.as_deref().map(|path| CallerCa {
        what: "status_client_ca",
        path,
        is_required: true,
    });
    let tls = callers.map(|callers| listener_tls(certificates, Some(callers), &context.watcher));
    let sources = PageSources {
        nodes: node_list(authority, context),
        registry: context.registry.clone(),
        peers: context.peers.clone(),
        readiness: context.readiness.clone(),
        recent: recent.clone(),
        tls: tls.transpose()?,
    };
    page::start(sources, listener, &context.shutdown);
    Ok(())
}
