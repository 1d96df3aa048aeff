//! Culvert's cloud side: accepts agents and forwards requests for edge nodes to them.
//!
//! A request passes [`ingress`] (a listener accepts, hyper reads the head), [`decision`](tunnel_routing::decision)
//! with [`routing::routes`] (which node, which port), [`authorize`](tunnel_routing::policy::authorize), and
//! [`routing::registry`] (the node's session opens a stream to the agent). An agent passes
//! [`session::agent_listener`] (handshake, or [`enrollment`](tunnel_ca::enrollment)), [`session`] (admission, control
//! stream) and [`routing::registry`]. [`tunnel_ca`] issues and revokes certificates, and [`tunnel_store`]
//! persists state. [`cluster`] follows Nodes and ports, writes the records ([`tunnel_dns`]) and shares the
//! state that all servers must agree on. [`egress`] serves streams that agents open to targets of
//! the cloud. Operators control a running server through [`admin`].

pub mod admin;
pub mod app;
pub mod cli;
pub mod cluster;
pub mod config;
pub mod dry_run;
pub mod egress;
pub mod failure_code;
pub mod ingress;
pub mod metrics;
pub mod node_rate;
pub mod outcome;
pub mod routing;
pub mod running;
pub mod session;

#[cfg(test)]
mod testing;
