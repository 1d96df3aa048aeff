//! The connectors of an agent: one for each server that the agent holds a session with.
//!
//! The set starts with one connector, which takes any server. The servers report who they are and
//! which replicas there are. Then the set has up to `--replicas` connectors, each with a replica of
//! its own ([`assignment`](super::assignment)).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::debug;
use tunnel_proto::process::meta::ReadinessBlock;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::ReplicaId;

use super::Connector;
use super::assignment::{
    OTHER_ADDRESSES_MAX, assign_replicas, other_addresses, own_addresses, replicas_of_other_zones,
    wanted_replicas,
};
use super::backoff::START_SPREAD;
use super::live::LiveSessions;
use super::replicas::{ConnectorId, ReplicaTable};
use super::report::ConnectionLog;
use super::session_task::Dialers;
use super::shared::{Assignment, SetLink, Shared};
use super::status::SessionStatuses;
use crate::config::{ServerAddress, TransportChoice};
use crate::session::SessionContext;

/// The connectors of an agent, at most one for each replica.
///
/// Sessions are sticky. A connector keeps the replica that it reached first, also if another one is
/// preferred, until a preferred replica is free and has an address of its own. No connector leaves
/// a replica for one that another connector holds. Behind a load balancer a connector moves only to
/// another zone, if another connector has a session in its own.
pub(crate) struct ConnectorSet {
    dialers: Arc<Dialers>,
    transport: TransportChoice,
    /// Largest number of connectors.
    replicas: usize,
    context: Arc<SessionContext>,
    shared: Arc<Shared>,
    report: ConnectionLog,
    /// The configured servers, which every connector can dial.
    servers: Arc<[ServerAddress]>,
    /// Reported addresses that are not dialed, each with the reason.
    refused: Vec<String>,
    /// Whether several servers were reported at any time.
    has_several: bool,
    /// Connectors that have not retired.
    connectors: BTreeMap<ConnectorId, ActiveConnector>,
    next_id: u64,
    tasks: JoinSet<()>,
}

struct ActiveConnector {
    assignment: watch::Sender<Assignment>,
    retire: CancellationToken,
}

impl ConnectorSet {
    /// Creates a set that holds `readiness_block` until a session is ready.
    pub(crate) fn new(
        dialers: Arc<Dialers>,
        transport: TransportChoice,
        replicas: usize,
        context: Arc<SessionContext>,
        statuses: Arc<SessionStatuses>,
        readiness_block: Option<ReadinessBlock>,
    ) -> Self {
        let shared = Shared {
            replicas: ReplicaTable::default(),
            live: LiveSessions::new(statuses.readiness().clone(), readiness_block),
            statuses,
            transport: watch::Sender::new(None),
            unnamed: watch::Sender::new(None),
        };
        Self {
            report: ConnectionLog::new(context.node.clone()),
            servers: dialers.server_policy.configured().clone(),
            dialers,
            transport,
            replicas,
            context,
            shared: Arc::new(shared),
            refused: Vec::new(),
            has_several: false,
            connectors: BTreeMap::new(),
            next_id: 0,
            tasks: JoinSet::new(),
        }
    }

    /// Runs until a drain is over and every session has ended. Dropping the future cuts all
    /// sessions.
    pub(crate) async fn run(mut self) {
        let drain = self.context.shutdown.drain().clone();
        let shared = self.shared.clone();
        self.start_connector(Duration::ZERO);
        loop {
            tokio::select! {
                biased;
                joined = self.tasks.join_next() => match joined {
                    Some(Ok(())) => {}
                    // A bug, which must not leave the agent without one of its sessions.
                    Some(Err(error)) => {
                        if let Ok(panic) = error.try_into_panic() {
                            std::panic::resume_unwind(panic);
                        }
                    }
                    None => return,
                },
                () = shared.replicas.changed() => {
                    if !drain.is_cancelled() {
                        self.reconcile();
                    }
                }
            }
        }
    }

    /// Starts and retires connectors, and assigns replicas to them.
    fn reconcile(&mut self) {
        let generation = self.shared.replicas.members_generation();
        let members = self.members();
        let distances = self.shared.replicas.distances();
        let wanted = wanted_replicas(&self.context.node, &members, &distances, self.replicas);
        let sessions = self.shared.replicas.by_connector();
        let busy = self
            .connectors
            .keys()
            .filter(|id| sessions.contains_key(*id))
            .count();
        let count = wanted.len().max(busy).clamp(1, self.replicas.max(1));
        while self.connectors.len() > count && self.retire_connector(&wanted) {}
        while self.connectors.len() < count {
            self.start_connector(START_SPREAD.mul_f64(rand::random()));
        }
        let current: Vec<Option<ReplicaId>> = self
            .connectors
            .keys()
            .map(|id| sessions.get(id).cloned().flatten())
            .collect();
        let assigned = assign_replicas(&wanted, &current);
        // The reported members outlive the sessions: they may be the only servers that are left.
        // A server that was always alone is dialed at its configured address.
        self.has_several |= members.len() > 1;
        let others = if self.has_several { members.len() } else { 0 };
        let ranked = wanted_replicas(&self.context.node, &members, &distances, others);
        for (index, replica) in assigned.into_iter().enumerate() {
            let Some((connector_id, connector)) = self.connectors.iter().nth(index) else {
                continue;
            };
            let is_free = |id: &ReplicaId| {
                let mut others = sessions.iter().filter(|(other, _)| *other != connector_id);
                !others.any(|(_, held)| held.as_ref() == Some(id))
            };
            let free: Vec<_> = ranked.iter().filter(|id| is_free(id)).cloned().collect();
            let mut next = self.assignment(&members, replica, &free, generation);
            next.other_zones = replicas_of_other_zones(&members, &current, index).into();
            connector.assignment.send_if_modified(|assignment| {
                let is_new = *assignment != next;
                *assignment = next;
                is_new
            });
        }
    }

    /// Returns the members with the addresses that may be dialed. Logs the others when they change.
    fn members(&mut self) -> Vec<Member> {
        let reported = self.shared.replicas.members();
        let (members, mut refused) = self.dialers.server_policy.dialable_members(reported);
        let addresses: usize = members.iter().map(|member| member.addresses.len()).sum();
        if addresses > OTHER_ADDRESSES_MAX {
            refused.push(format!(
                "{addresses} addresses, and at most {OTHER_ADDRESSES_MAX} are dialed"
            ));
        }
        if self.refused != refused {
            self.report.refused_addresses(&refused);
            self.refused = refused;
        }
        members
    }

    /// Retires the newest connector without a session whose server stays. A session with a server
    /// that is stopping takes streams, so its connector retires only if another connector has a
    /// live session with one of the `wanted` replicas. Returns `false` if there is no such
    /// connector.
    fn retire_connector(&mut self, wanted: &[ReplicaId]) -> bool {
        let replicas = &self.shared.replicas;
        let sessions = replicas.by_connector();
        let idle = |id: &&ConnectorId| !sessions.contains_key(*id);
        let without_session = |id: &&ConnectorId| idle(id) && !replicas.has_session(**id);
        let spare = |id: &&ConnectorId| idle(id) && replicas.has_other_live(**id, wanted);
        let newest_first = || self.connectors.keys().rev();
        let id = newest_first()
            .find(without_session)
            .or_else(|| newest_first().find(spare))
            .copied();
        let Some(connector) = id.and_then(|id| self.connectors.remove(&id)) else {
            return false;
        };
        debug!(node = %self.context.node, "fewer replicas than sessions; retiring one");
        connector.retire.cancel();
        true
    }

    fn start_connector(&mut self, start_in: Duration) {
        let connector_id = ConnectorId(self.next_id);
        self.next_id += 1;
        let (assignment, assignments) = watch::channel(self.assignment(&[], None, &[], 0));
        let retire = CancellationToken::new();
        let link = SetLink {
            connector_id,
            shared: self.shared.clone(),
            assignments,
            retire: retire.clone(),
            start_in,
        };
        let connector = Connector::new(
            self.dialers.clone(),
            self.transport,
            self.context.clone(),
            self.report.clone(),
            link,
        );
        self.tasks.spawn(connector.run());
        let connector = ActiveConnector { assignment, retire };
        self.connectors.insert(connector_id, connector);
    }

    /// Returns an assignment of `replica`. The replicas `free` are dialed if it cannot be reached.
    fn assignment(
        &self,
        members: &[Member],
        replica: Option<ReplicaId>,
        free: &[ReplicaId],
        members_generation: u64,
    ) -> Assignment {
        let parse = |address: &str| address.parse::<ServerAddress>().ok();
        let mut servers: Vec<_> = replica
            .iter()
            .flat_map(|replica| own_addresses(members, replica))
            .filter_map(parse)
            .collect();
        let own_servers = servers.len();
        let others = other_addresses(members, free).into_iter();
        for server in self.servers.iter().cloned().chain(others.filter_map(parse)) {
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        Assignment {
            replica,
            servers: servers.into(),
            own_servers,
            other_zones: Arc::default(),
            members: members.len(),
            members_generation,
            losses: self.shared.replicas.losses(),
        }
    }
}
