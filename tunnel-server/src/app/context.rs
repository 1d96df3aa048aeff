//! The configuration and the state that the parts of the server share.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::warn;
use tunnel_process::disk;
use tunnel_process::followed::Followed;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::transport::{BufferPool, SessionSettings};
use tunnel_proto::wire::name::Port;

use super::credential_watcher::CredentialWatcher;
use crate::config::{Capacity, Config, SharedLimits};

use crate::dry_run::DryRunReport;
use crate::egress::labeled_nodes::LabeledNodes;
use crate::ingress::recent_requests::{RecentRequestLimits, RecentRequests};
use crate::metrics::Metrics;
use crate::routing::Routing;
use crate::routing::peers::{PeerLimits, PeerMetrics, Peers};
use crate::routing::registry::{Registry, RegistryLimits};
use crate::routing::routes::Routes;
use crate::running::RunningAccesses;
use crate::session::failures::Failures;
use tunnel_ca::IsKnown;
use tunnel_ca::enrollment::IsTaken;
use tunnel_dns::Records;
use tunnel_routing::dial_policy::LiveClusterNetworks;
use tunnel_routing::policy::{PortSettings, SharedPolicy};
use tunnel_routing::routes::RouteError;
use tunnel_store::data_dir::{DataDir, DirLock};
use tunnel_store::known_nodes::{KnownNodes, NodeMap};
use tunnel_store::state_store::{OnDamage, StateStore};

/// The context of the process before the state of the server is loaded.
pub(super) struct ProcessContext {
    pub(super) config: Config,
    pub(super) data: DataDir,
    store: StateStore,
    lock: DirLock,
    pub(super) readiness: Readiness,
    pub(super) shutdown: Shutdown,
}

/// The configuration and the state that the parts of the server share.
#[derive(Debug)]
pub(super) struct ServerContext {
    pub(super) config: Config,
    pub(super) data: DataDir,
    /// The store of the data directory.
    pub(super) store: StateStore,
    pub(super) readiness: Readiness,
    pub(super) shutdown: Shutdown,
    pub(super) metrics: Metrics,
    /// What failed at agents.
    pub(super) failures: Arc<Failures>,
    pub(super) watcher: CredentialWatcher,
    pub(super) session_settings: SessionSettings,
    pub(super) registry: Arc<Registry>,
    /// The other servers. `app/peers.rs` connects to them.
    pub(super) peers: Arc<Peers>,
    pub(super) nodes: Arc<KnownNodes>,
    pub(super) routes: Routes,
    /// Last requests of each node, if the console is on.
    pub(super) recent: Option<Arc<RecentRequests>>,
    pub(super) records: Records,
    /// Who may do what.
    pub(super) policy: SharedPolicy,
    /// Settings of the ports, which a ConfigMap of the cluster may replace.
    pub(super) ports: watch::Sender<PortSettings>,
    /// Limits, of which some follow the file of the configuration.
    pub(super) limits: SharedLimits,
    /// Ports of this server's listeners over TCP.
    pub(super) own_ports: Followed<Vec<Port>>,
    /// What a dry run of rules has found.
    pub(super) dry_run: DryRunReport,
    /// Accesses of callers and agents in progress.
    pub(super) running: RunningAccesses,
    /// Networks of the cluster, for the dial policy of the CONNECT listeners.
    pub(super) ranges: LiveClusterNetworks,
    /// Nodes with the labels that targets of the cloud name.
    pub(super) labeled_nodes: LabeledNodes,
    /// Tracks the tasks that drive connections to targets.
    pub(super) drivers: TaskTracker,
    /// Lock of the data directory, held until the process ends: one server that writes per data
    /// directory.
    _lock: DirLock,
}

impl ProcessContext {
    /// Logs the warnings of the configuration, and opens and locks the data directory.
    pub(super) fn open(config: Config, shutdown: Shutdown) -> anyhow::Result<Self> {
        for warning in &config.warnings {
            warn!("{warning}");
        }
        let path = config.data_dir.display();
        let data = DataDir::open(&config.data_dir).with_context(|| path.to_string())?;
        data.check_access()?;
        let Some(lock) = data.lock()? else {
            bail!("another tunnel-server uses {path}; give this one its own --data-dir");
        };
        let readiness = Readiness::default();
        // In a cluster a Secret has the orders about nodes.
        let on_damage = if config.kubernetes.is_some() {
            OnDamage::SetAside
        } else {
            OnDamage::Stop
        };
        let store = data.store(on_damage)?;
        store.report_to(&readiness);
        disk::start(
            config.data_dir.clone(),
            data.activity().clone(),
            readiness.clone(),
            &shutdown,
        );
        Ok(Self {
            data,
            store,
            lock,
            readiness,
            shutdown,
            config,
        })
    }
}

impl ServerContext {
    /// Returns whether a name is taken, for enrollments of new nodes: every name that could lead to a
    /// node is, also an ambiguous one.
    pub(super) fn is_taken(&self) -> IsTaken {
        let routes = self.routes.clone();
        Arc::new(move |name| {
            let found = routes.load().by_name(name).map(drop);
            match found {
                Err(RouteError::UnknownName(_)) => routes.are_known().then_some(false),
                Ok(()) | Err(_) => Some(true),
            }
        })
    }

    /// Returns whether a name is that of a known node, for handshakes.
    pub(super) fn is_known(&self) -> IsKnown {
        let routes = self.routes.clone();
        Arc::new(move |name| routes.load().knows(name))
    }

    /// Creates the state and loads the known nodes. The routes follow the known nodes, and have the
    /// names of the nodes that other servers hold.
    pub(super) fn build(
        process: ProcessContext,
        capacity: &Capacity,
        metrics_registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Self> {
        let ProcessContext {
            config,
            data,
            store,
            lock,
            readiness,
            shutdown,
        } = process;
        let nodes = Arc::new(KnownNodes::open(&data)?);
        let limits = &config.limits;
        let pool = BufferPool::new(capacity.buffer_pool);
        let metrics = Metrics::new(metrics_registry, pool.clone());
        let registry = Registry::new(RegistryLimits {
            streams_per_agent: usize::try_from(limits.streams_per_agent)?,
            buffer_pool: capacity.buffer_pool,
        });
        let peer_limits = PeerLimits {
            streams: limits.peer_streams,
            directory_nodes: limits.directory_nodes,
            buffer_pool: capacity.buffer_pool,
        };
        let peer_metrics = PeerMetrics::new(metrics_registry);
        let peers = Peers::new(config.peers.name.clone(), peer_limits, peer_metrics);
        peers.set_zone(config.peers.zone.clone());
        let others = peers.clone();
        let routes = Routes::new(Arc::new(move |node| others.holds(node)));
        let recent = config.status_page.is_some();
        let recent = recent.then(|| Arc::new(RecentRequests::new(RecentRequestLimits::default())));
        follow_nodes(&nodes, &routes, &metrics, &shutdown);
        let labeled_nodes = LabeledNodes::new(&config.cloud);
        let shared_limits = SharedLimits::from(config.limits);
        Ok(Self {
            watcher: CredentialWatcher {
                interval: limits.reload_every,
                readiness: readiness.clone(),
                metrics: metrics.clone(),
                shutdown: shutdown.clone(),
            },
            session_settings: session_settings(&config, pool),
            dry_run: DryRunReport::new(config.policy.dry_run.is_some()),
            running: RunningAccesses::default(),
            config,
            data,
            store,
            readiness,
            shutdown,
            metrics,
            failures: Arc::default(),
            registry: Arc::new(registry),
            peers,
            nodes,
            routes,
            recent,
            records: Records::default(),
            policy: SharedPolicy::default(),
            ports: watch::Sender::default(),
            limits: shared_limits,
            own_ports: Followed::default(),
            ranges: LiveClusterNetworks::default(),
            labeled_nodes,
            drivers: TaskTracker::new(),
            _lock: lock,
        })
    }

    /// Returns what opens streams to nodes, over this server or another one.
    pub(super) fn routing(&self) -> Routing {
        Routing::new(self.registry.clone(), self.peers.clone())
    }
}

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
    let mut handled = NodeMap::default();
    let mut update = move || {
        let table = routes.follow_known(nodes.snapshot(), &mut handled);
        metrics.routes(table.len(), table.conflicts());
    };
    update();
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            update();
        }
    });
}
