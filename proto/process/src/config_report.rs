//! What became of the last change of a process' configuration file: for operators who ask for it, and as
//! a condition.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::config_file::{ConfigFile, LoadError};
use crate::file_watch::ReloadOutcome;
use crate::meta::Readiness;
use crate::schema::SCHEMA_VERSION;
use crate::settings::ConfigError;
use crate::shutdown::Shutdown;

/// The file of the configuration as it is cannot be used, for these reasons.
#[derive(Debug, thiserror::Error)]
#[error("the file of the configuration cannot be used, and nothing of it applies:\n  {}", .0.lines().join("\n  "))]
pub struct UnusableFile(ConfigError);

impl UnusableFile {
    /// Returns whether a person must change the file. An absent file may appear later.
    pub fn is_usage(&self) -> bool {
        self.0.is_usage()
    }
}

/// The result of the last reading of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigStatus {
    /// Version of the document.
    pub schema_version: u32,
    /// The file, if the process was started with one.
    pub file: Option<PathBuf>,
    /// SHA-256 over the settings that are equal on all servers, in hexadecimal digits. Agents have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// When the settings in use were read, RFC 3339.
    pub loaded_at: String,
    /// Keys of the settings that the last change of the file applied.
    pub applied: Vec<String>,
    /// Keys that differ from the settings in use, which a restart applies.
    pub needs_restart: Vec<String>,
    /// Keys of the file that a flag or a variable overrides.
    pub overridden: Vec<String>,
    /// What is wrong in the file. The settings in use are those of before.
    pub mistakes: Vec<String>,
    /// Why the file cannot be used at this moment, as an absent one. A later reading may succeed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<String>,
    /// Counts the readings of the file.
    #[serde(skip)]
    readings: u64,
}

impl ConfigStatus {
    /// Returns whether the file as it is can be used.
    ///
    /// # Errors
    /// Returns [`UnusableFile`] with the reasons.
    pub fn check(&self) -> Result<(), UnusableFile> {
        let error = ConfigError {
            mistakes: self.mistakes.clone(),
            facts: self.facts.clone(),
        };
        if error.is_empty() {
            return Ok(());
        }
        Err(UnusableFile(error))
    }

    /// Returns lines for a terminal, without what is wrong.
    pub fn table(&self) -> String {
        let mut text = "settings in use: ".to_owned();
        match &self.file {
            Some(file) => text.push_str(&file.display().to_string()),
            None => text.push_str("flags and variables alone, which never change"),
        }
        let _infallible = write!(text, ", read {}", self.loaded_at);
        if let Some(hash) = &self.hash {
            let _infallible = write!(text, ", hash {hash:.16}");
        }
        text.push('\n');
        for (what, keys) in [
            ("last change applied", &self.applied),
            ("needs a restart", &self.needs_restart),
            ("overridden by a flag or a variable", &self.overridden),
        ] {
            if !keys.is_empty() {
                let _infallible = writeln!(text, "{what}: {}", keys.join(", "));
            }
        }
        text
    }
}

/// The result of the last reading in a running process. Clones share it.
#[derive(Debug, Clone)]
pub struct ConfigState {
    status: Arc<watch::Sender<ConfigStatus>>,
    shutdown: Shutdown,
}

impl ConfigState {
    /// Creates the state of the start.
    pub fn new<T>(file: Option<&ConfigFile<T>>, shutdown: &Shutdown) -> Self {
        let overridden = file.map(|file| file.overridden.iter().cloned().collect());
        Self {
            status: Arc::new(watch::Sender::new(ConfigStatus {
                schema_version: SCHEMA_VERSION,
                file: file.map(|file| file.path.clone()),
                hash: None,
                loaded_at: now(),
                applied: Vec::new(),
                needs_restart: Vec::new(),
                overridden: overridden.unwrap_or_default(),
                mistakes: Vec::new(),
                facts: Vec::new(),
                readings: 0,
            })),
            shutdown: shutdown.clone(),
        }
    }

    /// Replaces the hash of the settings in use.
    pub fn set_hash(&self, hash: String) {
        self.status.send_modify(|status| status.hash = Some(hash));
    }

    /// Returns the result of the last reading.
    pub fn status(&self) -> ConfigStatus {
        self.status.borrow().clone()
    }

    /// Reads the file and all others that are followed, and returns the result. Without a file the
    /// settings never change. Takes 10 s at most. Cancel-safe.
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

/// Reports the readings of a file: to the log, as a condition, and to the state.
#[derive(Debug)]
pub struct ConfigReport {
    file: PathBuf,
    readiness: Readiness,
    state: ConfigState,
    failure: Mutex<Option<ConfigError>>,
}

impl ConfigReport {
    /// Creates the report of a file that is in use as it is.
    pub fn new(file: PathBuf, readiness: Readiness, state: ConfigState) -> Self {
        Self {
            file,
            readiness,
            state,
            failure: Mutex::default(),
        }
    }

    /// Records why a reading fails, before [`Self::reading`].
    pub fn failed(&self, error: &LoadError) {
        *self.failure.lock() = Some(error.into());
    }

    /// Logs which keys of a changed file apply, and records which ones need a restart.
    pub fn applied(
        &self,
        applied: Vec<String>,
        needs_restart: Vec<String>,
        overridden: Vec<String>,
    ) {
        let file = self.file.display();
        info!(%file, keys = applied.join(", "), "configuration changed");
        for key in &overridden {
            warn!(%file, key, "a flag or a variable overrides the key of the file");
        }
        if !needs_restart.is_empty() {
            let keys = needs_restart.join(", ");
            warn!(%file, keys, "changed settings apply after a restart");
        }
        self.state.status.send_modify(|status| {
            status.loaded_at = now();
            status.applied = applied;
            status.needs_restart = needs_restart;
            status.overridden = overridden;
        });
    }

    /// Handles a reading of the file, after [`Self::applied`] if it has changed.
    pub fn reading(&self, outcome: ReloadOutcome<'_>) {
        let failure = self.failure.lock().take();
        let errors = match outcome {
            ReloadOutcome::Unchanged | ReloadOutcome::StillFailed => None,
            ReloadOutcome::Changed | ReloadOutcome::Recovered => Some(ConfigError::default()),
            // Without a recorded reason, the reading has panicked.
            ReloadOutcome::Failed(text) => {
                Some(failure.unwrap_or_else(|| ConfigError::mistake(text)))
            }
        };
        let has_changed = errors.is_some();
        self.state.status.send_modify(|status| {
            if let Some(ConfigError { mistakes, facts }) = errors {
                (status.mistakes, status.facts) = (mistakes, facts);
            }
            status.readings += 1;
        });
        if !has_changed {
            return;
        }
        let status = self.state.status();
        let file = self.file.display();
        let mut lines = Vec::new();
        if let Err(UnusableFile(error)) = status.check() {
            let reasons = error.lines().join("; ");
            lines.push(format!(
                "{file} cannot be used, and nothing of it applies: {reasons}"
            ));
        }
        if !status.needs_restart.is_empty() {
            let keys = status.needs_restart.join(", ");
            lines.push(format!("changes of {keys} in {file} apply after a restart"));
        }
        self.readiness.set_conditions(LABEL, lines);
    }
}

fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "configuration";
/// Time limit for reading a file once.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
