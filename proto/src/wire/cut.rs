//! The message that orders a cut behind the bytes of its stream on a transport whose resets discard
//! bytes (QUIC).

use bytes::BytesMut;
use prost::Message;

use super::code::ResetCode;
use super::frame::{self, FrameError};
use super::pb;

/// Cap of the message, in bytes. Three varints and their tags are 28.
pub const CUT_MESSAGE_MAX: usize = 64;

/// The announcement that the sender has cut a stream behind the bytes before `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutAnnouncement {
    /// The id of the stream in the QUIC connection.
    pub stream: u64,
    /// Bytes that the sender has written to the stream, its header or reply included.
    pub offset: u64,
    /// The reason for programs.
    pub code: ResetCode,
}

impl CutAnnouncement {
    /// Appends the framed message.
    ///
    /// # Errors
    /// Never: the message is smaller than [`CUT_MESSAGE_MAX`].
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        let message = pb::StreamCut {
            stream: self.stream,
            offset: self.offset,
            code: self.code.number(),
        };
        frame::encode(&message, CUT_MESSAGE_MAX, out)
    }

    /// Decodes the content of one frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`].
    pub fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let message = pb::StreamCut::decode(frame)?;
        Ok(Self {
            stream: message.stream,
            offset: message.offset,
            code: ResetCode::from_number(message.code),
        })
    }
}
