//! A condition of a part of the server that is neither the cluster's nor the disk's.

use tracing::{info, warn};
use tunnel_process::meta::Readiness;

/// The lines of one component, which are logged when they change.
#[derive(Debug)]
pub(super) struct ReportedCondition {
    label: &'static str,
    readiness: Readiness,
    last: Vec<String>,
}

impl ReportedCondition {
    pub(super) fn new(label: &'static str, readiness: &Readiness) -> Self {
        Self {
            label,
            readiness: readiness.clone(),
            last: Vec::new(),
        }
    }

    /// Replaces the lines. An empty list clears the condition.
    pub(super) fn set(&mut self, lines: Vec<String>) {
        if lines == self.last {
            return;
        }
        let condition = self.label;
        for line in lines.iter().filter(|line| !self.last.contains(line)) {
            warn!(condition, "{line}");
        }
        if lines.is_empty() {
            info!(condition, "condition cleared");
        }
        self.readiness.set_conditions(condition, lines.clone());
        self.last = lines;
    }
}
