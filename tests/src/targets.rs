//! Fake servers that the tunnel's agent dials: exporters, a kubelet and raw TCP targets.
//!
//! Each binds a free port of 127.0.0.1 by default, counts its connections ([`Traffic`]) and stops
//! on drop.

mod accept;
mod answers;
mod body;
mod byte_stream;
mod data;
mod exporter;
mod head;
mod hostile;
mod impostor;
mod kubelet;
mod line_stream;
mod raw;
mod recorder;
mod script;
mod tls;

pub use accept::Traffic;
pub use body::BodyEnd;
pub use byte_stream::ByteStream;
pub use data::{Sha256, deterministic_bytes, repeated_block, sha256_hex};
pub use exporter::Exporter;
pub use hostile::{HostileAction, HostileTarget};
pub use impostor::{Captured, ImpostorTarget};
pub use kubelet::{Access, FakeKubelet, refusal};
pub use raw::{EchoTarget, HalfCloseTarget, ResetTarget, SilentTarget};
pub use recorder::{RecordedInput, RecordingTarget};
pub use script::Received;
pub use tls::TargetTls;

pub(crate) use body::{BodyReader, Framing};
pub(crate) use data::websocket_accept;
pub(crate) use head::{Head, first_value};
pub(crate) use tls::signatures_by;
