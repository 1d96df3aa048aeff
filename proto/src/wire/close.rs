//! The messages of the close stream, of a transport without frames for them (h2). QUIC's
//! CONNECTION_CLOSE carries code and reason, and its datagrams the reports about memory.

use bytes::BytesMut;
use prost::Message;

use super::code::CloseCode;
use super::frame::{self, STREAM_MESSAGE_MAX};
use super::header::one_line;
use super::pb;

/// A message of the close stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionMessage {
    /// The sender has no memory for more of what the sources with the most unread data send.
    Short,
    /// A stream waits or was refused at the sender, because the receiver has no memory for it.
    Waiting,
    /// The session ends, for this reason.
    Close(SessionClose),
}

impl SessionMessage {
    /// Appends the framed message. The reason of a close is truncated to one line that fits.
    pub fn encode(&self, out: &mut BytesMut) {
        let message = match self {
            Self::Short => pb::SessionClose {
                is_short: true,
                ..pb::SessionClose::default()
            },
            Self::Waiting => pb::SessionClose {
                is_waiting: true,
                ..pb::SessionClose::default()
            },
            Self::Close(close) => pb::SessionClose {
                code: close.code.number(),
                reason: one_line(&close.reason),
                ..pb::SessionClose::default()
            },
        };
        // The message cannot be too large: `one_line` bounds the reason far below the cap.
        let _fits = frame::encode(&message, STREAM_MESSAGE_MAX, out);
    }

    /// Takes a message from the received bytes. Returns `None` if it is not complete. Bytes that are
    /// not a valid message count as a close with a protocol error.
    pub fn take(buffer: &mut BytesMut) -> Option<Self> {
        let broken = || SessionClose {
            code: CloseCode::Protocol,
            reason: "malformed close message".to_owned(),
        };
        match frame::take(buffer, STREAM_MESSAGE_MAX) {
            Ok(None) => None,
            Ok(Some(frame)) => Some(match pb::SessionClose::decode(frame) {
                Ok(message) if message.is_short => Self::Short,
                Ok(message) if message.is_waiting => Self::Waiting,
                Ok(message) => Self::Close(SessionClose {
                    code: CloseCode::from_number(message.code),
                    reason: one_line(&message.reason),
                }),
                Err(_malformed) => Self::Close(broken()),
            }),
            Err(_malformed) => Some(Self::Close(broken())),
        }
    }
}

/// The code and reason of a close.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionClose {
    /// The reason for programs.
    pub code: CloseCode,
    /// A one-line reason for people.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_round_trips_in_pieces_and_rubbish_is_a_close_too() {
        let close = SessionMessage::Close(SessionClose {
            code: CloseCode::Draining,
            reason: "going away".into(),
        });
        let mut whole = BytesMut::new();
        close.encode(&mut whole);
        let mut got = BytesMut::new();
        SessionMessage::Short.encode(&mut got);
        assert_eq!(SessionMessage::take(&mut got), Some(SessionMessage::Short));
        for (index, byte) in whole.iter().enumerate() {
            got.extend_from_slice(&[*byte]);
            let taken = SessionMessage::take(&mut got);
            assert_eq!(taken.is_some(), index + 1 == whole.len());
            assert!(taken.is_none_or(|taken| taken == close));
        }
        let mut rubbish = BytesMut::from(&[0xff; 16][..]);
        let Some(SessionMessage::Close(close)) = SessionMessage::take(&mut rubbish) else {
            panic!("rubbish ends the session");
        };
        assert_eq!(close.code, CloseCode::Protocol);
    }
}
