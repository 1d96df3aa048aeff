//! Connections of other servers that are ready, bounded for each server.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::watch;
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::name::ReplicaId;

/// The connections of all servers.
#[derive(Debug, Default)]
pub(super) struct ReadyConnections(Mutex<BTreeMap<ReplicaId, OfServer>>);

/// Connections of one server. A newer connection replaces an older one.
#[derive(Debug, Default)]
struct OfServer {
    /// Number of the newest connection.
    latest: watch::Sender<u64>,
    count: usize,
}

impl ReadyConnections {
    /// Returns the permit of a new connection, unless its server has too many.
    pub(super) fn acquire(&self, replica: &ReplicaId) -> Option<ReadyPermit<'_>> {
        let mut servers = self.0.lock();
        if servers.len() >= REPLICAS_MAX && !servers.contains_key(replica) {
            return None;
        }
        let of_server = servers.entry(replica.clone()).or_default();
        if of_server.count == READY_MAX {
            return None;
        }
        of_server.count += 1;
        of_server.latest.send_modify(|latest| *latest += 1);
        let number = *of_server.latest.borrow();
        Some(ReadyPermit {
            connections: self,
            replica: replica.clone(),
            number,
            latest: of_server.latest.subscribe(),
        })
    }
}

/// Permit of one connection.
#[derive(Debug)]
pub(super) struct ReadyPermit<'a> {
    connections: &'a ReadyConnections,
    replica: ReplicaId,
    number: u64,
    latest: watch::Receiver<u64>,
}

impl ReadyPermit<'_> {
    /// Waits for this many newer connections of the server.
    pub(super) async fn newer(&self, count: u64) {
        let mut latest = self.latest.clone();
        let _open = latest
            .wait_for(|latest| *latest >= self.number + count)
            .await;
    }
}

impl Drop for ReadyPermit<'_> {
    fn drop(&mut self) {
        let mut servers = self.connections.0.lock();
        if let Some(of_server) = servers.get_mut(&self.replica) {
            of_server.count -= 1;
            if of_server.count == 0 {
                servers.remove(&self.replica);
            }
        }
    }
}

/// Connections of one server at once that are ready: one, one that it replaces, and two that are
/// being closed.
const READY_MAX: usize = 4;
