//! Streams that another server has opened: forwarded ones are served from the registry alone, and
//! enrollments from this server's own join tokens.

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::debug;
use tunnel_proto::forward::forward;
use tunnel_proto::relay::{Cut, RelayEnd, RelaySide};
use tunnel_proto::transport::{IncomingStream, Stream, StreamCut, find_cause};
use tunnel_proto::wire::code::{RefusalCode, ResetCode};
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::ReplicaId;

use super::ForwardResult;
use super::endpoint::PeerEndpoint;
use crate::routing::Routing;
use crate::routing::registry::{CallerKey, OpenError, StreamRequest};

/// Relays a forwarded stream to the node's agent, if a session of the node is connected to this
/// server. Returns the result, or `None` for an enrollment and if the other server ended the stream
/// before its header.
pub(super) async fn serve_stream(
    endpoint: &PeerEndpoint,
    incoming: IncomingStream,
    replica: ReplicaId,
    enrollments: &Semaphore,
) -> Option<ForwardResult> {
    let deadline = Instant::now() + endpoint.handshake_timeout;
    let (header, mut stream) = match incoming.header(deadline).await {
        Ok(header_and_stream) => header_and_stream,
        Err(error) => {
            debug!(%error, "stream of another server has no header");
            return None;
        }
    };
    if header.kind == StreamKind::Enroll {
        Box::pin(serve_enrollment(endpoint, stream, replica, enrollments)).await;
        return None;
    }
    let StreamKind::Forward {
        node,
        target,
        is_verified,
    } = header.kind
    else {
        let detail = "this server accepts only forwarded streams and enrollments of other servers";
        stream.refuse(RefusalCode::BadHeader, detail).await;
        return Some(ForwardResult::Failed);
    };
    if let Err(error) = endpoint.policy.check(&node, &target) {
        debug!(%node, %target, %error, "forwarded stream refused");
        let detail = format!(
            "server {} does not allow the target: {error}",
            endpoint.peers.own()
        );
        stream.refuse(RefusalCode::Policy, &detail).await;
        return Some(ForwardResult::Failed);
    }
    let header = StreamHeader {
        kind: StreamKind::Target(target),
        trace_parent: header.trace_parent,
        source: header.source,
    };
    let caller = CallerKey::Replica {
        replica,
        is_verified,
    };
    let routing = Routing::new(endpoint.registry.clone(), endpoint.peers.clone());
    let request = StreamRequest {
        node: &node,
        header,
        caller: &caller,
        limit: endpoint.open_timeout,
    };
    let mut opened = match routing.open(&request).await {
        Ok(opened) => opened,
        Err(error) => {
            debug!(%node, %error, "cannot open a forwarded stream");
            let (code, result) = refusal(&error);
            stream.refuse(code, &error.to_string()).await;
            return Some(result);
        }
    };
    let outcome = forward(&mut stream, &mut opened.stream).await;
    Some(match outcome.end {
        RelayEnd::Clean | RelayEnd::ReaderClosed(_) => ForwardResult::Ok,
        RelayEnd::Cut(side, Cut { error, .. }) => {
            debug!(%node, ?side, %error, "forwarded stream was cut");
            let is_lost = find_cause::<StreamCut>(&error) == Some(&StreamCut::SessionLost);
            let code = if find_cause(&error).is_some_and(StreamCut::is_reader_stalled) {
                ResetCode::ReaderStalled
            } else if is_lost && side == RelaySide::Right {
                // The caller gets the same answer as from this server.
                ResetCode::SessionLost
            } else {
                ResetCode::PeerCut
            };
            // Also behind a half that was shut down, which a drop would just not read.
            stream.reset(code);
            opened.stream.reset(code);
            ForwardResult::Cut
        }
    })
}

/// Serves the enrollment of an agent that dialed another server.
async fn serve_enrollment(
    endpoint: &PeerEndpoint,
    mut stream: Stream,
    replica: ReplicaId,
    enrollments: &Semaphore,
) {
    let Some(on_enroll) = &endpoint.on_enroll else {
        let detail = "this server issues no certificates for other servers";
        return stream.refuse(RefusalCode::BadHeader, detail).await;
    };
    let Ok(_permit) = enrollments.try_acquire() else {
        let detail = "too many enrollments between two servers";
        return stream.refuse(RefusalCode::TooManyStreams, detail).await;
    };
    if let Err(error) = stream.accept("").await {
        return debug!(%error, "forwarded enrollment ended before it was accepted");
    }
    let serving = on_enroll(stream, replica);
    if timeout(endpoint.handshake_timeout, serving).await.is_err() {
        debug!("forwarded enrollment did not finish in time");
    }
}

pub(super) async fn refuse_above_limit(
    endpoint: &PeerEndpoint,
    incoming: IncomingStream,
) -> Option<ForwardResult> {
    let deadline = Instant::now() + endpoint.handshake_timeout;
    let (_, stream) = incoming.header(deadline).await.ok()?;
    let detail = "too many streams between two servers (limits.peerStreams)";
    stream.refuse(RefusalCode::TooManyStreams, detail).await;
    Some(ForwardResult::TooManyStreams)
}

/// Returns the code of the refusal for a stream that was not opened. Each code becomes the answer
/// that a caller of this server gets for the same error. While nothing was sent to an agent, the
/// other server tries the next holder. With `not_here` it also forgets that this server holds the
/// node, and a session that answers again is not announced again if it was silent for a moment only.
fn refusal(error: &OpenError) -> (RefusalCode, ForwardResult) {
    match error {
        OpenError::NoAgent => (RefusalCode::NotHere, ForwardResult::NotHere),
        OpenError::Suspect(_) => (RefusalCode::AgentSuspect, ForwardResult::Failed),
        OpenError::Draining => (RefusalCode::Draining, ForwardResult::Failed),
        OpenError::Lost(_) => (RefusalCode::AgentLost, ForwardResult::Failed),
        OpenError::TooManyStreams(_) | OpenError::PeerStreams(_) | OpenError::BufferPoolFull(_) => {
            (RefusalCode::TooManyStreams, ForwardResult::TooManyStreams)
        }
        OpenError::Timeout => (RefusalCode::AgentTimeout, ForwardResult::Failed),
    }
}
