//! The configuration of the running server, as operators see it: the settings in use, and what became of
//! the last change of the file.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;
use tunnel_process::diag::settings_lines;
use tunnel_process::followed::Followed;
use tunnel_process::schema::SCHEMA_VERSION;
use tunnel_process::shutdown::Shutdown;

use crate::config::{Config, RawConfig};
use tunnel_store::data_dir::time_text;

/// The settings in use and their file. Clones share them.
#[derive(Debug, Clone)]
pub struct RunningConfig {
    settings: Followed<RawConfig>,
    lines: Followed<Vec<String>>,
    status: Arc<watch::Sender<ConfigStatus>>,
    shutdown: Shutdown,
}

/// The result of the last reading of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigStatus {
    pub schema_version: u32,
    /// The file, if the server was started with one.
    pub file: Option<PathBuf>,
    /// SHA-256 over the settings that are equal on all servers, in hexadecimal digits.
    pub hash: String,
    /// When the settings in use were read.
    #[serde(with = "time_text")]
    pub loaded_at: SystemTime,
    /// Keys of the settings that the last change of the file applied.
    pub applied: Vec<String>,
    /// Keys that differ from the settings in use, which a restart applies.
    pub needs_restart: Vec<String>,
    /// Keys of the file that a flag or a variable overrides.
    pub overridden: Vec<String>,
    /// Why the file as it is cannot be used. The settings in use are those of before.
    pub mistakes: Vec<String>,
    /// Counts the readings of the file.
    #[serde(skip)]
    pub readings: u64,
}

impl RunningConfig {
    /// Creates the state for the configuration of the start.
    pub fn new(config: &Config, hash: [u8; 32], shutdown: Shutdown) -> Self {
        let file = config.file.as_ref();
        let overridden = file.map(|file| file.overridden.iter().cloned().collect());
        let status = ConfigStatus {
            schema_version: SCHEMA_VERSION,
            file: file.map(|file| file.path.clone()),
            hash: hex(&hash),
            loaded_at: SystemTime::now(),
            applied: Vec::new(),
            needs_restart: Vec::new(),
            overridden: overridden.unwrap_or_default(),
            mistakes: Vec::new(),
            readings: 0,
        };
        Self {
            settings: Followed::from(RawConfig::clone(&config.raw.0)),
            lines: Followed::from(settings_lines(config)),
            status: Arc::new(watch::Sender::new(status)),
            shutdown,
        }
    }

    /// Replaces the settings in use.
    pub fn replace(&self, config: &Config, hash: &[u8; 32]) {
        self.settings.replace(RawConfig::clone(&config.raw.0));
        self.lines.replace(settings_lines(config));
        self.change(|status| {
            status.hash = hex(hash);
            status.loaded_at = SystemTime::now();
        });
    }

    /// Changes the result of the last reading.
    pub fn change(&self, change: impl FnOnce(&mut ConfigStatus)) {
        self.status.send_modify(change);
    }

    /// Returns the result of the last reading.
    pub fn status(&self) -> ConfigStatus {
        self.status.borrow().clone()
    }

    /// Returns the settings in use. They have names of files and no secrets.
    pub fn settings(&self) -> Arc<RawConfig> {
        self.settings.load()
    }

    /// Returns the lines of the checked settings, for `diag`.
    pub fn lines(&self) -> Vec<String> {
        self.lines.load().to_vec()
    }

    /// Reads the file and all others that are followed, and returns the result. Without a file the
    /// settings never change.
    pub async fn reload(&self) -> ConfigStatus {
        if self.status.borrow().file.is_some() {
            // The first reading that ends may have begun before the operator changed the file.
            for _ in 0..2 {
                let mut status = self.status.subscribe();
                let before = status.borrow_and_update().readings;
                self.shutdown.reload();
                let read = status.wait_for(|status| status.readings != before);
                let _slow_disk = timeout(READ_TIMEOUT, read).await;
            }
        }
        self.status()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Time limit for reading a file once.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
