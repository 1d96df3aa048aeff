//! Failures of requests and streams on the listeners. Here alone the errors of routing and policy
//! become outcomes, and so responses.

use std::fmt::Display;

use tunnel_proto::transport::{StreamCut, find_cause};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, one_line};

use crate::config::Limit;
use crate::outcome::Outcome;
use crate::routing::FailedAttempt;
use crate::routing::attempts::{AttemptEnd, EndedStream};
use crate::routing::registry::OpenError;
use tunnel_routing::decision::DecisionError;
use tunnel_routing::dial_policy::DialRefusal;
use tunnel_routing::policy::Denied;

/// A failure before a response began, with its code and one line of text that names the node and
/// the target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}{}", advice(*.outcome, .text))]
pub struct ProxyError {
    pub outcome: Outcome,
    /// What failed, in one line. The error's own text also says what to do.
    pub text: String,
    /// The limit of this server that was reached, if any.
    pub limit: Option<Limit>,
    /// The code with which the agent, or another server, refused the stream.
    pub refusal: Option<RefusalCode>,
    /// How the stream was cut, if it was.
    pub cut: Option<StreamCut>,
}

impl ProxyError {
    pub fn new(outcome: Outcome, text: impl Into<String>) -> Self {
        Self {
            outcome,
            text: text.into(),
            limit: None,
            refusal: None,
            cut: None,
        }
    }

    /// Returns the failure with the limit that caused it. The name of the limit is appended to the
    /// text.
    pub fn with_limit(self, limit: Limit) -> Self {
        Self {
            text: format!("{} (limits.{})", self.text, limit.label()),
            limit: Some(limit),
            ..self
        }
    }

    /// Returns the failure of an attempt whose stream ended as `end` says, apart from its cut.
    pub(super) fn of_attempt(self, end: EndedStream) -> FailedAttempt<Self> {
        let (cut, replay) = (self.cut, end.replay);
        let end = match self.refusal {
            Some(code) => AttemptEnd::Refused { code, replay },
            None => AttemptEnd::Ended(EndedStream { cut, ..end }),
        };
        let error = self;
        FailedAttempt { end, error }
    }

    /// Creates a failure from the refusal to dial a target. `target_label` is the target as the
    /// caller wrote it.
    pub fn from_dial(refusal: &DialRefusal, target_label: impl Display) -> Self {
        let outcome = match refusal {
            DialRefusal::Conflicting(_) => Outcome::AmbiguousAddress,
            DialRefusal::Never(..)
            | DialRefusal::NotListed(_)
            | DialRefusal::Agent(..)
            | DialRefusal::Own(_) => Outcome::RefusedByPolicy,
        };
        Self::new(outcome, format!("{target_label}: {refusal}"))
    }

    /// Creates a failure from an error of opening a stream. `target_label` names the node and the
    /// target.
    pub fn from_open(error: &OpenError, target_label: impl Display) -> Self {
        let outcome = match error {
            OpenError::NoAgent | OpenError::Suspect(_) => Outcome::NoAgent,
            OpenError::TooManyStreams(_)
            | OpenError::PeerStreams(_)
            | OpenError::BufferPoolFull(_) => Outcome::TooManyStreams,
            OpenError::Draining => Outcome::Draining,
            OpenError::Lost(_) => Outcome::AgentLost,
            OpenError::Timeout => Outcome::AgentTimeout,
        };
        let limit = match error {
            OpenError::TooManyStreams(_) => Some(Limit::StreamsPerAgent),
            OpenError::PeerStreams(_) => Some(Limit::PeerStreams),
            OpenError::BufferPoolFull(_) => Some(Limit::BufferPool),
            OpenError::Timeout => Some(Limit::OpenTimeout),
            OpenError::NoAgent
            | OpenError::Suspect(_)
            | OpenError::Draining
            | OpenError::Lost(_) => None,
        };
        Self {
            limit,
            ..Self::new(outcome, format!("{target_label}: {error}"))
        }
    }

    /// Creates a failure from an error of a stream. A refusal or a reset anywhere in the chain of
    /// sources determines the code. Any other error has the code `otherwise`.
    pub fn from_stream(
        error: &(dyn std::error::Error + 'static),
        target_label: impl Display,
        otherwise: Outcome,
    ) -> Self {
        if let Some(refusal) = find_cause::<Refusal>(error) {
            let text = format!("{target_label}: {}", refusal.detail);
            let failure = Self {
                refusal: Some(refusal.code),
                ..Self::new(refusal_outcome(refusal.code), text)
            };
            return match refusal.code {
                RefusalCode::TargetTimeout => failure.with_limit(Limit::TargetDialTimeout),
                // The text of the other server has the name of the limit.
                RefusalCode::AgentTimeout => Self {
                    limit: Some(Limit::OpenTimeout),
                    ..failure
                },
                _ => failure,
            };
        }
        let cut = find_cause::<StreamCut>(error).copied();
        let outcome = match cut {
            Some(cut) if cut.is_for_memory() => Outcome::ReaderStalled,
            Some(cut) if cut.is_session_lost() => Outcome::AgentLost,
            Some(StreamCut::SessionLost | StreamCut::NoReply) => Outcome::AgentLost,
            Some(StreamCut::ReplyTimeout) => Outcome::AgentTimeout,
            Some(StreamCut::Reset(_) | StreamCut::Stopped(_)) => Outcome::TargetBadResponse,
            Some(StreamCut::ReaderStalled) => Outcome::ReaderStalled,
            None => otherwise,
        };
        let reason = match cut {
            Some(cut) if cut.is_for_memory() => StreamCut::ReaderStalled.to_string(),
            Some(cut) if cut.is_session_lost() => StreamCut::SessionLost.to_string(),
            Some(StreamCut::Reset(_) | StreamCut::Stopped(_)) => {
                "the target cut the connection".to_owned()
            }
            Some(cut) => cut.to_string(),
            None => root_cause(error),
        };
        let failure = Self {
            cut,
            ..Self::new(outcome, format!("{target_label}: {reason}"))
        };
        match cut {
            Some(StreamCut::ReplyTimeout) => failure.with_limit(Limit::OpenTimeout),
            Some(_) | None => failure,
        }
    }
}

impl From<Denied> for ProxyError {
    fn from(denied: Denied) -> Self {
        let outcome = match denied {
            Denied::CredentialsRequired => Outcome::ProxyAuth,
            Denied::UnclearPath(_) => Outcome::BadRequest,
            Denied::Port(..)
            | Denied::NoService
            | Denied::NoDelegation
            | Denied::Rule { .. }
            | Denied::NoRule { .. }
            | Denied::Cluster { .. } => Outcome::RefusedByPolicy,
        };
        Self::new(outcome, denied.to_string())
    }
}

impl From<DecisionError> for ProxyError {
    fn from(error: DecisionError) -> Self {
        let outcome = match &error {
            DecisionError::BadRequest(_) => Outcome::BadRequest,
            DecisionError::Unsupported(_) => Outcome::RefusedByPolicy,
            DecisionError::Route(error) if !error.is_ambiguous() => Outcome::UnknownNode,
            DecisionError::Route(_) | DecisionError::Conflicting(_) => Outcome::AmbiguousAddress,
            DecisionError::Pod(..) => Outcome::UnknownNode,
        };
        Self::new(outcome, error.to_string())
    }
}

pub(super) fn refusal_outcome(code: RefusalCode) -> Outcome {
    match code {
        RefusalCode::Policy => Outcome::RefusedByPolicy,
        RefusalCode::TargetRefused => Outcome::TargetRefused,
        RefusalCode::TargetTimeout => Outcome::TargetTimeout,
        RefusalCode::TooManyStreams => Outcome::TooManyStreams,
        RefusalCode::Draining => Outcome::Draining,
        RefusalCode::NotHere | RefusalCode::AgentSuspect => Outcome::NoAgent,
        RefusalCode::AgentTimeout => Outcome::AgentTimeout,
        RefusalCode::AgentLost
        | RefusalCode::BadHeader
        | RefusalCode::Internal
        | RefusalCode::UnknownTarget
        | RefusalCode::Unknown(_) => Outcome::AgentLost,
    }
}

/// Returns the message of the innermost source of an error.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    one_line(deepest.to_string())
}

/// Returns what the caller can do about a target that fails, to append to the text.
fn advice(outcome: Outcome, text: &str) -> &'static str {
    match outcome {
        Outcome::TargetRefused => REFUSED_ADVICE,
        Outcome::TargetTimeout => TIMEOUT_ADVICE,
        // The text may know that the target speaks https.
        Outcome::TargetBadResponse if !text.contains("https") => BAD_RESPONSE_ADVICE,
        _ => "",
    }
}

const REFUSED_ADVICE: &str = "; start the program, or let it listen on this address and port; on the node: tunnel-agent \
                              doctor --port PORT";
const TIMEOUT_ADVICE: &str = "; look for a firewall that drops packets, or a program that hangs; on the node: tunnel-agent \
                              doctor --port PORT";
const BAD_RESPONSE_ADVICE: &str = "; see the target's log; if it speaks https, move its port to the https proxy ports, and if \
                                   it speaks no HTTP, use CONNECT or a TCP service";

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::{IpAddr, SocketAddr};

    use tunnel_proto::wire::code::ResetCode;
    use tunnel_proto::wire::name::Port;

    use super::*;
    use crate::routing::pod_lookup::Pod;
    use crate::routing::routes::{RouteError, SeveralNodes};
    use tunnel_routing::dial_policy::ClaimConflict;
    use tunnel_routing::policy::PortPolicyError;

    #[test]
    fn errors_of_routing_and_policy_have_their_outcomes_and_texts() {
        let node = || "a".parse().unwrap();
        let ip: IpAddr = [10, 0, 0, 1].into();
        let port = Port::new(22).unwrap();
        let several = || SeveralNodes {
            first: Vec::new(),
            more: 2,
        };
        let conflict = || ClaimConflict::Services(ip, node());
        let pod = Pod {
            namespace: "ns".into(),
            name: "web".into(),
        };
        let denied = Denied::Port(node(), port, PortPolicyError::NotListed(port));
        answers(
            denied,
            Outcome::RefusedByPolicy,
            "a port 22: port 22 is not",
        );
        let denied = Denied::CredentialsRequired;
        answers(denied, Outcome::ProxyAuth, "proxy authentication required");
        let decision = |error: DecisionError, outcome, text: &str| answers(error, outcome, text);
        let error = DecisionError::BadRequest("no Host".into());
        decision(error, Outcome::BadRequest, "no Host");
        let error = DecisionError::Unsupported("no upgrades");
        decision(error, Outcome::RefusedByPolicy, "no upgrades");
        let error = DecisionError::Pod(pod, "it is gone".into());
        decision(
            error,
            Outcome::UnknownNode,
            "cannot find the node of pod ns/web: it is gone",
        );
        let error = conflict().into();
        decision(
            error,
            Outcome::AmbiguousAddress,
            "10.0.0.1 is in the network of Services",
        );
        for (error, outcome) in [
            (RouteError::UnknownName(node()), Outcome::UnknownNode),
            (RouteError::UnknownAddress(ip), Outcome::UnknownNode),
            (
                RouteError::AmbiguousName(node(), several()),
                Outcome::AmbiguousAddress,
            ),
            (
                RouteError::AmbiguousAddress(ip, several()),
                Outcome::AmbiguousAddress,
            ),
        ] {
            let text = error.to_string();
            decision(error.into(), outcome, &text);
        }
        let dial = |refusal| ProxyError::from_dial(&refusal, "a:22");
        let refusal = dial(DialRefusal::Conflicting(conflict()));
        answers(
            refusal,
            Outcome::AmbiguousAddress,
            "a:22: 10.0.0.1 is in the network",
        );
        let refusal = dial(DialRefusal::NotListed(SocketAddr::new(ip, 22)));
        answers(
            refusal,
            Outcome::RefusedByPolicy,
            "a:22: 10.0.0.1:22 is not within",
        );
    }

    /// Checks the outcome of an error and the beginning of its text.
    #[track_caller]
    fn answers<E: Into<ProxyError>>(error: E, outcome: Outcome, text: &str) {
        let failure = error.into();
        assert_eq!(failure.outcome, outcome, "{failure}");
        assert!(failure.text.starts_with(text), "{failure}");
    }

    #[test]
    fn failure_of_a_target_says_what_to_do_and_others_add_nothing() {
        for (outcome, text, advice) in [
            (
                Outcome::TargetRefused,
                "a:22: connection refused",
                "start the program",
            ),
            (
                Outcome::TargetTimeout,
                "a:22: no answer",
                "a firewall that drops",
            ),
            (
                Outcome::TargetBadResponse,
                "a:22: invalid HTTP",
                "the https proxy ports",
            ),
        ] {
            let failure = ProxyError::new(outcome, text);
            let shown = failure.to_string();
            assert!(shown.starts_with(text) && shown.contains(advice), "{shown}");
            assert_eq!(failure.text, text, "the cause alone, for the access log");
        }
        let https = ProxyError::new(Outcome::TargetBadResponse, "a:22 speaks https");
        assert_eq!(https.to_string(), "a:22 speaks https");
        let other = ProxyError::new(Outcome::NoAgent, "a: no agent");
        assert_eq!(other.to_string(), "a: no agent");
    }

    #[test]
    fn refusals_and_cuts_are_found_inside_wrapped_errors() {
        let refusal = Refusal {
            code: RefusalCode::Policy,
            detail: "--localhost-ports does not list 1".into(),
        };
        let refused = io::Error::new(io::ErrorKind::ConnectionRefused, refusal);
        let wrapped = io::Error::other(refused);
        let failure = ProxyError::from_stream(&wrapped, "worker-1", Outcome::TargetBadResponse);
        assert_eq!(failure.outcome, Outcome::RefusedByPolicy);
        let text = "worker-1: --localhost-ports does not list 1";
        assert_eq!(failure.text, text);
        for (error, expected) in [
            (io::Error::from(StreamCut::SessionLost), Outcome::AgentLost),
            (io::Error::other("odd"), Outcome::TargetTls),
        ] {
            let failure = ProxyError::from_stream(&error, "x", Outcome::TargetTls);
            assert_eq!(failure.outcome, expected);
        }
    }

    #[test]
    fn session_that_another_server_lost_is_answered_like_one_of_this_server() {
        let answer = |cut: StreamCut| {
            ProxyError::from_stream(&io::Error::from(cut), "x", Outcome::TargetTls)
        };
        let lost = ResetCode::SessionLost;
        for cut in [StreamCut::Reset(lost), StreamCut::Stopped(lost)] {
            let lost_here = answer(StreamCut::SessionLost);
            let lost_there = answer(cut);
            assert_eq!(lost_there.outcome, lost_here.outcome);
            assert_eq!(lost_there.to_string(), lost_here.to_string());
        }
        let by_target = answer(StreamCut::Reset(ResetCode::Dropped));
        assert_eq!(by_target.outcome, Outcome::TargetBadResponse);
    }
}
