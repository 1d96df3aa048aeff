//! A connection that has not presented a credential yet: its deadline, and what its handshake gave.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};
use tunnel_process::conn_limiter::ConnPermit;
use tunnel_process::errors::causes;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::tls::{CertificateAlert, CertificateRejection};
use tunnel_proto::transport::{HandshakeError, Session};
use tunnel_proto::wire::code::CloseCode;

use crate::failure_code::{NO_CERTIFICATE, SERVER_EXPIRED, SERVER_REJECTED, SERVER_UNTRUSTED};
use crate::metrics::TIMEOUT;
use crate::session::Sessions;
use crate::session::failures::FailedNode;

/// A connection that has not presented a credential yet.
#[derive(Debug)]
pub(super) struct HalfOpenConn {
    pub(super) sessions: Arc<Sessions>,
    pub(super) peer: SocketAddr,
    pub(super) deadline: Instant,
    pub(super) permit: ConnPermit,
}

/// Reason why a connection was closed before it presented a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PreAuthError {
    #[error("handshake did not finish in time (limits.handshakeTimeout)")]
    Timeout,
    #[error(
        "connection evicted in favor of a newer one (limits.preAuthPerSource, limits.preAuthTotal)"
    )]
    Evicted,
}

impl PreAuthError {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Timeout => TIMEOUT,
            Self::Evicted => "evicted",
        }
    }
}

impl HalfOpenConn {
    /// Runs work until the deadline, or until the connection's permit is evicted.
    pub(super) async fn with_deadline<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, PreAuthError> {
        tokio::select! {
            biased;
            () = self.permit.evicted() => Err(PreAuthError::Evicted),
            done = timeout_at(self.deadline, work) => done.map_err(|_elapsed| PreAuthError::Timeout),
        }
    }

    /// Serves the session that the handshake produced until the session ends.
    pub(super) fn admit(
        self,
        outcome: Result<HandshakeResult, PreAuthError>,
    ) -> impl Future<Output = ()> {
        // The future has no more than it needs, since it lives as long as the session.
        let accepted = self.accepted(outcome);
        async move {
            if let Some((sessions, session)) = accepted {
                sessions.serve(session).await;
            }
        }
    }

    /// Returns the session that the handshake produced, or reports the failure.
    fn accepted(
        self,
        outcome: Result<HandshakeResult, PreAuthError>,
    ) -> Option<(Arc<Sessions>, Arc<dyn Session>)> {
        match outcome {
            Ok(Ok(session)) => return Some((self.sessions, session)),
            Ok(Err(error)) => {
                self.sessions.metrics.handshake(handshake_label(&error));
                self.record(failure_code(&error), causes(&error));
                match error {
                    HandshakeError::Timeout => debug!(%error, "agent handshake failed"),
                    HandshakeError::Transport(_)
                    | HandshakeError::Certificate(..)
                    | HandshakeError::UnknownIssuer(_)
                    | HandshakeError::CertificateRejected(..)
                    | HandshakeError::Identity(_)
                    | HandshakeError::Local(_)
                    | HandshakeError::Refused
                    | HandshakeError::Connect(_) => {
                        static FAILED: LogRateLimit = LogRateLimit::new("agent handshakes failed");
                        if FAILED.admit() {
                            warn!(%error, "agent handshake failed");
                        }
                    }
                }
            }
            Err(error) => self.early(error),
        }
        None
    }

    /// Reports the end of the connection before it presented a credential.
    pub(super) fn early(&self, error: PreAuthError) {
        self.sessions.metrics.handshake(error.label());
        debug!(%error, "agent handshake failed");
        match error {
            PreAuthError::Timeout => self.record(error.label(), error.to_string()),
            // Its limits are counted, and the newer connection says nothing about this one.
            PreAuthError::Evicted => {}
        }
    }

    /// Records a failure for operators.
    pub(super) fn record(&self, code: &'static str, detail: impl Into<String>) {
        let sessions = &self.sessions;
        sessions.record_failure(code, FailedNode::Unknown, self.peer, detail);
    }
}

pub(super) type HandshakeResult = Result<Arc<dyn Session>, HandshakeError>;

fn handshake_label(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Timeout => TIMEOUT,
        HandshakeError::Transport(_)
        | HandshakeError::Certificate(..)
        | HandshakeError::UnknownIssuer(_) => "handshake_failed",
        HandshakeError::Identity(_) => "no_identity",
        // These errors occur only on the dialing end, not on the accepting end.
        HandshakeError::Local(_)
        | HandshakeError::Connect(_)
        | HandshakeError::Refused
        | HandshakeError::CertificateRejected(..) => "local",
    }
}

/// Returns the name of a failed handshake for operators, which says more than the metric's label.
fn failure_code(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Certificate(alert, _) => rejection_code(*alert),
        HandshakeError::Timeout
        | HandshakeError::Transport(_)
        | HandshakeError::UnknownIssuer(_)
        | HandshakeError::Identity(_)
        | HandshakeError::Local(_)
        | HandshakeError::Connect(_)
        | HandshakeError::Refused
        | HandshakeError::CertificateRejected(..) => handshake_label(error),
    }
}

pub(super) fn rejection_code(alert: CertificateAlert) -> &'static str {
    use CertificateRejection::{Expired, Missing, Other, Revoked, UnknownCa};
    match (alert.is_from_peer, alert.reason) {
        (true, UnknownCa) => SERVER_UNTRUSTED,
        (true, Expired) => SERVER_EXPIRED,
        (true, Missing | Revoked | Other) => SERVER_REJECTED,
        (false, UnknownCa) => CloseCode::CredentialUntrusted.label(),
        (false, Expired) => CloseCode::CredentialExpired.label(),
        (false, Revoked) => CloseCode::CredentialRevoked.label(),
        (false, Missing) => NO_CERTIFICATE,
        (false, Other) => "no_identity",
    }
}
