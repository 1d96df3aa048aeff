//! Limits how often one node opens sessions, so that one credential cannot cause unlimited
//! admissions.

use std::num::NonZeroU32;

use governor::clock::DefaultClock;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use tunnel_proto::wire::name::NodeName;

/// Sessions per second that a node can open after its burst. An agent whose sessions are lost right
/// after admission opens about one per second.
const PER_SECOND: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

/// Rate limiter of the sessions that each node opens. Only nodes with a valid credential are
/// counted, so the number of issued credentials bounds the number of entries.
#[derive(Debug)]
pub struct AdmissionRate(RateLimiter<NodeName, HashMapStateStore<NodeName>, DefaultClock>);

impl AdmissionRate {
    /// Creates a limiter that allows each node `burst` sessions at once
    /// (`limits.admissionsPerNode`, at least one).
    #[must_use]
    pub fn new(burst: u32) -> Self {
        let burst = NonZeroU32::new(burst).unwrap_or(NonZeroU32::MIN);
        Self(RateLimiter::hashmap(
            Quota::per_second(PER_SECOND).allow_burst(burst),
        ))
    }

    /// Reason that the server sends to a node that opens sessions too fast.
    pub const REFUSAL: &str = "sessions are opened too fast (limits.admissionsPerNode); is the agent restarted in a loop, or its credential in use elsewhere?";

    /// Counts a session of the node and returns whether the node may open it.
    #[must_use]
    pub fn allows(&self, node: &NodeName) -> bool {
        self.0.check_key(node).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_that_opens_sessions_in_a_loop_is_refused_and_others_are_not() {
        let rate = AdmissionRate::new(20);
        let loops: NodeName = "worker-1".parse().unwrap();
        let allowed = (0..1500).filter(|_| rate.allows(&loops)).count();
        // Allows for two more sessions per second that the loop takes on a slow machine.
        assert!((20..40).contains(&allowed), "{allowed} of 1500 sessions");
        assert!(rate.allows(&"worker-2".parse().unwrap()));
    }
}
