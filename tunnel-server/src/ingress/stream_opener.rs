//! Streams to nodes for one request. An agent that is draining has not started anything, so the
//! server tries another session of the node once.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use super::access_log::AccessLog;
use super::context::IngressContext;
use super::error::ProxyError;
use super::outcome::Outcome;
use crate::routing::destination::Destination;
use crate::routing::registry::{CallerKey, Opened, Registry};
use crate::routing::via::Via;

/// Opens the streams of one request.
#[derive(Debug)]
pub(super) struct StreamOpener<'a> {
    registry: &'a Registry,
    limit: Duration,
    destination: &'a Destination,
    caller: &'a CallerKey,
    header: StreamHeader,
    /// The refusal of a draining agent, and what carried the stream that the agent refused.
    refused: Option<(ProxyError, Via)>,
}

impl<'a> StreamOpener<'a> {
    /// Prepares streams of `caller` to a destination. `trace_parent` is the trace context for the
    /// agent's access log.
    pub(super) fn new(
        ingress: &'a IngressContext,
        destination: &'a Destination,
        caller: &'a CallerKey,
        trace_parent: String,
    ) -> Self {
        Self {
            registry: &ingress.registry,
            limit: ingress.limits.open,
            destination,
            caller,
            header: StreamHeader {
                kind: StreamKind::Target(destination.target.clone()),
                trace_parent,
            },
            refused: None,
        }
    }

    /// Opens a stream. Does not wait for the agent's reply.
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(super) async fn open(&self, access_log: &mut AccessLog) -> Result<Opened, ProxyError> {
        let except = self.refused.as_ref().map(|(_, via)| via);
        let (node, began) = (&self.destination.node, Instant::now());
        let opened = self
            .registry
            .open(node, &self.header, self.caller, self.limit, except);
        match (opened.await, &self.refused) {
            (Ok(opened), _) => {
                access_log.opened(&opened, began.elapsed());
                Ok(opened)
            }
            // No other session can carry the stream, so the caller receives the refusal.
            (Err(_), Some((refusal, _))) => Err(refusal.clone()),
            (Err(error), None) => {
                let target_label = self.destination.to_string();
                Err(ProxyError::from_open(&error, &target_label))
            }
        }
    }

    /// Prepares another attempt after a failure of a stream.
    ///
    /// # Errors
    /// Returns the failure unless it is the first refusal of a draining agent.
    pub(super) fn retry_on_other_session(
        &mut self,
        failure: ProxyError,
        via: Via,
    ) -> Result<(), ProxyError> {
        if failure.outcome != Outcome::Draining || self.refused.is_some() {
            return Err(failure);
        }
        self.refused = Some((failure, via));
        Ok(())
    }
}
