//! A rate for each node.

use std::num::NonZeroU32;

use arc_swap::ArcSwap;
use governor::clock::DefaultClock;
use governor::state::keyed::HashMapStateStore;
use governor::{Quota, RateLimiter};
use tunnel_proto::wire::name::NodeName;

/// Rate limiter of what each node does. Only nodes with a valid credential are counted, so the number
/// of issued credentials bounds the number of entries.
#[derive(Debug)]
pub struct NodeRate(ArcSwap<Rate>);

type Rate = RateLimiter<NodeName, HashMapStateStore<NodeName>, DefaultClock>;

impl NodeRate {
    /// Creates a limiter that allows each node `burst` at once and `per_second` after that, at least
    /// one of each.
    pub fn new(per_second: u32, burst: u32) -> Self {
        let at_least_one = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        let quota = Quota::per_second(at_least_one(per_second)).allow_burst(at_least_one(burst));
        Self(ArcSwap::from_pointee(RateLimiter::hashmap(quota)))
    }

    /// Replaces the rate by another one. What nodes have used of the burst is forgotten.
    pub fn replace(&self, new: Self) {
        self.0.store(new.0.into_inner());
    }

    /// Counts one for the node, and returns whether the node may do it.
    pub fn allows(&self, node: &NodeName) -> bool {
        self.0.load().check_key(node).is_ok()
    }
}
