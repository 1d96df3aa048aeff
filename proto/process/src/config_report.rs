//! The condition of a process about the last change of its configuration file.

use std::path::PathBuf;

use tracing::{info, warn};

use crate::file_watch::ReloadOutcome;
use crate::meta::Readiness;

/// What became of the last change of a file: it has mistakes, or a part of it needs a restart.
#[derive(Debug)]
pub struct ConfigReport {
    file: PathBuf,
    readiness: Readiness,
    needs_restart: Vec<String>,
    mistakes: Vec<String>,
}

impl ConfigReport {
    /// Creates the report of a file that is in use as it is.
    pub fn new(file: PathBuf, readiness: Readiness) -> Self {
        Self {
            file,
            readiness,
            needs_restart: Vec::new(),
            mistakes: Vec::new(),
        }
    }

    /// Returns why the file as it is cannot be used.
    pub fn mistakes(&self) -> &[String] {
        &self.mistakes
    }

    /// Logs which keys of a changed file apply, and records which ones need a restart.
    pub fn applied<'a>(
        &mut self,
        applied: &[String],
        needs_restart: &[String],
        overridden: impl IntoIterator<Item = &'a String>,
    ) {
        let file = self.file.display();
        info!(%file, keys = applied.join(", "), "configuration changed");
        for key in overridden {
            warn!(%file, key, "a flag or a variable overrides the key of the file");
        }
        if !needs_restart.is_empty() {
            let keys = needs_restart.join(", ");
            warn!(%file, keys, "changed settings apply after a restart");
        }
        self.needs_restart = needs_restart.to_vec();
    }

    /// Handles a reading of the file, after [`Self::applied`] if it has changed.
    pub fn reading(&mut self, outcome: ReloadOutcome<'_>) {
        self.mistakes = match outcome {
            ReloadOutcome::Unchanged | ReloadOutcome::StillFailed => return,
            ReloadOutcome::Changed | ReloadOutcome::Recovered => Vec::new(),
            ReloadOutcome::Failed(error) => {
                // The first line of several counts the others.
                let is_counted = error.lines().count() > 1;
                let lines = error.lines().skip(usize::from(is_counted));
                lines.map(|line| line.trim().to_owned()).collect()
            }
        };
        let file = self.file.display();
        let mut lines = Vec::new();
        if !self.mistakes.is_empty() {
            let mistakes = self.mistakes.join("; ");
            lines.push(format!(
                "{file} cannot be used, and nothing of it applies: {mistakes}"
            ));
        }
        if !self.needs_restart.is_empty() {
            let keys = self.needs_restart.join(", ");
            lines.push(format!("changes of {keys} in {file} apply after a restart"));
        }
        self.readiness.set_conditions(LABEL, lines);
    }
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "configuration";
