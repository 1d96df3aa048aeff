//! Builds the agent's components, binds its listeners, and runs until the drain ends.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};
use tunnel_process::command_line::EXIT_USAGE;
use tunnel_process::config_report::{ConfigState, UnusableFile};
use tunnel_process::disk::{self, FileActivity};
use tunnel_process::followed::Followed;
use tunnel_process::host::Resources;
use tunnel_process::meta::{Meta, MetaServer, Readiness, ReadinessBlock};
use tunnel_process::settings::ConfigError;
use tunnel_process::shutdown::{DrainOutcome, Shutdown};
use tunnel_proto::tls;
use tunnel_proto::transport::BufferPool;
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::wire::name::InstanceId;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};

use crate::config::{Config, LoadError};
use crate::connector::member_addresses::ServerPolicy;
use crate::connector::status::{SESSION, SessionStatuses};
use crate::connector::{ConnectorSet, Dialers};
use crate::credentials::{CaFile, CredentialError, RotatingCredentials};
use crate::diag::{self, AgentFacts};
use crate::egress::Egress;
use crate::handover::HostLock;
use crate::ingress::sessions::CloudSessions;
use crate::ingress::{Ingress, listeners};
use crate::join::JoinCommandError;
use crate::loop_detection::LoopDetector;
use crate::metrics::Metrics;
use crate::node_ip::NodeIpLookup;
use crate::policy::DialPolicy;
use crate::render::RenderError;
use crate::session::{LostSessions, SessionContext};
use crate::status;

mod check;
mod credential_tasks;
mod initial_credentials;
mod reload;

pub use check::check_environment;
use credential_tasks::{CredentialTasks, follow_ca_file};
use initial_credentials::InitialCredentials;
use reload::Followers;
pub use reload::PATH as RELOAD_PATH;

/// A started agent. One process can run any number of agents. Dropping an `App` stops it at once.
#[derive(Debug)]
pub struct App {
    config: Config,
    ca: CaFile,
    initial_credentials: InitialCredentials,
    instance: InstanceId,
    metrics: Metrics,
    pool: Arc<BufferPool>,
    readiness: Readiness,
    statuses: Arc<SessionStatuses>,
    /// Blocks readiness from the start, so that the agent is never ready without a session.
    readiness_block: Option<ReadinessBlock>,
    shutdown: Shutdown,
    meta_addr: Option<SocketAddr>,
    host_lock: Arc<HostLock>,
    ingress: Arc<Ingress>,
    cloud_sessions: Arc<CloudSessions>,
    loop_detector: Arc<LoopDetector>,
    cloud_addrs: Vec<SocketAddr>,
    followers: Followers,
    _stop_on_drop: DropGuard,
}

impl App {
    /// Binds the meta port and the listeners for targets of the cloud, and reads the stored
    /// credentials or the token. Does not connect to the server.
    ///
    /// # Errors
    /// Returns an error if the meta port cannot be bound or the credentials cannot be read.
    /// [`exit_code`] distinguishes usage errors from others.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let shutdown = Shutdown::new();
        let stop_on_drop = shutdown.stop().clone().drop_guard();
        let readiness = Readiness::default();
        let statuses = Arc::new(SessionStatuses::new(readiness.clone()));
        let pool = config.buffer_pool();
        let (metrics, registry) = Metrics::register(pool.clone());
        let ca = follow_ca_file(&config, &metrics, &shutdown)?;
        let initial_credentials = InitialCredentials::load(&config, &ca, &statuses)?;
        let readiness_block = Some(readiness.block(SESSION));
        disk::start(
            config.data_dir.clone(),
            FileActivity::default(),
            readiness.clone(),
            &shutdown,
        );
        let host_lock = HostLock::start(&config.node_name, &config.data_dir, &readiness, &shutdown);
        let config_state = ConfigState::new(config.file.as_deref(), &shutdown);
        let meta = Meta::new(readiness.clone(), registry)
            .with(status::PATH, status::endpoint(statuses.clone()))
            .with_action(reload::PATH, reload::action(config_state.clone()))
            .with_action(diag::LOG_PATH, diag::log_action())
            .into_server(&shutdown);
        match &config.meta_socket {
            Some(socket) => meta
                .listen_unix(socket)
                .context("cannot listen (--meta-socket)")?,
            None => meta.listen_unix_when_possible(config.socket()),
        }
        let meta_addr = match config.meta_listen {
            Some(address) => Some(
                start_meta(address, meta, &host_lock, &readiness, &shutdown)
                    .await
                    .with_context(|| format!("cannot listen on {address} (--meta-listen)"))?,
            ),
            None => None,
        };
        let cloud_sessions = Arc::new(CloudSessions::default());
        let loop_detector = Arc::new(LoopDetector::default());
        let ingress = Arc::new(Ingress::new(
            config.node_name.clone(),
            cloud_sessions.clone(),
            loop_detector.clone(),
            &config.limits,
            metrics.clone(),
        ));
        let cloud_addrs = listeners::start(
            &ingress,
            &config.cloud_listeners,
            &host_lock,
            &readiness,
            &shutdown,
        );
        let followers = Followers::new(&config, cloud_addrs.clone());
        followers
            .clone()
            .follow(&config, config_state, &readiness, &shutdown);
        Ok(Self {
            config,
            ca,
            initial_credentials,
            instance: InstanceId::new(rand::random()),
            metrics,
            pool,
            readiness,
            statuses,
            readiness_block,
            shutdown,
            meta_addr,
            host_lock,
            ingress,
            cloud_sessions,
            loop_detector,
            cloud_addrs,
            followers,
            _stop_on_drop: stop_on_drop,
        })
    }

    /// Returns the bound address of the meta port, or `None` if it is off. It is as configured while
    /// another agent of the node has it.
    pub fn meta_addr(&self) -> Option<SocketAddr> {
        self.meta_addr
    }

    /// Returns the addresses of the listeners for targets of the cloud, in configured order. A
    /// listener that another process prevents has its configured address.
    pub fn cloud_addrs(&self) -> &[SocketAddr] {
        &self.cloud_addrs
    }

    /// Returns the shutdown handle: cancel `drain` for a graceful stop, `stop` for an immediate
    /// one.
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Returns the readiness state. The agent is ready while a live session takes new streams.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Enrolls if necessary, then maintains its sessions until a drain ends or `stop` is canceled.
    /// Dropping the future cuts all sessions.
    ///
    /// # Errors
    /// Returns an error if the agent cannot continue without operator action.
    pub async fn run(mut self) -> anyhow::Result<()> {
        let graceful_shutdown = CancellationToken::new();
        let readiness_block = self.readiness_block.take();
        let (shutdown, drain_timeout) = (self.shutdown.clone(), self.config.drain_timeout);
        let mut work = pin!(self.work(graceful_shutdown.clone(), readiness_block));
        let mut drain = pin!(self.drain(&graceful_shutdown, drain_timeout));
        let outcome = tokio::select! {
            biased;
            end = &mut drain => {
                if end == DrainOutcome::Stopped {
                    timeout(STOP_TIMEOUT, work).await.unwrap_or(Ok(()))
                } else {
                    work.await
                }
            }
            outcome = &mut work => {
                if outcome.is_ok() {
                    drain.await;
                }
                outcome
            }
        };
        shutdown.finish().await;
        if outcome.is_ok() {
            info!(node = %self.config.node_name, "stopped");
        }
        outcome
    }

    /// Waits for a drain to begin and end, then closes the sessions.
    ///
    /// The listeners accept until another agent of the node waits on this host, or until the drain is
    /// over. Connections to targets of the cloud may be watches, which never end, and their clients
    /// dial again: the drain waits [`CLOUD_DRAIN`] for them.
    async fn drain(&self, graceful_shutdown: &CancellationToken, within: Duration) -> DrainOutcome {
        tokio::select! {
            () = self.shutdown.drain().cancelled() => {}
            () = self.shutdown.stop().cancelled() => {}
        }
        let _not_ready = self.readiness.block("drain");
        let cut_at = Instant::now() + within.min(CLOUD_DRAIN);
        let end = tokio::select! {
            biased;
            end = self.wait_for_streams(within, cut_at) => end,
            () = self.hand_over(cut_at) => DrainOutcome::Stopped,
        };
        let streams = self.shutdown.work_left();
        self.close_listeners().await;
        let _cut_by_stop = timeout(STOP_TIMEOUT, self.ingress.cut()).await;
        if streams > 0 {
            warn!(node = %self.config.node_name, streams, ?end, "drain deadline reached; resetting open streams");
        }
        graceful_shutdown.cancel();
        end
    }

    /// Waits until streams and connections have ended, or their time is over.
    async fn wait_for_streams(&self, within: Duration, cut_at: Instant) -> DrainOutcome {
        let connections = async {
            tokio::select! {
                biased;
                () = self.shutdown.stop().cancelled() => {}
                () = self.ingress.wait_idle() => {}
                () = sleep_until(cut_at) => {}
            }
        };
        tokio::join!(self.shutdown.drain_within(within), connections).0
    }

    /// Hands over to another agent of the node as soon as one waits on this host. Never completes.
    async fn hand_over(&self, cut_at: Instant) {
        self.host_lock.wanted().await;
        info!(node = %self.config.node_name, "another agent of this node waits on this host; handing over");
        self.close_listeners().await;
        sleep_until(cut_at).await;
        self.ingress.cut().await;
        std::future::pending().await
    }

    /// Closes the listeners, then releases the lock.
    async fn close_listeners(&self) {
        self.shutdown.close_listeners().await;
        self.host_lock.release();
    }

    async fn work(
        &self,
        graceful_shutdown: CancellationToken,
        readiness_block: Option<ReadinessBlock>,
    ) -> anyhow::Result<()> {
        let config = &self.config;
        let drain = self.shutdown.drain();
        let rotating_credentials = tokio::select! {
            biased;
            () = drain.cancelled() => return Ok(()),
            rotating_credentials = self.initial_credentials.rotating_credentials(
                config,
                &self.ca,
                &self.metrics,
                &self.readiness,
            ) => rotating_credentials?,
        };
        let followers = &self.followers;
        let dialers = dialers(
            config,
            self.pool.clone(),
            &rotating_credentials,
            followers.dial_policy.clone(),
        )?;
        let dialers = Arc::new(dialers);
        let credential_tasks = CredentialTasks {
            rotating_credentials: &rotating_credentials,
            config,
            ca: &self.ca,
            metrics: &self.metrics,
            statuses: &self.statuses,
            shutdown: &self.shutdown,
        };
        credential_tasks.start(&self.initial_credentials);
        let egress = Egress::new(
            config.node_name.clone(),
            followers.dial_policy.clone(),
            self.loop_detector.clone(),
            followers.limits.clone(),
            self.metrics.clone(),
            drain.clone(),
        );
        let node_ip = NodeIpLookup::new(
            config.node_name.clone(),
            config.node_ip,
            self.readiness.clone(),
        );
        let followed = node_ip.clone();
        self.shutdown
            .spawn_service(async move { followed.follow().await });
        let context = SessionContext {
            node: config.node_name.clone(),
            node_ip,
            labels: config.labels.clone(),
            instance: self.instance,
            limits: config.limits,
            facts: config.remote_diag.then(|| {
                let (readiness, statuses) = (self.readiness.clone(), self.statuses.clone());
                let sessions = move |now| serde_json::json!(statuses.report(now));
                Arc::new(AgentFacts::new(config, readiness, Box::new(sessions)))
            }),
            egress: Arc::new(egress),
            cloud_sessions: self.cloud_sessions.clone(),
            lost_sessions: LostSessions::default(),
            host_lock: self.host_lock.clone(),
            metrics: self.metrics.clone(),
            shutdown: self.shutdown.clone(),
            rotating_credentials,
            graceful_shutdown,
        };
        let connectors = ConnectorSet::new(
            dialers.clone(),
            config.transport,
            config.replicas,
            Arc::new(context),
            self.statuses.clone(),
            readiness_block,
        );
        connectors.run().await;
        dialers.wait_idle().await;
        Ok(())
    }
}

/// Returns the exit code for an error of loading, of rendering, [`App::start`] or [`App::run`]: 64 if
/// the configuration or the command line must change, else 1.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let usage = error.chain().any(|cause| {
        let settings = cause.downcast_ref::<ConfigError>();
        cause
            .downcast_ref::<LoadError>()
            .is_some_and(LoadError::is_usage)
            || settings.is_some_and(ConfigError::is_usage)
            || cause.is::<RenderError>()
            || cause
                .downcast_ref::<UnusableFile>()
                .is_some_and(UnusableFile::is_usage)
            || cause
                .downcast_ref::<CredentialError>()
                .is_some_and(CredentialError::is_usage)
            || cause
                .downcast_ref::<JoinCommandError>()
                .is_some_and(JoinCommandError::is_usage)
    });
    if usage { EXIT_USAGE } else { EXIT_FAILURE }
}

/// Binds the meta port, or has a task bind it while another agent of the node has it.
async fn start_meta(
    address: SocketAddr,
    meta: MetaServer,
    host_lock: &Arc<HostLock>,
    readiness: &Readiness,
    shutdown: &Shutdown,
) -> std::io::Result<SocketAddr> {
    let listener = match TcpListener::bind(address).await {
        Err(error)
            if error.kind() == std::io::ErrorKind::AddrInUse && host_lock.has_other_holder() =>
        {
            let (lock, readiness, drain) = (
                host_lock.clone(),
                readiness.clone(),
                shutdown.drain().clone(),
            );
            shutdown.spawn_service(async move {
                tokio::select! {
                    biased;
                    () = drain.cancelled() => {}
                    () = bind_meta(address, meta, lock, readiness) => {}
                }
            });
            return Ok(address);
        }
        bound => bound?,
    };
    let bound = listener.local_addr()?;
    meta.listen(listener);
    info!(listener = META, address = %bound, "listening");
    Ok(bound)
}

/// Binds the meta port when it is free. Another user's process that has it is a condition.
async fn bind_meta(
    address: SocketAddr,
    meta: MetaServer,
    lock: Arc<HostLock>,
    readiness: Readiness,
) {
    loop {
        lock.address_may_be_free().await;
        match TcpListener::bind(address).await {
            Ok(listener) => {
                readiness.set_conditions(META, Vec::new());
                meta.listen(listener);
                return info!(listener = META, %address, "listening");
            }
            Err(error) => {
                let problem = format!("cannot listen on {address} (--meta-listen): {error}");
                let problem = (!lock.is_standby()).then_some(problem);
                readiness.set_conditions(META, problem.into_iter().collect());
            }
        }
    }
}

fn dialers(
    config: &Config,
    pool: Arc<BufferPool>,
    rotating_credentials: &RotatingCredentials,
    dial_policy: Followed<DialPolicy>,
) -> anyhow::Result<Dialers> {
    let tls = |alpn| {
        tls::session_client_with_identity(rotating_credentials.identity().clone(), alpn)
            .context("cannot use the stored certificate")
    };
    let settings = config.session_settings(pool);
    info!(
        memory_limit_bytes = Resources::of_process().memory,
        buffer_pool_bytes = settings.pool.limit(),
        streams = config.limits.streams_per_agent,
        "capacity of this process; limits.bufferPool and streamsPerAgent change it"
    );
    let quic = QuicDialer::new(tls(ALPN_SESSION)?, settings.clone())
        .context("cannot use the TLS configuration for QUIC")?;
    let proxy = config.proxy.clone();
    let h2 = H2Dialer::new(tls(ALPN_SESSION_TCP)?, settings, Arc::new(proxy.clone()));
    Ok(Dialers {
        server_policy: Arc::new(ServerPolicy::new(&config.servers, dial_policy)),
        proxy,
        quic: Arc::new(quic),
        h2: Arc::new(h2),
    })
}

/// Name of the meta port in log lines and conditions.
const META: &str = "meta";
/// Time of connections to targets of the cloud after SIGTERM.
const CLOUD_DRAIN: Duration = Duration::from_secs(5);
/// Exit code for a failure to start or a failure while running.
pub const EXIT_FAILURE: u8 = 1;
/// Time to notify the server after a second signal.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests;
