//! The audit log of a real kube-apiserver.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::process::ScratchDir;

/// A file with the user, the address and the object of each request. It must outlive its
/// kube-apiserver.
#[derive(Debug)]
pub struct AuditLog(ScratchDir);

impl AuditLog {
    /// Creates a directory for the log.
    pub fn new() -> Result<Self> {
        let scratch = ScratchDir::new().context("folder of the audit log")?;
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{ "level": "Metadata" }],
        });
        scratch.file(POLICY, policy.to_string())?;
        Ok(Self(scratch))
    }

    /// Returns the flags of the kube-apiserver that writes the log.
    pub fn flags(&self) -> [String; 2] {
        let policy = self.0.path().join(POLICY);
        [
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", self.file().display()),
        ]
    }

    /// Returns the events so far of a ServiceAccount. Requests that were answered have one.
    pub fn events_of(&self, namespace: &str, account: &str) -> Result<Vec<Value>> {
        let user = format!("system:serviceaccount:{namespace}:{account}");
        let log = std::fs::read_to_string(self.file()).context("audit log")?;
        // kube-apiserver may be writing the last line.
        let events = log
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(events
            .filter(|event| event["user"]["username"] == user)
            .collect())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("audit.log")
    }
}

const POLICY: &str = "policy.yaml";
