//! Length-delimited framing of protobuf messages with a hard cap. All functions are pure and work
//! on buffers.
//!
//! A frame is the message's length as a protobuf varint, followed by the message. The decoder
//! checks the length against the cap before it allocates anything (see CVE-2026-62370).

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;

/// Cap of a stream header or reply, in bytes. A header is a few dozen bytes, and a host name adds
/// at most 253.
pub const STREAM_MESSAGE_MAX: usize = 4 * 1024;
/// Cap of a control message, in bytes. Welcome is the largest, because it lists servers.
pub const CONTROL_MESSAGE_MAX: usize = 64 * 1024;
/// Cap of a message between servers, in bytes.
pub const PEER_MESSAGE_MAX: usize = 32 * 1024;
/// Cap of an enrollment message, in bytes (a CSR or a certificate chain with its roots).
pub const ENROLL_MESSAGE_MAX: usize = 16 * 1024;

/// Maximum bytes of a length prefix. A longer prefix cannot be below any cap (5 x 7 bits hold 32
/// bits).
const PREFIX_MAX: usize = 5;

/// The reason why bytes are not a valid frame.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    /// The announced length exceeds the cap.
    #[error("message of {announced} bytes exceeds the limit of {limit}")]
    TooLarge {
        /// The length in the prefix.
        announced: u64,
        /// The maximum length of the message, in bytes.
        limit: usize,
    },
    /// The length prefix is not a varint of at most 32 bits.
    #[error("length prefix is malformed")]
    BadPrefix,
    /// The message does not decode.
    #[error("message is malformed")]
    Malformed(#[from] prost::DecodeError),
    /// The message decodes, but a field is invalid.
    #[error("message is invalid: {0}")]
    Invalid(&'static str),
}

/// Appends one frame to `out`.
///
/// # Errors
/// [`FrameError::TooLarge`] when the message exceeds `limit`. In this case nothing is appended.
pub(crate) fn encode<M: Message>(
    message: &M,
    limit: usize,
    out: &mut BytesMut,
) -> Result<(), FrameError> {
    let length = message.encoded_len();
    if length > limit {
        return Err(FrameError::TooLarge {
            announced: length as u64,
            limit,
        });
    }
    out.reserve(PREFIX_MAX + length);
    prost::encode_length_delimiter(length, out).map_err(|_full| FrameError::BadPrefix)?;
    message
        .encode(out)
        .map_err(|_full| FrameError::Invalid("buffer too small"))?;
    Ok(())
}

/// Takes the first frame from `buffer`. Returns `None` if the frame is not complete yet.
///
/// # Errors
/// [`FrameError`]. The buffer is not usable after an error.
pub fn take(buffer: &mut BytesMut, limit: usize) -> Result<Option<Bytes>, FrameError> {
    let Some((length, prefix)) = parse_prefix(buffer, limit)? else {
        return Ok(None);
    };
    if buffer.len() < prefix + length {
        return Ok(None);
    }
    buffer.advance(prefix);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// Returns how many bytes the caller may read next without reading beyond the first frame. The
/// result is 1 while the prefix is incomplete.
///
/// # Errors
/// As in [`take`].
pub fn bytes_needed(buffer: &[u8], limit: usize) -> Result<usize, FrameError> {
    match parse_prefix(buffer, limit)? {
        None => Ok(1),
        Some((length, prefix)) => Ok((prefix + length).saturating_sub(buffer.len())),
    }
}

fn parse_prefix(buffer: &[u8], limit: usize) -> Result<Option<(usize, usize)>, FrameError> {
    let mut length: u64 = 0;
    for (index, byte) in buffer.iter().take(PREFIX_MAX).enumerate() {
        length |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return match usize::try_from(length) {
                Ok(fits) if fits <= limit => Ok(Some((fits, index + 1))),
                _ => Err(FrameError::TooLarge {
                    announced: length,
                    limit,
                }),
            };
        }
    }
    if buffer.len() >= PREFIX_MAX {
        Err(FrameError::BadPrefix)
    } else {
        Ok(None)
    }
}

/// Appends a length prefix without a message, for tests that announce more than they send.
#[cfg(any(test, feature = "test-util"))]
pub fn encode_length_prefix(length: u64, out: &mut BytesMut) {
    // Writing to a growing buffer cannot fail.
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let _infallible = prost::encode_length_delimiter(length, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::pb;

    fn reply(detail: &str) -> pb::StreamReply {
        pb::StreamReply {
            code: 7,
            detail: detail.into(),
            ..pb::StreamReply::default()
        }
    }

    #[test]
    fn frame_survives_any_split_of_its_bytes() {
        let (mut whole, sent) = (BytesMut::new(), reply(&"x".repeat(300)));
        encode(&sent, STREAM_MESSAGE_MAX, &mut whole).unwrap();
        for cut in 0..whole.len() {
            let mut buffer = BytesMut::from(&whole[..cut]);
            let early = take(&mut buffer, STREAM_MESSAGE_MAX).unwrap();
            assert_eq!(early, None, "cut at {cut}");
            buffer.extend_from_slice(&whole[cut..]);
            buffer.extend_from_slice(b"next");
            let frame = take(&mut buffer, STREAM_MESSAGE_MAX).unwrap().unwrap();
            assert_eq!(pb::StreamReply::decode(frame).unwrap(), sent);
            assert_eq!(&buffer[..], b"next");
        }
    }

    #[test]
    fn reading_what_is_missing_never_reads_beyond_the_frame() {
        let mut whole = BytesMut::new();
        encode(&reply(&"x".repeat(200)), STREAM_MESSAGE_MAX, &mut whole).unwrap();
        let mut at = 0;
        while let next @ 1.. = bytes_needed(&whole[..at], STREAM_MESSAGE_MAX).unwrap() {
            at += next;
        }
        assert_eq!(at, whole.len());
    }

    #[test]
    fn length_above_the_cap_is_refused_before_the_body_arrives() {
        let take_announced = |announced| {
            let mut buffer = BytesMut::new();
            encode_length_prefix(announced, &mut buffer);
            take(&mut buffer, 100)
        };
        for length in [u64::from(u32::MAX), 101] {
            let (announced, limit) = (length, 100);
            let error = take_announced(length).unwrap_err();
            assert_eq!(error, FrameError::TooLarge { announced, limit });
        }
        assert_eq!(take_announced(100).unwrap(), None);
    }

    #[test]
    fn endless_prefix_is_refused() {
        let mut buffer = BytesMut::from(&[0xff; 5][..]);
        assert_eq!(take(&mut buffer, 100), Err(FrameError::BadPrefix));
    }

    #[test]
    fn message_above_the_cap_is_not_sent() {
        let mut out = BytesMut::new();
        let error = encode(&reply(&"x".repeat(5000)), STREAM_MESSAGE_MAX, &mut out).unwrap_err();
        assert!(matches!(error, FrameError::TooLarge { .. }));
        assert!(out.is_empty());
    }
}
