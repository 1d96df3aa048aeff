//! Configuration: merges the layers of raw settings (`RawConfig`: flags, environment, YAML) and
//! converts them to checked settings (`Config`).

use std::path::{Path, PathBuf};

use tunnel_process::files;
use tunnel_process::settings::ConfigError;
use tunnel_process::yaml;

mod checked;
mod cloud;
mod identity;
mod limits;
mod raw;
mod token;

pub(crate) use checked::DEFAULT_DATA_DIR;
pub use checked::{Config, TransportChoice, meta_address, meta_endpoint};
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

/// A failure to load the configuration. Every variant is a usage error.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read the configuration file {path}")]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid YAML or does not match the schema.
    #[error("configuration file {path}:\n  {problems}")]
    Syntax {
        path: PathBuf,
        /// One line for each mistake, with its position.
        problems: String,
    },
    #[error(transparent)]
    Invalid(#[from] ConfigError),
}

impl LoadError {
    /// Returns the error for an invalid address of the meta port, for verbs that check no other
    /// setting.
    pub fn meta_listen(problem: String) -> Self {
        Self::Invalid(ConfigError(vec![format!("--meta-listen: {problem}")]))
    }
}

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
    let (settings, warning) = layered(flags, file, variable)?;
    let mut config = Config::check(settings)?;
    config.warnings.extend(warning);
    Ok(config)
}

/// Merges the layers of [`load`] without checking them.
///
/// # Errors
/// Returns [`LoadError`], but never [`LoadError::Invalid`].
pub fn layers(
    flags: RawConfig,
    file: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<RawConfig, LoadError> {
    layered(flags, file, variable).map(|(settings, _)| settings)
}

/// Merges the layers and collects warnings about the file.
fn layered(
    flags: RawConfig,
    file: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(RawConfig, Option<String>), LoadError> {
    let shared = RawConfig {
        node_name: variable("NODE_NAME").filter(|name| !name.is_empty()),
        initial_node_ip: variable("NODE_IP").filter(|ip| !ip.is_empty()),
        environment_proxy: EnvironmentProxy::from_variables(variable),
        ..RawConfig::default()
    };
    let (file, warning) = file.map(read_file).transpose()?.unwrap_or_default();
    Ok((flags.or(shared).or(file), warning))
}

fn read_file(path: &Path) -> Result<(RawConfig, Option<String>), LoadError> {
    let (content, warning) = files::read_config(path).map_err(|source| LoadError::File {
        path: path.to_owned(),
        source,
    })?;
    let text = String::from_utf8_lossy(&content);
    let settings: Option<RawConfig> = yaml::parse(&text).map_err(|source| LoadError::Syntax {
        path: path.to_owned(),
        problems: source.to_string(),
    })?;
    Ok((settings.unwrap_or_default(), warning))
}

#[cfg(test)]
mod tests;
