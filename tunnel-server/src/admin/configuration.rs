//! The configuration of the running server, as operators see it: the settings in use, and what became of
//! the last change of the file.

use std::sync::Arc;

use tunnel_process::config_report::ConfigState;
use tunnel_process::diag::settings_lines;
use tunnel_process::followed::Followed;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::enroll::hex;

use crate::config::{Config, RawConfig};

/// The settings in use and their file. Clones share them.
#[derive(Debug, Clone)]
pub struct RunningConfig {
    settings: Followed<RawConfig>,
    lines: Followed<Vec<String>>,
    /// The result of the last reading of the file.
    pub state: ConfigState,
}

impl RunningConfig {
    /// Creates the state for the configuration of the start.
    pub fn new(config: &Config, hash: [u8; 32], shutdown: &Shutdown) -> Self {
        let state = ConfigState::new(config.file.as_deref(), shutdown);
        state.set_hash(hex(&hash));
        Self {
            settings: Followed::from(RawConfig::clone(&config.raw.0)),
            lines: Followed::from(settings_lines(config)),
            state,
        }
    }

    /// Replaces the settings in use.
    pub fn replace(&self, config: &Config, hash: &[u8; 32]) {
        self.settings.replace(RawConfig::clone(&config.raw.0));
        self.lines.replace(settings_lines(config));
        self.state.set_hash(hex(hash));
    }

    /// Returns the settings in use. They have names of files and no secrets.
    pub fn settings(&self) -> Arc<RawConfig> {
        self.settings.load()
    }

    /// Returns the lines of the checked settings, for `diag`.
    pub fn lines(&self) -> Vec<String> {
        self.lines.load().to_vec()
    }
}
