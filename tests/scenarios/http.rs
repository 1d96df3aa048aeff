//! HTTP to the letter: what a caller sends, what a target gets, and what comes back.

mod bodies;
mod connections;
mod hostile;
pub(crate) mod kubelet;
mod limits;
mod selectors;
mod smuggling;
mod table;
mod upgrades;
