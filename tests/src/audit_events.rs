//! Audit events of servers and agents. Each is checked when it is read: it has the form of an Event of
//! `audit.k8s.io/v1`, no stream has two `ResponseComplete` at one end, and no secret of a test is in it.
//! A violation ends the process of the test.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tunnel_process::telemetry::{AuditOutput, AuditSettings};
use tunnel_proto::audit;

/// A text that tests put into everything that must not be recorded.
pub const CANARY: &str = "canary-6fd1b7-04c2e9a1d3";

/// An Event, with the fields of `k8s.io/apiserver/pkg/apis/audit/v1/types.go` that have a value here.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AuditEvent {
    pub kind: String,
    pub api_version: String,
    pub level: String,
    #[serde(rename = "auditID")]
    pub audit_id: String,
    pub stage: String,
    #[serde(rename = "requestURI")]
    pub request_uri: String,
    pub verb: String,
    pub user: AuditUser,
    #[serde(rename = "sourceIPs", default)]
    pub source_ips: Vec<std::net::IpAddr>,
    pub user_agent: Option<String>,
    pub object_ref: Option<BTreeMap<String, String>>,
    pub response_status: AuditStatus,
    pub request_received_timestamp: String,
    pub stage_timestamp: String,
    pub annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditUser {
    pub username: Option<String>,
    #[serde(default)]
    pub groups: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditStatus {
    pub metadata: BTreeMap<String, String>,
    pub status: Option<String>,
    pub message: Option<String>,
    pub reason: Option<String>,
    pub code: Option<u16>,
}

impl AuditEvent {
    /// Returns an annotation by its name without `culvert.io/`, or an empty text.
    pub fn annotation(&self, name: &str) -> &str {
        let value = self.annotations.get(&format!("culvert.io/{name}"));
        value.map_or("", String::as_str)
    }

    pub fn is_complete(&self) -> bool {
        self.stage == "ResponseComplete"
    }

    fn check(&self) -> Result<()> {
        ensure!(self.kind == "Event" && self.api_version == "audit.k8s.io/v1");
        ensure!(self.level == "Metadata");
        let is_uuid = self.audit_id.len() == 36 && self.audit_id.matches('-').count() == 4;
        ensure!(is_uuid, "audit id");
        ensure!(["ResponseStarted", "ResponseComplete"].contains(&&*self.stage));
        ensure!(!self.verb.is_empty(), "no verb");
        for time in [&self.request_received_timestamp, &self.stage_timestamp] {
            // MicroTime of Kubernetes.
            ensure!(time.len() == "2006-01-02T15:04:05.000000Z".len(), "{time}");
            humantime::parse_rfc3339(time)?;
        }
        let is_ours = |name: &String| name.starts_with("culvert.io/");
        ensure!(self.annotations.keys().all(is_ours), "annotations");
        ensure!(["server", "agent"].contains(&self.annotation("reporter")));
        let has_end = !self.annotation("end").is_empty();
        ensure!(has_end == self.is_complete(), "end");
        Ok(())
    }

    /// What no two `ResponseComplete` of one end have in common. A request whose session ended, or that was
    /// refused, has another stream at each agent or server that was asked again, which began later.
    fn end_of_stream(&self) -> [String; 6] {
        let node = self
            .object_ref
            .as_ref()
            .and_then(|object| object.get("name"));
        let annotation = |name| self.annotation(name).to_owned();
        [
            self.audit_id.clone(),
            [annotation("reporter"), annotation("listener")].concat(),
            node.cloned().unwrap_or_else(|| annotation("node")),
            annotation("session"),
            annotation("hop-from"),
            self.request_received_timestamp.clone(),
        ]
    }
}

/// The events of one process so far. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct AuditEvents(Arc<Mutex<Collected>>);

#[derive(Debug, Default)]
struct Collected {
    events: Vec<AuditEvent>,
    ended: BTreeSet<[String; 6]>,
}

/// Whether the process starts its audit log itself, or has none.
static IS_LEFT_OUT: AtomicBool = AtomicBool::new(false);

impl AuditEvents {
    /// Starts no audit log with the servers of this process, so that a measurement has none, or its own.
    pub fn leave_out() {
        IS_LEFT_OUT.store(true, Ordering::Relaxed);
    }

    /// Collects the events of the servers and agents in the process of the test, from the first call
    /// on.
    ///
    /// # Errors
    /// When the audit log cannot be started.
    pub fn of_process() -> Result<Self> {
        static STARTED: OnceLock<AuditEvents> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if IS_LEFT_OUT.load(Ordering::Relaxed) {
            return Ok(Self::default());
        }
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(events) = STARTED.get() {
            return Ok(events.clone());
        }
        let (reader, writer) = std::io::pipe()?;
        let settings = AuditSettings {
            output: AuditOutput::File(format!("/proc/self/fd/{}", writer.as_raw_fd()).into()),
            ..AuditSettings::default()
        };
        // Both live as long as the process of the test.
        std::mem::forget(audit::start(&settings, "server").context("start the audit log")?);
        std::mem::forget(writer);
        let events = Self::default();
        let collected = events.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                collected.read(&line);
            }
        });
        Ok(STARTED.get_or_init(|| events).clone())
    }

    /// Returns the events so far.
    pub fn all(&self) -> Vec<AuditEvent> {
        self.lock().events.clone()
    }

    /// Takes a line if it is an event.
    pub(crate) fn take(&self, line: &str) -> bool {
        let is_event = line.starts_with(r#"{"kind":"Event","apiVersion":"audit."#);
        if is_event {
            self.read(line);
        }
        is_event
    }

    fn read(&self, line: &str) {
        if let Err(error) = self.add(line) {
            violated(line, &error);
        }
    }

    fn add(&self, line: &str) -> Result<()> {
        ensure!(!line.contains(CANARY), "a secret of the test");
        let event: AuditEvent = serde_json::from_str(line)?;
        event.check()?;
        let mut collected = self.lock();
        if event.is_complete() {
            let is_first = collected.ended.insert(event.end_of_stream());
            ensure!(is_first, "a second ResponseComplete of a stream at one end");
        }
        collected.events.push(event);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[expect(clippy::print_stderr, reason = "the test fails with this text")]
fn violated(line: &str, error: &anyhow::Error) -> ! {
    eprintln!("audit event violates its form: {error:#}: {line}");
    std::process::exit(101);
}
