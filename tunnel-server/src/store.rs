//! State of the server: the data directory, the documents that servers of a cluster share, and tables
//! in memory that many tasks read.

pub mod data_dir;
pub(crate) mod document;
pub(crate) mod file_document;
pub(crate) mod snapshot;
pub mod tables;
mod text;
