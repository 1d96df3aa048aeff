//! Connects streams of the tunnel to local sockets, by the dial policy.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;
use tunnel_process::followed::Followed;
use tunnel_process::telemetry::{LineForm, StreamLines};
use tunnel_proto::dial::SystemResolver;
use tunnel_proto::egress::{SocketPeer, TargetSocket};
use tunnel_proto::open_record::RecordSinks;
use tunnel_proto::stream_record::{StreamEnd, StreamRecord};
use tunnel_proto::stream_server::{self, Dialed, DialedTarget, Refused, StreamServer};
use tunnel_proto::transport::{IncomingStream, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{NodeName, SessionId};

use crate::config::Limit;
use crate::config::Limits;
use crate::loop_detection::{LoopDetector, OpenEnd};
use crate::metrics::Metrics;
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
    dial_policy: Followed<DialPolicy>,
    loop_detector: Arc<LoopDetector>,
    limits: Followed<Limits>,
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

impl Egress {
    /// Creates an egress that refuses new streams once `draining` is canceled.
    pub(crate) fn new(
        node: NodeName,
        dial_policy: Followed<DialPolicy>,
        loop_detector: Arc<LoopDetector>,
        limits: Followed<Limits>,
        metrics: Metrics,
        draining: CancellationToken,
    ) -> Self {
        Self {
            node,
            dial_policy,
            loop_detector,
            permits: Semaphore::new(limits.load().streams_per_agent as usize),
            limits,
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
        let _open = self.metrics.stream();
        let server = EgressStream {
            egress: self,
            has_room,
            params,
        };
        let on_late = || self.metrics.limit(Limit::RequestHeadTimeout);
        let head_timeout = self.limits.load().request_head_timeout;
        stream_server::serve(server, incoming, head_timeout, on_late).await;
    }
}

/// One stream of a session.
struct EgressStream<'a> {
    egress: &'a Egress,
    has_room: bool,
    params: &'a SessionParams,
}

impl<'a> StreamServer for EgressStream<'a> {
    type Admitted = (Target, SemaphorePermit<'a>);
    type Guard = OpenEnd<'a>;

    fn admit(&self, header: &StreamHeader, _stream: &Stream) -> Result<Self::Admitted, Refused> {
        let Egress {
            metrics, permits, ..
        } = self.egress;
        let (code, detail) = match &header.kind {
            StreamKind::Control { .. } => (
                RefusalCode::BadHeader,
                "session already has a control stream",
            ),
            StreamKind::Forward { .. } | StreamKind::Enroll => (
                RefusalCode::BadHeader,
                "agents do not accept streams for other servers",
            ),
            StreamKind::Cloud(_) => (
                RefusalCode::BadHeader,
                "agents do not accept streams to targets of the cloud",
            ),
            StreamKind::Target(_) if self.egress.draining.is_cancelled() => {
                (RefusalCode::Draining, "agent is stopping")
            }
            StreamKind::Target(_) if !self.has_room => {
                metrics.limit(Limit::BufferPool);
                let detail = "buffer pool is full of data that targets have not read (agent's limits.bufferPool)";
                (RefusalCode::TooManyStreams, detail)
            }
            StreamKind::Target(target) => match permits.try_acquire() {
                Ok(permit) => return Ok((target.clone(), permit)),
                Err(_none_left) => {
                    metrics.limit(Limit::StreamsPerAgent);
                    let detail = "agent's limits.streamsPerAgent is reached";
                    (RefusalCode::TooManyStreams, detail)
                }
            },
        };
        Err(refusal(code, detail.to_owned()))
    }

    async fn dial(&self, (target, _): &Self::Admitted) -> Result<Dialed<OpenEnd<'a>>, Refused> {
        let (egress, params) = (self.egress, self.params);
        let own = egress.limits.load().target_dial_timeout;
        let limit = if params.dial_timeout.is_zero() {
            own
        } else {
            own.min(params.dial_timeout)
        };
        let dial_policy = egress.dial_policy.load();
        let context = DialContext {
            node_ip: params.node_ip.current(),
            dial_policy: &dial_policy,
            resolver: &egress.resolver,
            limit,
            metrics: &egress.metrics,
        };
        let (tcp, address) = dial(target, &context).await.inspect_err(|refusal| {
            if refusal.code == RefusalCode::TargetTimeout {
                egress.metrics.limit(Limit::TargetDialTimeout);
            }
        })?;
        let guard = match egress.loop_detector.dialed(&tcp, address) {
            Ok(Some(open_end)) => open_end,
            Ok(None) => return Err(redirected(address)),
            Err(error) => return Err(not_relayed(address, &error)),
        };
        let socket = TargetSocket::new(tcp, egress.metrics.bytes(), SocketPeer::Target);
        Ok(Dialed {
            target: DialedTarget::Socket {
                socket,
                reply: address.to_string(),
            },
            address: address.to_string(),
            guard,
        })
    }
}

impl RecordSinks for EgressStream<'_> {
    const DROPPED: StreamEnd = StreamEnd::AgentStopping;
    const REPORTER: &'static str = "agent";

    fn describe(&self, record: &mut StreamRecord) {
        record.node = Some(self.egress.node.clone());
        record.session = Some(self.params.session);
    }

    fn has_reached_target(&self, record: &StreamRecord) -> bool {
        record.end.has_reached_target()
    }

    fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
        self.egress.metrics.stream_ended(record.end);
        let (stage, code) = (record.end.stage(), record.end.label());
        LINES.admit(stage, code, self.params.session)
    }
}

fn not_relayed(address: SocketAddr, error: &io::Error) -> Refused {
    let detail = format!("{address}: the connection has no local address: {error}");
    refusal(RefusalCode::TargetRefused, detail)
}

/// Returns the refusal of a target whose connections a rule of this host redirects to the agent.
fn redirected(address: SocketAddr) -> Refused {
    let detail = format!(
        "a rule of this host redirects {address} to agent's --cloud-listen; take the address \
         out of --allow-targets"
    );
    refusal(RefusalCode::Policy, detail)
}

fn refusal(code: RefusalCode, detail: String) -> Refused {
    Refusal { code, detail }.into()
}

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 32;
