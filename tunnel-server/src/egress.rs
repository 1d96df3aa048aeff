//! Streams that agents open to targets of the cloud, such as the API server: policy and dial. An
//! agent names a target; the operator's settings alone have its address, and agents do not learn it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::time::sleep;
use tunnel_process::followed::Followed;
use tunnel_process::host::is_own_address;
use tunnel_process::keyed_permits::{Full, KeyedPermit, KeyedPermits};
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
use crate::config::{CloudTargetSettings, Limit, SharedLimits};
use crate::dry_run::DryRunReport;
use crate::metrics::Metrics;
use crate::node_rate::NodeRate;
use crate::routing::registry::AgentSession;
use crate::running::{RunningAccess, RunningAccesses, RunningGuard};
use tunnel_routing::operation::Operation;
use tunnel_routing::policy::{SharedPolicy, access_of_agent, authorize};
use tunnel_routing::routes::RouteTable;

mod cloud;
mod dial;
pub mod labeled_nodes;

/// Serves the streams of agents to targets of the cloud. The targets and the limits may change while
/// streams are open.
#[derive(Debug)]
pub struct CloudEgress {
    targets: Arc<ArcSwap<CloudTargets>>,
    /// Held while targets and rules decide about a stream, or are replaced: those of one file decide.
    change: RwLock<()>,
    own_ports: Followed<Vec<Port>>,
    dialer: CloudDialer,
    limits: SharedLimits,
    /// Streams of all agents that may be open.
    total: AtomicUsize,
    /// The open streams of all agents.
    open: KeyedPermits<NodeName>,
    /// Rate of new streams of each node.
    rate: NodeRate,
    metrics: Metrics,
    shutdown: Shutdown,
    access: AccessControl,
}

/// What decides about the streams of agents, and what records the decisions.
#[derive(Debug, Clone, Default)]
pub struct AccessControl {
    pub policy: SharedPolicy,
    pub dry_run: DryRunReport,
    pub running: RunningAccesses,
}

/// Agents can open streams without headers at will, and others for programs of their nodes.
static LINES: StreamLines<NodeName> = StreamLines::new(
    "cloud streams without a header",
    "access log lines of refused cloud streams of a node",
);

impl CloudEgress {
    /// Creates the egress, with `total` streams of all agents at once. `own_ports` are those of this
    /// server's listeners, and `labeled_nodes` those with the labels of the targets.
    ///
    /// # Errors
    /// As [`Self::check`].
    #[expect(
        clippy::too_many_arguments,
        reason = "each is another part of the server"
    )]
    pub fn new(
        targets: &[CloudTargetSettings],
        own_ports: Followed<Vec<Port>>,
        labeled_nodes: LabeledNodes,
        limits: SharedLimits,
        total: usize,
        metrics: Metrics,
        shutdown: Shutdown,
        access: AccessControl,
    ) -> Result<Self, String> {
        let egress = Self {
            targets: Arc::new(ArcSwap::from_pointee(CloudTargets::new(
                targets,
                labeled_nodes,
            ))),
            change: RwLock::default(),
            dialer: CloudDialer::new(own_ports.clone(), limits.clone()),
            own_ports,
            total: AtomicUsize::new(total),
            open: KeyedPermits::default(),
            rate: stream_rate(limits.load().cloud_stream_rate),
            limits,
            metrics,
            shutdown,
            access,
        };
        egress.check(targets)?;
        Ok(egress)
    }

    /// Checks targets before they replace the current ones.
    ///
    /// # Errors
    /// Returns a text if a target is a listener of this server, which would make a loop.
    pub fn check(&self, targets: &[CloudTargetSettings]) -> Result<(), String> {
        let own_ports = self.own_ports.load();
        targets
            .iter()
            .try_for_each(|target| refuse_own(target, &own_ports))
    }

    /// Replaces the targets for later streams, and the number of streams of all agents, together with the rules
    /// that `replace_rules` replaces. Open streams stay.
    pub fn replace(
        &self,
        targets: &[CloudTargetSettings],
        total: usize,
        replace_rules: impl FnOnce(),
    ) {
        let _change = self.change.write();
        replace_rules();
        let replaced = self.targets.load().with(targets);
        self.targets.store(Arc::new(replaced));
        self.total.store(total, Ordering::Relaxed);
    }

    /// Replaces the rate of new streams of each node.
    pub fn replace_rate(&self, per_second: u32) {
        self.rate.replace(stream_rate(per_second));
    }

    /// Returns whether the agent of a node may reach a target, now or with another label.
    pub fn has_target(&self, node: &NodeName) -> bool {
        self.targets.load().has_target(node)
    }

    /// Accepts the streams of a session until it ends.
    pub async fn accept_streams(self: Arc<Self>, agent: Arc<AgentSession>) {
        let transport_limit = self.per_agent().saturating_add(WITHOUT_PERMIT);
        agent.session.set_max_concurrent_streams(transport_limit);
        while let Ok(incoming) = agent.session.accept().await {
            let is_in_rate = self.rate.allows(&agent.node);
            let (egress, serving) = (self.clone(), agent.clone());
            self.shutdown
                .spawn_work(async move { egress.serve(incoming, &serving, is_in_rate).await });
            if !is_in_rate {
                // Each refusal costs time that the streams of other agents need.
                sleep(REFUSAL_INTERVAL).await;
            }
        }
    }

    /// Returns the streams that one agent may have open.
    fn per_agent(&self) -> u32 {
        let share = self.total.load(Ordering::Relaxed) / AGENT_SHARE;
        let share = u32::try_from(share).unwrap_or(u32::MAX).max(1);
        self.limits.load().cloud_streams_per_agent.min(share)
    }

    async fn serve(&self, incoming: IncomingStream, agent: &AgentSession, is_in_rate: bool) {
        let end_signal = Arc::new(Notify::new());
        let _counted = agent.count_stream();
        let _open = self.metrics.cloud_stream();
        let server = CloudStream {
            egress: self,
            agent,
            is_in_rate,
            decided: OnceLock::new(),
            end_signal: end_signal.clone(),
            running: OnceLock::new(),
        };
        let head_timeout = self.limits.load().request_head_timeout;
        tokio::select! {
            biased;
            () = stream_server::serve(server, incoming, head_timeout, || {}) => {}
            // Cuts both sides.
            () = end_signal.notified() => {}
        }
    }

    /// Returns the target that the agent of a node names, and the permits for a stream.
    fn admit(
        &self,
        node: &NodeName,
        name: &CloudTarget,
        is_in_rate: bool,
        has_room: bool,
    ) -> Result<(Arc<Target>, KeyedPermit<NodeName>), Refusal> {
        if self.shutdown.drain().is_cancelled() {
            return Err(Refusal {
                code: RefusalCode::Draining,
                detail: "server is stopping".to_owned(),
            });
        }
        if !is_in_rate {
            return Err(self.too_many(Limit::CloudStreamRate));
        }
        let target = self.targets.load().find(node, name)?;
        if !has_room {
            return Err(self.too_many(Limit::BufferPool));
        }
        let per_agent = usize::try_from(self.per_agent()).unwrap_or(usize::MAX);
        let total = self.total.load(Ordering::Relaxed);
        let permit = self.open.acquire(node.clone(), per_agent, total);
        let permit = permit.map_err(|full| {
            self.too_many(match full {
                Full::Key => Limit::CloudStreamsPerAgent,
                Full::Total => Limit::CloudStreamsTotal,
            })
        })?;
        Ok((target, permit))
    }

    /// Counts a stream above a limit, and returns its refusal.
    fn too_many(&self, limit: Limit) -> Refusal {
        self.metrics.limit(limit);
        Refusal {
            code: RefusalCode::TooManyStreams,
            detail: format!("server's limits.{} is reached", limit.label()),
        }
    }
}

/// One stream of an agent.
struct CloudStream<'a> {
    egress: &'a CloudEgress,
    agent: &'a AgentSession,
    is_in_rate: bool,
    decided: OnceLock<DecidedStream>,
    /// Notified when the stream has to end.
    end_signal: Arc<Notify>,
    running: OnceLock<RunningGuard>,
}

/// What the rules have decided about a stream.
struct DecidedStream {
    rule: Option<Arc<str>>,
    dry_run: Option<Box<str>>,
}

impl CloudStream<'_> {
    /// Decides by the rules, after the list of targets has.
    fn authorize(&self, name: &CloudTarget, target: &Target) -> Result<(), Refusal> {
        let Self { egress, agent, .. } = *self;
        let access = access_of_agent(&agent.node, target.ports());
        let facts = access.facts.clone();
        // Before the rules are read: those who decide again after a change find the stream, or it finds them.
        let (targets, node, named) = (egress.targets.clone(), agent.node.clone(), name.clone());
        let offered = move || {
            let found = targets.load().find(&node, &named);
            found.map(drop).map_err(|refusal| refusal.detail)
        };
        let mut running = RunningAccess::new(access, self.end_signal.clone());
        running.offered = Some(Box::new(offered));
        self.running
            .get_or_init(|| egress.access.running.begin(running));
        let policy = egress.access.policy.load();
        let rules = &policy.rules;
        // A target has no node, of which rules could read more.
        let routes = RouteTable::default();
        let tried = (egress.access.dry_run).compare(rules, &facts, None, &routes, &egress.metrics);
        let granted = authorize(&rules.in_force, &facts);
        let rule = granted.as_ref().map(|granted| Some(&granted.rule));
        let rule = rule.unwrap_or_else(|denied| denied.rule());
        self.decided.get_or_init(|| DecidedStream {
            rule: rule.cloned(),
            dry_run: tried,
        });
        let why = match granted {
            Ok(granted) if granted.asks_cluster => {
                let rule = granted.rule;
                format!(
                    "rule {rule} asks the cluster, which has rights for requests at nodes alone"
                )
            }
            Ok(_) => return Ok(()),
            Err(denied) => denied.to_string(),
        };
        Err(Refusal {
            code: RefusalCode::Policy,
            detail: format!("target {name}: {why}"),
        })
    }
}

impl StreamServer for CloudStream<'_> {
    type Admitted = (CloudTarget, Arc<Target>, KeyedPermit<NodeName>);
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
        let _unchanged = egress.change.read();
        let (target, permit) = egress.admit(&agent.node, name, self.is_in_rate, has_room)?;
        self.authorize(name, &target)?;
        Ok((name.clone(), target, permit))
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
        if let Some(decided) = self.decided.get() {
            record.operation = Some(Operation::Connect.label().into());
            (record.rule, record.dry_run) = (decided.rule.clone(), decided.dry_run.clone());
        }
    }

    fn has_reached_target(&self, record: &StreamRecord) -> bool {
        record.end.has_reached_target()
    }

    fn end(&self, record: &mut StreamRecord) -> Option<LineForm> {
        let refused = self.running.get().and_then(RunningGuard::refused);
        if let Some(refused) = refused.filter(|_| record.end == Self::DROPPED) {
            record.fail(StreamEnd::Refused(RefusalCode::Policy), &*refused.reason);
            record.rule.clone_from(&refused.rule);
        }
        self.egress.metrics.cloud_stream_ended(record.end);
        let (stage, code) = (record.end.stage(), record.end.label());
        LINES.admit(stage, code, self.agent.node.clone())
    }
}

fn stream_rate(per_second: u32) -> NodeRate {
    NodeRate::new(per_second, per_second.saturating_mul(BURST))
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
const BURST: u32 = 2;

#[cfg(test)]
mod tests;
