//! The sockets of the embedded DNS server, and its start.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tracing::{error, info};
use tunnel_process::shutdown::Shutdown;
use tunnel_process::timers::sleep_coalesced;

use super::host_resolvers::HostResolvers;
use super::limiter::Limiter;
use super::loop_detection::LoopDetector;
use super::server::{DnsMetrics, Server};
use super::udp::{self, DnsSocket};
use super::{DnsLimits, DnsSettings, Names, Records, Resolvers, tcp};

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
        let settings = parts.settings;
        let (default_resolvers, host_resolvers) = match &settings.default_resolvers {
            Resolvers::These(these) => (these.clone(), None),
            Resolvers::Host => {
                let host = HostResolvers::of_host(settings.listen);
                (host.used().to_vec(), Some(Mutex::new(host)))
            }
        };
        let names = Names {
            zone: settings.zone.clone(),
            clusters: settings.clusters.clone(),
            default_resolvers,
        };
        info!(
            zone = names.zone.as_ref().map(tracing::field::display),
            resolvers = ?names.default_resolvers,
            "answering DNS"
        );
        let server = Arc::new(Server {
            names: RwLock::new(Arc::new(names)),
            host_resolvers,
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

    /// Probes for forwarding loops once, then follows the resolvers of the host and probes again,
    /// until `shutdown` stops. The first probe takes as long as the slowest resolver, at most one
    /// second. `report` receives what an operator should fix, one line for each.
    pub async fn follow_resolvers(
        &self,
        mut report: impl FnMut(Vec<String>) + Send + 'static,
        shutdown: &Shutdown,
    ) {
        let server = self.0.clone();
        server.loop_detection.probe(&server.names()).await;
        report(server.conditions());
        if server.host_resolvers.is_none() && !server.names().is_forwarding() {
            return;
        }
        shutdown.spawn_service(async move {
            let mut probed_at = Instant::now();
            loop {
                sleep_coalesced(READ_EVERY).await;
                let updated = server.clone();
                let updating = spawn_blocking(move || updated.update_host_resolvers()).await;
                let is_other = updating.unwrap_or_else(|panicked| {
                    error!(error = %panicked, "reading the host's resolvers failed");
                    false
                });
                // A loop can appear long after start-up.
                if is_other || probed_at.elapsed() >= PROBE_EVERY {
                    server.loop_detection.probe(&server.names()).await;
                    probed_at = Instant::now();
                }
                report(server.conditions());
            }
        });
    }
}

/// Time between two reads of the host's resolvers.
const READ_EVERY: Duration = Duration::from_secs(5);
/// Time between two probes for loops.
const PROBE_EVERY: Duration = Duration::from_secs(60);
