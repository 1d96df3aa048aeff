//! Applies the file of the configuration while the agent runs. A file with a mistake changes nothing.
//! What needs a restart, and a mistake, is a condition.

use std::net::SocketAddr;
use std::sync::Arc;

use http::StatusCode;
use parking_lot::Mutex;
use tracing::info;
use tunnel_process::config_file::content_digest;
use tunnel_process::config_report::{ConfigReport, ConfigState};
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::followed::Followed;
use tunnel_process::meta::{self, ActionHandler, Readiness};
use tunnel_process::settings::{ConfigError, Layers as _};
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry;
use tunnel_proto::identity::sha256;

use crate::config::{Config, Limits, LoadError, RawConfig, is_live, load_file};
use crate::policy::DialPolicy;

/// What of the agent follows the file.
#[derive(Debug, Clone)]
pub(super) struct Followers {
    pub(super) dial_policy: Followed<DialPolicy>,
    pub(super) limits: Followed<Limits>,
}

impl Followers {
    /// Creates the values of the start. `cloud_listeners` has the ports that the system chose.
    pub(super) fn new(config: &Config, cloud_listeners: Vec<SocketAddr>) -> Self {
        Self {
            dial_policy: Followed::from(DialPolicy {
                cloud_listeners,
                ..config.dial_policy.clone()
            }),
            limits: Followed::from(config.limits),
        }
    }

    /// Follows the file, if there is one.
    pub(super) fn follow(
        self,
        config: &Config,
        state: ConfigState,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) {
        let Some(file) = config.file.clone() else {
            return;
        };
        for key in &file.overridden {
            info!(key, file = %file.path.display(), "a flag or a variable overrides the key of the file");
        }
        let report = ConfigReport::new(file.path.clone(), readiness.clone(), state);
        let report = Arc::new(report);
        let watcher = FileWatcher {
            what: "configuration",
            interval: config.limits.reload_every,
            reload_signal: shutdown.reloads(),
            digest: file.digest,
        };
        // The check of the settings reads files, which no task may do.
        let current = Arc::new(Mutex::new((config.clone(), file.digest)));
        let (planned, reported) = (current.clone(), report.clone());
        let load = move || {
            let (current, in_use) = current.lock().clone();
            let digest = content_digest(&file.path, sha256)?;
            if digest == in_use {
                return Ok(Loaded {
                    digest,
                    value: None,
                });
            }
            let new = load_file(file.upper().clone(), &file.path)?;
            let digest = new.file.as_ref().map_or(digest, |file| file.digest);
            Ok::<_, LoadError>(Loaded {
                digest,
                value: Some((plan(&current, new)?, digest)),
            })
        };
        let of_load = report.clone();
        let load = move || load().inspect_err(|error| of_load.failed(error));
        let apply = move |changed: Option<(Planned, [u8; 32])>| {
            if let Some((plan, digest)) = changed {
                let config = self.apply(plan, &reported);
                *planned.lock() = (config, digest);
            }
            Ok::<_, LoadError>(())
        };
        let on_reload = move |outcome: ReloadOutcome<'_>| report.reading(outcome);
        shutdown.spawn_service(async move { watcher.run(load, apply, on_reload).await });
    }

    /// Applies the plan, and returns the configuration that is in use from then on.
    fn apply(&self, planned: Planned, report: &ConfigReport) -> Config {
        let Planned {
            config,
            applied,
            needs_restart,
        } = planned;
        self.dial_policy.replace(DialPolicy {
            cloud_listeners: self.dial_policy.load().cloud_listeners.clone(),
            ..config.dial_policy.clone()
        });
        self.limits.replace(config.limits);
        telemetry::replace_levels(config.log.level, &config.log.access);
        let overridden = config.file.iter().flat_map(|file| file.overridden.clone());
        report.applied(applied, needs_restart, overridden.collect());
        config
    }
}

/// What a changed file does.
struct Planned {
    /// The configuration to use: the live settings of the file, and the others of before.
    config: Config,
    /// Keys whose settings change.
    applied: Vec<String>,
    /// Keys whose settings stay until a restart.
    needs_restart: Vec<String>,
}

/// Returns what the configuration `new` of a changed file does to the one in use. Blocks the thread.
fn plan(current: &Config, new: Config) -> Result<Planned, ConfigError> {
    let changed = current.raw.0.changed_keys(&new.raw.0);
    let (applied, mut needs_restart): (Vec<_>, Vec<_>) =
        changed.into_iter().partition(|key| is_live(key));
    let mixed = RawConfig::clone(&current.raw.0).with(*new.raw.0, is_live);
    let mut config = Config::check(mixed)?;
    let (limits, other) = current.limits.with_live(config.limits);
    config.limits = limits;
    needs_restart.extend(other.into_iter().map(str::to_owned));
    config.file = new.file;
    Ok(Planned {
        config,
        applied,
        needs_restart,
    })
}

/// Returns the handler of [`PATH`], which answers with a `ConfigStatus`.
pub(super) fn action(state: ConfigState) -> ActionHandler {
    Box::new(move || {
        let state = state.clone();
        Box::pin(async move { meta::json(StatusCode::OK, &state.reload().await) })
    })
}

/// Path of the action that reads the file again.
pub const PATH: &str = "/reload";
