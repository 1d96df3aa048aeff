//! The messages of the wire format. Accepted messages survive a round trip.

use anyhow::{Context, Result, ensure};
use bytes::BytesMut;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::control::{ControlMessage, Message as _};
use tunnel_proto::wire::cut::{CUT_MESSAGE_MAX, CutAnnouncement};
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest};
use tunnel_proto::wire::frame::{
    self, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX, FrameError, PEER_MESSAGE_MAX, STREAM_MESSAGE_MAX,
};
use tunnel_proto::wire::golden;
use tunnel_proto::wire::header::{StreamHeader, StreamReply};
use tunnel_proto::wire::peer::PeerMessage;

/// Returns the captured frames.
fn frames<T>(captures: &[(impl AsRef<str>, T)]) -> Vec<Vec<u8>> {
    let frames = captures
        .iter()
        .map(|(capture, _)| golden::bytes(capture.as_ref()));
    frames.collect()
}

/// Returns the contents of the captured frames.
fn contents<T>(captures: &[(impl AsRef<str>, T)]) -> Result<Vec<Vec<u8>>> {
    let contents = frames(captures).into_iter().map(|frame| {
        content(CONTROL_MESSAGE_MAX, |out| {
            out.extend_from_slice(&frame);
            Ok(())
        })
    });
    contents.collect()
}

/// Returns the content of the frame that `encode` appends.
fn content(
    limit: usize,
    encode: impl FnOnce(&mut BytesMut) -> Result<(), FrameError>,
) -> Result<Vec<u8>> {
    let mut framed = BytesMut::new();
    encode(&mut framed)?;
    let taken = frame::take(&mut framed, limit)?;
    Ok(taken.context("a whole frame")?.to_vec())
}

pub(super) fn framed() -> Result<Vec<Vec<u8>>> {
    let mut corpus = frames(&golden::control_captures());
    corpus.push(corpus.concat());
    corpus.push(vec![0xff; 12]);
    Ok(corpus)
}

/// Takes frames from input that arrives in pieces, as from a network.
pub(super) fn check_frames(input: &[u8]) -> Result<()> {
    let mut buffer = BytesMut::new();
    let mut taken = 0;
    for piece in input.chunks(1 + input.len() / 3) {
        buffer.extend_from_slice(piece);
        loop {
            match frame::take(&mut buffer, ENROLL_MESSAGE_MAX) {
                Ok(Some(frame)) => {
                    ensure!(frame.len() <= ENROLL_MESSAGE_MAX, "{} bytes", frame.len());
                    taken += frame.len();
                }
                Ok(None) => {
                    let missing = frame::bytes_needed(&buffer, ENROLL_MESSAGE_MAX)?;
                    ensure!(
                        (1..=ENROLL_MESSAGE_MAX + 5).contains(&missing),
                        "{missing} bytes are missing"
                    );
                    break;
                }
                Err(_refused) => return Ok(()),
            }
        }
    }
    ensure!(taken + buffer.len() <= input.len(), "more than the input");
    let capacity = buffer.capacity();
    ensure!(
        capacity <= 2 * input.len() + 64,
        "an announced length reserves {capacity} bytes"
    );
    Ok(())
}

pub(super) fn controls() -> Result<Vec<Vec<u8>>> {
    contents(&golden::control_captures())
}

pub(super) fn check_control(input: &[u8]) -> Result<()> {
    let Ok(message) = ControlMessage::decode(input) else {
        return Ok(());
    };
    let again = content(CONTROL_MESSAGE_MAX, |out| message.encode(out))?;
    ensure!(ControlMessage::decode(&again)? == message, "{message:?}");
    Ok(())
}

pub(super) fn peers() -> Result<Vec<Vec<u8>>> {
    contents(&golden::peer_captures())
}

pub(super) fn check_peer(input: &[u8]) -> Result<()> {
    let Ok(message) = PeerMessage::decode(input) else {
        return Ok(());
    };
    let again = content(PEER_MESSAGE_MAX, |out| message.encode(out))?;
    ensure!(PeerMessage::decode(&again)? == message, "{message:?}");
    Ok(())
}

pub(super) fn enrollments() -> Result<Vec<Vec<u8>>> {
    let mut corpus = contents(&golden::enroll_request_captures())?;
    corpus.extend(contents(&golden::enroll_reply_captures())?);
    Ok(corpus)
}

pub(super) fn check_enrollment(input: &[u8]) -> Result<()> {
    if let Ok(request) = EnrollRequest::decode(input) {
        let proof = request.proof.as_ref();
        let chain: usize = proof.map_or(0, |proof| proof.chain.iter().map(Vec::len).sum());
        let bytes = request.token.len() + request.csr.len() + chain;
        ensure!(bytes <= input.len(), "{bytes} bytes");
        let again = content(ENROLL_MESSAGE_MAX, |out| request.encode(out))?;
        ensure!(EnrollRequest::decode(&again)? == request, "another request");
    }
    if let Ok(reply) = EnrollReply::decode(input) {
        let again = content(ENROLL_MESSAGE_MAX, |out| reply.encode(out))?;
        ensure!(EnrollReply::decode(&again)? == reply, "{reply:?}");
    }
    Ok(())
}

pub(super) fn streams() -> Result<Vec<Vec<u8>>> {
    let mut corpus = contents(&golden::header_captures())?;
    corpus.extend(contents(&golden::reply_captures())?);
    // No capture has a text with control characters.
    let forged = StreamReply::refused(RefusalCode::BadHeader, "refused\r\nby policy");
    corpus.push(content(STREAM_MESSAGE_MAX, |out| forged.encode(out))?);
    Ok(corpus)
}

pub(super) fn check_stream(input: &[u8]) -> Result<()> {
    if let Ok(header) = StreamHeader::decode(input) {
        let again = content(STREAM_MESSAGE_MAX, |out| header.encode(out))?;
        ensure!(StreamHeader::decode(&again)? == header, "{header:?}");
    }
    if let Ok(reply) = StreamReply::decode(input) {
        let again = content(STREAM_MESSAGE_MAX, |out| reply.encode(out))?;
        ensure!(StreamReply::decode(&again)? == reply, "{reply:?}");
        let text = match &reply {
            StreamReply::Accepted { dialed } => dialed,
            StreamReply::Refused(refusal) => &refusal.detail,
        };
        ensure!(!text.chars().any(char::is_control), "{text:?} forges lines");
    }
    Ok(())
}

/// Framed, as they arrive alone on a stream of their own.
pub(super) fn cuts() -> Result<Vec<Vec<u8>>> {
    Ok(frames(&golden::cut_captures()))
}

pub(super) fn check_cut(input: &[u8]) -> Result<()> {
    let mut framed = BytesMut::from(input);
    let Ok(Some(content)) = frame::take(&mut framed, CUT_MESSAGE_MAX) else {
        return Ok(());
    };
    let Ok(cut) = CutAnnouncement::decode(&content) else {
        return Ok(());
    };
    let mut again = BytesMut::new();
    cut.encode(&mut again)?;
    let content = frame::take(&mut again, CUT_MESSAGE_MAX)?.context("a whole frame")?;
    ensure!(CutAnnouncement::decode(&content)? == cut, "{cut:?}");
    Ok(())
}
