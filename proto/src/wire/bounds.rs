//! S05: tests every number on the wire at the bounds of every integer type, in every message.

use bytes::BytesMut;

use super::control::{ControlMessage, Message as _};
use super::cut::CutAnnouncement;
use super::enroll::{EnrollReply, EnrollRequest};
use super::frame::encode_length_prefix;
use super::header::{StreamHeader, StreamReply};

/// Returns the numbers next to the bounds of varints and of integer types.
fn bounds() -> impl Iterator<Item = u64> {
    let powers = [7, 8, 14, 15, 16, 31, 32, 63].map(|bits| 1_u64 << bits);
    let near = |power: u64| (power - 2)..=(power + 1);
    let numbers = powers.into_iter().flat_map(near);
    numbers.chain([0, 1, u64::MAX - 1, u64::MAX])
}

/// Number of field numbers to try: more than any message has.
const FIELDS: u64 = 24;

const VARINT: u64 = 0;
const BYTES: u64 = 2;

/// Returns the key of a field and the number that follows it.
fn number(field: u64, kind: u64, value: u64) -> BytesMut {
    let mut out = BytesMut::new();
    encode_length_prefix(field << 3 | kind, &mut out);
    encode_length_prefix(value, &mut out);
    out
}

/// Decodes a message as every type. A decoded value must also be usable: formatted, and encoded
/// again.
fn decode_all(message: &[u8]) -> usize {
    let header = StreamHeader::decode(message).map(|decoded| format!("{decoded:?}"));
    let reply = StreamReply::decode(message).map(|decoded| format!("{decoded:?}"));
    let control = ControlMessage::decode(message).map(|decoded| {
        let _too_long = decoded.encode(&mut BytesMut::new());
        format!("{decoded:?}")
    });
    let request = EnrollRequest::decode(message).map(|_taken| String::new());
    let answer = EnrollReply::decode(message).map(|_taken| String::new());
    let cut = CutAnnouncement::decode(message).map(|decoded| {
        decoded.encode(&mut BytesMut::new()).unwrap();
        format!("{decoded:?}")
    });
    let outputs = [header, reply, control, request, answer, cut];
    outputs.iter().flatten().count()
}

#[test]
fn s05_numbers_at_their_bounds_are_taken_or_refused_without_harm() {
    let mut decoded = 0;
    for value in bounds() {
        for field in 1..=FIELDS {
            let flat = number(field, VARINT, value);
            decoded += decode_all(&flat);
            for outer in 1..=FIELDS {
                let mut nested = number(outer, BYTES, flat.len() as u64);
                nested.extend_from_slice(&flat);
                decoded += decode_all(&nested);
            }
        }
    }
    assert!(decoded > 1000, "{decoded} were taken at all");
}

#[test]
fn s05_lengths_at_their_bounds_reserve_nothing_and_are_refused() {
    for value in bounds() {
        for field in 1..=FIELDS {
            let mut message = number(field, BYTES, value);
            message.extend_from_slice(&[0x61; 64]);
            // Field 0 and the bytes after it are invalid for every decoder, unless the length
            // includes them.
            decode_all(&message);
        }
    }
}
