//! State of the server: the data directory, the documents that servers of a cluster share, and tables
//! in memory that many tasks read.

pub mod data_dir;
pub mod dns_snapshot;
pub(crate) mod document;
pub(crate) mod state_store;
mod text;

pub use tunnel_tables as tables;

/// Reads a value of the store as each kind of row, for a fuzz target.
#[cfg(feature = "test-util")]
pub fn check_rows(content: &[u8]) {
    state_store::check_value::<crate::ca::revocation::OrderRow>(content);
    state_store::check_value::<crate::ca::tokens::StoredToken>(content);
    state_store::check_value::<crate::routing::known_nodes::KnownNode>(content);
    state_store::check_value::<Vec<std::net::IpAddr>>(content);
    let _any = state_store::json_text(content);
}
