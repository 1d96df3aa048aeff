//! Which node a request is for, which agents are connected, and which addresses may be dialed without one.

pub mod decision;
pub mod dial_policy;
pub mod known_nodes;
pub mod pod_lookup;
pub mod registry;
pub mod routes;
