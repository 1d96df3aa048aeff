//! Streams that another server has opened: forwarded ones are served by the sessions of this server,
//! and enrollments from this server's own join tokens.

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tracing::debug;
use tunnel_process::telemetry::{LineForm, SourceBudget, StreamStage, admits_access};
use tunnel_proto::open_record::{OpenRecord, RecordSinks};
use tunnel_proto::stream_record::{RecordedPeer, StreamEnd, StreamRecord};
use tunnel_proto::stream_server::{Dialed, DialedTarget, Refused, StreamServer, serve_with_header};
use tunnel_proto::transport::{IncomingStream, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind};
use tunnel_proto::wire::name::{NodeName, ReplicaId};

use super::endpoint::PeerEndpoint;
use super::{ForwardDirection, ForwardResult};
use crate::routing::Routing;
use crate::routing::registry::{CallerKey, OpenError, StreamRequest};

/// A stream of another server.
pub(super) struct PeerStream<'a> {
    pub(super) endpoint: &'a PeerEndpoint,
    /// The other server.
    pub(super) replica: ReplicaId,
    /// The stream is within the limit of the connection.
    pub(super) has_permit: bool,
    /// There is memory for what the stream may send.
    pub(super) has_room: bool,
}

impl PeerStream<'_> {
    /// Serves the stream to its end. Nothing is recorded of an enrollment, nor if the other server
    /// ended the stream before its header.
    pub(super) async fn serve(self, incoming: IncomingStream, enrollments: &Semaphore) {
        let began = Instant::now();
        match incoming
            .header(began + self.endpoint.handshake_timeout)
            .await
        {
            Ok((header, stream)) if header.kind == StreamKind::Enroll && self.has_permit => {
                let (endpoint, replica) = (self.endpoint, self.replica);
                Box::pin(serve_enrollment(endpoint, stream, replica, enrollments)).await;
            }
            Ok((header, stream)) => {
                serve_with_header(header, stream, OpenRecord::start(began, self)).await;
            }
            Err(error) => debug!(%error, "stream of another server has no header"),
        }
    }
}

/// The stream to the agent that a forwarded stream asks for.
pub(super) struct ForwardRequest {
    node: NodeName,
    header: StreamHeader,
    caller_key: CallerKey,
}

impl StreamServer for PeerStream<'_> {
    type Admitted = ForwardRequest;
    type Guard = ();

    fn admit(&self, header: &StreamHeader, _stream: &Stream) -> Result<ForwardRequest, Refused> {
        if !self.has_permit {
            let detail = "too many streams between two servers (limits.peerStreams)";
            return Err(refused(RefusalCode::TooManyStreams, detail));
        }
        let StreamKind::Forward {
            node,
            target,
            is_verified,
        } = &header.kind
        else {
            let detail =
                "this server accepts only forwarded streams and enrollments of other servers";
            return Err(refused(RefusalCode::BadHeader, detail));
        };
        if let Err(error) = self.endpoint.policy.check(node, target) {
            let own = self.endpoint.peers.own();
            let detail = format!("server {own} does not allow the target: {error}");
            return Err(refused(RefusalCode::Policy, &detail));
        }
        if !self.has_room {
            let detail = "buffer pool of the agent's server is full (limits.bufferPool)";
            return Err(refused(RefusalCode::TooManyStreams, detail));
        }
        Ok(ForwardRequest {
            node: node.clone(),
            header: StreamHeader {
                kind: StreamKind::Target(target.clone()),
                ..header.clone()
            },
            caller_key: CallerKey::Replica {
                replica: self.replica.clone(),
                is_verified: *is_verified,
            },
        })
    }

    async fn dial(&self, request: &ForwardRequest) -> Result<Dialed<()>, Refused> {
        let endpoint = self.endpoint;
        let routing = Routing::new(endpoint.registry.clone(), endpoint.peers.clone());
        let request = StreamRequest {
            node: &request.node,
            header: request.header.clone(),
            caller_key: &request.caller_key,
            limit: endpoint.open_timeout,
        };
        let opened = routing.open(&request).await;
        let opened = opened.map_err(|error| refused(refusal_code(&error), &error.to_string()))?;
        Ok(Dialed {
            target: DialedTarget::Stream(opened.stream),
            address: String::new(),
            guard: (),
        })
    }
}

/// Another server can forward streams that are refused faster than a disk accepts lines.
static REFUSED_LINES: SourceBudget<ReplicaId> =
    SourceBudget::new("access log lines of refused streams of another server");

impl RecordSinks for PeerStream<'_> {
    const DROPPED: StreamEnd = StreamEnd::ServerStopping;
    const REPORTER: &'static str = "server";

    fn describe(&self, record: &mut StreamRecord) {
        record.listener = Some("peers");
        record.peer = Some(RecordedPeer::Server(self.replica.clone()));
    }

    fn has_reached_target(&self, record: &StreamRecord) -> bool {
        record.end.has_reached_target()
    }

    fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
        // A refusal of the agent has passed through, as bytes of a stream that was forwarded.
        let forwarded = match record.end {
            StreamEnd::Refused(_) if record.bytes_in > 0 => ForwardResult::Ok,
            end => result(end),
        };
        let peers = &self.endpoint.peers;
        peers.count(ForwardDirection::In, forwarded);
        (self.endpoint.on_stream)(record);
        let stage = record.end.stage();
        if !admits_access(stage != StreamStage::Opened { is_ok: true }) {
            return None;
        }
        match stage {
            // A stream without a header has no record.
            StreamStage::Refused | StreamStage::Unknown => {
                REFUSED_LINES.admit(self.replica.clone(), record.end.label())
            }
            StreamStage::Opened { .. } => Some(LineForm::Full),
        }
    }
}

fn refused(code: RefusalCode, detail: &str) -> Refused {
    let detail = detail.to_owned();
    Refusal { code, detail }.into()
}

/// Returns the result of a forwarded stream that ended like this.
fn result(end: StreamEnd) -> ForwardResult {
    match end {
        StreamEnd::Ok | StreamEnd::ReaderClosed => ForwardResult::Ok,
        StreamEnd::CutByPeer
        | StreamEnd::CutByTarget
        | StreamEnd::CutByCaller
        | StreamEnd::OpenerGone
        | StreamEnd::AgentStopping
        | StreamEnd::ServerStopping
        | StreamEnd::ReaderStalled => ForwardResult::Cut,
        StreamEnd::Refused(RefusalCode::NotHere) => ForwardResult::NotHere,
        StreamEnd::Refused(RefusalCode::TooManyStreams) => ForwardResult::TooManyStreams,
        StreamEnd::NoSession | StreamEnd::NoReply | StreamEnd::NoHeader | StreamEnd::Refused(_) => {
            ForwardResult::Failed
        }
    }
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

/// Returns the code of the refusal for a stream that was not opened. Each code becomes the answer
/// that a caller of this server gets for the same error. While nothing was sent to an agent, the
/// other server tries the next holder. With `not_here` it also forgets that this server holds the
/// node, and a session that answers again is not announced again if it was silent for a moment only.
fn refusal_code(error: &OpenError) -> RefusalCode {
    match error {
        OpenError::NoAgent => RefusalCode::NotHere,
        OpenError::Suspect(_) => RefusalCode::AgentSuspect,
        OpenError::Draining => RefusalCode::Draining,
        OpenError::Lost(_) => RefusalCode::AgentLost,
        OpenError::TooManyStreams(_) | OpenError::PeerStreams(_) | OpenError::BufferPoolFull(_) => {
            RefusalCode::TooManyStreams
        }
        OpenError::Timeout => RefusalCode::AgentTimeout,
    }
}
