//! Streams as sides of a relay, and relays between two streams.

use crate::relay::{RelayEnd, RelayIo, RelayOutcome, RelaySide, end_cut, relay};
use crate::stream_record::{Relayed, StreamEnd};
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

/// Relays between a stream that another server has opened and one to the agent, until both have ended
/// or one was cut. Dropping the future cuts both.
pub async fn relay_streams(mut incoming: Stream, mut opened: Stream) -> Relayed {
    let relayed = forward(&mut incoming, &mut opened).await;
    let refusal = opened.passed_refusal().cloned();
    let (end, detail) = match relayed.end {
        RelayEnd::Clean => (StreamEnd::Ok, String::new()),
        RelayEnd::ReaderClosed(_) => (StreamEnd::ReaderClosed, String::new()),
        RelayEnd::Cut(side, cut) => {
            end_cut(incoming, opened, side, &cut).await;
            let end = match side {
                _ if cut.is_for_memory() => StreamEnd::ReaderStalled,
                RelaySide::Left => StreamEnd::CutByPeer,
                RelaySide::Right => StreamEnd::CutByTarget,
            };
            (end, cut.error.to_string())
        }
    };
    let (end, detail) = match refusal {
        Some(refusal) => (StreamEnd::Refused(refusal.code), refusal.detail),
        None => (end, detail),
    };
    Relayed {
        end,
        bytes_in: relayed.right_to_left,
        bytes_out: relayed.left_to_right,
        detail,
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
