//! Raw clients for the tunnel's doors: they send exactly what a test says and tell exactly how the answer ended.

mod bytes;
mod door;
mod exchange;
mod raw_request;
mod tls;
mod upgrade;

pub use crate::targets::BodyEnd;
pub use bytes::{ByteStream, Reading};
pub use door::Door;
pub use exchange::{Exchange, HttpReply, KeepAliveClient, request};
pub use raw_request::RawRequest;
pub use tls::ClientTls;
pub use upgrade::{UpgradeClient, Upgraded};
