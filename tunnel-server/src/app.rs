//! Start-up and shutdown of the server: builds all components from a configuration, and stops them
//! in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};
use tunnel_proto::process::admission::ConnLimiter;
use tunnel_proto::process::host::Resources;
use tunnel_proto::process::meta::{self, Meta, Readiness};
use tunnel_proto::process::shutdown::{DrainOutcome, Shutdown};
use tunnel_proto::tls;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::transport::{Acceptor as _, BufferPool, SessionSettings};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};

use crate::admin::status;
use crate::admin::{self, AdminState};
use crate::ca::LocalCa;
use crate::ca::distrusted;
use crate::ca::enrollment::Enrollment;
use crate::ca::revocation::Revocations;
use crate::ca::tokens::TokenStore;
use crate::config::{Capacity, Config};
use crate::dns::Records;
use crate::ingress::client_auth::DelegationPolicy;
use crate::ingress::{IngressContext, ListenerLimits};
use crate::metrics::Metrics;
use crate::policy::{PortPolicy, SharedPortPolicy};
use crate::routing::dial_policy::LiveClusterNetworks;
use crate::routing::known_nodes::KnownNodes;
use crate::routing::registry::{Registry, RegistryLimits};
use crate::routing::routes::{RouteNode, RouteSource, Routes};
use crate::session::acceptor::{Acceptor, TcpHandler};
use crate::session::{AdmissionRate, SessionLimits, Sessions};
use crate::store::data_dir::DataDir;

mod authority;
mod bind;
mod bound_addrs;
mod cluster;
mod connect;
mod credential_watcher;
mod identity;
mod records;
mod serving;
mod sockets;
mod targets;

use authority::{Authority, AuthorityContext};
use bind::listen;
pub use bound_addrs::BoundAddrs;
use cluster::{ClusterContext, ClusterServices, start_cluster};
use credential_watcher::CredentialWatcher;
use identity::{agent_auth, watch_kubelet_ca};
use records::DnsContext;
use serving::{serving_certificates, serving_names};
use sockets::{Sockets, bind};

/// A running server, created by [`App::start`] and served by [`App::run`].
#[derive(Debug)]
pub struct App {
    bound: BoundAddrs,
    config: Config,
    shutdown: Shutdown,
    readiness: Readiness,
    registry: Arc<Registry>,
    quic: Arc<QuicAcceptor>,
    drivers: TaskTracker,
    ca: Arc<LocalCa>,
    tokens: Arc<TokenStore>,
    nodes: Arc<KnownNodes>,
    records: Records,
    cluster: ClusterServices,
    revocations: Arc<Revocations>,
    lease_guard: authority::LeaseGuard,
    /// Lock of the data directory, held until the process ends: one server per data directory.
    _lock: std::fs::File,
}

impl App {
    /// Starts every component. Returns when all sockets are bound.
    ///
    /// # Errors
    /// Returns an error if the data directory is in use or damaged, a file cannot be read, or an
    /// address cannot be bound.
    pub async fn start(config: Config, shutdown: Shutdown) -> anyhow::Result<Self> {
        for warning in &config.warnings {
            warn!("{warning}");
        }
        let data = DataDir::open(&config.data_dir)
            .with_context(|| config.data_dir.display().to_string())?;
        let Some(lock) = data.lock()? else {
            bail!(
                "another tunnel-server uses {}; give this one its own --data-dir",
                config.data_dir.display()
            );
        };
        let readiness = Readiness::default();
        let starting = readiness.block("listeners");
        let mut metrics_registry = MetricsRegistry::default();
        let meta_listener = listen(config.meta_listen, "--meta-listen").await?;
        let authority_context = AuthorityContext {
            config: &config,
            data: &data,
            readiness: &readiness,
            shutdown: &shutdown,
        };
        let Authority {
            ca,
            tokens,
            revocations,
            keys,
            cluster_handle,
            lease_guard,
        } = authority_context
            .authority(&meta_listener, &mut metrics_registry)
            .await?;
        let nodes = Arc::new(KnownNodes::open(&data)?);
        let pool = BufferPool::new(config.limits.buffer_pool);
        let metrics = Metrics::new(&mut metrics_registry, pool.clone());
        let registry = Arc::new(Registry::new(RegistryLimits {
            streams_per_agent: usize::try_from(config.limits.streams_per_agent)?,
            buffer_pool: config.limits.buffer_pool,
        }));
        let routes = Routes::default();
        let records = Records::default();
        nodes.start(&shutdown);
        follow_nodes(&nodes, &routes, &metrics, &shutdown);

        revocations.enforce(&registry, &shutdown);

        let watcher = CredentialWatcher {
            interval: config.limits.reload_every,
            metrics: &metrics,
            shutdown: &shutdown,
        };
        let agents = agent_auth(&config, &ca, &revocations, &watcher)?;
        distrusted::enforce(&agents.trust, &registry, &shutdown);
        watch_kubelet_ca(&config, &agents, &watcher)?;
        let session_tls =
            |alpn| tls::session_server_with_trust(agents.own.clone(), agents.trust.clone(), alpn);
        let settings = session_settings(&config, pool);
        let serving_names = serving_names(&config);
        let certificates = serving_certificates(&config, (&ca, &serving_names), &routes, &watcher)?;
        let callers = config.client_auth.as_ref();
        let callers = callers.map(|callers| (&*callers.ca, callers.is_required));
        let listener_tls =
            targets::listener_tls("client_ca", certificates.clone(), callers, &watcher)?;
        let quic_tls = session_tls(ALPN_SESSION)?;
        let sockets = bind(
            &config,
            (quic_tls, &keys, &settings),
            listener_tls,
            meta_listener,
        )
        .await?;
        let Sockets {
            tcp,
            quic,
            meta: meta_listener,
            listeners,
            dns: dns_sockets,
            connect: connect_sockets,
            bound,
        } = sockets;
        let resources = Resources::of_process();
        let capacity = Capacity::new(&config.limits, config.dns.is_some(), resources);
        if let Some(warning) = capacity.warning(&config.limits, resources) {
            warn!("{warning}");
        }
        let dns = records::serve(
            dns_sockets,
            &config,
            DnsContext {
                data: &data,
                nodes: &nodes,
                records: &records,
                metrics: &mut metrics_registry,
                shutdown: &shutdown,
                limits: capacity.dns,
            },
        );
        let advertised = bound.advertised(&config.advertise);
        data.set_advertised(&advertised)?;

        let drivers = TaskTracker::new();
        let ranges = LiveClusterNetworks::default();
        let policy = SharedPortPolicy::default();
        policy.replace(PortPolicy {
            own: bound.reserved_ports(),
            ..config.ports.clone()
        });
        let targets = targets::targets(&config, &watcher, &readiness)?;
        let cluster = start_cluster(
            &config,
            cluster_handle,
            ClusterContext {
                routes: &routes,
                records: &records,
                policy: &policy,
                ranges: &ranges,
                registry: &registry,
                metrics: &metrics,
                readiness: &readiness,
                data: &data,
                bound: &bound,
                agents: &agents,
                targets: &targets,
                serving_names: &serving_names,
                shutdown: &shutdown,
            },
        );
        let shared = Arc::new(IngressContext {
            routes: routes.clone(),
            registry: registry.clone(),
            policy,
            pods: cluster.pods.clone(),
            targets,
            delegation_callers: DelegationPolicy::named(config.targets.delegation_callers.clone()),
            limits: ListenerLimits {
                handshake: config.limits.handshake_timeout,
                request_head_time: config.limits.request_head_timeout,
                request_head_bytes: config.limits.request_head_bytes,
                idle: config.limits.caller_idle_timeout,
                open: config.limits.open_timeout,
            },
            callers: ConnLimiter::new(capacity.callers),
            verified_callers: ConnLimiter::new(capacity.verified_callers),
            metrics: metrics.clone(),
            shutdown: shutdown.clone(),
            drivers: drivers.clone(),
        });
        for (listener, mode) in listeners {
            shared.start(listener, mode);
        }
        let tunnels = connect_sockets.start(
            &config,
            (&shared, &ranges, &bound),
            (certificates, &watcher),
        )?;
        Acceptor {
            quic: quic.clone(),
            tcp_handler: Arc::new(TcpHandler {
                session_tls: session_tls(ALPN_SESSION_TCP)?,
                settings,
                enroll_tls: tls::enroll_server(agents.enrollment.clone())?,
                enrollment: Enrollment {
                    renewals: agents.renewals.clone(),
                    tokens: tokens.clone(),
                    nodes: nodes.clone(),
                    attestor: cluster.attestor.clone(),
                },
            }),
            sessions: Arc::new(Sessions {
                registry: registry.clone(),
                nodes: nodes.clone(),
                metrics: metrics.clone(),
                shutdown: shutdown.clone(),
                advertised: advertised.clone(),
                limits: SessionLimits {
                    handshake: config.limits.handshake_timeout,
                    streams: config.limits.streams_per_agent,
                    target_dial: config.limits.target_dial_timeout,
                    drain: config.drain_timeout,
                    liveness: config.limits.liveness(),
                    expiry_grace: config.limits.expiry_grace(),
                },
                admission_rate: Arc::new(AdmissionRate::new(config.limits.admissions_per_node)),
                revocations: revocations.clone(),
                trust: Some(agents.trust.clone()),
                renewals: agents.renewals.clone(),
            }),
            handshake_limit: config.limits.handshake_timeout,
            pre_auth: ConnLimiter::new(capacity.half_open),
            tcp_permits: Arc::new(Semaphore::new(capacity.agents_over_tcp)),
        }
        .start(tcp);
        let list = {
            let (nodes, registry) = (nodes.clone(), registry.clone());
            Arc::new(move || {
                let list = status::list(&nodes, &routes.of(RouteSource::Cluster), &registry);
                // A structure of texts and numbers always has a JSON form.
                list.iter()
                    .filter_map(|node| serde_json::to_value(node).ok())
                    .collect::<Vec<_>>()
            })
        };
        let state = AdminState {
            ca: ca.clone(),
            tokens: tokens.clone(),
            nodes: nodes.clone(),
            revocations: revocations.clone(),
            status: list.clone(),
            advertised,
            can_issue: config.agent_files.is_none(),
            tunnels: Some(tunnels),
        };
        admin::start(state, &data, &shutdown)?;
        Meta::new(readiness.clone(), metrics_registry)
            .with("/nodes", Box::new(move |peer| nodes_endpoint(peer, list())))
            .start(meta_listener, &shutdown);
        if let Some(dns) = &dns {
            dns.start_loop_detection(&shutdown).await?;
        }
        drop(starting);
        bound.log();
        Ok(Self {
            bound,
            config,
            shutdown,
            readiness,
            registry,
            quic,
            drivers,
            ca,
            tokens,
            nodes,
            records,
            cluster,
            revocations,
            lease_guard,
            _lock: lock,
        })
    }

    /// Returns the bound addresses.
    #[must_use]
    pub fn bound(&self) -> &BoundAddrs {
        &self.bound
    }

    /// Returns the shutdown handle. Cancel its drain token to stop the server gracefully.
    #[must_use]
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Returns the local CA.
    #[must_use]
    pub fn ca(&self) -> &Arc<LocalCa> {
        &self.ca
    }

    /// Returns the join tokens.
    #[must_use]
    pub fn tokens(&self) -> &Arc<TokenStore> {
        &self.tokens
    }

    /// Returns the known nodes.
    #[must_use]
    pub fn nodes(&self) -> &Arc<KnownNodes> {
        &self.nodes
    }

    /// Returns the records of the embedded DNS: the known nodes, and the names of the
    /// configuration.
    #[must_use]
    pub fn records(&self) -> &Records {
        &self.records
    }

    /// Returns the nodes whose certificates are revoked.
    #[must_use]
    pub fn revocations(&self) -> &Arc<Revocations> {
        &self.revocations
    }

    /// Returns the registry of connected agents.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Serves until the drain token is cancelled, then stops: the server accepts no new work,
    /// running work may finish within the drain timeout, and sessions close after all sent data has
    /// arrived.
    pub async fn run(mut self) {
        tokio::select! {
            () = self.shutdown.drain().cancelled() => {}
            () = self.shutdown.stop().cancelled() => {}
        }
        let _not_ready = self.readiness.block("draining");
        let lease_guard = std::mem::take(&mut self.lease_guard);
        // Release the lease at the start of the drain, so that the next server can take the keys at
        // once. Packets that still reach this server are handled. A packet of one of this server's
        // sessions that reaches the other server is misrouted, and the other server's reset reports
        // that at once.
        let stop = self.shutdown.stop().clone();
        tokio::join!(self.drain(), lease_guard.release(&stop));
        self.shutdown.finish().await;
        self.drivers.close();
        self.drivers.wait().await;
        if let Err(error) = self.nodes.save() {
            warn!(%error, "cannot save the known nodes");
        }
        info!("stopped");
    }

    /// Accepts no new work, waits for running work within the drain timeout, then closes all
    /// sessions.
    async fn drain(&mut self) {
        match self.shutdown.drain_within(self.config.drain_timeout).await {
            DrainOutcome::Complete => {
                info!("all requests are finished");
                self.wait_for_agents_to_leave().await;
            }
            DrainOutcome::Deadline => warn!(
                streams = self.shutdown.work_left(),
                "drain timeout is over, resetting the remaining streams"
            ),
            DrainOutcome::Stopped => debug!("stopping without waiting"),
        }
        let closing = TaskTracker::new();
        for agent in self.registry.all() {
            closing
                .spawn(async move { agent.close(CloseCode::Draining, "server is stopping").await });
        }
        closing.close();
        let cluster = &mut self.cluster;
        let quiet = async {
            closing.wait().await;
            tokio::join!(self.quic.wait_idle(), cluster.ended());
        };
        tokio::select! {
            () = quiet => {}
            () = self.shutdown.stop().cancelled() => {}
        }
    }
}

impl App {
    /// Gives agents time to connect to another server before their sessions here close, if another
    /// server may take over at once. Until the network routes new connections only to that server,
    /// this server must refuse them: a QUIC dial to a stopped server would get no answer for
    /// seconds.
    async fn wait_for_agents_to_leave(&self) {
        let settings = self.config.kubernetes.as_ref();
        if settings.is_none_or(|settings| settings.single_replica) {
            return;
        }
        let left = async {
            let mut interval = tokio::time::interval(AGENTS_LEAVE_POLL);
            while self
                .registry
                .all()
                .iter()
                .any(|agent| !agent.is_withdrawn())
            {
                interval.tick().await;
            }
        };
        tokio::select! {
            _either_way = tokio::time::timeout(AGENTS_LEAVE_TIMEOUT, left) => {}
            () = self.shutdown.stop().cancelled() => {}
        }
    }
}

/// Time for agents to connect to another server. Agents dial within 0.5 s, and again until the
/// cluster's network knows that this server is stopping, which takes about a second.
const AGENTS_LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
const AGENTS_LEAVE_POLL: Duration = Duration::from_millis(20);

/// Returns the windows and timers of agents' sessions, for every transport.
fn session_settings(config: &Config, pool: Arc<BufferPool>) -> SessionSettings {
    let limits = &config.limits;
    SessionSettings {
        stream_window: limits.stream_window,
        streams: limits.streams_per_agent,
        // Agents send keep-alives. The session's liveness timers probe when one is missing.
        keep_alive: None,
        idle_timeout: limits.idle_timeout(),
        congestion: config.quic_congestion,
        pool,
    }
}

/// Updates the routes whenever the known nodes change.
fn follow_nodes(nodes: &Arc<KnownNodes>, routes: &Routes, metrics: &Metrics, shutdown: &Shutdown) {
    let (nodes, routes, metrics) = (nodes.clone(), routes.clone(), metrics.clone());
    let mut changed = nodes.changed();
    let rebuild = move || {
        let known = nodes.snapshot();
        let known = known.iter().map(|(name, node)| RouteNode {
            name: name.clone(),
            hostname: None,
            addresses: node.addresses.clone(),
            kubelet_port: None,
        });
        let table = routes.set(RouteSource::Known, known.collect());
        metrics.routes(table.len(), table.conflicts().len());
    };
    rebuild();
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            rebuild();
        }
    });
}

fn nodes_endpoint(peer: SocketAddr, nodes: Vec<serde_json::Value>) -> meta::FullResponse {
    if !peer.ip().to_canonical().is_loopback() {
        return meta::text(
            http::StatusCode::FORBIDDEN,
            "only for callers on this host\n",
        );
    }
    meta::json(http::StatusCode::OK, &nodes.into())
}
