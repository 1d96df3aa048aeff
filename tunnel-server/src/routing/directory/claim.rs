//! Which of two servers gives up an agent that both have admitted.

use std::time::SystemTime;

use tunnel_proto::wire::name::ReplicaId;

use super::millis;

/// The claim of a server on a node, for two admissions that crossed. Ordered by the time of the
/// admission, then by the server's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim<'a> {
    /// In milliseconds since the Unix epoch. Both ends must compare the same values, and the wire
    /// has milliseconds.
    since: u64,
    replica: &'a ReplicaId,
}

impl<'a> Claim<'a> {
    /// Creates the claim of a server that admitted the agent at `since`.
    #[must_use]
    pub fn new(since: SystemTime, replica: &'a ReplicaId) -> Self {
        Self {
            since: millis(since),
            replica,
        }
    }

    /// Returns whether this server must close its sessions of the node in favor of the agent process
    /// that `other` admitted: the later admission yields. Both ends decide alike.
    #[must_use]
    pub fn yields_to(&self, other: &Self) -> bool {
        self > other
    }
}
