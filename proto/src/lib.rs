//! Everything that tunnel-server and tunnel-agent must agree on.
//!
//! The crate has two parts. [`wire`] defines the message format, as bytes and values without any
//! I/O. The other modules need the feature `io`: [`transport`] (sessions and streams over QUIC),
//! [`session`] (control messages and liveness of a session), [`tls`] and [`identity`]
//! (authentication of the peer), [`relay`] (copying bytes in both directions), [`forward`] (streams
//! of other servers), [`dial`] and [`egress`] (the connection to a target), [`stream_server`],
//! [`stream_record`], [`open_record`] and [`audit`] (streams from their header to their record and
//! its sinks).
//!
//! Features:
//! - `io` (default): everything except [`wire`].
//! - `test-util`: the in-process transport, the suite that every transport must pass, and bounds of
//!   tests by the speed of the machine.

#![warn(missing_docs)]

pub mod wire;

#[cfg(feature = "io")]
pub mod audit;
#[cfg(feature = "io")]
mod buffers;
#[cfg(any(test, feature = "test-util"))]
pub mod calibration;
#[cfg(feature = "io")]
pub mod dial;
#[cfg(feature = "io")]
pub mod egress;
#[cfg(feature = "io")]
pub mod forward;
#[cfg(feature = "io")]
pub mod identity;
#[cfg(feature = "io")]
pub mod open_record;
#[cfg(feature = "io")]
pub mod relay;
#[cfg(feature = "io")]
pub mod session;
#[cfg(feature = "io")]
pub mod stream_record;
#[cfg(feature = "io")]
pub mod stream_server;
#[cfg(feature = "io")]
pub mod tcp;
#[cfg(feature = "io")]
pub mod tls;
#[cfg(feature = "io")]
pub mod transport;
