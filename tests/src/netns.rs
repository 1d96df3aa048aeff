//! Network namespaces: a cloud and two edge sites that have the same address and can only dial out.

mod namespace;
mod topology;

pub use namespace::Namespace;
pub use topology::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, NODES, Topology};
