//! Routing: the node that a request is for, the sessions of connected agents, the other servers, and
//! the addresses that the server may dial without an agent.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::NodeName;

use self::attempts::{AttemptEnd, Attempts, NextAttempt, ResendCause};
use self::forwarded::ForwardedCount;
use self::peers::{PeerState, Peers};
use self::registry::{
    CallerKey, IdleStream, NotOpened, OpenError, Opened, PERMIT_WAIT, Registry, StreamRequest,
};
use self::via::Via;

pub mod access_review;
pub mod attempts;
pub(crate) mod clock;
mod current_routes;
pub mod forwarded;
pub mod peers;
pub mod pod_lookup;
pub mod registry;
pub mod via;

/// The table of routes, and the one in use.
pub mod routes {
    pub use tunnel_routing::routes::*;

    pub use super::current_routes::Routes;
}

/// Opens streams to nodes, over a session of this server or over another server that has one.
#[derive(Debug, Clone)]
pub struct Routing {
    registry: Arc<Registry>,
    peers: Arc<Peers>,
}

/// A stream of one attempt.
#[derive(Debug)]
pub struct OpenStream {
    /// The stream. Dropping it releases its permit.
    pub stream: Stream,
    /// What carries the stream.
    pub via: Via,
    /// Time that opening the stream took.
    pub elapsed: Duration,
    /// Why the request is sent a second time, if it is.
    pub resent: Option<ResendCause>,
}

/// What a request does with its stream.
pub trait Attempt: Send {
    type Output: Send;
    type Error: Send;

    /// Uses the stream of one attempt.
    fn run(
        &mut self,
        stream: OpenStream,
    ) -> impl Future<Output = Result<Self::Output, FailedAttempt<Self::Error>>> + Send;

    /// Returns the error of a request without a stream.
    fn not_opened(&self, error: OpenError) -> Self::Error;
}

/// A stream that did not serve its request.
#[derive(Debug)]
pub struct FailedAttempt<E> {
    pub end: AttemptEnd<'static>,
    pub error: E,
}

/// A request that is complete with its stream.
struct OpenAlone;

impl Attempt for OpenAlone {
    type Output = OpenStream;
    type Error = OpenError;

    async fn run(&mut self, stream: OpenStream) -> Result<OpenStream, FailedAttempt<OpenError>> {
        Ok(stream)
    }

    fn not_opened(&self, error: OpenError) -> OpenError {
        error
    }
}

impl Routing {
    pub fn new(registry: Arc<Registry>, peers: Arc<Peers>) -> Self {
        Self { registry, peers }
    }

    /// Opens a stream and runs `attempt` over it, as often as [`Attempts`] permits. A stream uses the
    /// active session of this server or, if there is none that takes the stream, the first other
    /// server that holds the node. `failed` is the failure of an attempt that is over.
    ///
    /// Cancel-safe as far as `attempt` is: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns the failure of the last stream, also if no further one could be opened.
    pub async fn with_stream<A: Attempt>(
        &self,
        request: &StreamRequest<'_>,
        attempt: &mut A,
        mut attempts: Attempts,
        failed: Option<A::Error>,
    ) -> Result<A::Output, A::Error> {
        let (mut is_sent, mut last) = (failed.is_some(), failed);
        let mut began = Instant::now();
        loop {
            let mut opened = match self.open_once(request, attempts.except(), began).await {
                Ok(opened) => opened,
                Err(NotOpened { via, error }) => {
                    let next = attempts.next(via.as_ref(), &AttemptEnd::NotOpened(&error));
                    // What was sent, or asked, says more than that nothing is left to ask.
                    let is_nothing_left = via.is_none()
                        && matches!(
                            error,
                            OpenError::NoAgent | OpenError::Draining | OpenError::Suspect(_)
                        );
                    let error = match last {
                        Some(before) if is_sent || is_nothing_left => before,
                        Some(_) | None => attempt.not_opened(error),
                    };
                    if next == NextAttempt::GiveUp {
                        return Err(error);
                    }
                    last = Some(error);
                    continue;
                }
            };
            let (via, forwarded) = (opened.via.clone(), opened.forwarded.take());
            let stream = OpenStream {
                stream: opened.stream,
                via: opened.via,
                elapsed: began.elapsed(),
                resent: attempts.resent(),
            };
            let FailedAttempt { end, error } = match attempt.run(stream).await {
                Ok(done) => return Ok(done),
                Err(failed) => failed,
            };
            if let AttemptEnd::Refused {
                code: RefusalCode::NotHere,
                ..
            } = end
            {
                self.not_here(request.node, &via, forwarded);
            }
            let has_next = match attempts.next(Some(&via), &end) {
                NextAttempt::Move | NextAttempt::Repeat => true,
                NextAttempt::RepeatIfEvicted => self.evict_idle(request.node, &via).await,
                NextAttempt::GiveUp => false,
            };
            if !has_next {
                return Err(error);
            }
            (is_sent, last) = (true, Some(error));
            began = Instant::now();
        }
    }

    /// Opens a stream to the target of a node.
    ///
    /// Cancel-safe: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns an [`OpenError`] if no stream could be opened.
    pub async fn open(&self, request: &StreamRequest<'_>) -> Result<OpenStream, OpenError> {
        let mut attempt = OpenAlone;
        let opened = self.with_stream(request, &mut attempt, Attempts::default(), None);
        opened.await
    }

    /// Opens one stream. A stream that another server forwards takes no further hop.
    async fn open_once(
        &self,
        request: &StreamRequest<'_>,
        except: &[Via],
        began: Instant,
    ) -> Result<Opened, NotOpened> {
        let unavailable = match self.registry.open(request, except).await {
            Err(
                unavailable @ NotOpened {
                    via: None,
                    error: OpenError::NoAgent | OpenError::Suspect(_) | OpenError::Draining,
                },
            ) if !request.caller_key.is_replica() => unavailable,
            outcome => return outcome,
        };
        let StreamKind::Target(target) = &request.header.kind else {
            return Err(unavailable);
        };
        let header = StreamHeader {
            kind: StreamKind::Forward {
                node: request.node.clone(),
                target: target.clone(),
                is_verified: request.caller_key.is_verified(),
            },
            ..request.header.clone()
        };
        let left = request.limit.saturating_sub(began.elapsed());
        match Box::pin(self.peers.open(request, &header, except, left)).await {
            Err(NotOpened {
                error: OpenError::NoAgent,
                ..
            }) => Err(unavailable),
            outcome => outcome,
        }
    }

    /// Returns whether any server has a session with the agent of a node.
    pub fn is_held(&self, node: &NodeName) -> bool {
        self.registry.has(node) || self.peers.holds(node)
    }

    /// Returns whether this server has connected to all other servers that it knows, of which there is
    /// at least one.
    pub fn is_connected_to_others(&self) -> bool {
        let others = self.peers.expected();
        others > 0 && self.peers.connected() == others
    }

    /// Returns whether another server stops.
    pub fn is_other_leaving(&self) -> bool {
        let others = self.peers.status();
        others.iter().any(|other| other.state == PeerState::Leaving)
    }

    /// Returns a receiver that is notified whenever the result of [`Routing::is_held`] may have
    /// changed for a node.
    pub fn held_changed(&self) -> HeldReceiver {
        HeldReceiver {
            local: self.registry.changed(),
            others: self.peers.held_changed(),
        }
    }

    /// Returns what a new stream to a node tries first.
    pub fn active(&self, node: &NodeName) -> Option<Via> {
        let local = self.registry.active(node);
        local.or_else(|| self.peers.preferred(node).map(Via::Replica))
    }

    /// Returns whether the session that carries a stream is suspect or has ended. For a stream over
    /// another server it is the connection to that server, which alone knows the session.
    pub fn is_suspect(&self, node: &NodeName, via: &Via) -> bool {
        match via {
            Via::Local(session) => {
                let carrier = self.registry.session(node, *session);
                carrier.is_none_or(|agent| agent.suspect_reason().is_some())
            }
            Via::Replica(replica) => self.peers.is_suspect(replica),
        }
    }

    /// Waits until what carries a stream is suspect, see [`Routing::is_suspect`], and another session
    /// or server takes new streams. Never ends once the carrier has ended: the stream reports that.
    ///
    /// Cancel-safe.
    pub async fn replaceable(&self, node: &NodeName, via: &Via) {
        loop {
            match via {
                Via::Local(session) => match self.registry.session(node, *session) {
                    Some(carrier) => carrier.suspected().await,
                    None => return pending().await,
                },
                Via::Replica(replica) => self.peers.suspected(replica).await,
            }
            if self.active(node).is_some_and(|active| active != *via) {
                return;
            }
            sleep(REPLACEMENT_INTERVAL).await;
        }
    }

    /// Returns whether an idle stream over `via` can be kept for another request, see
    /// [`Registry::can_reuse`].
    pub fn can_reuse(&self, node: &NodeName, via: &Via) -> bool {
        match via {
            Via::Local(session) => self.registry.can_reuse(node, *session),
            Via::Replica(replica) => {
                self.peers.has_spare(replica)
                    && self.active(node).as_ref() == Some(via)
                    && self
                        .registry
                        .can_keep_idle(node, via, self.peers.expected())
            }
        }
    }

    /// Adds an idle stream, see [`Registry::keep_idle`].
    pub fn keep_idle(&self, node: &NodeName, via: &Via, caller_key: &CallerKey) -> IdleStream {
        self.registry.keep_idle(node, via, caller_key)
    }

    /// Evicts an idle stream, so that the server or the agent which refused a stream over `via` has a
    /// permit for another one. Returns whether there was one. A server waits for the permit itself; an
    /// agent does not, so this method gives it the time.
    async fn evict_idle(&self, node: &NodeName, via: &Via) -> bool {
        let is_evicted = self.registry.evict_idle(node, via);
        if is_evicted && matches!(via, Via::Local(_)) {
            sleep(PERMIT_WAIT).await;
        }
        is_evicted
    }

    /// Records that the server which carried a stream has no session with the node. `forwarded` is
    /// [`Opened::forwarded`] of the stream.
    fn not_here(&self, node: &NodeName, via: &Via, forwarded: Option<ForwardedCount>) {
        if let (Via::Replica(replica), Some(forwarded)) = (via, forwarded) {
            let announcement = forwarded.refused_not_here();
            self.peers.not_here(node, replica, announcement);
        }
    }
}

/// Interval at which a request over a suspect session looks for another session. A session that is
/// live again causes no notification.
const REPLACEMENT_INTERVAL: Duration = Duration::from_millis(100);

/// A receiver of the changes of the nodes that any server holds.
#[derive(Debug)]
pub struct HeldReceiver {
    local: watch::Receiver<u64>,
    others: watch::Receiver<u64>,
}

impl HeldReceiver {
    /// Waits for a change. Returns `false` if the sender of the changes is gone.
    ///
    /// Cancel-safe.
    pub async fn changed(&mut self) -> bool {
        let changed = tokio::select! {
            changed = self.local.changed() => changed,
            changed = self.others.changed() => changed,
        };
        changed.is_ok()
    }
}
