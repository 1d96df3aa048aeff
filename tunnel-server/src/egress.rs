//! Streams that agents open to targets of the cloud, such as the API server: policy, dial, relay. An
//! agent names a target; the operator's settings alone have its address, and agents do not learn it.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use governor::clock::DefaultClock;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};
use tracing::info;
use tunnel_proto::dial::split_host_port;
use tunnel_proto::egress::{SocketPeer, TargetSocket, relay_socket};
use tunnel_proto::process::host::is_own_address;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::process::telemetry::{ACCESS, StreamLines, StreamStage, non_empty};
use tunnel_proto::transport::{ByteCount, IncomingStream, Stream, source_number};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamKind};
use tunnel_proto::wire::name::{CloudTarget, NodeName, Port};

use self::cloud::{CloudTargets, Target};
use self::dial::CloudDialer;
use self::labeled_nodes::LabeledNodes;
use crate::config::{CloudTargetSettings, Limit, Limits};
use crate::metrics::Metrics;
use crate::outcome::cloud::CloudResult;
use crate::routing::registry::AgentSession;

mod cloud;
mod dial;
pub mod labeled_nodes;

/// Serves the streams of agents to targets of the cloud.
#[derive(Debug)]
pub struct CloudEgress {
    targets: CloudTargets,
    dialer: CloudDialer,
    /// Streams of all agents that may be open.
    total: Semaphore,
    per_agent: u32,
    /// Open streams of each node that has some.
    open: Mutex<HashMap<NodeName, u32>>,
    /// Rate of new streams of each node. Only nodes with a valid credential are counted.
    rate: RateLimiter<NodeName, HashMapStateStore<NodeName>, DefaultClock>,
    /// Time for an agent to send the header.
    request_head_timeout: Duration,
    metrics: Metrics,
    shutdown: Shutdown,
}

/// Agents can open streams without headers at will, and others for programs of their nodes.
static LINES: StreamLines<NodeName> = StreamLines::new(
    "cloud streams without a header",
    "access log lines of refused cloud streams of a node",
);

impl CloudEgress {
    /// Creates the egress, or returns `None` without targets. `own_ports` are those of this server's
    /// listeners, and `labeled_nodes` those with the labels of the targets.
    ///
    /// # Errors
    /// Returns a text if a target is a listener of this server, which would make a loop.
    pub fn new(
        targets: &[CloudTargetSettings],
        own_ports: Vec<Port>,
        labeled_nodes: LabeledNodes,
        limits: &Limits,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Result<Option<Self>, String> {
        if targets.is_empty() {
            return Ok(None);
        }
        for target in targets {
            refuse_own(target, &own_ports)?;
        }
        let per_second = NonZeroU32::new(limits.cloud_stream_rate).unwrap_or(NonZeroU32::MIN);
        let burst = per_second.saturating_mul(BURST);
        let share = u32::try_from(limits.cloud_streams_total / AGENT_SHARE).unwrap_or(u32::MAX);
        let share = share.max(1);
        Ok(Some(Self {
            targets: CloudTargets::new(targets, labeled_nodes),
            dialer: CloudDialer::new(own_ports, limits.target_dial_timeout),
            total: Semaphore::new(limits.cloud_streams_total),
            per_agent: limits.cloud_streams_per_agent.min(share),
            open: Mutex::default(),
            rate: RateLimiter::hashmap(Quota::per_second(per_second).allow_burst(burst)),
            request_head_timeout: limits.request_head_timeout,
            metrics,
            shutdown,
        }))
    }

    /// Returns whether the agent of a node may reach a target, now or with another label.
    pub fn has_target(&self, node: &NodeName) -> bool {
        self.targets.has_target(node)
    }

    /// Accepts the streams of a session until it ends.
    pub async fn accept_streams(self: Arc<Self>, agent: Arc<AgentSession>) {
        let transport_limit = self.per_agent.saturating_add(WITHOUT_PERMIT);
        agent.session.set_max_concurrent_streams(transport_limit);
        while let Ok(incoming) = agent.session.accept().await {
            let is_in_rate = self.rate.check_key(&agent.node).is_ok();
            let (egress, serving) = (self.clone(), agent.clone());
            self.shutdown
                .spawn_work(async move { egress.serve(incoming, &serving, is_in_rate).await });
            if !is_in_rate {
                // Each refusal costs time that the streams of other agents need.
                sleep(REFUSAL_INTERVAL).await;
            }
        }
    }

    async fn serve(&self, incoming: IncomingStream, agent: &AgentSession, is_in_rate: bool) {
        let began = Instant::now();
        let _counted = agent.count_stream();
        let _open = self.metrics.cloud_stream();
        let (name, outcome) = match incoming.header(began + self.request_head_timeout).await {
            Ok((header, stream)) => match header.kind {
                StreamKind::Cloud(name) => {
                    // An agent is one source, whatever it claims.
                    stream.set_source(source_number(&agent.node));
                    let outcome = self.answer(&name, stream, agent, is_in_rate).await;
                    (Some(name), outcome)
                }
                _ => {
                    let detail = "agents open streams to targets of the cloud only".to_owned();
                    let code = RefusalCode::BadHeader;
                    (
                        None,
                        StreamOutcome::refuse(stream, Refusal { code, detail }).await,
                    )
                }
            },
            Err(error) => {
                let outcome =
                    StreamOutcome::without_bytes(CloudResult::NoHeader, error.to_string());
                (None, outcome)
            }
        };
        self.metrics.cloud_stream_ended(outcome.result);
        let stage = match name {
            Some(_) => outcome.result.stage(),
            None => StreamStage::Unknown,
        };
        let code = outcome.result.label();
        let Some(form) = LINES.admit(stage, code, agent.node.clone()) else {
            return;
        };
        info!(
            target: ACCESS,
            node = %agent.node,
            direction = "edge",
            session = agent.id.0,
            name = name.as_ref().map(tracing::field::display),
            dialed = non_empty(&outcome.dialed),
            code,
            error = non_empty(form.of_error(&outcome.detail)),
            bytes_in = outcome.from_agent,
            bytes_out = outcome.to_agent,
            elapsed = began.elapsed().as_secs_f64(),
            "access"
        );
    }

    async fn answer(
        &self,
        name: &CloudTarget,
        mut stream: Stream,
        agent: &AgentSession,
        is_in_rate: bool,
    ) -> StreamOutcome {
        let has_room = agent.session.has_room();
        let (target, _permits) = match self.admit(&agent.node, name, is_in_rate, has_room) {
            Ok(admitted) => admitted,
            Err(refusal) => return StreamOutcome::refuse(stream, refusal).await,
        };
        let (socket, address) = match self.dialer.dial(target).await {
            Ok(dialed) => dialed,
            Err(Refusal { code, detail }) => {
                stream.refuse(code, &not_dialed(name, code)).await;
                return StreamOutcome::without_bytes(CloudResult::Refused(code), detail);
            }
        };
        let dialed = address.to_string();
        let socket = TargetSocket::new(socket, ByteCount::default(), SocketPeer::Target);
        // The socket resets when it is dropped, as after each cut.
        if let Err(error) = stream.accept("").await {
            return StreamOutcome::without_bytes(CloudResult::CutByAgent, error.to_string());
        }
        let relayed = relay_socket(stream, socket).await;
        StreamOutcome {
            result: relayed.end.into(),
            dialed,
            from_agent: relayed.from_tunnel,
            to_agent: relayed.to_tunnel,
            detail: relayed.detail,
        }
    }

    /// Returns the target that the agent of a node names, and the permits for a stream.
    fn admit(
        &self,
        node: &NodeName,
        name: &CloudTarget,
        is_in_rate: bool,
        has_room: bool,
    ) -> Result<(&Target, Permits<'_>), Refusal> {
        if self.shutdown.drain().is_cancelled() {
            return Err(Refusal {
                code: RefusalCode::Draining,
                detail: "server is stopping".to_owned(),
            });
        }
        if !is_in_rate {
            return Err(self.too_many(Limit::CloudStreamRate));
        }
        let target = self.targets.find(node, name)?;
        if !has_room {
            return Err(self.too_many(Limit::BufferPool));
        }
        let of_node = NodePermit::acquire(&self.open, node, self.per_agent);
        let of_node = of_node.ok_or_else(|| self.too_many(Limit::CloudStreamsPerAgent))?;
        let total = self.total.try_acquire();
        let total = total.map_err(|_none_left| self.too_many(Limit::CloudStreamsTotal))?;
        Ok((target, (of_node, total)))
    }

    /// Counts a stream above a limit, and returns its refusal.
    fn too_many(&self, limit: Limit) -> Refusal {
        self.metrics.limit(limit);
        Refusal {
            code: RefusalCode::TooManyStreams,
            detail: format!("server's limits.{} is reached", limit.name()),
        }
    }
}

/// The permits of an open stream.
type Permits<'a> = (NodePermit<'a>, SemaphorePermit<'a>);

/// An open stream in the count of its node, until it is dropped.
struct NodePermit<'a> {
    open: &'a Mutex<HashMap<NodeName, u32>>,
    node: NodeName,
}

impl<'a> NodePermit<'a> {
    /// Counts a stream, unless the node has `most` open.
    fn acquire(
        open: &'a Mutex<HashMap<NodeName, u32>>,
        node: &NodeName,
        most: u32,
    ) -> Option<Self> {
        let mut counts = open.lock();
        let count = counts.get(node).copied().unwrap_or_default();
        if count >= most {
            return None;
        }
        counts.insert(node.clone(), count + 1);
        Some(Self {
            open,
            node: node.clone(),
        })
    }
}

impl Drop for NodePermit<'_> {
    fn drop(&mut self) {
        let mut counts = self.open.lock();
        match counts.get_mut(&self.node) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                counts.remove(&self.node);
            }
        }
    }
}

/// The end of a stream, for the access log.
struct StreamOutcome {
    result: CloudResult,
    dialed: String,
    from_agent: u64,
    to_agent: u64,
    detail: String,
}

impl StreamOutcome {
    fn without_bytes(result: CloudResult, detail: String) -> Self {
        Self {
            result,
            dialed: String::new(),
            from_agent: 0,
            to_agent: 0,
            detail,
        }
    }

    /// Refuses a stream with a reply, and returns its end.
    async fn refuse(stream: Stream, refusal: Refusal) -> Self {
        stream.refuse(refusal.code, &refusal.detail).await;
        Self::without_bytes(CloudResult::Refused(refusal.code), refusal.detail)
    }
}

/// Returns the detail for an agent whose target was not dialed, without addresses.
fn not_dialed(name: &CloudTarget, code: RefusalCode) -> String {
    let what = match code {
        RefusalCode::TargetTimeout => "did not accept the connection in time",
        RefusalCode::Policy => "has an address that the server does not dial",
        _ => "cannot be reached from the server",
    };
    format!("target {name} {what}; the server's access log has the address")
}

/// Refuses a target whose configured address is a listener of this server.
fn refuse_own(target: &CloudTargetSettings, own_ports: &[Port]) -> Result<(), String> {
    for address in &target.addresses {
        let Ok(parsed) = address.parse() else {
            continue;
        };
        let host = split_host_port(address).map_or("", |(host, _port)| host);
        if let Err(refused) = cloud::check(parsed, host, own_ports, is_own_address) {
            return Err(format!("cloud target {}: {refused}", target.name));
        }
    }
    Ok(())
}

/// Streams of a session that may wait for their header or their refusal, in addition to those with a
/// permit. Over QUIC there may be more, see
/// [`tunnel_proto::transport::Session::set_max_concurrent_streams`].
const WITHOUT_PERMIT: u32 = 32;
/// Least time between two streams that a session opens above the rate of its node. The streams of a
/// session are accepted in order, so one within the rate waits behind those that are refused.
const REFUSAL_INTERVAL: Duration = Duration::from_millis(1);
/// Divisor for the part of all streams that one agent may have.
const AGENT_SHARE: usize = 8;
/// Streams that a node may open at once, in multiples of the rate.
const BURST: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

#[cfg(test)]
mod tests;
