//! The stream of one request, with another attempt where nothing has been sent to an agent, or where
//! the session was lost.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::transport::source_number;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use crate::ingress::access_log::AccessLog;
use crate::ingress::context::IngressContext;
use crate::ingress::error::ProxyError;
use crate::routing::Routing;
use crate::routing::destination::Destination;
use crate::routing::forwarded::ForwardedStream;
use crate::routing::registry::{CallerKey, Opened};
use crate::routing::via::Via;

/// Opens the stream of one request.
#[derive(Debug)]
pub(in crate::ingress) struct StreamOpener<'a> {
    routing: &'a Routing,
    limit: Duration,
    destination: &'a Destination,
    caller: &'a CallerKey,
    header: StreamHeader,
    /// The refusal of a draining agent, or of a server that cannot reach the agent, or the loss of a
    /// session, and what carried the stream.
    failed: Option<(ProxyError, Via)>,
    /// The request was sent over a session that was lost.
    is_resending: bool,
    /// An idle stream was evicted for this one.
    has_evicted: bool,
}

impl<'a> StreamOpener<'a> {
    /// Prepares streams of `caller` to a destination. `trace_parent` is the trace context for the
    /// agent's access log.
    pub(in crate::ingress) fn new(
        ingress: &'a IngressContext,
        destination: &'a Destination,
        caller: &'a CallerKey,
        trace_parent: String,
    ) -> Self {
        Self {
            routing: &ingress.routing,
            limit: ingress.limits.open,
            destination,
            caller,
            header: StreamHeader {
                kind: StreamKind::Target(destination.target.clone()),
                trace_parent,
                source: source_number(caller),
            },
            failed: None,
            is_resending: false,
            has_evicted: false,
        }
    }

    /// Opens a stream. Does not wait for the agent's reply.
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(in crate::ingress) async fn open(
        &self,
        access_log: &mut AccessLog,
    ) -> Result<Opened, ProxyError> {
        let except = self.failed.as_ref().map(|(_, via)| via);
        let (node, began) = (&self.destination.node, Instant::now());
        let opened = self
            .routing
            .open(node, &self.header, self.caller, self.limit, except);
        match (opened.await, &self.failed) {
            (Ok(opened), _) => {
                access_log.opened(&opened, began.elapsed());
                if self.is_resending {
                    access_log.retried();
                }
                Ok(opened)
            }
            // No other session can carry the stream, so the caller receives the first failure.
            (Err(_), Some((failure, _))) => Err(failure.clone()),
            (Err(error), None) => Err(ProxyError::from_open(&error, self.destination)),
        }
    }

    /// Prepares another attempt after a failure of a stream that `via` carried.
    ///
    /// # Errors
    /// Returns the failure unless it is the first refusal of a draining agent, or of a server that
    /// cannot reach the agent, or an idle stream over a server without a permit was evicted.
    pub(in crate::ingress) fn retry_on_other_session(
        &mut self,
        failure: ProxyError,
        via: Via,
        forwarded: Option<ForwardedStream>,
    ) -> Result<(), ProxyError> {
        let node = &self.destination.node;
        if failure.refusal == Some(RefusalCode::NotHere) {
            self.routing.not_here(node, &via, forwarded);
        }
        let is_full = failure.refusal == Some(RefusalCode::TooManyStreams);
        if is_full && !self.has_evicted && self.routing.evict_idle(node, &via) {
            self.has_evicted = true;
            return Ok(());
        }
        if !failure.refusal.is_some_and(is_retryable) || self.failed.is_some() {
            return Err(failure);
        }
        self.failed = Some((failure, via));
        Ok(())
    }

    /// Prepares another attempt for a request that was sent over a session which was lost. The caller
    /// receives `failure` if there is no other session.
    pub(super) fn resend_on_other_session(&mut self, failure: ProxyError, via: Via) {
        self.failed = Some((failure, via));
        self.is_resending = true;
    }
}

/// Returns whether another session or server may take a stream that was refused with `code`: nothing
/// was sent to an agent, or the agent is draining.
fn is_retryable(code: RefusalCode) -> bool {
    match code {
        RefusalCode::Draining
        | RefusalCode::NotHere
        | RefusalCode::AgentSuspect
        | RefusalCode::AgentLost => true,
        RefusalCode::BadHeader
        | RefusalCode::Policy
        | RefusalCode::TargetRefused
        | RefusalCode::TargetTimeout
        | RefusalCode::TooManyStreams
        | RefusalCode::UnknownTarget
        | RefusalCode::Internal
        | RefusalCode::AgentTimeout
        | RefusalCode::Unknown(_) => false,
    }
}
