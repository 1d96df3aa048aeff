//! The other servers of this installation.

mod address;

pub use address::PeerAddress;
