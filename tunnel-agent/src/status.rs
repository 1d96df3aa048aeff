//! The sessions of a running agent: an endpoint of the meta port, and the verb `status` that asks it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_process::meta::{self, EndpointAnswer, EndpointHandler, MetaAddress};
use tunnel_process::schema::SCHEMA_VERSION;
use tunnel_proto::wire::header::one_line;

use crate::connector::status::{SessionReport, SessionStatuses};

/// Returns the handler of [`PATH`].
pub(crate) fn endpoint(statuses: Arc<SessionStatuses>) -> EndpointHandler {
    Box::new(move |_| {
        let report = statuses.report(Instant::now());
        EndpointAnswer::Now(meta::json(StatusCode::OK, &report))
    })
}

/// The answer of a running agent.
#[derive(Debug)]
pub struct AgentStatus {
    /// A document with the list as the agent sent it.
    pub json: String,
    /// A line for each session.
    pub table: String,
    /// Whether any session is live.
    pub is_connected: bool,
}

/// Asks the agent whose meta port is at `address` for its sessions.
///
/// # Errors
/// Returns an error if no agent answers, or not with a list.
pub async fn ask(address: &MetaAddress) -> io::Result<AgentStatus> {
    let (sessions, list) = sessions(address).await?;
    let list: Value = serde_json::from_str(&list)?;
    let document = json!({ "schemaVersion": SCHEMA_VERSION, "sessions": list });
    Ok(AgentStatus {
        is_connected: sessions.iter().any(SessionReport::is_live),
        table: table(&sessions),
        json: format!("{document:#}\n"),
    })
}

/// Asks the agent for its sessions. Returns them, and the list as the agent sent it.
pub(crate) async fn sessions(address: &MetaAddress) -> io::Result<(Vec<SessionReport>, String)> {
    let (status, json) = address.get(PATH).await?;
    if status != StatusCode::OK {
        let text = format!("{status}: no agent listens there");
        return Err(io::Error::other(text));
    }
    Ok((serde_json::from_str(&json)?, json))
}

/// Formats a line for each session. Names and reasons come from servers.
pub(crate) fn table(sessions: &[SessionReport]) -> String {
    if sessions.is_empty() {
        return "no session: the agent has just started, enrolls or stops\n".to_owned();
    }
    let mut text = String::new();
    for session in sessions {
        let server = session.server.as_deref();
        let line = if let Some(transport) = &session.transport {
            let server = server.unwrap_or_default();
            let zone = session.zone.as_deref();
            let zone = zone.map_or_else(String::new, |zone| format!(" in zone {zone}"));
            let age = duration(session.age_seconds);
            format!("connected to {server}{zone} over {transport} for {age}")
        } else {
            let server = server.unwrap_or("any server");
            let reason = session.reason.as_deref().unwrap_or("not known");
            let next = match session.retry_in_seconds {
                Some(_) => format!("next attempt in {}", duration(session.retry_in_seconds)),
                None => "trying now".to_owned(),
            };
            format!("not connected to {server}: {reason}; {next}")
        };
        text.push_str(&one_line(&line));
        text.push('\n');
    }
    text
}

/// Formats a number of seconds from the agent.
fn duration(seconds: Option<f64>) -> String {
    let duration = Duration::try_from_secs_f64(seconds.unwrap_or_default().round());
    humantime::format_duration(duration.unwrap_or_default()).to_string()
}

/// Path of the list on the meta port.
pub(crate) const PATH: &str = "/sessions";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_a_line_for_each_session_and_hostile_names_stay_on_it() {
        let live = SessionReport {
            server: Some("server-1".to_owned()),
            zone: Some("eu-1a\n".to_owned()),
            transport: Some("h2".to_owned()),
            age_seconds: Some(61.4),
            reason: None,
            retry_in_seconds: None,
        };
        let missing = SessionReport {
            server: None,
            zone: None,
            transport: None,
            age_seconds: None,
            reason: Some("refused\nconnected to server-1\u{1b}[2J".to_owned()),
            retry_in_seconds: Some(2.0),
        };
        let expected = "connected to server-1 in zone eu-1a  over h2 for 1m 1s\n\
                        not connected to any server: refused connected to server-1 [2J; next attempt in 2s\n";
        assert_eq!(table(&[live, missing]), expected);
        assert!(table(&[]).starts_with("no session"));
    }

    #[test]
    fn hostile_numbers_do_not_panic() {
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            assert_eq!(duration(Some(seconds)), "0s");
        }
    }
}
