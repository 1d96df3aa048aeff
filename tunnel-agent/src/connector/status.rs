//! The condition in `/readyz?verbose` that says which of the wanted sessions are missing, and why.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use parking_lot::Mutex;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::wire::name::ReplicaId;

use super::live::SESSION;
use super::replicas::ConnectorId;

/// The session of one connector, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SessionStatus {
    /// A live session with this server, which has no name if it is of an older version.
    Live(Option<ReplicaId>),
    Missing {
        /// The server that the session should be with.
        replica: Option<ReplicaId>,
        reason: String,
    },
}

/// The sessions of all connectors, and the condition about them.
#[derive(Debug)]
pub(super) struct SessionStatuses {
    readiness: Readiness,
    connectors: Mutex<BTreeMap<ConnectorId, SessionStatus>>,
}

impl SessionStatuses {
    pub(super) fn new(readiness: Readiness) -> Self {
        Self {
            readiness,
            connectors: Mutex::default(),
        }
    }

    /// Sets the status of a connector, or removes a connector that dials no more.
    pub(super) fn set(&self, connector_id: ConnectorId, status: Option<SessionStatus>) {
        let mut connectors = self.connectors.lock();
        if connectors.get(&connector_id) == status.as_ref() {
            return;
        }
        match status {
            Some(status) => connectors.insert(connector_id, status),
            None => connectors.remove(&connector_id),
        };
        let condition = condition(&connectors).into_iter().collect();
        self.readiness.set_conditions(SESSION, condition);
    }
}

/// Returns the condition, or `None` if all sessions are live.
fn condition(connectors: &BTreeMap<ConnectorId, SessionStatus>) -> Option<String> {
    let (mut live, mut missing) = (Vec::new(), Vec::new());
    for status in connectors.values() {
        match status {
            SessionStatus::Live(Some(replica)) => live.push(replica.as_str()),
            SessionStatus::Live(None) => live.push("a server of an older version"),
            SessionStatus::Missing { replica, reason } => missing.push((replica, reason)),
        }
    }
    let mut text = format!("{} of {} sessions", live.len(), connectors.len());
    if !live.is_empty() {
        let _infallible = write!(text, ", with {}", live.join(", "));
    }
    for (replica, reason) in &missing {
        let replica = replica.as_ref().map_or("another server", ReplicaId::as_str);
        let _infallible = write!(text, "; none with {replica}: {reason}");
    }
    (!missing.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(replica: Option<&str>, reason: &str) -> SessionStatus {
        SessionStatus::Missing {
            replica: replica.map(|name| name.parse().unwrap()),
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn condition_names_the_live_sessions_and_why_others_are_missing() {
        let live = |name: &str| SessionStatus::Live(Some(name.parse().unwrap()));
        let cases = [
            (vec![], None),
            (vec![live("a")], None),
            (vec![live("a"), SessionStatus::Live(None)], None),
            (
                vec![missing(None, "refused")],
                Some("0 of 1 sessions; none with another server: refused"),
            ),
            (
                vec![live("a"), missing(Some("b"), "refused")],
                Some("1 of 2 sessions, with a; none with b: refused"),
            ),
            (
                vec![live("a"), missing(Some("b"), "x"), live("c")],
                Some("2 of 3 sessions, with a, c; none with b: x"),
            ),
        ];
        for (statuses, expected) in cases {
            let connectors: BTreeMap<_, _> = (0..).map(ConnectorId).zip(statuses).collect();
            assert_eq!(condition(&connectors).as_deref(), expected);
        }
    }

    #[test]
    fn condition_ends_with_the_connector() {
        let readiness = Readiness::default();
        let statuses = SessionStatuses::new(readiness.clone());
        statuses.set(ConnectorId(0), Some(missing(Some("a"), "refused")));
        let text = "0 of 1 sessions; none with a: refused".to_owned();
        assert_eq!(readiness.conditions(), [(SESSION, text)]);
        statuses.set(ConnectorId(0), None);
        assert!(readiness.conditions().is_empty());
    }
}
