//! The message that ends a session on a transport without a frame for it (h2). QUIC's
//! CONNECTION_CLOSE carries code and reason.

use bytes::BytesMut;
use prost::Message;

use super::code::CloseCode;
use super::frame::{self, STREAM_MESSAGE_MAX};
use super::header::one_line;
use super::pb;

/// The code and reason of a close.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionClose {
    /// The reason for programs.
    pub code: CloseCode,
    /// A one-line reason for people.
    pub reason: String,
}

impl SessionClose {
    /// Appends the framed message. The reason is truncated to one line that fits.
    pub fn encode(&self, out: &mut BytesMut) {
        let message = pb::SessionClose {
            code: self.code.number(),
            reason: one_line(&self.reason),
        };
        // The message cannot be too large: `one_line` bounds the reason far below the cap.
        let _fits = frame::encode(&message, STREAM_MESSAGE_MAX, out);
    }

    /// Takes the message from the received bytes. Returns `None` if it is not complete. Bytes that
    /// are not a valid message count as a close with a protocol error.
    pub fn take(buffer: &mut BytesMut) -> Option<Self> {
        let broken = || Self {
            code: CloseCode::Protocol,
            reason: "malformed close message".to_owned(),
        };
        match frame::take(buffer, STREAM_MESSAGE_MAX) {
            Ok(None) => None,
            Ok(Some(frame)) => Some(pb::SessionClose::decode(frame).map_or_else(
                |_malformed| broken(),
                |message| Self {
                    code: CloseCode::from_number(message.code),
                    reason: one_line(&message.reason),
                },
            )),
            Err(_malformed) => Some(broken()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_round_trips_in_pieces_and_rubbish_is_a_close_too() {
        let close = SessionClose {
            code: CloseCode::Draining,
            reason: "going away".into(),
        };
        let mut whole = BytesMut::new();
        close.encode(&mut whole);
        let mut got = BytesMut::new();
        for (index, byte) in whole.iter().enumerate() {
            got.extend_from_slice(&[*byte]);
            let taken = SessionClose::take(&mut got);
            assert_eq!(taken.is_some(), index + 1 == whole.len());
            assert!(taken.is_none_or(|taken| taken == close));
        }
        let mut rubbish = BytesMut::from(&[0xff; 16][..]);
        let close = SessionClose::take(&mut rubbish).unwrap();
        assert_eq!(close.code, CloseCode::Protocol);
    }
}
