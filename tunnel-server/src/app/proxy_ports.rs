//! The extra ports on which the server listens next to its HTTP and HTTPS listeners. They follow the
//! port policy, and a port that cannot be bound is a condition and is tried again.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tracing::info;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::Port;

use super::context::ServerContext;
use super::sockets::http_listener;
use crate::config::{EXTRA_PORTS_MAX, ListenerSettings, ProxyPortListen};
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::{ClosableListener, IngressContext};
use tunnel_routing::destination::Scheme;

/// The extra ports of a server.
pub(super) struct ProxyPorts {
    ingress: Arc<IngressContext>,
    tls: Arc<ListenerTls>,
    listeners: ListenerSettings,
    readiness: Readiness,
    bound: BTreeMap<(SocketAddr, Scheme), ClosableListener>,
    /// Time between two comparisons with the policy.
    interval: Duration,
    shutdown: Shutdown,
}

impl ProxyPorts {
    /// Binds the ports of the policy, as far as they are free.
    pub(super) async fn bind(
        ingress: Arc<IngressContext>,
        tls: Arc<ListenerTls>,
        context: &ServerContext,
    ) -> Self {
        let mut ports = Self {
            ingress,
            tls,
            listeners: context.config.listeners.clone(),
            readiness: context.readiness.clone(),
            bound: BTreeMap::new(),
            interval: context.config.limits.reload_every,
            shutdown: context.shutdown.clone(),
        };
        ports.reconcile().await;
        ports
    }

    /// Returns the addresses that are bound.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.bound.keys().map(|(address, _)| *address).collect()
    }

    /// Follows the policy until the drain.
    pub(super) fn start(mut self) {
        if self.listeners.proxy_ports == ProxyPortListen::Off {
            return;
        }
        let shutdown = self.shutdown.clone();
        shutdown.spawn_service(async move {
            let drain = self.shutdown.drain().clone();
            loop {
                tokio::select! {
                    biased;
                    () = drain.cancelled() => return,
                    () = sleep_coalesced(self.interval) => self.reconcile().await,
                }
            }
        });
    }

    /// Closes the ports that are not desired and binds those that are missing.
    async fn reconcile(&mut self) {
        let mut desired = self.listeners.extra(&self.ingress.policy.load().ports);
        let mut lines = Vec::new();
        if let Some(excess) = desired
            .len()
            .checked_sub(EXTRA_PORTS_MAX)
            .filter(|count| *count > 0)
        {
            desired.truncate(EXTRA_PORTS_MAX);
            lines.push(format!(
                "the server listens on the first {EXTRA_PORTS_MAX} ports of the lists only, and leaves out {excess}"
            ));
        }
        ClosableListener::close_others(&mut self.bound, |bound| {
            let mut desired = desired.iter();
            desired.any(|(address, _, scheme)| (*address, *scheme) == *bound)
        })
        .await;
        for (address, port, scheme) in desired {
            if self.bound.contains_key(&(address, scheme)) {
                continue;
            }
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    info!(listener = "proxy", %address, "listening");
                    let kind = http_listener("proxy", scheme, Some(port), &self.tls);
                    let listener = self.ingress.start_closable(listener, kind);
                    self.bound.insert((address, scheme), listener);
                }
                Err(error) => lines.push(cannot_listen(address, port, &error)),
            }
        }
        self.readiness.report_conditions(LABEL, lines);
    }
}

/// Returns why the server does not listen on the address of a port of the nodes, and what to do.
pub(super) fn cannot_listen(address: SocketAddr, port: Port, error: &io::Error) -> String {
    format!(
        "cannot listen on {address}: {error}; callers reach port {port} of the nodes through the other listeners. \
         Stop the program that uses the port here, or set --proxy-port-listen off"
    )
}

const LABEL: &str = "proxy ports";
