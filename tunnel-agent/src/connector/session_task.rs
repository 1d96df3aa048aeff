//! The task of one session: resolves, dials, is admitted and serves, or fails and returns the
//! reason. An attempt to open a session runs one task or two.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::Id;
use tokio::time::{Instant, timeout};
use tunnel_proto::tcp::ServerAddr;
use tunnel_proto::transport::{ClosedBy, Dialer, HandshakeError, Session};
use tunnel_proto::wire::code::CloseCode;

use super::endpoint::{EndpointCursor, ResolveError};
use super::happy_eyeballs::{DialAction, DialFailure, HappyEyeballs};
use super::transport_policy::SessionTransport;
use crate::config::ServerAddress;
use crate::metrics::ConnectResult;
use crate::proxy::ProxyChoice;
use crate::session::{
    self, AdmitError, SessionContext, SessionEvent, SessionHandle, SessionSummary,
};

/// The servers, and a dialer for each transport.
pub(crate) struct Dialers {
    pub(crate) servers: Vec<ServerAddress>,
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
    pub(super) cursor: EndpointCursor,
    pub(super) dialers: Arc<Dialers>,
    pub(super) context: Arc<SessionContext>,
    pub(super) handle: SessionHandle,
}

pub(super) struct SessionExit {
    pub(super) cursor: EndpointCursor,
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
    #[error("another session is ready")]
    Abandoned,
    /// The task panicked; the panic is in the log.
    #[error("session task panicked")]
    Broken,
}

impl ConnectError {
    /// Returns the close code that the server or this end gave.
    pub(super) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::Admit { source, .. } => source.code(),
            Self::Dial { source, .. } => source.code(),
            Self::Resolve(_) | Self::Abandoned | Self::Broken => None,
        }
    }

    /// Classifies the error for happy eyeballs.
    pub(super) fn failure(&self) -> DialFailure {
        match self {
            Self::Resolve(_) | Self::Abandoned | Self::Broken => DialFailure::Unreachable,
            Self::Dial { source, .. } => match source {
                HandshakeError::Timeout => DialFailure::Timeout,
                HandshakeError::Connect(_) | HandshakeError::Refused | HandshakeError::Local(_) => {
                    DialFailure::Unreachable
                }
                HandshakeError::Transport(_)
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
            Self::Admit {
                source: AdmitError::NotAdmitted { .. },
                ..
            } => ConnectResult::NotAdmitted,
            Self::Resolve(_) | Self::Dial { .. } | Self::Admit { .. } | Self::Broken => {
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
                session::run(session, &self.context, &self.handle, began)
                    .await
                    .map_err(|source| ConnectError::Admit { remote, source })
            }
            Err(error) => Err(error),
        };
        SessionExit {
            cursor: self.cursor,
            outcome,
        }
    }

    async fn connect(&mut self) -> Result<(ServerAddr, Arc<dyn Session>), ConnectError> {
        let within = self.context.limits.handshake_timeout;
        let remote = self.remote(within).await?;
        let dialed = timeout(within, self.dialers.dialer(self.transport).dial(&remote)).await;
        match dialed.unwrap_or(Err(HandshakeError::Timeout)) {
            Ok(session) => Ok((remote, session)),
            Err(source) => Err(ConnectError::Dial { remote, source }),
        }
    }

    async fn remote(&mut self, within: Duration) -> Result<ServerAddr, ResolveError> {
        let Dialers { servers, proxy, .. } = &*self.dialers;
        let tcp = self.transport == SessionTransport::H2;
        self.cursor
            .next(servers, within, |server| tcp && proxy.is_proxied(server))
            .await
    }
}

/// Sessions that are being dialed. The first that is ready wins.
pub(super) struct Attempt {
    pub(super) purpose: DialPurpose,
    pub(super) happy_eyeballs: HappyEyeballs,
    /// Next endpoint of this round, and start of the next round.
    pub(super) cursor: EndpointCursor,
    pub(super) next_cursor: Option<EndpointCursor>,
    pub(super) task_ids: Vec<Id>,
    pub(super) failures: Vec<(SessionTransport, ConnectError)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialPurpose {
    /// There is no live session, or its server is stopping.
    Connect,
    /// The session uses h2, and QUIC would be better.
    Upgrade,
    /// The session uses older credentials.
    Refresh,
}

impl Attempt {
    /// Creates an attempt without session tasks.
    pub(super) fn new(
        purpose: DialPurpose,
        happy_eyeballs: HappyEyeballs,
        cursor: EndpointCursor,
    ) -> Self {
        Self {
            purpose,
            happy_eyeballs,
            cursor,
            next_cursor: None,
            task_ids: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Records the failure of one transport, whose session task tried the endpoint at `cursor`.
    pub(super) fn failed(
        &mut self,
        transport: SessionTransport,
        mut cursor: EndpointCursor,
        error: ConnectError,
    ) -> DialAction {
        if self.next_cursor.is_none() || transport == self.happy_eyeballs.first() {
            // After a failed name lookup the cursor already points to the next server.
            if !matches!(error, ConnectError::Resolve(_)) {
                cursor.failed();
            }
            self.next_cursor = Some(cursor);
        }
        let action = self.happy_eyeballs.failed(transport, error.failure());
        self.failures.retain(|(failed, _)| *failed != transport);
        self.failures.push((transport, error));
        action
    }

    pub(super) fn code(&self) -> Option<CloseCode> {
        let decisive = self
            .failures
            .iter()
            .max_by_key(|(_, error)| error.failure());
        decisive.and_then(|(_, error)| error.code())
    }
}
