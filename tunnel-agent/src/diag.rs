//! Facts about an agent: the verb `diag`, which collects them on its host for a bug report, and the
//! document that a running agent sends to a server that asks for it.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_process::diag::redact::{redact, redacted};
use tunnel_process::diag::{DiagDocument, settings_lines};
use tunnel_process::meta::{self, ActionHandler, Readiness};
use tunnel_process::metrics::COMMIT;
use tunnel_process::telemetry::recent_lines;
use tunnel_proto::wire::control::DIAG_DOCUMENT_MAX;

use crate::config::{self, Config, DEFAULT_DATA_DIR, LoadError, RawConfig};

/// Returns the sessions as the meta port lists them.
type SessionsAt = Box<dyn Fn(Instant) -> Value + Send + Sync>;

/// What a running agent says of itself.
pub(crate) struct AgentFacts {
    started: Instant,
    settings: Vec<String>,
    readiness: Readiness,
    sessions: SessionsAt,
}

tunnel_process::partial_debug!(AgentFacts);

impl AgentFacts {
    pub(crate) fn new(config: &Config, readiness: Readiness, sessions: SessionsAt) -> Self {
        Self {
            started: Instant::now(),
            settings: settings_lines(config),
            readiness,
            sessions,
        }
    }

    /// Returns the facts as JSON, without secrets and with as many of the last log lines as fit.
    pub(crate) fn document(&self) -> String {
        let now = Instant::now();
        let conditions = self.readiness.conditions().into_iter();
        let conditions = conditions.map(|(component, text)| format!("{component}: {text}"));
        let facts = json!({
            "schemaVersion": 1,
            "program": { "name": "tunnel-agent", "version": env!("CARGO_PKG_VERSION"), "commit": COMMIT },
            "clock": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "uptimeSeconds": now.duration_since(self.started).as_secs(),
            "sessions": (self.sessions)(now),
            "waitsFor": self.readiness.read().0,
            "conditions": first(conditions, CONDITIONS_BYTES_MAX),
            "settings": first(self.settings.iter().cloned(), SETTINGS_BYTES_MAX),
            "log": [],
        });
        let mut facts = redacted(facts);
        let lines = recent_lines().into_iter().rev().map(|line| redact(&line));
        let used = facts.to_string().len();
        let mut lines = first(lines, DIAG_DOCUMENT_MAX.saturating_sub(used));
        lines.reverse();
        facts["log"] = lines.into();
        let text = facts.to_string();
        if text.len() <= DIAG_DOCUMENT_MAX {
            return text;
        }
        // Reasons of servers in the list of sessions are that long only by intent.
        json!({ "schemaVersion": 1, "error": "the facts are too long for a message" }).to_string()
    }
}

/// Returns the first of the texts that take at most `max` bytes as JSON.
fn first(texts: impl Iterator<Item = String>, max: usize) -> Vec<String> {
    let mut left = max;
    let fitting = texts.take_while(|text| {
        // A text, its quotes and a comma.
        let bytes = json!(text).to_string().len() + 1;
        let fits = bytes <= left;
        left = left.saturating_sub(bytes);
        fits
    });
    fitting.collect()
}

/// Room for the settings and for the conditions. Log lines have the other two thirds of a message.
const SETTINGS_BYTES_MAX: usize = 12 * 1024;
const CONDITIONS_BYTES_MAX: usize = 4 * 1024;

/// Collects the facts of an agent with these settings. The settings need not be complete: the data
/// directory and the meta address have defaults.
pub async fn collect(settings: Result<RawConfig, LoadError>) -> DiagDocument {
    let mut document = DiagDocument::new("tunnel-agent", env!("CARGO_PKG_VERSION"));
    let asked = settings
        .as_ref()
        .map_or_else(|_| RawConfig::default(), RawConfig::clone);
    let checked = settings.and_then(|settings| Config::check(settings).map_err(LoadError::from));
    document.add_settings(checked);
    match config::meta_endpoint(&asked) {
        Ok(address) => document.add_meta(&address).await,
        Err(problem) => document.add_error("conditions", &problem.to_string()),
    }
    let socket = config::meta_socket(&asked);
    document.add("log", log(&socket)).await;
    let data_dir = asked.data_dir;
    let data_dir = data_dir.unwrap_or_else(|| DEFAULT_DATA_DIR.into());
    document.add_files(data_dir).await;
    document
}

/// Asks the running agent for its last log lines.
async fn log(socket: &Path) -> io::Result<Value> {
    let asked = meta::act(socket, LOG_PATH).await;
    let (_, lines) = asked.map_err(|error| {
        let problem = format!(
            "no agent answers at {}: {error}; add the lines of journalctl -u tunnel-agent or kubectl logs",
            socket.display()
        );
        io::Error::new(error.kind(), problem)
    })?;
    Ok(serde_json::from_str(&lines)?)
}

/// Returns the handler of [`LOG_PATH`].
pub(crate) fn log_action() -> ActionHandler {
    Box::new(|| Box::pin(async { meta::json(StatusCode::OK, &recent_lines()) }))
}

/// Path of the action that returns the last log lines.
pub(crate) const LOG_PATH: &str = "/log";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_texts_that_fit_are_there() {
        let texts = || ["x".repeat(10), "\u{1}second".to_owned()].into_iter();
        assert_eq!(first(texts(), 12), Vec::<String>::new());
        assert_eq!(first(texts(), 13), ["x".repeat(10)]);
        // A control character takes six bytes.
        assert_eq!(first(texts(), 13 + 14), ["x".repeat(10)]);
        assert_eq!(first(texts(), 13 + 15).len(), 2);
    }

    #[test]
    fn document_fits_into_a_message_whatever_it_has() {
        let readiness = Readiness::default();
        let lines = (0..5000).map(|number| format!("http://user:canary@proxy {number}\u{202e}"));
        readiness.set_conditions("x", lines.collect());
        let facts = AgentFacts {
            started: Instant::now(),
            settings: vec!["long".repeat(30); 5000],
            sessions: Box::new(|_now| json!([])),
            readiness,
        };
        let text = facts.document();
        assert!(text.len() <= DIAG_DOCUMENT_MAX, "{}", text.len());
        assert!(!text.contains("canary"));
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["program"]["name"], "tunnel-agent");
        assert!(!document["settings"].as_array().unwrap().is_empty());
        assert!(!document["conditions"].as_array().unwrap().is_empty());
    }
}
