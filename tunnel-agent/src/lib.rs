//! Culvert's edge side: dials out to tunnel-server and reaches the node's own ports for it.
//!
//! | module | what |
//! |---|---|
//! | [`cli`] | verbs, flags and their help |
//! | [`config`] | settings by layers, the typed configuration, the limits |
//! | [`app`] | builds the parts and runs them; the entry for tests and other programs |
//! | `credentials` | key and certificate in the data directory |
//! | `enroll` | the first certificate: token and certificate request |
//! | `connector` | which session takes new streams: dials, races transports, replaces what is silent, climbs back to QUIC |
//! | [`backoff`] | when a session is dialled again: pure, and public so that simulators dial as agents do |
//! | `session` | one session: admission, control stream, liveness, retirement, drain |
//! | `egress` | one stream: ceiling, dial, reply, relay |
//! | [`policy`] | the ceiling: pure checks of resolved addresses |
//! | `metrics` | what is counted |
//!
//! `main` → `app` → `connector` → `session` → `egress`; `egress` and `policy` know no transport but `Stream`.

pub mod app;
pub mod cli;
pub mod config;
pub mod policy;

mod connector;
mod credentials;
mod egress;
mod enroll;
mod metrics;
mod proxy;
mod session;
#[cfg(test)]
mod testing;

pub use connector::backoff;
