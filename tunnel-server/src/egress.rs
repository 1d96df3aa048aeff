//! Streams that agents open to targets of the cloud, such as the API server: policy and dial. An
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
use tokio::time::sleep;
use tunnel_process::host::is_own_address;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry::{LineForm, StreamLines};
use tunnel_proto::dial::split_host_port;
use tunnel_proto::egress::{SocketPeer, TargetSocket};
use tunnel_proto::open_record::RecordSinks;
use tunnel_proto::stream_record::{StreamEnd, StreamRecord};
use tunnel_proto::stream_server::{self, Dialed, DialedTarget, Refused, StreamServer};
use tunnel_proto::transport::{ByteCount, IncomingStream, Stream, source_number};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind};
use tunnel_proto::wire::name::{CloudTarget, NodeName, Port};

use self::cloud::{CloudTargets, Target};
use self::dial::CloudDialer;
use self::labeled_nodes::LabeledNodes;
use crate::config::{CloudTargetSettings, Limit, Limits};
use crate::metrics::Metrics;
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
        let _counted = agent.count_stream();
        let _open = self.metrics.cloud_stream();
        let server = CloudStream {
            egress: self,
            agent,
            is_in_rate,
        };
        stream_server::serve(server, incoming, self.request_head_timeout, || {}).await;
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

/// One stream of an agent.
struct CloudStream<'a> {
    egress: &'a CloudEgress,
    agent: &'a AgentSession,
    is_in_rate: bool,
}

impl<'a> StreamServer for CloudStream<'a> {
    type Admitted = (CloudTarget, &'a Target, Permits<'a>);
    type Guard = ();

    fn admit(&self, header: &StreamHeader, stream: &Stream) -> Result<Self::Admitted, Refused> {
        let StreamKind::Cloud(name) = &header.kind else {
            let detail = "agents open streams to targets of the cloud only".to_owned();
            let code = RefusalCode::BadHeader;
            return Err(Refusal { code, detail }.into());
        };
        let Self { egress, agent, .. } = *self;
        // An agent is one source, whatever it claims.
        stream.set_source(source_number(&agent.node));
        let has_room = agent.session.has_room();
        let (target, permits) = egress.admit(&agent.node, name, self.is_in_rate, has_room)?;
        Ok((name.clone(), target, permits))
    }

    async fn dial(&self, (name, target, _): &Self::Admitted) -> Result<Dialed<()>, Refused> {
        let dialed = self.egress.dialer.dial(target).await;
        let (socket, address) = dialed.map_err(|Refusal { code, detail }| Refused {
            reply: Refusal {
                code,
                detail: not_dialed(name, code),
            },
            detail,
        })?;
        let socket = TargetSocket::new(socket, ByteCount::default(), SocketPeer::Target);
        Ok(Dialed {
            target: DialedTarget::Socket {
                socket,
                reply: String::new(),
            },
            address: address.to_string(),
            guard: (),
        })
    }
}

impl RecordSinks for CloudStream<'_> {
    const DROPPED: StreamEnd = StreamEnd::ServerStopping;
    const REPORTER: &'static str = "server";

    fn describe(&self, record: &mut StreamRecord) {
        let node = &self.agent.node;
        record.node = Some(node.clone());
        record.caller = format!("agent:{node}");
        record.is_claimed = false;
        record.direction = Some("edge");
        record.session = Some(self.agent.id);
    }

    fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
        self.egress.metrics.cloud_stream_ended(record.end);
        let (stage, code) = (record.end.stage(), record.end.label());
        LINES.admit(stage, code, self.agent.node.clone())
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
