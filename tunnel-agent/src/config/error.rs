//! Why the agent has no configuration.

use std::path::PathBuf;

use tunnel_process::config_file::ConfigFileError;
use tunnel_process::settings::ConfigError;

/// A failure to load the configuration.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    File(#[from] ConfigFileError),
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
    /// Returns whether the settings are wrong in every environment. An absent file may appear later.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::File(error) => error.is_usage(),
            Self::Invalid(error) => error.is_usage(),
            Self::Syntax { .. } => true,
        }
    }

    /// Returns the error for an invalid address of the meta port, for verbs that check no other
    /// setting.
    pub fn meta_listen(problem: String) -> Self {
        Self::Invalid(ConfigError::mistake(format!("--meta-listen: {problem}")))
    }
}
