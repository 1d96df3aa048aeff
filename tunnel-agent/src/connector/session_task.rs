//! The task of one session: resolves, dials, is admitted and serves, or fails and returns the
//! reason. An attempt to open a session runs one task or two.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tunnel_proto::dial::{ATTEMPT_DELAY, staggered};
use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::transport::{ClosedBy, Dialer, HandshakeError, Session};
use tunnel_proto::wire::code::CloseCode;

use super::endpoint::{Endpoints, ResolveError};
use super::happy_eyeballs::DialFailure;
use super::member_addresses::ServerPolicy;
use super::transport_policy::SessionTransport;
use crate::metrics::ConnectResult;
use crate::proxy::ProxyChoice;
use crate::session::{
    AdmitError, AdmittedSession, SessionContext, SessionEvent, SessionHandle, SessionSummary,
};

/// The servers that may be dialed, and a dialer for each transport.
pub(crate) struct Dialers {
    pub(crate) server_policy: Arc<ServerPolicy>,
    pub(crate) proxy: ProxyChoice,
    pub(crate) quic: Arc<dyn Dialer>,
    pub(crate) h2: Arc<dyn Dialer>,
}

impl Dialers {
    fn dialer(&self, transport: SessionTransport) -> &Arc<dyn Dialer> {
        match transport {
            SessionTransport::Quic => &self.quic,
            SessionTransport::H2 => &self.h2,
        }
    }

    /// Waits until all closed connections have notified their peers, at most 1 s.
    pub(crate) async fn wait_idle(&self) {
        tokio::join!(self.quic.wait_idle(), self.h2.wait_idle());
    }
}

pub(super) struct SessionTask {
    pub(super) transport: SessionTransport,
    pub(super) endpoints: Endpoints,
    pub(super) dialers: Arc<Dialers>,
    pub(super) context: Arc<SessionContext>,
    pub(super) handle: SessionHandle,
    /// Whether to serve the session, once it is admitted.
    pub(super) admission: oneshot::Receiver<Admission>,
}

/// What becomes of a session that its server has admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Serve,
    /// Another connector has a session with the server, or another server is required.
    Decline,
}

#[derive(Debug)]
pub(super) struct SessionExit {
    /// The position of the dial, unless the task panicked.
    pub(super) endpoints: Option<Endpoints>,
    pub(super) outcome: Result<SessionSummary, ConnectError>,
}

/// The reason why there is no ready session.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The connection to the server failed.
    #[error("{remote}")]
    Dial {
        remote: ServerAddr,
        /// The proxy that was dialed, and the setting that names it.
        proxy: Option<String>,
        #[source]
        source: HandshakeError,
    },
    /// The server sent no Welcome.
    #[error("{remote}")]
    Admit {
        remote: ServerAddr,
        #[source]
        source: AdmitError,
    },
    /// Another connector holds the server, or this was a move to another one.
    #[error("{remote}: another session of this agent is with this server")]
    Duplicate { remote: ServerAddr },
    #[error("another session is ready")]
    Abandoned,
    /// The task panicked; the panic is in the log.
    #[error("session task panicked")]
    Panicked,
}

impl ConnectError {
    /// Returns the close code that the server or this end gave.
    pub(super) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::Admit { source, .. } => source.code(),
            Self::Dial { source, .. } => source.code(),
            Self::Resolve(_) | Self::Duplicate { .. } | Self::Abandoned | Self::Panicked => None,
        }
    }

    /// Returns what an operator can check, to append to the error.
    pub(super) fn advice(&self, transport: SessionTransport) -> Cow<'static, str> {
        let Self::Dial { source, proxy, .. } = self else {
            return "".into();
        };
        let is_quic = transport == SessionTransport::Quic;
        let is_timeout = matches!(source, HandshakeError::Timeout);
        match proxy {
            _ if is_quic && is_timeout => UDP_ADVICE.into(),
            Some(proxy) if is_timeout => format!(
                " (through proxy {proxy}: it hangs, or does not reach the server; --proxy off dials without it)"
            )
            .into(),
            Some(proxy) if self.is_unknown_issuer() => format!(
                " (does proxy {proxy} open TLS? Then exempt the server from TLS inspection there; tunnel-agent doctor prints \
                 the certificate){CA_ADVICE}"
            )
            .into(),
            _ if self.is_unknown_issuer() => CA_ADVICE.into(),
            _ => "".into(),
        }
    }

    /// Returns whether this agent does not trust the CA of the server's certificate.
    pub(super) fn is_unknown_issuer(&self) -> bool {
        let unknown = |source: &HandshakeError| matches!(source, HandshakeError::UnknownIssuer(_));
        matches!(self, Self::Dial { source, .. } if unknown(source))
    }

    /// Classifies the error for happy eyeballs.
    pub(super) fn failure(&self) -> DialFailure {
        match self {
            Self::Resolve(_) | Self::Abandoned | Self::Panicked => DialFailure::Unreachable,
            // The other transport leads to the same servers.
            Self::Duplicate { .. } => DialFailure::RefusedByServer,
            Self::Dial { source, .. } => match source {
                HandshakeError::Timeout => DialFailure::Timeout,
                HandshakeError::Connect(_) | HandshakeError::Refused | HandshakeError::Local(_) => {
                    DialFailure::Unreachable
                }
                HandshakeError::Transport(_)
                | HandshakeError::Certificate(..)
                | HandshakeError::UnknownIssuer(_)
                | HandshakeError::CertificateRejected(..)
                | HandshakeError::Identity(_) => DialFailure::HandshakeFailed,
            },
            Self::Admit { source, .. } => match source {
                AdmitError::Timeout => DialFailure::Timeout,
                AdmitError::Control(_) => DialFailure::Unreachable,
                AdmitError::NotAdmitted { .. }
                | AdmitError::Version(..)
                | AdmitError::Protocol(_) => DialFailure::RefusedByServer,
                AdmitError::Closed(reason) => match (reason.by, reason.code) {
                    (ClosedBy::Peer, _) => DialFailure::RefusedByServer,
                    (ClosedBy::Local, _) | (ClosedBy::Network, CloseCode::Dead) => {
                        DialFailure::Unreachable
                    }
                    // In TLS 1.3 a client learns in this form that its certificate was refused.
                    (ClosedBy::Network, _) => DialFailure::HandshakeFailed,
                },
            },
        }
    }

    /// Returns whether a certificate, local or the server's, probably caused the failure. Over TCP
    /// a middlebox that answers in place of the server looks the same.
    pub(super) fn is_certificate_failure(&self) -> bool {
        self.failure() == DialFailure::HandshakeFailed
    }

    pub(super) fn result(&self) -> ConnectResult {
        match self {
            Self::Abandoned => ConnectResult::Abandoned,
            Self::Duplicate { .. } => ConnectResult::Duplicate,
            Self::Admit {
                source: AdmitError::NotAdmitted { .. },
                ..
            } => ConnectResult::NotAdmitted,
            Self::Resolve(_) | Self::Dial { .. } | Self::Admit { .. } | Self::Panicked => {
                match self.failure() {
                    DialFailure::Timeout => ConnectResult::NoAnswer,
                    DialFailure::Unreachable
                    | DialFailure::HandshakeFailed
                    | DialFailure::RefusedByServer => ConnectResult::Failed,
                }
            }
        }
    }
}

impl SessionTask {
    /// Runs until the end of the session. Dropping the future cuts everything.
    pub(super) async fn run(mut self) -> SessionExit {
        let began = Instant::now();
        let retire = self.handle.retire.clone();
        let connected = tokio::select! {
            biased;
            () = retire.cancelled() => Err(ConnectError::Abandoned),
            connected = self.connect() => connected,
        };
        let outcome = match connected {
            Ok((remote, session)) => {
                self.handle.send(SessionEvent::Answered).await;
                match AdmittedSession::admit(session, &self.context, began).await {
                    Ok(admitted) => self.serve(remote, admitted).await,
                    Err(source) => Err(ConnectError::Admit { remote, source }),
                }
            }
            Err(error) => Err(error),
        };
        SessionExit {
            endpoints: Some(self.endpoints),
            outcome,
        }
    }

    /// Asks whether to serve the session, and serves or declines it.
    async fn serve(
        &mut self,
        remote: ServerAddr,
        mut admitted: AdmittedSession,
    ) -> Result<SessionSummary, ConnectError> {
        let members = admitted.take_members();
        let replica = admitted.replica().clone();
        let session_event = SessionEvent::Admitted { replica, members };
        self.handle.send(session_event).await;
        match (&mut self.admission).await {
            Ok(Admission::Serve) => Ok(admitted.run(&self.context, &self.handle).await),
            Ok(Admission::Decline) => {
                admitted.decline().await;
                Err(ConnectError::Duplicate { remote })
            }
            // The connectors are gone.
            Err(_) => Err(ConnectError::Abandoned),
        }
    }

    async fn connect(&mut self) -> Result<(ServerAddr, Arc<dyn Session>), ConnectError> {
        let within = self.context.limits.handshake_timeout;
        let remote = self.remote(within).await?;
        let other_family = self.endpoints.other_family(&remote);
        let dialer = self.dialers.dialer(self.transport);
        let proxy = self.dialers.proxy.clone();
        let is_over_tcp = self.transport == SessionTransport::H2;
        let attempts = std::iter::once(remote).chain(other_family);
        let attempts = attempts.map(async |remote| {
            let dialed = timeout(within, dialer.dial(&remote)).await;
            match dialed.unwrap_or(Err(HandshakeError::Timeout)) {
                Ok(session) => Ok((remote, session)),
                Err(source) => Err(ConnectError::Dial {
                    proxy: (is_over_tcp && proxy.is_dialed_for(&remote)).then(|| proxy.to_string()),
                    remote,
                    source,
                }),
            }
        });
        let connected = staggered(attempts, ATTEMPT_DELAY).await;
        // The server that said most. There was at least one attempt.
        connected.map_err(|errors| {
            let said_most = errors.into_iter().max_by_key(ConnectError::failure);
            said_most.unwrap_or(ConnectError::Abandoned)
        })
    }

    async fn remote(&mut self, within: Duration) -> Result<ServerAddr, ResolveError> {
        let (proxy, server_policy) = (&self.dialers.proxy, &self.dialers.server_policy);
        let tcp = self.transport == SessionTransport::H2;
        self.endpoints
            .next(
                within,
                |server| tcp && proxy.is_proxied(server) && server_policy.is_configured(server),
                |server, address| server_policy.is_dialable(server, address),
            )
            .await
    }
}

/// Advice when no server answers over UDP.
const UDP_ADVICE: &str = " (is UDP to the server's port blocked? --transport auto also tries TCP)";
/// Advice when the server's certificate is of a CA that this agent does not trust.
const CA_ADVICE: &str = " (another CA issued the server's certificate: is this the right server? If it \
    is, put the output of `tunnel-server ca` into the file of --ca-file, or without one give the agent a \
    new token)";
