//! The console: its TLS configuration, its passwords, and the state that it shows.

use std::sync::Arc;

use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;

use super::context::ServerContext;
use super::serving::{CallerCa, PasswordFile, listener_tls, passwords};
use crate::admin::page::{self, PageSources};
use crate::admin::status::NodeSources;
use crate::admin::traffic::Traffic;

/// Starts the console if it is on. `certificates` are those of the HTTPS listener.
pub(super) fn start(
    listener: Option<TcpListener>,
    certificates: Arc<dyn ResolvesServerCert>,
    nodes: NodeSources,
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
        is_required: settings.auth.is_none(),
    });
    let watcher = &context.watcher;
    let tls = settings
        .has_tls
        .then(|| listener_tls(certificates, callers, watcher));
    let passwords = settings.auth.as_deref().map(|path| {
        let file = PasswordFile {
            what: "status_auth",
            setting: "--status-auth",
            path,
        };
        passwords(&file, watcher)
    });
    let (registry, metrics) = (context.registry.clone(), context.metrics.clone());
    let peers = context.peers.clone();
    let traffic = Traffic::new(registry, metrics, recent.clone(), peers);
    traffic.start(&context.shutdown);
    let sources = PageSources {
        nodes: Box::new(nodes),
        traffic,
        peers: context.peers.clone(),
        readiness: context.readiness.clone(),
        recent: recent.clone(),
        tls: tls.transpose()?,
        passwords: passwords.transpose()?,
    };
    page::start(sources, listener, &context.shutdown);
    Ok(())
}
