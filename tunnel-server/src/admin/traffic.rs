//! The traffic of the installation and of each node: samples every 10 s, from which the console has
//! throughput, errors and history, and other servers the rows of this server's nodes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::name::{NodeName, ReplicaId, SessionId};
use tunnel_proto::wire::node_row::{NodeRow, ServerReport};

use crate::ingress::recent_requests::RecentRequests;
use crate::metrics::Metrics;
use crate::routing::peers::Peers;
use crate::routing::registry::{AgentSession, Registry};

mod rings;

use rings::NodeTick;
pub(crate) use rings::{MinutePoint, MinuteRing, NodePoint, NodeRing};

/// The traffic of a node with this server. The figures of the last minute are averages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeTraffic {
    /// Payload received from the agent in each second.
    pub(crate) bytes_in_per_second: u64,
    /// Payload sent to the agent in each second.
    pub(crate) bytes_out_per_second: u64,
    /// Failed requests of the last hour.
    pub(crate) errors_last_hour: u64,
    /// Payload of each half hour of the last day, the last one last. 255 is the most of these.
    pub(crate) trend: Vec<u8>,
}

/// Traffic of the sessions with this server.
pub(crate) struct Traffic {
    registry: Arc<Registry>,
    metrics: Metrics,
    recent: Arc<RecentRequests>,
    peers: Arc<Peers>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sampled_at: Option<Instant>,
    /// Bytes of each session at the last sample, from and to the agent.
    sessions: HashMap<SessionId, [u64; 2]>,
    nodes: HashMap<NodeName, Box<NodeRing>>,
    /// Failed requests of the last hour, of the nodes that have some, as of the last sample.
    errors: HashMap<NodeName, u64>,
    minutes: MinuteRing,
    /// What this server reported of itself at the last sample.
    report: Option<ServerReport>,
    /// What other servers had reported of themselves by the last sample.
    reports: BTreeMap<ReplicaId, ServerReport>,
}

tunnel_process::partial_debug!(Traffic);

impl Traffic {
    pub(crate) fn new(
        registry: Arc<Registry>,
        metrics: Metrics,
        recent: Arc<RecentRequests>,
        peers: Arc<Peers>,
    ) -> Arc<Self> {
        Arc::new(Self {
            registry,
            metrics,
            recent,
            peers,
            state: Mutex::default(),
        })
    }

    /// Samples every 10 s until `stop`, outside the runtime's own threads. The rows of other servers'
    /// nodes are asked for from now on.
    pub(crate) fn start(self: &Arc<Self>, shutdown: &Shutdown) {
        self.peers.rows.want();
        let traffic = self.clone();
        shutdown.spawn_service(async move {
            let mut ticks = interval(SAMPLE_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let traffic = traffic.clone();
                let sample = move || traffic.sample(Instant::now(), SystemTime::now());
                let _panicked = tokio::task::spawn_blocking(sample).await;
            }
        });
    }

    /// Adds what has happened since the last sample.
    pub(super) fn sample(&self, now: Instant, wall: SystemTime) {
        let sessions = self.registry.all();
        let counts = self.recent.take_counts();
        let mut state = self.state.lock();
        let state = &mut *state;
        let elapsed = state.sampled_at.replace(now);
        let elapsed = elapsed.map_or(Duration::ZERO, |before| now - before);
        let seconds = u16::try_from((elapsed.as_millis() + 500) / 1000).unwrap_or(u16::MAX);
        let minute = wall
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs()
            / 60;
        let quarter = u32::try_from(minute / 15).unwrap_or(u32::MAX);

        let mut ticks = state.count_sessions(&sessions);
        let mut report = self.report(&sessions, state.report.as_ref(), wall);
        for tick in ticks.values() {
            report.bytes = [
                report.bytes[0] + tick.bytes_in,
                report.bytes[1] + tick.bytes_out,
            ];
        }
        for (node, (requests, errors)) in counts {
            let tick = ticks.entry(node).or_default();
            (tick.requests, tick.errors) = (requests, errors);
        }
        let reports = self.peers.rows.reports();
        let own = (state.report.replace(report.clone()), &report);
        let others = reports
            .iter()
            .map(|(replica, report)| (state.reports.remove(replica), report));
        let mut total = MinutePoint {
            minute,
            ..MinutePoint::default()
        };
        for (before, report) in std::iter::once(own).chain(others) {
            total.add(before.as_ref(), report);
        }
        state.reports = reports;
        state.minutes.add(total);
        state.add_ticks(ticks, quarter, seconds);
        if self.peers.expected() > 0 {
            self.publish(&sessions, &state.nodes, report, wall);
        }
    }

    /// Returns what this server reports of itself, with the bytes of the last report.
    fn report(
        &self,
        sessions: &[Arc<AgentSession>],
        before: Option<&ServerReport>,
        now: SystemTime,
    ) -> ServerReport {
        let [requests, errors] = self.metrics.requests();
        ServerReport {
            sessions: sessions.len() as u64,
            requests,
            errors,
            bytes: before.map_or([0; 2], |before| before.bytes),
            linked: self.peers.linked(),
            failing: self.recent.failing(now),
        }
    }

    /// Publishes the rows that have changed, for other servers.
    fn publish(
        &self,
        sessions: &[Arc<AgentSession>],
        rings: &HashMap<NodeName, Box<NodeRing>>,
        report: ServerReport,
        now: SystemTime,
    ) {
        let mut rows: HashMap<&NodeName, NodeRow> = HashMap::with_capacity(sessions.len());
        for session in sessions {
            let is_better = rows.get(&session.node).is_none_or(|row| row.is_suspect);
            if is_better {
                let ring = rings.get(&session.node);
                rows.insert(&session.node, row(session, ring.map(|ring| &**ring), now));
            }
        }
        self.peers.rows.change(|own| {
            let gone = own.rows.iter().map(|(node, _row)| node);
            let gone = gone.filter(|node| !rows.contains_key(node));
            for node in gone.cloned().collect::<Vec<_>>() {
                own.rows.remove(&node);
            }
            for (node, row) in rows {
                if own.rows.get(node).is_none_or(|before| **before != row) {
                    own.rows.insert(node.clone(), Arc::new(row));
                }
            }
            own.report = Some(report);
        });
    }

    /// Returns the traffic of a node with the server that carries requests to it: another one, or this
    /// one. `None` if it had no session and no request in the last day.
    pub(crate) fn of_node(
        &self,
        node: &NodeName,
        server: Option<&ReplicaId>,
    ) -> Option<NodeTraffic> {
        match server.filter(|server| *server != self.peers.own()) {
            Some(server) => Some(NodeTraffic::of_row(&self.peers.rows.row(server, node)?.0)),
            None => Some(NodeTraffic::of(self.state.lock().nodes.get(node)?)),
        }
    }

    /// Returns a reader of the failed requests of many nodes, and of their bytes with `has_bytes`. Samples
    /// wait while it exists.
    pub(crate) fn figures(&self, has_bytes: bool) -> TrafficFigures<'_> {
        TrafficFigures {
            state: self.state.lock(),
            has_bytes,
        }
    }

    /// Returns the number of nodes with a session with this server.
    pub(crate) fn nodes(&self) -> usize {
        self.registry.nodes()
    }

    /// Returns the last 96 quarters of an hour of a node, the current one last, with the seconds of each
    /// since the first observation.
    pub(crate) fn points(&self, node: &NodeName) -> Vec<(NodePoint, u16)> {
        let state = self.state.lock();
        let ring = state.nodes.get(node);
        ring.map_or_else(Vec::new, |ring| ring.points().zip(ring.seconds()).collect())
    }

    /// Reads the history of the installation.
    pub(crate) fn minutes<T>(&self, read: impl FnOnce(&MinuteRing) -> T) -> T {
        read(&self.state.lock().minutes)
    }
}

/// The figures of nodes without their trends. Without the bytes no ring is read, since those of many nodes
/// are in no cache of the processor.
pub(crate) struct TrafficFigures<'a> {
    state: MutexGuard<'a, State>,
    has_bytes: bool,
}

impl TrafficFigures<'_> {
    /// Returns those of a node that no other server holds.
    pub(crate) fn of_own(&self, node: &NodeName) -> Option<NodeTraffic> {
        if self.has_bytes {
            return Some(NodeTraffic::figures(self.state.nodes.get(node)?));
        }
        if self.state.errors.is_empty() {
            return None;
        }
        Some(NodeTraffic {
            errors_last_hour: *self.state.errors.get(node)?,
            ..NodeTraffic::default()
        })
    }
}

impl NodeTraffic {
    fn figures(ring: &NodeRing) -> Self {
        let [bytes_in_per_second, bytes_out_per_second] = ring.bytes_per_second();
        Self {
            bytes_in_per_second,
            bytes_out_per_second,
            errors_last_hour: ring.errors_last_hour(),
            trend: Vec::new(),
        }
    }

    fn of(ring: &NodeRing) -> Self {
        let points: Vec<u64> = ring.points().map(NodePoint::bytes).collect();
        let halves: Vec<u64> = points.chunks(2).map(|half| half.iter().sum()).collect();
        let most = halves.iter().copied().max().unwrap_or(0).max(1);
        let level = |bytes: &u64| u8::try_from(u128::from(*bytes) * 255 / u128::from(most));
        let levels = halves.iter().map(|bytes| level(bytes).unwrap_or(u8::MAX));
        Self {
            trend: levels.collect(),
            ..Self::figures(ring)
        }
    }

    /// Returns the figures of a row without the trend.
    pub(crate) fn figures_of_row(row: &NodeRow) -> Self {
        let [bytes_in_per_second, bytes_out_per_second] = row.bytes_per_second;
        Self {
            bytes_in_per_second,
            bytes_out_per_second,
            errors_last_hour: row.errors_last_hour,
            trend: Vec::new(),
        }
    }

    fn of_row(row: &NodeRow) -> Self {
        Self {
            trend: row.trend.clone(),
            ..Self::figures_of_row(row)
        }
    }
}

impl MinutePoint {
    /// Adds what a server has done since its report before. A server that has just begun to report, or
    /// was started again, adds its sessions alone.
    fn add(&mut self, before: Option<&ServerReport>, report: &ServerReport) {
        self.sessions += report.sessions;
        let Some(before) = before else {
            return;
        };
        self.requests += report.requests.saturating_sub(before.requests);
        self.errors += report.errors.saturating_sub(before.errors);
        self.bytes_in += report.bytes[0].saturating_sub(before.bytes[0]);
        self.bytes_out += report.bytes[1].saturating_sub(before.bytes[1]);
    }
}

impl State {
    /// Returns what the sessions of each node have carried since the last sample.
    fn count_sessions(&mut self, sessions: &[Arc<AgentSession>]) -> HashMap<NodeName, NodeTick> {
        let mut ticks: HashMap<NodeName, NodeTick> = HashMap::with_capacity(sessions.len());
        let mut before = std::mem::take(&mut self.sessions);
        for session in sessions {
            let stats = session.session.stats();
            let [from, to] = before.remove(&session.id).unwrap_or_default();
            self.sessions
                .insert(session.id, [stats.bytes_in, stats.bytes_out]);
            let tick = ticks.entry(session.node.clone()).or_default();
            tick.bytes_in += stats.bytes_in.saturating_sub(from);
            tick.bytes_out += stats.bytes_out.saturating_sub(to);
            tick.is_up |= session.is_routable();
        }
        ticks
    }

    /// Adds a sample to the history of each node. Nodes without a session and a request in the last day
    /// have none.
    fn add_ticks(&mut self, mut ticks: HashMap<NodeName, NodeTick>, quarter: u32, seconds: u16) {
        self.errors.clear();
        let mut count = |name: &NodeName, ring: &NodeRing| match ring.errors_last_hour() {
            0 => {}
            errors => drop(self.errors.insert(name.clone(), errors)),
        };
        self.nodes.retain(|name, ring| {
            let tick = ticks.remove(name).unwrap_or_default();
            ring.add(quarter, NodeTick { seconds, ..tick });
            count(name, ring);
            !ring.is_empty()
        });
        for (name, tick) in ticks {
            if self.nodes.len() < NODES_MAX {
                let mut ring = Box::new(NodeRing::new(quarter));
                ring.add(quarter, NodeTick { seconds, ..tick });
                count(&name, &ring);
                self.nodes.insert(name, ring);
            }
        }
    }
}

/// Returns the row of a session. Numbers that change all the time have two digits, so that a node whose
/// traffic is about the same has the same row.
fn row(session: &AgentSession, ring: Option<&NodeRing>, now: SystemTime) -> NodeRow {
    let stats = session.session.stats();
    let traffic = ring.map(NodeTraffic::of).unwrap_or_default();
    let silent = now
        .duration_since(session.last_seen(now))
        .unwrap_or_default();
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    NodeRow {
        node: session.node.clone(),
        is_suspect: session.suspect_reason().is_some(),
        transport: session.session.transport().to_string(),
        rtt_millis: number(two_digits(
            u64::try_from(stats.rtt.as_millis()).unwrap_or(u64::MAX),
        )),
        streams: number(stats.streams as u64),
        bytes: [stats.bytes_in, stats.bytes_out],
        bytes_per_second: [traffic.bytes_in_per_second, traffic.bytes_out_per_second]
            .map(two_digits),
        errors_last_hour: traffic.errors_last_hour,
        version: session.software.clone(),
        address: Some(stats.remote),
        since: session.since,
        certificate_not_after: session.session.peer().not_after,
        trend: traffic.trend,
        silent_seconds: if silent < SILENCE {
            0
        } else {
            number(silent.as_secs())
        },
    }
}

/// Returns a number with its two highest digits.
fn two_digits(number: u64) -> u64 {
    let unit = 10_u64.pow(number.checked_ilog10().unwrap_or(0).saturating_sub(1));
    number / unit * unit
}

const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Silence that is none: a live agent without streams may say nothing for as long.
const SILENCE: Duration = Duration::from_secs(30);
/// Nodes with a history; further ones have none. Their rings are 45 MiB.
const NODES_MAX: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ingress::recent_requests::{RecentRequest, RecentRequestLimits};
    use crate::outcome::Outcome;
    use crate::testing::{Bench, node};

    #[tokio::test(start_paused = true)]
    async fn samples_are_the_traffic_of_each_node_and_of_all() {
        let (bench, agent) = Bench::with_agent().await;
        let sessions = &bench.sessions;
        let recent = Arc::new(RecentRequests::new(RecentRequestLimits::default()));
        let traffic = Traffic::new(
            sessions.registry.clone(),
            sessions.metrics.clone(),
            recent.clone(),
            sessions.peers.clone(),
        );
        let begin = Instant::now();
        let sample = |seconds: u64| {
            let passed = Duration::from_secs(seconds);
            traffic.sample(
                begin + passed,
                UNIX_EPOCH + Duration::from_secs(1_750_000_000) + passed,
            );
        };
        sample(0);
        assert_eq!(traffic.of_node(&"absent".parse().unwrap(), None), None);
        assert_eq!((traffic.nodes(), traffic.points(&node()).len()), (1, 96));
        recent.store(&node(), RecentRequest::example(Outcome::NoAgent));
        recent.store(&node(), RecentRequest::example(Outcome::CallerGone));
        sessions.metrics.ended(Outcome::NoAgent, 0, 0);
        sessions.metrics.ended(Outcome::Ok, 0, 0);
        sample(10);
        let shown = traffic.of_node(&node(), None).unwrap();
        assert_eq!((shown.errors_last_hour, shown.trend.len()), (1, 48));
        for has_bytes in [false, true] {
            let figures = traffic.figures(has_bytes);
            assert_eq!(figures.of_own(&node()).unwrap().errors_last_hour, 1);
            assert_eq!(figures.of_own(&"absent".parse().unwrap()), None);
        }
        let last = traffic.minutes(|minutes| *minutes.last_minute().unwrap());
        assert_eq!((last.sessions, last.requests, last.errors), (1, 2, 1));
        let (point, seconds) = *traffic.points(&node()).last().unwrap();
        assert_eq!(seconds, 10, "nothing was observed before");
        assert_eq!(
            (point.requests(), point.errors(), point.up_percent()),
            (2, 1, Some(100))
        );
        drop(agent);
    }
}
