//! Culvert's test harness: fake targets, raw clients, real tools, namespaces and the processes
//! under test.
//!
//! Scenarios are in `tests/scenarios` (one test binary), the guided tour in `tests/demo`.

pub mod access_lines;
pub mod apiserver;
pub mod audit_events;
pub mod ca;
pub mod checks;
pub mod client;
pub mod cluster;
pub mod dns;
pub mod env;
pub mod eventually;
pub mod fakes;
pub mod faults;
pub mod fuzz;
pub mod gear;
pub mod guides;
pub mod link;
pub mod load;
pub mod manifests;
pub mod metrics;
pub mod mutation;
pub mod netns;
pub mod process;
pub mod prometheus;
pub mod reference;
pub mod scripted;
pub mod spdy;
pub mod ssh;
pub mod stats;
pub mod strict_http;
pub mod targets;
pub mod tools;
pub mod websocket;
