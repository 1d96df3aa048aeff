//! The result of a request or stream. One code determines the status, the header `X-Tunnel-Error`,
//! the log field and the metric label.

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelValue;
use tunnel_proto::stream_record::EndCode;

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
    /// The request target is longer than 65,000 bytes.
    UriTooLong,
    /// The request head has more bytes or more fields than allowed.
    HeadTooLarge,
    /// The target refused the connection or is unreachable.
    TargetRefused,
    TargetTls,
    /// The target's response is not HTTP, is incomplete or does not match the request.
    TargetBadResponse,
    AgentLost,
    /// No agent is connected for the node, or the agent's session is suspect.
    NoAgent,
    /// The agent has reached its limit of open streams, or stalled readers hold as much memory as
    /// they may.
    TooManyStreams,
    /// The server has no memory for a large request head.
    Overloaded,
    Draining,
    /// The server does not know the nodes of the cluster yet.
    Starting,
    /// The target did not accept the connection in time.
    TargetTimeout,
    /// The agent did not answer in time.
    AgentTimeout,
    /// The target or the tunnel aborted the response after it had begun.
    Cut,
    /// The caller disconnected first.
    CallerGone,
    /// The caller, or the target, read nothing for 10 s while other streams waited for the memory.
    ReaderStalled,
}

impl Outcome {
    /// Every outcome, for the documentation and for tests.
    pub const ALL: [Self; 22] = [
        Self::Ok,
        Self::BadRequest,
        Self::UnknownNode,
        Self::AmbiguousAddress,
        Self::RefusedByPolicy,
        Self::ProxyAuth,
        Self::UriTooLong,
        Self::HeadTooLarge,
        Self::TargetRefused,
        Self::TargetTls,
        Self::TargetBadResponse,
        Self::AgentLost,
        Self::NoAgent,
        Self::TooManyStreams,
        Self::Overloaded,
        Self::Draining,
        Self::Starting,
        Self::TargetTimeout,
        Self::AgentTimeout,
        Self::Cut,
        Self::CallerGone,
        Self::ReaderStalled,
    ];

    /// Returns whether the request failed, by a fault of the caller or not. A caller that leaves first,
    /// as one that follows a log does, is none.
    pub fn is_failure(self) -> bool {
        !matches!(self, Self::Ok | Self::CallerGone)
    }

    /// Returns whether a response or stream was not forwarded to its end.
    pub fn is_unfinished(self) -> bool {
        matches!(self, Self::Cut | Self::CallerGone)
    }

    /// Returns the code that appears in `X-Tunnel-Error`, logs and metric labels.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::BadRequest => "bad_request",
            Self::UnknownNode => "unknown_node",
            Self::AmbiguousAddress => "ambiguous_address",
            Self::RefusedByPolicy => "refused_by_policy",
            Self::ProxyAuth => "proxy_auth_required",
            Self::UriTooLong => "uri_too_long",
            Self::HeadTooLarge => "head_too_large",
            Self::TargetRefused => "target_refused",
            Self::TargetTls => "target_tls",
            Self::TargetBadResponse => "target_bad_response",
            Self::AgentLost => "agent_lost",
            Self::NoAgent => "no_agent",
            Self::TooManyStreams => "too_many_streams",
            Self::Overloaded => "overloaded",
            Self::Draining => "draining",
            Self::Starting => "starting",
            Self::TargetTimeout => "target_timeout",
            Self::AgentTimeout => "agent_timeout",
            Self::Cut => "cut",
            Self::CallerGone => "caller_gone",
            Self::ReaderStalled => "reader_stalled",
        }
    }

    pub fn status(self) -> StatusCode {
        match self {
            Self::Ok => StatusCode::OK,
            Self::BadRequest | Self::UnknownNode | Self::AmbiguousAddress => {
                StatusCode::BAD_REQUEST
            }
            Self::RefusedByPolicy => StatusCode::FORBIDDEN,
            Self::ProxyAuth => StatusCode::PROXY_AUTHENTICATION_REQUIRED,
            Self::UriTooLong => StatusCode::URI_TOO_LONG,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TargetRefused | Self::TargetTls | Self::TargetBadResponse | Self::AgentLost => {
                StatusCode::BAD_GATEWAY
            }
            Self::NoAgent
            | Self::TooManyStreams
            | Self::Overloaded
            | Self::Draining
            | Self::Starting => StatusCode::SERVICE_UNAVAILABLE,
            Self::TargetTimeout | Self::AgentTimeout | Self::ReaderStalled => {
                StatusCode::GATEWAY_TIMEOUT
            }
            // These outcomes are never sent as a response. The connection is aborted instead.
            Self::Cut | Self::CallerGone => StatusCode::BAD_GATEWAY,
        }
    }
}

impl EndCode for Outcome {
    fn label(self) -> &'static str {
        Self::label(self)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::BTreeSet<_> =
            Outcome::ALL.iter().map(|outcome| outcome.label()).collect();
        assert_eq!(labels.len(), Outcome::ALL.len());
    }
}
