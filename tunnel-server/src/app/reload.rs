//! Applies the file of the configuration while the server runs. A file with a mistake changes nothing.
//! What needs a restart, and a mistake, is a condition.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::info;
use tunnel_process::config_file::content_digest;
use tunnel_process::config_report::ConfigReport;
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::host::Resources;
use tunnel_process::settings::{ConfigError, Layers as _};
use tunnel_process::telemetry;
use tunnel_proto::identity::sha256;
use tunnel_proto::wire::name::Port;

use super::config_difference;
use super::context::ServerContext;
use super::services::{ServiceListeners, Services};
use super::sessions::FollowedSessions;
use crate::admin::configuration::RunningConfig;
use crate::config::{
    Capacity, Config, DescriptorUses, Environment, LoadError, RawConfig, SharedLimits, is_live,
    is_shared, load_file,
};
use crate::egress::labeled_nodes::LabeledNodes;
use crate::ingress::IngressContext;
use crate::routing::peers::Peers;
use crate::session::admission_rate;
use tunnel_routing::policy::{PortSettings, SharedPolicy};

/// The parts of the server that follow the file.
pub(super) struct Followers {
    pub(super) ingress: Arc<IngressContext>,
    pub(super) sessions: FollowedSessions,
    pub(super) services: ServiceListeners,
    /// Ports of the tunnel itself.
    pub(super) reserved_ports: Vec<Port>,
}

impl Followers {
    /// Follows the file, if there is one. Returns the state for operators.
    pub(super) fn start(self, context: &ServerContext) -> RunningConfig {
        let config = &context.config;
        let hash = shared_hash(&config.raw.0);
        let running = RunningConfig::new(config, hash, &context.shutdown);
        context.peers.set_configuration(hash);
        config_difference::report(context);
        let (services, wanted) = watch::channel(Services::of(config));
        let readiness = context.readiness.clone();
        context
            .shutdown
            .spawn_service(self.services.follow(wanted, readiness));
        let Some(file) = config.file.clone() else {
            return running;
        };
        for key in &file.overridden {
            info!(key, file = %file.path.display(), "a flag or a variable overrides the key of the file");
        }
        let readiness = context.readiness.clone();
        let report = ConfigReport::new(file.path.clone(), readiness, running.state.clone());
        let report = Arc::new(report);
        let reload = Reload {
            config: config.clone(),
            limits: context.limits.clone(),
            ports: context.ports.clone(),
            policy: context.policy.clone(),
            reserved_ports: self.reserved_ports,
            labeled_nodes: context.labeled_nodes.clone(),
            peers: context.peers.clone(),
            ingress: self.ingress,
            sessions: self.sessions,
            services,
            running: running.clone(),
            report: report.clone(),
        };
        let watcher = FileWatcher {
            what: "configuration",
            interval: config.limits.reload_every,
            reload_signal: context.shutdown.reloads(),
            digest: file.digest,
        };
        // A file with many records is parsed only when it has changed.
        let in_use = Arc::new(Mutex::new(file.digest));
        let known = in_use.clone();
        let load = move || {
            let digest = content_digest(&file.path, sha256)?;
            if digest == *known.lock() {
                return Ok(Loaded {
                    digest,
                    value: None,
                });
            }
            let config = load_file(file.upper().clone(), &file.path)?;
            let digest = config.file.as_ref().map_or(digest, |file| file.digest);
            Ok::<_, LoadError>(Loaded {
                digest,
                value: Some((config, digest, Resources::of_process())),
            })
        };
        let (of_load, of_apply) = (report.clone(), report.clone());
        let load = move || load().inspect_err(|error| of_load.failed(error));
        let mut reload = reload;
        let apply = move |changed: Option<(Config, [u8; 32], Resources)>| {
            if let Some((config, digest, resources)) = changed {
                let applied = reload.apply(config, resources);
                applied
                    .map_err(LoadError::Invalid)
                    .inspect_err(|error| of_apply.failed(error))?;
                *in_use.lock() = digest;
            }
            Ok::<_, LoadError>(())
        };
        let on_reload = move |outcome: ReloadOutcome<'_>| report.reading(outcome);
        context.shutdown.spawn_service(async move {
            watcher.run(load, apply, on_reload).await;
        });
        running
    }
}

/// What applies a changed file.
struct Reload {
    /// The configuration in use.
    config: Config,
    limits: SharedLimits,
    ports: watch::Sender<PortSettings>,
    /// Ports of the tunnel itself.
    reserved_ports: Vec<Port>,
    policy: SharedPolicy,
    labeled_nodes: LabeledNodes,
    peers: Arc<Peers>,
    ingress: Arc<IngressContext>,
    sessions: FollowedSessions,
    services: watch::Sender<Services>,
    running: RunningConfig,
    report: Arc<ConfigReport>,
}

impl Reload {
    /// Applies the live settings of a file. Nothing changes on an error.
    fn apply(&mut self, new: Config, resources: Resources) -> Result<(), ConfigError> {
        let planned = plan(&self.config, new, Environment::of_process())?;
        let config = &planned.config;
        if self.has_new_label(config) {
            let mistake = "cloud: a label that no target had before needs a restart";
            return Err(ConfigError::mistake(mistake));
        }
        self.sessions
            .cloud
            .check(&config.cloud)
            .map_err(ConfigError::mistake)?;
        self.apply_checked(config, resources);
        let hash = shared_hash(&config.raw.0);
        self.peers.set_configuration(hash);
        self.running.replace(config, &hash);
        let Planned {
            config,
            applied,
            needs_restart,
        } = planned;
        let overridden = config.file.iter().flat_map(|file| file.overridden.clone());
        self.report
            .applied(applied, needs_restart, overridden.collect());
        self.config = config;
        Ok(())
    }

    /// Returns whether a target has a label that the controllers of the cluster do not follow.
    fn has_new_label(&self, config: &Config) -> bool {
        let new = LabeledNodes::new(&config.cloud);
        let known = self.labeled_nodes.labels();
        new.labels().iter().any(|label| !known.contains(label))
    }

    fn apply_checked(&self, config: &Config, resources: Resources) {
        let limits = config.limits;
        let capacity = Capacity::new(&limits, DescriptorUses::of(config), resources);
        self.limits.replace(limits);
        self.ingress.callers.set_limits(capacity.callers);
        self.ingress
            .verified_callers
            .set_limits(capacity.verified_callers);
        self.sessions.pre_auth.set_limits(capacity.half_open);
        let before = &self.config.limits;
        if before.admissions_per_node != limits.admissions_per_node {
            let rate = admission_rate(limits.admissions_per_node);
            self.sessions.admission_rate.replace(rate);
        }
        if before.cloud_stream_rate != limits.cloud_stream_rate {
            self.sessions.cloud.replace_rate(limits.cloud_stream_rate);
        }
        let policy = config.access_policy(self.reserved_ports.clone());
        let (cloud, streams) = (&self.sessions.cloud, capacity.cloud_streams);
        cloud.replace(&config.cloud, streams, || self.policy.replace(&policy));
        if config.policy != self.config.policy {
            let has_dry_run = config.policy.dry_run.is_some();
            self.ingress.dry_run.restart(has_dry_run);
        }
        // In a cluster, the publisher combines them with the ConfigMap of the ports.
        self.ports.send_if_modified(|current| {
            let is_other = *current != config.ports;
            *current = config.ports.clone();
            is_other
        });
        self.services.send_replace(Services::of(config));
        telemetry::replace_levels(config.log.level, &config.log.access);
    }
}

/// What a changed file does.
#[derive(Debug)]
struct Planned {
    /// The configuration to use: the live settings of the file, and the others of before.
    config: Config,
    /// Keys whose settings change.
    applied: Vec<String>,
    /// Keys whose settings stay until a restart.
    needs_restart: Vec<String>,
}

/// Returns what the configuration `new` of a changed file does to the one in use.
fn plan(current: &Config, new: Config, environment: Environment) -> Result<Planned, ConfigError> {
    let changed = current.raw.0.changed_keys(&new.raw.0);
    let (applied, other): (BTreeSet<_>, BTreeSet<_>) =
        changed.into_iter().partition(|key| is_live(key));
    let mut needs_restart: Vec<String> = other.into_iter().collect();
    let mixed = RawConfig::clone(&current.raw.0).with(*new.raw.0, is_live);
    let mut config = Config::check(&mixed, environment)?;
    let (limits, other) = current.limits.with_live(config.limits);
    config.limits = limits;
    needs_restart.extend(other.into_iter().map(str::to_owned));
    config.file = new.file;
    Ok(Planned {
        config,
        applied: applied.into_iter().collect(),
        needs_restart,
    })
}

/// Returns the hash of the settings that are equal on all servers.
fn shared_hash(raw: &RawConfig) -> [u8; 32] {
    sha256(raw.lines(is_shared).as_bytes())
}
