//! One session's task, from the first packet to the last: resolves, dials, is admitted, serves; or fails and says why.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tunnel_proto::tcp::Remote;
use tunnel_proto::transport::{ClosedBy, Dialer, HandshakeError, Session};
use tunnel_proto::wire::code::CloseCode;

use super::endpoint::{Endpoints, ResolveError};
use super::ladder::Rung;
use super::race::Failure;
use crate::config::ServerAddress;
use crate::metrics::ConnectResult;
use crate::proxy::ProxyChoice;
use crate::session::{self, AdmitError, Held, News, Shared, Tether};

/// Where the servers are, and how each transport is dialled.
pub(crate) struct Paths {
    pub(crate) servers: Vec<ServerAddress>,
    pub(crate) proxy: ProxyChoice,
    pub(crate) quic: Arc<dyn Dialer>,
    pub(crate) h2: Arc<dyn Dialer>,
}

impl Paths {
    fn dialer(&self, rung: Rung) -> &Arc<dyn Dialer> {
        match rung {
            Rung::Quic => &self.quic,
            Rung::H2 => &self.h2,
        }
    }

    /// Waits until all that was closed has told its peer, at most 1 s.
    pub(crate) async fn wait_idle(&self) {
        tokio::join!(self.quic.wait_idle(), self.h2.wait_idle());
    }
}

/// What the task of a session needs.
pub(super) struct Lane {
    pub(super) rung: Rung,
    /// Where to begin to look.
    pub(super) place: Endpoints,
    pub(super) paths: Arc<Paths>,
    pub(super) shared: Arc<Shared>,
    pub(super) tether: Tether,
}

/// How a lane ended.
pub(super) struct Ended {
    /// The place that was tried.
    pub(super) place: Endpoints,
    pub(super) outcome: Result<Held, ConnectError>,
}

/// Why there is no ready session.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// No address.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// No connection.
    #[error("{remote}")]
    Dial {
        remote: Remote,
        #[source]
        source: HandshakeError,
    },
    /// No Welcome.
    #[error("{remote}")]
    Admit {
        remote: Remote,
        #[source]
        source: AdmitError,
    },
    /// Nobody needs it any more.
    #[error("another session is ready")]
    Abandoned,
    /// A bug; the panic is in the log.
    #[error("its task broke")]
    Broken,
}

impl ConnectError {
    /// What the server, or this end, gave as the reason.
    pub(super) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::Admit { source, .. } => source.code(),
            Self::Dial { source, .. } => source.code(),
            Self::Resolve(_) | Self::Abandoned | Self::Broken => None,
        }
    }

    /// What it means for the race.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Resolve(_) | Self::Abandoned | Self::Broken => Failure::NoWay,
            Self::Dial { source, .. } => match source {
                HandshakeError::Timeout => Failure::Silence,
                HandshakeError::Connect(_) | HandshakeError::Refused | HandshakeError::Local(_) => {
                    Failure::NoWay
                }
                HandshakeError::Transport(_)
                | HandshakeError::Verdict(..)
                | HandshakeError::Identity(_) => Failure::Alert,
            },
            Self::Admit { source, .. } => match source {
                AdmitError::Timeout => Failure::Silence,
                AdmitError::Control(_) => Failure::NoWay,
                AdmitError::NotAdmitted { .. }
                | AdmitError::Version(..)
                | AdmitError::Protocol(_) => Failure::Word,
                AdmitError::Closed(reason) => match (reason.by, reason.code) {
                    (ClosedBy::Peer, _) => Failure::Word,
                    (ClosedBy::Local, _) | (ClosedBy::Network, CloseCode::Dead) => Failure::NoWay,
                    // In TLS 1.3 this is how a client learns that its certificate was not taken.
                    (ClosedBy::Network, _) => Failure::Alert,
                },
            },
        }
    }

    /// Whether it failed over a certificate, this end's or the server's, as far as this end can know: over TCP a middlebox
    /// that answers in the server's place looks the same.
    pub(super) fn is_over_certificates(&self) -> bool {
        self.failure() == Failure::Alert
    }

    /// The word for metrics.
    pub(super) fn result(&self) -> ConnectResult {
        match self {
            Self::Abandoned => ConnectResult::Abandoned,
            Self::Admit {
                source: AdmitError::NotAdmitted { .. },
                ..
            } => ConnectResult::NotAdmitted,
            Self::Resolve(_) | Self::Dial { .. } | Self::Admit { .. } | Self::Broken => {
                match self.failure() {
                    Failure::Silence => ConnectResult::NoAnswer,
                    Failure::NoWay | Failure::Alert | Failure::Word => ConnectResult::Failed,
                }
            }
        }
    }
}

impl Lane {
    /// Runs to the end of the session. Dropped early, everything is cut.
    pub(super) async fn run(mut self) -> Ended {
        let began = Instant::now();
        let retire = self.tether.retire.clone();
        let connected = tokio::select! {
            biased;
            () = retire.cancelled() => Err(ConnectError::Abandoned),
            connected = self.connect() => connected,
        };
        let outcome = match connected {
            Ok((remote, session)) => {
                self.tether.tell(News::Answered).await;
                session::run(session, &self.shared, &self.tether, began)
                    .await
                    .map_err(|source| ConnectError::Admit { remote, source })
            }
            Err(error) => Err(error),
        };
        Ended {
            place: self.place,
            outcome,
        }
    }

    async fn connect(&mut self) -> Result<(Remote, Arc<dyn Session>), ConnectError> {
        let within = self.shared.limits.handshake_timeout;
        let remote = self.remote(within).await?;
        let dialled = timeout(within, self.paths.dialer(self.rung).dial(&remote)).await;
        match dialled.unwrap_or(Err(HandshakeError::Timeout)) {
            Ok(session) => Ok((remote, session)),
            Err(source) => Err(ConnectError::Dial { remote, source }),
        }
    }

    async fn remote(&mut self, within: Duration) -> Result<Remote, ResolveError> {
        let Paths { servers, proxy, .. } = &*self.paths;
        let tcp = self.rung == Rung::H2;
        self.place
            .next(servers, within, |server| tcp && proxy.is_proxied(server))
            .await
    }
}
