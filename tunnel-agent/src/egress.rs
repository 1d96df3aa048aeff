//! Connects streams of the tunnel to local sockets. One task per stream reads the header, checks
//! the dial policy, dials, replies and relays.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;
use tunnel_proto::dial::SystemResolver;
use tunnel_proto::egress::{SocketPeer, TargetSocket, relay_socket};
use tunnel_proto::process::telemetry::{ACCESS, StreamLines, non_empty};
use tunnel_proto::transport::{IncomingStream, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{NodeName, SessionId};

use crate::config::Limit;
use crate::config::Limits;
use crate::loop_detection::LoopDetector;
use crate::metrics::{Metrics, StreamEnd};
use crate::node_ip::SessionNodeIp;
use crate::policy::DialPolicy;

mod dial;
#[cfg(test)]
mod tests;

pub(crate) use dial::{DialContext, dial};

/// Serves the streams of all sessions.
#[derive(Debug)]
pub(crate) struct Egress {
    node: NodeName,
    dial_policy: DialPolicy,
    loop_detector: Arc<LoopDetector>,
    head_timeout: Duration,
    dial_timeout: Duration,
    permits: Semaphore,
    resolver: SystemResolver,
    metrics: Metrics,
    draining: CancellationToken,
}

/// Parameters of one session's streams.
#[derive(Debug)]
pub(crate) struct SessionParams {
    pub(crate) session: SessionId,
    /// Address where targets of class node are dialed.
    pub(crate) node_ip: SessionNodeIp,
    /// Time that the server waits for a dial; zero if the server did not send one.
    pub(crate) dial_timeout: Duration,
}

/// A server can open streams faster than a disk can write lines. The callers behind a session are
/// known to the server alone.
static LINES: StreamLines<SessionId> = StreamLines::new(
    "streams without a header",
    "access log lines of refused streams of a session",
);

/// The end of a stream, for the access log.
struct StreamOutcome {
    end: StreamEnd,
    dialed: String,
    to_target: u64,
    from_target: u64,
    detail: String,
}

impl StreamOutcome {
    fn refused(refusal: Refusal) -> Self {
        Self {
            end: StreamEnd::Refused(refusal.code),
            detail: refusal.detail,
            ..Self::without_bytes(StreamEnd::Ok)
        }
    }

    fn without_bytes(end: StreamEnd) -> Self {
        Self {
            end,
            dialed: String::new(),
            to_target: 0,
            from_target: 0,
            detail: String::new(),
        }
    }
}

impl Egress {
    /// Creates an egress that refuses new streams once `draining` is canceled.
    pub(crate) fn new(
        node: NodeName,
        dial_policy: DialPolicy,
        loop_detector: Arc<LoopDetector>,
        limits: &Limits,
        metrics: Metrics,
        draining: CancellationToken,
    ) -> Self {
        Self {
            node,
            dial_policy,
            loop_detector,
            head_timeout: limits.request_head_timeout,
            dial_timeout: limits.target_dial_timeout,
            permits: Semaphore::new(limits.streams_per_agent as usize),
            resolver: SystemResolver::new(LOOKUPS),
            metrics,
            draining,
        }
    }

    /// Serves one stream to its end. Refuses the stream if memory has no space for another one
    /// (`has_room`). Dropping the future cuts both sides.
    pub(crate) async fn serve(
        &self,
        incoming: IncomingStream,
        has_room: bool,
        params: &SessionParams,
    ) {
        let began = Instant::now();
        let _open = self.metrics.stream();
        let (target, port, trace_parent, outcome) =
            match incoming.header(began + self.head_timeout).await {
                Ok((header, stream)) => {
                    let outcome = self.answer(&header, stream, has_room, params).await;
                    let port = match &header.kind {
                        StreamKind::Target(target) => Some(target.port().get()),
                        StreamKind::Control { .. }
                        | StreamKind::Cloud(_)
                        | StreamKind::Forward { .. }
                        | StreamKind::Enroll => None,
                    };
                    (describe(&header.kind), port, header.trace_parent, outcome)
                }
                Err(error) => {
                    if error.kind() == ErrorKind::TimedOut {
                        self.metrics.limit(Limit::RequestHeadTimeout);
                    }
                    let outcome = StreamOutcome {
                        detail: error.to_string(),
                        ..StreamOutcome::without_bytes(StreamEnd::NoHeader)
                    };
                    ("unknown".to_owned(), None, String::new(), outcome)
                }
            };
        self.metrics.stream_ended(outcome.end);
        let (stage, code) = (outcome.end.stage(), outcome.end.label());
        let Some(form) = LINES.admit(stage, code, params.session) else {
            return;
        };
        info!(
            target: ACCESS,
            node = %self.node,
            session = params.session.0,
            port,
            target,
            dialed = non_empty(&outcome.dialed),
            code,
            error = non_empty(form.of_error(&outcome.detail)),
            trace_parent = non_empty(&trace_parent),
            bytes_in = outcome.to_target,
            bytes_out = outcome.from_target,
            elapsed = began.elapsed().as_secs_f64(),
            "access"
        );
    }

    async fn answer(
        &self,
        header: &StreamHeader,
        stream: Stream,
        has_room: bool,
        params: &SessionParams,
    ) -> StreamOutcome {
        let refusal = match &header.kind {
            StreamKind::Control { .. } => Refusal {
                code: RefusalCode::BadHeader,
                detail: "session already has a control stream".to_owned(),
            },
            StreamKind::Forward { .. } | StreamKind::Enroll => Refusal {
                code: RefusalCode::BadHeader,
                detail: "agents do not accept streams for other servers".to_owned(),
            },
            StreamKind::Cloud(_) => Refusal {
                code: RefusalCode::BadHeader,
                detail: "agents do not accept streams to targets of the cloud".to_owned(),
            },
            StreamKind::Target(_) if self.draining.is_cancelled() => Refusal {
                code: RefusalCode::Draining,
                detail: "agent is stopping".to_owned(),
            },
            StreamKind::Target(_) if !has_room => {
                self.metrics.limit(Limit::BufferPool);
                Refusal {
                    code: RefusalCode::TooManyStreams,
                    detail: "buffer pool is full of data that targets have not read (agent's limits.bufferPool)"
                        .to_owned(),
                }
            }
            StreamKind::Target(target) => match self.permits.try_acquire() {
                Ok(_until_the_end) => return self.connect(target, stream, params).await,
                Err(_none_left) => {
                    self.metrics.limit(Limit::StreamsPerAgent);
                    Refusal {
                        code: RefusalCode::TooManyStreams,
                        detail: "agent's limits.streamsPerAgent is reached".to_owned(),
                    }
                }
            },
        };
        stream.refuse(refusal.code, &refusal.detail).await;
        StreamOutcome::refused(refusal)
    }

    async fn connect(
        &self,
        target: &Target,
        stream: Stream,
        params: &SessionParams,
    ) -> StreamOutcome {
        let limit = if params.dial_timeout.is_zero() {
            self.dial_timeout
        } else {
            self.dial_timeout.min(params.dial_timeout)
        };
        let context = DialContext {
            node_ip: params.node_ip.current(),
            dial_policy: &self.dial_policy,
            resolver: &self.resolver,
            limit,
            metrics: &self.metrics,
        };
        match dial(target, &context).await {
            Ok((tcp, address)) => {
                let open_end = self.loop_detector.dialed(&tcp, address);
                let _open = match open_end {
                    Ok(Some(open_end)) => open_end,
                    Ok(None) => return refuse_dialed(tcp, stream, redirected(address)).await,
                    Err(error) => {
                        let refusal = not_relayed(address, &error);
                        return refuse_dialed(tcp, stream, refusal).await;
                    }
                };
                let socket = TargetSocket::new(tcp, self.metrics.bytes(), SocketPeer::Target);
                let outcome = relay_stream(stream, socket, &address.to_string()).await;
                StreamOutcome {
                    dialed: address.to_string(),
                    ..outcome
                }
            }
            Err(refusal) => {
                if refusal.code == RefusalCode::TargetTimeout {
                    self.metrics.limit(Limit::TargetDialTimeout);
                }
                stream.refuse(refusal.code, &refusal.detail).await;
                StreamOutcome::refused(refusal)
            }
        }
    }
}

/// Returns the refusal of a target whose connections a rule of this host redirects to the agent.
/// Closes a dialed connection and refuses its stream.
async fn refuse_dialed(tcp: TcpStream, stream: Stream, refusal: Refusal) -> StreamOutcome {
    drop(tcp);
    stream.refuse(refusal.code, &refusal.detail).await;
    StreamOutcome::refused(refusal)
}

fn not_relayed(address: SocketAddr, error: &io::Error) -> Refusal {
    Refusal {
        code: RefusalCode::TargetRefused,
        detail: format!("{address}: the connection has no local address: {error}"),
    }
}

fn redirected(address: SocketAddr) -> Refusal {
    Refusal {
        code: RefusalCode::Policy,
        detail: format!(
            "a rule of this host redirects {address} to agent's --cloud-listen; take the address \
             out of --allow-targets"
        ),
    }
}

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 32;

/// Accepts the stream and relays until both sides have ended or one was cut.
async fn relay_stream(mut stream: Stream, socket: TargetSocket, dialed: &str) -> StreamOutcome {
    if let Err(error) = stream.accept(dialed).await {
        return StreamOutcome {
            detail: error.to_string(),
            ..StreamOutcome::without_bytes(StreamEnd::CutByPeer)
        };
    }
    let relayed = relay_socket(stream, socket).await;
    StreamOutcome {
        end: StreamEnd::of_relay(relayed.end, StreamEnd::CutByTarget),
        dialed: String::new(),
        to_target: relayed.from_tunnel,
        from_target: relayed.to_tunnel,
        detail: relayed.detail,
    }
}

fn describe(kind: &StreamKind) -> String {
    match kind {
        StreamKind::Control { .. } => "control".to_owned(),
        StreamKind::Target(target) => target.to_string(),
        StreamKind::Cloud(name) => format!("cloud:{name}"),
        StreamKind::Forward { .. } => "forward".to_owned(),
        StreamKind::Enroll => "enroll".to_owned(),
    }
}
