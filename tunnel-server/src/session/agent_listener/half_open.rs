//! A connection that has not presented a credential yet: its deadline, and what its handshake gave.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};
use tunnel_process::conn_limiter::ConnPermit;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::transport::{HandshakeError, Session};

use crate::metrics::TIMEOUT;
use crate::session::Sessions;

/// A connection that has not presented a credential yet.
#[derive(Debug)]
pub(super) struct HalfOpenConn {
    pub(super) sessions: Arc<Sessions>,
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
    pub(super) async fn admit(self, outcome: Result<HandshakeResult, PreAuthError>) {
        let metrics = &self.sessions.metrics;
        match outcome {
            Ok(Ok(session)) => {
                drop(self.permit);
                self.sessions.serve(session).await;
            }
            Ok(Err(error)) => {
                metrics.handshake(handshake_label(&error));
                match error {
                    HandshakeError::Timeout => debug!(%error, "agent handshake failed"),
                    HandshakeError::Transport(_)
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
            Err(error) => {
                metrics.handshake(error.label());
                debug!(%error, "agent handshake failed");
            }
        }
    }
}

pub(super) type HandshakeResult = Result<Arc<dyn Session>, HandshakeError>;

fn handshake_label(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Timeout => TIMEOUT,
        HandshakeError::Transport(_) | HandshakeError::UnknownIssuer(_) => "handshake_failed",
        HandshakeError::Identity(_) => "no_identity",
        // These errors occur only on the dialing end, not on the accepting end.
        HandshakeError::Local(_)
        | HandshakeError::Connect(_)
        | HandshakeError::Refused
        | HandshakeError::CertificateRejected(..) => "local",
    }
}
