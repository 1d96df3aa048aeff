//! The sockets of the embedded DNS server, and its start.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};
use tunnel_process::shutdown::Shutdown;

use super::limiter::Limiter;
use super::loop_detection::{LoopDetector, LoopError};
use super::server::{DnsMetrics, Server};
use super::udp::{self, DnsSocket};
use super::{DnsLimits, DnsSettings, Names, Records, Resolvers, tcp, upstream};

/// The UDP and TCP sockets, bound to one port.
#[derive(Debug)]
pub struct DnsSockets {
    pub udp: DnsSocket,
    pub tcp: TcpListener,
}

#[derive(Debug)]
pub struct DnsInputs<'a> {
    pub sockets: DnsSockets,
    pub settings: &'a DnsSettings,
    /// Records to answer from. The source of the nodes updates them.
    pub records: Records,
    pub limits: DnsLimits,
    pub metrics: DnsMetrics,
}

#[derive(Debug)]
pub struct Dns(Arc<Server>);

impl Dns {
    /// Serves until `shutdown` stops, because names must resolve while running requests end.
    ///
    /// Answers from `records` immediately. Fill them before the start if nodes are already known.
    /// Otherwise queries for names that may be those of nodes fail until they are.
    pub fn start(parts: DnsInputs<'_>, shutdown: &Shutdown) -> Self {
        let names = Names {
            zone: parts.settings.zone.clone(),
            clusters: parts.settings.clusters.clone(),
            default_resolvers: default_resolvers(&parts.settings.default_resolvers),
        };
        info!(
            zone = names.zone.as_ref().map(tracing::field::display),
            resolvers = ?names.default_resolvers,
            "answering DNS"
        );
        let server = Arc::new(Server {
            names,
            records: parts.records,
            limits: parts.limits,
            limiter: Limiter::new(parts.limits.per_source),
            forwards: Arc::new(Semaphore::new(parts.limits.forwards)),
            loop_detection: LoopDetector::default(),
            metrics: parts.metrics,
        });
        shutdown.spawn_listener(udp::serve(server.clone(), parts.sockets.udp));
        shutdown.spawn_listener(tcp::serve(
            server.clone(),
            parts.sockets.tcp,
            parts.limits.connections,
        ));
        Self(server)
    }

    /// Probes for forwarding loops once, then periodically until `shutdown` stops. The first probe
    /// takes as long as the slowest resolver, at most one second.
    ///
    /// # Errors
    /// Returns [`LoopError`] if a resolver forwards queries back to this server.
    pub async fn start_loop_detection(&self, shutdown: &Shutdown) -> Result<(), LoopError> {
        if !self.0.names.is_forwarding() {
            return Ok(());
        }
        self.0.loop_detection.probe(&self.0.names).await?;
        let server = self.0.clone();
        shutdown.spawn_service(async move { server.loop_detection.run(&server.names).await });
        Ok(())
    }
}

fn default_resolvers(resolvers: &Resolvers) -> Vec<SocketAddr> {
    match resolvers {
        Resolvers::These(these) => these.clone(),
        Resolvers::Host => {
            let found = upstream::host_resolvers(Path::new(RESOLV_CONF));
            let found = found.unwrap_or_else(|error| {
                debug!(%error, "cannot read {RESOLV_CONF}");
                Vec::new()
            });
            if found.is_empty() {
                warn!(
                    "{RESOLV_CONF} names no resolver; DNS queries for other names are refused; set one with \
                     --dns-upstream"
                );
            }
            found
        }
    }
}

const RESOLV_CONF: &str = "/etc/resolv.conf";
