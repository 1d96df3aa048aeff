//! Applies the file of the configuration while the agent runs. A file with a mistake changes nothing.
//! What needs a restart, and a mistake, is a condition.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::info;
use tunnel_process::config_report::ConfigReport;
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::followed::Followed;
use tunnel_process::meta::Readiness;
use tunnel_process::settings::{ConfigError, Layers as _};
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry;

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
    pub(super) fn follow(self, config: &Config, readiness: &Readiness, shutdown: &Shutdown) {
        let Some(file) = config.file.clone() else {
            return;
        };
        for key in &file.overridden {
            info!(key, file = %file.path.display(), "a flag or a variable overrides the key of the file");
        }
        let report = ConfigReport::new(file.path.clone(), readiness.clone());
        let report = Arc::new(Mutex::new(report));
        let watcher = FileWatcher {
            what: "configuration",
            interval: config.limits.reload_every,
            reload_signal: shutdown.reloads(),
            digest: file.digest,
        };
        let load = move || {
            let config = load_file(file.upper().clone(), &file.path)?;
            let digest = config.file.as_ref().map(|file| file.digest);
            Ok::<_, LoadError>(Loaded {
                digest: digest.unwrap_or_default(),
                value: config,
            })
        };
        let (mut current, reported) = (config.clone(), report.clone());
        let apply = move |new: Config| {
            let applied = self.apply(&current, new, &mut reported.lock());
            current = applied.map_err(LoadError::Invalid)?;
            Ok(())
        };
        let on_reload = move |outcome: ReloadOutcome<'_>| report.lock().reading(outcome);
        shutdown.spawn_service(async move { watcher.run(load, apply, on_reload).await });
    }

    /// Applies the live settings of a file, and returns the configuration in use. Nothing changes on
    /// an error.
    fn apply(
        &self,
        current: &Config,
        new: Config,
        report: &mut ConfigReport,
    ) -> Result<Config, ConfigError> {
        let changed = current.raw.0.changed_keys(&new.raw.0);
        let (applied, other): (Vec<_>, Vec<_>) = changed.into_iter().partition(|key| is_live(key));
        let mut needs_restart = other;
        let mixed = RawConfig::clone(&current.raw.0).with(*new.raw.0, is_live);
        let mut config = Config::check(mixed)?;
        let (limits, other) = current.limits.with_live(config.limits);
        config.limits = limits;
        needs_restart.extend(other.into_iter().map(str::to_owned));
        config.file = new.file;
        self.dial_policy.replace(DialPolicy {
            cloud_listeners: self.dial_policy.load().cloud_listeners.clone(),
            ..config.dial_policy.clone()
        });
        self.limits.replace(limits);
        telemetry::replace_levels(config.log_level, &config.access_log);
        let overridden = config.file.iter().flat_map(|file| &file.overridden);
        report.applied(&applied, &needs_restart, overridden);
        Ok(config)
    }
}
