//! Errors of enrollment, with their endpoint and advice for the operator.

use std::fmt;
use std::io;
use std::sync::Arc;

use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::name::NodeName;

use crate::connector::endpoint::ResolveError;
use crate::credentials::CredentialError;
use crate::proxy::HttpProxy;

/// The reason why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnrollError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error("{endpoint}: cannot connect (enrollment needs TCP)")]
    Connect {
        endpoint: EnrollEndpoint,
        #[source]
        source: io::Error,
    },
    /// No certificate of the server's chain has the CA key that the token pins.
    #[error(
        "{endpoint}: the token pins another CA, and nothing secret was sent; create a new token on \
         this server: tunnel-server token create --node {node}; is this the right server{}?",
        endpoint.proxy_hint()
    )]
    OtherCa {
        endpoint: EnrollEndpoint,
        node: NodeName,
    },
    /// The server did not prove to be the one that the token or --ca-file names.
    #[error(
        "{endpoint}: TLS failed, and nothing secret was sent: {problem}; is this the right server{}?",
        endpoint.proxy_hint()
    )]
    Tls {
        endpoint: EnrollEndpoint,
        problem: String,
    },
    /// The request or the answer did not get through.
    #[error("{endpoint}: no answer to the request")]
    Exchange {
        endpoint: EnrollEndpoint,
        #[source]
        source: io::Error,
    },
    #[error("{endpoint}: answer is not usable: {problem}")]
    Answer {
        endpoint: EnrollEndpoint,
        problem: &'static str,
    },
    /// The issued certificate cannot be used.
    #[error("{endpoint}: certificate is not usable: {problem}")]
    Unusable {
        endpoint: EnrollEndpoint,
        problem: String,
    },
    #[error(
        "server refuses to enroll {node} ({code}): {detail}{}",
        if *.has_account { account_advice(*.code).to_owned() } else { advice(*.code, .node) }
    )]
    Refused {
        node: NodeName,
        code: EnrollCode,
        detail: String,
        /// Whether the request used a ServiceAccount token.
        has_account: bool,
    },
    /// The ServiceAccount token has expired or another key has used it, and the kubelet has not
    /// replaced it yet.
    #[error("{0}; trying again with what the kubelet writes to --token-file")]
    Stale(String),
    /// The file of the token cannot be read, or holds none.
    #[error("cannot read the token")]
    Token(#[source] CredentialError),
    /// Another process is enrolling.
    #[error("another tunnel-agent is enrolling with the same data directory")]
    Busy,
    /// The data directory cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// This build cannot create a request or a TLS configuration.
    #[error("cannot prepare the request: {0}")]
    Prepare(String),
}

/// The server and address of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct EnrollEndpoint {
    pub(super) remote: ServerAddr,
    pub(super) proxy: Option<Arc<HttpProxy>>,
}

impl fmt::Display for EnrollEndpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.proxy {
            Some(proxy) => write!(formatter, "{} through proxy {proxy}", self.remote),
            None => self.remote.fmt(formatter),
        }
    }
}

impl EnrollEndpoint {
    /// Returns a hint about other causes of a TLS failure.
    fn proxy_hint(&self) -> &'static str {
        match self.proxy {
            Some(_) => ", and does the proxy pass TLS on unopened",
            None => "",
        }
    }
}

impl EnrollError {
    /// Returns whether a later attempt may succeed without operator action.
    pub(crate) fn is_retryable(&self) -> bool {
        match self {
            Self::Resolve(_)
            | Self::Connect { .. }
            | Self::OtherCa { .. }
            | Self::Tls { .. }
            | Self::Exchange { .. }
            | Self::Answer { .. }
            | Self::Unusable { .. }
            | Self::Stale(_)
            | Self::Token(_)
            | Self::Busy => true,
            Self::Refused { code, .. } => code.is_retryable(),
            Self::Credentials(_) | Self::Prepare(_) => false,
        }
    }
}

/// Returns advice for the operator after a refused ServiceAccount token.
fn account_advice(code: EnrollCode) -> &'static str {
    match code {
        EnrollCode::BadToken => {
            "; the server's --agent-token-audience and --agent-service-account say which tokens it takes"
        }
        EnrollCode::WrongNode => {
            "; let --node-name (NODE_NAME) be the Pod's spec.nodeName, as by the downward API"
        }
        EnrollCode::NotOffered => "; enroll with a join token, or give --cert-file and --ca-file",
        EnrollCode::BadRequest => "; agent and server may be of different versions",
        EnrollCode::TokenExpired
        | EnrollCode::TokenUsed
        | EnrollCode::Revoked
        | EnrollCode::CertificateEnded
        | EnrollCode::ClockWrong
        | EnrollCode::BadProof
        | EnrollCode::RateLimited
        | EnrollCode::Unavailable
        | EnrollCode::Pending
        | EnrollCode::Unknown(_) => "",
    }
}

/// Returns advice for the operator after a refusal.
fn advice(code: EnrollCode, node: &NodeName) -> String {
    match code {
        EnrollCode::BadToken | EnrollCode::TokenExpired | EnrollCode::TokenUsed => {
            format!("; create a new token: tunnel-server token create --node {node}")
        }
        EnrollCode::WrongNode => {
            "; give the --node-name that the token was created for, or create a token for this one"
                .to_owned()
        }
        EnrollCode::CertificateEnded => {
            format!("; enroll again with --token and a new join token (tunnel-server token create --node {node})")
        }
        EnrollCode::Revoked => {
            format!(
                "; to admit this node again, end a revocation (tunnel-server nodes unrevoke {node}), remove agent.key and agent.crt, \
                 and enroll with a new token"
            )
        }
        EnrollCode::ClockWrong => "; compare the clocks of both hosts (date -u)".to_owned(),
        EnrollCode::NotOffered => "; give --cert-file, --key-file and --ca-file".to_owned(),
        EnrollCode::BadProof => {
            "; the stored certificate cannot be used with this server: remove agent.crt and enroll with a new token".to_owned()
        }
        EnrollCode::BadRequest => "; agent and server may be of different versions".to_owned(),
        EnrollCode::Pending => format!("; on the server: tunnel-server nodes approve {node}"),
        EnrollCode::RateLimited | EnrollCode::Unavailable | EnrollCode::Unknown(_) => String::new(),
    }
}
