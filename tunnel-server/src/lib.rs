//! Culvert's cloud side: accepts agents and passes requests for edge nodes to them.
//!
//! The way of a request: [`ingress`] (a door accepts, hyper reads the head) → [`ingress::target`] with [`routes`] and
//! [`policy`] (which node, which port) → [`registry`] (the node's session opens a stream) → the agent.
//! The way of an agent: [`acceptor`] (handshake, or [`enroll`]) → [`session`] (admission, control stream) → [`registry`].
//! State is in the data directory ([`data`]): the CA ([`issuer`]), join tokens ([`tokens`]), known nodes ([`nodes`]), revocations
//! ([`revoked`]). In a cluster, [`attest`] asks whose node a ServiceAccount token proves, and [`controllers`] follow its Nodes and ports and write the records ([`dns`]).
//! ([`revoked`]). In a cluster, [`controllers`] follow its Nodes and ports, write the records ([`dns`]), and share what
//! all servers must agree on.
//! Operators speak to a running server through [`admin`], with the verbs in [`verbs`].

pub mod acceptor;
pub mod admin;
pub mod app;
pub mod attest;
pub mod callers;
pub mod cli;
pub mod config;
#[cfg(feature = "kubernetes")]
pub mod controllers;
pub mod data;
pub mod distrusted;
pub mod dns;
pub mod enroll;
pub mod ingress;
pub mod issuer;
pub mod metrics;
pub mod nodes;
pub mod pods;
pub mod policy;
pub mod registry;
pub mod renew;
pub mod revoked;
pub mod routes;
pub mod session;
mod shared;
pub mod status;
pub mod targets;
pub mod tokens;
pub mod unix;
pub mod verbs;

#[cfg(test)]
mod testing;
