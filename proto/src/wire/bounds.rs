//! S05: tests every number on the wire at the bounds of every integer type, in every message.

use super::control::ControlMessage;
use super::enroll::{EnrollReply, EnrollRequest};
use super::header::{StreamHeader, StreamReply};

const BOUNDS: [u64; 22] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x3fff,
    0x4000,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
    0x1_0000_0000,
    0x1_0000_0001,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_fffe,
    0xffff_ffff_ffff_ffff,
];

/// Number of field numbers to try: more than any message has.
const FIELDS: u64 = 24;

const VARINT: u64 = 0;
const BYTES: u64 = 2;

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(0x80 | (value & 0x7f) as u8);
        value >>= 7;
    }
    out.push((value & 0x7f) as u8);
}

fn key(field: u64, kind: u64, out: &mut Vec<u8>) {
    varint(field << 3 | kind, out);
}

/// Encodes a message with one number.
fn number(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    key(field, VARINT, &mut out);
    varint(value, &mut out);
    out
}

/// Decodes a message as every type. A decoded value must also be usable: formatted, and encoded
/// again.
fn decode_all(message: &[u8]) -> usize {
    let outputs = [
        StreamHeader::decode(message)
            .map(|decoded| format!("{decoded:?}"))
            .ok(),
        StreamReply::decode(message)
            .map(|decoded| format!("{decoded:?}"))
            .ok(),
        ControlMessage::decode(message)
            .map(|decoded| {
                let mut again = bytes::BytesMut::new();
                let _too_long = decoded.encode(&mut again);
                format!("{decoded:?}")
            })
            .ok(),
        EnrollRequest::decode(message)
            .map(|_taken| String::new())
            .ok(),
        EnrollReply::decode(message)
            .map(|_taken| String::new())
            .ok(),
    ];
    outputs.iter().flatten().count()
}

#[test]
fn s05_numbers_at_their_bounds_are_taken_or_refused_without_harm() {
    let mut decoded = 0;
    for value in BOUNDS {
        for field in 1..=FIELDS {
            let flat = number(field, value);
            decoded += decode_all(&flat);
            for outer in 1..=FIELDS {
                let mut nested = Vec::new();
                key(outer, BYTES, &mut nested);
                varint(flat.len() as u64, &mut nested);
                nested.extend_from_slice(&flat);
                decoded += decode_all(&nested);
            }
        }
    }
    assert!(decoded > 1000, "{decoded} were taken at all");
}

#[test]
fn s05_lengths_at_their_bounds_reserve_nothing_and_are_refused() {
    for value in BOUNDS {
        for field in 1..=FIELDS {
            let mut message = Vec::new();
            key(field, BYTES, &mut message);
            varint(value, &mut message);
            message.extend_from_slice(&[0x61; 64]);
            // Field 0 and the bytes after it are invalid for every decoder, unless the length
            // includes them.
            decode_all(&message);
        }
    }
}
