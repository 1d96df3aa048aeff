//! Everything that tunnel-server and tunnel-agent must agree on.
//!
//! Two halves: [`wire`] is the format of what they say to each other, bytes and values without any I/O; the rest
//! (feature `io`) carries it: [`transport`] (sessions and streams over QUIC), [`tls`] and [`identity`] (who the peer
//! is), [`relay`] (bytes both ways), and [`process`] (signals, meta port, logs), which is not about the wire but is
//! shared by the two binaries.
//!
//! Features: `io` (default) everything but [`wire`]; `test-util` the in-process transport and the suite that every
//! transport must pass.

#![warn(missing_docs)]

pub mod wire;

#[cfg(feature = "io")]
mod buffers;
#[cfg(feature = "io")]
pub mod identity;
#[cfg(feature = "io")]
pub mod process;
#[cfg(feature = "io")]
pub mod relay;
#[cfg(feature = "io")]
pub mod tcp;
#[cfg(feature = "io")]
pub mod tls;
#[cfg(feature = "io")]
pub mod transport;
