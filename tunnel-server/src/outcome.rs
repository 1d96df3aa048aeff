//! The result of a request or stream. One code determines the status, the header `X-Tunnel-Error`,
//! the log field and the metric label.

use http::StatusCode;
use tunnel_proto::stream_record::EndCode;

tunnel_process::label_values! {
    /// Result of a request or stream, from the tunnel's point of view.
    pub enum Outcome: Display, FromStr {
        /// The server forwarded the target's response or bytes completely.
        Ok = "ok",
        /// The request is malformed or contradicts itself.
        BadRequest = "bad_request",
        /// Host does not name a known node.
        UnknownNode = "unknown_node",
        /// Host is an address that several nodes share.
        AmbiguousAddress = "ambiguous_address",
        /// The server's or the agent's policy forbids the target.
        RefusedByPolicy = "refused_by_policy",
        /// The CONNECT listener requires valid credentials.
        ProxyAuth = "proxy_auth_required",
        /// The request target is longer than 65,000 bytes.
        UriTooLong = "uri_too_long",
        /// The request head has more bytes or more fields than allowed.
        HeadTooLarge = "head_too_large",
        /// The target refused the connection or is unreachable.
        TargetRefused = "target_refused",
        TargetTls = "target_tls",
        /// The target's response is not HTTP, is incomplete or does not match the request.
        TargetBadResponse = "target_bad_response",
        AgentLost = "agent_lost",
        /// No agent is connected for the node, or the agent's session is suspect.
        NoAgent = "no_agent",
        /// The agent has reached its limit of open streams, or stalled readers hold as much memory as
        /// they may.
        TooManyStreams = "too_many_streams",
        /// The server has no memory for a large request head.
        Overloaded = "overloaded",
        Draining = "draining",
        /// The server does not know the nodes of the cluster yet.
        Starting = "starting",
        /// The target did not accept the connection in time.
        TargetTimeout = "target_timeout",
        /// The agent did not answer in time.
        AgentTimeout = "agent_timeout",
        /// The target or the tunnel aborted the response after it had begun.
        Cut = "cut",
        /// The caller disconnected first.
        CallerGone = "caller_gone",
        /// The caller, or the target, read nothing for 10 s while other streams waited for the memory.
        ReaderStalled = "reader_stalled",
    }
}

impl Outcome {
    /// Returns whether the request failed, by a fault of the caller or not. A caller that leaves first,
    /// as one that follows a log does, is none.
    pub fn is_failure(self) -> bool {
        !matches!(self, Self::Ok | Self::CallerGone)
    }

    /// Returns whether a response or stream was not forwarded to its end.
    pub fn is_unfinished(self) -> bool {
        matches!(self, Self::Cut | Self::CallerGone)
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
