//! Bounds how often one node opens sessions: a credential must not buy unlimited admissions.

use std::num::NonZeroU32;

use governor::clock::DefaultClock;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use tunnel_proto::wire::name::NodeName;

/// Further sessions a second. An agent whose sessions are lost as soon as they are admitted opens about one.
const PER_SECOND: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

/// Counts the sessions that each node opens. Only nodes with a valid credential are counted, so their number is bounded by the
/// credentials that were issued.
#[derive(Debug)]
pub struct AdmissionRate(RateLimiter<NodeName, HashMapStateStore<NodeName>, DefaultClock>);

impl AdmissionRate {
    /// Allows each node `burst` sessions at once (`limits.admissionsPerNode`; at least one).
    #[must_use]
    pub fn new(burst: u32) -> Self {
        let burst = NonZeroU32::new(burst).unwrap_or(NonZeroU32::MIN);
        Self(RateLimiter::hashmap(
            Quota::per_second(PER_SECOND).allow_burst(burst),
        ))
    }

    /// What a node is answered that opens sessions too fast.
    pub const REFUSAL: &str = "sessions are opened too fast (limits.admissionsPerNode); is the agent restarted in a loop, or its credential in use elsewhere?";

    /// Returns whether the node may open another session, and counts it.
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
        // Two more for each second that the loop takes on a slow machine.
        assert!((20..40).contains(&allowed), "{allowed} of 1500 sessions");
        assert!(rate.allows(&"worker-2".parse().unwrap()));
    }
}
