//! Library of the tunnel-agent: dials tunnel-server from the edge and connects its streams to the
//! node's ports.
//!
//! | module | contents |
//! |---|---|
//! | [`cli`] | verbs, flags and their help |
//! | [`address`] | the verb that gives an interface an address for a listener |
//! | [`config`] | layered settings, the typed configuration, the limits |
//! | [`app`] | start-up and run loop; the entry point for tests and other programs |
//! | [`diag`] | facts about an agent for a bug report |
//! | [`doctor`] | the verb that finds what keeps this node from being reached |
//! | [`join`] | the files of an agent on a systemd host, and the start of its service |
//! | `credentials` | key and certificate in the data directory |
//! | `enroll` | the first certificate: token and certificate request |
//! | `connector` | the sessions that take new streams, one per server: dial, happy eyeballs, replacement, upgrade to QUIC |
//! | [`assignment`] | which servers an agent holds sessions with: pure, and public for simulators |
//! | [`distance`] | which zones of servers are near: pure |
//! | [`backoff`] | time of the next dial: pure, and public so that simulators dial as agents do |
//! | [`search`] | when to dial again for a server that no other connector holds: pure |
//! | `session` | one session: admission, control stream, liveness, retirement, drain |
//! | `egress` | one stream: dial policy, dial, reply, relay |
//! | `handover` | the lock of the host, by which one agent of a node hands over to the next one |
//! | `ingress` | one connection to a target of the cloud: choice of a session, open, relay |
//! | [`policy`] | the dial policy: pure checks of resolved addresses |
//! | [`render`] | files that lead clients on the node to the API server |
//! | [`status`] | the list of sessions on the meta port, and the verb that shows it |
//! | `metrics` | metrics of the agent |
//! | `loop_detection` | connections of the agent to itself, which rules of the host can make |
//! | `secret`, `server_address` | values of settings that lower modules use |
//! | `error` | text of errors for log lines |
//!
//! Calls go `main` → `app` → `connector` → `session` → `egress`. `egress` and `policy` depend on no
//! transport but `Stream`. `session` registers its live sessions with `ingress`, which opens streams
//! over them.

pub mod address;
pub mod app;
pub mod cli;
pub mod config;
pub mod diag;
pub mod doctor;
pub mod join;
pub mod policy;
pub mod render;
pub mod status;

mod connector;
mod credentials;
mod egress;
mod enroll;
mod handover;
mod ingress;
mod loop_detection;
mod metrics;
mod node_ip;
mod proxy;
mod secret;
mod server_address;
mod session;
#[cfg(test)]
mod testing;

pub use connector::{assignment, backoff, distance, search};
#[cfg(feature = "test-util")]
pub use metrics::example_metrics;
#[cfg(feature = "test-util")]
pub use proxy::proxy_answer;
