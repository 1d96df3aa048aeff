//! Error responses of the listeners. One code determines the status, the header `X-Tunnel-Error`,
//! the log field and the metric label.

use http::{HeaderName, HeaderValue, Response, StatusCode};
use hyper::ext::ReasonPhrase;
use prometheus_client::encoding::EncodeLabelValue;
use tunnel_proto::transport::{StreamCut, find_cause};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, one_line};

use crate::config::Limit;
use crate::ingress::http::body::ResponseBody;
use crate::routing::registry::OpenError;

/// Header that carries the code of a response that the server generated. Responses of targets do
/// not have this header.
pub const ERROR_HEADER: HeaderName = HeaderName::from_static("x-tunnel-error");
/// Seconds after which a caller can retry when the agent is full.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Authentication challenge of CONNECT listeners (RFC 7617, section 2).
const CHALLENGE: HeaderValue = HeaderValue::from_static("Basic realm=\"tunnel-server\"");

/// Result of a request or stream, from the tunnel's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The server forwarded the target's response or bytes completely.
    Ok,
    /// The request is malformed or contradicts itself.
    BadRequest,
    /// Host does not name a known node.
    UnknownNode,
    /// Host is an address that several nodes share.
    AmbiguousAddress,
    /// The server's or the agent's policy forbids the target.
    RefusedByPolicy,
    /// The CONNECT listener requires valid credentials.
    ProxyAuth,
    /// The request target is longer than 8 KiB.
    UriTooLong,
    /// The target refused the connection or is unreachable.
    TargetRefused,
    /// The TLS handshake with the target failed.
    TargetTls,
    /// The target's response is not HTTP, is incomplete or does not match the request.
    TargetBadResponse,
    /// The session with the agent was lost.
    AgentLost,
    /// No agent is connected for the node, or the agent's session is suspect.
    NoAgent,
    /// The agent has reached its limit of open streams, or stalled readers hold as much memory as
    /// they may.
    TooManyStreams,
    /// The agent is draining.
    Draining,
    /// The target did not accept the connection in time.
    TargetTimeout,
    /// The agent did not answer in time.
    AgentTimeout,
    /// The target or the tunnel aborted the response after it had begun.
    Cut,
    /// The caller disconnected first.
    CallerGone,
}

impl Outcome {
    /// Every outcome, for the documentation and for tests.
    pub const ALL: [Self; 18] = [
        Self::Ok,
        Self::BadRequest,
        Self::UnknownNode,
        Self::AmbiguousAddress,
        Self::RefusedByPolicy,
        Self::ProxyAuth,
        Self::UriTooLong,
        Self::TargetRefused,
        Self::TargetTls,
        Self::TargetBadResponse,
        Self::AgentLost,
        Self::NoAgent,
        Self::TooManyStreams,
        Self::Draining,
        Self::TargetTimeout,
        Self::AgentTimeout,
        Self::Cut,
        Self::CallerGone,
    ];

    /// Returns the code that appears in `X-Tunnel-Error`, logs and metric labels.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::BadRequest => "bad_request",
            Self::UnknownNode => "unknown_node",
            Self::AmbiguousAddress => "ambiguous_address",
            Self::RefusedByPolicy => "refused_by_policy",
            Self::ProxyAuth => "proxy_auth_required",
            Self::UriTooLong => "uri_too_long",
            Self::TargetRefused => "target_refused",
            Self::TargetTls => "target_tls",
            Self::TargetBadResponse => "target_bad_response",
            Self::AgentLost => "agent_lost",
            Self::NoAgent => "no_agent",
            Self::TooManyStreams => "too_many_streams",
            Self::Draining => "draining",
            Self::TargetTimeout => "target_timeout",
            Self::AgentTimeout => "agent_timeout",
            Self::Cut => "cut",
            Self::CallerGone => "caller_gone",
        }
    }

    /// Returns the HTTP status of a response with this code.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::Ok => StatusCode::OK,
            Self::BadRequest | Self::UnknownNode | Self::AmbiguousAddress => {
                StatusCode::BAD_REQUEST
            }
            Self::RefusedByPolicy => StatusCode::FORBIDDEN,
            Self::ProxyAuth => StatusCode::PROXY_AUTHENTICATION_REQUIRED,
            Self::UriTooLong => StatusCode::URI_TOO_LONG,
            Self::TargetRefused | Self::TargetTls | Self::TargetBadResponse | Self::AgentLost => {
                StatusCode::BAD_GATEWAY
            }
            Self::NoAgent | Self::TooManyStreams | Self::Draining => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::TargetTimeout | Self::AgentTimeout => StatusCode::GATEWAY_TIMEOUT,
            // These outcomes are never sent as a response. The connection is aborted instead.
            Self::Cut | Self::CallerGone => StatusCode::BAD_GATEWAY,
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.label())
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::LabelValueEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        self.label().encode(encoder)
    }
}

/// A failure before a response began, with its code and one line of text that names the node and
/// the target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ProxyError {
    /// The code of the failure.
    pub outcome: Outcome,
    /// One line of text for the caller.
    pub text: String,
    /// The limit of this server that was reached, if any.
    pub limit: Option<Limit>,
}

impl ProxyError {
    /// Creates a failure from a code and its text.
    #[must_use]
    pub fn new(outcome: Outcome, text: impl Into<String>) -> Self {
        Self {
            outcome,
            text: text.into(),
            limit: None,
        }
    }

    /// Returns the failure with the limit that caused it. The name of the limit is appended to the
    /// text.
    #[must_use]
    pub fn with_limit(self, limit: Limit) -> Self {
        Self {
            text: format!("{} (limits.{})", self.text, limit.name()),
            limit: Some(limit),
            ..self
        }
    }

    /// Creates a failure from an error of opening a stream. `target_label` names the node and the
    /// target.
    #[must_use]
    pub fn from_open(error: &OpenError, target_label: &str) -> Self {
        let outcome = match error {
            OpenError::NoAgent | OpenError::Suspect(_) => Outcome::NoAgent,
            OpenError::TooManyStreams(_) | OpenError::BufferPoolFull(_) => Outcome::TooManyStreams,
            OpenError::Draining => Outcome::Draining,
            OpenError::Lost(_) => Outcome::AgentLost,
            OpenError::Timeout => Outcome::AgentTimeout,
        };
        let limit = match error {
            OpenError::TooManyStreams(_) => Some(Limit::StreamsPerAgent),
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
    #[must_use]
    pub fn from_stream(
        error: &(dyn std::error::Error + 'static),
        target_label: &str,
        otherwise: Outcome,
    ) -> Self {
        if let Some(refusal) = find_cause::<Refusal>(error) {
            let failure = Self::new(
                refusal_outcome(refusal.code),
                format!("{target_label}: {}", refusal.detail),
            );
            return match refusal.code {
                RefusalCode::TargetTimeout => failure.with_limit(Limit::TargetDialTimeout),
                _ => failure,
            };
        }
        let cut = find_cause::<StreamCut>(error);
        let outcome = match cut {
            Some(StreamCut::SessionLost | StreamCut::NoReply) => Outcome::AgentLost,
            Some(StreamCut::ReplyTimeout) => Outcome::AgentTimeout,
            Some(StreamCut::Reset(_) | StreamCut::Stopped(_)) => Outcome::TargetBadResponse,
            None => otherwise,
        };
        let reason = match cut {
            Some(StreamCut::Reset(_) | StreamCut::Stopped(_)) => {
                "the target cut the connection".to_owned()
            }
            Some(cut) => cut.to_string(),
            None => root_cause(error),
        };
        let failure = Self::new(outcome, format!("{target_label}: {reason}"));
        match cut {
            Some(StreamCut::ReplyTimeout) => failure.with_limit(Limit::OpenTimeout),
            Some(_) | None => failure,
        }
    }

    /// Returns the HTTP response for this failure.
    #[must_use]
    pub fn response(&self) -> Response<ResponseBody> {
        let mut response = Response::new(ResponseBody::text(format!("{}\n", one_line(&self.text))));
        *response.status_mut() = self.outcome.status();
        let headers = response.headers_mut();
        headers.insert(ERROR_HEADER, HeaderValue::from_static(self.outcome.label()));
        headers.insert(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        match self.outcome {
            Outcome::TooManyStreams => {
                headers.insert(http::header::RETRY_AFTER, RETRY_AFTER);
            }
            // The end of such a request can be ambiguous, so the server does not read a further
            // request from the connection.
            Outcome::BadRequest => {
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            Outcome::ProxyAuth => {
                headers.insert(http::header::PROXY_AUTHENTICATE, CHALLENGE);
                // A caller without valid credentials must open a new connection for each guess.
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }

    /// Returns the response to a CONNECT. The status line contains the text too, because
    /// kube-apiserver shows no other part of the response.
    #[must_use]
    pub fn connect_response(&self) -> Response<ResponseBody> {
        let mut response = self.response();
        let mut reason = one_line(&self.text).into_bytes();
        reason.truncate(REASON_MAX_BYTES);
        if let Ok(reason) = ReasonPhrase::try_from(reason) {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

/// Longest reason phrase in a status line, in bytes.
const REASON_MAX_BYTES: usize = 512;

fn refusal_outcome(code: RefusalCode) -> Outcome {
    match code {
        RefusalCode::Policy => Outcome::RefusedByPolicy,
        RefusalCode::TargetRefused => Outcome::TargetRefused,
        RefusalCode::TargetTimeout => Outcome::TargetTimeout,
        RefusalCode::TooManyStreams => Outcome::TooManyStreams,
        RefusalCode::Draining => Outcome::Draining,
        RefusalCode::BadHeader | RefusalCode::Internal | RefusalCode::Unknown(_) => {
            Outcome::AgentLost
        }
    }
}

/// Returns the message of the innermost source of an error.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    one_line(&deepest.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::registry::{QuotaExhausted, StreamQuota, SuspectReason};

    #[test]
    fn refusals_and_cuts_are_found_inside_wrapped_errors() {
        let refusal = Refusal {
            code: RefusalCode::Policy,
            detail: "--localhost-ports does not list 1".into(),
        };
        let wrapped = std::io::Error::other(std::io::Error::new(
            std::io::ErrorKind::ConnectionRefused,
            refusal,
        ));
        let failure =
            ProxyError::from_stream(&wrapped, "worker-1 node:1", Outcome::TargetBadResponse);
        assert_eq!(failure.outcome, Outcome::RefusedByPolicy);
        assert_eq!(
            failure.text,
            "worker-1 node:1: --localhost-ports does not list 1"
        );
        let lost = std::io::Error::from(StreamCut::SessionLost);
        assert_eq!(
            ProxyError::from_stream(&lost, "x", Outcome::TargetTls).outcome,
            Outcome::AgentLost
        );
        let other = std::io::Error::other("odd");
        assert_eq!(
            ProxyError::from_stream(&other, "x", Outcome::TargetTls).outcome,
            Outcome::TargetTls
        );
    }

    #[test]
    fn agent_that_may_be_gone_and_a_full_pool_are_503() {
        let answer = |error| {
            let failure = ProxyError::from_open(&error, "worker-1 node:9100");
            assert!(failure.text.starts_with("worker-1 node:9100: "));
            let response = failure.response();
            let code = response.headers()[ERROR_HEADER]
                .to_str()
                .unwrap()
                .to_owned();
            let retry = response.headers().contains_key(http::header::RETRY_AFTER);
            (response.status().as_u16(), code, retry)
        };
        let suspect = OpenError::Suspect(SuspectReason::PeerHearsNothing);
        assert_eq!(answer(suspect), (503, "no_agent".into(), false));
        let full = OpenError::BufferPoolFull(1 << 20);
        assert_eq!(answer(full), (503, "too_many_streams".into(), true));
        let busy = OpenError::TooManyStreams(QuotaExhausted {
            quota: StreamQuota::UnverifiedCaller,
            streams: 128,
        });
        assert_eq!(answer(busy), (503, "too_many_streams".into(), true));
    }

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::BTreeSet<_> =
            Outcome::ALL.iter().map(|outcome| outcome.label()).collect();
        assert_eq!(labels.len(), Outcome::ALL.len());
    }
}
