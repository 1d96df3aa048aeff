//! HTTP on the wire: what a caller sends, what a target receives, and what the caller gets back.

mod accepted;
mod bodies;
mod connections;
mod hostile;
pub(crate) mod kubelet;
mod limits;
mod selectors;
mod smuggling;
mod table;
mod upgrades;
