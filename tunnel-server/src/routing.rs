//! Routing: the node that a request is for, the sessions of connected agents, and the addresses
//! that the server may dial without an agent.

pub mod decision;
pub mod destination;
pub mod dial_policy;
pub mod directory;
pub mod known_nodes;
pub mod peers;
pub mod pod_lookup;
pub mod registry;
pub mod routes;
pub mod via;
