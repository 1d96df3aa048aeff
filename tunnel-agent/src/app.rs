//! Builds the agent's components, binds the meta port, and runs until the drain ends.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};
use tunnel_proto::process::meta::{Meta, Readiness, ReadinessBlock};
use tunnel_proto::process::shutdown::{DrainOutcome, Shutdown};
use tunnel_proto::tls;
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::transport::{BufferPool, SessionSettings};
use tunnel_proto::wire::name::InstanceId;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};

use crate::config::{Config, LoadError};
use crate::connector::{Connector, Dialers, SESSION};
use crate::credentials::{
    CredentialError, CredentialStore, Credentials, RotatingCredentials, Stored, read_token,
};
use crate::egress::Egress;
use crate::enroll::{EnrollProof, Enrollment, enroll, renew_or_enroll};
use crate::metrics::Metrics;
use crate::session::SessionContext;

mod credential_tasks;

/// A started agent. One process can run any number of agents. Dropping an `App` stops it at once.
#[derive(Debug)]
pub struct App {
    config: Config,
    initial_credentials: InitialCredentials,
    instance: InstanceId,
    metrics: Metrics,
    readiness: Readiness,
    /// Blocks readiness from the start, so that the agent is never ready without a session.
    readiness_block: Option<ReadinessBlock>,
    shutdown: Shutdown,
    meta_addr: Option<SocketAddr>,
    _stop_on_drop: DropGuard,
}

/// The source of the first credentials.
#[derive(Debug)]
enum InitialCredentials {
    Stored(Box<Credentials>, CredentialStore),
    /// The operator's certificate and key as read, with the digest of their files.
    CredentialFiles(Box<Credentials>, [u8; 32]),
    Enroll(Box<Enrollment>),
    /// Renewal of a stored certificate that has expired: first with its key, then, if the server
    /// refuses that, with a token.
    Renew(Box<Enrollment>, Option<Box<Enrollment>>),
}

impl App {
    /// Binds the meta port and reads the stored credentials or the token. Does not connect to the
    /// server.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound or the credentials cannot be read.
    /// [`exit_code`] distinguishes usage errors from others.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let shutdown = Shutdown::new();
        let stop_on_drop = shutdown.stop().clone().drop_guard();
        let initial_credentials = load_credentials(&config)?;
        let (metrics, registry) = Metrics::register();
        let readiness = Readiness::default();
        let readiness_block = Some(readiness.block(SESSION));
        let meta_addr = match config.meta_listen {
            Some(address) => Some(
                start_meta(address, registry, &readiness, &shutdown)
                    .await
                    .with_context(|| format!("cannot listen on {address} (--meta-listen)"))?,
            ),
            None => None,
        };
        Ok(Self {
            config,
            initial_credentials,
            instance: InstanceId::new(rand::random()),
            metrics,
            readiness,
            readiness_block,
            shutdown,
            meta_addr,
            _stop_on_drop: stop_on_drop,
        })
    }

    /// Returns the bound address of the meta port, or `None` if it is off.
    #[must_use]
    pub fn meta_addr(&self) -> Option<SocketAddr> {
        self.meta_addr
    }

    /// Returns the shutdown handle: cancel `drain` for a graceful stop, `stop` for an immediate
    /// one.
    #[must_use]
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// Returns the readiness state. The agent is ready while a live session takes new streams.
    #[must_use]
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Enrolls if necessary, then maintains a session until a drain ends or `stop` is canceled.
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
            info!(agent = %self.config.node_name, "stopped");
        }
        outcome
    }

    /// Waits for a drain to begin and end, then closes the session.
    async fn drain(&self, graceful_shutdown: &CancellationToken, within: Duration) -> DrainOutcome {
        tokio::select! {
            () = self.shutdown.drain().cancelled() => {}
            () = self.shutdown.stop().cancelled() => {}
        }
        let _not_ready = self.readiness.block("drain");
        let end = self.shutdown.drain_within(within).await;
        let streams = self.shutdown.work_left();
        if streams > 0 {
            warn!(agent = %self.config.node_name, streams, ?end, "drain deadline reached; resetting open streams");
        }
        graceful_shutdown.cancel();
        end
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
            rotating_credentials = self.rotating_credentials() => rotating_credentials?,
        };
        let dialers = Arc::new(dialers(config, &rotating_credentials)?);
        self.spawn_credential_tasks(&rotating_credentials);
        let egress = Egress::new(
            config.node_name.clone(),
            config.dial_policy.clone(),
            &config.limits,
            self.metrics.clone(),
            drain.clone(),
        );
        let context = SessionContext {
            node: config.node_name.clone(),
            node_ip: config.node_ip,
            instance: self.instance,
            limits: config.limits.clone(),
            egress: Arc::new(egress),
            metrics: self.metrics.clone(),
            shutdown: self.shutdown.clone(),
            rotating_credentials,
            graceful_shutdown,
        };
        let connector = Connector::new(
            dialers.clone(),
            config.transport,
            Arc::new(context),
            self.readiness.clone(),
            readiness_block,
        );
        connector.run().await;
        dialers.wait_idle().await;
        Ok(())
    }
}

impl App {
    /// Returns the first credentials, after enrollment if necessary.
    async fn rotating_credentials(&self) -> anyhow::Result<Arc<RotatingCredentials>> {
        let (node, metrics) = (self.config.node_name.clone(), self.metrics.clone());
        let ca = self.config.ca.clone();
        let rotate = |credentials: &Credentials, store| {
            RotatingCredentials::new(node, credentials.clone(), store, ca, metrics)
        };
        match &self.initial_credentials {
            InitialCredentials::Stored(credentials, store) => {
                Ok(rotate(credentials, Some(store.clone())))
            }
            InitialCredentials::CredentialFiles(credentials, _) => Ok(rotate(credentials, None)),
            InitialCredentials::Enroll(enrollment) => {
                let _not_ready = self.readiness.block("enrollment");
                let enrolled = enroll(enrollment).await?;
                Ok(rotate(
                    &enrolled.credentials,
                    Some(enrollment.store.clone()),
                ))
            }
            InitialCredentials::Renew(renewal, by_token) => {
                let _not_ready = self.readiness.block("enrollment");
                let enrolled = match by_token {
                    Some(by_token) => renew_or_enroll(renewal, by_token).await?,
                    None => enroll(renewal).await?,
                };
                // The expired credentials stay in use until the new ones have worked.
                let ended: &Credentials = match &renewal.proof {
                    EnrollProof::ExpiredCertificate(ended) => ended,
                    EnrollProof::Token(_) | EnrollProof::ServiceAccount(..) => {
                        &enrolled.credentials
                    }
                };
                let rotating_credentials = rotate(ended, Some(renewal.store.clone()));
                rotating_credentials
                    .adopt(enrolled.credentials, enrolled.issued, false)
                    .await;
                Ok(rotating_credentials)
            }
        }
    }

    /// Starts the task that maintains the credentials during sessions: reloads the operator's
    /// files, or renews an expired certificate.
    fn spawn_credential_tasks(&self, rotating_credentials: &Arc<RotatingCredentials>) {
        if !matches!(
            self.initial_credentials,
            InitialCredentials::CredentialFiles(..)
        ) {
            credential_tasks::watch_ca_file(
                rotating_credentials.clone(),
                &self.config,
                (&self.metrics, &self.shutdown),
            );
        }
        match (&self.initial_credentials, &self.config.credential_files) {
            (InitialCredentials::CredentialFiles(_, digest), Some(credential_files)) => {
                credential_tasks::watch_credential_files(
                    rotating_credentials.clone(),
                    credential_files.clone(),
                    &self.config,
                    *digest,
                    (&self.metrics, &self.shutdown),
                )
            }
            (InitialCredentials::CredentialFiles(..), None) => {}
            (InitialCredentials::Stored(_, store), _) => credential_tasks::renew(
                rotating_credentials.clone(),
                store.clone(),
                &self.config,
                &self.shutdown,
            ),
            (
                InitialCredentials::Enroll(enrollment) | InitialCredentials::Renew(enrollment, _),
                _,
            ) => {
                credential_tasks::renew(
                    rotating_credentials.clone(),
                    enrollment.store.clone(),
                    &self.config,
                    &self.shutdown,
                );
            }
        }
    }
}

/// Returns the exit code for an error of loading, [`App::start`] or [`App::run`]: 64 if the
/// configuration must change, else 1.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    let usage = error.chain().any(|cause| {
        cause.is::<LoadError>()
            || cause
                .downcast_ref::<CredentialError>()
                .is_some_and(CredentialError::is_usage)
    });
    if usage { EXIT_USAGE } else { EXIT_FAILURE }
}

fn load_credentials(config: &Config) -> anyhow::Result<InitialCredentials> {
    let node = &config.node_name;
    if let Some(credential_files) = &config.credential_files {
        if config.token.is_some() {
            info!(agent = %node, "token ignored: --cert-file is given");
        }
        let loaded = credential_files.load(node)?;
        return Ok(InitialCredentials::CredentialFiles(
            Box::new(loaded.value),
            loaded.digest,
        ));
    }
    let store = CredentialStore::open(&config.data_dir)?;
    let stored = store.load(node, config.ca.as_deref(), SystemTime::now())?;
    let ended = match stored {
        Stored::Valid(credentials) => {
            if config.token.is_some() {
                info!(agent = %node, dir = %store.dir().display(), "token ignored: a valid certificate is stored");
            }
            return Ok(InitialCredentials::Stored(credentials, store));
        }
        Stored::Expired(_, Some(ended)) => {
            let renewal = Box::new(enrollment(
                config,
                EnrollProof::ExpiredCertificate(ended),
                &store,
            ));
            // The token may have been deleted together with its file.
            let token = config
                .token
                .as_ref()
                .and_then(|source| read_token(source, config.ca.is_some()).ok());
            let by_token = token.map(|token| {
                Box::new(enrollment(
                    config,
                    EnrollProof::from_token(token, None),
                    &store,
                ))
            });
            return Ok(InitialCredentials::Renew(renewal, by_token));
        }
        Stored::Expired(ended, None) => Some(humantime::format_rfc3339_seconds(ended)),
        Stored::Missing => None,
    };
    let dir = config.data_dir.clone();
    let token = match (&config.token, ended) {
        (Some(source), ended) => {
            if let Some(ended) = ended {
                warn!(agent = %node, %ended, "stored certificate has ended; enrolling again");
            }
            read_token(source, config.ca.is_some())?
        }
        (None, Some(ended)) => {
            return Err(CredentialError::Expired {
                dir,
                ended: ended.to_string(),
                node: node.clone(),
            }
            .into());
        }
        (None, None) => {
            let node = node.clone();
            return Err(CredentialError::NoToken { dir, node }.into());
        }
    };
    let proof = EnrollProof::from_token(token, None);
    Ok(InitialCredentials::Enroll(Box::new(enrollment(
        config, proof, &store,
    ))))
}

fn enrollment(config: &Config, proof: EnrollProof, store: &CredentialStore) -> Enrollment {
    Enrollment {
        servers: config.servers.clone(),
        proxy: config.proxy.clone(),
        node: config.node_name.clone(),
        proof,
        ca: config.ca.clone(),
        store: store.clone(),
        within: config.limits.handshake_timeout,
    }
}

async fn start_meta(
    address: SocketAddr,
    registry: Registry,
    readiness: &Readiness,
    shutdown: &Shutdown,
) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Meta::new(readiness.clone(), registry).start(listener, shutdown);
    info!(listener = "meta", address = %bound, "listening");
    Ok(bound)
}

fn dialers(config: &Config, rotating_credentials: &RotatingCredentials) -> anyhow::Result<Dialers> {
    let limits = &config.limits;
    let tls = |alpn| {
        tls::session_client_with_identity(rotating_credentials.identity().clone(), alpn)
            .context("cannot use the stored certificate")
    };
    let settings = SessionSettings {
        stream_window: limits.stream_window,
        // Twice the limit, since a stream may have ended at the server but not yet here. Two more
        // for the control stream and the stream that reports the end.
        streams: limits.streams_per_agent.saturating_mul(2).saturating_add(2),
        keep_alive: Some(limits.keep_alive),
        idle_timeout: limits.dead_after + IDLE_BEYOND_DEAD,
        congestion: config.quic_congestion,
        pool: BufferPool::new(limits.buffer_pool),
    };
    let quic = QuicDialer::new(tls(ALPN_SESSION)?, settings.clone())
        .context("cannot use the TLS configuration for QUIC")?;
    let proxy = config.proxy.clone();
    let h2 = H2Dialer::new(tls(ALPN_SESSION_TCP)?, settings, Arc::new(proxy.clone()));
    Ok(Dialers {
        servers: config.servers.clone(),
        proxy,
        quic: Arc::new(quic),
        h2: Arc::new(h2),
    })
}

/// Exit code for usage and configuration errors.
pub const EXIT_USAGE: u8 = 64;
/// Exit code for a failure to start or a failure while running.
pub const EXIT_FAILURE: u8 = 1;
/// Time to notify the server after a second signal.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);
/// Extra time of the transport's own idle timeout, which is only a backstop behind the session's
/// liveness limits.
const IDLE_BEYOND_DEAD: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests;
