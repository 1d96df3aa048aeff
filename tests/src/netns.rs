//! Network namespaces: a cloud and two edge sites that have the same address and can only dial out,
//! and one with a virtual address in front of several servers.

mod namespace;
mod service;
mod topology;

pub use namespace::Namespace;
pub use service::{IpProtocol, Route, in_service_namespace, publish_routes, service_address};
pub use topology::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, NODES, Topology};
