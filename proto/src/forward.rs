//! Streams as sides of a relay, and relays between two streams.

use crate::relay::{RelayIo, RelayOutcome, relay};
use crate::transport::Stream;

impl RelayIo for Stream {
    type Io = Self;

    fn io(&mut self) -> &mut Self {
        self
    }

    fn stream(&mut self) -> Option<&mut Self> {
        Some(self)
    }
}

/// Relays a stream that another server has opened, over a stream to the agent. The agent's reply
/// passes like all other bytes, so that nobody waits for it here. Bytes of the opener that are right
/// behind its header do not wait for it either.
///
/// If the future is dropped, the caller must drop both sides as after a cut.
pub async fn forward(incoming: &mut Stream, opened: &mut Stream) -> RelayOutcome {
    incoming.leave_reply();
    opened.leave_reply();
    relay(incoming, opened).await
}
