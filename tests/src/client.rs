//! Raw clients for the tunnel's listeners. They send exactly the bytes of a test and report exactly
//! how the answer ended.

mod byte_stream;
mod connect;
mod endpoint;
mod exchange;
mod raw_request;
mod tls;
mod upgrade;

pub use crate::targets::{BodyEnd, ByteStream};
pub use byte_stream::Reading;
pub use connect::{Bytes, EgressDialer, Tunnel, ask_through, over_tls};
pub use endpoint::Endpoint;
pub use exchange::{Exchange, HttpReply, KeepAliveClient, request};
pub use raw_request::RawRequest;
pub use tls::{ClientCertificate, ClientTls};
pub use upgrade::{UpgradeClient, Upgraded, WEBSOCKET_KEY};

#[cfg(test)]
mod tests;
