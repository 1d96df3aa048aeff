//! What needs an operator, with the command that helps. Pure.

use std::time::SystemTime;

use crate::admin::failures::FailureStatus;
use crate::admin::page::facts::{ConditionFacts, ConditionsDocument, SERVER};
use crate::admin::page::text::{RelativeTime, grouped};
use crate::admin::page::visible::VisibleText;

/// A condition or a failure as its row shows it.
#[derive(Debug)]
pub(super) struct ConditionRow {
    /// A word in a color.
    pub(super) tag: &'static str,
    pub(super) color: &'static str,
    pub(super) subject: VisibleText,
    pub(super) text: VisibleText,
    /// How often, and from where, or empty.
    pub(super) source: VisibleText,
    pub(super) since: Option<RelativeTime>,
    /// What to do in words, or empty.
    pub(super) remedy: VisibleText,
    /// What to run, or empty.
    pub(super) command: String,
}

impl ConditionRow {
    /// Returns what needs somebody now.
    pub(super) fn current(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let blocking = document.blocking.iter().map(|component| Self {
            tag: "not ready",
            color: "away",
            subject: VisibleText::new(*component),
            text: VisibleText::new("blocks the readiness of this server"),
            source: VisibleText::default(),
            since: None,
            remedy: VisibleText::default(),
            command: "tunnel-server doctor".to_owned(),
        });
        let conditions = document.conditions.iter();
        let conditions = conditions.map(|facts| Self::of_condition(facts, now));
        let failures = document.current_failures();
        let failures = failures.map(|failure| Self::of_failure(failure, now));
        blocking.chain(conditions).chain(failures).collect()
    }

    /// Returns the failures that are over, and those that anybody who connects can cause.
    pub(super) fn past(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let failures = document.failures.iter();
        let past = failures.filter(|failure| failure.is_over || failure.is_noise);
        past.map(|failure| Self::of_failure(failure, now)).collect()
    }

    fn of_condition(facts: &ConditionFacts, now: SystemTime) -> Self {
        let (tag, color) = match facts.component {
            SERVER => ("no answer", "away"),
            _ => ("condition", "suspect"),
        };
        Self {
            tag,
            color,
            subject: VisibleText::new(facts.component),
            text: facts.text.clone(),
            source: VisibleText::default(),
            since: facts.since.as_deref().map(|at| RelativeTime::new(at, now)),
            remedy: VisibleText::default(),
            command: facts.command.to_owned(),
        }
    }

    fn of_failure(failure: &FailureStatus, now: SystemTime) -> Self {
        let perhaps = failure.nodes_from_address.join(", ");
        let subject = match &failure.node {
            Some(node) if failure.is_verified => node.clone(),
            Some(node) => format!("{node} (claimed)"),
            None if perhaps.is_empty() => failure.address.clone(),
            None => format!("perhaps {perhaps}"),
        };
        let count = match failure.count {
            1 => "once".to_owned(),
            count => format!("{} times", grouped(count)),
        };
        let source = format!("{}, {count}, last from {}", failure.code, failure.address);
        let (tag, color) = match failure {
            FailureStatus { is_over: true, .. } => ("over", "revoked"),
            FailureStatus { is_noise: true, .. } => ("noise", "revoked"),
            FailureStatus { .. } => ("failing", "away"),
        };
        Self {
            tag,
            color,
            subject: VisibleText::new(subject),
            text: VisibleText::new(failure.detail.as_str()),
            source: VisibleText::new(source),
            since: Some(RelativeTime::new(&failure.last, now)),
            command: command_in(&failure.remedy).unwrap_or_default().to_owned(),
            remedy: VisibleText::new(failure.remedy.as_str()),
        }
    }
}

/// Returns the first command of a remedy. A remedy has no text of a peer but checked names.
fn command_in(remedy: &str) -> Option<&str> {
    let programs = ["tunnel-server ", "tunnel-agent "];
    let begins = programs.iter().filter_map(|program| remedy.find(program));
    let (_, command) = remedy.split_at_checked(begins.min()?)?;
    let end = command
        .find([';', ',', ':', '(', ')'])
        .unwrap_or(command.len());
    Some(command.get(..end)?.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_command_of_a_remedy_is_found() {
        for (remedy, command) in [
            ("stop one", None),
            (
                "on the node: tunnel-agent doctor",
                Some("tunnel-agent doctor"),
            ),
            (
                "a new token: tunnel-server token create --node a; else tunnel-agent doctor",
                Some("tunnel-server token create --node a"),
            ),
            ("(run tunnel-server doctor)", Some("tunnel-server doctor")),
        ] {
            assert_eq!(command_in(remedy), command, "{remedy}");
        }
    }
}
