//! Holds a session: resolves and dials servers in turn, runs the session, and tries again as the plan says.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::{error, warn};
use tunnel_proto::process::meta::ReadinessBlock;
use tunnel_proto::transport::{Dialer, HandshakeError, Session};
use tunnel_proto::wire::code::CloseCode;

use crate::config::ServerAddress;
use crate::metrics::ConnectResult;
use crate::session::{self, AdmitError, Held, Shared};

pub(crate) mod endpoint;
pub(crate) mod plan;

use endpoint::{Endpoints, ResolveError};
use plan::{Event, Plan};

/// Connects this agent to its servers.
pub(crate) struct Connector {
    pub(crate) servers: Vec<ServerAddress>,
    pub(crate) dialer: Arc<dyn Dialer>,
    pub(crate) shared: Shared,
}

/// Why an attempt did not give a ready session.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error("{address}")]
    Dial {
        address: SocketAddr,
        #[source]
        source: HandshakeError,
    },
    #[error("{address}")]
    Admit {
        address: SocketAddr,
        #[source]
        source: AdmitError,
    },
}

impl ConnectError {
    fn code(&self) -> Option<CloseCode> {
        match self {
            Self::Resolve(_) | Self::Dial { .. } => None,
            Self::Admit { source, .. } => source.code(),
        }
    }

    fn result(&self) -> ConnectResult {
        match self {
            Self::Resolve(_) | Self::Dial { .. } => ConnectResult::Failed,
            Self::Admit { source, .. } => match source {
                AdmitError::NotAdmitted { .. } => ConnectResult::NotAdmitted,
                AdmitError::Closed(_)
                | AdmitError::Timeout
                | AdmitError::Version(..)
                | AdmitError::Protocol(_)
                | AdmitError::Control(_) => ConnectResult::Failed,
            },
        }
    }
}

impl Connector {
    /// Runs until a drain is over; `waiting` is the block that a ready session lifts. Dropped early, the session is cut.
    pub(crate) async fn run(&self, mut waiting: Option<ReadinessBlock>) {
        let drain = self.shared.shutdown.drain();
        let mut plan = Plan::new();
        let mut endpoints = Endpoints::default();
        loop {
            let Some(outcome) = self.attempt(&mut endpoints, &mut waiting).await else {
                return;
            };
            if waiting.is_none() {
                waiting = Some(self.shared.readiness.block(SESSION));
            }
            let now = Instant::now();
            let retry_in = match outcome {
                Ok(held) => {
                    let code = held.reason.code;
                    let ready_for = held.ready_for;
                    let retry_in = plan.next(Event::Lost { ready_for, code }, now, rand::random());
                    self.say_lost(&held, retry_in);
                    retry_in
                }
                Err(error) => {
                    if !matches!(error, ConnectError::Resolve(_)) {
                        endpoints.failed();
                    }
                    self.shared.metrics.connect_attempt(error.result());
                    let retry_in = plan.next(Event::Failed(error.code()), now, rand::random());
                    self.say_failed(&error, retry_in);
                    retry_in
                }
            };
            tokio::select! {
                biased;
                () = drain.cancelled() => return,
                () = tokio::time::sleep(retry_in) => {}
            }
        }
    }

    /// One attempt and, when it succeeds, its session to the end; `None` when a drain has begun by then.
    async fn attempt(
        &self,
        endpoints: &mut Endpoints,
        waiting: &mut Option<ReadinessBlock>,
    ) -> Option<Result<Held, ConnectError>> {
        let began = Instant::now();
        let drain = self.shared.shutdown.drain();
        let connected = tokio::select! {
            biased;
            () = drain.cancelled() => return None,
            connected = self.connect(endpoints) => connected,
        };
        let outcome = match connected {
            Ok((address, session)) => session::run(session, &self.shared, began, waiting)
                .await
                .map_err(|source| ConnectError::Admit { address, source }),
            Err(error) => Err(error),
        };
        (!drain.is_cancelled()).then_some(outcome)
    }

    async fn connect(
        &self,
        endpoints: &mut Endpoints,
    ) -> Result<(SocketAddr, Arc<dyn Session>), ConnectError> {
        let within = self.shared.limits.handshake_timeout;
        let (_, address) = endpoints.next(&self.servers, within).await?;
        let dialled = timeout(within, self.dialer.dial(address)).await;
        match dialled.unwrap_or(Err(HandshakeError::Timeout)) {
            Ok(session) => Ok((address, session)),
            Err(source) => Err(ConnectError::Dial { address, source }),
        }
    }

    fn say_lost(&self, held: &Held, retry_in: Duration) {
        warn!(
            agent = %self.shared.node,
            transport = %self.dialer.transport(),
            code = %held.reason.code,
            error = %held.reason,
            ready_for = ?held.ready_for,
            ?retry_in,
            "session ended"
        );
    }

    fn say_failed(&self, failure: &ConnectError, retry_in: Duration) {
        let agent = &self.shared.node;
        let transport = self.dialer.transport();
        let error = causes(failure);
        match failure.code() {
            Some(code) if !code.is_retryable() => {
                error!(%agent, %transport, %code, error, ?retry_in, "server refuses this agent; somebody has to act");
            }
            Some(code) => {
                warn!(%agent, %transport, %code, error, ?retry_in, "cannot hold a session")
            }
            None => warn!(%agent, %transport, error, ?retry_in, "cannot connect"),
        }
    }
}

/// An error with its causes in one line.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// The readiness block that a ready session lifts.
pub(crate) const SESSION: &str = "session";
