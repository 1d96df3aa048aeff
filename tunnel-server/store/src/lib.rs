//! State of the server: the data directory, its store, the known nodes in it, and the documents that
//! servers of a cluster share. The crate knows neither the CA nor routing.

pub mod data_dir;
pub mod document;
pub mod known_nodes;
pub mod state_store;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
mod text;

/// Reads a value of the store as the kinds of rows of this crate, for a fuzz target.
#[cfg(feature = "test-util")]
pub fn check_rows(content: &[u8]) {
    state_store::check_value::<known_nodes::KnownNode>(content);
    state_store::check_value::<Vec<std::net::IpAddr>>(content);
    let _any = state_store::json_text(content);
}
