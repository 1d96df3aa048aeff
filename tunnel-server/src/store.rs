//! Persistent state of the server: the data directory, and the documents that servers of a cluster
//! share.

pub mod data_dir;
pub(crate) mod document;
pub(crate) mod file_document;
pub(crate) mod snapshot;
mod text;
