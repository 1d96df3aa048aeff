//! Configuration: merges the layers of raw settings (`RawConfig`: flags, environment, YAML) and
//! converts them to checked settings (`Config`).

use std::path::Path;
use std::sync::Arc;

pub use tunnel_process::config_file::LoadError;
use tunnel_process::config_file::{ConfigFile, config_path};
use tunnel_proto::identity::sha256;

mod checked;
mod cloud;
mod identity;
mod limits;
mod raw;
mod token;

pub(crate) use checked::DEFAULT_DATA_DIR;
pub use checked::{Config, TransportChoice, meta_endpoint, meta_socket};
pub use cloud::CloudListener;
pub(crate) use cloud::is_local;
pub use identity::{CredentialFiles, NodeIpSetting};
pub use limits::{LIMITS, Limit, Limits, RawLimits};
pub use raw::RawConfig;
pub use token::TokenSource;
pub(crate) use token::{NO_CA, NO_PIN, parse_token};

pub use crate::proxy::{EnvironmentProxy, HttpProxy, ProxyChoice};
pub use crate::secret::Secret;
pub use crate::server_address::ServerAddress;

pub const ENV_PREFIX: &str = "TUNNEL_AGENT_";

/// Merges the layers: defaults < `file` < environment < flags. `flags` contains flags and the
/// agent's own variables. `variable` looks up the others (NODE_NAME, NODE_IP, HTTPS_PROXY,
/// NO_PROXY).
///
/// # Errors
/// Returns [`LoadError`] if the file cannot be read or parsed, or if a setting is invalid.
pub fn load(
    flags: RawConfig,
    file: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Config, LoadError> {
    match config_path(file, FILE_NAME) {
        Some(path) => load_file(over_file(flags, variable), &path),
        None => Ok(Config::check(over_file(flags, variable))?),
    }
}

/// Loads a file below the layer `upper`, which has flags and variables.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_file(upper: RawConfig, path: &Path) -> Result<Config, LoadError> {
    let (file, settings) = ConfigFile::read(path, upper, sha256)?;
    let mut config = file.check(settings, Config::check)?;
    config.warnings.extend(file.warning.clone());
    config.file = Some(Arc::new(file));
    Ok(config)
}

/// Returns whether the setting of a key applies while the agent runs, when the file changes.
pub fn is_live(key: &str) -> bool {
    LIVE_KEYS.contains(&key)
}

/// Keys of the file that apply while the agent runs.
pub const LIVE_KEYS: &[&str] = &[
    "accessLog",
    "accessLogSample",
    "allowTargets",
    "denyPorts",
    "limits",
    "localhostPorts",
    "logLevel",
];

/// Name of the default configuration file, in `/etc/culvert` or the current directory.
pub const FILE_NAME: &str = "tunnel-agent.yaml";

/// Merges the layers of [`load`] without checking them.
///
/// # Errors
/// Returns [`LoadError`] for mistakes of the file.
pub fn layers(
    flags: RawConfig,
    file: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<RawConfig, LoadError> {
    let upper = over_file(flags, variable);
    let Some(path) = config_path(file, FILE_NAME) else {
        return Ok(upper);
    };
    let (file, settings) = ConfigFile::read(&path, upper, sha256)?;
    Ok(file.check(settings, Ok)?)
}

/// Returns the layer over the file.
fn over_file(flags: RawConfig, variable: impl Fn(&str) -> Option<String>) -> RawConfig {
    let shared = RawConfig {
        node_name: variable("NODE_NAME").filter(|name| !name.is_empty()),
        initial_node_ip: variable("NODE_IP").filter(|ip| !ip.is_empty()),
        environment_proxy: EnvironmentProxy::from_variables(variable),
        ..RawConfig::default()
    };
    flags.or(shared)
}

#[cfg(test)]
mod tests;
